# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam and 1-bit LAMB by config on several ranks: the engine trains as the optimizer's class does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import replicated_cases as cases
from dist_support import run_ranks

KINDS = ["ZeroOneAdam", "OneBitLamb"]


def check(ranks: list[dict[str, Any]], kind: str) -> None:
    for found in (rank[kind] for rank in ranks):
        assert found["engine"] == found["class"]
        assert found["engine"][16:] == found["resumed"]
        assert found["sync"]
        assert found["engine"][15] == ranks[0][kind]["engine"][15]
        is_local = kind == "ZeroOneAdam" and found is not ranks[0][kind]
        assert (found["engine"] != ranks[0][kind]["engine"]) == is_local


def test_two_ranks_train_as_the_class_does(tmp_path: Path) -> None:
    check(run_ranks(2, cases.train, ["ZeroOneAdam"], str(tmp_path)), "ZeroOneAdam")


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_train_as_the_class_does(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(world, cases.train, KINDS, str(tmp_path))
    for kind in KINDS:
        check(ranks, kind)


@pytest.mark.matrix
def test_all_ranks_skip_a_step_together() -> None:
    first, second = run_ranks(2, cases.lose)
    assert first == second
    assert first["same"]
    assert 0 < first["skipped"][0] == first["skipped"][1] - 1


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_continues(kind: str, tmp_path: Path) -> None:
    run_ranks(2, cases.train, [kind], str(tmp_path))
    found = [run_ranks(world, cases.go_on, kind, str(tmp_path)) for world in (1, 2, 3)]
    for ranks in found:
        assert all(rank["digest"] == ranks[0]["digest"] for rank in ranks)
        assert ranks[0]["losses"][-1] < ranks[0]["untrained"]
