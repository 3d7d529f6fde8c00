# SPDX-License-Identifier: Apache-2.0
"""How much of a pipeline's time is work, by schedule: with stages that only sleep, beside formula and simulator.

Eight gloo ranks run the schedules' lists as in training; forward, input's gradient and weight's gradient of a stage
sleep one unit each, so two cores are enough. Every weight's gradient is checked. Prints the machine, a table and one
JSON line; `--save` writes a dated file in benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # ranks are started as in the tests

from dist_support import run_ranks

from twinflow.bench.machine import read_machine
from twinflow.parallel.deferral import Deferral
from twinflow.parallel.runner import Runner
from twinflow.parallel.schedules import make_schedule
from twinflow.parallel.simulate import StageTime, simulate
from twinflow.parallel.wire import Wire

NUM_RANKS = 8
CASES = (("1f1b", 4, 1), ("1f1b", 8, 1), ("interleaved", 4, 2), ("zbv", 8, 2))  # name, micro-batches a rank, chunks
POINTS = 0.03  # how far a figure may be from what is predicted
LEAST = {("zbv", 8): 0.94}

TEXT = """# Pipeline bubbles with stages that only sleep, {date}

- `python benchmarks/pipeline_bubbles.py`: {ranks} gloo ranks; {machine}; torch {torch}; load average {load:.1f} before.
- F, I and W of a stage sleep {unit:.0f} ms each; B is I and W. Ranks with two stages have twice the work.
- measured: what a rank has to sleep, beside the time from a barrier to the end of the last rank. simulator: the same
  lists played through, with sends that take no time. slept: longer than asked for, which other processes cause.
- A message costs a rank about 1 ms of a core's time, and all ranks send at the same moments: {ranks} of them on
  {cores} cores wait for each other there.

{table}
"""
HEAD = "| schedule | m | chunks | step s | measured | m/(m+p-1) | simulator | off | slept |"


@dataclass(frozen=True)
class Row:
    """One schedule."""

    schedule: str
    num_micro_batches: int
    num_chunks: int
    step_s: float
    measured: float  # efficiencies
    formula: float
    simulated: float
    overslept: float

    @property
    def cells(self) -> list[str]:
        """Of the table."""
        off = 100 * (self.measured - self.simulated)
        return [
            f"{self.schedule} | {self.num_micro_batches} | {self.num_chunks} | {self.step_s:.2f} | {self.measured:.1%}",
            f"{self.formula:.1%} | {self.simulated:.1%} | {off:+.1f} points | {self.overslept:+.1%}",
        ]


class Clock:
    """Sleeps, and knows for how long it has."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s, self.slept_s = unit_s, 0.0

    def sleep(self) -> None:
        """One unit."""
        started = time.perf_counter()
        time.sleep(self.unit_s)
        self.slept_s += time.perf_counter() - started


class Sleepy(torch.autograd.Function):
    """A product with a weight; each of its three parts sleeps, the last one in W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: tuple[nn.Parameter, Deferral, Clock]) -> Tensor:
        """F."""
        ctx.save_for_backward(x)
        ctx.target = target
        target[2].sleep()
        return x * target[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """I, and W or a note for it."""
        (x,), (weight, deferral, clock) = ctx.saved_tensors, ctx.target
        clock.sleep()
        deferral.add(weight, sleeping(clock, x, grad))
        return grad * weight.detach(), None


def sleeping(clock: Clock, x: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    def make() -> Tensor:
        clock.sleep()
        return x * grad

    return make


def work(rank: int, world: int, unit_s: float) -> list[dict[str, float]]:
    """All schedules on one rank: when its part of a step began and ended, and how long it has slept."""
    wire = Wire(range(world), rank, torch.device("cpu"))
    step(rank, world, CASES[0], wire, 0.0)  # connections are made
    found = [step(rank, world, case, wire, unit_s) for case in CASES]
    wire.close()
    return found


def step(rank: int, world: int, case: tuple[str, int, int], wire: Wire, unit_s: float) -> dict[str, float]:
    name, rounds, num_chunks = case
    schedule = make_schedule(name, world, rounds * world, num_chunks)
    weights = {stage: nn.Parameter(torch.ones(())) for stage in schedule.stages_of(rank)}
    deferral, clock = Deferral(), Clock(unit_s)

    def stages(stage: int, x: Tensor) -> Tensor:
        made: Tensor = Sleepy.apply(x, (weights[stage], deferral, clock))
        return made

    inputs = [torch.tensor(1.0 + i, requires_grad=True) for i in range(schedule.num_micro_batches)]
    runner = Runner(stages, schedule, rank, wire, deferral=deferral)
    dist.barrier()
    started = time.monotonic()
    runner.train([(x, None) for x in inputs])
    ended = time.monotonic()
    mean = (1 + len(inputs)) / 2  # of the inputs: every weight is 1
    for weight in weights.values():
        assert weight.grad is not None
        assert abs(weight.grad.item() - mean) < 1e-4, f"a gradient is {weight.grad.item()}, not {mean}"
    return {"started": started, "ended": ended, "slept_s": clock.slept_s}


def row_of(case: tuple[str, int, int], ranks: list[dict[str, float]], unit_s: float) -> Row:
    name, rounds, num_chunks = case
    p, m = len(ranks), rounds * len(ranks)
    schedule = make_schedule(name, p, m, num_chunks)
    played = simulate(schedule, [StageTime(unit_s, unit_s, unit_s)] * schedule.num_stages)
    span = max(rank["ended"] for rank in ranks) - min(rank["started"] for rank in ranks)
    busy = 3 * unit_s * m * num_chunks
    slept = sum(rank["slept_s"] for rank in ranks) / p
    return Row(name, m, num_chunks, span, busy / span, m / (m + p - 1), played.efficiency, slept / busy - 1.0)


def misses(rows: list[Row]) -> list[str]:
    """What is not as it should be."""
    found = []
    for row in rows:
        least = LEAST.get((row.schedule, row.num_micro_batches // NUM_RANKS), 0.0)
        is_near = abs(row.measured - row.simulated) <= POINTS
        if row.schedule == "1f1b":
            is_near = is_near and abs(row.measured - row.formula) <= POINTS
        if not is_near or row.measured < least:
            found.append(f"{row.schedule} at m = {row.num_micro_batches}: {row.measured:.1%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit", type=float, default=100.0, help="milliseconds of F, I and W each")
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    given = parser.parse_args()
    unit_s, load, machine = given.unit / 1e3, os.getloadavg()[0], read_machine()
    ranks = run_ranks(NUM_RANKS, work, unit_s)
    rows = [row_of(case, [rank[i] for rank in ranks], unit_s) for i, case in enumerate(CASES)]
    date = datetime.date.today().isoformat()
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1), *(f"| {' | '.join(row.cells)} |" for row in rows)]
    text = TEXT.format(
        date=date,
        ranks=NUM_RANKS,
        machine=f"{machine.cpu}, {machine.usable_cores} cores",
        cores=machine.usable_cores,
        torch=torch.__version__,
        load=load,
        unit=given.unit,
        table="\n".join(lines),
    )
    text += "\n".join(["", "```json", json.dumps({"date": date, "rows": [asdict(row) for row in rows]}), "```", ""])
    print(text)
    if missed := misses(rows):
        sys.exit(f"not within {POINTS:.0%} of what is predicted, or too low: {'; '.join(missed)}")
    if given.save:
        (Path(__file__).parent / "results" / f"{date}-pipeline-bubbles.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
