"""A pipeline step played through: when every action of a schedule's lists starts and ends.

A rank computes one action at a time, in the order of its list. A forward waits for the stage before it, a backward (B
or I) for the stage behind it, and for the time to send between two ranks; sending takes no rank's time. Links are not
shared out: two sends at once do not slow each other.
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

STEADY_ROUNDS: Final = 3  # rounds of micro-batches after which one more adds always the same,
STEADY_MICRO_BATCHES: Final = 32  # and in a short pipeline at least so many micro-batches


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage and micro-batch."""

    forward_s: float
    input_s: float  # gradient of the input
    weight_s: float  # gradient of the weights
    recompute_s: float = 0.0  # forward again, before the gradient of the input: activation checkpointing

    def seconds(self, kind: str) -> float:
        """Of one action."""
        if kind == "F":
            return self.forward_s
        if kind == "W":
            return self.weight_s
        backward = self.recompute_s + self.input_s
        return backward + self.weight_s if kind == "B" else backward

    @property
    def total_s(self) -> float:
        """Of all actions of a micro-batch."""
        return self.forward_s + self.recompute_s + self.input_s + self.weight_s


@dataclass(frozen=True)
class Played:
    """A step as it went."""

    makespan_s: float
    busy_s: tuple[float, ...]  # by rank
    peak_in_flight: tuple[int, ...]  # by rank: stages' micro-batches whose activations are held at once
    starts: tuple[tuple[float, ...], ...]  # of each rank's actions

    @property
    def efficiency(self) -> float:
        """Work beside what all ranks could do in that time: 1 has no bubble."""
        return sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s else 1.0

    @property
    def bubble(self) -> float:
        """The share of the time that ranks wait, on average."""
        return 1.0 - self.efficiency


def simulate(schedule: Schedule, times: Sequence[StageTime], send_s: float = 0.0) -> Played:
    """Play the lists. `times`: of every stage; `send_s`: from one rank to another, either way.

    Lists that wait for each other in a circle are refused.
    """
    if len(times) != schedule.num_stages:
        raise invalid_value("stage times", len(times), f"one for each of {schedule.num_stages} stages")
    if send_s < 0 or any(min(t.forward_s, t.input_s, t.weight_s, t.recompute_s) < 0 for t in times):
        raise invalid_value("seconds", "below 0", "numbers >= 0")
    check_schedule(schedule)
    starts, makespan = _play(schedule, times, send_s)
    _check_done(schedule, starts)
    seconds = [{kind: time.seconds(kind) for kind in KINDS} for time in times]
    busy = tuple(sum(seconds[a.stage][a.kind] for a in actions) for actions in schedule.actions)
    peaks = tuple(count_in_flight(actions) for actions in schedule.actions)
    return Played(makespan, busy, peaks, tuple(map(tuple, starts)))


def _play(schedule: Schedule, times: Sequence[StageTime], send_s: float) -> tuple[list[list[float]], float]:
    """When each rank's actions start, and when the last one ends; a rank that waits for ever has fewer starts.

    Results are numbered, forward before backward: what stage s made of micro-batch i is s * m + i, and as much further
    on for the gradient. A rank that cannot go on is written down at what it waits for; nobody else needs the same.
    """
    num_stages, m = schedule.num_stages, schedule.num_micro_batches
    half = num_stages * m
    ranks = [schedule.rank_of(stage) for stage in range(num_stages)]
    seconds = [{kind: time.seconds(kind) for kind in KINDS} for time in times]
    arrives, waiting = [-1.0] * (2 * half), [-1] * (2 * half)  # at the rank that needs it
    # What is made goes to the next stage, a gradient to the one before: how long that takes.
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
                needed = made - m  # below 0: the first stage's input is at hand
            elif kind == "W":
                needed, made = -1, -1  # its I is earlier in the same list
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
    return starts, max(now)


def _check_done(schedule: Schedule, starts: Sequence[Sequence[float]]) -> None:
    stuck = [
        f"rank {rank} at {actions[len(started)]}"
        for rank, (actions, started) in enumerate(zip(schedule.actions, starts, strict=True))
        if len(started) < len(actions)
    ]
    if stuck:
        remedy = f"They wait for each other: {', '.join(stuck[:8])}."
        raise invalid_value(
            "schedule", schedule.name, "lists in which every action's input is made at some time", remedy
        )


@dataclass(frozen=True)
class Pipeline:
    """A schedule by name, with times: what `step_seconds` answers for."""

    name: str
    num_ranks: int
    num_micro_batches: int
    num_chunks: int
    times: tuple[StageTime, ...]  # of every stage
    send_s: float = 0.0


def step_seconds(pipe: Pipeline) -> float:
    """The makespan, where the middle of a long step is not played: there every round of micro-batches takes as long.

    What a round adds is taken from two short steps, and is never less than the slowest rank's work.
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
    """What each rank computes for one micro-batch, over all of its stages."""
    placement = V if pipe.name == "zbv" else LOOP
    totals = [0.0] * pipe.num_ranks
    for stage, time in enumerate(pipe.times):
        totals[rank_of(stage, pipe.num_ranks, placement)] += time.total_s
    return totals


def _makespan(pipe: Pipeline, num_micro_batches: int) -> float:
    made = make_schedule(pipe.name, pipe.num_ranks, num_micro_batches, pipe.num_chunks)
    starts, makespan = _play(made, pipe.times, pipe.send_s)
    _check_done(made, starts)
    return makespan
