# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism: losses and gradients on 2 and 4 ranks are those of one process with whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from fork_support import process_with
from sequence_cases import config_of, errors, gradients, load_data, rows, train

CASES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "GPT, sparse": {"sparse": True},
    "GPT, tiled": {"tiled": True},
    "a length that ranks do not divide": {"tokens": 27},
    "grouped heads of keys": {"model": "Llama"},
    "one head of keys": {"model": "Llama", "changes": {"num_key_value_heads": 1}},
    "grouped heads, tiled, checkpointed": {"model": "Llama", "tiled": True, "checkpointed": True},
    "grouped heads, sparse": {"model": "Llama", "sparse": True},
    "latent attention": {
        "model": "DeepseekV3",
        "changes": {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
        },
    },
    "packed": {"model": "Qwen3", "packed": [0, 5, 18]},
    "padded": {"model": "Llama", "padded": True, "tokens": 29},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "window": {"model": "Mistral", "changes": {"sliding_window": 6}},
    "sinks and windows": {
        "model": "GptOss",
        "changes": {"num_local_experts": 2, "num_experts_per_tok": 1},
        "dtype": 32,
    },
    "soft cap": {"model": "Gemma2", "changes": {"attn_implementation": "eager", "sliding_window": 6}},
}


# What four ranks do that two do not: more rounds of a ring, shorter parts, and fewer heads of keys than ranks.
OF_FOUR = ("GPT, sparse", "a length that ranks do not divide", "one head of keys", "packed")
FAMILIES = ("llama", "deepseek_v3", "qwen3", "mistral", "gpt_oss", "gemma2")
Call = Callable[..., Any]  # of a function in a process that has imported transformers


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Forks ranks from one process that has imported transformers, or each rank would import it."""
    with process_with(*(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES)) as call:
        yield call


@pytest.fixture(scope="module")
def alone(call: Call) -> Callable[[int], dict[str, Any]]:
    """The gradients of one process, which depend on the number of batches."""

    @cache
    def of(data: int) -> dict[str, Any]:
        found: dict[str, Any] = call(run_ranks, 0, gradients, 1, "", with_data(CASES | WINDOWED, data))[0]
        return found

    return of


def with_data(cases: dict[str, dict[str, Any]], data: int) -> dict[str, dict[str, Any]]:
    return {name: {**case, "data": data} for name, case in cases.items()}


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("world", "size", "names"),
    [
        (2, 2, None),
        pytest.param(4, 2, None, marks=pytest.mark.matrix),
        (4, 4, OF_FOUR),
        pytest.param(4, 4, None, marks=pytest.mark.matrix),
    ],
)
def test_ranks_compute_the_gradients_of_one_process(
    mode: str, world: int, size: int, names: Sequence[str] | None, call: Call, alone: Callable[[int], dict[str, Any]]
) -> None:
    """`names`: the cases; all if None."""
    cases = CASES | (WINDOWED if mode == "ulysses" else {})
    if world > size:  # packed sequences are one row in one process
        cases = {name: case for name, case in cases.items() if not case.get("packed")}
    cases = with_data({name: cases[name] for name in names or cases}, world // size)
    truth = alone(world // size)
    for rank in call(run_ranks, world, gradients, size, mode, cases):
        for name in cases:
            # transformers computes losses in fp32
            rel, least = (1e-5, 1e-8) if "model" in cases[name] else (1e-9, 1e-14)
            assert rank[name]["loss"] == pytest.approx(truth[name]["loss"], rel=rel), name
            for found, expected in zip(rank[name]["grads"], truth[name]["grads"], strict=True):
                assert found == pytest.approx(expected, rel=rel, abs=least), name


# Steps of the engine.

OFFLOAD = {"offload_optimizer": {"device": "cpu", "bucket_numel": 8192}}
HALF = {"offload_optimizer": {"device": "cpu", "bucket_numel": 8192, "ratio": 0.5}}
PARAMS = {**OFFLOAD, "offload_param": {"device": "cpu"}}
LAYERS = {"activation_checkpointing": {"layers": ["Block"], "cpu_checkpointing": True}}


def runs_of(world: int, size: int) -> dict[str, dict[str, Any]]:
    def config(mode: str, stage: int, zero: dict[str, Any]) -> dict[str, Any]:
        return config_of(size, mode, world // size, stage, **zero)

    return {
        "ulysses, stage 0": {"config": config("ulysses", 0, {})},
        "ulysses, stage 2 with offload": {"config": config("ulysses", 2, OFFLOAD)},
        "ring, stage 1 with half of the state": {"config": config("ring", 1, HALF)},
        "ring, stage 3 with offload, tiled": {"config": config("ring", 3, OFFLOAD), "tiled": True},
        "ulysses, weights on the host, tiled": {
            "config": {**config("ulysses", 3, PARAMS), **LAYERS},
            "tiled": True,
        },
        "ulysses, stage 3, sparse": {"config": config("ulysses", 3, OFFLOAD), "sparse": True},
        "ring, stage 2, sparse": {"config": config("ring", 2, OFFLOAD), "sparse": True},
    }


@cache
def one_process(is_sparse: bool) -> dict[str, Any]:
    case = {"config": config_of(1, "ulysses", stage=0), "sparse": is_sparse}
    found: dict[str, Any] = run_ranks(0, train, {"alone": case})[0]["alone"]
    return found


@pytest.mark.parametrize(
    ("world", "size"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.matrix), pytest.param(4, 4, marks=pytest.mark.matrix)],
)
def test_ranks_train_as_one_process(world: int, size: int) -> None:
    runs = runs_of(world, size)
    for rank in run_ranks(world, train, runs):
        for name, case in runs.items():
            truth = one_process(case.get("sparse", False))
            assert rank[name]["losses"] == pytest.approx(truth["losses"], rel=1e-5), name
            assert rank[name]["norms"] == pytest.approx(truth["norms"], rel=1e-5), name


def test_a_checkpoint_loads_with_another_number_of_ranks(tmp_path: Any) -> None:
    first = {"config": config_of(2, "ulysses", stage=3, **OFFLOAD), "save": str(tmp_path)}
    truth = one_process(False)
    for rank in run_ranks(2, train, {"two": first}, 0, 2):
        assert rank["two"]["losses"] == pytest.approx(truth["losses"][:2], rel=1e-5)
    more = {"config": config_of(2, "ring", 2, 2, **OFFLOAD), "load": str(tmp_path)}
    less = {"config": config_of(1, "ulysses", stage=0), "load": str(tmp_path)}
    for world, case in ((4, more), (0, less)):
        for rank in run_ranks(world, train, {"next": case}, 2, 3):
            assert rank["next"]["losses"] == pytest.approx(truth["losses"][2:], rel=1e-5)
            assert rank["next"]["norms"] == pytest.approx(truth["norms"][2:], rel=1e-5)


def test_the_loader_gives_each_rank_its_part_of_a_sequence() -> None:
    whole: list[list[list[int]]] = []  # tokens and targets
    ranks = run_ranks(4, load_data, 2)
    assert [(rank["data"], rank["num_data"], rank["len"]) for rank in ranks] == [
        (0, 2, 2),
        (0, 2, 2),
        (1, 2, 2),
        (1, 2, 2),
    ]
    for i, rank in enumerate(ranks):
        assert (rank["own"], rank["every"], rank["is_world"]) == ([i % 2, 2], [i, 4], True)
        assert rank["sum"] == (3.0 if i < 2 else 12.0)
    for first, second in (ranks[:2], ranks[2:]):
        for left, right in zip(first["batches"], second["batches"], strict=True):
            tokens, targets = (
                torch.cat([torch.tensor(a), torch.tensor(b)], 1) for a, b in zip(left, right, strict=True)
            )
            whole += [[a, b] for a, b in zip(tokens.tolist(), targets.tolist(), strict=True)]
    expected = [[tokens[0].tolist(), targets[0].tolist()] for tokens, targets in (rows(1, seed) for seed in range(8))]
    assert sorted(whole) == sorted(expected)


ERRORS = {
    "sum": 'gradient_allreduce_op "sum" cannot be used with sequence ranks',
    "one bit": "optimizer.type OneBitAdam cannot be used with sequence ranks",
    "compiled": "compile.blocks cannot be used with sequence ranks",
    "tensor": "sequence_parallel_size above 1 cannot be used with tensor ranks",
    "size": "sequence_parallel_size is 3, but must be a divisor of 2",
    "another model": "The sequences of a model of the class Sequential cannot be split over ranks",
    "heads": "sequence_parallel_size=2 with the mode ulysses cannot be used with 3 attention heads",
    "ring dropout": 'Dropout 0.1 in attention cannot be used with sequence ranks in the mode "ring"',
    "window": "MistralForCausalLM, which has layers with a sliding window, cannot be used with sequence ranks",
    "mode": "mode is 'star', but must be one of 'ulysses', 'ring'",
    "whole sequences": "All ranks of a sequence have the same tokens",
    "a loss of one rank": "must be the same on all of them: the mean over all tokens",
    "replaced": "its attention was replaced after its sequences were split",
    "no positions": "it was called without position_ids",
    "no shifted labels": "the model was called without shift_labels",
    "left padding": "An attention_mask with padding before tokens",
    "packed rows": "Packed sequences in a batch of 2 rows",
    "image": "The argument pixel_values of the shape (2, 3, 4, 4) cannot be used with sequence ranks",
    "router": "output_router_logits cannot be used with sequence ranks",
    "own mask": "it computes a mask of its own, from the tokens of one rank",
    "cache": "A cache of keys and values cannot be used with sequence ranks",
    "length of rope": 'Rotary positions of the kind "dynamic" beyond 20 tokens, with 32 tokens, cannot be used',
    "positions of Bart": "BartForCausalLM cannot be used with sequence ranks",
    "positions of Roberta": "it computes the positions of its tokens itself",
    "positions of Llama 4": "it computes the positions of its tokens itself",
    "short convolution": "it has layers (Conv1d, Lfm2ShortConv) that mix tokens outside of the attention interface",
    "lightning attention": "it has layers (MiniMaxLightningAttention) that mix tokens",
    "images": "it has other inputs than text",
    "cross attention": "or attend to another sequence",
}


def test_what_differs_from_one_process_is_refused(call: Call) -> None:
    for rank in call(run_ranks, 2, errors):
        assert rank.keys() == ERRORS.keys()
        for name, text in ERRORS.items():
            assert text in rank[name], name
