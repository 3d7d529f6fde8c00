# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout by torch's compiled flex_attention, for comparison and for its score functions.

The block index of flex_attention is dense, so memory grows with the square of the length. It does not support all
options of layouts and Extras. Unsupported options raise ValueError with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from twinflow.attention.extras import Extras, Sizes, as_4d, check_call
from twinflow.attention.layout import Layout
from twinflow.errors import invalid_value

BLOCK = 128
WITH = 'with backend="flex"'
REMEDY = 'Use backend="triton".'
CACHED_MASKS = 8


def flex(q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras) -> Tensor:
    """Attention by torch's flex_attention. Raises ValueError for options that it does not support."""
    sizes = check_call(q, k, v, layout, extras)
    _refuse(layout, extras, sizes)
    if not q.is_cuda:
        raise invalid_value(
            "q.device", str(q.device), "a CUDA device", 'Move q, k and v to a GPU, or use backend="torch".'
        )
    out: Tensor = _compiled()(
        q,
        k,
        v,
        score_mod=score_mod(extras, sizes),
        block_mask=block_mask(layout, extras, sizes, q.device),
        scale=extras.scale,
        enable_gqa=sizes.group > 1,
    )
    return out


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _refuse(layout: Layout, extras: Extras, sizes: Sizes) -> None:
    layout.check_dense(REMEDY)
    if layout.block != BLOCK:
        raise invalid_value("block", layout.block, f"{BLOCK} {WITH}, whose kernels use tiles of this size", REMEDY)
    if sizes.num_queries % BLOCK or sizes.num_keys % BLOCK:
        lengths = (sizes.num_queries, sizes.num_keys)
        raise invalid_value("(number of queries, number of keys)", lengths, f"two multiples of {BLOCK} {WITH}", REMEDY)
    if layout.window is not None:
        raise invalid_value("window", layout.window, f"None {WITH}", REMEDY)
    if extras.q_start:
        raise invalid_value("q_start", extras.q_start, f"0 {WITH}", REMEDY)
    if extras.dropout:
        raise invalid_value("dropout", extras.dropout, f"0.0 {WITH}, which has no dropout", REMEDY)
    if extras.softcap or extras.sinks is not None:
        name = "softcap" if extras.softcap else "sinks"
        raise invalid_value(name, getattr(extras, name), f"not set {WITH}", REMEDY)
    for name in ("bias", "relative"):
        tensor = getattr(extras, name)
        if tensor is not None and tensor.requires_grad:
            raise invalid_value(f"{name}.requires_grad", True, f"False {WITH}", REMEDY)


def score_mod(extras: Extras, sizes: Sizes) -> Callable[..., Tensor] | None:
    """The score_mod function of flex_attention: it adds bias and relative positions. None without them."""
    bias = as_4d(extras.bias).expand(sizes.scores) if extras.bias is not None else None
    relative = extras.relative.expand(sizes.num_heads, -1) if extras.relative is not None else None
    if bias is None and relative is None:
        return None
    last = sizes.num_queries - 1

    def added(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if bias is not None:
            score = score + bias[b, h, query, key]
        if relative is not None:
            score = score + relative[h, key - query + last]
        return score

    return added


def block_mask(layout: Layout, extras: Extras, sizes: Sizes, device: torch.device) -> BlockMask:
    """The BlockMask of flex_attention: the kept blocks, and a function for blocks that are partly masked."""
    padding, mask, documents = extras.key_padding, extras.mask, extras.documents
    if padding is None and mask is None and documents is None:
        return _plain_mask(layout, sizes.num_queries, sizes.num_keys, device)
    mask = as_4d(mask).expand(sizes.scores) if mask is not None else None
    is_causal = layout.is_causal

    def kept(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = query >= key if is_causal else query >= 0
        if padding is not None:
            keep = keep & padding[b, key]
        if documents is not None:
            keep = keep & (documents[b, query] == documents[b, key])
        if mask is not None:
            keep = keep & mask[b, h, query, key]
        return keep

    grid = _grid(layout, sizes.num_queries, sizes.num_keys).to(device)
    counts, indices = _ordered(grid)
    lengths = (sizes.num_queries, sizes.num_keys)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, mask_mod=kept, seq_lengths=lengths)


@lru_cache(maxsize=CACHED_MASKS)
def _plain_mask(layout: Layout, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """The BlockMask for a layout without other masks. Only diagonal blocks of a causal layout are partly masked."""
    grid = _grid(layout, num_queries, num_keys)
    partial = torch.zeros_like(grid)
    if layout.is_causal:
        partial = grid & torch.eye(*grid.shape[-2:], dtype=torch.bool)
    counts, indices, full_counts, full_indices = (
        tensor.to(device) for part in (partial, grid & ~partial) for tensor in _ordered(part)
    )
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=_up_to_itself if layout.is_causal else None,
        seq_lengths=(num_queries, num_keys),
    )


def _up_to_itself(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _grid(layout: Layout, num_queries: int, num_keys: int) -> Tensor:
    """The kept blocks [1, heads, rows, cols] for the lengths of the call."""
    return layout.to_dense()[None, :, : num_queries // BLOCK, : num_keys // BLOCK]


def _ordered(grid: Tensor) -> tuple[Tensor, Tensor]:
    """The number of kept columns of each row, and the columns with the kept ones first."""
    counts = grid.sum(-1, dtype=torch.int32)
    order = torch.argsort(grid.to(torch.int8), dim=-1, descending=True, stable=True)
    return counts, order.to(torch.int32).contiguous()
