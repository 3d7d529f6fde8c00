# SPDX-License-Identifier: Apache-2.0
"""Ranks whose batches use different experts train as plain torch does in one process with all data.

An expert that has a gradient on one rank only is updated on all ranks, with the mean over the ranks. An expert that has
a gradient on no rank is not updated.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from dist_support import run_ranks
from experts_cases import config_of, train, train_all
from experts_support import MODELS, check, plain
from twin_support import matrix_but

OFFLOADS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "host": {},
    "half": {"ratio": 0.5},
    "weights": {"params": True},
}
STEPS = 40
plain = cache(plain)
CELLS = [
    (name, stage, offload, parts, clips)
    for name, stage, offload, parts, clips in product(MODELS, (0, 1, 2, 3), OFFLOADS, (1, 2), (False, True))
    if offload != "weights" or stage == 3
]
QUICK = [
    ("Modules", 1, "host", 2, True),
    ("Modules", 2, "half", 1, False),
    ("Modules", 3, "host", 1, False),
    ("Modules", 3, "half", 2, True),
    ("Modules", 3, "weights", 2, False),
]


@cache
def quick() -> list[list[dict[str, Any]]]:
    """By rank: the weights after each training of the quick suite."""
    cases = [(name, config_of(2, stage, parts, clips, OFFLOADS[o]), 0, 10) for name, stage, o, parts, clips in QUICK]
    return run_ranks(2, train_all, cases)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_ranks_with_different_experts(case: tuple[str, int, str, int, bool]) -> None:
    name, stage, _, parts, clips = case
    truth, counts = plain(name, parts, clips, 10)
    assert counts["missing"] > 20 or name != "Modules"
    for rank, found in enumerate(quick()):
        weights = found[QUICK.index(case)]
        if weights or stage < 3 or rank == 0:  # with stage 3 the first rank gathers the weights
            check(weights, truth)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CELLS, ids=str)
def test_ranks_with_different_experts_in_all_cases(case: tuple[str, int, str, int, bool]) -> None:
    name, stage, offload, parts, clips = case
    steps = STEPS if name == "Modules" else 10
    config = config_of(2, stage, parts, clips, OFFLOADS[offload])
    check(run_ranks(2, train, name, config, 0, steps)[0], plain(name, parts, clips, steps)[0])


@pytest.mark.parametrize("world", matrix_but([(1,)], [(1,), (2,)]))
def test_a_checkpoint_continues_on_other_numbers_of_ranks(world: int, tmp_path: Path) -> None:
    offload = {"ratio": 0.5}
    run_ranks(2, train, "Modules", config_of(2, 3, 2, True, offload), 0, 5, "", str(tmp_path))
    found = run_ranks(world, train, "Modules", config_of(world, 2, 2, True, offload), 5, 10, str(tmp_path))
    check(found[0], plain("Modules", 2, True, 10)[0])
