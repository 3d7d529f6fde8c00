# SPDX-License-Identifier: Apache-2.0
"""Simulates a pipeline step: start and end of every action of a schedule.

A rank computes one action at a time, in the order of its list. A forward waits for the previous stage. A backward (B or
I) waits for the next stage. Both also wait for the transfer between two ranks. Ranks continue to compute during a
transfer. Concurrent transfers do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from twinflow.errors import invalid_value
from twinflow.parallel.schedules import (
    KINDS,
    LOOP,
    Schedule,
    V,
    check_schedule,
    count_in_flight,
    make_schedule,
    rank_of,
)

STEADY_ROUNDS: Final = 3  # rounds of micro-batches after which every further round takes equally long
STEADY_MICRO_BATCHES: Final = 32  # least number of micro-batches for the steady state, for short pipelines


@dataclass(frozen=True)
class StageTime:
    """Time of one stage for one micro-batch."""

    forward_s: float
    input_s: float  # gradient of the input
    weight_s: float  # gradient of the weights
    recompute_s: float = 0.0  # recomputation before the gradient of the input, with activation checkpointing

    def seconds(self, kind: str) -> float:
        backward = self.recompute_s + self.input_s
        return {"F": self.forward_s, "B": backward + self.weight_s, "I": backward, "W": self.weight_s}[kind]

    @property
    def total_s(self) -> float:
        """Time of all actions of a micro-batch."""
        return self.forward_s + self.recompute_s + self.input_s + self.weight_s


@dataclass(frozen=True)
class Played:
    makespan_s: float  # time from the first start to the last end
    busy_s: tuple[float, ...]  # by rank
    peak_in_flight: tuple[int, ...]  # by rank: most pairs of stage and micro-batch whose activations are held at once
    starts: tuple[tuple[float, ...], ...]  # start times of the actions of each rank

    @property
    def efficiency(self) -> float:
        """Mean busy time of the ranks relative to the makespan. 1 means no bubble."""
        return sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 1.0

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks wait, on average."""
        return 1.0 - self.efficiency


def simulate(schedule: Schedule, times: Sequence[StageTime], send_s: float = 0.0) -> Played:
    """Simulate a schedule. `times`: the times of every stage. `send_s`: the time of a transfer between two ranks.

    Raises a ValueError for lists that deadlock.
    """
    if len(times) != schedule.num_stages:
        raise invalid_value("The number of stage times", len(times), f"{schedule.num_stages}, one for each stage")
    lowest = min(send_s, *(min(t.forward_s, t.input_s, t.weight_s, t.recompute_s) for t in times))
    if lowest < 0:
        raise invalid_value("The lowest of send_s and the stage times", lowest, "a number >= 0")
    check_schedule(schedule)
    starts, makespan = _play(schedule, times, send_s)
    busy = tuple(sum(times[a.stage].seconds(a.kind) for a in actions) for actions in schedule.actions)
    peaks = tuple(count_in_flight(actions) for actions in schedule.actions)
    return Played(makespan, busy, peaks, tuple(map(tuple, starts)))


def _play(schedule: Schedule, times: Sequence[StageTime], send_s: float) -> tuple[list[list[float]], float]:
    """Start times of the actions of each rank, and the end of the last action.

    Results are numbered: the output of stage s for micro-batch i of m has the number s * m + i. Its gradient has that
    number plus the number of outputs. `waiting` has the rank that waits for a result. Only one rank needs each result.
    """
    num_stages, m = schedule.num_stages, schedule.num_micro_batches
    half = num_stages * m
    ranks = [schedule.rank_of(stage) for stage in range(num_stages)]
    seconds = [{kind: time.seconds(kind) for kind in KINDS} for time in times]
    arrives = [-1.0] * (2 * half)  # time at which a result arrives at the rank that needs it
    waiting = [-1] * (2 * half)  # rank that waits for a result
    # Time to send an output to the next stage and a gradient to the previous stage.
    sends = [
        [send_s if 0 <= other < num_stages and ranks[other] != rank else 0.0 for other in (stage + 1, stage - 1)]
        for stage, rank in enumerate(ranks)
    ]
    now = [0.0] * schedule.num_ranks
    starts: list[list[float]] = [[] for _ in range(schedule.num_ranks)]
    todo = list(range(schedule.num_ranks))
    while todo:
        rank = todo.pop()
        actions, started, time = schedule.actions[rank], starts[rank], now[rank]
        for position in range(len(started), len(actions)):
            kind, stage, i = actions[position]
            made = stage * m + i
            if kind == "F":
                needed = made - m  # negative: the first stage needs no input from another stage
            elif kind == "W":
                needed, made = -1, -1  # W only needs its I, which is earlier in the same list
            else:
                needed, made = (made if stage == num_stages - 1 else half + made + m), half + made
            if needed >= 0:
                if arrives[needed] < 0.0:
                    waiting[needed] = rank
                    break
                time = max(time, arrives[needed])
            started.append(time)
            time += seconds[stage][kind]
            if made >= 0:
                arrives[made] = time + sends[stage][made >= half]
                if waiting[made] >= 0:
                    todo.append(waiting[made])
        now[rank] = time
    stuck = [
        f"rank {rank} at {actions[len(started)]}"
        for rank, (actions, started) in enumerate(zip(schedule.actions, starts, strict=True))
        if len(started) < len(actions)
    ]
    if stuck:
        raise ValueError(
            f"The schedule {schedule.name!r} has a deadlock, because these ranks wait for each other: "
            f"{', '.join(stuck[:8])} (stage, kind and micro-batch of an action). Change the order of these actions."
        )
    return starts, max(now)


@dataclass(frozen=True)
class Pipeline:
    """A schedule by name with its times, the input of `step_seconds`."""

    name: str
    num_ranks: int
    num_micro_batches: int
    num_chunks: int
    times: tuple[StageTime, ...]  # for every stage
    send_s: float = 0.0


def step_seconds(pipe: Pipeline) -> float:
    """The time from first start to last end. The middle of a long step is extrapolated: its rounds take equally long.

    The time of a round is the difference of two short steps, and at least the work of the slowest rank.
    """
    p, m = pipe.num_ranks, pipe.num_micro_batches
    if p == 1:
        return m * sum(time.total_s for time in pipe.times)
    short = max(STEADY_ROUNDS, -(-STEADY_MICRO_BATCHES // p)) * p
    if m <= short + p:
        return _makespan(pipe, m)
    longer = _makespan(pipe, short)
    added = (longer - _makespan(pipe, short - p)) / p
    return longer + (m - short) * max(added, *rank_seconds(pipe))


def rank_seconds(pipe: Pipeline) -> list[float]:
    """Compute time of each rank for one micro-batch, over all its stages."""
    placement = V if pipe.name == "zbv" else LOOP
    totals = [0.0] * pipe.num_ranks
    for stage, time in enumerate(pipe.times):
        totals[rank_of(stage, pipe.num_ranks, placement)] += time.total_s
    return totals


def _makespan(pipe: Pipeline, num_micro_batches: int) -> float:
    made = make_schedule(pipe.name, pipe.num_ranks, num_micro_batches, pipe.num_chunks)
    return _play(made, pipe.times, pipe.send_s)[1]
