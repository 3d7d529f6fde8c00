# SPDX-License-Identifier: Apache-2.0
"""Quantised frozen weights with adapters on top (QLoRA): trained as with plain torch, wherever other weights are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations_support import llama, rows
from param_offload_support import AWAY, HERE, movable, move, places
from torch import nn

import twinflow
from twinflow.offload.quantised import inner_tensors, is_quantised, quantised_in
from twinflow.offload.weight_guard import plain
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.whole import whole_weights

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchao = pytest.importorskip("torchao.quantization")
STEPS = 4
_UP = "base_model.model.model.layers.1.mlp.up_proj.weight"
CPU = {"device": "cpu"}


def quantised(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny Llama whose blocks are quantised, with LoRA adapters."""
    model = llama(dtype)
    kinds = {
        "int8": torchao.Int8WeightOnlyConfig(),
        "int4": torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32)),
        "float8": torchao.Float8WeightOnlyConfig(),
    }
    torchao.quantize_(model.model.layers, kinds[kind])
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(**options))
    assert len(quantised_in(adapted)) == 14
    return adapted


def train(model: Any, backward: Callable[[Any], None], step: Callable[[], None]) -> list[float]:
    losses = []
    for row in rows(2 * STEPS).view(STEPS, 2, -1):
        loss = model(input_ids=row, labels=row).loss
        backward(loss)
        step()
        losses.append(loss.item())
    return losses


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def base(model: nn.Module) -> list[torch.Tensor]:
    return [inner.clone() for p in quantised_in(model).values() for _, inner in inner_tensors(p)]


def as_torch(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = quantised(kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def step() -> None:
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return train(model, lambda loss: loss.backward(), step), adapters(model)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_adapters_over_a_quantised_base_train_as_with_torch(kind: str) -> None:
    losses, weights = as_torch(kind)
    for offload_params, ratio in ((False, 1.0), (True, 1.0), (True, 0.5)):
        model = quantised(kind)
        before, kinds = base(model), [type(p) for p in quantised_in(model).values()]
        optimizer = TwinOptimizer(model, lr=1e-2, max_grad_norm=1.0, ratio=ratio, offload_params=offload_params)

        def step(optimizer: TwinOptimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        assert train(model, optimizer.backward, step) == pytest.approx(losses, rel=1e-6)
        optimizer.close()
        for name, value in adapters(model).items():
            assert torch.allclose(value, weights[name], rtol=1e-5, atol=1e-6), name
        assert kinds == [type(p) for p in quantised_in(model).values()]
        assert all(torch.equal(a, b) for a, b in zip(base(model), before, strict=True))


def test_a_quantised_base_moves_with_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ratio auto moves them."""
    losses, weights = as_torch("int8")
    model = quantised("int8")
    before = base(model)
    optimizer = movable(model, monkeypatch, max_grad_norm=1.0)
    moves = iter([[0], [1], [0, 1], [1]])

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        move(optimizer, *next(moves))

    assert train(model, optimizer.backward, step) == pytest.approx(losses, rel=1e-6)
    assert [*places(optimizer).values()] == [AWAY, HERE]
    optimizer.close()
    for name, value in adapters(model).items():
        assert torch.allclose(value, weights[name], rtol=1e-5, atol=1e-6), name
    assert all(torch.equal(a, b) for a, b in zip(base(model), before, strict=True))


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_quantised_weights_are_on_the_host_and_can_be_read_anywhere(kind: str) -> None:
    model = quantised(kind)
    values = {name: param.dequantize() for name, param in quantised_in(model).items()}
    optimizer = TwinOptimizer(model, "adamw", lr=1e-2, offload_params=True)
    offload = optimizer.runtime.param_offload
    assert offload is not None

    def check() -> None:
        assert offload is not None
        with plain():
            inner = [one for p in quantised_in(model).values() for _, one in inner_tensors(p)]
            assert all(offload.params.holds(one) for one in inner)
            assert all(one.untyped_storage().nbytes() <= one.element_size() for one in inner), "on the device"
        for name, param in quantised_in(model).items():
            assert torch.equal(param.dequantize(), values[name])
        saved = model.state_dict()
        assert all(torch.equal(saved[name].dequantize(), value) for name, value in values.items())
        copied = copy.deepcopy(model.get_submodule("base_model.model.model.layers.1.mlp"))
        assert torch.equal(copied.up_proj.weight.dequantize(), values[_UP])

    check()
    train(model, optimizer.backward, optimizer.step)
    check()
    param = quantised_in(model)[_UP]
    with pytest.raises(RuntimeError, match="A quantised weight cannot be written"):
        param.data = param.detach()
    with torch.no_grad():
        param.data.copy_(quantised_in(model)[_UP.replace("1", "0")])  # raises when the optimizer would store the values
    with pytest.raises(RuntimeError, match="A quantised weight cannot be written"):
        train(model, optimizer.backward, optimizer.step)
    optimizer.close()
    assert all(torch.equal(p.dequantize(), values[name]) for name, p in quantised_in(model).items())


@pytest.mark.parametrize("section", [{"stage": 2}, {"stage": 3, "offload_param": CPU}])
def test_an_engine_neither_casts_nor_loses_quantised_weights(section: dict[str, Any], tmp_path: Path) -> None:
    model = quantised("int8")
    before = base(model)
    config = {
        **{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "steps_per_print": 1000},
        **{"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
        **{"zero_optimization": {"offload_optimizer": CPU, **section}},
    }
    engine, *_ = twinflow.initialize(model=model, config=config)
    assert all(p.dtype == torch.float32 for p in quantised_in(model).values()), "quantised weights were cast"
    assert all(torch.equal(a, b) for a, b in zip(base(model), before, strict=True))
    engine.save_checkpoint(str(tmp_path), "a")
    with torch.no_grad():
        for param in quantised_in(model).values():
            for _, inner in inner_tensors(param):
                inner.zero_()
    engine.load_checkpoint(str(tmp_path), "a")
    assert all(torch.equal(a, b) for a, b in zip(base(model), before, strict=True))
    engine.destroy()


def test_parameters_of_bitsandbytes_count_as_quantised() -> None:
    kind = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    assert is_quantised(kind(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    assert not is_quantised(nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    assert not is_quantised(nn.Parameter(torch.zeros(4)))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_whole_weights_have_copies_of_quantised_ones(kind: str) -> None:
    """NF4 tensors of torchao do not copy themselves."""
    if kind == "nf4":
        model: nn.Module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4))
        compact = torchao.NF4Tensor.from_tensor(torch.randn(64, 64), 64, 64)
        model[0].weight = nn.Parameter(compact, requires_grad=False)
        name = "0.weight"
    else:
        model, name = quantised(kind), _UP
    own = dict(model.named_parameters())[name]
    optimizer = TwinOptimizer(model, "adamw", lr=1e-3)
    found = dict(whole_weights(optimizer))[name]
    for (_, mine), (_, theirs) in zip(inner_tensors(found), inner_tensors(own), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    optimizer.close()
