# SPDX-License-Identifier: Apache-2.0
"""Time of a step over the number of tokens in it: twinflow beside DeepSpeed's ZeRO-Offload.

A Llama shape with random weights in bf16, activation checkpointing, AdamW, clipping on. Sequences of 2,048 tokens, in
micro-batches of 4 (of 1 in the smallest step) that are accumulated. Every system trains in a process of its own, which
is built once and then runs every size of a step. Forward and backward alone run first. A system that does not fit is a
result. `--systems twin:auto` and so on select. Needs CUDA, transformers, and deepspeed for its rows. `--size tiny`
shows on any machine that the script works, nothing more.

    python benchmarks/batch_curve.py --size 3b --save                      # about 8 minutes
    python benchmarks/batch_curve.py --size llama3-8b --most 128 --save    # about 6 minutes

A row has one window of as many steps as fit into `--seconds`, at least one, after the warm-up. In steps of more than
32k tokens, `ratio="auto"` keeps the placement that it has chosen for 32k tokens: choosing takes 12 steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from curves_plot import Curve, Panel, picture
from offload import CUDA, DEVICE, SIZES, TOKENS, synchronize
from offload import build as build_llama
from real_models import SHAPES, bare

from twinflow.bench.machine import describe, read_machine

SYSTEMS = ("alone", "twin:1", "twin:auto", "zero2", "zero3")
NAMES = {
    "alone": "forward + backward alone",
    "twin:1": "twinflow, all state on the host",
    "twin:auto": "twinflow, ratio auto",
    "zero2": "DeepSpeed, ZeRO-2 with offload",
    "zero3": "DeepSpeed, ZeRO-3 with offload",
}
MICRO = 4
MOST_CHOSEN = 32  # thousands of tokens up to which "auto" chooses
CELLS = (2, 8, 32, 128, 512)  # thousands of tokens (of 1,024)


def build(size: str) -> Any:
    if size in SIZES:
        return build_llama(size)
    with torch.device(DEVICE):
        model: Any = bare(size)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def shape_of_step(cell: int) -> tuple[int, int]:
    """Sequences of a micro-batch, and micro-batches, of a step of `cell` thousand tokens."""
    sequences = cell * 1024 // 2048
    return (sequences, 1) if sequences < MICRO else (MICRO, sequences // MICRO)


def data_of(model: Any, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, TOKENS), generator=generator).to(DEVICE)


def config_of(system: str, states: str) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if system.startswith("twin"):
        ratio = system.partition(":")[2]
        offload |= {"ratio": ratio if ratio == "auto" else float(ratio), "states": states}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": CUDA},
        "gradient_clipping": 1e6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3 if system == "zero3" else 2,
            "offload_optimizer": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


class Alone:
    """Forward and backward, with every gradient dropped."""

    is_placed = True

    def __init__(self, model: Any) -> None:
        self.model = model

    def step(self, data: torch.Tensor, num: int) -> None:
        for _ in range(num):
            self.model(input_ids=data, labels=data).loss.backward()
            for param in self.model.parameters():
                param.grad = None


class Trained:
    """An engine of twinflow or DeepSpeed."""

    def __init__(self, model: Any, system: str, states: str) -> None:
        config = config_of(system, states)
        if system.startswith("twin"):
            import twinflow

            self.engine: Any = twinflow.initialize(model=model, config=config)[0]
        else:
            import deepspeed

            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29521")
            self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self.is_twin = system.startswith("twin")

    @property
    def is_placed(self) -> bool:
        return not self.is_twin or bool(self.engine.optimizer.is_placed)

    def step(self, data: torch.Tensor, num: int) -> None:
        self.engine.set_train_batch_size(num)  # micro-batches count as samples, because the config says 1
        for _ in range(num):
            self.engine.backward(self.engine(input_ids=data, labels=data).loss)
            self.engine.step()


def timed(step: Callable[[], None], seconds: float, most: int) -> tuple[float, int]:
    """Seconds of a step and the number of steps, of one window."""
    synchronize()
    start = time.perf_counter()
    num = 0
    while num < most and (num == 0 or time.perf_counter() - start < seconds):
        step()
        num += 1
        if num == 1:
            synchronize()
    synchronize()
    return (time.perf_counter() - start) / num, num


def run_system(system: str, options: argparse.Namespace) -> None:
    start = time.perf_counter()
    model = build(options.size)
    run: Any = Alone(model) if system == "alone" else Trained(model, system, options.states)
    print(f"{system}: built in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    for cell in (cell for cell in CELLS if cell <= options.most):
        micro, num = shape_of_step(cell)
        if system == "alone":
            if cell > CELLS[1]:
                break  # accumulated micro-batches take as long as one
            num = 1
        data = data_of(model, micro)

        def step(data: torch.Tensor = data, num: int = num) -> None:
            run.step(data, num)

        for _ in range(3 if cell <= CELLS[1] else 1 if cell <= 128 else 0):
            step()
        if cell <= MOST_CHOSEN:
            while not run.is_placed:
                step()
        step_s, num_steps = timed(step, options.seconds, 12)
        row = {"cell": cell, "step_s": step_s, "num_steps": num_steps, "tokens_s": micro * num * TOKENS / step_s}
        if CUDA:
            row["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if system.startswith("twin"):
            row["ratio"] = run.engine.optimizer.host_share
        print("ROW " + json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # some libraries wait at the end of a process


def rows_of(system: str, options: argparse.Namespace) -> tuple[dict[int, dict[str, Any]], str]:
    """The rows of a system in a process of its own, by thousands of tokens, and why there are not more."""
    command = [sys.executable, __file__, "--part", system, "--size", options.size, "--most", str(options.most)]
    command += ["--seconds", str(options.seconds), "--states", options.states]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        out, error = process.communicate(timeout=options.limit)
        why = "" if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, error = process.communicate()
        why = f"ended after {options.limit:g} s"
    print(error[-1500:], file=sys.stderr, flush=True)
    if process.returncode == -9 and not why.startswith("ended"):
        why = "does not fit into host memory"
    elif "out of memory" in error.lower() or "MemoryError" in error:
        why = "does not fit"
    rows = [json.loads(line.removeprefix("ROW ")) for line in out.splitlines() if line.startswith("ROW ")]
    return {row["cell"]: row for row in rows}, why


def text_of(results: dict[str, dict[int, dict[str, Any]]], whys: dict[str, str], options: argparse.Namespace) -> str:
    cells = [cell for cell in CELLS if cell <= options.most]
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# Step time over tokens in a step, {options.size}, {datetime.date.today()}", ""]
    lines += [f"{gpu}; {describe(read_machine())}; torch {torch.__version__}; {options.states} state of twinflow", ""]
    lines += ["Seconds of a step, its quotient to forward and backward alone, and tokens a second:", ""]
    lines += ["| system | " + " | ".join(f"{cell}k tokens" for cell in cells) + " | |"]
    lines += ["|---|" + "---:|" * len(cells) + "---|"]
    alone = results.get("alone", {})
    for system, found in results.items():
        entries = []
        for cell in cells:
            num = shape_of_step(cell)[1]
            base = alone.get(min(cell, CELLS[1]), {}).get("step_s", math.nan) * num
            row = found.get(cell)
            if system == "alone":
                entries.append(f"{base:.3f}")
            elif row is None:
                entries.append("-")
            else:
                entries.append(f"{row['step_s']:.3f}, {row['step_s'] / base:.2f}x, {row['tokens_s']:,.0f}")
        ratios = [f"{row['ratio']:.2f}" for row in found.values() if "ratio" in row]
        more = [whys[system]] if whys[system] else []
        more += [f"on the host: {', '.join(ratios)}"] if ratios and system == "twin:auto" else []
        lines.append(f"| {NAMES[system]} | " + " | ".join(entries) + f" | {'; '.join(more)} |")
    record = {"size": options.size, "results": results, "whys": whys}
    return "\n".join([*lines, "", "```json", json.dumps(record), "```", ""])


def picture_of(results: dict[str, dict[int, dict[str, Any]]], options: argparse.Namespace) -> str:
    curves = [
        Curve(NAMES[system], [(math.log2(1024 * cell), row["tokens_s"]) for cell, row in found.items()], i)
        for i, (system, found) in enumerate(results.items())
        if system != "alone"
    ]
    return picture([Panel(f"{options.size}: tokens a second", curves, "log2 of the tokens in a step")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b", choices=[*SIZES, *(name for name in SHAPES if name not in SIZES)])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--states", default="fp32", choices=("fp32", "bf16", "int8"), help="of twinflow")
    parser.add_argument("--most", type=int, default=512, help="thousands of tokens in the largest step")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which a system is ended")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--part", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run_system(options.part, options)
    results: dict[str, dict[int, dict[str, Any]]] = {}
    whys: dict[str, str] = {}
    for system in options.systems:
        results[system], whys[system] = rows_of(system, options)
        print(system, json.dumps(results[system]), whys[system], file=sys.stderr, flush=True)
    text = text_of(results, whys, options)
    print(text)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        stem = f"{datetime.date.today()}-batch-curve-{options.size}"
        (options.save_to / f"{stem}.md").write_text(text, encoding="utf-8")
        (options.save_to / f"{stem}.svg").write_text(picture_of(results, options), encoding="utf-8")


if __name__ == "__main__":
    main()
