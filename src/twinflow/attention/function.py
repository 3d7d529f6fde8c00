# SPDX-License-Identifier: Apache-2.0
"""Attention over a layout or a pattern: `sparse_attention` chooses the implementation. `PatternAttention` is for the
layers of a model.

`PatternAttention` accepts sequences of any length. The layout of a short sequence is the top left corner of the layout
of the longest one. The tokens that a token sees therefore do not depend on the number of later tokens. Generation with
a cache gives the same result as a forward over the whole text, and random blocks are the same at every length.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from twinflow.attention.extras import Extras
from twinflow.attention.layout import Layout, LayoutSource
from twinflow.attention.operators import attend
from twinflow.attention.patterns import MODES, DenseSparsityConfig, FixedSparsityConfig, SparsityConfig
from twinflow.errors import incompatible, invalid_value

BACKENDS = ("auto", "triton", "flex", "torch")
NAMES = tuple(field.name for field in fields(Extras))
CACHED_CORNERS = 8  # maximum number of layouts of each PatternAttention


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout | SparsityConfig, *, backend: str = "auto", **extras: Any
) -> Tensor:
    """Computes the attention of q to k and v, over the blocks of scores that `layout` keeps.

    q is [batch, heads, queries, head_dim]. k and v are [batch, kv_heads, keys, head_dim], where kv_heads is a divisor
    of heads. v may have another head_dim, which the result has then, too. Its other sizes are those of q. If `layout`
    is a pattern, its layout for this length is built once and cached. `extras` are the fields of
    `twinflow.attention.Extras`.

    `backend`: "auto" uses Triton on CUDA and plain torch elsewhere. "flex" is torch's flex_attention, which does not
    support all options. Raises ValueError for arguments that do not fit together.
    """
    if backend not in BACKENDS:
        raise invalid_value("backend", backend, BACKENDS)
    for name in extras:
        if name not in NAMES:
            raise invalid_value("The name of an argument of sparse_attention", name, NAMES)
    if not isinstance(layout, (Layout, SparsityConfig)):
        raise ValueError(f"layout is of type {type(layout).__name__}, but must be a Layout or a SparsityConfig.")
    return _attend(q, k, v, layout, backend, extras)


def _attend(q: Tensor, k: Tensor, v: Tensor, source: LayoutSource, backend: str, extras: dict[str, Any]) -> Tensor:
    if v.dim() == q.dim() == 4 and v.shape[3] != q.shape[3]:
        return _other_width(q, k, v, source, backend, extras)
    if backend == "auto":
        backend = "triton" if q.is_cuda else "torch"
    if backend != "flex":
        return attend(q, k, v, source, Extras(**extras), backend)
    from twinflow.attention.flex import flex  # imported here, because its imports are slow

    return flex(q, k, v, source.layout_for(k.shape[2], q.shape[1], 0), Extras(**extras))


def _other_width(q: Tensor, k: Tensor, v: Tensor, source: LayoutSource, backend: str, extras: dict[str, Any]) -> Tensor:
    """Attention with values that are narrower or wider than queries and keys. Zeros are appended to the narrower ones,
    which changes neither scores nor results."""
    if extras.get("scale") is None:
        extras = {**extras, "scale": q.shape[3] ** -0.5}
    width, value_width = max(q.shape[3], v.shape[3]), v.shape[3]
    q, k, v = (torch.nn.functional.pad(tensor, (0, width - tensor.shape[3])) for tensor in (q, k, v))
    return _attend(q, k, v, source, backend, extras)[..., :value_width]


class PatternAttention:
    """Attention over the blocks that a pattern keeps. A layout is built for each new length. The most recent layouts
    are cached.

    A sequence of up to `max_tokens` tokens uses the top left corner of the layout for `max_tokens`. A longer sequence
    gets a layout of its own length. `heads` is the range of the pattern's heads that q has under tensor parallelism.
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
            raise ValueError(f"pattern is of type {type(pattern).__name__}, but must be {allowed}.")
        if backend not in BACKENDS:
            raise invalid_value("backend", backend, BACKENDS)
        if heads is not None and not 0 <= heads[0] < heads[1] <= pattern.num_heads:
            raise invalid_value(
                "heads", heads, f"a range (first, last + 1) of the {pattern.num_heads} heads of the pattern"
            )
        self.pattern = pattern
        self.max_tokens = max_tokens
        self.backend = backend
        self.heads = heads
        self._layouts: OrderedDict[tuple[int, int, bool, int | None], Layout] = OrderedDict()
        self._sources: dict[tuple[bool, int | None], _Limits] = {}
        for causal in (False, True):
            self.source(causal)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        *,
        is_causal: bool | None = None,
        window: int | None = None,
        **extras: Any,
    ) -> Tensor:
        """Attention of q [batch, heads, queries, head_dim] to k and v [batch, kv_heads, keys, head_dim].

        The queries have the last positions of the keys, as in generation with a cache.

        `is_causal`: whether the layer is causal. With None, the pattern decides. With a `window`, a query sees only
        keys at a distance < window, of those that the pattern keeps. The seed of dropout is drawn from
        torch's CPU generator, so that a layer that is recomputed in backward drops the same scores.
        """
        q, k, v = _autocast(q, k, v)
        num_queries, num_keys = q.shape[2], k.shape[2]
        if num_queries > num_keys:
            raise invalid_value(
                "The number of keys",
                num_keys,
                f"at least {num_queries}, the number of queries",
                "Pass the keys and values of all positions up to the last query.",
            )
        causal = self.pattern.is_causal if is_causal is None else is_causal
        check_causal(self.pattern, causal)
        if dropout:
            extras["seed"] = torch.randint(2**62, ())
        extras |= {"q_start": num_keys - num_queries, "dropout": dropout}
        return _attend(q, k, v, self.source(causal, window), self.backend, extras)

    def source(self, is_causal: bool, window: int | None = None) -> LayoutSource:
        """The source of layouts for causal layers or others, with a window. It is made once."""
        key = is_causal, window
        if key not in self._sources:
            self._sources[key] = _Limits(self, is_causal, window)
        return self._sources[key]

    def layout(
        self, num_tokens: int, num_heads: int, is_causal: bool | None = None, window: int | None = None
    ) -> Layout:
        """The layout for `num_tokens` tokens and for the `num_heads` heads of q."""
        causal = self.pattern.is_causal if is_causal is None else is_causal
        check_causal(self.pattern, causal)
        causal = causal or self.pattern.is_causal
        num_blocks = -(-num_tokens // self.pattern.block)
        key = num_blocks, num_heads, causal, window
        if key not in self._layouts:
            whole = self.pattern.layout(_laid_out(self.pattern, num_tokens, self.max_tokens))
            layout = self._own_heads(whole.corner(num_blocks, causal), num_heads)
            self._layouts[key] = layout if window is None else layout.windowed(window)
            if len(self._layouts) > CACHED_CORNERS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def rounded(self, num_keys: int) -> int:
        """The number of keys rounded up, so that generation with a growing cache needs only a few layouts."""
        return max(num_keys, min(1 << (num_keys - 1).bit_length(), self.max_tokens))

    def _own_heads(self, layout: Layout, num_heads: int) -> Layout:
        if self.heads is not None:
            layout = layout.for_heads(*self.heads)
        if num_heads == layout.num_heads:
            return layout
        if self.heads is None and layout.num_patterns == 1 and layout.num_heads % num_heads == 0:
            return layout.for_heads(0, num_heads)  # all heads have the same pattern
        allowed = f"{layout.num_heads}, the number of heads {'in `heads`' if self.heads else 'of the pattern'}"
        remedy = "If the layer has only some heads of the pattern, pass their range as heads=(first, last + 1)."
        raise invalid_value("The number of heads of q", num_heads, allowed, remedy)


class _Limits(LayoutSource):
    """The layouts of a PatternAttention for causal layers or for others, with a window or without."""

    def __init__(self, attention: PatternAttention, is_causal: bool, window: int | None) -> None:
        self._attention = attention
        self._is_causal = is_causal
        self._window = window

    def layout_for(self, num_tokens: int, num_heads: int, q_start: int) -> Layout:
        num_tokens = self._attention.rounded(num_tokens) if q_start else num_tokens
        return self._attention.layout(num_tokens, num_heads, self._is_causal, self._window)


def check_causal(pattern: SparsityConfig, is_causal: bool) -> None:
    """Raise ValueError for a pattern with which tokens of a decoder would see later tokens."""
    if is_causal and not pattern.is_causal and not isinstance(pattern, DenseSparsityConfig):
        remedy = 'Build the pattern with attention="unidirectional" (in JSON: sparse_attention.attention).'
        reason = "a token of a decoder must not see later tokens"
        raise incompatible(f"A bidirectional {type(pattern).__name__}", "a decoder", reason, remedy)


def _laid_out(pattern: SparsityConfig, num_tokens: int, max_tokens: int) -> int:
    """Number of tokens for which the layout is built. With this number, the first `num_tokens` tokens see the same
    tokens as in the longest sequence.
    """
    if type(pattern) is FixedSparsityConfig:
        window = pattern.num_local_blocks * pattern.block
        # whole windows only, because an incomplete window has other global blocks
        return -(-num_tokens // window) * window
    if type(pattern) in MODES.values() and not getattr(pattern, "num_random_blocks", 0):
        return num_tokens  # the rows are the same at every length
    return max(num_tokens, max_tokens)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast if it is enabled, as in torch's attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)
