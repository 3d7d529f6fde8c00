# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: trainings on 2 and 4 ranks are those of plain torch in one process with all sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_support import run_ranks
from expert_ranks_cases import DOWN, config_of, errors, plain, train, train_all, use
from experts_support import FUSED
from fork_support import process_with
from safetensors.torch import load_file

from twinflow.checkpoint.exporting import export_checkpoint

Call = Callable[..., Any]  # of a function in a process that has imported transformers
HALF: dict[str, Any] = {"ratio": 0.5}
# Size of the expert ranks, ZeRO stage, accumulation, clipping, offload; on 4 ranks.
QUICK = {
    "two copies of each expert, stage 2": (2, 2, 2, True, HALF),
    "one copy of each expert, stage 1": (4, 1, 1, False, {}),
    "stage 0": (2, 0, 1, True, {}),
}
STEPS = 3


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Forks ranks from one process that has imported transformers, or each rank would import it."""
    with process_with(*(f"transformers.models.{name}.modeling_{name}" for name in ("olmoe", "mixtral"))) as call:
        yield call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expert_ranks")


@pytest.fixture(scope="module")
def quick(call: Call, folder: Path) -> list[list[dict[str, Any]]]:
    """The trainings of the quick suite, by rank. Each writes a checkpoint."""
    cases = [
        ("Olmoe", config_of(4, *case), 0, STEPS, "", str(folder / str(i))) for i, case in enumerate(QUICK.values())
    ]
    found: list[list[dict[str, Any]]] = call(run_ranks, 4, train_all, cases)
    return found


def check_weights(found: dict[str, Any], truth: dict[str, Any]) -> None:
    assert list(found) == list(truth)
    for key, value in truth.items():
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(value), rtol=0, atol=1e-5, msg=key)


def check(ranks: list[dict[str, Any]], truth: dict[str, Any], clips: bool, first: int = 0) -> None:
    """Compares the weights of each rank, their mean losses, and with `clips` the norms of all gradients."""
    for one in ranks:
        check_weights(one["weights"], truth["weights"])
        assert not clips or one["norms"] == pytest.approx(truth["norms"][first:], rel=1e-5)
    losses = torch.tensor([one["losses"] for one in ranks]).mean(0).tolist()
    assert losses == pytest.approx(truth["losses"][first:], rel=1e-5)


@pytest.mark.parametrize("name", QUICK)
def test_training_equals_one_process(name: str, call: Call, quick: list[list[dict[str, Any]]]) -> None:
    size, _, parts, clips, _ = QUICK[name]
    found = [one[list(QUICK).index(name)] for one in quick]
    check(found, call(plain, "Olmoe", parts, clips, STEPS), clips)
    whole = sum(torch.tensor(value).numel() for value in found[0]["weights"].values())
    experts = sum(torch.tensor(v).numel() for key, v in found[0]["weights"].items() if ".experts." in key)
    assert found[0]["numel"] == whole - experts + experts // size  # a rank has its own experts only


@pytest.mark.parametrize(("world", "size"), [(1, 1), (2, 2)])
def test_a_checkpoint_continues_on_other_ranks(
    world: int, size: int, call: Call, quick: list[list[dict[str, Any]]], folder: Path
) -> None:
    del quick  # has written the checkpoint
    config = config_of(world, size, 1, 2, True, HALF)
    found = call(run_ranks, world, train, "Olmoe", config, STEPS, STEPS + 2, str(folder / "0"))
    check(found, call(plain, "Olmoe", 2, True, STEPS + 2), True, STEPS)


ERRORS = {
    "ranks": "expert_parallel_size is 3, but must be a divisor of 2, the number of processes",
    "experts": "expert_parallel_size is 2, but must be a divisor of 3, the number of experts in model.layers.0",
    "no experts": "a model without experts (Sequential)",
    "modules": "The class of experts is 'Layer', but must be those of transformers",
    "stage": "zero_optimization.stage 3 cannot be used with expert ranks",
    "tensor": "expert_parallel_size above 1 cannot be used with tensor ranks",
    "sequence": "sequence ranks (sequence_parallel_size) cannot be used with expert ranks",
    "pipeline": "A PipelineModule cannot be used with expert ranks",
    "compiled": "compile.blocks cannot be used with expert ranks",
    "float8": "float8.enabled cannot be used with expert ranks",
    "Muon": "Muon cannot be used with expert ranks",
    "OneBitAdam": "1-bit Adam, 0/1 Adam and 1-bit LAMB cannot be used with expert ranks",
    "RMSprop": "The optimizer RMSprop cannot be used with expert ranks",
    "no optimizer": "An engine without an optimizer cannot be used with expert ranks",
    "own optimizer": "The optimizer AdamW cannot be used with expert ranks",
    "twin": "A TwinOptimizer that is passed to initialize() cannot be used with expert ranks",
    "adapters": "A model with adapters of PEFT cannot be used with expert ranks",
    "twice": "it is already split by experts",
    "another size": "zero_optimization.stage 3 cannot be used with expert ranks",
    "own rule": "RMSprop cannot be used with expert ranks",
    "own stage": "zero_optimization.stage 3 cannot be used with expert ranks",
    "replaced": "its experts were replaced after split_experts()",
    "state dict": "this rank has only a part of the state",
    "whole weights": "whole_weights() cannot be used with expert ranks",
    "given weights": "A state dict with the part model.layers.0.mlp.experts.gate_up_proj",
}


def test_what_differs_from_one_process_is_refused(call: Call) -> None:
    for rank in call(run_ranks, 2, errors):
        assert rank.keys() == ERRORS.keys()
        for name, text in ERRORS.items():
            assert text in rank[name], name


@pytest.mark.matrix
def test_weights_gradients_and_state_are_read_and_written(call: Call, tmp_path: Path) -> None:
    ranks = call(run_ranks, 4, use, str(tmp_path))
    first, then = (call(plain, "Olmoe", 1, True, steps)["weights"] for steps in (0, 1))
    num_own = len(then[DOWN]) // 2
    for one in ranks:
        check_weights(one["first"], first)
        for name in ("loaded", "read", "again", "whole"):
            check_weights(one[name], then)
        for name in ("master", "own part, stage 2", "own part, stage 0"):
            part, values = one[name]
            check_weights({DOWN: values}, {DOWN: then[DOWN][part * num_own : (part + 1) * num_own]})
    assert ranks[0]["gradient"] == ranks[2]["gradient"] != ranks[1]["gradient"]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    check_weights({key: saved[key].tolist() for key in then}, then)
    for name in ("pretrained", "copied"):
        files = load_file(tmp_path / name / "model.safetensors")
        assert sum(value.numel() for value in files.values()) == sum(torch.tensor(v).numel() for v in then.values())
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    check_weights({key: exported[key].tolist() for key in then}, then)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
def test_all_classes(name: str, world: int, size: int, call: Call) -> None:
    found = call(run_ranks, world, train, name, config_of(world, size, 2, 2, True, HALF), 0, STEPS)
    check(found, call(plain, name, 2, True, STEPS), True)


@pytest.mark.matrix
@pytest.mark.parametrize("case", list(product((0, 1, 2), (1, 2), (None, {}, HALF))), ids=str)
def test_all_stages(case: tuple[int, int, dict[str, Any] | None], call: Call) -> None:
    stage, parts, offload = case
    found = call(run_ranks, 4, train, "Mixtral", config_of(4, 2, stage, parts, True, offload), 0, STEPS)
    check(found, call(plain, "Mixtral", parts, True, STEPS), True)


@pytest.mark.matrix
def test_many_steps(call: Call) -> None:
    # Longer trainings of other models are chaotic, also with plain torch: rounding changes which experts a token gets.
    found = call(run_ranks, 4, train, "Qwen3Moe", config_of(4, 2, 2, 2, True, HALF), 0, 20)
    check(found, call(plain, "Qwen3Moe", 2, True, 20), True)


LAYOUTS = [(1, 1, 0), (2, 1, 2), (2, 2, 0), (2, 2, 1), (4, 1, 2), (4, 2, 1), (4, 2, 0), (4, 4, 2)]


@pytest.mark.matrix
@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_checkpoints_of_all_layouts(before: tuple[int, int, int], call: Call, tmp_path: Path) -> None:
    world, size, stage = before
    call(run_ranks, world, train, "Olmoe", config_of(world, size, stage, 1, True, HALF), 0, 2, "", str(tmp_path))
    truth = call(plain, "Olmoe", 1, True, 4)
    for world, size, stage in LAYOUTS:
        config = config_of(world, size, stage, 1, True, HALF)
        check(call(run_ranks, world, train, "Olmoe", config, 2, 4, str(tmp_path)), truth, True, 2)


# Options beside which 2 expert ranks give the result of 4 data ranks without expert parallelism.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "early": ({"early": True}, {}),
    "delayed": ({"delayed_update": True}, {}),
    "sums on the host": ({"sums": "host"}, {}),
    "sums on the device": ({"sums": "device"}, {}),
    "bf16 states": ({"states": "bf16"}, {}),
    "sum": ({}, {"gradient_allreduce_op": "sum"}),
    "prescale": ({}, {"prescale_gradients": True}),
    "predivide": ({}, {"gradient_predivide_factor": 2.0}),
    "clipping of values": ({}, {"gradient_clipping_value": 0.01}),
    "checkpointed": ({}, {"activation_checkpointing": {"layers": ["OlmoeDecoderLayer"]}}),
    "autocast": ({}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "Lion": ({}, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}),
    "disk": ({"device": "nvme"}, {}),
    "router loss": ({}, {}),
    "background": ({}, {"checkpoint": {"background": True}}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", OPTIONS)
def test_other_options(name: str, call: Call, tmp_path: Path) -> None:
    offload, others = OPTIONS[name]
    model = "Olmoe, router loss" if name == "router loss" else "Olmoe"
    if name == "disk":
        offload = {**offload, "nvme_path": str(tmp_path)}
    truth, found = (
        call(
            *(run_ranks, 4, train, model, config_of(4, size, 2, 2, True, offload, **others)),
            *(0, STEPS, "", str(tmp_path / str(size))),
        )
        for size in (1, 2)
    )
    for one in found:
        check_weights(one["weights"], truth[0]["weights"])
        assert one["norms"] == pytest.approx(truth[0]["norms"], rel=1e-5)
