# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Kernels in Triton: forward, gradients of queries, of keys and values, and of bias and relative positions.

A program computes the results of one tile of queries or keys, and iterates over the other tiles, first over those
without a mask. Backward recomputes probabilities from the log-sum-exp that forward has saved. No two programs write to
the same place, and the order of every sum is fixed.

If tiles.py has cut a row or column into pieces, the program of each piece writes its sum to scratch memory in fp32. In
forward this is the unnormalised sum, and the maximum and the sum of weights are written, too. The kernels
`reduce_outputs` and `reduce_gradients` combine the pieces in their order.

Scores are in base 2: they are multiplied by log2(e), so that the softmax uses exp2. Kernels whose programs compute
tiles of queries have scores as [queries, keys]. Kernels whose programs compute tiles of keys have scores as [keys,
queries]. Functions that both use take indices that broadcast to either shape.

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
def own_item(plan, sizes, num_heads, S: tl.constexpr):
    """The item of this program, batch * num_heads + head, and whether the program has no item.

    The long items of all heads come first, so that no long item is still running when all others have ended. The other
    items are ordered by head, so that programs that run at the same time read the same keys.
    """
    number = tl.program_id(0)
    all_heads = tl.num_programs(0) // sizes.num_items
    is_long = number < sizes.num_long * all_heads
    first = tl.where(is_long, 0, sizes.num_long)
    width = tl.where(is_long, sizes.num_long, sizes.num_items - sizes.num_long)
    number -= first * all_heads
    item, batch_head = first + number % width, number // width
    if S.ONE_PATTERN:  # All heads have the same number of items, and the reads below are not needed.
        return item, batch_head, False
    else:
        pattern = tl.load(plan.heads + batch_head % num_heads * 2)
        start = tl.load(plan.item_starts + pattern)
        return start + item, batch_head, item >= tl.load(plan.item_starts + pattern + 1) - start


@triton.jit
def read_item(plan, number, S: tl.constexpr):
    """Fields of an item: own tile, first other tile, first other tile with a mask, end, and slot of a piece. Also the
    codes of both first tiles, which are read early, because the loads of these tiles need them.
    """
    row = plan.items + number * ITEM_COLUMNS
    tile, start, mid, stop, slot = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    return tile, start, mid, stop, slot, (read_code(plan.codes, start, S), read_code(plan.codes, mid, S))


