# SPDX-License-Identifier: Apache-2.0
"""The plan of buckets: parameters are cut into slices, and slices are packed into buckets.

A bucket holds slices of one block (blocks.py), one dtype and one place (placement.py). A slice starts at a multiple of
128 in its bucket and in its parameter. The quantization blocks of 8-bit formats are therefore the same for every bucket
size.

With compressed communication, neighbouring elements of a bucket share a scale. Copies of a parameter on several
pipeline or tensor ranks must then have the same neighbours on all these ranks. Parameters are therefore in the same
bucket only if their `ParamSpec.shared` is equal.

Experts that are modules, with a module for each, get buckets of their own if they are not small. The update of an
expert then begins when its own gradients are complete, and an expert without tokens takes no buffer for gradients.

Matrices that Muon orthogonalises in one batch form a unit. Whether a matrix is in a batch with others may change the
last bits of the result, so units depend on the model alone, and a unit is never divided over buckets (except by ZeRO).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from twinflow.planner.costs import BUCKET_NUMEL
from twinflow.rules.formats import BLOCK

ROOT = -1  # the block number of parameters that do not belong to exactly one block

# Places: where the state of a bucket is, and which processor updates it.
HOST = "host"  # state in host memory, updated by the CPU
RESIDENT = "resident"  # state in device memory, updated by the device
STREAMED = "streamed"  # state in host memory, copied to the device for each update and back
PLACES = (HOST, RESIDENT, STREAMED)
_SMALL = 16  # an expert gets a bucket of its own if it fills a 16th of one, because each bucket takes time in Python
MATRICES = "matrices"  # part of the name of an updater
FETCHED = "fetched"  # the same: blocks fetch the weights from the streamed state


@dataclass(frozen=True)
class ParamSpec:
    """Properties of a parameter that the plan depends on."""

    name: str
    numel: int
    block: int
    dtype: torch.dtype
    can_split: bool = True  # it is contiguous, and the update of an element does not depend on other elements
    is_contiguous: bool = True
    is_counted: bool = True  # part of the gradient norm; False for a copy of another rank's parameter
    shared: str = ""  # a name that is equal on all pipeline or tensor ranks with a copy of the parameter; see above
    unit: int | None = None  # for a matrix that Muon updates: the number of its unit; see above
    expert: int = 0  # for a parameter of an expert that is a module: the number of the expert; see above
    is_divided: bool = False  # experts of this rank, in whose place other data ranks have other experts


class Part(NamedTuple):
    """Elements [start, start + numel) of a parameter whose state is in one place."""

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
    """Slices that are copied and updated together."""

    index: int
    block: int
    dtype: torch.dtype
    slices: tuple[Slice, ...]
    numel: int  # including the padding between slices
    place: str = HOST  # one of PLACES
    can_alias: bool = True  # all parameters are contiguous, so that views of them can be part of the state
    is_counted: bool = True  # part of the gradient norm
    is_matrix: bool = False  # Muon updates the parameters, always on the device
    expert: int = 0  # the expert whose parameters these are; 0: any parameters of the block
    is_divided: bool = False  # experts of this rank, in whose place other data ranks have other experts

    def at(self, place: str) -> BucketPlan:
        """The plan with another place. A bucket of matrices that is to be on the host is streamed instead."""
        if self.is_matrix and place == HOST:
            place = STREAMED if self.can_alias else RESIDENT
        return replace(self, place=place)

    @property
    def updater(self) -> str:
        """The name of its updater: the place, and whether the parameters are matrices."""
        return f"{self.place} {MATRICES}" if self.is_matrix else self.place

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """Dtype, length, and offsets and lengths of the slices. Buckets with equal layout can exchange stores."""
        return self.dtype, self.numel, *((piece.offset, piece.numel) for piece in self.slices)


def padded(numel: int) -> int:
    """`numel`, rounded up to a multiple of 128."""
    return -(-numel // BLOCK) * BLOCK


def on_host(params: Sequence[ParamSpec]) -> list[list[Part]]:
    """One part for each parameter, with its state on the host."""
    return [[Part(0, param.numel, HOST)] for param in params]


def plan_buckets(
    params: Sequence[ParamSpec],
    max_numel: int = BUCKET_NUMEL,
    parts: Sequence[Sequence[Part]] | None = None,
    keeps_whole: bool = False,
    num_parts: int = 1,
    divided: Container[int] = (),
) -> list[BucketPlan]:
    """Packs all parameters into buckets of at most `max_numel` elements, in the order of parameters and blocks.

    If a parameter is larger than `max_numel` and cannot be split, it gets a larger bucket of its own. `parts` gives the
    place of each parameter's elements; by default all states are on the host. With `keeps_whole`, the parts of
    parameters in blocks are not split, and a part larger than `max_numel` gets a larger bucket. Those of the blocks
    `divided` are split all the same.
    Ranks will divide each bucket into `num_parts` parts of whole matrices, which a larger bucket lets them do evenly.
    """
    assert max_numel % BLOCK == 0 and max_numel > 0
    buckets: list[BucketPlan] = []
    sizes: dict[int, int] = {}
    for param in params:
        sizes[param.expert] = sizes.get(param.expert, 0) + param.numel
    kinds: dict[_Kind, list[tuple[int, Part]]] = {}
    for i, (param, cuts) in enumerate(zip(params, parts or on_host(params), strict=True)):
        for part in cuts:
            is_large = sizes[param.expert] * _SMALL >= max_numel and param.unit is None
            flags = param.is_contiguous, param.is_counted, param.unit is not None, param.expert if is_large else 0
            kind = _Kind(param.shared, param.block, param.dtype, part.place, *flags, param.is_divided)
            kinds.setdefault(kind, []).append((i, part))
    for kind, members in kinds.items():
        size = _even(members, max_numel * num_parts if kind.is_matrix else max_numel)
        is_whole = keeps_whole and kind.block != ROOT and kind.block not in divided
        for slices in _fit(members, size) if is_whole else _pack(params, members, size):
            numel = slices[-1].offset + padded(slices[-1].numel)
            plan = BucketPlan(len(buckets), kind.block, kind.dtype, tuple(slices), numel, *kind[3:])
            buckets.append(plan.at(plan.place))
    return buckets


class _Kind(NamedTuple):
    """Properties that all slices of a bucket have in common."""

    shared: str
    block: int
    dtype: torch.dtype
    place: str
    can_alias: bool
    is_counted: bool
    is_matrix: bool
    expert: int
    is_divided: bool


def _even(members: Sequence[tuple[int, Part]], max_numel: int) -> int:
    """The bucket size that gives the least number of buckets, all about equally large.

    All slots are as large as the largest bucket, so unequal buckets would waste page-locked memory.
    """
    total = sum(padded(part.numel) for _, part in members)
    num_buckets = max(1, -(-total // max_numel))
    return min(max_numel, padded(-(-total // num_buckets)))


def _fit(members: Iterable[tuple[int, Part]], max_numel: int) -> Iterable[list[Slice]]:
    """Packs parts without splitting them, each into the first bucket that has room."""
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
    for index, part, together in _by_unit(params, members):
        start, left, can_split = part.start, part.numel, params[index].can_split
        while left:
            room = max_numel - used
            if slices and (room <= 0 if can_split else together > max(room, 0)):
                yield slices
                slices, used, room = [], 0, max_numel
            numel = min(left, room) if can_split else left
            slices.append(Slice(index, start, numel, used))
            used, start, left = used + padded(numel), start + numel, left - numel
    if slices:
        yield slices


def _by_unit(params: Sequence[ParamSpec], members: Iterable[tuple[int, Part]]) -> Iterable[tuple[int, Part, int]]:
    """The members of each unit one after the other, each with the number of elements that must go into its bucket: all
    of the unit for its first member, none for the others.
    """
    units: dict[tuple[int, int], list[tuple[int, Part]]] = {}
    for index, part in members:
        unit = params[index].unit
        units.setdefault((0, unit) if unit is not None else (1, index), []).append((index, part))
    for (kind, _), found in units.items():
        total = sum(padded(part.numel) for _, part in found)
        for k, (index, part) in enumerate(found):
            yield index, part, part.numel if kind else total * (k == 0)
