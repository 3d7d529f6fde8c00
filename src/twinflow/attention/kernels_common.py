# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Functions that all attention kernels share: positions of tokens in a tile, masks, bias and dropout.

Scores are in base 2: they are multiplied by log2(e), so that the softmax uses exp2. Kernels whose programs compute
tiles of queries have scores as [queries, keys]. Kernels whose programs compute tiles of keys have scores as [keys,
queries]. The functions here take indices that broadcast to either shape.

Arguments are tensors or tuples. launch.py defines `strides`, `extras`, `drop`, `sizes` and `scratch` and the constants
S, and tiles.py defines `plan`. For a tensor in `extras` that is None, no code is compiled. tiles.py explains own and
other tiles, codes, units, items, pieces and slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

BITS = tl.constexpr(8)  # as in tiles.py
ITEM_COLUMNS = tl.constexpr(5)
CUT_COLUMNS = tl.constexpr(3)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # lower than any real score, but finite, so that differences are never NaN

# The hash of extras.py.
MIX_1 = tl.constexpr(0x7FEB352D)
MIX_2 = tl.constexpr(0x846CA68B)
HEAD = tl.constexpr(0x9E3779B1)
QUERY = tl.constexpr(0x85EBCA77)
KEY = tl.constexpr(0xC2B2AE3D)


@triton.jit
def own_item(sizes):
    """The item and the head (over the whole batch) of this program.

    The long items of all heads come first, so that no long item is still running when all others have ended. The other
    items are ordered by head, so that programs that run at the same time read the same keys.
    """
    number = tl.program_id(0)
    num_heads = tl.num_programs(0) // sizes.num_items
    is_long = number < sizes.num_long * num_heads
    first = tl.where(is_long, 0, sizes.num_long)
    width = tl.where(is_long, sizes.num_long, sizes.num_items - sizes.num_long)
    number -= first * num_heads
    return first + number % width, number // width


