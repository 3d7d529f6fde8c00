# SPDX-License-Identifier: Apache-2.0
"""Does training with 4-bit states and without master weights end where fp32 ends, and where does it break?

    python benchmarks/four_bit_quality.py --save                 # 25 M parameters, 3 seeds, 3,000 steps: needs CUDA
    python benchmarks/four_bit_quality.py --small                # 0.8 M parameters, 600 steps: minutes on two CPU cores
    python benchmarks/four_bit_quality.py --parts limits         # without training: a minute on any machine

Part "training": a GPT with bf16 weights is trained on Python source text, without clipping: with fp32 states and fp32
masters, with 4-bit states and no master (all seeds), and with each of both alone and with int8 (first seed). A seed
sets the initial weights and the batches. All runs are processes that share the GPU, so their times mean nothing.
`--budget` is the time in seconds after which runs are stopped; the output names these.

Part "limits" needs no model. It measures the second moment after gradients have fallen by 10, the steps of elements
whose gradients are zero or smaller than the largest in their block of 128, and the noise of weights without master
relative to the noise of the gradients. Prints tables; `--save` writes them to `--save-to`, with a JSON file that has
the curves.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import delayed_update
import torch
from delayed_update import CUDA, DEVICE, Scale

from twinflow import native
from twinflow.bench.machine import describe, read_machine
from twinflow.models.gpt import GPT, GPTConfig, count_params
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules import RULES
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import Segment, Store, decode_master, decode_state, new_store

LR = 1e-3
# Name, states and master. The first two are trained with all seeds.
WAYS = {
    "fp32": ("fp32", "fp32"),
    "4bit, no master": ("4bit", "none"),
    "4bit": ("4bit", "fp32"),
    "fp32, no master": ("fp32", "none"),
    "int8": ("int8", "fp32"),
}
SMALL = dataclasses.replace(
    delayed_update.TINY,
    shape=GPTConfig(256, 128, num_layers=4, hidden=128, num_heads=4),
    batch_size=4,
    num_steps=600,
    num_seeds=2,
)
ADAMW = RULES["adamw"]


# Training.


def train(way: str, seed: int, scale: Scale, deadline: float) -> dict[str, Any]:
    """The curve of the training loss, and the validation loss at the end. `valid` is missing if time was up before."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    states, master = WAYS[way]
    model = GPT(scale.shape).to(DEVICE, torch.bfloat16)
    optimizer = TwinOptimizer(
        model,
        "adamw",
        lr=LR,
        betas=(0.9, 0.999),
        weight_decay=0.1,
        states=states,
        master=master,
        ratio=0.0 if CUDA else 1.0,
        host_threads=1,
    )
    return delayed_update.fit({"way": way, "seed": seed, "lr": LR}, model, optimizer, scale, deadline)


def train_all(scale: Scale, jobs: list[tuple[str, int]], num_jobs: int, budget: float) -> list[dict[str, Any]]:
    """All runs. A run that failed or was stopped has `why` instead of `valid`."""
    begin = time.time()
    found = []
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(train, *job, scale, begin + budget - 10.0): job for job in jobs}
        for run in as_completed(pending):
            way, seed = pending[run]
            try:
                row = run.result()
            except Exception as error:
                traceback.print_exc()
                row = {"way": way, "seed": seed, "lr": LR, "curve": [], "why": f"failed: {error}"}
            found.append(row)
            ends = f"{row['valid']:.4f}" if "valid" in row else row["why"]
            print(f"{time.time() - begin:4.0f} s: {way}, seed {seed}: {ends}", flush=True)
    return sorted(found, key=lambda row: (list(WAYS).index(row["way"]), row["seed"]))


def training_page(runs: list[dict[str, Any]], scale: Scale) -> list[str]:
    losses = {way: {row["seed"]: row["valid"] for row in runs if row["way"] == way and "valid" in row} for way in WAYS}
    lines = [
        f"A GPT of {count_params(scale.shape) / 1e6:.1f} M parameters in bf16, {scale.num_steps:,} steps of "
        f"{scale.batch_size} x {scale.shape.context} bytes of Python source text, AdamW, learning rate {LR:g}. "
        "Validation loss, nats a byte:",
        "",
        "| states | " + " | ".join(f"seed {seed}" for seed in range(scale.num_seeds)) + " | relative to fp32 |",
        "|---|" + "---:|" * (scale.num_seeds + 1),
    ]
    exact = losses["fp32"]
    for way, found in losses.items():
        cells = [f"{found[seed]:.4f}" if seed in found else "" for seed in range(scale.num_seeds)]
        shared = sorted(found.keys() & exact.keys())
        gap = statistics.mean(found[seed] / exact[seed] - 1 for seed in shared) if shared else None
        lines.append(f"| {way} | {' | '.join(cells)} | {'' if gap is None else f'{gap:+.2%}'} |")
    if exact:
        spread = (max(exact.values()) - min(exact.values())) / min(exact.values())
        lines += ["", f"The losses of fp32 differ by {spread:.2%} between the seeds."]
    missing = [f"- Left out: {row['way']}, seed {row['seed']}: {row['why']}" for row in runs if "why" in row]
    return [*lines, "", *missing, *([""] if missing else [])]


