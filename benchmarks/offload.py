# SPDX-License-Identifier: Apache-2.0
"""Training steps of a Llama shape with TwinOptimizer, beside forward and backward alone and beside DeepSpeed.

All on the same randomly initialised model: bf16 weights, activation checkpointing, AdamW. Prints the machine, a table
with the ideal each figure is held against, and one JSON line; `--save` writes a dated file in benchmarks/results. Needs
transformers; on a machine without CUDA `--size tiny` shows that it works, nothing more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from twinflow import native
from twinflow.bench.machine import read_machine
from twinflow.offload.clipping import Limits
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.trace import busy_s, overlap_s

SIZES = {"tiny": (256, 4, 688, 4), "1b": (2048, 16, 5504, 16), "3b": (3200, 26, 8640, 32), "7b": (4096, 32, 11008, 32)}
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOKENS = 2048 if CUDA else 64
_TRACED = 2  # steps
STUCK_S = 20.0  # a step that takes longer prints where it is
NEVER, ALWAYS = 1e3, 1e-3  # norms that are never and always exceeded


def build(size: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, inner, heads = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000 if CUDA else 512,
        max_position_embeddings=2048,
        use_cache=False,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def tokens(model: Any, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, TOKENS), generator=generator).to(DEVICE)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024


class Watch:
    """The least memory that was available while it looked."""

    def __init__(self) -> None:
        self.before = self.least = free_bytes()
        self._on = True
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while self._on:
            self.least = min(self.least, free_bytes())
            time.sleep(0.1)

    def used(self) -> int:
        """Bytes that went since it was made."""
        return self.before - self.least

    def stop(self) -> None:
        """Look no more."""
        self._on = False
        self._thread.join()


@contextlib.contextmanager
def told_if_stuck(state: Callable[[], str]) -> Iterator[None]:
    """While the code inside takes longer than STUCK_S, prints `state` once and the stacks of all threads repeatedly."""
    timer = threading.Timer(STUCK_S - 1.0, lambda: print(f"a step takes long: {state()}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(STUCK_S, repeat=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def state_of(optimizer: TwinOptimizer) -> str:
    """What the optimizer has done since it was built, for a line of progress."""
    runtime = optimizer.runtime
    done = runtime.executor.counters
    copied = f"{done.bytes_out / 1e9:.1f} GB of gradients and {done.bytes_back / 1e9:.1f} GB of weights copied"
    waited = f"host busy for {done.busy_s:.1f} s, forward waited for {runtime.waited_s:.1f} s"
    return f"{copied}, {waited}, {free_bytes() / 1e9:.0f} GB of host memory free"


def gpu_alone(model: Any, batch: int, steps: int = 5) -> dict[str, float]:
    """Forward and backward with no optimizer at all: the floor."""
    x, marks = tokens(model, batch), []
    for _ in range(steps + 2):
        moments = [now()]
        loss = model(input_ids=x, labels=x).loss
        moments.append(now())
        loss.backward()
        marks.append([*moments, now()])
        for param in model.parameters():
            param.grad = None
    synchronize()
    timed = [(seconds(a, b), seconds(b, c)) for a, b, c in marks[2:]]
    return {"forward": sum(t[0] for t in timed) / steps, "backward": sum(t[1] for t in timed) / steps}


def activation_bytes(model: Any, batch: int) -> int:
    """What forward and backward need on the GPU beside the weights, every gradient dropped as soon as it is there."""
    if not CUDA:
        return 0
    handles = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, x = torch.cuda.memory_allocated(), tokens(model, batch)
    model(input_ids=x, labels=x).loss.backward()
    synchronize()
    for handle in handles:
        handle.remove()
    return torch.cuda.max_memory_allocated() - before


def now() -> Any:
    """A moment: on the GPU an event, so that nothing has to wait for it."""
    if not CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3 if CUDA else end - start


def host_rate(model: Any, states: str) -> float:
    """Parameters a second of the update alone, in and out of bf16, nothing else running."""
    from twinflow.rules import RULES
    from twinflow.rules.segment import Segment, new_store

    rule, numel = RULES["adamw"], (1 << 26) if CUDA else (1 << 20)
    store = new_store(rule, states, torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16), split=True)
    grad = torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    times = []
    for step in range(1, 6):
        start = time.perf_counter()
        native.update([Segment(rule, rule.hyper(options, step), grad, store)])
        times.append(time.perf_counter() - start)
    return numel / min(times)


def timed_steps(model: Any, optimizer: TwinOptimizer, batch: int, warmup: int, steps: int, parts: int = 1) -> float:
    """Seconds a step, over one window: one step overlaps the next."""
    x = tokens(model, batch)

    def step() -> None:
        for _ in range(parts):
            (model(input_ids=x, labels=x).loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(warmup):
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps


def traced(model: Any, optimizer: TwinOptimizer, batch: int, parts: int) -> dict[str, float]:
    """Where the host's time goes, from the trace of a few steps."""
    optimizer.trace.start()
    timed_steps(model, optimizer, batch, 0, _TRACED, parts)
    optimizer.wait()
    optimizer.trace.stop()
    spans = optimizer.trace.spans()
    host = [span for span in spans if span.name in ("update", "ahead")]
    model_work = [span for span in spans if span.track == "compute" and span.name in ("forward", "backward")]
    return {"host_busy_s": busy_s(host) / _TRACED, "host_inside": overlap_s(host, model_work) / max(busy_s(host), 1e-9)}


