"""Memory traffic of an update in bytes, and large buffers that are filled quickly."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from twinflow import native
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK
from twinflow.rules.segment import Store, new_states, splits_master

_PATTERN_NUMEL: Final = 1 << 20
FP32_BYTES: Final = 4


def update_bytes(
    rule: Rule, format: str, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None, split: bool | None = None
) -> float:
    """Bytes of memory traffic per parameter in one update. Each buffer is read once and written once.

    The number is the same for updates in place and out of place.
    """
    store = huge_store(rule, format, BLOCK, weight_dtype, split)  # one block has whole scales
    kept = [tensor.nbytes for tensor in (store.master, *store.states, *store.scales) if tensor is not None]
    weight = store.weight.nbytes if store.weight is not None else 0
    weight_passes = 2 if store.is_split else 1  # the weight of a split master is also read
    return grad_dtype.itemsize + (2 * sum(kept) + weight_passes * weight) / BLOCK


def huge_empty(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that is not initialised, on huge pages if the system provides them."""
    return native.advise_huge(torch.empty(numel, dtype=dtype))


def huge_random(numel: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normally distributed numbers. A pattern is repeated, because drawing a billion numbers would take longer than the
    benchmark.
    """
    tensor = huge_empty(numel, dtype)
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(min(numel, _PATTERN_NUMEL), generator=generator).mul_(scale).to(dtype)
    for start in range(0, numel, _PATTERN_NUMEL):
        part = tensor[start : start + _PATTERN_NUMEL]
        part.copy_(pattern[: part.numel()])
    return tensor


def huge_store(
    rule: Rule, format: str, numel: int, weight_dtype: torch.dtype | None, split: bool | None = None
) -> Store:
    """A store for random values as from `rules.segment.new_store`, but on huge pages and without fp32 temporaries."""
    values = huge_random(numel, weight_dtype or torch.float32, scale=0.02)
    store = Store(format, values, None, *new_states(rule, format, numel, native.huge_zeros))
    if weight_dtype is None:
        return store
    # Any pair of halves is a valid master. With a lower half of zero, the master equals the weight.
    is_split = splits_master(format, weight_dtype) if split is None else split
    master = native.huge_zeros(numel, dtype=torch.int16) if is_split else huge_random(numel, scale=0.02)
    return replace(store, weight=values, master=master)


def huge_like(store: Store) -> Store:
    """A target for updates out of place. Its pages are allocated already."""
    target = store.empty_like()
    for tensor in (target.master, target.weight, *target.states, *target.scales):
        if tensor is not None:
            native.advise_huge(tensor).zero_()
    return target


def fill_half_tiny(tensor: Tensor, normal: float, tiny: float) -> None:
    """Fill with alternating blocks of 128 numbers: `tiny` (a subnormal number), then `normal`. The rest is normal."""
    whole = tensor.numel() // (2 * BLOCK) * (2 * BLOCK)
    pairs = tensor[:whole].view(-1, 2, BLOCK)
    pairs[:, 0] = tiny
    pairs[:, 1] = normal
    tensor[whole:] = normal
