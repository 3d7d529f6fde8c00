# SPDX-License-Identifier: Apache-2.0
"""Pipeline x tensor x data with ZeRO and offload: the losses of one process, the same norm, and equal replicas."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from dist_support import run_ranks
from parallel_cases import NUM_STEPS, OFFLOADS, config_of, train_all

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
LONG_S = 900  # eight ranks on a machine that may be busy
pytestmark = pytest.mark.timeout(LONG_S + 100)


def truth(num_steps: int = NUM_STEPS, **shape: Any) -> dict[str, Any]:
    """One process, one micro-batch."""
    alone = config_of(1, 1, 1, num_micro=1)
    found: dict[str, Any] = run_ranks(0, train_all, {"alone": alone}, num_steps, shape)[0]["alone"]
    return found


def check(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for name in ranks[0]:
        for rank, one in enumerate(ranks):
            assert one[name]["losses"] == pytest.approx(wanted["losses"], rel=1e-5), (name, rank)
            # Later norms differ between one process's own ways to sum, too: 4e-5 with other micro-batches.
            assert one[name]["norms"][:5] == pytest.approx(wanted["norms"][:5], rel=2e-6), (name, rank)
        seen: dict[str, str] = {}
        for rank, one in enumerate(ranks):
            for param, digest in one[name]["digests"].items():
                if "stage 3" not in name:  # there each rank has rows of its own
                    assert seen.setdefault(param, digest) == digest, (name, rank, param)


def test_a_few_ways() -> None:
    """Every axis and stage once, for some steps; all of them for ten steps in the matrix."""
    configs = {
        "pipe data zbv stage 1": config_of(2, 1, 2, stage=1, offload="half", schedule="zbv"),
        "pipe tensor 1f1b stage 0": config_of(2, 2, 1, stage=0),
        "tensor data stage 2": config_of(1, 2, 2, stage=2),
        "pipe data stage 3": config_of(2, 1, 2, stage=3),
    }
    ranks, wanted = run_ranks(4, train_all, configs, 3), truth(3)
    check(ranks, wanted)
    states = [one["pipe data stage 3"]["whole"] for one in ranks]
    assert {**states[0], **states[2]} == wanted["whole"]  # whole weights on the first data rank of each stage
    assert states[1] == states[3] == {}


@pytest.mark.matrix
def test_without_ties() -> None:
    shape = {"tied": False}
    configs = {schedule: config_of(2, 1, 1, stage=1, schedule=schedule) for schedule in SCHEDULES}
    check(run_ranks(2, train_all, configs, NUM_STEPS, shape), truth(**shape))


@pytest.mark.matrix
def test_four_stages() -> None:
    configs = {schedule: config_of(4, 1, 1, offload="none", schedule=schedule) for schedule in ("gpipe", "1f1b")}
    check(run_ranks(4, train_all, configs), truth())


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipe_tensor_data(schedule: str) -> None:
    configs = {
        f"{schedule} stage {stage} {offload}": config_of(2, 2, 2, stage=stage, offload=offload, schedule=schedule)
        for stage, offload in product((0, 1, 2), OFFLOADS)
    }
    check(run_ranks(8, train_all, configs, timeout_s=LONG_S), truth())


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipe_data(schedule: str) -> None:
    """Stages that partition sums and weights, too."""
    configs = {
        f"{schedule} stage {stage} {offload}": config_of(2, 1, 2, stage=stage, offload=offload, schedule=schedule)
        for stage, offload in product((0, 1, 2, 3), OFFLOADS)
    }
    check(run_ranks(4, train_all, configs, timeout_s=LONG_S), truth())


@pytest.mark.matrix
def test_checkpointed_layers_and_sequence_parallel_norms() -> None:
    checkpointed = {"activation_checkpointing": {"layers": ["Block"]}}
    sequence = {"tensor_parallel": {"autotp_size": 2, "sequence": True}}
    configs = {
        **{f"{s}": config_of(2, 1, 2, stage=1, schedule=s, **checkpointed) for s in SCHEDULES},
        "parts": config_of(2, 2, 1, activation_checkpointing={"layers": ["Block"], "partition_activations": True}),
        "sequence": config_of(2, 2, 1, stage=1, **sequence),
        "both": config_of(2, 2, 1, stage=1, schedule="zbv", **sequence, **checkpointed),
    }
    ranks = run_ranks(4, train_all, configs, timeout_s=LONG_S)
    check(ranks, truth())
    for rank in ranks:
        whole, kept = rank["parts"]["kept"]
        assert 0 < 2 * kept == whole  # of two tensor ranks
