# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Kernels for the backward of attention. Probabilities are recomputed from the log-sum-exp that forward has saved.

Each program of `query_gradients` computes the gradients of a tile of queries. Each program of `key_gradients` computes
those of a tile of keys. No two programs write to the same place, and the order of every sum is fixed. If tiles.py has
cut a row or column into pieces, `reduce` sums the pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.attention.kernels_common import (
    CUT_COLUMNS,
    LOG2E,
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


@triton.jit
def probabilities(scores, keep, query, key, lse, where, extras, sizes, MASKED: tl.constexpr, S: tl.constexpr):
    """Probabilities from products of queries and keys. `lse` broadcasts. It is infinite for queries outside of the
    call.
    """
    scores = scores * (sizes.scale * LOG2E)
    if S.HAS_BIAS:
        scores = extra_bias(scores, query, key, where[0], where[1], extras, sizes, S)
    p = tl.exp2(scores - lse)
    if S.HAS_MASKS:
        keep = extra_mask(keep, query, key, where[0], where[1], extras, sizes, S)
    if MASKED or S.HAS_MASKS:
        p = tl.where(keep, p, 0.0)
    return p


@triton.jit(do_not_specialize=["drop", "sizes"])
def query_gradients(q, k, v, out, lse, grad, delta, dq, strides, plan, scratch, extras, drop, sizes, S: tl.constexpr):
    """Compute dq for one item of the plan and one head. Also compute delta, the sum of out * grad of each query, which
    the other kernels need.
    """
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
    if S.HAS_CUTS:
        if slot < 0:
            store_rows(base, query, is_there, strides.dq[2], acc * sizes.scale, S)
        else:
            place = batch * sizes.num_slots + tl.load(plan.heads + head * 2 + 1) + slot  # int64
            tl.store(scratch_rows(scratch.first, place, own, S), acc * sizes.scale)
    else:
        store_rows(base, query, is_there, strides.dq[2], acc * sizes.scale, S)


@triton.jit
def _walk_keys(acc, tiles, lines, query, keys, values, codes, start, stop, next_code, where, extras, drop, sizes,
               MASKED: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Add the contributions of the key tiles start to stop to the gradient of queries. The caller multiplies by the
    scale.
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
        p = probabilities(scores, keep, rows, cols, lse[:, None], where, extras, sizes, MASKED, S)
        if S.DROPOUT:
            dp = dp * dropout_factor(rows, cols, where[0], where[1], drop, sizes)
        ds = p * (dp - delta[:, None])
        acc = product(ds.to(k_tile.dtype), k_tile, acc, S)
    return acc


@triton.jit(do_not_specialize=["drop", "sizes"])
def key_gradients(q, k, v, lse, grad, delta, dk, dv, strides, plan, scratch, extras, drop, sizes, S: tl.constexpr):
    """Compute dk and dv for one item of the plan and one head.

    GROUP query heads share a head of keys. A program sums IN_PROGRAM of them, so that dk and dv have num_heads //
    IN_PROGRAM heads.
    """
    item, batch_output = own_item(sizes)
    first = 0
    if not S.ONE_PATTERN:  # With one pattern all heads have the same number of items, and the reads are not needed.
        pattern = tl.load(plan.heads + batch_output % (sizes.num_heads // S.IN_PROGRAM) * 2)
        first = tl.load(plan.item_starts + pattern)
        if item >= tl.load(plan.item_starts + pattern + 1) - first:
            return
    tile, start, mid, stop, slot = read_item(plan, first + item)
    batch, output = split_head(batch_output, sizes.num_heads // S.IN_PROGRAM)
    codes = first_codes(plan, start, mid, S)

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
    if S.HAS_CUTS:
        if slot < 0:
            store_rows(dk_base, key, is_there, strides.dk[2], dk_acc * sizes.scale, S)
            store_rows(dv_base, key, is_there, strides.dv[2], dv_acc, S)
        else:
            place = batch * sizes.num_slots + tl.load(plan.heads + output * 2 + 1) + slot  # int64
            tl.store(scratch_rows(scratch.first, place, own, S), dk_acc * sizes.scale)
            tl.store(scratch_rows(scratch.second, place, own, S), dv_acc)
    else:
        store_rows(dk_base, key, is_there, strides.dk[2], dk_acc * sizes.scale, S)
        store_rows(dv_base, key, is_there, strides.dv[2], dv_acc, S)


@triton.jit
def _walk_queries(dk_acc, dv_acc, tiles, key, queries, grads, lines, codes, start, stop, next_code, where, extras, drop,
                  sizes, MASKED: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Add the contributions of the query tiles start to stop to the gradients of keys and values. The caller multiplies
    the gradient of keys by the scale.
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
        p = probabilities(scores, keep, cols, rows, row_lse, where, extras, sizes, MASKED, S)
        row_delta = tl.load(lines[1] + at)[None, :]
        kept = p
        if S.DROPOUT:
            factor = dropout_factor(cols, rows, where[0], where[1], drop, sizes)
            kept = p * factor
            dp = dp * factor
        dv_acc = product(kept.to(grad_tile.dtype), grad_tile, dv_acc, S)
        ds = p * (dp - row_delta)
        dk_acc = product(ds.to(q_tile.dtype), q_tile, dk_acc, S)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["sizes", "count", "start"])
def reduce(first, second, strides, plan, scratch, sizes, count, start, ROWS: tl.constexpr, S: tl.constexpr):
    """Sum the pieces of a tile that was cut, for one or two gradients. Each program sums ROWS rows.

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
    store_rows(head_base(first, strides[0], batch, head), index, is_there, strides[0][2], acc, S)
    if second is not None:
        acc = _sum_pieces(scratch.second, place, stop, own, ROWS, S)
        store_rows(head_base(second, strides[1], batch, head), index, is_there, strides[1][2], acc, S)


@triton.jit
def _sum_pieces(scratch, start, stop, own, ROWS: tl.constexpr, S: tl.constexpr):
    """The sum of the pieces start to stop, in their order."""
    acc = tl.full([ROWS, S.PADDED_DIM], 0.0, tl.float32)
    for place in tl.range(start, stop):
        acc += tl.load(scratch_rows(scratch, place, own, S))
    return acc
