# SPDX-License-Identifier: Apache-2.0
"""Twin-Flow measured: step time and memory against the ratio, what "auto" chooses, and the largest models that train.

All on randomly initialised Llama shapes: bf16 weights, activation checkpointing, AdamW, clipping on (with a norm that
no step exceeds). Each part runs in a process of its own, and `--save` writes a dated file with a table and a plot.
Needs CUDA and transformers; DeepSpeed where it is installed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import offload
import torch
from offload import NEVER, SIZES, Watch, activation_bytes, build, gpu_alone, synchronize, timed_steps, tokens

from twinflow import native
from twinflow.bench.machine import read_machine
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.planner.cases import Setting, case_at
from twinflow.planner.costs import PROCESS_BYTES, Memory, Run
from twinflow.planner.machines import Rates
from twinflow.planner.models import from_hf
from twinflow.planner.probe import load_or_measure

SIZES |= {"13b": (5120, 40, 13824, 40), "16b": (5120, 50, 13824, 40), "28b": (6656, 52, 17920, 52)}
RATIOS = (1.0, 0.75, 0.5, 0.25, 0.0)


def facts_of(model: Any, batches: tuple[int, ...]) -> dict[str, Any]:
    """Forward and backward alone, what they need, and the machine's rates."""
    facts: dict[str, Any] = {f"gpu_batch{b}": gpu_alone(model, b, 4) for b in batches}
    facts["activations_gb"] = {f"batch{b}": activation_bytes(model, b) / 1e9 for b in batches}
    native.set_threads(max(1, (os.cpu_count() or 1) - 1))  # as TwinOptimizer takes them
    facts["rates"] = asdict(load_or_measure(torch.device(offload.DEVICE)))
    return facts


