# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks, float8 and recomputation on a GPU: results are those of eager bf16, and memory is as planned."""

from __future__ import annotations

import gc
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

import twinflow
from twinflow.models.gpt import GPT, GPTConfig, activation_bytes
from twinflow.speedups import use_float8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SHAPE = GPTConfig(vocab_size=512, context=512, num_layers=6, hidden=512, num_heads=8)
BATCH = 8
MODES = ("none", "selective", 3, "full")


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 512, (BATCH, SHAPE.context), generator=generator).cuda()


def losses(recompute: str | int, num_steps: int = 5, **keys: Any) -> list[float]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **keys,
    }
    engine, *_ = twinflow.initialize(model=GPT(replace(SHAPE, recompute=recompute)), config=config)
    found, x = [], tokens()
    for _ in range(num_steps):
        loss = engine(x, x).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


@pytest.mark.parametrize("recompute", MODES)
def test_compiled_blocks_train_alike(recompute: str | int) -> None:
    expected = losses("none")
    assert losses(recompute) == pytest.approx(expected, rel=1e-3)
    assert losses(recompute, compile={"blocks": True}) == pytest.approx(expected, rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("recompute", MODES)
def test_float8_trains_alike(recompute: str | int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(ValueError, match="without a GPU of compute capability"):
            use_float8(GPT(SHAPE).cuda(), torch.device("cuda"))
        return
    expected = losses("none")
    found = losses(recompute, compile={"blocks": True}, float8={"enabled": True})
    assert found != expected
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("compiled", [False, True])
def test_activations_take_what_the_plan_says(recompute: str | int, compiled: bool) -> None:
    shape = replace(SHAPE, recompute=recompute)
    torch.manual_seed(0)
    model = GPT(shape).to("cuda", torch.bfloat16)
    if compiled:
        for block in model.blocks:
            block.compile()
    x = tokens()
    for _ in range(2):  # the first step compiles, and makes the gradients
        model.zero_grad(set_to_none=False)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x, x).loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    planned = activation_bytes(shape, BATCH, shape.context)
    assert 0.7 * planned < peak < 1.1 * planned
