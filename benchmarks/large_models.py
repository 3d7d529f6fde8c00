# SPDX-License-Identifier: Apache-2.0
"""How large a GPT-2 trains on one card, and how fast: `twinflow train` beside plain PyTorch under the same memory cap.

Three parts, each in a process of its own: the largest GPT-2 that plain mixed-precision PyTorch trains under the cap;
the 10 and 13 billion parameter presets under the same cap, 20 steps each; the 10 billion preset with micro-batches
accumulated to a batch of 520, all state on the host and half of it, beside its forward and backward alone. A fourth
part trains a model that plain PyTorch can train too, with 512 sequences a step, in both. Prints a table and one JSON
line; needs CUDA.

    python benchmarks/large_models.py --only train_10b,train_14b_float8 --budget 300
    python benchmarks/large_models.py --only train_10b --sequences 96 --budget 150

`train_10b` and `train_14b_float8` are `twinflow train` on the whole card: compiled blocks, as little recomputation as
fits, and in the second one float8 and int8 state. `tflops` is the mean of what `twinflow train` reports, without the
first step, in which blocks are compiled. A step of 512 sequences takes about a minute. `--sequences` makes it shorter.
After `--budget` seconds the run is stopped, and the steps until then count.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from twinflow.bench.machine import read_machine
from twinflow.models.gpt import GPT, PRESETS, GPTConfig, count_params, flops_per_token
from twinflow.monitor.metrics import StepRecord, read_metrics

CAP = "32GB"
CAP_BYTES = 32 * 10**9
STEPS = 20


def plain_fits(config: GPTConfig, batch: int, is_chunked: bool) -> bool:
    """Whether plain PyTorch trains it: fp32 weights, autocast to bf16, AdamW as torch has it, two steps.

    `is_chunked`: with the loss of our model, which never holds all logits; else with torch's own.
    """
    model = optimizer = loss = None
    try:
        with torch.device("cuda"):
            model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randint(0, config.vocab_size, (batch, config.context), device="cuda")
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                if is_chunked:
                    loss = model(x, x).loss
                else:
                    loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        del model, optimizer, loss
        gc.collect()  # an exception inside a checkpointed block keeps its model until then
        torch.cuda.empty_cache()


def largest_plain(batch: int, is_chunked: bool) -> dict[str, Any]:
    """The deepest GPT-2 of width 1600 that fits, by halving the interval."""
    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.get_device_properties(0).total_memory)
    base = replace(PRESETS["gpt2-1.5b"], recompute="full")
    low, high = 8, 96
    while high - low > 1:
        middle = (low + high) // 2
        if plain_fits(replace(base, num_layers=middle), batch, is_chunked):
            low = middle
        else:
            high = middle
    config = replace(base, num_layers=low)
    how = ", our chunked loss" if is_chunked else ""
    return {"name": f"plain PyTorch{how}, mixed precision, {CAP}", "params": count_params(config), "layers": low}


def twin_row(preset: str, shape: GPTConfig, *options: str) -> dict[str, Any]:
    """`twinflow train` with all state on the host, and with `options` that make this shape."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        # Checkpoints of these sizes take longer than the steps: none is written.
        command = [sys.executable, "-m", "twinflow", "train", "--gpu-memory", CAP, "--ratio", "1", *options]
        command += ["--steps", str(STEPS), "--valid-every", "0", "--no-save", "--out", str(out)]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr, flush=True)
        found = read_metrics(out / "metrics.jsonl") if (out / "metrics.jsonl").exists() else []
        records = [r for r in found if isinstance(r, StepRecord)]
    if done.returncode or len(records) < 4:
        return {"name": preset, "error": (done.stdout + done.stderr)[-400:]}
    steady = records[3:]
    step_s = sum(r.step_s for r in steady) / len(steady)
    return {
        "name": f"twinflow train --gpu-memory {CAP} --ratio 1 {' '.join(options)}",
        "params": count_params(shape),
        "steps": len(records),
        "first_loss": records[0].loss,
        "last_loss": sum(r.loss for r in records[-3:]) / 3,
        "step_s": step_s,
        "tokens_s": records[0].num_tokens / step_s,
        "tflops": flops_per_token(shape) * records[0].num_tokens / step_s / 1e12,
        "gpu_gb": max(r.gpu_bytes for r in records) / 1e9,
        "host_gb": max(r.host_bytes for r in records) / 1e9,
        "wall_s": time.perf_counter() - start,
    }


