"""A model whose weights alone exceed the card: `offload_param` under a memory cap, held against what bounds it.

The same GPT-2 shape in two processes: forward and backward alone with all weights on the GPU and no cap; and training
steps through the engine with weights and state on the host, under the cap. A step cannot be shorter than forward and
backward, than the host's update alone, or than the weights' way over the bus: the table shows all three. Before that, a
small model trains both ways and must have the same bits. Prints the machine, a table and one JSON line; `--save` writes
a dated file in benchmarks/results. Without CUDA `--preset tiny` shows that it works, nothing more.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import twinflow
from twinflow.bench.machine import read_machine
from twinflow.models.gpt import GPT, PRESETS, GPTConfig, count_params
from twinflow.offload.materialize import build
from twinflow.planner.probe import load_or_measure

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
SMALL = GPTConfig(vocab_size=256, context=64, num_layers=6, hidden=128, num_heads=4, recompute="full")


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def shape_of(preset: str, num_layers: int) -> GPTConfig:
    found = replace(PRESETS[preset], recompute="full")
    return replace(found, num_layers=num_layers) if num_layers else found


def tokens_of(shape: GPTConfig, batch: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, shape.vocab_size, (batch, shape.context), generator=generator).to(DEVICE)


def config_of(batch: int, states: str, offloads_params: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu", "states": states}}
    if offloads_params:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": CUDA},
        "gradient_clipping": 1e3,  # measured in every step, never exceeded
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def have_same_bits() -> bool:
    """Losses of some steps of a small model, weights on the host and on the device."""
    found = []
    for offloads_params in (False, True):
        torch.manual_seed(0)
        engine, *_ = twinflow.initialize(model=GPT(SMALL), config=config_of(4, "fp32", offloads_params))
        losses = []
        for step in range(6):
            x = tokens_of(SMALL, 4, step)
            loss = engine(x, x).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        found.append(losses)
    return found[0] == found[1]


def alone(shape: GPTConfig, batch: int) -> dict[str, Any]:
    """Forward and backward with no optimizer, all weights on the device, every gradient dropped."""
    model = build(lambda: GPT(shape), DEVICE, DTYPE)
    params: list[Any] = list(model.parameters())
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    x, times = tokens_of(shape, batch), []
    for _ in range(5):
        synchronize()
        start = time.perf_counter()
        model(x, x).loss.backward()
        synchronize()
        times.append(time.perf_counter() - start)
    return {"gpu_s": min(times)}


def offloaded(shape: GPTConfig, batch: int, states: str, cap: float, steps: int) -> dict[str, Any]:
    """Training steps under the cap, and what bounds them."""
    if CUDA and cap:
        torch.cuda.set_per_process_memory_fraction(cap * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    start = time.perf_counter()
    engine, *_ = twinflow.initialize(model=lambda: GPT(shape), config=config_of(batch, states, True))
    init_s, x = time.perf_counter() - start, tokens_of(shape, batch)
    print(f"built in {init_s:.0f} s", file=sys.stderr, flush=True)
    losses = []

    def step() -> None:
        loss = engine(x, x).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())

    for _ in range(3):
        step()
    synchronize()
    assert engine.optimizer is not None
    runtime = engine.optimizer.runtime
    assert runtime.param_offload is not None
    fetcher, mover = runtime.param_offload.fetcher, runtime.mover
    before, start = (fetcher.fetched_bytes, mover.bytes_out), time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    step_s = (time.perf_counter() - start) / steps
    print(f"{step_s:.3f} s a step, losses {[round(float(loss), 3) for loss in losses]}", file=sys.stderr, flush=True)
    rates = load_or_measure(DEVICE) if CUDA else None
    num_in, num_out = (fetcher.fetched_bytes - before[0]) / steps, (mover.bytes_out - before[1]) / steps
    return {
        "params": count_params(shape),
        "step_s": step_s,
        "init_s": init_s,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "weights_gb": count_params(shape) * DTYPE.itemsize / 1e9,
        "in_gb": num_in / 1e9,
        "out_gb": num_out / 1e9,
        "bus_s": max(num_in / rates.in_bytes, num_out / rates.out_bytes) if rates else 0.0,
        "host_s": count_params(shape) / rates.host_params[states] if rates else 0.0,
        "gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0,
        "shadow_gb": runtime.speculative_stores.num_bytes / 1e9,
    }


def part(*args: str) -> dict[str, Any]:
    """One part in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--part", *args], stdout=subprocess.PIPE, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        raise SystemExit(f"{args[0]}: no result, exit code {done.returncode}. {done.stdout[-300:]}")
    print(args[0], found[0], file=sys.stderr, flush=True)
    row: dict[str, Any] = json.loads(found[0].removeprefix("ROW "))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2-10b" if CUDA else "tiny")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: the preset's")
    parser.add_argument("--batch", type=int, default=8 if CUDA else 2, help="sequences a step")
    parser.add_argument("--states", default="bf16", help="format of the optimizer's state")
    parser.add_argument("--cap", type=float, default=16.0, help="GB of GPU memory that may be used; 0: all")
    parser.add_argument("--steps", type=int, default=8 if CUDA else 2)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        faulthandler.enable()
        name, preset, layers, batch, states, cap, steps = given.part
        shape = shape_of(preset, int(layers))
        row = (
            alone(shape, int(batch))
            if name == "alone"
            else offloaded(shape, int(batch), states, float(cap), int(steps))
        )
        print("ROW " + json.dumps(row), flush=True)
        return
    if not have_same_bits():
        raise SystemExit("a small model trains otherwise with its weights on the host: no figures")
    rest = (given.preset, str(given.layers), str(given.batch), given.states, str(given.cap), str(given.steps))
    row = part("alone", *rest) | part("offloaded", *rest)
    bound = max(row["gpu_s"], row["host_s"], row["bus_s"])
    row["x_bound"] = row["step_s"] / bound
    machine, date = read_machine(), datetime.date.today().isoformat()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    lines = [f"# Weights on the host, {date}", ""]
    lines += [
        f"- {gpu}, {given.cap:g} GB of it; {machine.cpu}, {machine.usable_cores} cores; torch {torch.__version__}"
    ]
    layers = f" with {given.layers} layers" if given.layers else ""
    lines += [f"- {given.preset}{layers}, {given.batch} sequences a step, {given.states} state, clipping on", ""]
    keys = ["params", "weights_gb", "gpu_s", "host_s", "bus_s", "step_s", "x_bound", "gpu_gb", "in_gb", "out_gb"]
    keys += ["first_loss", "last_loss", "init_s", "shadow_gb"]
    lines += [f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(f"{row[key]:.4g}" for key in keys) + " |", ""]
    lines += [
        "gpu_s: forward and backward alone, no cap; host_s: the update alone; bus_s: the larger of the bytes each"
    ]
    lines += ["way over its rate alone; x_bound: the step over the largest of the three.", ""]
    text = "\n".join([*lines, "```json", json.dumps({"date": date, "preset": given.preset, "rows": [row]}), "```", ""])
    print(text)
    if given.save:
        (Path(__file__).parent / "results" / f"{date}-offload-param.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
