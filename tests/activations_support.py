# SPDX-License-Identifier: Apache-2.0
"""A small GPT whose checkpointed layers have inputs of a known size, for tests of activation checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from twin_support import batch

import twinflow
from twinflow.models.gpt import GPT, GPTConfig

LAYERS = 6
SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=LAYERS, hidden=32, num_heads=2, dropout=0.1)
INPUT_BYTES = 2 * 16 * 32 * 4
SMALL = 1024  # inputs of the tests are small


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**vars(SHAPE), **changes}))


def gradients(model: GPT, steps: int = 3) -> list[Tensor]:
    """Losses and gradients of some micro-batches, and their sums."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(*batch(step)).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def engine_of(model: nn.Module, section: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": section,
    }
    return twinflow.initialize(model=model, config=config)[0]
