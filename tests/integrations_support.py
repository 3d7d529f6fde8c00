# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama, and text that is here anyway, for loops of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LR, DECAY, MAX_NORM = 5e-3, 0.1, 1.0
LENGTH = 16


def rows(count: int) -> Tensor:
    """Bytes of the licence, in rows."""
    text = (Path(__file__).parents[1] / "LICENSE").read_bytes()
    return torch.tensor(list(text[: count * LENGTH])).view(count, LENGTH)


def samples(count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in rows(count)]


def llama(dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.LlamaConfig(vocab_size=128, max_position_embeddings=LENGTH, use_cache=False, **shape)
    return transformers.LlamaForCausalLM(config).to(dtype)


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """To the last bit."""
    theirs = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, theirs[name]), name
