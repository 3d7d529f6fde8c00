# SPDX-License-Identifier: Apache-2.0
"""Schedules: lists by hand, the same as torch's own, micro-batches in flight."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from twinflow.parallel.schedules import (
    LOOP,
    Action,
    Schedule,
    V,
    check_schedule,
    count_in_flight,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    peak_in_flight,
    rank_of,
    stages_of,
    zbv,
)

SIZES = list(product((1, 2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 16, 24)))


def text(schedule: Schedule, rank: int) -> str:
    return " ".join(str(action) for action in schedule.actions[rank])


def torchs(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int, placement: str) -> list[str]:
    """The lists of torch's class; stages are stand-ins, for no process is needed to make them."""
    stages: list[Any] = [
        SimpleNamespace(
            group_size=num_ranks,
            group_rank=0,
            num_stages=num_ranks * num_chunks,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == num_ranks * num_chunks - 1,
            submod=None,
            has_backward=True,
        )
        for stage in stages_of(0, num_ranks, num_chunks, placement)
    ]
    made = getattr(torch_schedules, name)(stages, num_micro_batches)
    lists = [[str(action) for action in made.pipeline_order[rank]] for rank in range(num_ranks)]
    return [" ".join(a for a in actions if re.fullmatch(r"\d+[FBIW]\d+", a)) for actions in lists]


def test_gpipe_and_1f1b_by_hand() -> None:
    assert text(gpipe(2, 3), 1) == "1F0 1F1 1F2 1B0 1B1 1B2"
    made = one_f_one_b(4, 4)
    assert text(made, 0) == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert text(made, 1) == "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"
    assert text(made, 2) == "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3"
    assert text(made, 3) == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"
    assert text(one_f_one_b(4, 2), 0) == "0F0 0F1 0B0 0B1"


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "num_chunks"), [(2, 4, 2), (4, 8, 2), (4, 10, 3), (4, 3, 2)]
)
def test_interleaved_is_torchs(num_ranks: int, num_micro_batches: int, num_chunks: int) -> None:
    made = interleaved(num_ranks, num_micro_batches, num_chunks)
    expected = torchs("ScheduleInterleaved1F1B", num_ranks, num_micro_batches, num_chunks, LOOP)
    assert [text(made, rank) for rank in range(num_ranks)] == expected


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (4, 8), (4, 16), (3, 5), (4, 2), (8, 9)])
def test_zbv_is_torchs(num_ranks: int, num_micro_batches: int) -> None:
    made = zbv(num_ranks, num_micro_batches)
    expected = torchs("ScheduleZBVZeroBubble", num_ranks, num_micro_batches, 2, V)
    assert [text(made, rank) for rank in range(num_ranks)] == expected


def test_which_stages_a_rank_has() -> None:
    assert [stages_of(rank, 4, 2, LOOP) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [stages_of(rank, 4, 2, V) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    for placement, chunks in product((LOOP, V), (1, 2, 3)):
        for stage in range(4 * chunks):
            assert stage in stages_of(rank_of(stage, 4, placement), 4, chunks, placement)
    assert zbv(4, 8).rank_of(7) == 0
    assert zbv(4, 8).stages_of(3) == (3, 4)


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_every_list_is_whole_and_in_flight_as_the_formula_says(num_ranks: int, num_micro_batches: int) -> None:
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)):
        if name == "interleaved" and num_micro_batches % max(1, num_micro_batches // num_ranks):
            continue
        made = make_schedule(name, num_ranks, num_micro_batches, chunks)
        check_schedule(made)
        assert (made.name, made.num_chunks) == (name, chunks)
        for rank, actions in enumerate(made.actions):
            counted = count_in_flight(actions)
            formula = peak_in_flight(name, rank, num_ranks, num_micro_batches, chunks)
            if name == "zbv" and num_micro_batches < 2 * num_ranks - 1:
                assert counted <= formula
            else:
                assert counted == formula


def test_in_flight_of_1f1b_falls_from_rank_to_rank_and_gpipes_is_everything() -> None:
    assert [peak_in_flight("1f1b", rank, 4, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [peak_in_flight("gpipe", rank, 4, 16) for rank in range(4)] == [16] * 4
    assert [peak_in_flight("zbv", rank, 4, 16, 2) for rank in range(4)] == [8] * 4  # halves of a stage


def replaced(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return Schedule("mine", schedule.num_ranks, schedule.num_micro_batches, schedule.num_chunks, LOOP, tuple(lists))


def test_lists_that_are_not_whole_are_refused() -> None:
    good = one_f_one_b(2, 2)
    first = list(good.actions[0])
    for actions, words in (
        (first[:-1], "stage 0, micro-batch 1 is ['F'], but must be one of ['F', 'B'], ['F', 'I', 'W']."),
        ([*first, first[0]], "listed once, with a micro-batch from 0 to 1"),
        ([first[2], *first[:2], first[3]], "listed after 0F0"),
        ([*first[:-1], Action("B", 1, 1)], "An action of rank 0 is '1B1', but must be a stage of this rank"),
        ([*first[:-1], Action("X", 0, 1)], "F, B, I or W"),
        ([*first[:-1], Action("I", 0, 1)], "The list of actions of stage 0, micro-batch 1 is ['F', 'I'], but must"),
    ):
        with pytest.raises(ValueError, match=r" is .*, but must be ") as raised:
            check_schedule(replaced(good, 0, actions))
        assert words in str(raised.value)


def test_mistakes_are_named() -> None:
    for call, words in (
        (lambda: make_schedule("dfs", 2, 2), "'gpipe', '1f1b', 'interleaved', 'zbv'"),
        (
            lambda: interleaved(4, 9, 2),
            "divisible into 2 equal rounds. Use a multiple of 4, the number of pipeline ranks.",
        ),
        (lambda: interleaved(4, 8, 0), "The number of chunks of a rank is 0"),
        (lambda: gpipe(0, 8), "The number of pipeline stages is 0"),
        (lambda: zbv(2, 0), "The number of micro-batches is 0"),
    ):
        with pytest.raises(ValueError, match="is") as raised:
            call()
        assert words in str(raised.value)
