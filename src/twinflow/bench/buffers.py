"""Bytes as arithmetic, and big buffers filled quickly."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from twinflow import native
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK
from twinflow.rules.segment import Store

_STATE_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_PATTERN_NUMEL: Final = 1 << 20
FP32_BYTES: Final = 4


def is_split(format: str, weight_dtype: torch.dtype | None) -> bool:
    """Whether the master is kept in two 16-bit halves, the upper one being the weight."""
    return format != "fp32" and weight_dtype == torch.bfloat16


def update_bytes(rule: Rule, format: str, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> float:
    """Bytes of memory traffic a parameter in one update: each thing read once, each thing written once.

    In or out of place makes no difference: what is read is read, what is written is written.
    """
    master = 2 if is_split(format, weight_dtype) else FP32_BYTES
    weight = weight_dtype.itemsize if weight_dtype is not None else 0
    weight_passes = 2 if is_split(format, weight_dtype) else 1  # a split master's weight is read too
    scale = FP32_BYTES / BLOCK if format == "int8" else 0.0
    num_states = sum(name is not None for name in rule.states)
    states = num_states * (_STATE_DTYPES[format].itemsize + scale)
    return grad_dtype.itemsize + 2 * master + weight_passes * weight + 2 * states


def huge_empty(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An unwritten tensor on huge pages where the system gives them."""
    return native.advise_huge(torch.empty(numel, dtype=dtype))


def huge_random(numel: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers; a pattern repeated, because drawing a billion numbers would take longer than the benchmark."""
    tensor = huge_empty(numel, dtype)
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(min(numel, _PATTERN_NUMEL), generator=generator).mul_(scale).to(dtype)
    for start in range(0, numel, _PATTERN_NUMEL):
        part = tensor[start : start + _PATTERN_NUMEL]
        part.copy_(pattern[: part.numel()])
    return tensor


def huge_store(rule: Rule, format: str, numel: int, weight_dtype: torch.dtype | None) -> Store:
    """What `rules.segment.new_store` makes, on huge pages and without its fp32 temporaries."""

    def zeros(count: int, dtype: torch.dtype, name: str | None) -> Tensor | None:
        return huge_empty(count, dtype).zero_() if name is not None and count else None

    first, second = rule.states
    blocks = -(-numel // BLOCK) if format == "int8" else 0
    dtype = _STATE_DTYPES[format]
    states = zeros(numel, dtype, first), zeros(numel, dtype, second)
    scales = zeros(blocks, torch.float32, first), zeros(blocks, torch.float32, second)
    if is_split(format, weight_dtype):
        # Any pair of halves is a master; these are the numbers of the weight with a lower half of zero.
        weight = huge_random(numel, torch.bfloat16, scale=0.02)
        return Store(format, huge_empty(numel, torch.int16).zero_(), weight, states, scales)
    weight_or_none = huge_empty(numel, weight_dtype).zero_() if weight_dtype is not None else None
    return Store(format, huge_random(numel, scale=0.02), weight_or_none, states, scales)


def huge_like(store: Store) -> Store:
    """A target for updates out of place, its pages already there."""
    target = store.empty_like()
    for tensor in (target.master, target.weight, *target.states, *target.scales):
        if tensor is not None:
            native.advise_huge(tensor).zero_()
    return target


def fill_half_tiny(tensor: Tensor, normal: float, tiny: float) -> None:
    """Blocks of 128 numbers in turn: `tiny` (a subnormal number), then `normal`. What is left over is normal."""
    whole = tensor.numel() // (2 * BLOCK) * (2 * BLOCK)
    pairs = tensor[:whole].view(-1, 2, BLOCK)
    pairs[:, 0] = tiny
    pairs[:, 1] = normal
    tensor[whole:] = normal
