# SPDX-License-Identifier: Apache-2.0
"""Muon on a GPU: equal bits for every placement, timing and format, and the results of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.test_twin import model_of, train

from twinflow.optim.twin import TwinOptimizer
from twinflow.rules.muon import MUON
from twinflow.rules.newton_schulz import muon_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
OPTIONS: dict[str, Any] = {"rule": "muon", "early": True, "max_grad_norm": 0.8}


@pytest.mark.parametrize(
    ("states", "dtype"),
    [("fp32", torch.bfloat16), ("bf16", torch.bfloat16), ("int8", torch.bfloat16), ("fp32", torch.float16)],
    ids=str,
)
def test_every_placement_gives_the_same_bits(states: str, dtype: torch.dtype) -> None:
    options = {**OPTIONS, "states": states, "dtype": dtype}
    streamed = train(**options)
    for ratio in (0.0, 0.4):
        assert torch.equal(streamed, train(ratio=ratio, **options)), ratio
    assert torch.equal(streamed, train(tuning={"bucket_numel": 1 << 18}, **options))


@pytest.mark.parametrize("delay", ["update", "streamed0", "compute", "out", "in"])
def test_timing_changes_no_bit(delay: str) -> None:
    assert torch.equal(train(**OPTIONS), train(delay, ratio=0.5, **OPTIONS))


def test_without_a_clip_decision_and_with_several_backwards() -> None:
    options: dict[str, Any] = {"rule": "muon", "early": True, "parts": 3}
    assert torch.equal(train(**options), train(ratio=0.0, **options))


def test_updates_are_those_of_the_reference() -> None:
    model = model_of(torch.float32)
    weight = model.blocks[0].mlp.up.weight
    ours = weight.detach().clone()
    momentum = torch.zeros_like(ours)
    optimizer = TwinOptimizer(model, "muon", lr=0.02, ratio=1.0)
    options = {**MUON.defaults, "lr": 0.02}
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).cuda()
        muon_step(ours, momentum, weight.grad.clone(), options, torch.bfloat16)
        optimizer.step()
        optimizer.wait()
    # The matrix is in a batch with others here. Sums in another order change some roundings to bf16.
    torch.testing.assert_close(weight.detach(), ours, rtol=0, atol=1e-4)
    optimizer.close()


def test_auto_settles() -> None:
    assert torch.equal(train(num_steps=20, **OPTIONS), train(num_steps=20, **{**OPTIONS, "ratio": "auto"}))
