# mypy: disallow-untyped-decorators=False
"""The kernel behind collect.py: the norm of each block of 128 gradients.

The squares of a block are added pair by pair, neighbours first. The two of a pair commute, so a row's bits are the same
whatever dtype was read and whichever threads held it: `row_norms` in collect.py is the same in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.gpu.codecs import BLOCK, from_bf16

LEVELS = tl.constexpr(7)  # 2**7 elements in a block


@triton.jit(do_not_specialize=["numel"])
def collect(
    values: tl.tensor,
    rows: tl.tensor,
    offset: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """rows[offset // 128:] = norms of the blocks of `values`. A tile for each program."""
    at = offset.to(tl.int64)  # a bucket may be larger than 2**31
    start = tl.program_id(0).to(tl.int64) * TILE
    # A mask would keep whole tiles from wide loads.
    if start + TILE <= numel:
        _collect_tile(values, rows, at, start, numel, TILE, False)
    else:
        _collect_tile(values, rows, at, start, numel, TILE, True)


@triton.jit
def _collect_tile(
    values: tl.tensor,
    rows: tl.tensor,
    at: tl.tensor,
    start: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = TILE // BLOCK
    block = start + tl.arange(0, BLOCKS)[:, None] * BLOCK  # [blocks, 1]
    index = block + tl.arange(0, BLOCK)[None, :]  # [blocks, 128]
    mask = index < numel if MASKED else tl.full([BLOCKS, BLOCK], True, tl.int1)
    block_mask = block < numel if MASKED else tl.full([BLOCKS, 1], True, tl.int1)
    # What the mask leaves out is zero, in the norm too.
    tl.store(rows + (at + block) // BLOCK, _row_norms(_load(values + index, mask)), mask=block_mask)


@triton.jit
def _load(pointers: tl.tensor, mask: tl.tensor) -> tl.tensor:
    x = tl.load(pointers, mask=mask, other=0)
    return from_bf16(x.to(tl.int16, bitcast=True)) if x.dtype == tl.bfloat16 else x.to(tl.float32)


@triton.jit
def _row_norms(x: tl.tensor) -> tl.tensor:
    """[blocks, 128] to [blocks, 1]."""
    s = x * x
    for _ in tl.static_range(LEVELS):
        s = tl.sum(tl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]), axis=2)
    return tl.math.sqrt_rn(s)
