# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over gloo: models split over 2 and 4 ranks are, in losses, gradients and steps, one process's."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
from dist_support import run_ranks
from parallel_tensor_cases import KINDS, Case, compare_all, parts
from support import pairwise

WORLDS = (2, 4)
NEAR = 1e-5
LONG_S = 900
pytestmark = pytest.mark.timeout(LONG_S + 100)

AXES: tuple[Any, ...] = ((True, False), (0.0, 0.1), (False, True), ("own", "logits"), (False, True))
CELLS = [Case("gpt", *cell) for cell in itertools.product(*AXES)]
QUICK = [Case("gpt", *cell) for cell in pairwise(*AXES)] + [Case(sequence=True, num_layers=1)]
QUICK_OF_FOUR = [Case(), Case(dropout=0.1, sequence=True, tied=False, checkpointing=True)]
# Their two heads of keys and values go to two ranks.
HF_CELLS = [
    Case(model, tied, dropout, sequence, checkpointing=again, attention=attention)
    for model, tied, dropout, sequence, again, attention in itertools.product(
        ("llama", "gpt2", "bert", "qwen2", "mistral"), (True, False), (0.0, 0.1), (False, True), (False, True),
        ("sdpa", "eager"),
    )
]  # fmt: skip
HF_QUICK = [
    Case("llama", tied=False, dropout=0.1, checkpointing=True),
    Case("llama", sequence=True, attention="eager"),
    Case("gpt2", dropout=0.1, attention="eager"),
    Case("gpt2", tied=False, sequence=True, dropout=0.1),
    Case("bert", dropout=0.1),
    Case("bert", sequence=True, checkpointing=True, dropout=0.1),
]


def check(found: dict[str, Any], near: float = NEAR) -> None:
    assert found["loss"] <= near
    assert found["grad"] <= near, found["grad_at"]
    assert found["value"] <= near
    assert found["is_same"], "what all ranks have is not the same on all"
    assert found["ties"], "ties were lost"
    assert found["num_split"] > 6, "layers were not split"
    assert found["spread"] > 1e-3, "nothing was learned"


def check_all(world: int, cases: list[Case]) -> None:
    for ranks in run_ranks(world, compare_all, cases, timeout_s=LONG_S):
        for case in cases:
            check(ranks[case.name])


@pytest.mark.matrix
@pytest.mark.parametrize("world", WORLDS)
def test_gpt_cells(world: int) -> None:
    check_all(world, CELLS)


@pytest.mark.matrix
def test_transformers() -> None:
    pytest.importorskip("transformers")
    check_all(2, HF_QUICK)


@pytest.mark.matrix
def test_transformers_cells() -> None:
    pytest.importorskip("transformers")
    check_all(2, HF_CELLS)


@pytest.mark.matrix
def test_transformers_of_four() -> None:
    pytest.importorskip("transformers")
    check_all(4, [case for case in HF_CELLS if case.model in ("gpt2", "bert")])


@pytest.mark.matrix
def test_autocast() -> None:
    """Rounded to bf16 in other places, but still the same on all ranks."""
    cases = [Case(autocast=True, sequence=sequence, dropout=0.1) for sequence in (False, True)]
    for ranks in run_ranks(2, compare_all, cases):
        for case in cases:
            check(ranks[case.name], near=3e-2)


@cache
def together(world: int) -> list[dict[str, Any]]:
    return run_ranks(world, parts, QUICK if world == 2 else QUICK_OF_FOUR)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.matrix)], ids=lambda world: f"{world} ranks")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return together(request.param)


def test_gpt(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["gpt"]
        for gaps in rank["gpt"].values():
            check(gaps)


def test_collectives(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["collectives"]) == 7
        assert max(rank["collectives"].values()) <= 1e-6
        assert rank["half"], "half precision was summed in half precision"
        assert "length of the sequence" in rank["odd"]


@pytest.mark.parametrize(("dtype", "near"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_loss_of_a_split_vocabulary(found: list[dict[str, Any]], dtype: str, near: float) -> None:
    for rank in found:
        gaps = rank["vocab"][dtype]
        assert max(gaps["loss"], gaps["hidden"], gaps["weight"]) <= near
        assert gaps["chunks"] <= 1e-6
        assert gaps["is_same"]
        assert gaps["dtypes"]


def test_logits_never_exist_at_once(found: list[dict[str, Any]]) -> None:
    for rank in found:
        largest, chunk = rank["vocab_memory"]
        assert largest <= chunk
        assert rank["vocab_outside"], "a target that nobody has"


def test_sparse_attention_with_heads_of_their_own(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert max(rank["sparse"]["loss"], rank["sparse"]["grad"]) <= NEAR
        assert rank["sparse"]["dense"] > 1e-3, "the pattern made no difference"


def test_checkpointed_inputs_in_parts(found: list[dict[str, Any]]) -> None:
    for rank in found:
        kept = rank["partitioned"]["False"]
        assert kept["grad"] <= NEAR
        assert kept["whole_bytes"] > 0
        assert kept["kept_bytes"] * len(found) == kept["whole_bytes"]
        assert "not the same on all tensor ranks" in rank["partitioned"]["True"]["error"]


def test_weight_gradients_put_off(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for num_put_off, gap in rank["deferred"].values():
            assert num_put_off == 2 * 4
            assert gap <= NEAR


def test_hooks_see_sums(found: list[dict[str, Any]]) -> None:
    assert all(rank["hooks"] for rank in found)


REFUSED = {
    "vocabulary": "The size of token_embedding.weight in dim 0 is 31",
    "heads": "qkv.weight is 3, but must be a multiple of",
    "style": "'diagonal'",
    "pattern": "'blocks.*.atention'",
    "kind": "norm is of type LayerNorm",
    "tie": "shares a parameter with token_embedding",
    "attribute": "blocks.0.attention.heads is None",
    "stream": "without the styles stream:enter and stream:leave",
    "twice": "is already split. Call parallelize only once",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_change_nothing(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        said, is_as_before = rank["refusals"][name]
        assert REFUSED[name] in said
        assert is_as_before


def test_models_without_memory(found: list[dict[str, Any]]) -> None:
    assert all(rank["meta"] for rank in found)


def test_bytes_of_a_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        plain, shared, wanted_plain, wanted_shared = rank["bytes"]
        assert (plain, shared) == (wanted_plain, wanted_shared)


def test_a_plan_of_ones_own(found: list[dict[str, Any]]) -> None:
    for rank in found:
        own = rank["own_plan"]
        assert max(own["out"], own["grad"]) <= NEAR
        assert "write a plan" in own["said"]
        assert f"out_features={4 * 16 // len(found)}" in own["repr"]


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_a_column_and_a_row_layer(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert max(rank["found_dropout"][kind].values()) <= NEAR
        assert "alpha_dropout() of features that are split" in rank["unsplit_random"]
        assert all("Checkpoint the whole module" in said for said in rank["inner"])


def test_a_token_outside_the_vocabulary_raises_as_in_one_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["outside"] == ["IndexError", "IndexError", ""]
