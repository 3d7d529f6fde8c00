"""Rows that are cut into pieces: scratch memory for the pieces, and launches of the kernels that
combine them in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twinflow.attention.launch import (
    REDUCE_ROWS,
    Call,
    ForwardScratch,
    ForwardStrides,
    Strides,
    launch,
    plan_args,
    strides_of,
)
from twinflow.attention.tiles import TilePlan, TileSize
from twinflow.attention.tuning import padded_dim

OPTIONS = {"num_warps": 4}


class ReduceStrides(NamedTuple):
    """Strides of batch, head and token."""

    first: Strides
    second: Strides | None


class GradientScratch(NamedTuple):
    """Scratch memory of rows that are cut, per slot."""

    first: Tensor
    second: Tensor | None = None


def forward_scratch(call: Call, plan: TilePlan, size: TileSize) -> ForwardScratch:
    """Scratch memory of forward. It is empty if no row is cut."""
    (sums,) = _scratch(call, plan, size, 1)
    tops, weights = (torch.empty(sums.shape[:2], dtype=torch.float32, device=sums.device) for _ in range(2))
    return ForwardScratch(sums, tops, weights)


def gradient_scratch(call: Call, plan: TilePlan, size: TileSize, count: int) -> GradientScratch:
    """Scratch memory of `count` gradients, one or two. It is empty if no row is cut."""
    return GradientScratch(*_scratch(call, plan, size, count))


def reduce_forward(
    out: Tensor,
    lse: Tensor,
    strides: ForwardStrides,
    call: Call,
    plan: TilePlan,
    size: TileSize,
    pieces: ForwardScratch,
) -> None:
    """Combine the pieces and write the cut rows of `out` and `lse`."""
    from twinflow.attention import kernels_forward

    if not plan.num_slots:
        return
    num_programs = plan.max_cuts * call.sizes.batch * call.sizes.num_heads * (size.own // REDUCE_ROWS)
    size_args = call.size_args(plan.max_cuts, plan.num_slots)
    args = (out, lse, strides, plan_args(plan), pieces, size_args, REDUCE_ROWS, call.shape(size, plan))
    launch(kernels_forward.reduce, num_programs, args, OPTIONS)


def reduce_gradients(
    first: Tensor,
    second: Tensor | None,
    start: int,
    call: Call,
    plan: TilePlan,
    size: TileSize,
    pieces: GradientScratch,
) -> None:
    """Sum the pieces and write the cut rows of one or two gradients. The first row has the position `start`."""
    from twinflow.attention import kernels_sums

    if not plan.num_slots:
        return
    num_heads = first.shape[1]
    num_programs = plan.max_cuts * call.sizes.batch * num_heads * (size.own // REDUCE_ROWS)
    size_args = call.size_args(plan.max_cuts, plan.num_slots)._replace(num_heads=num_heads)
    strides = ReduceStrides(strides_of(first), strides_of(second) if second is not None else None)
    places = (first.shape[2], start)
    args = (first, second, strides, plan_args(plan), pieces, size_args, *places, REDUCE_ROWS, call.shape(size, plan))
    launch(kernels_sums.reduce, num_programs, args, OPTIONS)


def _scratch(call: Call, plan: TilePlan, size: TileSize, count: int) -> list[Tensor]:
    shape = (call.sizes.batch * plan.num_slots, size.own, padded_dim(call.sizes.head_dim))
    return [torch.empty(shape, dtype=torch.float32, device=call.device) for _ in range(count)]
