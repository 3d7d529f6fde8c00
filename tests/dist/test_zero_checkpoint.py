# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks: loaded by any other number of them, at any stage, ratio and format, with equal state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import load, resume, save
from dist_support import run_ranks

HALF: dict[str, Any] = {"ratio": 0.5}
PARAMS: dict[str, Any] = {"params": True}  # weights on the hosts


def whole(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """State by parameter: step, and every key's numbers put together from the parts of all ranks."""
    parts: dict[str, list[tuple[int, list[Any]]]] = {}
    for rank in ranks:
        for name, value in rank["state"].items():
            param, start = name.rsplit(" ", 1)
            parts.setdefault(param, []).append((int(start), value))
    found: dict[str, Any] = {}
    for param, pieces in parts.items():
        pieces.sort()
        values: dict[str, list[float]] = {}
        for start, (numel, step, *keys) in pieces:
            for key, numbers in keys:
                assert len(values.setdefault(key, [])) == start  # no gap, nothing twice
                values[key] += numbers
                assert len(numbers) == numel
            assert step == pieces[0][1][1]
        found[param] = {"step": pieces[0][1][1], **values}
    return found


@pytest.mark.parametrize(
    ("stage", "states", "more"),
    [
        (2, "fp32", HALF),
        *(pytest.param(*case, HALF, marks=pytest.mark.matrix) for case in ((1, "int8"), (3, "fp32"))),
        pytest.param(3, "bf16", PARAMS, marks=pytest.mark.matrix),
        pytest.param(3, "fp32", PARAMS | HALF, marks=pytest.mark.matrix),
    ],
)
def test_saved_by_four_ranks_loads_on_any_number_and_back(
    tmp_path: Path, stage: int, states: str, more: dict[str, Any]
) -> None:
    offload = {"states": states, **more}
    saved = run_ranks(4, save, str(tmp_path / "four"), stage, offload)
    truth = whole(saved)
    for world in (1, 2, 3):
        again = str(tmp_path / f"again{world}")
        loaded = run_ranks(world, load, str(tmp_path / "four"), stage, offload, again)
        assert whole(loaded) == truth, world
        assert {rank["weights"] for rank in loaded} == {saved[0]["weights"]}
        assert {rank["steps"] for rank in loaded} == {3}
    back = run_ranks(4, load, str(tmp_path / "again3"), stage, offload)
    assert [rank["state"] for rank in back] == [rank["state"] for rank in saved]


@pytest.mark.matrix
def test_another_stage_ratio_or_process_loads_it(tmp_path: Path) -> None:
    saved = run_ranks(2, save, str(tmp_path), 2, {})
    truth = whole(saved)
    for stage, offload in ((0, {}), (1, HALF), (2, None), (3, HALF), (3, PARAMS), (3, PARAMS | HALF)):
        loaded = run_ranks(2, load, str(tmp_path), stage, offload)
        assert whole(loaded[:1] if stage == 0 else loaded) == truth, stage
    assert whole(run_ranks(0, load, str(tmp_path), 0, HALF)) == truth


@pytest.mark.matrix
def test_going_on_is_bit_identical(tmp_path: Path) -> None:
    straight = run_ranks(2, resume, str(tmp_path / "a"), 2, HALF, 5)
    run_ranks(2, resume, str(tmp_path / "b"), 2, HALF, 2)
    assert [r["weights"] for r in run_ranks(2, resume, str(tmp_path / "b"), 2, HALF, 5)] == [
        r["weights"] for r in straight
    ]
    assert straight[0]["weights"] == straight[1]["weights"]


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "offload"), [(2, HALF), (3, HALF), (3, PARAMS)])
def test_written_while_all_ranks_train_on(tmp_path: Path, stage: int, offload: dict[str, Any]) -> None:
    truth = run_ranks(2, save, str(tmp_path / "plain"), stage, offload)
    later = run_ranks(2, save, str(tmp_path / "beside"), stage, offload, True)
    assert later[0]["weights"] != truth[0]["weights"]
    loaded = run_ranks(2, load, str(tmp_path / "beside"), stage, offload)
    assert [rank["state"] for rank in loaded] == [rank["state"] for rank in truth]
    assert loaded[0]["weights"] == truth[0]["weights"]


def test_ranks_that_all_have_everything_save_it_once(tmp_path: Path) -> None:
    saved = run_ranks(2, save, str(tmp_path), 0, HALF)
    assert saved[0]["state"] == saved[1]["state"]
    assert whole(run_ranks(0, load, str(tmp_path), 0, HALF)) == whole(saved[:1])