def busy_loader() -> Iterator[Any]:
    """A DataLoader whose 8 workers never rest."""

    class Busy(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, index: int) -> int:
            return sum(i * i for i in range(20000))

    return iter(torch.utils.data.DataLoader(Busy(), batch_size=8, num_workers=8, prefetch_factor=64))


def measure(model: Any, name: str, rows: list[dict[str, Any]], what: list[str], **options: Any) -> None:
    """Build one optimizer with all state on the host, run what is asked for with it, append rows."""
    is_traced = options.pop("is_traced", True)
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    numel, parts = sum(p.numel() for p in model.parameters()), options.get("accumulation_steps", 1)
    watch, start = Watch(), time.perf_counter()
    optimizer = TwinOptimizer(model, lr=1e-6, ratio=1.0, early=True, **options)
    init_s = time.perf_counter() - start
    for kind in what:
        row: dict[str, Any] = {"name": name, "batch": 4, "params": numel}
        if kind == "clipped":
            settings = optimizer.runtime.settings
            optimizer.runtime.change_settings(dataclasses.replace(settings, limits=Limits(ALWAYS, True)))
        if kind.startswith("batch"):
            row["batch"] = int(kind.removeprefix("batch"))
        loader = busy_loader() if kind == "loader" else None
        if loader is not None:
            next(loader)
        before = dict(optimizer.metrics())
        warmup, steps = 2, 3 if parts > 1 or row["batch"] > 4 else 5
        row["step_s"] = timed_steps(model, optimizer, row["batch"], warmup, steps, parts)
        del loader
        optimizer.wait()
        after = optimizer.metrics()
        moved = [(after[k] - before[k]) / (warmup + steps) / numel for k in ("bytes_out", "bytes_back")]
        row |= {"kind": kind, "init_s": init_s, "bytes_out": moved[0], "bytes_back": moved[1]}
        row |= {k: after[k] for k in ("gate_speculated", "gate_dropped", "gate_held")}
        if kind == "plain" and is_traced:
            row |= traced(model, optimizer, row["batch"], parts)
        row["shadow_gb"] = after["shadow_bytes"] / 1e9
        row["host_gb"] = watch.used() / 1e9
        row["host_bytes_a_param"] = (watch.used() - after["shadow_bytes"]) / numel
        row["is_clipping"] = "max_grad_norm" in options
        row["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    watch.stop()
    optimizer.close()


def run_sizes(size: str, rows: list[dict[str, Any]], is_short: bool) -> dict[str, Any]:
    """Everything with one model in memory; `is_short`: what clipping and accumulation cost, and ways to pay less."""
    model = build(size)
    batches = (4, 16, 1) if size != "7b" else (4,)
    facts: dict[str, Any] = {f"gpu_batch{b}": gpu_alone(model, b, 4) for b in batches}
    facts["activations_gb"] = {f"batch{b}": activation_bytes(model, b) / 1e9 for b in batches}
    if size == "7b":
        measure(model, "fp32, no clipping", rows, ["plain"], is_traced=False)
        return facts
    facts["host_rate"] = {states: host_rate(model, states) for states in ("fp32", "bf16", "int8")}
    measure(model, "fp32, no clipping", rows, ["plain"])
    clipping = {"max_grad_norm": NEVER}
    if is_short:
        measure(model, "fp32, clipping on", rows, ["plain", "batch16", "clipped"], **clipping)
        facts["gpu_batch16_again"] = gpu_alone(model, 16, 4)  # a GPU that has been warm for a while
        measure(model, "fp32, held on the host", rows, ["clipped"], tuning=Tuning(hold="host"), **clipping)
        measure(model, "fp32, 12 slots", rows, ["clipped"], tuning=Tuning(num_slots=12), **clipping)
        measure(model, "fp32, 4 micro-batches", rows, ["plain"], accumulation_steps=4)
        measure(model, "fp32, 4 micro-batches, delayed", rows, ["plain"], accumulation_steps=4, delayed_update=True)
        return facts
    measure(model, "fp32, clipping on", rows, ["plain", "loader", "batch16", "batch1", "clipped"], **clipping)
    measure(model, "bf16, clipping on", rows, ["plain"], states="bf16", **clipping)
    measure(model, "int8, clipping on", rows, ["plain"], states="int8", **clipping)
    measure(model, "fp32, 4 micro-batches", rows, ["plain"], accumulation_steps=4)
    measure(model, "fp32, 4 micro-batches, delayed", rows, ["plain"], accumulation_steps=4, delayed_update=True)
    return facts


def deepspeed_row(size: str, batch: int, clip: float) -> None:
    """One system in a process of its own: DeepSpeed's ZeRO-2 with the optimizer on the host."""
    import deepspeed

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    watch, model = Watch(), build(size)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = tokens(model, batch)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()
        synchronize()
        times.append(time.perf_counter() - start)
    row = {"name": f"DeepSpeed ZeRO-2 offload, clip {clip}", "kind": "plain", "batch": batch, "step_s": min(times[2:])}
    row |= {"host_gb": watch.used() / 1e9, "gpu_gb": torch.cuda.max_memory_allocated() / 1e9}
    print("ROW " + json.dumps(row), flush=True)
    os._exit(0)


def rivals(size: str, rows: list[dict[str, Any]]) -> None:
    for batch, clip in ((4, 1.0), (1, 1.0)):
        command = [sys.executable, __file__, "--size", size, "--deepspeed", str(batch), str(clip)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
        if found:
            rows.append(json.loads(found[0].removeprefix("ROW ")))
        else:
            print(f"DeepSpeed did not run: {(done.stderr or '?').strip().splitlines()[-1]}", file=sys.stderr)


def bound(row: dict[str, Any], facts: dict[str, Any]) -> float | None:
    """What a step of this kind should cost at most, from the parts measured beside it."""
    gpu = facts.get(f"gpu_batch{row['batch']}")
    if gpu is None or "params" not in row or "host_rate" not in facts:
        return None
    forward, backward = gpu["forward"], gpu["backward"]
    t_gpu, t_host = forward + backward, row["params"] / facts["host_rate"][row["name"].split(",")[0]]
    if "delayed" in row["name"]:
        return max(4 * t_gpu, t_host)
    if "micro" in row["name"]:
        return 4 * t_gpu + max(0.0, t_host - t_gpu)
    if row["kind"] == "clipped":
        return backward + max(forward, t_host)
    return max(t_gpu, t_host)


def gpu_bound(row: dict[str, Any], facts: dict[str, Any]) -> float | None:
    """GB that a step may need on the GPU: weights, gradients where they wait for the norm, activations, 2 GB."""
    if "params" not in row or "activations_gb" not in facts:
        return None
    held = 2 if row.get("is_clipping") else 0
    sums = 4 if "micro" in row["name"] else 0
    return row["params"] * (2 + held + sums) / 1e9 + facts["activations_gb"][f"batch{row['batch']}"] + 2


def page(rows: list[dict[str, Any]], facts: dict[str, Any], size: str, date: str) -> str:
    """The result as Markdown, one JSON line last."""
    machine = read_machine()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# Offloaded training steps, {size}, {date}", ""]
    lines += [f"- {gpu}; {machine.cpu}, {machine.usable_cores} cores, {machine.memory_bytes / 2**30:.0f} GiB"]
    lines += [f"- torch {torch.__version__}, native kernels {native.isa()}, {native.get_threads()} host threads"]
    for name, value in facts.items():
        lines.append(f"- {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in value.items()))
    headers = [
        "what",
        "case",
        "batch",
        "s/step",
        "ideal",
        "ratio",
        "host GB",
        "host B/param",
        "speculative stores GB",
        "GPU GB",
        "GPU bound",
    ]
    headers += ["GPU bound", "out B", "back B", "inside", "host busy s", "ahead/dropped/held"]
    lines += ["", f"| {' | '.join(headers)} |", "|" + "---|" * len(headers)]
    for row in rows:
        ideal = bound(row, facts)
        gates = "/".join(str(int(row.get(f"gate_{k}", 0))) for k in ("speculated", "dropped", "held"))
        cells = [row["name"], row["kind"], row["batch"], f"{row['step_s']:.3f}"]
        cells += [f"{ideal:.3f}" if ideal else "", f"{row['step_s'] / ideal:.2f}" if ideal else ""]
        limit = gpu_bound(row, facts)
        row |= {"gpu_bound_gb": limit} if limit is not None else {}
        memory = ("host_gb", "host_bytes_a_param", "shadow_gb", "gpu_gb", "gpu_bound_gb")
        for key in (*memory, "bytes_out", "bytes_back", "host_inside", "host_busy_s"):
            cells.append(f"{row[key]:.2f}" if key in row else "")
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, gates]) + " |")
    lines += ["", "```json", json.dumps({"size": size, "date": date, "facts": facts, "rows": rows}), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--short", action="store_true", help="only clipping and accumulation")
    parser.add_argument("--rivals", action="store_true", help="DeepSpeed beside it, where it is installed")
    parser.add_argument("--deepspeed", nargs=2, metavar=("BATCH", "CLIP"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.deepspeed:
        deepspeed_row(given.size, int(given.deepspeed[0]), float(given.deepspeed[1]))
    rows: list[dict[str, Any]] = []
    facts = run_sizes(given.size, rows, given.short)
    gc.collect()
    if given.rivals:
        rivals(given.size, rows)
    today = datetime.date.today().isoformat()
    text = page(rows, facts, given.size, today)
    print(text)
    if given.save:
        name = f"{today}-offload-{given.size}{'-short' if given.short else ''}.md"
        path = Path(__file__).parent / "results" / name
        path.write_text(text, encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
