# SPDX-License-Identifier: Apache-2.0
"""twinflow.compat on two ranks: a pipeline, parameters whose state ranks share, and weights that one rank writes."""

from __future__ import annotations

from pathlib import Path

import compat_cases as cases
import pytest
import torch
from dist_support import run_ranks

# The first losses of alexnet_pipeline.py with deepspeed 0.19.8: two ranks, gloo.
ALEXNET = [2.2946712970733643, 2.3250513076782227, 2.30965518951416, 2.284709930419922, 2.3243069648742676]


@pytest.mark.matrix
def test_the_pipeline_has_deepspeeds_losses() -> None:
    first, second = run_ranks(2, cases.alexnet, len(ALEXNET))
    assert first["losses"] == pytest.approx(ALEXNET, rel=1e-4)
    assert second == {}


@pytest.mark.parametrize("stage", [2, 3])
def test_all_ranks_have_the_whole_state(stage: int) -> None:
    (alone,) = run_ranks(1, cases.whole_states, 0)
    assert len(alone) == 4
    assert alone[2] == [0.25] * 40
    for found in run_ranks(2, cases.whole_states, stage):
        for one, other in zip(found, alone, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


def test_what_the_modifier_writes_all_ranks_have() -> None:
    one, two = run_ranks(2, cases.gathered)
    assert one == two
    assert one[:2] == [[7.0] * 3, [7.0] * 40]
    assert one[2] == pytest.approx([7.0] * 40, abs=0.1)  # a step of 1e-2 later


@pytest.mark.matrix
@pytest.mark.parametrize("stages", [(2, 2), (3, 3), (0, 3)])
def test_engines_share_a_loss_and_a_model_gets_another_engine(stages: tuple[int, int]) -> None:
    (alone,) = run_ranks(1, cases.again, (0, 0))
    for found in run_ranks(2, cases.again, stages):
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_have_the_results_of_one(stage: int, tmp_path: Path) -> None:
    (alone,) = run_ranks(1, cases.variants, 0, str(tmp_path / "one"))
    found = run_ranks(2, cases.variants, stage, str(tmp_path / "two"))
    for rank, own in enumerate(found):
        for name in ("moved", "uncorrected", "evaluated", *(["lamb"] if stage < 3 else [])):
            assert own[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
        assert (own["moved 0"], own["moved 1"]) == (1.0, 0.0)
        assert own["names"] == (alone["names"] if stage < 3 or rank == 0 else [])
        assert own["tags"] == ["latest", "of rank 0"]


@pytest.mark.matrix
def test_a_model_that_is_built_in_half_precision() -> None:
    torch.set_default_dtype(torch.bfloat16)
    want = [float(value) for param in cases.net().parameters() for value in param.detach().reshape(-1)]
    torch.set_default_dtype(torch.float32)
    for world in (1, 2):
        for weights, dtype in run_ranks(world, cases.built_in_half):
            assert dtype == "torch.bfloat16"
            assert weights == want
