"""Attention with one pattern at any length, as a model's layer needs it.

The layout of a short sequence is the corner of that of the longest one. So what a token sees does not depend on how
many tokens come after it: generating with a cache gives what a forward over the whole text gives, and random blocks are
the same at every length.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from twinflow.attention.function import BACKENDS, sparse_attention
from twinflow.attention.layout import Layout, from_flat
from twinflow.attention.patterns import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from twinflow.errors import invalid_value

CACHED_LAYOUTS = 8
# Patterns whose rows are the same at every length, as long as no block is drawn at random.
_EVEN = (BSLongformerSparsityConfig, DenseSparsityConfig, LocalSlidingWindowSparsityConfig)
_EVEN_UNLESS_RANDOM = (BigBirdSparsityConfig, VariableSparsityConfig)


class PatternAttention:
    """Attention over the blocks that a pattern keeps; layouts are made as lengths are met, and the last few are kept.

    `max_tokens` is the longest sequence that the pattern is laid out for; a longer one gets a layout of its own length.
    With `heads`, q has only the heads from the first to the second of the pattern's, as under tensor parallelism.
    """

    def __init__(
        self,
        pattern: SparsityConfig,
        max_tokens: int = 1,
        *,
        backend: str = "auto",
        heads: tuple[int, int] | None = None,
    ) -> None:
        if not isinstance(pattern, SparsityConfig):
            allowed = "a SparsityConfig, such as FixedSparsityConfig(num_heads=...)"
            raise invalid_value("pattern", type(pattern).__name__, allowed)
        if backend not in BACKENDS:
            raise invalid_value("backend", backend, BACKENDS)
        if heads is not None and not 0 <= heads[0] < heads[1] <= pattern.num_heads:
            raise invalid_value("heads", heads, f"a range within 0 to {pattern.num_heads} that is not empty")
        self.pattern = pattern
        self.max_tokens = max_tokens
        self.backend = backend
        self.heads = heads
        self._layouts: OrderedDict[tuple[int, int, bool], Layout] = OrderedDict()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool | None = None,
        dropout: float = 0.0,
        **extras: Any,
    ) -> Tensor:
        """Attention of q [B, H, nq, D] to k and v [B, Hkv, nk, D], the queries being the last nq of the positions.

        `is_causal` is what the layer says of itself; None: what the pattern says. The seed of dropout comes from
        torch's generator of the CPU, so that a layer that runs again in backward drops the same.
        """
        q, k, v = _autocast(q, k, v)
        num_queries, num_keys = q.shape[2], k.shape[2]
        if num_queries > num_keys:
            raise invalid_value("keys", num_keys, f"at least the {num_queries} queries", "It is self-attention.")
        start = num_keys - num_queries
        causal = self.pattern.is_causal if is_causal is None else is_causal
        layout = self.layout(self._rounded(num_keys) if start else num_keys, q.shape[1], causal)
        if dropout:
            extras["seed"] = int(torch.randint(2**62, ()))
        return sparse_attention(q, k, v, layout, backend=self.backend, q_start=start, dropout=dropout, **extras)

    def layout(self, num_tokens: int, num_heads: int, is_causal: bool | None = None) -> Layout:
        """The layout for so many tokens and the heads that q has."""
        causal = self.pattern.is_causal if is_causal is None else is_causal
        if causal and not self.pattern.is_causal and not isinstance(self.pattern, DenseSparsityConfig):
            raise not_causal(self.pattern)
        causal = causal or self.pattern.is_causal
        num_blocks = -(-num_tokens // self.pattern.block)
        key = num_blocks, num_heads, causal
        if key not in self._layouts:
            whole = self.pattern.layout(_laid_out(self.pattern, num_tokens, self.max_tokens))
            self._layouts[key] = self._own_heads(corner(whole, num_blocks, causal), num_heads)
            if len(self._layouts) > CACHED_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def _rounded(self, num_keys: int) -> int:
        """A length for a cache that grows: a few layouts serve all of generation."""
        return max(num_keys, min(1 << (num_keys - 1).bit_length(), self.max_tokens))

    def _own_heads(self, layout: Layout, num_heads: int) -> Layout:
        if self.heads is not None:
            layout = layout.for_heads(*self.heads)
        if num_heads == layout.num_heads:
            return layout
        if self.heads is None and layout.num_patterns == 1 and layout.num_heads % num_heads == 0:
            return layout.for_heads(0, num_heads)  # all heads are alike: any part of them will do
        remedy = "Say which of the pattern's heads the layer has: heads=(first, last + 1)."
        raise invalid_value("heads of q", num_heads, [layout.num_heads], remedy)


def not_causal(pattern: SparsityConfig) -> ValueError:
    """The error for a pattern that would let a decoder see what comes next."""
    remedy = (
        'The model is a decoder: a token must not see later ones. Give the pattern attention="unidirectional" '
        "(in JSON: sparse_attention.attention)."
    )
    return invalid_value("pattern", f"{type(pattern).__name__}, bidirectional", "a unidirectional pattern", remedy)


def corner(layout: Layout, num_blocks: int, is_causal: bool) -> Layout:
    """The first rows and columns of a square layout, made causal if it is not."""
    if layout.num_rows == num_blocks and layout.is_causal == is_causal:
        return layout
    flats = []
    for pattern in range(layout.num_patterns):
        rows, cols = layout.rows_of(pattern).long(), layout.cols_of(pattern).long()
        keep = (rows < num_blocks) & (cols < num_blocks)
        flats.append(rows[keep] * num_blocks + cols[keep])
    return from_flat(
        flats, num_blocks, num_blocks, layout.block, is_causal=is_causal, head_to_pattern=layout.head_to_pattern
    )


def _laid_out(pattern: SparsityConfig, num_tokens: int, max_tokens: int) -> int:
    """How many tokens to lay out, so that the first `num_tokens` are as in the longest sequence."""
    if type(pattern) in _EVEN or (
        type(pattern) in _EVEN_UNLESS_RANDOM and not getattr(pattern, "num_random_blocks", 0)
    ):
        return num_tokens
    if type(pattern) is FixedSparsityConfig:
        window = pattern.num_local_blocks * pattern.block
        return -(-num_tokens // window) * window  # a window that is cut off has its global blocks elsewhere
    return max(num_tokens, max_tokens)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, in its dtype, as torch's own attention does it."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)
