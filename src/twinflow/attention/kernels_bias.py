# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gradients of bias and relative positions: sums of score gradients over lists of cells.

A cell is a small square of scores. One program sums the cells of one list over some (batch, head) pairs. If a bias has
an entry for each score, a list is one cell. If it has an entry for each key, a list has the cells of a column. For
relative positions a list has the cells of a diagonal. Cells are summed in the order of the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinflow.attention.kernels_backward import probabilities
from twinflow.attention.kernels_common import dropout_factor, head_base, load_rows, product


@triton.jit(do_not_specialize=["drop", "sizes", "num_members"])
def score_sums(q, k, v, lse, grad, delta, sums, strides, cells, extras, drop, sizes, num_members, DENSE: tl.constexpr,
               S: tl.constexpr):  # fmt: skip
    """Sum one list of cells over one set of (batch, head) pairs. With DENSE, each sum is added to the number at the
    position of its score. Otherwise `sums` has one square per list.
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
    batch = (batch_head // sizes.num_heads).to(tl.int64)
    head = (batch_head % sizes.num_heads).to(tl.int64)
    has_query = (query >= 0) & (query < sizes.num_queries)
    has_key = key < sizes.num_keys
    keep = has_query[:, None] & has_key[None, :]
    if S.CAUSAL:
        keep = keep & (key[None, :] <= query[:, None] + sizes.q_start)
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
    p = probabilities(scores, keep, query[:, None], key[None, :], row_lse[:, None], where, extras, sizes, True, S)
    if S.DROPOUT:
        dp = dp * dropout_factor(query[:, None], key[None, :], batch, head, drop, sizes)
    return p * (dp - row_delta[:, None])