def accumulated(ratio: float = 1.0, batch: int = 520, micro: int = 10) -> dict[str, Any]:
    """One step of many micro-batches, beside forward and backward alone.

    As in a long run: the update of the step before is still under way when it starts, its own when it ends. Beside that
    the step with all of its own update waited for as well.
    """
    import twinflow
    from twinflow.offload.materialize import build

    shape = replace(PRESETS["gpt2-10b"], recompute="full")
    model = build(lambda: GPT(shape), "cuda", torch.bfloat16)
    x = torch.randint(0, shape.vocab_size, (micro, shape.context), device="cuda")
    handles = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    alone = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(x, x).loss.backward()
        torch.cuda.synchronize()
        alone.append(time.perf_counter() - start)
    for handle in handles:
        handle.remove()
    offload = {"device": "cpu", "states": "bf16", "ratio": ratio}
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": batch // micro,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
    }
    engine, *_ = twinflow.initialize(model=model, config=config)

    def step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(x, x).loss)
            engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    step()
    seconds = step()
    start = time.perf_counter()
    engine.optimizer.wait()
    torch.cuda.synchronize()
    tail = time.perf_counter() - start
    tokens, alone_s = batch * shape.context, min(alone)
    row = {
        "name": f"gpt2-10b, batch {batch} of micro-batches of {micro}, ratio {ratio:g}",
        "params": count_params(shape),
        "step_s": seconds,
        "tokens_s": tokens / seconds,
        "tflops": flops_per_token(shape) * tokens / seconds / 1e12,
        "alone_tokens_s": micro * shape.context / alone_s,
        "share": tokens / seconds * alone_s / (micro * shape.context),
        "share_with_tail": tokens / (seconds + tail) * alone_s / (micro * shape.context),
        "gpu_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    engine.destroy()
    return row


def batch_512(is_plain: bool, batch: int = 512, micro: int = 16, windows: int = 2) -> dict[str, Any]:
    """A model that plain PyTorch can train too, with 512 sequences a step, as in figure 8 of the ZeRO-Offload talk.

    Plain PyTorch: fp32 weights, autocast to bf16, fused AdamW. Twinflow: bf16 weights, all state in fp32 on the host.
    """
    import twinflow
    from twinflow.offload.materialize import build

    shape = replace(PRESETS["gpt2-1.5b"], recompute="full")
    count = batch // micro
    x = torch.randint(0, shape.vocab_size, (micro, shape.context), device="cuda")
    if is_plain:
        model = build(lambda: GPT(shape), "cuda", torch.float32)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        model = build(lambda: GPT(shape), "cuda", torch.bfloat16)
        optimizer = twinflow.TwinOptimizer(model, lr=1e-5, ratio=1.0, accumulation_steps=count)

    def step(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_plain):
                loss = model(x, x).loss
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    step(count)
    times = [step(count) for _ in range(windows)]
    seconds, tokens = min(times), batch * shape.context
    return {
        "name": f"gpt2-1.5b, batch {batch}, {'plain PyTorch' if is_plain else 'twinflow, all state on the host'}",
        "params": count_params(shape),
        "step_s": seconds,
        "times": times,
        "tokens_s": tokens / seconds,
        "tflops": flops_per_token(shape) * tokens / seconds / 1e12,
        "gpu_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


# `twinflow train` on the whole card: the shape, and options that make it. Micro-batches of 8, so that all have one size
# and blocks are compiled once. Without clipping, the GPU has no second copy of the gradients beside their sums, and the
# larger model need not recompute whole blocks. With 512 sequences a step, the update hides behind a few micro-batches:
# all state is on the host, and no step is spent on a choice of the ratio.
TRAINED = {
    "train_10b": (PRESETS["gpt2-10b"], ("--preset", "gpt2-10b", "--compile", "--ratio", "1")),
    "train_14b_float8": (
        replace(PRESETS["gpt2-13b"], num_layers=69),
        (
            *("--num-layers", "69", "--hidden-size", "4096", "--num-attention-heads", "32"),
            *("--float8", "--states", "int8", "--grad-clip", "0", "--ratio", "1"),
        ),
    ),
}
MICRO = 8
TRAINED_STEPS = 3


def trained_row(name: str, sequences: int, budget: float) -> dict[str, Any]:
    """`twinflow train` for `TRAINED_STEPS` steps, or for as many as the budget allows."""
    shape, options = TRAINED[name]
    given = [*options, "--batch-size", str(MICRO), "--accumulation", str(sequences // MICRO)]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        command = [sys.executable, "-m", "twinflow", "train", *given, "--steps", str(TRAINED_STEPS)]
        command += ["--valid-every", "0", "--no-save", "--out", str(out)]
        start = time.perf_counter()
        with log.open("w", encoding="utf-8") as to:
            run = subprocess.Popen(command, stdout=to, stderr=subprocess.STDOUT)
            try:
                run.wait(budget)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        print(text[-6000:], file=sys.stderr, flush=True)
        found = read_metrics(out / "metrics.jsonl") if (out / "metrics.jsonl").exists() else []
        records = [r for r in found if isinstance(r, StepRecord)]
    steady = records[1:]
    if not steady:
        return {"name": name, "error": f"{len(records)} steps in {budget:g} s: {text[-400:]}"}
    return {
        "name": f"twinflow train {' '.join(given)}",
        "params": count_params(shape),
        "steps": len(records),
        "first_loss": records[0].loss,
        "last_loss": records[-1].loss,
        "step_s": sum(r.step_s for r in steady) / len(steady),
        "tokens_s": sum(r.num_tokens for r in steady) / sum(r.step_s for r in steady),
        "tflops": sum(r.tflops for r in steady) / len(steady),
        "tflops_each": [r.tflops for r in steady],
        "header": [line.strip() for line in text.splitlines() if line.startswith(("  model", "  optimizer", "  GPU"))],
        "gpu_gb": max(r.gpu_bytes for r in records) / 1e9,
        "host_gb": max(r.host_bytes for r in records) / 1e9,
        "wall_s": time.perf_counter() - start,
    }


PARTS = {  # what runs in a process of its own
    "plain": lambda: largest_plain(4, is_chunked=False),
    "chunked": lambda: largest_plain(4, is_chunked=True),
    "accumulated": lambda: accumulated(1.0),
    "half": lambda: accumulated(0.5),
    "batch_512": lambda: batch_512(is_plain=False),
    "plain_512": lambda: batch_512(is_plain=True),
}


def part(name: str) -> dict[str, Any]:
    """One part in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--part", name], capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    print(done.stderr[-3000:], file=sys.stderr, flush=True)
    return json.loads(found[0].removeprefix("ROW ")) if found else {"name": name, "error": done.stderr[-300:]}


def table(rows: list[dict[str, Any]], date: str) -> str:
    machine = read_machine()
    lines = [f"# Large GPT-2 models on one card, {date}", ""]
    lines += [f"- {torch.cuda.get_device_name()}; {machine.cpu}, {machine.usable_cores} cores"]
    lines += [f"- {machine.memory_bytes / 2**30:.0f} GiB of host memory; torch {torch.__version__}", ""]
    keys = ("params", "steps", "first_loss", "last_loss", "step_s", "tokens_s", "tflops", "share", "share_with_tail")
    keys += ("gpu_gb", "host_gb")
    lines += [f"| what | {' | '.join(keys)} |", "|" + "---|" * (len(keys) + 1)]
    for row in rows:
        cells = [f"{row[key]:.4g}" if key in row else "" for key in keys]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    sizes = {row["name"]: row["params"] for row in rows if "params" in row and CAP in row["name"]}
    largest = max(sizes.values(), default=0)
    for name, size in sizes.items():
        if name.startswith("plain"):
            lines += ["", f"Largest model: {largest / size:.2f}x that of {name}."]
    lines += ["", "share: of the tokens a second of forward and backward alone. ZeRO-Offload's authors report 30 to 40"]
    lines += ["TFLOPS for the 10 billion parameter model on one V100."]
    return "\n".join([*lines, "", "```json", json.dumps({"date": date, "rows": rows}), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    usual = "plain,chunked,10b,13b,14b,accumulated,half,batch_512,plain_512"
    parser.add_argument("--only", default=",".join([usual, *TRAINED]), help="parts to run")
    parser.add_argument("--sequences", type=int, default=512, help="of a step of train_10b and train_14b_float8")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of each of these two")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    if given.part:
        print("ROW " + json.dumps(PARTS[given.part]()))
        return
    wanted, rows = given.only.split(","), []
    rows += [part(name) for name in ("plain", "chunked") if name in wanted]
    if "10b" in wanted:
        rows.append(twin_row("gpt2-10b", PRESETS["gpt2-10b"], "--preset", "gpt2-10b"))
    if "13b" in wanted:
        options = ("--preset", "gpt2-13b", "--states", "bf16", "--grad-clip", "0")
        rows.append(twin_row("gpt2-13b", PRESETS["gpt2-13b"], *options))
    if "14b" in wanted:  # the deepest that leaves room for one sequence
        shape = replace(PRESETS["gpt2-13b"], num_layers=69)
        options = ("--num-layers", "69", "--hidden-size", "4096", "--num-attention-heads", "32", "--batch-size", "1")
        rows.append(twin_row("69 layers", shape, *options, "--states", "bf16", "--grad-clip", "0"))
    rows += [part(name) for name in ("accumulated", "half", "batch_512", "plain_512") if name in wanted]
    rows += [trained_row(name, given.sequences, given.budget) for name in TRAINED if name in wanted]
    text = table(rows, datetime.date.today().isoformat())
    print(text)
    if given.save:
        path = given.save_to / f"{datetime.date.today().isoformat()}-large-models.md"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
