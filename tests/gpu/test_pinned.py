# SPDX-License-Identifier: Apache-2.0
"""The host kernels as offload uses them: gradients come from the GPU into pinned memory, weights go back."""

from __future__ import annotations

import pytest
import torch
from support import OPTIONS, assert_same_bits, clone, make_store

from twinflow import native
from twinflow.rules import RULES, reference
from twinflow.rules.segment import Segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_a_step_from_and_to_the_gpu(format: str) -> None:
    rule, numel = RULES["adamw"], 3_000_001
    on_gpu = torch.randn(numel, device="cuda").bfloat16()
    grad = torch.empty(numel, dtype=torch.bfloat16, pin_memory=True)
    grad.copy_(on_gpu, non_blocking=True)
    store = make_store(rule, format, torch.bfloat16, numel)
    assert store.weight is not None
    pinned = store.weight.pin_memory()
    store = type(store)(format, store.master, pinned, store.states, store.scales)
    expected = clone(store)
    torch.cuda.synchronize()
    native.update([Segment(rule, rule.hyper(OPTIONS, 1), grad, store, 0.5, (1, 2))])
    reference.update([Segment(rule, rule.hyper(OPTIONS, 1), on_gpu.cpu(), expected, 0.5, (1, 2))])
    assert_same_bits(expected, store)
    back = pinned.to("cuda", non_blocking=True)
    assert torch.equal(back.cpu(), pinned)


def test_the_kernel_runs_while_the_gpu_works() -> None:
    """A host update between launching GPU work and waiting for it neither waits nor disturbs."""
    rule, numel = RULES["adamw"], 1_000_000
    a = torch.randn(4096, 4096, device="cuda")
    expected = (a @ a).cpu()
    store, grad = make_store(rule, "fp32", None, numel), torch.ones(numel)
    finished = torch.cuda.Event()
    product = a @ a
    torch.cuda._sleep(200_000_000)
    finished.record()
    native.update([Segment(rule, rule.hyper(OPTIONS, 1), grad, store)])
    assert not finished.query()
    finished.synchronize()
    assert torch.equal(product.cpu(), expected)
