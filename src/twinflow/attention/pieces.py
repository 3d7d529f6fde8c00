"""Rows that were cut: scratch memory for their pieces, and the kernels that put them together, in one order."""

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
    """Of rows that are cut, for each slot."""

    first: Tensor
    second: Tensor | None = None


def forward_scratch(call: Call, plan: TilePlan, size: TileSize) -> ForwardScratch:
    """Empty where nothing is cut."""
    (sums,) = _scratch(call, plan, size, 1)
    tops, weights = (torch.empty(sums.shape[:2], dtype=torch.float32, device=sums.device) for _ in range(2))
    return ForwardScratch(sums, tops, weights)


def gradient_scratch(call: Call, plan: TilePlan, size: TileSize, count: int) -> GradientScratch:
    """Of one gradient or of two; empty where nothing is cut."""
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
    """Writes the rows of `out` and `lse` that were cut."""
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
    """Writes the rows of one gradient or of two that were cut. Their rows are positions from `start` on."""
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
