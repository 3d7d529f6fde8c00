# SPDX-License-Identifier: Apache-2.0
"""Pipelines and tensor ranks give what one process gives, or an error with the reason on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel_as_one_cases as cases
import pytest
import torch
from dist_support import run_ranks
from parallel_cases import config_of
from twin_support import matrix_but

NEAR = 1e-5


def both(work: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of one process, and of two stages."""
    return run_ranks(0, work)[0], run_ranks(2, work)


def test_a_step_without_gradients_is_refused() -> None:
    alone, ranks = both(cases.without_gradients)
    for one in (alone, *ranks):
        assert one["losses"] == pytest.approx(alone["losses"], rel=NEAR)
        assert one["steps"] == 3
        for error in one["errors"]:
            assert error.startswith("RuntimeError: train_batch() cannot run, because gradients are disabled")


@pytest.mark.parametrize("world", [0, 2])
def test_a_loss_without_a_graph_is_refused(world: int) -> None:
    for rank, found in enumerate(run_ranks(world, cases.detached)):
        for one in found.values():
            assert "loss.requires_grad is False, but must be True" in one["error"], rank
            assert one["steps"] == 0
            assert "The pipeline has failed" in one.get("again", "The pipeline has failed")


def test_train_batch_trains_after_eval() -> None:
    alone, ranks = both(cases.after_eval)
    assert alone["part"] != pytest.approx(alone["train"], rel=1e-3), "dropout made no difference"
    for one in (alone, *ranks):
        for name in ("train", "eval", "part"):
            wanted = alone["part" if name == "part" else "train"]
            assert one[name] == pytest.approx(wanted, rel=NEAR), name
            assert one[f"{name} mode"]


def test_data_that_end_leave_the_pipeline_usable() -> None:
    alone, ranks = both(cases.ended)
    three = run_ranks(3, cases.ended)
    assert "another rank has failed: rank 0: RuntimeError: train_batch() cannot run" in three[1]["errors"][0]
    for rank, one in enumerate((alone, *ranks, three[0], three[2])):
        assert one["losses"] == pytest.approx(alone["losses"], rel=NEAR), rank
        first, evaluation, own, broken = one["errors"]
        assert first.startswith("RuntimeError: train_batch() cannot run, because data_iter ended after 2 of 4"), rank
        assert evaluation.startswith("RuntimeError: eval_batch() cannot run, because data_iter ended after 0 of 4")
        assert "because the iterator of set_dataiterator() ended after 2 of 4 micro-batches" in own
        assert "division" in broken


def test_layers_that_return_lists() -> None:
    alone, ranks = both(cases.lists)
    for name in ranks[0]:
        assert alone[name][0] == pytest.approx(alone[f"{name} plain"][0], rel=NEAR), name
    for one in ranks:
        for name, losses in one.items():
            assert losses == pytest.approx(alone[name], rel=NEAR), name


def test_frozen_tied_layers() -> None:
    alone, ranks = both(cases.frozen_ties)
    assert alone["frozen"] != pytest.approx(alone["later"], rel=1e-3), "freezing made no difference"
    for one in ranks:
        for name, losses in alone.items():
            assert one[name] == pytest.approx(losses, rel=NEAR), name
        assert "The tied parameter layers.0.weight is frozen on the pipeline ranks [0]" in one["error"]


@pytest.mark.parametrize(("pipe", "data"), matrix_but([(1, 1), (2, 1)], [(1, 1), (1, 2), (2, 1)]))
def test_whole_weights_of_tensor_ranks(pipe: int, data: int, tmp_path: Path) -> None:
    alone = run_ranks(0, cases.whole_weights, config_of(1, 1, 1, num_micro=1), str(tmp_path))[0]
    (tmp_path / "whole.pt").unlink()
    split = config_of(pipe, 2, data, num_micro=4 if pipe > 1 else 1)
    names = set()
    for one in run_ranks(2 * data * pipe, cases.whole_weights, split, str(tmp_path)):
        assert one["num_split"] > 0
        assert one["again"]
        assert one["losses"] == pytest.approx(alone["losses"], rel=NEAR)
        for name, shape in one["shapes"].items():
            assert shape == alone["shapes"][name], name
            assert one["state"][name] == pytest.approx(alone["state"][name], abs=1e-3), name
        names |= set(one["shapes"])
        assert pipe > 1 or one["num_tensors"] == alone["num_tensors"], "a tie was lost"
    assert names == set(alone["shapes"])
    if pipe == 1:
        saved = torch.load(tmp_path / "whole.pt")
        assert {name: list(value.shape) for name, value in saved.items()} == alone["shapes"]


def test_whole_weights_need_all_tensor_ranks(tmp_path: Path) -> None:
    errors = run_ranks(2, cases.only_one_saves, str(tmp_path))[0]
    assert "module_state_dict() cannot run" in errors[0]
    assert "save_pretrained() cannot run" in errors[1]
    for error in errors:
        assert error.startswith("RuntimeError: ")
        assert "the tensor ranks [1] have not called it" in error
    assert (tmp_path / "whole.pt").exists()


@pytest.mark.matrix
def test_transformers_models(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    alone = run_ranks(0, cases.transformers_models, str(tmp_path / "alone"))[0]
    for one in run_ranks(2, cases.transformers_models, str(tmp_path / "split")):
        assert one["loss"] == pytest.approx(alone["loss"], rel=NEAR)
        assert one["ten times"] == pytest.approx(alone["ten times"], rel=NEAR)
        assert "TenTimes" in one["subclass"]
        assert "forward" in one["subclass"]
        assert one["heir"] == "PipelineEngine"
    states = [
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("alone", "split")
    ]
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], atol=NEAR), name
