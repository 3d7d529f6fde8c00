# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as lists: the computations of every rank, in order. Nothing is run here.

Each of p ranks has one stage, or several stages (chunks). They are placed in a loop (rank, rank + p, ...) or in a V
(rank, 2p - 1 - rank), in which the last stage is on the first rank. Actions: F is a forward, B a whole backward. I
computes the gradient of the input and W the gradient of the weights; together they are B. Between I and W the saved
tensors of the stage stay in memory. Other ranks wait only for I.

GPipe: all forwards, then all backwards. 1F1B: only as many forwards in advance as keep the last rank busy. Interleaved:
like 1F1B with v chunks on each rank, which makes the fill and drain phases v times shorter. ZBV: a V of two chunks. W
runs when a rank would otherwise wait, so there is nearly no bubble, with the memory of 1F1B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from twinflow.errors import invalid_value

KINDS: Final = ("F", "B", "I", "W")
LOOP, V = "loop", "v"


class Action(NamedTuple):
    """One computation of a rank. `str` gives stage, kind and micro-batch, for example 3F0."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks."""

    name: str
    num_ranks: int
    num_micro_batches: int
    num_chunks: int  # stages of each rank
    placement: str  # loop or v
    actions: tuple[tuple[Action, ...], ...]  # by rank

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        return rank_of(stage, self.num_ranks, self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return stages_of(rank, self.num_ranks, self.num_chunks, self.placement)


def rank_of(stage: int, num_ranks: int, placement: str) -> int:
    """The rank of a stage, in a loop or in a V."""
    turn, offset = divmod(stage, num_ranks)
    return num_ranks - 1 - offset if placement == V and turn % 2 else offset


def stages_of(rank: int, num_ranks: int, num_chunks: int, placement: str) -> tuple[int, ...]:
    """The stages of a rank, in forward order."""
    back = num_ranks - 1 - rank  # in every second turn of a V the order of the ranks is reversed
    return tuple(turn * num_ranks + (back if placement == V and turn % 2 else rank) for turn in range(num_chunks))


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards."""
    _check_sizes(num_ranks, num_micro_batches)
    whole = range(num_micro_batches)
    lists = tuple(
        tuple([Action("F", rank, i) for i in whole] + [Action("B", rank, i) for i in whole])
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_ranks, num_micro_batches, 1, LOOP, lists)


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Forwards and backwards alternate, after as many forwards as there are later ranks."""
    made = interleaved(num_ranks, num_micro_batches, 1)
    return Schedule("1f1b", num_ranks, num_micro_batches, 1, LOOP, made.actions)


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int = 2) -> Schedule:
    """1F1B with `num_chunks` stages on each rank, in rounds of about as many micro-batches as ranks.

    A round runs its micro-batches through the first chunk, then through the next one. Backward starts with the last
    chunk.
    """
    _check_sizes(num_ranks, num_micro_batches)
    if num_chunks < 1:
        raise invalid_value("The number of chunks of a rank", num_chunks, "a whole number >= 1")
    size = round_size(num_ranks, num_micro_batches) if num_chunks > 1 else num_micro_batches
    rounds = [range(start, start + size) for start in range(0, num_micro_batches, size)]
    lists = []
    for rank in range(num_ranks):
        stages = stages_of(rank, num_ranks, num_chunks, LOOP)
        forwards = [Action("F", stage, i) for part in rounds for stage in stages for i in part]
        backwards = [Action("B", stage, i) for part in rounds for stage in reversed(stages) for i in part]
        lists.append(_in_turn(forwards, backwards, warmup(rank, num_ranks, num_micro_batches, num_chunks)))
    return Schedule("interleaved", num_ranks, num_micro_batches, num_chunks, LOOP, tuple(lists))


def zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Zero bubble on a V of two chunks.

    Each phase is a pattern of (kind, chunk). Occurrence n (from 0) of a step is micro-batch n. For p ranks, patterns
    need 2p - 1 micro-batches. With fewer micro-batches, the surplus steps are dropped.
    """
    _check_sizes(num_ranks, num_micro_batches)
    p, n = num_ranks, max(2 * num_ranks - 1, num_micro_batches)
    lists = []
    for rank in range(p):
        behind = p - rank
        steps = [
            "F0 " * (2 * behind - 1),
            "F1 F0 " * rank,
            "F1 I1 W1 " * behind,
            "F0 I0 W0 F1 I1 W1 " * (n - 2 * p + rank + 1),
            "I0 W0 F1 I1 W1 " * (behind - 1),
            "I0 I1 " * rank,
            "I0 W0 " * behind,
            "W1 " * rank,
            "W0 " * rank,
        ]
        lists.append(_numbered("".join(steps).split(), stages_of(rank, p, 2, V), num_micro_batches))
    return Schedule("zbv", p, num_micro_batches, 2, V, tuple(lists))


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """A schedule by name. `num_chunks` is used only by `interleaved`."""
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zbv": zbv}
    if name not in makers:
        raise invalid_value("schedule", name, makers)
    if name == "interleaved":
        return interleaved(num_ranks, num_micro_batches, num_chunks)
    return makers[name](num_ranks, num_micro_batches)


def round_size(num_ranks: int, num_micro_batches: int) -> int:
    """Micro-batches that an interleaved rank runs through a chunk before the next chunk."""
    num_rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % num_rounds:
        expected = f"divisible into {num_rounds} equal rounds"
        remedy = f"Use a multiple of {num_ranks}, the number of pipeline ranks."
        raise invalid_value("The number of micro-batches", num_micro_batches, expected, remedy)
    return num_micro_batches // num_rounds


def warmup(rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int) -> int:
    """Number of forwards in advance, before pairs of a forward and a backward: one for each later rank. With several
    chunks: two for each later rank, and one round for each chunk except the last."""
    behind = num_ranks - 1 - rank
    if num_chunks == 1:
        return min(num_micro_batches, behind)
    ahead = (num_chunks - 1) * round_size(num_ranks, num_micro_batches) + 2 * behind
    return min(num_micro_batches * num_chunks, ahead)


def peak_in_flight(name: str, rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> int:
    """The largest number of (stage, micro-batch) pairs whose activations a rank keeps at a time. No schedule is built.

    For ZBV with fewer than 2 * num_ranks - 1 micro-batches this is an upper bound.
    """
    p, m = num_ranks, num_micro_batches
    if name == "gpipe":
        return m
    if name == "zbv":
        return min(2 * m, 2 * p)
    return min(m * num_chunks, warmup(rank, p, m, num_chunks) + 1)


def count_in_flight(actions: Sequence[Action]) -> int:
    """The largest number of (stage, micro-batch) pairs whose activations are kept at a time, counted in a list of
    actions. The activations of a pair are kept from F to B or W.
    """
    held = most = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def check_schedule(schedule: Schedule) -> None:
    """Raise a ValueError unless every stage has, on its rank, one forward of each micro-batch and then one backward."""
    seen: Counter[tuple[str, int, int]] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            kind, stage, micro_batch = action
            name = f"An action of rank {rank}"
            if kind not in KINDS or not 0 <= stage < schedule.num_stages or schedule.rank_of(stage) != rank:
                raise invalid_value(name, str(action), "a stage of this rank, then F, B, I or W, then the micro-batch")
            if not 0 <= micro_batch < schedule.num_micro_batches or seen[action]:
                allowed = f"listed once, with a micro-batch from 0 to {schedule.num_micro_batches - 1}"
                raise invalid_value(name, str(action), allowed)
            before = {"B": "F", "I": "F", "W": "I"}.get(kind)
            if before and not seen[(before, stage, micro_batch)]:
                raise invalid_value(name, str(action), f"listed after {stage}{before}{micro_batch}")
            seen[action] += 1
    for stage in range(schedule.num_stages):
        for i in range(schedule.num_micro_batches):
            kinds = [kind for kind in KINDS if seen[(kind, stage, i)]]
            if kinds not in (whole := (["F", "B"], ["F", "I", "W"])):
                raise invalid_value(f"The list of actions of stage {stage}, micro-batch {i}", kinds, whole)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """Some forwards in advance, then forwards and backwards in turn, then the remaining backwards."""
    made = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        made += [forward, backward]
    return (*made, *backwards[len(forwards) - ahead :])


def _numbered(steps: Sequence[str], stages: Sequence[int], num_micro_batches: int) -> tuple[Action, ...]:
    """Convert steps such as F1 (kind and chunk) to actions. Occurrence n (from 0) of a step is micro-batch n."""
    times: Counter[str] = Counter()
    made = []
    for step in steps:
        if times[step] < num_micro_batches:
            made.append(Action(step[0], stages[int(step[1])], times[step]))
        times[step] += 1
    return tuple(made)


def _check_sizes(num_ranks: int, num_micro_batches: int) -> None:
    for name, value in (("pipeline stages", num_ranks), ("micro-batches", num_micro_batches)):
        if value < 1:
            raise invalid_value(f"The number of {name}", value, "a whole number >= 1")
