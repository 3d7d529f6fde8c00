"""Which elements travel together: parameters cut into slices, slices packed into buckets. Plain arithmetic.

A bucket holds slices of one block (blocks.py), one dtype and one place (placement.py). Slices start at multiples
of 128 inside a bucket and inside their parameter, so that the 8-bit formats' blocks fall in the same places whatever
the bucket size.

Where buckets travel in codes, numbers that lie together share a scale. Copies of a parameter on several pipeline or
tensor ranks must then lie among the same neighbours on all of them: parameters share a bucket only where what they
share with other ranks has the same name (`ParamSpec.shared`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from twinflow.rules.formats import BLOCK

ROOT = -1  # the block number of parameters that belong to no block
BUCKET_NUMEL = 1 << 26  # 128 MiB of bf16: some milliseconds of PCIe and of host update

# Where a bucket's state lives, and what updates it.
HOST = "host"  # in host memory, the CPU
RESIDENT = "resident"  # on the device, the device
STREAMED = "streamed"  # in host memory, the device: the state comes and goes with every step
PLACES = (HOST, RESIDENT, STREAMED)


@dataclass(frozen=True)
class ParamSpec:
    """What the plan needs to know of a parameter."""

    name: str
    numel: int
    block: int
    dtype: torch.dtype
    can_split: bool = True  # contiguous, and updated element by element
    is_contiguous: bool = True
    is_counted: bool = True  # in the norm of all gradients; a copy of what another rank has is not
    shared: str = ""  # with pipeline or tensor ranks, by a name that is the same there, where buckets have to be too


class Part(NamedTuple):
    """Elements [start, start + numel) of a parameter, whose state lives in one place."""

    start: int  # a multiple of 128
    numel: int
    place: str


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
    place: str = HOST  # where the state lives
    can_alias: bool = True  # all its parameters are contiguous
    is_counted: bool = True  # in the norm of all gradients

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """Buckets of equal layout can use each other's stores."""
        return self.dtype, self.numel, *((piece.offset, piece.numel) for piece in self.slices)


def padded(numel: int) -> int:
    """`numel`, up to whole blocks of 128."""
    return -(-numel // BLOCK) * BLOCK


def on_host(params: Sequence[ParamSpec]) -> list[list[Part]]:
    """Every parameter whole, with its state on the host."""
    return [[Part(0, param.numel, HOST)] for param in params]


def plan_buckets(
    params: Sequence[ParamSpec],
    max_numel: int = BUCKET_NUMEL,
    parts: Sequence[Sequence[Part]] | None = None,
    keeps_whole: bool = False,
) -> list[BucketPlan]:
    """Pack all parameters: in their order within a block, blocks in their order, no bucket larger than `max_numel`.

    Only a parameter that cannot be split may make a larger one, its own. `parts` says where the state of each
    parameter's elements lives; without it, on the host. `keeps_whole`: no part of a block's parameters is cut, and one
    that is larger makes a larger bucket.
    """
    assert max_numel % BLOCK == 0 and max_numel > 0
    buckets: list[BucketPlan] = []
    kinds: dict[_Kind, list[tuple[int, Part]]] = {}
    for i, (param, cuts) in enumerate(zip(params, parts or on_host(params), strict=True)):
        for part in cuts:
            kind = _Kind(param.shared, param.block, param.dtype, part.place, param.is_contiguous, param.is_counted)
            kinds.setdefault(kind, []).append((i, part))
    for kind, members in kinds.items():
        size = _even(members, max_numel)
        is_whole = keeps_whole and kind.block != ROOT
        for slices in _fit(members, size) if is_whole else _pack(params, members, size):
            numel = slices[-1].offset + padded(slices[-1].numel)
            buckets.append(BucketPlan(len(buckets), kind.block, kind.dtype, tuple(slices), numel, *kind[3:]))
    return buckets


class _Kind(NamedTuple):
    """What all slices of a bucket have in common."""

    shared: str
    block: int
    dtype: torch.dtype
    place: str
    can_alias: bool
    is_counted: bool


def _even(members: Sequence[tuple[int, Part]], max_numel: int) -> int:
    """The size that fills as few buckets as there must be equally: slots are as large as the largest of them."""
    total = sum(padded(part.numel) for _, part in members)
    num_buckets = max(1, -(-total // max_numel))
    return min(max_numel, padded(-(-total // num_buckets)))


def _fit(members: Iterable[tuple[int, Part]], max_numel: int) -> Iterable[list[Slice]]:
    """Each part whole, in the first bucket that has room for it."""
    buckets: list[list[Slice]] = []
    used: list[int] = []
    for index, part in (member for member in members if member[1].numel):
        at = next((i for i, numel in enumerate(used) if numel + padded(part.numel) <= max_numel), len(used))
        if at == len(used):
            buckets.append([])
            used.append(0)
        buckets[at].append(Slice(index, part.start, part.numel, used[at]))
        used[at] += padded(part.numel)
    return buckets


def _pack(params: Sequence[ParamSpec], members: Iterable[tuple[int, Part]], max_numel: int) -> Iterable[list[Slice]]:
    slices: list[Slice] = []
    used = 0
    for index, part in members:
        start, left, can_split = part.start, part.numel, params[index].can_split
        while left:
            room = max_numel - used
            if not can_split and left > room and slices:
                room = 0
            if room == 0:
                yield slices
                slices, used, room = [], 0, max_numel
            numel = min(left, room) if can_split else left
            slices.append(Slice(index, start, numel, used))
            used, start, left = used + padded(numel), start + numel, left - numel
            if used >= max_numel:
                yield slices
                slices, used = [], 0
    if slices:
        yield slices
