# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of one rank, or of all, at any moment: the training goes on from a whole checkpoint to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_cases import NUM_STEPS, WORLD, Past, draw, run

NUM_MOMENTS = 50
QUICK = (4,)  # while a checkpoint is written


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A run that nobody killed."""
    past = run(tmp_path_factory.mktemp("straight"), 0)
    assert len(past.losses) == WORLD * NUM_STEPS
    assert len(set(past.weights.values())) == 1
    return past


def check(folder: Path, seed: int, straight: Past) -> None:
    moment = draw(seed, straight.save_s(), straight.step_s())
    killed = run(folder, 0, moment)
    again = run(folder, 1)
    assert again.began is not None
    # A checkpoint that a rank knew to be there is not lost, and none is made up.
    assert killed.saved <= again.began <= max(killed.saving, killed.saved), moment
    assert again.weights == straight.weights, moment
    for past in (killed, again):
        for place, loss in past.losses.items():
            assert loss == straight.losses[place], (moment, place)
    for rank in range(WORLD):
        for step in range(again.began + 1, NUM_STEPS + 1):
            assert (rank, step) in again.losses


@pytest.mark.parametrize("seed", QUICK)
def test_killed_it_goes_on(tmp_path: Path, straight: Past, seed: int) -> None:
    check(tmp_path, seed, straight)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(100, 100 + NUM_MOMENTS))
def test_killed_at_fifty_moments_it_goes_on(tmp_path: Path, straight: Past, seed: int) -> None:
    check(tmp_path, seed, straight)
