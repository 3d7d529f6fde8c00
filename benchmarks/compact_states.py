# SPDX-License-Identifier: Apache-2.0
"""Does training with compact optimizer states end where fp32 states end? Trains the small GPT with each format.

    python benchmarks/compact_states.py --steps 2000 --seeds 2

Prints a table and one JSON line: the validation loss of each format and seed, and the spread of fp32 over its seeds.
A seed sets both the initial weights and the batches. Two more seeds are run with fp32 alone, to know its spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from twinflow import native
from twinflow.data import TokenData, load_data
from twinflow.models.gpt import GPT, PRESETS
from twinflow.optim import HostAdamW


def train(states: str, seed: int, steps: int, batch_size: int) -> float:
    """The validation loss after `steps` steps of the tiny preset."""
    torch.manual_seed(seed)
    config = PRESETS["tiny"]
    data = load_data("stdlib", seed=seed)
    model = GPT(config)
    optimizer = HostAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, states=states)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=100)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 100, eta_min=1e-4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [100])
    for step in range(steps):
        tokens, targets = data.batch("train", step, batch_size, config.context)
        optimizer.zero_grad()
        loss = model(tokens, targets).loss
        loss.backward()
        norm = sum(native.sum_squares([p.grad for p in model.parameters()])) ** 0.5
        optimizer.step(factor=min(1.0, 1.0 / norm))
        scheduler.step()
    return validate(model, data)


@torch.no_grad()
def validate(model: GPT, data: TokenData) -> float:
    """Mean loss over the same 40 validation batches for every run."""
    fixed = dataclasses.replace(data, seed=0)
    losses = []
    for step in range(40):
        tokens, targets = fixed.batch("valid", step, 16, model.config.context)
        losses.append(model(tokens, targets).loss.item())
    return sum(losses) / len(losses)


def within_spread(losses: dict[str, list[float]], states: str) -> bool:
    """Whether the format's mean lies within the range of fp32's runs, widened by their standard deviation."""
    reference = torch.tensor(losses["fp32"])
    mean, margin = sum(losses[states]) / len(losses[states]), reference.std().item()
    return reference.min().item() - margin <= mean <= reference.max().item() + margin


def one_run(states: str, seed: int, arguments: argparse.Namespace) -> float:
    torch.set_num_threads(arguments.threads)
    native.set_threads(arguments.threads)
    start = time.perf_counter()
    loss = train(states, seed, arguments.steps, arguments.batch_size)
    print(f"{states:5} seed {seed}: {loss:.4f} in {time.perf_counter() - start:.0f} s", flush=True)
    return loss


def run_all(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Every format and seed, `jobs` of them at a time, each in a process of its own."""
    seeds = {"fp32": arguments.seeds + 2, "bf16": arguments.seeds, "int8": arguments.seeds}
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {
            states: [pool.submit(one_run, states, seed, arguments) for seed in range(count)]
            for states, count in seeds.items()
        }
        return {states: [future.result() for future in runs] for states, runs in futures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each run")
    arguments = parser.parse_args()
    losses = run_all(arguments)
    print("\n| states | validation loss by seed | mean of the shared seeds | within fp32's spread |\n|---|---|---|---|")
    for states, values in losses.items():
        shared = sum(values[: arguments.seeds]) / arguments.seeds
        print(
            f"| {states} | {', '.join(f'{v:.4f}' for v in values)} | {shared:.4f} | {within_spread(losses, states)} |"
        )
    print(json.dumps({"steps": arguments.steps, "isa": native.isa(), "losses": losses}))


if __name__ == "__main__":
    main()
