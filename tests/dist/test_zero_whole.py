# SPDX-License-Identifier: Apache-2.0
"""Whole weights under ZeRO-3 on several ranks: as in one process, on rank 0, with every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_whole_cases as cases
from dist_support import assert_near, run_ranks
from fork_support import process_with
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from twin_support import matrix_but

from twinflow.compat.zero import get_fp32_state_dict_from_zero_checkpoint

PLACES = ["device", "host"]


@cache
def alone(work: Callable[..., Any], *args: Any) -> Any:
    """What one process finds, for all cells of a test."""
    return run_ranks(1, work, *args)[0]


@pytest.mark.parametrize(
    ("kind", "world", "place"),
    matrix_but(
        [("plain", 3, "host")],
        [
            ("plain", 2, "device"),
            ("plain", 3, "host"),
            ("gpt2", 3, "device"),
            ("gpt2", 2, "host"),
            ("bert", 2, "device"),
        ],
    ),
)
def test_rank_0_gets_the_weights_of_one_process(kind: str, world: int, place: str) -> None:
    truth = alone(cases.weights, kind, 0, "device")
    first, *others = run_ranks(world, cases.weights, kind, 3, place)
    for key in ("before", "after", "last"):
        assert_near(first[key], truth[key])
    assert first["num"] == truth["num"]
    assert first["again"] == 1
    assert all(other["after"] == {} and other["again"] == 0 for other in others)


@pytest.mark.parametrize(
    ("kind", "world", "place"),
    matrix_but(
        [("plain", 3, "device")],
        [
            ("plain", 2, "host"),
            ("plain", 3, "device"),
            ("gpt2", 2, "device"),
            ("llama", 2, "host"),
            ("plain", 1, "host"),
        ],
    ),
)
def test_all_ranks_read_whole_weights(kind: str, world: int, place: str) -> None:
    truth = alone(cases.reading, kind, 0, "device")
    for rank, found in enumerate(run_ranks(world, cases.reading, kind, 3, place)):
        for key in ("held", "modules", "again", "kept", "nested", "state"):
            assert_near(found[key], truth[key])
        for key in ("logits", "loss"):
            assert found[key] == pytest.approx(truth[key], rel=1e-5, abs=1e-6)
        if rank == 0:
            assert_near(found["last"], truth["last"])


@pytest.mark.parametrize(
    ("kind", "world", "place"),
    matrix_but(
        [("plain", 2, "device"), ("plain", 3, "host")],
        [
            ("plain", 2, "device"),
            ("plain", 3, "host"),
            ("llama-tied", 2, "device"),
            ("gpt2", 2, "host"),
            ("plain", 1, "host"),
        ],
    ),
)
def test_what_the_modifier_writes_goes_into_weights_and_masters(kind: str, world: int, place: str) -> None:
    truth = alone(cases.writing, kind, 0, "device", 0)
    for rank, found in enumerate(run_ranks(world, cases.writing, kind, 3, place, world - 1)):
        for one, other in zip(found["masters"], truth["masters"], strict=True):
            assert (one is None) == (other is None)
            assert one is None or one == pytest.approx(other, rel=1e-5, abs=1e-6)
        if rank == 0:
            assert_near(found["after"], truth["after"])
            assert_near(found["last"], truth["last"])


@pytest.mark.parametrize("place", PLACES)
def test_mistakes_raise_on_all_ranks_and_nothing_hangs(place: str) -> None:
    first, second = run_ranks(2, cases.mistakes, place)
    for found in (first, second):
        without, other, own, step = found["errors"]
        assert "rank 1 has changed it, and modifier_rank is None" in without
        assert "rank 1 has changed it, and rank 0 has not changed it" in other
        assert own == "of the user"
        assert "step() cannot run inside GatheredParameters" in step
        assert "at the same time" in found["different"]
    for text in first["alone"]:
        assert "the ranks [1] have not called it within 1 s" in text


def same(found: Any, truth: Any) -> None:
    """Nested lists of numbers, where None stands for nothing."""
    if not isinstance(truth, list) or not truth or isinstance(truth[0], float):
        assert (found is None) == (truth is None)
        assert found is None or found == pytest.approx(truth, rel=1e-5, abs=1e-6)
        return
    assert len(found) == len(truth)
    for one, other in zip(found, truth, strict=True):
        same(one, other)


@pytest.mark.parametrize(
    ("world", "stage", "place", "gas", "early"),
    matrix_but(
        [(3, 1, "device", 2, True), (2, 3, "device", 2, "auto"), (3, 3, "host", 2, True)],
        [
            (2, 0, "device", 1, "auto"),
            (3, 1, "device", 2, True),
            (2, 2, "device", 1, True),
            (2, 2, "device", 2, "auto"),
            (3, 3, "device", 1, True),
            (2, 3, "device", 2, "auto"),
            (2, 3, "host", 1, "auto"),
            (3, 3, "host", 2, True),
            (2, 2, "none", 2, "auto"),
            (2, 3, "none", 2, True),
            (1, 3, "host", 2, True),
            (1, 0, "device", 2, True),
        ],
    ),
)
def test_the_training_state_is_that_of_one_process(world: int, stage: int, place: str, gas: int, early: Any) -> None:
    truth = alone(cases.state, "plain", 0, "device", gas, False)
    ranks: Any = run_ranks(world, cases.state, "plain", stage, place, gas, early)
    for one in ranks:
        same(one["found"], truth["found"])
    copies = world if stage == 0 else 1
    assert sum(one["numel"] for one in ranks) == copies * truth["numel"]


@pytest.mark.parametrize(
    ("world", "stage", "place", "early"),
    matrix_but(
        [(3, 3, "device", False), (2, 3, "host", True)],
        [
            (2, 0, "device", "auto"),
            (2, 2, "device", False),
            (3, 3, "device", False),
            (2, 3, "host", True),
            (1, 0, "device", True),
        ],
    ),
)
def test_gradients_can_be_replaced_before_a_step(world: int, stage: int, place: str, early: Any) -> None:
    truth = alone(cases.new_gradients, "plain", 0, "device", False)
    for found in run_ranks(world, cases.new_gradients, "plain", stage, place, early):
        if place == "host":
            assert "the sum has begun and cannot be undone" in found
        else:
            same(found, truth)


@pytest.mark.parametrize(
    ("kind", "world", "place"),
    matrix_but(
        [("llama-tied", 2, "device")],
        [("plain", 2, "device"), ("llama-tied", 2, "device"), ("llama", 3, "host"), ("gpt2", 2, "host")],
    ),
)
def test_saved_files_are_those_of_one_process(kind: str, world: int, place: str, tmp_path: Path) -> None:
    with process_with("transformers.models.llama.modeling_llama") as call:
        truth: Any = call(run_ranks, 1, cases.saving, kind, 0, "device", str(tmp_path / "one"))[0]
        first, *others = call(run_ranks, world, cases.saving, kind, 3, place, str(tmp_path / "many"))
    for found, state in zip(first["states"], truth["states"], strict=True):
        assert_near(found, state)
    assert_near(first["last"], truth["last"])
    assert all(other["states"] == [{}, None] and other["last"] == {} for other in others)
    for name in ("weights.bin", "trained.bin"):
        one, many = (cases.sums(torch.load(tmp_path / side / name)) for side in ("one", "many"))
        assert_near(many, one)
    one, many = (cases.sums(load_file(tmp_path / side / "weights.safetensors")) for side in ("one", "many"))
    assert_near(many, one)
    fp32 = cases.sums(get_fp32_state_dict_from_zero_checkpoint(tmp_path / "many"))
    assert_near({name: fp32[name] for name in truth["last"]}, truth["last"])
    if kind != "plain":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "many" / "pretrained")
        assert_near(cases.sums(loaded.state_dict()), truth["states"][0])
        for found in (first, *others):
            for tokens, wanted in zip(found["tokens"], truth["tokens"], strict=True):
                assert tokens == wanted[: len(tokens)]


@pytest.mark.parametrize(("world", "place"), [(2, "device"), (3, "host")])
def test_a_layer_may_use_the_registered_weight_of_another(world: int, place: str) -> None:
    truth = alone(cases.external, 0, "device")
    first, *others = run_ranks(world, cases.external, 3, place)
    assert_near(first["state"], truth["state"])
    assert all("Call it before initialize()" in found["late"] for found in (first, *others))
    if place == "host":  # a file of weights without values would be found too late
        assert all("Save whole weights: call engine.save_16bit_model()" in found["saved"] for found in (first, *others))


@pytest.mark.parametrize(
    ("kind", "world", "place"),
    matrix_but(
        [("plain", 2, "device"), ("plain", 3, "host")],
        [("plain", 2, "device"), ("plain", 3, "host"), ("llama-tied", 2, "device"), ("gpt2", 2, "host")],
    ),
)
def test_load_state_dict_of_whole_weights_is_as_in_one_process(kind: str, world: int, place: str) -> None:
    truth = alone(cases.loading, kind, 0, "device")
    for rank, found in enumerate(run_ranks(world, cases.loading, kind, 3, place)):
        assert found["keys"] == truth["keys"]
        assert found["master"] == pytest.approx(truth["master"])
        if rank == 0:
            assert_near(found["loaded"], truth["loaded"])
            assert_near(found["last"], truth["last"])


@pytest.mark.parametrize("place", matrix_but(["host"], PLACES))
def test_load_state_dict_refuses_what_ranks_do_differently(place: str) -> None:
    first, second = run_ranks(2, cases.loading_mistakes, place)
    for different, assign, shape, _ in (first, second):
        assert "load_state_dict() of " in different
        assert "cannot run" in different
        assert "assign is True, but must be False" in assign
        assert "size mismatch for embed.weight" in shape
    assert "have not called it within" in first[3]
    assert second[3] == ""


def test_a_second_engine_trains_a_model_that_is_partitioned() -> None:
    truth = alone(cases.again, 0, "device")
    assert_near(run_ranks(2, cases.again, 3, "device")[0], truth)


def test_a_model_whose_weights_were_on_the_hosts_is_not_used_without_them() -> None:
    for errors in run_ranks(2, cases.again, 3, "host"):
        assert all("Save the whole model before close()" in error for error in errors), errors


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_partitioned_module_is_moved_as_by_torch(with_optimizer: bool) -> None:
    for found in run_ranks(2, cases.moving, with_optimizer):
        assert all("cannot be converted or moved" in error for error in found["errors"])
        assert "torch.float64" not in found["kept"]
        assert "torch.float16" not in found["kept"]
        assert len(found["errors"]) == 2 * with_optimizer
        assert found["same"]
        assert found["is_equal"]
        assert found["dtypes"] == ["torch.float64"]
        assert found["shape"] == [cases.SYMBOLS, cases.WIDTH]
        assert "Copy the model before the optimizer is built" in found["copied"]


def test_an_operation_on_the_rows_goes_into_the_masters() -> None:
    truth = alone(cases.writing_rows, 0)
    first, second = run_ranks(2, cases.writing_rows, 3)
    for found in (first, second):
        assert found["master"] == pytest.approx(truth["master"], rel=1e-5, abs=1e-6)
    assert_near(first["last"], truth["last"])


def test_a_loop_that_clips_averages_and_writes_weights_trains_as_in_one_process() -> None:
    truth = alone(cases.own_loop, 0)
    for rank, found in enumerate(run_ranks(2, cases.own_loop, 3)):
        assert found["norms"] == pytest.approx(truth["norms"], rel=1e-5)
        assert found["average"] == pytest.approx(truth["average"], rel=1e-4, abs=1e-5)
        if rank == 0:
            assert_near(found["last"], truth["last"])


@pytest.mark.parametrize(
    ("stage", "accumulation", "message"),
    [(2, 1, "is the gradient of this rank's batches"), (3, 2, r"\.grad was used between backward\(\) and step\(\)")],
)
def test_a_gradient_that_is_not_that_of_one_process_is_not_used_silently(
    stage: int, accumulation: int, message: str
) -> None:
    for found in run_ranks(2, cases.own_gradients, stage, accumulation):
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError("\n".join(found))


@pytest.mark.parametrize("limit", [None, 1.0])
def test_a_loop_that_gets_the_gradients_of_one_rank_is_warned(limit: float | None) -> None:
    for found in run_ranks(2, cases.left_gradients, limit):
        assert any("is the gradient of this rank's batches" in text for text in found) == (limit is None)