@triton.jit
def own_cut(plan, sizes, ROWS: tl.constexpr, S: tl.constexpr):
    """The work of a program that combines ROWS rows of a tile that was cut. Return these rows, the address of the tile
    in `plan.cuts`, batch * num_heads + head, and whether there is no such tile.
    """
    part = tl.program_id(0) % (S.OWN // ROWS)
    cut = tl.program_id(0) // (S.OWN // ROWS) % sizes.num_items
    batch_head = tl.program_id(0) // (S.OWN // ROWS) // sizes.num_items
    pattern = tl.load(plan.heads + split_head(batch_head, sizes.num_heads)[1] * 2)
    first = tl.load(plan.cut_starts + pattern)
    is_past = cut >= tl.load(plan.cut_starts + pattern + 1) - first
    return part * ROWS + tl.arange(0, ROWS), plan.cuts + (first + cut) * CUT_COLUMNS, batch_head, is_past


@triton.jit
def split_head(batch_head, num_heads):
    """Batch index and head as int64."""
    return (batch_head // num_heads).to(tl.int64), (batch_head % num_heads).to(tl.int64)


@triton.jit
def place_of(plan, sizes, batch, head, slot):
    """The place of a slot of a head in scratch memory as int64."""
    return batch * sizes.num_slots + tl.load(plan.heads + head * 2 + 1) + slot


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
    broadcast to the shape of the scores.
    """
    bits = code if S.UNIT == S.OTHER else code[None, :]
    keep = ((bits >> (own // S.SUB)) & 1) != 0
    keep = keep & (query >= 0) & (query < sizes.num_queries) & (key < sizes.num_keys)
    return keep & directed(query + sizes.q_start, key, sizes, S)


@triton.jit
def directed(query, key, sizes, S: tl.constexpr):
    """A mask of the scores that causality and the window keep. `query` and `key` are positions that broadcast."""
    keep = key >= 0
    if S.CAUSAL:
        keep = keep & (key <= query)
    if S.HAS_WINDOW:
        keep = keep & (key > query - sizes.window)
        if not S.CAUSAL:
            keep = keep & (key < query + sizes.window)
    return keep


@triton.jit
def extra_mask(keep, query, key, batch, head, extras, sizes, S: tl.constexpr):
    """`keep` without scores of padding keys, of keys of other documents, and without those that the mask removes."""
    if extras.padding is not None:
        has_key = key < sizes.num_keys
        keep = keep & (tl.load(extras.padding + batch * sizes.num_keys + key, mask=has_key, other=0) != 0)
    if extras.documents is not None:
        line = extras.documents + batch * sizes.num_keys
        position = query + sizes.q_start
        has_query = (query >= 0) & (query < sizes.num_queries)
        own = tl.load(line + position, mask=has_query, other=0)
        keep = keep & (tl.load(line + key, mask=key < sizes.num_keys, other=0) == own)
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
def capped(scores, sizes):
    """Scores after softcapping, c * tanh(score / c), in base 2. tanh is computed from exp2, which never overflows to a
    wrong result here: for large arguments the quotient is 0 or 2."""
    limit = sizes.softcap * LOG2E
    return limit - (2.0 * limit) / (tl.exp2(scores * (2.0 * LOG2E / limit)) + 1.0)


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


@triton.jit(do_not_specialize=["drop", "sizes"])
def forward(q, k, v, out, lse, strides, plan, scratch, extras, drop, sizes, S: tl.constexpr):
    """Compute the output and log-sum-exp for one item of the plan and one head."""
    item, batch_head, is_past = own_item(plan, sizes, sizes.num_heads, S)
    if is_past:
        return
    tile, start, mid, stop, slot, codes = read_item(plan, item, S)
    batch, head = split_head(batch_head, sizes.num_heads)

    own = tl.arange(0, S.OWN)
    query = tile * S.OWN - sizes.q_start + own
    is_there = (query >= 0) & (query < sizes.num_queries)
    q_tile = load_rows(head_base(q, strides.q, batch, head), query, is_there, strides.q[2], S)
    kv_head = head // S.GROUP
    first_row = (batch * (sizes.num_heads // S.GROUP) + kv_head) * sizes.num_keys
    keys = head_rows(k, strides.k, batch, kv_head, first_row, S)
    values = head_rows(v, strides.v, batch, kv_head, first_row, S)
    state = (
        tl.full([S.OWN, S.PADDED_DIM], 0.0, tl.float32),
        tl.full([S.OWN], LOWEST, tl.float32),
        tl.full([S.OWN], 0.0, tl.float32),
    )
    where = (batch, head)
    if S.HAS_FULL:
        state = _walk(state, q_tile, query, keys, values, plan.codes, start, mid, codes[0], where, extras, drop,
                      sizes, False, S)  # fmt: skip
    if S.HAS_PARTIAL:
        state = _walk(state, q_tile, query, keys, values, plan.codes, mid, stop, codes[1], where, extras, drop,
                      sizes, True, S)  # fmt: skip

    lines = lse + batch_head.to(tl.int64) * sizes.num_queries
    base = head_base(out, strides.out, batch, head)
    if S.HAS_CUTS and slot >= 0:
        place = place_of(plan, sizes, batch, head, slot)
        tl.store(scratch_rows(scratch.sums, place, own, S), state[0])
        tl.store(scratch.tops + place * S.OWN + own, state[1])
        tl.store(scratch.weights + place * S.OWN + own, state[2])
    else:
        _finish(state, query, is_there, base, strides.out[2], lines, S)


@triton.jit
def _walk(state, q_tile, query, keys, values, codes, start, stop, next_code, where, extras, drop, sizes,
          MASKED: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Add the key tiles from start up to stop to the state: weighted sum, maximum in base 2, and sum of weights."""
    acc, top, weight = state
    factor = sizes.scale * LOG2E
    rows = query[:, None]
    for tile in tl.range(start, stop):
        code = next_code
        next_code = read_code(codes, tile + 1, S)
        cols = code_positions(code, S)[None, :]
        k_tile = load_tile(keys[0], code, 0, sizes.num_keys, keys[1], MASKED, S)
        scores = product(q_tile, tl.trans(k_tile), None, S)  # [own, other]
        if MASKED or S.HAS_BIAS or S.HAS_CAP or S.HAS_MASKS:
            scores = scores * factor
            if S.HAS_CAP:
                scores = capped(scores, sizes)
            if S.HAS_BIAS:
                scores = extra_bias(scores, rows, cols, where[0], where[1], extras, sizes, S)
            keep = cols >= 0
            if MASKED:
                keep = layout_mask(code, tl.arange(0, S.OWN)[:, None], rows, cols, sizes, S)
            if S.HAS_MASKS:
                keep = extra_mask(keep, rows, cols, where[0], where[1], extras, sizes, S)
            if MASKED or S.HAS_MASKS:
                scores = tl.where(keep, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            p = tl.exp2(scores * factor - new_top[:, None])
        fade = tl.exp2(top - new_top)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        if S.DROPOUT:
            p = p * dropout_factor(rows, cols, where[0], where[1], drop, sizes)
        v_tile = load_tile(values[0], code, 0, sizes.num_keys, values[1], MASKED, S)
        acc = product(p.to(v_tile.dtype), v_tile, acc, S)
        top = new_top
    return acc, top, weight


@triton.jit
def _finish(state, query, is_there, out, stride, lse, S: tl.constexpr):
    """Normalise and store rows. Rows without a key become zeros with an infinite log-sum-exp, for which backward
    computes probabilities of zero.
    """
    acc, top, weight = state
    is_empty = weight == 0.0
    divisor = tl.where(is_empty, 1.0, weight)
    store_rows(out, query, is_there, stride, acc / divisor[:, None], S)
    tl.store(lse + query, tl.where(is_empty, float("inf"), top + tl.log2(divisor)), mask=is_there)


@triton.jit(do_not_specialize=["sizes"])
def reduce_outputs(out, lse, strides, plan, scratch, sizes, ROWS: tl.constexpr, S: tl.constexpr):
    """Combine the pieces of a tile that was cut. Each program combines ROWS rows."""
    own, row, batch_head, is_past = own_cut(plan, sizes, ROWS, S)
    if is_past:
        return
    batch, head = split_head(batch_head, sizes.num_heads)
    place = place_of(plan, sizes, batch, head, tl.load(row + 1))
    top = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, S.PADDED_DIM], 0.0, tl.float32)
    for slot in tl.range(place, place + tl.load(row + 2)):
        piece_top = tl.load(scratch.tops + slot * S.OWN + own)
        new_top = tl.maximum(top, piece_top)
        fade = tl.exp2(top - new_top)
        factor = tl.exp2(piece_top - new_top)
        weight = weight * fade + tl.load(scratch.weights + slot * S.OWN + own) * factor
        acc = acc * fade[:, None] + tl.load(scratch_rows(scratch.sums, slot, own, S)) * factor[:, None]
        top = new_top
    query = tl.load(row) * S.OWN - sizes.q_start + own
    is_there = (query >= 0) & (query < sizes.num_queries)
    lines = lse + batch_head.to(tl.int64) * sizes.num_queries
    base = head_base(out, strides.out, batch, head)
    _finish((acc, top, weight), query, is_there, base, strides.out[2], lines, S)


@triton.jit
def probabilities(scores, keep, query, key, lse, where, extras, sizes, MASKED: tl.constexpr, S: tl.constexpr):
    """Probabilities from products of queries and keys, and the derivative of a softcap. `lse` broadcasts. For queries
    outside of the call, it is infinite or `keep` is false.
    """
    scores = scores * (sizes.scale * LOG2E)
    slope = 1.0
    if S.HAS_CAP:
        scores = capped(scores, sizes)
        share = scores * (1.0 / (sizes.softcap * LOG2E))
        slope = 1.0 - share * share
    if S.HAS_BIAS:
        scores = extra_bias(scores, query, key, where[0], where[1], extras, sizes, S)
    p = tl.exp2(scores - lse)
    if S.HAS_MASKS:
        keep = extra_mask(keep, query, key, where[0], where[1], extras, sizes, S)
    if MASKED or S.HAS_MASKS:
        p = tl.where(keep, p, 0.0)
    return p, slope


@triton.jit(do_not_specialize=["drop", "sizes"])
def query_gradients(q, k, v, out, lse, grad, delta, dq, strides, plan, scratch, extras, drop, sizes, S: tl.constexpr):
    """Compute dq for one item of the plan and one head. Also compute delta, the sum of out * grad of each query, which
    the other kernels need.
    """
    item, batch_head, is_past = own_item(plan, sizes, sizes.num_heads, S)
    if is_past:
        return
    tile, start, mid, stop, slot, codes = read_item(plan, item, S)
    batch, head = split_head(batch_head, sizes.num_heads)

    own = tl.arange(0, S.OWN)
    query = tile * S.OWN - sizes.q_start + own
    is_there = (query >= 0) & (query < sizes.num_queries)
    at = batch_head.to(tl.int64) * sizes.num_queries + query
    # loaded here, so that no load waits for the store below
    row_lse = tl.load(lse + at, mask=is_there, other=float("inf"))
    q_tile = load_rows(head_base(q, strides.q, batch, head), query, is_there, strides.q[2], S)
    grad_tile = load_rows(head_base(grad, strides.grad, batch, head), query, is_there, strides.grad[2], S)
    out_tile = load_rows(head_base(out, strides.out, batch, head), query, is_there, strides.out[2], S)
    row_delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)  # [own]
    tl.store(delta + at, row_delta, mask=is_there)  # all pieces of a row write the same values
    lines = (row_lse, row_delta)

    kv_head = head // S.GROUP
    first_row = (batch * (sizes.num_heads // S.GROUP) + kv_head) * sizes.num_keys
    keys = head_rows(k, strides.k, batch, kv_head, first_row, S)
    values = head_rows(v, strides.v, batch, kv_head, first_row, S)
    tiles = (q_tile, grad_tile)
    where = (batch, head)
    acc = tl.full([S.OWN, S.PADDED_DIM], 0.0, tl.float32)
    if S.HAS_FULL:
        acc = _walk_keys(acc, tiles, lines, query, keys, values, plan.codes, start, mid, codes[0], where, extras, drop,
                         sizes, False, S)  # fmt: skip
    if S.HAS_PARTIAL:
        acc = _walk_keys(acc, tiles, lines, query, keys, values, plan.codes, mid, stop, codes[1], where, extras, drop,
                         sizes, True, S)  # fmt: skip

    base = head_base(dq, strides.dq, batch, head)
    if S.HAS_CUTS and slot >= 0:
        place = place_of(plan, sizes, batch, head, slot)
        tl.store(scratch_rows(scratch.sums, place, own, S), acc * sizes.scale)
    else:
        store_rows(base, query, is_there, strides.dq[2], acc * sizes.scale, S)


@triton.jit
def _walk_keys(acc, tiles, lines, query, keys, values, codes, start, stop, next_code, where, extras, drop, sizes,
               MASKED: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Add the contributions of the key tiles from start up to stop to the gradient of queries. The caller multiplies by
    the scale.
    """
    q_tile, grad_tile = tiles
    lse, delta = lines
    rows = query[:, None]
    for tile in tl.range(start, stop):
        code = next_code
        next_code = read_code(codes, tile + 1, S)
        cols = code_positions(code, S)[None, :]
        k_tile = load_tile(keys[0], code, 0, sizes.num_keys, keys[1], MASKED, S)
        scores = product(q_tile, tl.trans(k_tile), None, S)  # [own, other]
        v_tile = load_tile(values[0], code, 0, sizes.num_keys, values[1], MASKED, S)
        dp = product(grad_tile, tl.trans(v_tile), None, S)
        keep = cols >= 0
        if MASKED:
            keep = layout_mask(code, tl.arange(0, S.OWN)[:, None], rows, cols, sizes, S)
        p, slope = probabilities(scores, keep, rows, cols, lse[:, None], where, extras, sizes, MASKED, S)
        if S.DROPOUT:
            dp = dp * dropout_factor(rows, cols, where[0], where[1], drop, sizes)
        ds = p * (dp - delta[:, None])
        if S.HAS_CAP:
            ds = ds * slope
        acc = product(ds.to(k_tile.dtype), k_tile, acc, S)
    return acc


@triton.jit(do_not_specialize=["drop", "sizes"])
def key_gradients(q, k, v, lse, grad, delta, dk, dv, strides, plan, scratch, extras, drop, sizes, S: tl.constexpr):
    """Compute dk and dv for one item of the plan and one head.

    GROUP query heads share a head of keys. A program sums IN_PROGRAM of them, so that dk and dv have num_heads //
    IN_PROGRAM heads.
    """
    item, batch_output, is_past = own_item(plan, sizes, sizes.num_heads // S.IN_PROGRAM, S)
    if is_past:
        return
    tile, start, mid, stop, slot, codes = read_item(plan, item, S)
    batch, output = split_head(batch_output, sizes.num_heads // S.IN_PROGRAM)

    own = tl.arange(0, S.OWN)
    key = tile * S.OWN + own
    is_there = key < sizes.num_keys
    source = output * S.IN_PROGRAM // S.GROUP
    tiles = (
        load_rows(head_base(k, strides.k, batch, source), key, is_there, strides.k[2], S),
        load_rows(head_base(v, strides.v, batch, source), key, is_there, strides.v[2], S),
    )
    dk_acc = tl.full([S.OWN, S.PADDED_DIM], 0.0, tl.float32)
    dv_acc = tl.full([S.OWN, S.PADDED_DIM], 0.0, tl.float32)
    for member in range(S.IN_PROGRAM):
        head = output * S.IN_PROGRAM + member
        where = (batch, head)
        line = (batch * sizes.num_heads + head) * sizes.num_queries
        queries = head_rows(q, strides.q, batch, head, line, S)
        grads = head_rows(grad, strides.grad, batch, head, line, S)
        lines = (lse + line, delta + line)
        if S.HAS_FULL:
            dk_acc, dv_acc = _walk_queries(dk_acc, dv_acc, tiles, key, queries, grads, lines, plan.codes, start, mid,
                                           codes[0], where, extras, drop, sizes, False, S)  # fmt: skip
        if S.HAS_PARTIAL:
            dk_acc, dv_acc = _walk_queries(dk_acc, dv_acc, tiles, key, queries, grads, lines, plan.codes, mid, stop,
                                           codes[1], where, extras, drop, sizes, True, S)  # fmt: skip

    dk_base = head_base(dk, strides.dk, batch, output)
    dv_base = head_base(dv, strides.dv, batch, output)
    if S.HAS_CUTS and slot >= 0:
        place = place_of(plan, sizes, batch, output, slot)
        tl.store(scratch_rows(scratch.sums, place, own, S), dk_acc * sizes.scale)
        tl.store(scratch_rows(scratch.second_sums, place, own, S), dv_acc)
    else:
        store_rows(dk_base, key, is_there, strides.dk[2], dk_acc * sizes.scale, S)
        store_rows(dv_base, key, is_there, strides.dv[2], dv_acc, S)


@triton.jit
def _walk_queries(dk_acc, dv_acc, tiles, key, queries, grads, lines, codes, start, stop, next_code, where, extras, drop,
                  sizes, MASKED: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Add the contributions of the query tiles from start up to stop to the gradients of keys and values. The caller
    multiplies the gradient of keys by the scale.
    """
    k_tile, v_tile = tiles
    rows = key[:, None]
    for tile in tl.range(start, stop):
        code = next_code
        next_code = read_code(codes, tile + 1, S)
        query = code_positions(code, S) - sizes.q_start
        cols = query[None, :]
        at = query
        if MASKED:
            at = tl.minimum(tl.maximum(query, 0), sizes.num_queries - 1)
        q_tile = load_tile(queries[0], code, sizes.q_start, sizes.num_queries, queries[1], MASKED, S)
        scores = product(k_tile, tl.trans(q_tile), None, S)  # [own, other]
        grad_tile = load_tile(grads[0], code, sizes.q_start, sizes.num_queries, grads[1], MASKED, S)
        dp = product(v_tile, tl.trans(grad_tile), None, S)
        keep = cols >= 0
        if MASKED:
            keep = layout_mask(code, tl.arange(0, S.OWN)[:, None], cols, rows, sizes, S)
        row_lse = tl.load(lines[0] + at)[None, :]  # loaded as late as possible, here and below, to save registers
        p, slope = probabilities(scores, keep, cols, rows, row_lse, where, extras, sizes, MASKED, S)
        row_delta = tl.load(lines[1] + at)[None, :]
        kept = p
        if S.DROPOUT:
            factor = dropout_factor(cols, rows, where[0], where[1], drop, sizes)
            kept = p * factor
            dp = dp * factor
        dv_acc = product(kept.to(grad_tile.dtype), grad_tile, dv_acc, S)
        ds = p * (dp - row_delta)
        if S.HAS_CAP:
            ds = ds * slope
        dk_acc = product(ds.to(q_tile.dtype), q_tile, dk_acc, S)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["sizes", "count", "start"])
def reduce_gradients(first, second, strides, plan, scratch, sizes, count, start, ROWS: tl.constexpr, S: tl.constexpr):
    """Sum the pieces of a tile that was cut, for one or two gradients. Each program sums ROWS rows.

    A gradient has `count` rows, the first of which has the position `start`.
    """
    own, row, batch_head, is_past = own_cut(plan, sizes, ROWS, S)
    if is_past:
        return
    batch, head = split_head(batch_head, sizes.num_heads)
    place = place_of(plan, sizes, batch, head, tl.load(row + 1))
    stop = place + tl.load(row + 2)
    index = tl.load(row) * S.OWN - start + own
    is_there = (index >= 0) & (index < count)
    acc = _sum_pieces(scratch.sums, place, stop, own, ROWS, S)
    store_rows(head_base(first, strides[0], batch, head), index, is_there, strides[0][2], acc, S)
    if second is not None:
        acc = _sum_pieces(scratch.second_sums, place, stop, own, ROWS, S)
        store_rows(head_base(second, strides[1], batch, head), index, is_there, strides[1][2], acc, S)


@triton.jit
def _sum_pieces(scratch, start, stop, own, ROWS: tl.constexpr, S: tl.constexpr):
    """The sum of the pieces from start up to stop, in their order."""
    acc = tl.full([ROWS, S.PADDED_DIM], 0.0, tl.float32)
    for place in tl.range(start, stop):
        acc += tl.load(scratch_rows(scratch, place, own, S))
    return acc


@triton.jit(do_not_specialize=["drop", "sizes", "num_members"])
def score_sums(q, k, v, lse, grad, delta, sums, strides, cells, extras, drop, sizes, num_members, DENSE: tl.constexpr,
               S: tl.constexpr):  # fmt: skip
    """Sum the score gradients of one list of cells, which are small squares of scores, over one set of (batch, head)
    pairs, in the order of the list. If a bias has an entry for each score, a list is one cell. If it has an entry for
    each key, a list has the cells of a column. For relative positions a list has the cells of a diagonal.

    With DENSE, each sum is added to the number at the position of its score. Otherwise `sums` has one square per list.
    """
    number = tl.program_id(0) % sizes.num_items
    members = tl.program_id(0) // sizes.num_items
    lane = tl.arange(0, S.OWN)
    acc = tl.full([S.OWN, S.OWN], 0.0, tl.float32)
    query = lane
    key = lane
    for cell in range(tl.load(cells.starts + number), tl.load(cells.starts + number + 1)):
        query = tl.load(cells.rows + cell) * S.OWN - sizes.q_start + lane
        key = tl.load(cells.cols + cell) * S.OWN + lane
        for member in range(num_members):
            number_here = tl.load(cells.members + members * num_members + member)
            acc += _score_gradient(number_here, query, key, q, k, v, lse, grad, delta, strides, extras, drop, sizes, S)
    start = sums + tl.load(cells.offsets + members)
    if DENSE:
        at = query.to(tl.int64)[:, None] * sizes.num_keys + key[None, :]
        is_there = ((query >= 0) & (query < sizes.num_queries))[:, None] & (key < sizes.num_keys)[None, :]
        tl.store(start + at, tl.load(start + at, mask=is_there, other=0.0) + acc, mask=is_there)
    else:
        tl.store(start + number.to(tl.int64) * S.OWN * S.OWN + lane[:, None] * S.OWN + lane[None, :], acc)


@triton.jit
def _score_gradient(batch_head, query, key, q, k, v, lse, grad, delta, strides, extras, drop, sizes, S: tl.constexpr):
    """Score gradients of one cell [OWN, OWN] of one head. Zero where no score exists."""
    batch, head = split_head(batch_head, sizes.num_heads)
    has_query = (query >= 0) & (query < sizes.num_queries)
    has_key = key < sizes.num_keys
    keep = has_query[:, None] & has_key[None, :]
    keep = keep & directed(query[:, None] + sizes.q_start, key[None, :], sizes, S)
    q_cell = load_rows(head_base(q, strides.q, batch, head), query, has_query, strides.q[2], S)
    grad_cell = load_rows(head_base(grad, strides.grad, batch, head), query, has_query, strides.grad[2], S)
    k_cell = load_rows(head_base(k, strides.k, batch, head // S.GROUP), key, has_key, strides.k[2], S)
    v_cell = load_rows(head_base(v, strides.v, batch, head // S.GROUP), key, has_key, strides.v[2], S)
    at = batch_head.to(tl.int64) * sizes.num_queries + query
    row_lse = tl.load(lse + at, mask=has_query, other=float("inf"))
    row_delta = tl.load(delta + at, mask=has_query, other=0.0)
    scores = product(q_cell, tl.trans(k_cell), None, S)
    dp = product(grad_cell, tl.trans(v_cell), None, S)
    where = (batch, head)
    p, _ = probabilities(scores, keep, query[:, None], key[None, :], row_lse[:, None], where, extras, sizes, True, S)
    if S.DROPOUT:
        dp = dp * dropout_factor(query[:, None], key[None, :], batch, head, drop, sizes)
    return p * (dp - row_delta[:, None])
