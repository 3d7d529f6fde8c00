# SPDX-License-Identifier: Apache-2.0
"""ZeRO's partition of a bucket into parts of equal size. Each rank has the optimizer state of one part.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

Parts and slices start at multiples of 128 in their bucket. A part therefore also starts at a multiple of 128 in a
parameter, and every element gets the same bits as with one rank. If a bucket has a parameter that cannot be split, all
its slices are assigned whole, the largest first, each to the rank with the fewest elements so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twinflow.offload.plan import BucketPlan, ParamSpec, Slice, padded
from twinflow.rules.formats import BLOCK


def widen(plan: BucketPlan, params: Sequence[ParamSpec], world: int) -> BucketPlan:
    """The plan of the bucket, padded and ordered so that it can be divided into `world` equal parts."""
    if world == 1:
        return plan
    if all(params[piece.param].can_split for piece in plan.slices):
        unit = world * BLOCK
        return replace(plan, numel=-(-plan.numel // unit) * unit)
    return _deal(plan, world)


def _deal(plan: BucketPlan, world: int) -> BucketPlan:
    used = [0] * world
    dealt: list[tuple[int, Slice]] = []  # the rank, and the slice with its offset in that rank's part
    for piece in sorted(plan.slices, key=lambda s: -s.numel):
        rank = used.index(min(used))
        dealt.append((rank, replace(piece, offset=used[rank])))
        used[rank] += padded(piece.numel)
    size = max(used)
    slices = [replace(piece, offset=rank * size + piece.offset) for rank, piece in dealt]
    return replace(plan, slices=tuple(sorted(slices, key=lambda s: s.offset)), numel=world * size)


def part_of(whole: BucketPlan, rank: int, world: int) -> BucketPlan:
    """The plan of one rank's part, with offsets from the start of the part. The part may contain only padding."""
    size = whole.numel // world
    low, high = rank * size, (rank + 1) * size
    slices = []
    for piece in whole.slices:
        start, stop = max(piece.offset, low), min(piece.offset + piece.numel, high)
        if start < stop:
            slices.append(Slice(piece.param, piece.start + start - piece.offset, stop - start, start - low))
    return replace(whole, slices=tuple(slices), numel=size)
