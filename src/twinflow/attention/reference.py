# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout (the kept blocks of scores) in plain torch: the reference for tests, and the implementation
without a GPU.

`dense_attention` computes the whole score matrix. `forward_pass` computes only the scores of kept blocks. Block rows
with similar numbers of blocks form a group, and the keys of a group are gathered. Each row of scores is complete, so
that an ordinary softmax is applied. Backward recomputes the scores, so that only the inputs are saved. Groups are
divided into pieces of about `PIECE_NUMEL` elements, or of a single row of a single head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from twinflow.attention.extras import Extras, Sizes, as_4d, check_call, dropout_keep, scale_of, sizes_of
from twinflow.attention.layout import Layout

PIECE_NUMEL = 2**24


def dense_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Tensor:
    """The reference for small sizes: computes all scores and masks those not kept. `options`: fields of `Extras`."""
    extras = Extras(**options)
    sizes = check_call(q, k, v, layout, extras)
    layout.check_dense("Call block_attention(), which computes only the kept blocks.")
    dtype = _compute_dtype(q)
    heads = torch.arange(sizes.batch * sizes.num_heads, device=q.device).reshape(sizes.batch, -1, 1, 1)
    queries = torch.arange(sizes.num_queries, device=q.device)[:, None] + extras.q_start
    keys = torch.arange(sizes.num_keys, device=q.device)
    grid = layout.to_dense().to(q.device)
    keep = grid[:, queries // layout.block, keys // layout.block].expand(sizes.scores)
    if layout.is_causal:
        keep = keep & (keys <= queries)
    if layout.window is not None:
        keep = keep & ((keys - queries).abs() < layout.window)
    if extras.key_padding is not None:
        keep = keep & extras.key_padding[:, None, None, :]
    if extras.documents is not None:
        keep = keep & (extras.documents[:, queries] == extras.documents[:, None, :])[:, None]
    if extras.mask is not None:
        keep = keep & as_4d(extras.mask)
    k, v = (tensor.to(dtype).repeat_interleave(sizes.group, dim=1) for tensor in (k, v))
    scores = q.to(dtype) @ k.transpose(-1, -2) * scale_of(extras, sizes.head_dim)
    if extras.softcap:
        scores = extras.softcap * torch.tanh(scores / extras.softcap)
    if extras.bias is not None:
        scores = scores + as_4d(extras.bias).to(dtype)
    if extras.relative is not None:
        scores = scores + extras.relative.to(dtype)[:, keys - (queries - extras.q_start) + sizes.num_queries - 1]
    keep = keep & (scores != -torch.inf)
    scores = scores.masked_fill(~keep, torch.finfo(dtype).min)
    if extras.sinks is not None:
        sinks = extras.sinks.to(dtype)[:, None, None].expand(*sizes.scores[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probs = scores.softmax(dim=-1)[..., : sizes.num_keys].masked_fill(~keep, 0.0)
    if extras.dropout:
        probs = probs * dropout_keep(extras, heads, queries, keys) / (1.0 - extras.dropout)
    return (probs @ v).to(q.dtype)


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def forward_pass(q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras) -> Tensor:
    """Attention over the kept blocks. The arguments are checked."""
    check_call(q, k, v, layout, extras)
    with torch.autocast(q.device.type, enabled=False):
        return _forward(q, k, v, layout, extras)


def backward_pass(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], layout: Layout, extras: Extras, wants: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, bias, relative and sinks. `wants` says which of the last three are needed."""
    with torch.autocast(grad.device.type, enabled=False):
        return _backward(inputs, grad, layout, extras, wants[3:])


@dataclass(frozen=True)
class _Blocks:
    """q, k and v as blocks [B, heads, blocks, block, D], in the dtype of the computation.

    q starts with the block row of position q_start. k and v end with a block of zeros, which fills rows that are
    shorter than the width of their group.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    first_row: int
    offset: int  # offset of the first query in its block


@dataclass(frozen=True)
class _Piece:
    """Some rows of some (batch, head) pairs, which are called lanes. All rows are filled to `width` blocks.

    The positions of scores broadcast to [lanes, rows, block, width * block].
    """

    batch: Tensor  # [lanes]
    heads: Tensor  # [lanes]
    rows: Tensor  # [rows], block rows of the layout
    cols: Tensor  # [rows, width], filled with the block of zeros
    block: int

    @cached_property
    def queries(self) -> Tensor:
        """Positions of the queries of the scores."""
        return (self.rows[:, None] * self.block + torch.arange(self.block, device=self.rows.device))[None, :, :, None]

    @cached_property
    def keys(self) -> Tensor:
        """Positions of the keys of the scores."""
        keys = self.cols[:, :, None] * self.block + torch.arange(self.block, device=self.rows.device)
        return keys.flatten(1, 2)[None, :, None]

    def index(self, tensor: Tensor, extras: Extras) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices of the scores in a four-dimensional mask or bias, whose dimensions may have size one."""
        size_b, size_h, size_q, size_k = tensor.shape
        return (
            _lanes(self.batch, size_b),
            _lanes(self.heads, size_h),
            (self.queries - extras.q_start).clamp(0, size_q - 1),
            self.keys.clamp(max=size_k - 1),
        )

    def relative_index(self, tensor: Tensor, extras: Extras, num_queries: int) -> tuple[Tensor, Tensor]:
        """Indices of the scores in a table of relative positions."""
        distance = self.keys - (self.queries - extras.q_start) + num_queries - 1
        return _lanes(self.heads, tensor.shape[0]), distance.clamp(0, tensor.shape[1] - 1)


def _lanes(index: Tensor, size: int = 2) -> Tensor:
    """Indices [lanes] in the shape of scores. A dimension of size one has the index 0 for all lanes."""
    return (index if size > 1 else index[:1] * 0)[:, None, None, None]


def _forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras) -> Tensor:
    sizes = sizes_of(q, k)
    blocks = _to_blocks(q, k, v, layout, extras)
    out = torch.zeros_like(blocks.q)
    for piece in _pieces(layout, sizes, blocks):
        queries, keys, values = _gather(piece, sizes, blocks)
        probs, kept, _ = _probs(piece, queries, keys, layout, extras, sizes)
        if kept is not None:
            probs = probs.mul_(kept)
        out[piece.batch[:, None], piece.heads[:, None], piece.rows - blocks.first_row] = probs @ values
    return _from_blocks(out, blocks.offset, sizes.num_queries).to(q.dtype)


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, layout: Layout, extras: Extras, wants: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, relative and sinks. `wants`: whether the last three are needed."""
    q, k, v = inputs
    sizes = sizes_of(q, k)
    blocks = _to_blocks(q, k, v, layout, extras)
    grad_blocks = _query_blocks(grad.to(blocks.q.dtype), layout, extras)
    grad_q, grad_k, grad_v = (torch.zeros_like(tensor) for tensor in (blocks.q, blocks.k, blocks.v))
    grad_bias = _zeros_like(extras.bias, blocks.q.dtype) if wants[0] else None
    grad_relative = _zeros_like(extras.relative, blocks.q.dtype) if wants[1] else None
    grad_sinks = _zeros_like(extras.sinks, blocks.q.dtype) if wants[2] else None
    scale = scale_of(extras, sizes.head_dim)
    for piece in _pieces(layout, sizes, blocks):
        queries, keys, values = _gather(piece, sizes, blocks)
        probs, kept, slope = _probs(piece, queries, keys, layout, extras, sizes)
        where = piece.batch[:, None], piece.heads[:, None], piece.rows - blocks.first_row
        grad_out = grad_blocks[where]
        grad_probs = grad_out @ values.transpose(-1, -2)
        dropped = probs
        if kept is not None:
            grad_probs, dropped = grad_probs.mul_(kept), probs * kept
        _add_blocks(grad_v, piece, sizes, dropped.transpose(-1, -2) @ grad_out)
        delta = (probs * grad_probs).sum(dim=-1, keepdim=True)
        if grad_sinks is not None:  # the rest of the weights is that of the sink, whose value is zero
            by_lane = (delta * (probs.sum(dim=-1, keepdim=True) - 1.0)).sum((1, 2, 3))
            grad_sinks.index_add_(0, piece.heads, by_lane)
        grad_scores = grad_probs.sub_(delta).mul_(probs)
        if grad_bias is not None:
            whole = as_4d(grad_bias)
            _add_scores(whole, piece.index(whole, extras), grad_scores)
        if grad_relative is not None:
            index = piece.relative_index(grad_relative, extras, sizes.num_queries)
            _add_scores(grad_relative, index, grad_scores)
        grad_scores = grad_scores.mul_(scale if slope is None else slope.mul_(scale))
        grad_q[where] = grad_scores @ keys
        _add_blocks(grad_k, piece, sizes, grad_scores.transpose(-1, -2) @ queries)
    return (
        _from_blocks(grad_q, blocks.offset, sizes.num_queries).to(q.dtype),
        _from_blocks(grad_k, 0, sizes.num_keys).to(k.dtype),
        _from_blocks(grad_v, 0, sizes.num_keys).to(v.dtype),
        None if grad_bias is None or extras.bias is None else grad_bias.to(extras.bias.dtype),
        None if grad_relative is None or extras.relative is None else grad_relative.to(extras.relative.dtype),
        None if grad_sinks is None or extras.sinks is None else grad_sinks.to(extras.sinks.dtype),
    )


def _zeros_like(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


def _to_blocks(q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras) -> _Blocks:
    dtype, block = _compute_dtype(q), layout.block
    num_cols = -(-k.shape[2] // block)
    parts = [_padded(tensor.to(dtype), 0, num_cols + 1, block) for tensor in (k, v)]
    first_row = extras.q_start // block
    return _Blocks(_query_blocks(q.to(dtype), layout, extras), parts[0], parts[1], first_row, extras.q_start % block)


def _query_blocks(tensor: Tensor, layout: Layout, extras: Extras) -> Tensor:
    offset = extras.q_start % layout.block
    num_rows = -(-(offset + tensor.shape[2]) // layout.block)
    return _padded(tensor, offset, num_rows, layout.block)


def _padded(tensor: Tensor, offset: int, num_blocks: int, block: int) -> Tensor:
    batch, heads, tokens, dim = tensor.shape
    out = tensor.new_zeros(batch, heads, num_blocks * block, dim)
    out[:, :, offset : offset + tokens] = tensor
    return out.reshape(batch, heads, num_blocks, block, dim)


def _from_blocks(blocks: Tensor, offset: int, num_tokens: int) -> Tensor:
    return blocks.flatten(2, 3)[:, :, offset : offset + num_tokens]


def _pieces(layout: Layout, sizes: Sizes, blocks: _Blocks) -> Iterator[_Piece]:
    """Pieces that cover every row of every head once, except rows without blocks."""
    device = blocks.q.device
    end_row = blocks.first_row + blocks.q.shape[2]
    for pattern in range(layout.num_patterns):
        heads = [head for head, its in enumerate(layout.head_to_pattern) if its == pattern]
        head_of_lane = torch.tensor(heads, device=device).repeat(sizes.batch)
        batch_of_lane = torch.arange(sizes.batch, device=device).repeat_interleave(len(heads))
        starts = layout.row_starts[pattern, blocks.first_row : end_row + 1]
        for rows, cols in _groups(starts, layout.cols, blocks.k.shape[2] - 1):
            numel = cols.shape[1] * layout.block * max(layout.block, sizes.head_dim)
            num_lanes = min(max(1, PIECE_NUMEL // numel), head_of_lane.numel())
            num_rows = max(1, PIECE_NUMEL // (numel * num_lanes))
            rows, cols = (rows + blocks.first_row).to(device), cols.to(device)
            for some_rows, some_cols in zip(torch.split(rows, num_rows), torch.split(cols, num_rows), strict=True):
                for lanes in torch.split(torch.arange(head_of_lane.numel(), device=device), num_lanes):
                    yield _Piece(batch_of_lane[lanes], head_of_lane[lanes], some_rows, some_cols, layout.block)


def _groups(starts: Tensor, cols: Tensor, no_block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Groups of rows of similar length, with their columns [rows, width]. Short rows are filled with `no_block`.

    The width is the length rounded up to four leading bits. Less than an eighth of it is filling, and the number of
    groups grows with the logarithm of the longest row.
    """
    lengths = starts.diff()
    step = torch.pow(2.0, (lengths.clamp(min=1).double().log2().floor() - 3).clamp(min=0)).long()
    widths = (lengths + step - 1) // step * step
    for width in torch.unique(widths).tolist():
        if width == 0:
            continue
        rows = (widths == width).nonzero()[:, 0]
        within = torch.arange(width)
        index = (starts[rows, None] + within).clamp(max=cols.numel() - 1)
        found = cols[index].long().clamp(max=no_block)
        yield rows, torch.where(within < lengths[rows, None], found, no_block)


def _gather(piece: _Piece, sizes: Sizes, blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [lanes, rows, block, D], keys and values [lanes, rows, width * block, D]."""
    queries = blocks.q[piece.batch[:, None], piece.heads[:, None], piece.rows - blocks.first_row]
    where = piece.batch[:, None, None], (piece.heads // sizes.group)[:, None, None], piece.cols
    return queries, blocks.k[where].flatten(2, 3), blocks.v[where].flatten(2, 3)


def _add_blocks(total: Tensor, piece: _Piece, sizes: Sizes, part: Tensor) -> None:
    """Add the gradients of gathered keys or values, [lanes, rows, width * block, D], to the blocks from which they were
    gathered.
    """
    num_kv_heads, num_cols, block, dim = total.shape[1:]
    lane = piece.batch * num_kv_heads + piece.heads // sizes.group
    index = lane[:, None] * num_cols + piece.cols.reshape(-1)
    total.view(-1, block * dim).index_add_(0, index.reshape(-1), part.reshape(-1, block * dim))


def _add_scores(total: Tensor, index: tuple[Tensor, ...], grad_scores: Tensor) -> None:
    """Add the gradients of scores to the entries of a bias. They are first summed over the lanes if all lanes use the
    same entries.
    """
    if all(part.shape[0] == 1 for part in index):
        grad_scores = grad_scores.sum(dim=0, keepdim=True)
    total.index_put_(index, grad_scores, accumulate=True)


def _probs(
    piece: _Piece, queries: Tensor, keys: Tensor, layout: Layout, extras: Extras, sizes: Sizes
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Probabilities before dropout, with zero for scores that are not kept; the factors of dropout or None; and the
    derivative of the softcap or None.
    """
    scores = queries @ keys.transpose(-1, -2)
    scores *= scale_of(extras, sizes.head_dim)
    slope = None
    if extras.softcap:
        scores = scores.div_(extras.softcap).tanh_()
        slope = 1.0 - scores.square()
        scores = scores.mul_(extras.softcap)
    if extras.bias is not None:
        bias = as_4d(extras.bias)
        scores += bias[piece.index(bias, extras)]
    if extras.relative is not None:
        scores += extras.relative[piece.relative_index(extras.relative, extras, sizes.num_queries)]
    keep = piece.keys < sizes.num_keys
    if layout.is_causal:
        keep = keep & (piece.keys <= piece.queries)
    if layout.window is not None:
        keep = keep & ((piece.keys - piece.queries).abs() < layout.window)
    if extras.key_padding is not None:
        keep = keep & extras.key_padding[_lanes(piece.batch), piece.keys.clamp(max=sizes.num_keys - 1)]
    if extras.documents is not None:
        ids, last = extras.documents, sizes.num_keys - 1
        own = ids[_lanes(piece.batch), piece.queries.clamp(max=last)]
        keep = keep & (ids[_lanes(piece.batch), piece.keys.clamp(max=last)] == own)
    if extras.mask is not None:
        mask = as_4d(extras.mask)
        keep = keep & mask[piece.index(mask, extras)]
    scores.masked_fill_(~keep, -torch.inf)
    highest = scores.amax(dim=-1, keepdim=True)
    sinks = None if extras.sinks is None else _lanes(extras.sinks.to(scores.dtype)[piece.heads])
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    scores.sub_(highest.masked_fill_(highest == -torch.inf, 0.0)).exp_()
    total = scores.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - highest)
    probs = scores.div_(total.masked_fill_(total == 0.0, 1.0))
    if not extras.dropout:
        return probs, None, slope
    kept = dropout_keep(extras, _lanes(piece.batch * sizes.num_heads + piece.heads), piece.queries, piece.keys)
    return probs, kept.to(probs.dtype).div_(1.0 - extras.dropout), slope
