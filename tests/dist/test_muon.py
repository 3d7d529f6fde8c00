# SPDX-License-Identifier: Apache-2.0
"""Muon on several ranks: the results of one process, and each matrix is orthogonalised by one rank."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import muon_cases
import pytest
import torch
from dist_support import run_ranks
from parallel_cases import config_of, train_all
from twin_support import matrix_but


@cache
def alone(is_clipped: bool = True) -> dict[str, Any]:
    options = {} if is_clipped else {"max_grad_norm": None}
    found: dict[str, Any] = run_ranks(0, muon_cases.train, None, {"ratio": 1.0, **options})[0]
    return found


CELLS = list(itertools.product((1, 2, 4), (0, 1, 2, 3), (1.0, 0.5)))
QUICK = [(2, 0, 1.0), (2, 1, 0.5), (2, 2, 1.0), (4, 3, 0.5)]


@pytest.mark.parametrize(("world", "stage", "ratio"), matrix_but(QUICK, CELLS))
def test_ranks_are_as_one_process(world: int, stage: int, ratio: float) -> None:
    ranks = run_ranks(world, muon_cases.train, stage, {"ratio": ratio, "early": stage >= 2})
    truth = alone()
    for found in ranks:
        for name, values in truth["weights"].items():
            torch.testing.assert_close(
                torch.tensor(found["weights"][name]), torch.tensor(values), rtol=0, atol=1e-6, msg=name
            )
    own = sorted(name for found in ranks for name in found["own"])
    assert own == sorted(truth["own"] * (world if stage in (0, 3) else 1))


@pytest.mark.parametrize("stage", [1, 3])
def test_updates_during_backward(stage: int) -> None:
    """Without clipping, an update with its exchange of rows begins as soon as its gradients are complete."""
    options = {"ratio": 0.5, "early": True, "max_grad_norm": None}
    truth = alone(is_clipped=False)
    for found in run_ranks(2, muon_cases.train, stage, options):
        for name, values in truth["weights"].items():
            torch.testing.assert_close(
                torch.tensor(found["weights"][name]), torch.tensor(values), rtol=0, atol=1e-6, msg=name
            )


@pytest.mark.matrix
def test_stages_of_a_pipeline_are_as_one_process() -> None:
    """Two stages, alone and with two data ranks. The first stage may have other param groups than the last one."""
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "eps": 1e-3}}}
    truth = run_ranks(0, train_all, {"x": {**config_of(1, 1, 1), **muon}}, 4)[0]["x"]["losses"]
    for pipe, data, stage in ((2, 1, 0), (2, 2, 1)):
        config = {**config_of(pipe, 1, data, stage=stage, offload="half"), **muon}
        for found in run_ranks(pipe * data, train_all, {"x": config}, 4):
            assert found["x"]["losses"] == pytest.approx(truth, rel=1e-5)


def test_marks_of_parameters_are_kept_when_ranks_divide_them() -> None:
    (found,) = run_ranks(1, muon_cases.marked, 3)
    assert {name for name, uses_muon in found.items() if uses_muon} == {"blocks.0.mlp.up.weight"}


@pytest.mark.parametrize("stage", matrix_but([3], [2, 3]))
def test_a_checkpoint_continues_on_other_numbers_of_ranks(stage: int, tmp_path: Path) -> None:
    run_ranks(2, muon_cases.save, stage, str(tmp_path))
    straight = run_ranks(1, muon_cases.resume, stage, "")[0]
    for world in (1, 2):
        for found in run_ranks(world, muon_cases.resume, stage, str(tmp_path)):
            for name, values in straight.items():
                torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=0, atol=1e-6, msg=name)
