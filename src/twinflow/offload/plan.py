"""Which elements travel together: parameters cut into slices, slices packed into buckets. Plain arithmetic.

A bucket holds slices of one block (see blocks.py) and one dtype. Slices start at multiples of 128 inside a bucket and
inside their parameter, so that the 8-bit formats' blocks fall in the same places whatever the bucket size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from twinflow.rules.formats import BLOCK

ROOT = -1  # the block number of parameters that belong to no block
BUCKET_NUMEL = 1 << 26  # 128 MiB of bf16: some milliseconds of PCIe and of host update


@dataclass(frozen=True)
class ParamSpec:
    """What the plan needs to know of a parameter."""

    name: str
    numel: int
    block: int
    dtype: torch.dtype
    can_split: bool = True  # contiguous, and updated element by element


@dataclass(frozen=True)
class Slice:
    """Elements [start, start + numel) of a parameter, at `offset` in a bucket."""

    param: int  # index into the parameters
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class BucketPlan:
    """Slices that travel and are updated together."""

    index: int
    block: int
    dtype: torch.dtype
    slices: tuple[Slice, ...]
    numel: int  # with the padding between slices

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """Buckets of equal layout can use each other's stores."""
        return self.dtype, *((piece.offset, piece.numel) for piece in self.slices)


def padded(numel: int) -> int:
    """`numel`, up to whole blocks of 128."""
    return -(-numel // BLOCK) * BLOCK


def plan_buckets(params: Sequence[ParamSpec], max_numel: int = BUCKET_NUMEL) -> list[BucketPlan]:
    """Pack all parameters: in their order within a block, blocks in their order, no bucket larger than `max_numel`.

    Only a parameter that cannot be split may make a larger one, its own.
    """
    assert max_numel % BLOCK == 0 and max_numel > 0
    buckets: list[BucketPlan] = []
    for block, dtype in _kinds(params):
        members = [i for i, p in enumerate(params) if (p.block, p.dtype) == (block, dtype)]
        for slices in _pack(params, members, _even(params, members, max_numel)):
            numel = slices[-1].offset + padded(slices[-1].numel)
            buckets.append(BucketPlan(len(buckets), block, dtype, tuple(slices), numel))
    return buckets


def _kinds(params: Sequence[ParamSpec]) -> list[tuple[int, torch.dtype]]:
    """Block and dtype of each kind of bucket, in the parameters' order."""
    return list(dict.fromkeys((p.block, p.dtype) for p in params))


def _even(params: Sequence[ParamSpec], members: Sequence[int], max_numel: int) -> int:
    """The size that fills as few buckets as there must be equally: slots are as large as the largest of them."""
    total = sum(padded(params[i].numel) for i in members)
    num_buckets = max(1, -(-total // max_numel))
    return min(max_numel, padded(-(-total // num_buckets)))


def _pack(params: Sequence[ParamSpec], members: Iterable[int], max_numel: int) -> Iterable[list[Slice]]:
    slices: list[Slice] = []
    used = 0
    for index in members:
        start, left = 0, params[index].numel
        while left:
            room = max_numel - used
            if not params[index].can_split and left > room and slices:
                room = 0
            if room == 0:
                yield slices
                slices, used, room = [], 0, max_numel
            numel = min(left, room) if params[index].can_split else left
            slices.append(Slice(index, start, numel, used))
            used, start, left = used + padded(numel), start + numel, left - numel
            if used >= max_numel:
                yield slices
                slices, used = [], 0
    if slices:
        yield slices
