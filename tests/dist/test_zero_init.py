# SPDX-License-Identifier: Apache-2.0
"""`zero.Init` on several ranks: the weights of one process, and no rank ever has all of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zero_init_cases as cases
from dist_support import assert_near, run_ranks
from fork_support import process_with
from twin_support import matrix_but


@pytest.mark.parametrize(
    ("kind", "world", "place"),
    matrix_but(
        [("traps", 2, "device"), ("traps", 3, "host")],
        [
            ("traps", 2, "device"),
            ("traps", 3, "host"),
            ("plain", 3, "device"),
            ("gpt2", 2, "device"),
            ("llama-tied", 2, "host"),
        ],
    ),
)
def test_a_model_that_is_built_in_parts_trains_as_in_one_process(kind: str, world: int, place: str) -> None:
    truth: Any = run_ranks(1, cases.training, kind, 3, place)[0]
    assert not truth["closed"]
    ranks = run_ranks(world, cases.training, kind, 3, place)
    for found in ranks:
        assert found["closed"] == len(truth["marks"]) == len(found["marks"])
        assert found["marks"] == truth["marks"]
        assert {**found["initial"], "shift": None} == {**truth["initial"], "shift": None}  # not only nearly
        assert found["opened"] == 0 if place == "device" else found["opened"] < found["closed"]
    assert ranks[0]["draws"] == truth["draws"]
    means = [sum(losses) / world for losses in zip(*(found["losses"] for found in ranks), strict=True)]
    assert means == pytest.approx(truth["losses"], rel=1e-5)
    assert_near(ranks[0]["last"], truth["last"])


@cache
def peak_of_one_process() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(1, cases.peak, "device")[0]
    return found


@pytest.mark.parametrize(("world", "place"), [pytest.param(2, "device", marks=pytest.mark.matrix), (3, "host")])
def test_no_rank_has_more_than_its_part_and_one_layer(world: int, place: str) -> None:
    alone = peak_of_one_process()
    assert alone["built"] >= alone["total"]
    for found in run_ranks(world, cases.peak, place):
        part = found["total"] / world
        limit = part + 1.5 * found["largest"]
        assert limit < 0.9 * found["total"]
        assert found["now"] <= 1.1 * part
        assert found["built"] < limit
        assert found["used"] < limit
        assert found["most"] <= 3, "several whole weights at the same time"


@pytest.mark.parametrize("world", matrix_but([2], [2, 3]))
def test_what_a_user_does_with_the_model_before_training(world: int) -> None:
    truth = run_ranks(1, cases.use, 0)[0]
    for found in run_ranks(world, cases.use, 3):
        assert found == truth


@pytest.mark.parametrize(("place", "has_config"), matrix_but([("device", False)], [("device", False), ("host", True)]))
def test_transformers_loads_and_creates_models_in_parts(place: str, has_config: bool, tmp_path: Path) -> None:
    given = (cases.pretrained, str(tmp_path), place, has_config)
    # With a config, `install()` must run before transformers is imported.
    with process_with("twinflow.compat" if has_config else "transformers.models.llama.modeling_llama") as call:
        truth = call(run_ranks, 1, *given)[0]
        ranks = call(run_ranks, 2, *given)
    for found in ranks:
        assert has_config or found["whole"] == 0, "parameters that each rank has"
        assert has_config or found["most"] <= 4, "whole weights at the same time"
        assert found["values"] == truth["values"]


def test_mistakes_are_named() -> None:
    first, second = run_ranks(2, cases.mistakes)
    for text in first["alone"]:
        assert "Linear.weight" in text
        assert "the ranks [1] have not called it within 1 s. Call it on all ranks." in text
    for found in (first, second):
        assert found["raised"] == "of the user"
        assert found["after"] == [True, True]
        assert "Linear.weight (parameter " in found["different"]
        assert "at the same time" in found["different"]


@pytest.mark.parametrize(("stage", "place"), matrix_but([(2, "device")], [(2, "device"), (0, "device")]))
def test_other_stages_gather_the_parts(stage: int, place: str) -> None:
    truth = run_ranks(1, cases.other_stage, stage, place)[0]
    for found in run_ranks(2, cases.other_stage, stage, place):
        assert found == pytest.approx(truth, rel=1e-5)


def test_options() -> None:
    for found in run_ranks(2, cases.options):
        assert found["closed"] == {
            "nothing": True,
            "stage 3": True,
            "a config object": True,
            "cpu": True,
            "nested": True,
            "twice": True,
            "a module": True,
            "disabled": False,
            "stage 2": False,
            "tensor ranks": False,
            "other classes": False,
        }
        assert found["equal"]