def measure(model: Any, batch: int, ratio: float | str, steps: int = 6, **options: Any) -> dict[str, Any]:
    """One optimizer, some steps."""
    gc.collect()
    if offload.CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    numel = sum(p.numel() for p in model.parameters())
    watch, start = Watch(), time.perf_counter()
    optimizer = TwinOptimizer(model, lr=1e-6, early=True, ratio=ratio, max_grad_norm=NEVER, **options)
    init_s = time.perf_counter() - start
    start = time.perf_counter()
    if ratio == "auto":
        settle(model, optimizer, batch)
        if offload.CUDA:
            torch.cuda.reset_peak_memory_stats()
        watch.least = offload.free_bytes()  # what was there before it chose is not what a long run takes
    settled_s = time.perf_counter() - start
    step_s = timed_steps(model, optimizer, batch, 2, steps)
    optimizer.wait()
    states, metrics = options.get("states", "fp32"), optimizer.metrics()
    streamed = options["tuning"].streamed if "tuning" in options else 0.0
    name = f"ratio {ratio}, {states} state" + (f", {streamed:.0%} of the buckets streamed" if streamed else "")
    row = {"name": name, "ratio": ratio, "states": states, "batch": batch, "params": numel}
    row |= {"host_share": optimizer.host_share, "step_s": step_s, "init_s": init_s, "settled_s": settled_s}
    row |= {"host_gb": watch.used() / 1e9, "shadow_gb": metrics["shadow_bytes"] / 1e9}
    row["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9 if offload.CUDA else 0.0
    watch.stop()
    optimizer.close()
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def settle(model: Any, optimizer: TwinOptimizer, batch: int) -> None:
    """Steps until "auto" has chosen, without a barrier between them: it judges by steps as a training run has them."""
    x = tokens(model, batch)
    while not optimizer.is_placed:
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()


def master_row(model: Any, batch: int, steps: int = 6) -> dict[str, Any]:
    """No offload: an fp32 master and fp32 state on the GPU, torch's fused AdamW."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=True)
    x = tokens(model, batch)

    def step() -> None:
        model(input_ids=x, labels=x).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, NEVER)
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([p.detach() for p in params], [m.detach() for m in masters])

    for _ in range(2):
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    row = {"name": "no offload, fp32 master (torch)", "batch": batch, "step_s": (time.perf_counter() - start) / steps}
    row |= {"gpu_gb": torch.cuda.max_memory_allocated() / 1e9, "host_gb": 0.0}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def sweep() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """3.43 billion parameters: every ratio, and what "auto" makes of it."""
    model = build("3b" if offload.CUDA else "tiny")
    facts = facts_of(model, (4,))
    rows = [master_row(model, 4)] if offload.CUDA else []
    rows += [measure(model, 4, ratio) for ratio in RATIOS]
    rows += [measure(model, 4, "auto"), measure(model, 4, 1.0, tuning=Tuning(streamed=0.4))]
    return facts, rows


def small() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same model with few tokens a step, beside DeepSpeed's full offload."""
    rows = [deepspeed_row()] if offload.CUDA else []
    model = build("3b" if offload.CUDA else "tiny")
    facts = facts_of(model, (1,))
    rows += [master_row(model, 1)] if offload.CUDA else []
    return facts, [*rows, measure(model, 1, "auto"), measure(model, 1, 0.0)]


def deepspeed_row() -> dict[str, Any]:
    command = [sys.executable, offload.__file__, "--size", "3b", "--deepspeed", "1", "1.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        return {"name": "DeepSpeed", "error": done.stderr[-300:]}
    row: dict[str, Any] = json.loads(found[0].removeprefix("ROW "))
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def automatic(size: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model = build(size)
    facts = facts_of(model, (4,))
    return facts, [measure(model, 4, "auto", steps=4)]


def largest(size: str, states: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ten steps of a model that is as large as this machine takes, after "auto" has chosen; its loss must fall."""
    gc.collect()
    watch, model = Watch(), build(size)
    x = tokens(model, 1)
    optimizer = TwinOptimizer(model, lr=2e-5, early=True, ratio="auto", states=states)
    losses, start, num_timed = [], 0.0, 0
    while num_timed < 10:  # after the placement was chosen
        if optimizer.is_placed:
            if not num_timed:
                synchronize()
                start = time.perf_counter()
            num_timed += 1
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize()
    row = {"name": f"{size}, {states} state, auto, 1 x {offload.TOKENS}", "states": states, "batch": 1, "ratio": "auto"}
    row |= {"params": sum(p.numel() for p in model.parameters()), "step_s": (time.perf_counter() - start) / 10}
    row |= {"first_loss": losses[0].item(), "last_loss": losses[-1].item(), "host_share": optimizer.host_share}
    row |= {"host_gb": watch.used() / 1e9, "gpu_gb": torch.cuda.max_memory_allocated() / 1e9}
    os.write(1, f"ROWS {json.dumps([{}, [row]])}\n".encode())
    os._exit(0)  # giving a hundred gigabytes back in order takes longer than the steps


PARTS = {
    "sweep": sweep,
    "small": small,
    "7b": lambda: automatic("7b"),
    "13b": lambda: automatic("13b"),
    "16b": lambda: largest("16b", "fp32"),
    "28b": lambda: largest("28b", "int8"),
}


def run_part(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One part in a process of its own."""
    command = [sys.executable, __file__, "--part", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # errors and progress are seen
    found = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    if not found:
        return {}, [{"name": name, "error": f"exit code {done.returncode}"}]
    facts, rows = json.loads(found[0].removeprefix("ROWS "))
    return facts, rows


def predicted(size: str, row: dict[str, Any], rates: dict[str, Any]) -> dict[str, float]:
    """What the planner says of a row, from the shape and the machine's rates alone."""
    hidden, layers, inner, heads = SIZES[size]
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    shape = dict(zip(names, (hidden, layers, inner, heads), strict=True))
    cost = from_hf({"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048, **shape})
    clips = not row["name"].startswith(size)
    run = Run(cost, row["batch"], offload.TOKENS, states=row["states"], clips=clips)
    machine = read_machine()
    memory = Memory(torch.cuda.get_device_properties(0).total_memory, machine.memory_bytes)
    case = case_at("", run, Setting(Rates(**rates), memory), row["host_share"])
    host = case.used.host_total - PROCESS_BYTES
    return {"said_s": case.prediction.step_s, "said_gpu_gb": case.used.gpu_total / 1e9, "said_host_gb": host / 1e9}


def page(results: dict[str, Any], date: str) -> str:
    machine = read_machine()
    gpu = torch.cuda.get_device_name() if offload.CUDA else "no GPU"
    lines = [f"# Twin-Flow: ratio, automatic placement, largest models, {date}", ""]
    lines += [f"- {gpu}; {machine.cpu}, {machine.usable_cores} cores, {machine.memory_bytes / 2**30:.0f} GiB"]
    lines += [f"- torch {torch.__version__}, native kernels {native.isa()}", ""]
    keys = (
        "params",
        "batch",
        "host_share",
        "step_s",
        "x_gpu",
        "x_master",
        "deepspeed_x",
        "gpu_gb",
        "host_gb",
        "shadow_gb",
    )
    keys += ("said_s", "said_gpu_gb", "said_host_gb", "init_s", "settled_s", "first_loss", "last_loss")
    lines += [f"| part | what | {' | '.join(keys)} |", "|" + "---|" * (len(keys) + 2)]
    for part, (facts, rows) in results.items():
        masters = {row["batch"]: row["step_s"] for row in rows if row["name"].startswith("no offload")}
        rivals = {row["batch"]: row["step_s"] for row in rows if row["name"].startswith("DeepSpeed ZeRO")}
        for row in rows:
            if "error" in row:
                lines.append(f"| {part} | {row['name']} failed: {row['error'][-200:]!r} |" + " |" * len(keys))
                continue
            alone = facts.get(f"gpu_batch{row['batch']}")
            row["x_gpu"] = row["step_s"] / (alone["forward"] + alone["backward"]) if alone else None
            row["x_master"] = row["step_s"] / masters[row["batch"]] if row["batch"] in masters else None
            if "host_share" in row and "rates" in facts and "streamed" not in row["name"]:
                row |= predicted("3b" if part in ("sweep", "small") else part, row, facts["rates"])
            row["deepspeed_x"] = rivals[row["batch"]] / row["step_s"] if row["batch"] in rivals else None
            cells = [f"{row[key]:.4g}" if row.get(key) is not None else "" for key in keys]
            lines.append(f"| {part} | {row['name']} | " + " | ".join(cells) + " |")
    lines += ["", "x_gpu: of forward and backward alone; x_master: of the same model without offload, fp32 master;"]
    lines += ["deepspeed_x: how many of these steps fit into one of DeepSpeed's, with all state on the host;"]
    lines += ["said_...: what `twinflow plan` predicts from the shape, the ratio and the machine's rates."]
    for part, (facts, _) in results.items():
        shown = {name: value for name, value in facts.items() if name != "rates"}
        lines += [f"- {part}: {json.dumps(shown)}"] if shown else []
    return "\n".join([*lines, "", "```json", json.dumps({"date": date, "results": results}), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="sweep,small,7b,13b,16b,28b", help="parts to run")
    given = parser.parse_args()
    if given.part:
        logging.basicConfig(level=logging.INFO)  # what "auto" says
        print("ROWS " + json.dumps(PARTS[given.part]()), flush=True)
        os._exit(0)
    results = {name: run_part(name) for name in given.only.split(",")}
    date = datetime.date.today().isoformat()
    text = page(results, date)
    print(text)
    if given.save:
        path = Path(__file__).parent / "results" / f"{date}-twin-flow.md"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
