# SPDX-License-Identifier: Apache-2.0
"""ZeRO's traps: models that are hard to partition, mistakes that must not go unnoticed, checkpoints beside training."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from dist_support import run_ranks
from fork_support import fork_context
from zero_trap_cases import (
    alone_with_stage_3,
    beside,
    config_of,
    copier_fails,
    fail_to_begin,
    failing,
    hang_beside,
    in_between,
    inherited_variables,
    load_elsewhere,
    look_between,
    mistakes,
    own_sharding,
    ties,
    train_all,
    zero_between_micro_batches,
)

SUM: dict[str, Any] = {"gradient_allreduce_op": "sum"}
STAGES = (0, 1, 2, 3)


def cases(world: int, *stages: int) -> dict[str, Any]:
    """Model, config and whether it has groups, by name."""
    found: dict[str, Any] = {}
    for stage in stages:
        found[f"tied {stage}"] = ("tied", config_of(stage))
        found[f"plain {stage}"] = ("plain", config_of(stage))
        found[f"groups {stage}"] = ("tied", config_of(stage), True)
        found[f"half {stage}"] = ("tied", config_of(stage, bf16={"enabled": True}))
        found[f"sum {stage}"] = ("tied", config_of(stage, **SUM) if world else scaled(config_of(stage), 2))
    return found


def scaled(config: dict[str, Any], factor: int) -> dict[str, Any]:
    """With SGD, the sum over ranks is a larger step."""
    params = config["optimizer"]["params"]
    return {**config, "optimizer": {"type": "SGD", "params": {**params, "lr": params["lr"] * factor}}}


@cache
def trained(world: int, stage: int = 0) -> list[dict[str, Any]]:
    """Every case of a stage, on every rank."""
    return run_ranks(world, train_all, cases(world, stage))


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.matrix), 1, pytest.param(2, marks=pytest.mark.matrix), 3]
)
@pytest.mark.parametrize("name", ["tied", "plain", "groups", "half", "sum"])
def test_two_ranks_train_as_one_process(name: str, stage: int) -> None:
    truth, ranks = trained(0)[0][f"{name} 0"], [rank[f"{name} {stage}"] for rank in trained(2, stage)]
    rel = 2e-2 if name == "half" else 1e-5
    for rank in ranks:
        assert rank["losses"] == pytest.approx(truth["losses"], rel=rel)
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["weights"].keys() == truth["weights"].keys()
        for param, values in truth["weights"].items():
            assert rank["weights"][param] == pytest.approx(values, rel=rel, abs=rel), param
    if name == "tied":
        assert ranks[0]["weights"]["layers.0.weight"] == ranks[0]["weights"]["layers.4.weight"]
        assert truth["losses"][0] != truth["losses"][-1]
    if name == "plain":
        assert ranks[0]["weights"]["unused"] == [1.0] * 3
    if name == "groups":
        assert ranks[0]["weights"]["row"] != trained(2, stage)[0][f"tied {stage}"]["weights"]["row"]


@pytest.mark.matrix
def test_more_ranks_than_rows() -> None:
    truth = trained(0)[0]
    wanted = {name: case for name, case in cases(4, *STAGES).items() if name.split()[0] in ("tied", "groups", "plain")}
    for rank in run_ranks(4, train_all, wanted):
        for name, found in rank.items():
            assert found["losses"] == pytest.approx(truth[f"{name.split()[0]} 0"]["losses"], rel=1e-5), name


def test_mistakes_are_named() -> None:
    expected = {
        "scalar": "scale, a parameter without dimensions, cannot be used with zero_optimization.stage 3",
        "sharded": "Pass the model as it was before fully_shard()",
        "sharded, stage 2": "is a DTensor, but must be a plain tensor without ZeRO stage 3",
        "whole, stage 3": "Call twinflow.zero.partition(model, zero) before building the optimizer",
        "no parameters": "The model has no parameters",
        "torch's": "rule=AdamW cannot be used with zero_optimization.stage 3, because each rank has only some rows",
        "ddp": "A model in DistributedDataParallel cannot be used with TwinOptimizer",
        "another stage": "zero_optimization.stage is 2, but must be 1",
        "world": "data_parallel_size is 3, but must be 2",
        "frozen": "The ranks differ in frozen parameters: rank 1 has",
    }
    for said in run_ranks(2, mistakes):
        assert said.keys() == expected.keys()
        for name, text in expected.items():
            assert text in said[name], name
            assert said[name].startswith("ValueError"), name


@pytest.mark.matrix
def test_a_model_gathered_as_one_waits_for_all_its_weights() -> None:
    (truth,) = run_ranks(0, own_sharding)
    for found in run_ranks(2, own_sharding):
        assert found == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "offload", "limit"),
    [
        (2, {"delayed_update": True}, 0),  # the second rank has no part of any bucket, and half of the weights to write
        pytest.param(3, {"delayed_update": True}, 0, marks=pytest.mark.matrix),
        pytest.param(3, {}, 1 << 20, marks=pytest.mark.matrix),
        pytest.param(2, {"ratio": 0.5}, 1 << 20, marks=pytest.mark.matrix),
        pytest.param(1, {"states": "int8"}, 0, marks=pytest.mark.matrix),
        pytest.param(0, {}, 0, marks=pytest.mark.matrix),
    ],
)
def test_a_checkpoint_beside_training_is_that_of_the_call(
    tmp_path: Path, stage: int, offload: dict[str, Any], limit: int
) -> None:
    for rank in run_ranks(2, beside, str(tmp_path), stage, offload, limit):
        assert [rank["plain: is background"], rank["beside: is background"]] == [False, True]
        assert len(rank["plain"]) >= 4
        assert rank["beside"] == rank["plain"]
        assert rank["beside: weights"] == rank["plain: weights"]  # training has not noticed


@pytest.mark.parametrize(
    ("stage", "other", "worlds"),
    [(3, 2, [0]), *(pytest.param(a, 5 - a, [0, 2, 4], marks=pytest.mark.matrix) for a in (2, 3))],
)
def test_a_tied_weight_is_saved_once_and_loaded_anywhere(
    tmp_path: Path, stage: int, other: int, worlds: list[int]
) -> None:
    saved = run_ranks(2, ties, str(tmp_path), stage, True)[0]
    for world in worlds:
        loaded = run_ranks(world, ties, str(tmp_path), other, False)[0]
        assert loaded["weights"] == saved["weights"]
        assert loaded["next"] == pytest.approx(saved["next"], rel=1e-5)


def test_a_checkpoint_that_not_all_ranks_see_is_refused_by_all(tmp_path: Path) -> None:
    for said in run_ranks(2, load_elsewhere, str(tmp_path)):
        assert "is None, but must be 'global_step1', as on rank 0" in said


def test_weights_are_seen_that_come_between_two_looks() -> None:
    (truth,) = run_ranks(0, look_between, 0)
    assert truth[1] != truth[2]
    for found in run_ranks(2, look_between, 3):
        assert found == pytest.approx(truth, rel=1e-5)


@pytest.mark.matrix
def test_a_copy_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    ((said, is_done, files),) = run_ranks(0, copier_fails, str(tmp_path), timeout_s=90)
    assert "no room for a copy" in said
    assert is_done
    assert files == ["global_step1", "latest"]


def test_what_may_be_done_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    ((is_done, said, is_same),) = run_ranks(0, in_between, str(tmp_path))
    assert is_done
    assert "between backward() and step()" in said
    assert is_same


def test_a_world_of_one_may_be_partitioned() -> None:
    assert run_ranks(1, alone_with_stage_3) == [[0, 1, True]]


def test_a_group_of_the_script_may_have_the_variables_of_one_rank() -> None:
    assert run_ranks(2, inherited_variables) == [[0, 2, 0, 2], [1, 2, 1, 2]]


def test_one_full_disk_fails_the_checkpoint_on_all_ranks_and_nothing_else(tmp_path: Path) -> None:
    for rank in run_ranks(2, failing, str(tmp_path)):
        assert "rank 1: No space left on device" in rank["said"]
        assert not [name for name in rank["left"] if name.startswith("global_step")]
        assert rank["then"] == ["global_step2", "latest"]


def _begin(rank: int, folder: str) -> None:
    os.environ["TWINFLOW_THREADS"] = "1"
    err = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(err, 2)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    fail_to_begin(rank, 2)


def test_a_rank_that_fails_to_begin_ends_the_others(tmp_path: Path) -> None:
    context = fork_context()
    ranks = [context.Process(target=_begin, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 60
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [1, 1]
    assert "rank 1 failed in step 0: MemoryError: no room for the model" in Path(tmp_path, "0").read_text()


def test_steps_that_wait_for_a_disk_do_not_hang() -> None:
    assert run_ranks(0, hang_beside) == [[False, False]]


def test_zero_grad_of_the_module_between_micro_batches_drops_as_with_torch() -> None:
    for found in run_ranks(2, zero_between_micro_batches, [0, 2], True):
        assert all(difference < 1e-5 for difference in found.values()), found


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "whole"), [(0, False), (2, False), (3, True)])
def test_where_ranks_cannot_drop_gradients_zero_grad_of_a_module_is_an_error(stage: int, whole: bool) -> None:
    found = [rank[str(stage)] for rank in run_ranks(2, zero_between_micro_batches, [stage], whole)]
    assert all(isinstance(error, str) for error in found), found  # one of the two may have lost the other
    assert any("between backward() and step(), which is too late" in error for error in found)
