# SPDX-License-Identifier: Apache-2.0
"""What the path of many ranks costs where there is only one: without a process group, and with stages 2 and 3.

The same Llama shape for each way on one GPU, each with an optimizer of its own, in alternating windows of steps; half
of the state on the host. Prints the machine, a table and one JSON line; `--save` writes a dated file in
benchmarks/results.
Needs CUDA and transformers; on a machine without CUDA `--size tiny` shows that it works, nothing more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from offload import CUDA, NEVER, build, timed_steps

from twinflow.bench.machine import read_machine
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.zero import Zero, partition


def measure(size: str, stages: list[int], steps: int, windows: int) -> dict[str, Any]:
    """Seconds a step of every window, each way; what each stage costs over one process, and over the stage before."""
    tuning = Tuning(shadow_bytes=4 << 30)
    options: dict[str, Any] = {"lr": 1e-6, "early": True, "ratio": 0.5, "max_grad_norm": NEVER, "tuning": tuning}
    ways: dict[str, Any] = {"one process": None} | {f"stage {stage}": Zero(stage) for stage in stages}
    models = {name: build(size) for name in ways}
    for name, zero in ways.items():
        if zero is not None and zero.stage == 3:
            partition(models[name], zero)
    optimizers = {name: TwinOptimizer(models[name], zero=zero, **options) for name, zero in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for window in range(windows):
        for name in ways if window % 2 else reversed(ways):
            found[name].append(timed_steps(models[name], optimizers[name], 4, 2, steps))
    for optimizer in optimizers.values():
        optimizer.close()
    return {"windows": found, "s": {name: statistics.median(times) for name, times in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="3b" if CUDA else "tiny")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=20 if CUDA else 2, help="of a window")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if CUDA else "gloo", f"file://{folder}/ranks", rank=0, world_size=1)
        row = measure(given.size, given.stages, given.steps, given.windows)
        dist.destroy_process_group()
    machine, date = read_machine(), datetime.date.today().isoformat()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# The path of many ranks at a world size of one, {date}", ""]
    lines += [f"- {gpu}; {machine.cpu}, {machine.usable_cores} cores; torch {torch.__version__}"]
    lines += [f"- {given.size}, 4 sequences, half of the state on the host, clipping on; {given.windows} windows of"]
    lines += [f"  {given.steps} steps each way, in turn", ""]
    lines += ["| way | s/step | over one process |", "|---|---|---|"]
    alone = row["s"]["one process"]
    lines += [f"| {name} | {s:.4f} | {s / alone - 1.0:+.1%} |" for name, s in row["s"].items()] + [""]
    text = "\n".join([*lines, "```json", json.dumps({"date": date, "size": given.size, "rows": [row]}), "```", ""])
    print(text)
    if given.save:
        (Path(__file__).parent / "results" / f"{date}-zero.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
