"""`sparse_attention`: one function for all implementations of attention over a layout."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

from torch import Tensor

from twinflow.attention.extras import Extras
from twinflow.attention.layout import Layout
from twinflow.attention.patterns import SparsityConfig
from twinflow.attention.reference import block_attention
from twinflow.attention.triton_attention import triton_attention
from twinflow.errors import invalid_value

BACKENDS = ("auto", "triton", "flex", "torch")
CACHED_LAYOUTS = 32


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout | SparsityConfig, *, backend: str = "auto", **extras: Any
) -> Tensor:
    """Attention of q [B, H, queries, D] to k and v [B, heads, keys, D] over the blocks that a layout keeps.

    `layout` may be a pattern. Its layout for this length is then built once and cached. `extras` are the fields of
    `twinflow.attention.Extras`. `backend`: "auto" uses Triton on CUDA and plain torch elsewhere. "flex" is torch's
    flex_attention, which does not support all options. Raises ValueError for arguments that do not fit together.
    """
    if backend not in BACKENDS:
        raise invalid_value("backend", backend, BACKENDS)
    known = [field.name for field in fields(Extras)]
    for name in extras:
        if name not in known:
            raise invalid_value("an option of sparse_attention", name, known)
    if isinstance(layout, SparsityConfig):
        if q.dim() != 4 or k.dim() != 4:
            shapes = (tuple(q.shape), tuple(k.shape))
            raise invalid_value("shapes of q and k", shapes, "[batch, heads, tokens, head_dim]")
        length = max(k.shape[2], extras.get("q_start", 0) + q.shape[2])
        layout = _layout(layout, -(-length // layout.block) * layout.block)
    if not isinstance(layout, Layout):
        raise invalid_value("layout", type(layout).__name__, "a Layout or a SparsityConfig")
    if backend == "auto":
        backend = "triton" if q.is_cuda else "torch"
    if backend == "torch":
        return block_attention(q, k, v, layout, **extras)
    if backend == "triton":
        return triton_attention(q, k, v, layout, Extras(**extras))
    from twinflow.attention.flex import flex  # imported here, because its imports are slow

    return flex(q, k, v, layout, Extras(**extras))


@lru_cache(maxsize=CACHED_LAYOUTS)
def _layout(pattern: SparsityConfig, length: int) -> Layout:
    return pattern.layout(length)
