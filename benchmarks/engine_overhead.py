# SPDX-License-Identifier: Apache-2.0
"""What the engine adds to TwinOptimizer in a plain loop, and what saving a checkpoint adds to host memory.

The model and tokens of benchmarks/offload.py. Both loops run over the same optimizer, in turn. Prints a table and one
JSON line; `--save` writes a dated file. On a machine without CUDA `--size tiny` shows that it works, nothing more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from offload import CUDA, SIZES, Watch, build, synchronize, tokens

import twinflow
from twinflow.bench.machine import read_machine

ROUNDS, STEPS = 3, 5


def config(batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1e3,
        "bf16": {"enabled": CUDA},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }


def rounds(engine: twinflow.Engine, x: torch.Tensor) -> dict[str, list[float]]:
    """Seconds a step of each loop, in turn."""
    optimizer, model = engine.optimizer, engine.module
    assert optimizer is not None

    def plain() -> None:
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def through_engine() -> None:
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()

    times: dict[str, list[float]] = {"plain": [], "engine": []}
    for name, step in [("plain", plain), ("engine", through_engine)] * (ROUNDS + 1):
        step()
        synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize()
        times[name].append((time.perf_counter() - start) / STEPS)
    return {name: found[1:] for name, found in times.items()}  # the first round warms up


def saving(engine: twinflow.Engine, folder: Path) -> dict[str, float]:
    """Seconds, bytes and the growth of host memory."""
    assert engine.optimizer is not None
    engine.optimizer.wait()
    watch, start = Watch(), time.perf_counter()
    engine.save_checkpoint(folder)
    seconds = time.perf_counter() - start
    watch.stop()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"seconds": seconds, "gb": size / 1e9, "host_growth_gb": watch.used() / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    model = build(given.size)
    x = tokens(model, 4)
    engine, *_ = twinflow.initialize(model=model, config=config(4))
    times = rounds(engine, x)
    folder = Path(tempfile.mkdtemp())
    try:
        saved = saving(engine, folder)
    finally:
        shutil.rmtree(folder)
    engine.destroy()
    best = {name: min(found) for name, found in times.items()}
    ratio = best["engine"] / best["plain"]
    machine, today = read_machine(), datetime.date.today().isoformat()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# The engine beside a plain loop, {given.size}, {today}", ""]
    lines += [f"- {gpu}; {machine.cpu}, {machine.usable_cores} cores; torch {torch.__version__}", ""]
    lines += ["| | s/step, best of rounds | all rounds |", "|---|---:|---|"]
    lines += [f"| {name} | {best[name]:.4f} | {', '.join(f'{t:.4f}' for t in times[name])} |" for name in times]
    lines += ["", f"The engine takes {ratio:.4f} of the plain loop's time."]
    lines += [f"A checkpoint of {saved['gb']:.1f} GB took {saved['seconds']:.1f} s and, at most,"]
    lines += [f"{saved['host_growth_gb']:.2f} GB of host memory.", "", "```json"]
    lines += [json.dumps({"size": given.size, "date": today, "times": times, "saving": saved}), "```", ""]
    text = "\n".join(lines)
    print(text)
    if given.save:
        (Path(__file__).parent / "results" / f"{today}-engine-{given.size}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