@triton.jit
def read_item(plan, number):
    """Fields of an item: own tile, first other tile, first other tile with a mask, end, and slot of a piece."""
    row = plan.items + number * ITEM_COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def split_head(batch_head, num_heads):
    """Batch index and head as int64."""
    return (batch_head // num_heads).to(tl.int64), (batch_head % num_heads).to(tl.int64)


@triton.jit
def first_codes(plan, start, mid, S: tl.constexpr):
    """Codes of the first tile without a mask and of the first tile with a mask. They are read early, because the loads
    of these tiles need them.
    """
    return read_code(plan.codes, start, S), read_code(plan.codes, mid, S)


@triton.jit
def read_code(codes, tile, S: tl.constexpr):
    """The code of a tile with one unit, or the code of each token's unit [OTHER] for a tile with several units.

    A loop reads the code of the next tile while it processes the current one. Loads whose addresses depend on the code
    can then be pipelined like all others.
    """
    if S.UNIT == S.OTHER:
        return tl.load(codes + tile)
    else:
        return tl.load(codes + tile * (S.OTHER // S.UNIT) + tl.arange(0, S.OTHER) // S.UNIT)


@triton.jit
def code_positions(code, S: tl.constexpr):
    """Positions [OTHER] of the tokens of a tile."""
    return (code >> BITS) * S.UNIT + tl.arange(0, S.OTHER) % S.UNIT


@triton.jit
def load_tile(base, code, first, count, stride, MASKED: tl.constexpr, S: tl.constexpr):
    """Load rows [OTHER, PADDED_DIM] of a matrix with `count` rows, the first of which has the position `first`.

    For rows that do not exist, other rows are read, because a mask would be slower; their scores are masked later. With
    TMA, `base` is a descriptor of the rows of all heads, and `stride` is the first row of this head.
    """
    if S.TMA and not MASKED:
        return base.load([stride + (code >> BITS) * S.OTHER - first, 0])
    else:
        d = tl.arange(0, S.PADDED_DIM)
        if S.UNIT == S.OTHER and not MASKED:
            start = ((code >> BITS) * S.OTHER - first).to(tl.int64) * stride
            pointers = (base + start) + (tl.arange(0, S.OTHER)[:, None] * stride + d[None, :])
        else:
            index = code_positions(code, S) - first
            if MASKED:
                index = tl.minimum(tl.maximum(index, 0), count - 1)
            pointers = base + (index.to(tl.int64)[:, None] * stride + d[None, :])
        if S.HEAD_DIM == S.PADDED_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=d[None, :] < S.HEAD_DIM, other=0.0)


@triton.jit
def product(a, b, acc, S: tl.constexpr):
    """a @ b + acc in fp32. UPCAST is for Triton's interpreter, which has no products of bf16."""
    if S.UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=S.PRECISION)


@triton.jit
def head_base(base, strides, batch, head):
    """Address of the matrix of one head. `batch` and `head` are int64."""
    return base + batch * strides[0] + head * strides[1]


@triton.jit
def head_rows(base, strides, batch, head, first_row, S: tl.constexpr):
    """Arguments of `load_tile` for the matrix of one head: base and stride, or a descriptor and a row with TMA."""
    if S.TMA:
        return base, first_row.to(tl.int32)
    else:
        return head_base(base, strides, batch, head), strides[2]


@triton.jit
def load_rows(base, index, is_there, stride, S: tl.constexpr):
    """Load rows [n, PADDED_DIM] of a matrix. Rows that do not exist are zeros."""
    d = tl.arange(0, S.PADDED_DIM)
    pointers = base + (index.to(tl.int64)[:, None] * stride + d[None, :])
    return tl.load(pointers, mask=is_there[:, None] & (d[None, :] < S.HEAD_DIM), other=0.0)


@triton.jit
def store_rows(base, index, is_there, stride, x, S: tl.constexpr):
    """Store the rows that exist, in the dtype of the memory."""
    d = tl.arange(0, S.PADDED_DIM)
    pointers = base + (index.to(tl.int64)[:, None] * stride + d[None, :])
    tl.store(pointers, x.to(base.dtype.element_ty), mask=is_there[:, None] & (d[None, :] < S.HEAD_DIM))


@triton.jit
def scratch_rows(base, slot, own, S: tl.constexpr):
    """Pointers [n, PADDED_DIM] to rows of a slot of scratch memory. `slot` is int64."""
    return base + (slot * S.OWN + own)[:, None] * S.PADDED_DIM + tl.arange(0, S.PADDED_DIM)[None, :]


@triton.jit
def layout_mask(code, own, query, key, sizes, S: tl.constexpr):
    """A mask of the scores that the layout keeps. `own` [n, 1] counts from the start of the tile. `query` and `key`
    broadcast.
    """
    bits = code if S.UNIT == S.OTHER else code[None, :]
    keep = ((bits >> (own // S.SUB)) & 1) != 0
    keep = keep & (query >= 0) & (query < sizes.num_queries) & (key < sizes.num_keys)
    if S.CAUSAL:
        keep = keep & (key <= query + sizes.q_start)
    return keep


@triton.jit
def extra_mask(keep, query, key, batch, head, extras, sizes, S: tl.constexpr):
    """`keep` without scores of padding keys and without scores that the mask removes."""
    if extras.padding is not None:
        has_key = key < sizes.num_keys
        keep = keep & (tl.load(extras.padding + batch * sizes.num_keys + key, mask=has_key, other=0) != 0)
    if extras.mask is not None:
        at = batch * sizes.mask_batch + head * sizes.mask_head
        at += query.to(tl.int64) * sizes.mask_query + key * S.MASK_STEP
        is_there = (query >= 0) & (query < sizes.num_queries) & (key < sizes.num_keys)
        keep = keep & (tl.load(extras.mask + at, mask=is_there, other=0) != 0)
    return keep


@triton.jit
def extra_bias(scores, query, key, batch, head, extras, sizes, S: tl.constexpr):
    """Scores with bias and relative positions added, in base 2."""
    is_there = (query >= 0) & (query < sizes.num_queries) & (key < sizes.num_keys)
    if extras.bias is not None:
        at = batch * sizes.bias_batch + head * sizes.bias_head
        at += query.to(tl.int64) * sizes.bias_query + key * S.BIAS_STEP
        scores += tl.load(extras.bias + at, mask=is_there, other=0.0).to(tl.float32) * LOG2E
    if extras.relative is not None:
        at = head * sizes.relative_head + (key - query + sizes.num_queries - 1)
        scores += tl.load(extras.relative + at, mask=is_there, other=0.0).to(tl.float32) * LOG2E
    return scores


@triton.jit
def dropout_factor(query, key, batch, head, drop, sizes):
    """The factor of dropout for each probability: 0 or 1 / (1 - p)."""
    number = (batch * sizes.num_heads + head).to(tl.uint32)
    x = _mix(drop.seed.to(tl.uint32, bitcast=True) ^ (number * HEAD))
    x = _mix(x ^ ((query + sizes.q_start).to(tl.uint32) * QUERY))
    x = _mix(x ^ (key.to(tl.uint32) * KEY))
    return tl.where(x >= drop.threshold.to(tl.uint32, bitcast=True), drop.kept_factor, 0.0)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * MIX_1
    x = x ^ (x >> 15)
    x = x * MIX_2
    return x ^ (x >> 16)
