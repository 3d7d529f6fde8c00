# SPDX-License-Identifier: Apache-2.0
"""What users do with pipelines and tensor ranks: the same as in one process, or refused on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist_support import run_ranks
from parallel_cases import config_of
from parallel_trap_cases import (
    SYMBOLS,
    dropout_after_load,
    given_parameters,
    one_data_rank,
    own_loader,
    refused,
    save_whole,
    second_try,
    tied_layers,
)


def test_refusals_name_the_reason_and_change_nothing() -> None:
    words = {
        "schedule": "pipeline.schedule='zbv' cannot be used with PipelineModule(schedule='1f1b')",
        "interval": "pipeline.activation_checkpoint_interval=1 cannot be used with this PipelineModule",
        "partition": "pipeline.partition='uniform' cannot be used with this PipelineModule",
        "frozen": "parameters to train on pipeline rank 0 is 0",
        "plan": "tensor_parallel.plan is 'nosuch'",
        "heads": "2",
        "layers": "stages",
    }
    for rank in run_ranks(2, refused):
        for name, said in rank.items():
            assert words[name] in said, (name, said)


def test_groups_made_of_the_whole_model() -> None:
    configs = {"tensor": config_of(1, 2, 1), "pipe": config_of(2, 1, 1, schedule="zbv")}
    ranks = run_ranks(2, given_parameters, configs)
    alone = run_ranks(0, given_parameters, {"alone": config_of(1, 1, 1, num_micro=1)})[0]["alone"]
    for name in configs:
        for rank in ranks:
            found = rank[name]
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
            assert (found["kept"], found["groups"]) == (found["own"], 2), name


@pytest.mark.matrix
def test_layers_whose_first_and_last_are_one() -> None:
    alone = run_ranks(0, tied_layers, ["1f1b"])[0]["1f1b"]
    for rank in run_ranks(2, tied_layers, ["gpipe", "1f1b", "interleaved", "zbv"]):
        for schedule, losses in rank.items():
            assert losses == pytest.approx(alone, rel=1e-5), schedule


@pytest.mark.matrix
def test_a_refused_start_leaves_nothing_behind() -> None:
    for rank in run_ranks(2, second_try):
        assert rank["again"] == rank["fresh"]


@pytest.mark.matrix
def test_tensor_ranks_draw_the_same_numbers_after_a_load(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    for rank in run_ranks(2, dropout_after_load, str(tmp_path)):
        for name, digest in rank[0].items():
            assert seen.setdefault(name, digest) == digest, name


@pytest.mark.matrix
def test_data_of_the_engines_own(tmp_path: Path) -> None:
    ranks = run_ranks(2, own_loader, str(tmp_path))
    for rank in ranks:
        assert rank["first"] == pytest.approx(rank["again"], rel=1e-6)
        assert rank["kept"]
        assert rank["loss"] == ranks[0]["loss"]
    assert [rank["shape"] for rank in ranks] == [None, [4, 8, SYMBOLS]]


def test_stage_3_with_one_data_rank_for_each_pipeline_stage() -> None:
    assert run_ranks(2, one_data_rank, 3)[0] == pytest.approx(run_ranks(2, one_data_rank, 0)[0], rel=1e-6)


def test_save_16bit_model_of_tensor_ranks_writes_whole_weights(tmp_path: Path) -> None:
    truth = run_ranks(1, save_whole, str(tmp_path))[0]
    for found in run_ranks(2, save_whole, str(tmp_path)):
        assert list(found) == list(truth)
        for name, values in truth.items():
            assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
