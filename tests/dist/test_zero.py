# SPDX-License-Identifier: Apache-2.0
"""ZeRO through the engine: any stage, offload and accumulation trains as one process does, with its part of the state.

One process with the same global batch is the truth. Sums over ranks are rounded otherwise, so losses are compared;
replicas are compared bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from dist_support import run_ranks
from zero_cases import NUM_STEPS, auto_on_ranks, config_of, digest_alone, train_all, train_without_a_branch

OFFLOADS: dict[str, dict[str, Any] | None] = {"none": None, "full": {}, "half": {"ratio": 0.5}}
CASES = [(stage, name, parts) for stage in (0, 1, 2, 3) for name in OFFLOADS for parts in (1, 4)]
OFFLOADS["params"] = {"params": True}
OFFLOADS["params half"] = {"params": True, "ratio": 0.5}
CASES += [(3, name, parts) for name in ("params", "params half") for parts in (1, 4)]

FEW_STEPS = 3  # of the quick suite: from the second on there are moments, norms and clipping to go wrong
# Every stage with each offload and each number of micro-batches at least once.
QUICK = [(0, "none", 1), (0, "full", 4), (1, "half", 1), (1, "none", 4), (2, "full", 1), (2, "half", 4)]
QUICK += [(2, "none", 1), (3, "half", 1), (3, "full", 4), (3, "params", 1), (3, "params", 4), (3, "params half", 4)]


def name_of(case: tuple[int, str, int]) -> str:
    return "stage {}, offload {}, {} micro-batches".format(*case)


@cache
def alone(parts: int, num_steps: int) -> dict[str, Any]:
    """Losses and state of one process."""
    configs = {"alone": config_of(0, {}, parts, 1)}
    found: dict[str, Any] = run_ranks(0, train_all, configs, num_steps)[0]["alone"]
    return found


@cache
def together(world: int, num_steps: int) -> list[dict[str, Any]]:
    """Every case, or those of the quick suite, on every rank."""
    cases = QUICK if num_steps == FEW_STEPS else CASES
    configs = {name_of(case): config_of(case[0], OFFLOADS[case[1]], case[2], world) for case in cases}
    return run_ranks(world, train_all, configs, num_steps)


def check(world: int, case: tuple[int, str, int], num_steps: int = NUM_STEPS) -> None:
    stage, offload, parts = case
    ranks = [rank[name_of(case)] for rank in together(world, num_steps)]
    truth = alone(parts, num_steps)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(truth["losses"], rel=1e-5)
        assert rank["norm"] == pytest.approx(truth["norm"], rel=1e-4)
        assert rank["digests"] == ranks[0]["digests"]  # replicas have the same bits after every step
    total = sum(rank["state_bytes"] for rank in ranks)
    assert truth["losses"][-1] != truth["losses"][0]
    copies = world if stage == 0 else 1
    if offload == "params" or (offload == "full" and stage < 3):
        assert total / copies == 12 * ranks[0]["whole_numel"]
        padding = 1.15 if offload == "params" else 1.1  # parameters stay whole there: more and smaller buckets
        assert ranks[0]["whole_numel"] <= padding * truth["numel"]
    if offload == "full" and stage == 3:  # each parameter's rows are padded to blocks
        assert 12 * truth["numel"] <= total <= 1.3 * 12 * truth["numel"]
    shares = [rank["state_bytes"] / total for rank in ranks]
    assert max(shares) == pytest.approx(1 / world, rel=0.02)
    if offload == "params half":
        whole = [rank[name_of((stage, "params", parts))] for rank in together(world, num_steps)]
        assert [rank["digests"] for rank in ranks] == [rank["digests"] for rank in whole]
        assert 0 < ranks[0]["offloaded_numel"] < whole[0]["offloaded_numel"]
    if stage == 3 and not offload.startswith("params"):
        return  # torch's own collectives
    sends = num_steps * (parts if stage >= 2 else 1)
    whole, share = 4 * ranks[0]["whole_numel"], (world - 1) / world
    start = 0 if stage else num_steps * whole * share  # an all-reduce: there and back
    for rank in ranks[1:]:  # the first has sent its weights to all at the start
        assert rank["sent"]["reduce"] == pytest.approx(sends * whole * share + start, rel=1e-6)
        shown = num_steps * whole * share if stage else 0
        if offload.startswith(
            "params"
        ):  # blocks on the host fetch theirs, forwards and backwards; the rest is published
            blocks = 4 * rank["offloaded_numel"] * share
            last = 4 * rank["last_numel"] * share  # the last block stays until its backward
            fetched = num_steps * parts * (2 * blocks - last)
            assert rank["sent"]["fetch"] == pytest.approx(fetched, rel=1e-6)
            shown -= num_steps * blocks
        assert rank["sent"]["publish"] == pytest.approx(shown, rel=1e-6)


@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_two_ranks_train_as_one_process(case: tuple[int, str, int]) -> None:
    check(2, case, FEW_STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_case_for_more_steps(case: tuple[int, str, int]) -> None:
    check(2, case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_four_ranks_train_as_one_process(case: tuple[int, str, int]) -> None:
    check(4, case)


def test_a_world_of_one_changes_no_bit() -> None:
    (alone,) = run_ranks(0, digest_alone, None)
    for stage in (0, 1, 2):
        assert run_ranks(1, digest_alone, stage) == [alone], stage


def test_layers_that_run_again_see_the_same_weights() -> None:
    extra = {"activation_checkpointing": {"layers": ["Block"], "cpu_checkpointing": True}}
    configs = {str(stage): {**config_of(stage, {}, 1, 2), **extra} for stage in (2, 3)}
    truth = alone(1, FEW_STEPS)["losses"]
    for rank in run_ranks(2, train_all, configs, FEW_STEPS):
        for stage in configs:
            assert rank[stage]["losses"] == pytest.approx(truth, rel=1e-5), stage


def test_a_rank_whose_backward_leaves_blocks_out_fetches_them_all_the_same() -> None:
    """Ranks gather in one order: none may ask for less than the others."""
    losses = run_ranks(2, train_without_a_branch, timeout_s=100)
    assert all(len(rank) == 3 for rank in losses)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_ranks_that_measure_different_times_choose_the_same_places(stage: int) -> None:
    ranks = run_ranks(2, auto_on_ranks, stage)
    for rank in ranks:
        assert rank["auto"]["ratio"] == "auto"
        assert rank["auto"]["is_placed"]
        assert rank["auto"]["places"] == ranks[0]["auto"]["places"]
        assert rank["auto"]["digest"] == rank["host"]["digest"]
    assert {place for places in ranks[0]["auto"]["places"] for place in places} >= {"host", "resident"}
