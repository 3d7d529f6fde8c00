# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers on two tensor ranks and on two stages: equal to plain torch, or refused with a reason.

tests/architectures.py has the models. The table in docs/3d.md is made from it.
"""

from __future__ import annotations

import copy
from typing import Any

import architecture_cases as cases
import pytest
from architectures import ARCHITECTURES, DROPOUT, batch
from dist_support import run_ranks
from fork_support import process_with

from twinflow.parallel import split_model
from twinflow.parallel.plans import match, plan_for
from twinflow.parallel.tensor import plan_cuts

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

NEAR = 1e-5
MODES = ("tensor", "pipeline")
SAMPLE = {"qwen3": ["tensor"], "gemma3": ["pipeline"], "mixtral": ["tensor"], "llama-lora": ["pipeline"]}
TRAINED = [(name, mode) for name, one in ARCHITECTURES.items() for mode in MODES if not getattr(one, mode)]
REFUSED = [
    (name, mode)
    for name, one in ARCHITECTURES.items()
    for mode in MODES
    if getattr(one, mode) and getattr(one, mode) != DROPOUT
]


def check(ranks: list[dict[str, Any]], name: str, mode: str) -> None:
    found = [rank[f"{name}/{mode}"] for rank in ranks]
    for one in found:
        assert one["losses"] < NEAR
        assert one["weights"] < NEAR
        assert one["moved"] > 1e-3, "no weight was trained"
    assert set().union(*(one["names"] for one in found)) == set(found[0]["all"])


@pytest.mark.matrix
def test_a_sample() -> None:
    with process_with("transformers.modeling_utils", "peft") as call:
        ranks = call(run_ranks, 2, cases.compare, SAMPLE)
    for name, modes in SAMPLE.items():
        for mode in modes:
            check(ranks, name, mode)


@pytest.fixture(scope="module")
def everything() -> list[dict[str, Any]]:
    asked: dict[str, list[str]] = {}
    for name, mode in TRAINED:
        asked.setdefault(name, []).append(mode)
    return run_ranks(2, cases.compare, asked, timeout_s=1200.0)


@pytest.mark.matrix
@pytest.mark.timeout(1300)  # the fixture trains all of them
@pytest.mark.parametrize(("name", "mode"), TRAINED)
def test_every_architecture(everything: list[dict[str, Any]], name: str, mode: str) -> None:
    check(everything, name, mode)


# Other ways to run a few of them, by number of ranks.
OTHERS = {
    2: {
        "qwen3": ["tensor, sequence", "tensor, padded", "pipeline, padded", "pipeline, zbv"],
        "gemma3": ["tensor, checkpointing", "pipeline, checkpointing", "pipeline, interleaved"],
        "llama-classifier": ["tensor, padded", "pipeline, padded"],
        "gpt_neox": ["tensor, sequence", "pipeline, recomputed"],
        "bloom": ["pipeline, padded", "pipeline, zbv"],
        "phi": ["tensor, sequence"],
        "gemma2": ["tensor, sequence"],
        "cohere2": ["tensor, sequence"],
        "mixtral": ["tensor, checkpointing", "pipeline, interleaved"],
    },
    4: {name: ["both"] for name in ("qwen3", "gemma3", "mixtral", "llama-lora")} | {"olmo2": ["pipeline, stage 3"]},
}


@pytest.mark.matrix
@pytest.mark.parametrize("world", OTHERS)
def test_schedules_masks_and_both_axes(world: int) -> None:
    ranks = run_ranks(world, cases.compare, OTHERS[world], timeout_s=600.0)
    for name, modes in OTHERS[world].items():
        for mode in modes:
            check(ranks, name, mode)


def split_by_hand(name: str, mode: str) -> None:
    """Splits a model in this process, and runs a pipeline once."""
    one = ARCHITECTURES[name]
    model = one.build()
    if mode == "tensor":
        modules = dict(model.named_modules())
        plan_cuts(modules, match(modules, plan_for(model)), 0, 2)
        return
    first, last = (split_model(copy.deepcopy(model), 2, index) for index in range(2))
    ids, target = batch(one.head, 1)
    assert last.loss_fn is not None
    last.loss_fn(last(1, first(0, ids)), target)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "mode"), REFUSED)
def test_refused_with_a_reason(name: str, mode: str) -> None:
    ranks = {"tensor": "tensor ranks", "pipeline": "pipeline stages"}[mode]
    with pytest.raises(ValueError, match=f"cannot be used with {ranks}, because {getattr(ARCHITECTURES[name], mode)}"):
        split_by_hand(name, mode)
