# mypy: disallow-untyped-decorators=False
"""Sums of gradients over the pieces of rows and columns that tiles.py has cut."""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.attention.kernels_common import CUT_COLUMNS, head_base, scratch_rows, store_rows


@triton.jit(do_not_specialize=["sizes", "count", "start"])
def reduce(
    first: tl.tensor,
    second: tl.tensor | None,
    strides: tl.tuple,
    plan: tl.tuple,
    scratch: tl.tuple,
    sizes: tl.tuple,
    count: tl.tensor,
    start: tl.tensor,
    ROWS: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Sum the pieces of a tile that was cut, for one or two gradients. A program has ROWS rows.

    A gradient has `count` rows, the first of which has the position `start`.
    """
    part = tl.program_id(0) % (S.OWN // ROWS)
    cut = tl.program_id(0) // (S.OWN // ROWS) % sizes.num_items
    batch = (tl.program_id(0) // (S.OWN // ROWS) // sizes.num_items // sizes.num_heads).to(tl.int64)
    head = (tl.program_id(0) // (S.OWN // ROWS) // sizes.num_items % sizes.num_heads).to(tl.int64)
    pattern = tl.load(plan.heads + head * 2)
    cuts = tl.load(plan.cut_starts + pattern)
    if cut >= tl.load(plan.cut_starts + pattern + 1) - cuts:
        return
    row = plan.cuts + (cuts + cut) * CUT_COLUMNS
    place = batch * sizes.num_slots + tl.load(plan.heads + head * 2 + 1) + tl.load(row + 1)  # int64
    stop = place + tl.load(row + 2)
    own = part * ROWS + tl.arange(0, ROWS)
    index = tl.load(row) * S.OWN - start + own
    is_there = (index >= 0) & (index < count)
    acc = _sum_pieces(scratch.first, place, stop, own, ROWS, S)
    store_rows(head_base(first, strides.first, batch, head), index, is_there, strides.first[2], acc, S)
    if second is not None:
        acc = _sum_pieces(scratch.second, place, stop, own, ROWS, S)
        store_rows(head_base(second, strides.second, batch, head), index, is_there, strides.second[2], acc, S)


@triton.jit
def _sum_pieces(
    scratch: tl.tensor, start: tl.tensor, stop: tl.tensor, own: tl.tensor, ROWS: tl.constexpr, S: tl.constexpr
) -> tl.tensor:
    """The sum of the pieces start to stop, in their order."""
    acc = tl.full([ROWS, S.PADDED_DIM], 0.0, tl.float32)
    for place in tl.range(start, stop):
        acc += tl.load(scratch_rows(scratch, place, own, S))
    return acc
