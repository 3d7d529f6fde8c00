# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Kernels for the forward of attention. A program computes the outputs of a tile of queries. It iterates over the tiles
of keys, first over those without a mask.

If tiles.py has cut a row into pieces, each piece writes its unnormalised sum, its maximum and its sum of weights to
scratch memory in fp32. `reduce` combines the pieces in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.attention.kernels_common import (
    CUT_COLUMNS,
    LOG2E,
    LOWEST,
    code_positions,
    dropout_factor,
    extra_bias,
    extra_mask,
    first_codes,
    head_base,
    head_rows,
    layout_mask,
    load_rows,
    load_tile,
    own_item,
    product,
    read_code,
    read_item,
    scratch_rows,
    split_head,
    store_rows,
)


@triton.jit(do_not_specialize=["drop", "sizes"])
def forward(q, k, v, out, lse, strides, plan, scratch, extras, drop, sizes, S: tl.constexpr):
    """Compute the output and log-sum-exp for one item of the plan and one head."""
    item, batch_head = own_item(sizes)
    first = 0
    if not S.ONE_PATTERN:  # With one pattern all heads have the same number of items, and the reads are not needed.
        pattern = tl.load(plan.heads + batch_head % sizes.num_heads * 2)
        first = tl.load(plan.item_starts + pattern)
        if item >= tl.load(plan.item_starts + pattern + 1) - first:
            return
    tile, start, mid, stop, slot = read_item(plan, first + item)
    batch, head = split_head(batch_head, sizes.num_heads)
    codes = first_codes(plan, start, mid, S)

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
    if S.HAS_CUTS:
        if slot < 0:
            _finish(state, query, is_there, base, strides.out[2], lines, S)
        else:
            place = batch * sizes.num_slots + tl.load(plan.heads + head * 2 + 1) + slot  # int64
            tl.store(scratch_rows(scratch.sums, place, own, S), state[0])
            tl.store(scratch.tops + place * S.OWN + own, state[1])
            tl.store(scratch.weights + place * S.OWN + own, state[2])
    else:
        _finish(state, query, is_there, base, strides.out[2], lines, S)


@triton.jit
def _walk(state, q_tile, query, keys, values, codes, start, stop, next_code, where, extras, drop, sizes,
          MASKED: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Add the key tiles start to stop to the state: the weighted sum, the maximum in base 2, and the sum of weights."""
    acc, top, weight = state
    factor = sizes.scale * LOG2E
    rows = query[:, None]
    for tile in tl.range(start, stop):
        code = next_code
        next_code = read_code(codes, tile + 1, S)
        cols = code_positions(code, S)[None, :]
        k_tile = load_tile(keys[0], code, 0, sizes.num_keys, keys[1], MASKED, S)
        scores = product(q_tile, tl.trans(k_tile), None, S)  # [own, other]
        if MASKED or S.HAS_BIAS or S.HAS_MASKS:
            scores = scores * factor
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
def reduce(out, lse, strides, plan, scratch, sizes, ROWS: tl.constexpr, S: tl.constexpr):
    """Combine the pieces of a tile that was cut. Each program combines ROWS rows."""
    part = tl.program_id(0) % (S.OWN // ROWS)
    cut = tl.program_id(0) // (S.OWN // ROWS) % sizes.num_items
    batch_head = tl.program_id(0) // (S.OWN // ROWS) // sizes.num_items
    batch = (batch_head // sizes.num_heads).to(tl.int64)
    head = (batch_head % sizes.num_heads).to(tl.int64)
    pattern = tl.load(plan.heads + head * 2)
    first = tl.load(plan.cut_starts + pattern)
    if cut >= tl.load(plan.cut_starts + pattern + 1) - first:
        return
    row = plan.cuts + (first + cut) * CUT_COLUMNS
    place = batch * sizes.num_slots + tl.load(plan.heads + head * 2 + 1) + tl.load(row + 1)  # int64
    own = part * ROWS + tl.arange(0, ROWS)
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