# Limits, measured with the update kernels on vectors.


def updated(store: Store, grads: Iterable[torch.Tensor], begin: int = 0, **options: Any) -> None:
    """Updates a store in place, once for each gradient. `begin`: the number of updates before."""
    options = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-12, "weight_decay": 0.0, "bias_correction": True, **options}
    for i, grad in enumerate(grads):
        step = begin + i + 1
        native.update([Segment(ADAMW, ADAMW.hyper(options, step), grad, store, 1.0, rounding_key(step, 0))])


def falling(num_steps: int = 6000) -> list[str]:
    """The second moment if gradients fall by 10 after a quarter of the steps."""
    numel = 128 * 64
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(numel, generator=generator) + 0.5
    signs = [(torch.randint(0, 2, (numel,), generator=generator) * 2 - 1).float() for _ in range(16)]
    grads = [base * signs[i % 16] * (1.0 if i < num_steps // 4 else 0.1) for i in range(num_steps)]
    truth = torch.zeros(numel, dtype=torch.float64)
    for grad in grads:
        truth.mul_(0.999).addcmul_(grad.double(), grad.double(), value=0.001)
    lines = [
        f"Gradients fall by 10 after {num_steps // 4:,} of {num_steps:,} steps, b2 = 0.999. At the end, relative to "
    ]
    lines[0] += "float64:"
    lines += ["", "| states | mean second moment | mean divisor of an update |", "|---|---:|---:|"]
    for states in ("bf16", "int8", "4bit"):
        store = new_store(ADAMW, states, torch.ones(numel))
        updated(store, grads)
        v = decode_state(store, 1)
        assert v is not None
        ratio = (v.double().sqrt() / truth.sqrt()).mean()
        lines.append(f"| {states} | {v.double().mean() / truth.mean():.3f} | {ratio:.3f} |")
    return [*lines, ""]


def inactive(num_steps: int = 8000) -> list[str]:
    """How far elements move whose gradient becomes exactly zero while others of their block keep theirs."""
    numel, lr, num_active = 128 * 4, 1e-3, 100
    lines = [f"Most elements of a block lose their gradient after {num_active} of {num_steps:,} steps, b2 = 0.99. "]
    lines[0] += (
        "Distance that they move after that, and in each of the last 1,000 steps, in units of the learning rate:"
    )
    lines += ["", "| states | b1 | distance | in each of the last steps |", "|---|---:|---:|---:|"]
    for states, b1 in itertools.product(("fp32", "bf16", "int8", "4bit"), (0.9, 0.95)):
        generator = torch.Generator().manual_seed(0)
        store = new_store(ADAMW, states, torch.zeros(numel))
        off = torch.arange(numel) % 128 >= 10
        places = []
        for i in range(num_steps):
            grad = 1.0 + 0.3 * torch.randn(numel, generator=generator)
            updated(store, [grad.masked_fill(off, 0.0) if i >= num_active else grad], i, lr=lr, betas=(b1, 0.99))
            if i + 1 in (num_active, num_steps - 1000, num_steps):
                places.append(decode_master(store)[off].mean().item() / lr)
        start, end = places[0], places[-1]
        lines.append(f"| {states} | {b1} | {abs(end - start):,.0f} | {abs(end - places[-2]) / 1000:.2f} |")
    return [*lines, ""]


def outliers(num_steps: int = 1500) -> list[str]:
    """The steps of 127 elements of a block whose last element has larger gradients, relative to fp32 states."""
    numel, factors = 128 * 32, (1.0, 10.0, 50.0, 100.0, 300.0, 1000.0)
    lines = ["One element in each block of 128 has larger gradients. Distance that the others move with a gradient of "]
    lines[0] += f"constant sign, and with random signs, in {num_steps:,} steps, relative to fp32 states:"
    lines += ["", "| gradients of the largest | constant, int8 | constant, 4bit | random, int8 | random, 4bit |"]
    lines.append("|---|---:|---:|---:|---:|")
    for factor in factors:
        size = torch.ones(numel)
        size[127::128] = factor
        cells = []
        for is_random in (False, True):
            moved = {}
            for states in ("fp32", "int8", "4bit"):
                generator = torch.Generator().manual_seed(1)
                store = new_store(ADAMW, states, torch.zeros(numel))
                grads = (
                    size * (torch.randn(numel, generator=generator) + (0.0 if is_random else 1.0))
                    for _ in range(num_steps)
                )
                updated(store, grads, lr=1e-3)
                moved[states] = decode_master(store).view(-1, 128)[:, :127].square().mean().sqrt().item()
            cells += [f"{moved[states] / moved['fp32']:.2f}" for states in ("int8", "4bit")]
        lines.append(f"| {factor:g} times the others | {' | '.join(cells)} |")
    return [*lines, ""]


def rounding_noise(num_steps: int = 2000) -> list[str]:
    """How far weights without master move in a random walk, relative to weights with master."""
    numel = 1 << 15
    lines = [
        f"Weights of order 0.02 and random gradients, {num_steps:,} steps. Distance that weights without master move, "
    ]
    lines[0] += "relative to weights with an fp32 master (1 means that rounding adds no noise):"
    lines += [
        "",
        "| learning rate | distance | mean of all changes with a gradient of constant sign |",
        "|---|---:|---:|",
    ]
    for lr in (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6):
        cells = []
        for drift in (0.0, 1.0):
            moved = {}
            for master in ("fp32", "none"):
                generator = torch.Generator().manual_seed(2)
                start = torch.randn(numel, generator=generator).mul(0.02).bfloat16().float()
                weight = torch.zeros(numel, dtype=torch.bfloat16)
                store = new_store(ADAMW, "fp32", start.clone(), weight, split=False, master=master)
                grads = (torch.randn(numel, generator=generator) + drift for _ in range(num_steps))
                updated(store, grads, lr=lr)
                change = decode_master(store) - start
                moved[master] = change.square().mean().sqrt().item() if drift == 0.0 else change.mean().item()
            cells.append(f"{moved['none'] / moved['fp32']:.2f}")
        lines.append(f"| {lr:g} | {' | '.join(cells)} |")
    return [*lines, ""]


def limits(is_quick: bool) -> list[str]:
    found = []
    for part in (falling, inactive, outliers, rounding_noise):
        try:
            lines = part(120) if is_quick else part()
        except Exception as error:
            traceback.print_exc()
            lines = [f"Left out: {part.__name__}, which failed: {error}", ""]
        print("\n".join(lines), flush=True)
        found += lines
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("training", "limits"), default=["training", "limits"])
    parser.add_argument("--small", action="store_true", help="a model for CPUs")
    parser.add_argument("--tiny", action="store_true", help="shows on any machine that the script works, nothing more")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--all-seeds", action="store_true", help="train every way with all seeds")
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--jobs", type=int, help="runs at a time. Default: all with CUDA, otherwise 1")
    parser.add_argument("--budget", type=float, default=260.0 if CUDA else 1e6, help="seconds of part training")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    options = parser.parse_args()
    scale = delayed_update.TINY if options.tiny else SMALL if options.small else delayed_update.FULL
    scale = dataclasses.replace(scale, num_steps=options.steps or scale.num_steps)
    every_seed = options.ways if options.all_seeds else list(WAYS)[:2]
    jobs = [(way, seed) for seed in range(scale.num_seeds) for way in options.ways if way in every_seed or seed == 0]
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    head = [f"# 4-bit states and weights without master, {datetime.date.today()}", ""]
    head += [
        f"`python benchmarks/four_bit_quality.py`: {gpu}; {describe(read_machine())}; torch {torch.__version__}",
        "",
    ]
    runs: list[dict[str, Any]] = []
    lines: list[str] = []
    if "training" in options.parts:
        runs = train_all(scale, jobs, options.jobs or (len(jobs) if CUDA else 1), options.budget)
        lines += training_page(runs, scale)
        print("\n".join(lines), flush=True)
    if "limits" in options.parts:
        lines += limits(options.tiny)
    brief = [{key: value for key, value in row.items() if key != "curve"} for row in runs]
    text = "\n".join([*head, *lines, "```json", json.dumps({"runs": brief}), "```"])
    print(text)
    if options.save:
        options.save_to.mkdir(parents=True, exist_ok=True)
        path = options.save_to / f"{datetime.date.today()}-four-bit-quality.md"
        path.with_suffix(".json").write_text(json.dumps({"runs": runs}) + "\n", encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
