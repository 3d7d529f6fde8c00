# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernels for collect.py: the norm of each block of 128 gradient elements, and of all blocks of a bucket.

The squares of a block are added in pairs, neighbours first. The squares of the norms of blocks are added in 4096 lanes,
and then the lanes in pairs. Adding a pair is commutative, so the bits of a norm do not depend on the assignment of
elements to threads, which Triton chooses from what it knows of an address. `row_norms` in collect.py is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twinflow.gpu.kernel import BLOCK, from_bf16

LEVELS = tl.constexpr(7)  # 2**7 elements in a block
CHUNK, CHUNK_LEVELS = tl.constexpr(4096), tl.constexpr(12)  # rows that are summed at once: 2**12
ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
TABLE_COLUMNS = tl.constexpr(4)  # int64: address, number of elements, start of the norms in `rows`, index of the norm


@triton.jit(do_not_specialize=["numel"])
def collect(values, rows, offset, numel, TILE: tl.constexpr):
    """Write the norms of the blocks of `values` to rows[offset // 128:]. Each program processes one tile."""
    at = offset.to(tl.int64)  # a bucket may have more than 2**31 elements
    start = tl.program_id(0).to(tl.int64) * TILE
    # Whole tiles use no mask, because a mask prevents wide loads.
    if start + TILE <= numel:
        _collect_tile(values, rows, at, start, numel, TILE, False)
    else:
        _collect_tile(values, rows, at, start, numel, TILE, True)


@triton.jit
def collect_many(table, rows, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """`collect` for several buffers. A row of the table has the address of a buffer (a multiple of 16), its number of
    elements, and the start of its norms, counted in elements. Each program processes one tile, and each row of the grid
    processes one buffer.
    """
    own = table + tl.program_id(1).to(tl.int64) * TABLE_COLUMNS
    numel = tl.load(own + 1)
    start = tl.program_id(0).to(tl.int64) * TILE
    if start < numel:
        values = tl.multiple_of(tl.load(own).to(tl.pointer_type(ELEMENT)), 16)
        at = tl.load(own + 2)
        if start + TILE <= numel:
            _collect_tile(values, rows, at, start, numel, TILE, False)
        else:
            _collect_tile(values, rows, at, start, numel, TILE, True)


@triton.jit(do_not_specialize=["num_rows"])
def norm(rows, num_rows, into):
    """Write the fp64 norm of all rows (norms of blocks) of one buffer to `into`."""
    tl.store(into, _norm(rows, num_rows))


@triton.jit
def norm_many(table, rows, norms):
    """`norm` for each buffer of a table. The last column of the table is the index in `norms`."""
    own = table + tl.program_id(0).to(tl.int64) * TABLE_COLUMNS
    found = _norm(rows + tl.load(own + 2) // BLOCK, tl.load(own + 1) // BLOCK)
    tl.store(norms + tl.load(own + 3), found)


@triton.jit
def _norm(rows, num_rows):
    index = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float64)
    for start in range(0, num_rows, CHUNK):
        x = tl.load(rows + start + index, mask=start + index < num_rows, other=0.0).to(tl.float64)
        total += x * x
    for _ in tl.static_range(CHUNK_LEVELS):
        total = tl.sum(tl.reshape(total, [total.shape[0] // 2, 2]), axis=1)
    return tl.sqrt(tl.sum(total, axis=0))


@triton.jit
def _collect_tile(values, rows, at, start, numel, TILE: tl.constexpr, MASKED: tl.constexpr):
    BLOCKS: tl.constexpr = TILE // BLOCK
    block = start + tl.arange(0, BLOCKS)[:, None] * BLOCK  # [blocks, 1]
    index = block + tl.arange(0, BLOCK)[None, :]  # [blocks, 128]
    mask = index < numel if MASKED else tl.full([BLOCKS, BLOCK], True, tl.int1)
    block_mask = block < numel if MASKED else tl.full([BLOCKS, 1], True, tl.int1)
    # Masked elements are zero and do not change the norm.
    tl.store(rows + (at + block) // BLOCK, _row_norms(_load(values + index, mask)), mask=block_mask)


@triton.jit
def _load(pointers, mask):
    x = tl.load(pointers, mask=mask, other=0)
    return from_bf16(x.to(tl.int16, bitcast=True)) if x.dtype == tl.bfloat16 else x.to(tl.float32)


@triton.jit
def _row_norms(x):
    """The norm of each row, from [blocks, 128] to [blocks, 1]."""
    s = x * x
    for _ in tl.static_range(LEVELS):
        s = tl.sum(tl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]), axis=2)
    return tl.math.sqrt_rn(s)
