# SPDX-License-Identifier: Apache-2.0
"""Options of attention besides the layout (the kept blocks of scores), and the hash function of dropout.

Dropout is a pure function of (seed, head, query position, key position). Forward, backward and all implementations
therefore agree without storing a mask. The hash uses only 32-bit multiplications, xor and logical right shifts. The
steps in uint32 are:

    word = seed_word(seed)                                      once, on the host
    head = mix(word ^ (b * H + h) * HEAD)                       once a head
    row = mix(head ^ (position of the query) * QUERY)           once a row
    hash = mix(row ^ (key) * KEY)                               once a score
    kept = hash >= threshold(p)                                 unsigned

    mix(x): x ^= x >> 16; x *= MIX_1; x ^= x >> 15; x *= MIX_2; x ^= x >> 16
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import SupportsFloat, TypeVar

import torch
from torch import Tensor

from twinflow.attention.layout import Layout
from twinflow.errors import invalid_value

MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
HEAD, QUERY, KEY = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
WORD = 0xFFFFFFFF

T = TypeVar("T", int, Tensor)


@dataclass(frozen=True, eq=False)
class Extras:
    """Options of all implementations of attention. B: batch, H: heads, nq: queries, nk: keys."""

    scale: float | None = None  # None: head_dim ** -0.5
    key_padding: Tensor | None = None  # bool [B, nk], True = the key is used
    # int32 or int64 [B, nk], numbers from 1 - 2**31 to 2**31 - 1: tokens of different documents do not see each other.
    # Reading the numbers to check them would wait for the GPU.
    documents: Tensor | None = None
    mask: Tensor | None = None  # bool, broadcasts to [B, H, nq, nk], True = kept
    bias: Tensor | None = None  # float, broadcasts to [B, H, nq, nk], added to scaled scores; may get a gradient
    relative: Tensor | None = None  # float [H or 1, nq + nk - 1], entry j - i + nq - 1; may get a gradient
    dropout: float = 0.0
    seed: int | Tensor = 0  # of dropout; a tensor has one int64 element
    q_start: int = 0  # position of the first query
    softcap: float = 0.0  # c: scaled scores become c * tanh(score / c), before a bias is added; 0: no cap
    sinks: Tensor | None = None  # float [H], a score of each head without a key and a value; may get a gradient


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call: q is [batch, heads, queries, head_dim], k and v are [batch, kv_heads, keys, head_dim]."""

    batch: int
    num_heads: int
    num_kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int

    @property
    def group(self) -> int:
        """Number of query heads that share one head of keys and values."""
        return self.num_heads // self.num_kv_heads

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """Shape of the whole score matrix. Only the reference for tests computes it."""
        return self.batch, self.num_heads, self.num_queries, self.num_keys


def sizes_of(q: Tensor, k: Tensor) -> Sizes:
    return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])


def documents_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The `documents` [1, num_tokens] of packed sequences, from the positions at which they start and end, as flash
    attention's varlen functions take them: [0, length of the first, length of the first two, ...]. Tokens after the
    last sequence form a document of their own.
    """
    positions = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions, cu_seqlens[1:], right=True, out_int32=True)[None]


def scale_of(extras: Extras, head_dim: int) -> float:
    """The factor by which scores are multiplied."""
    return head_dim**-0.5 if extras.scale is None else extras.scale


def as_4d(tensor: Tensor) -> Tensor:
    """A mask or bias as four dimensions. Leading dimensions of size one are added."""
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def check_call(q: Tensor, k: Tensor, v: Tensor, layout: Layout, extras: Extras) -> Sizes:
    """Check that all arguments fit together, and return the sizes. Raises ValueError if they do not."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise invalid_value(f"{name}.shape", tuple(tensor.shape), "[batch, heads, tokens, head_dim]")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise invalid_value(
                f"(dtype, device) of {name}",
                (tensor.dtype, tensor.device),
                f"{(q.dtype, q.device)}, as for q",
                f"Use {name}.to(q).",
            )
    if not q.is_floating_point():
        raise invalid_value("q.dtype", q.dtype, "a float dtype")
    sizes = sizes_of(q, k)
    if k.shape != v.shape or k.shape[0] != sizes.batch or k.shape[3] != sizes.head_dim:
        shapes = tuple(k.shape), tuple(v.shape)
        allowed = f"two equal shapes [{sizes.batch}, heads, keys, {sizes.head_dim}], with batch and head_dim of q"
        raise invalid_value("(k.shape, v.shape)", shapes, allowed)
    if min(q.shape) < 1 or min(k.shape) < 1:
        raise invalid_value("(q.shape, k.shape)", (tuple(q.shape), tuple(k.shape)), "shapes without a size 0")
    if sizes.num_heads % sizes.num_kv_heads:
        allowed = f"a divisor of {sizes.num_heads}, the number of heads of q"
        raise invalid_value("The number of heads of k", sizes.num_kv_heads, allowed)
    _check_layout(layout, sizes, extras)
    _check_tensors(sizes, extras, q.device)
    if extras.scale is not None and not (isinstance(extras.scale, SupportsFloat) and math.isfinite(extras.scale)):
        raise invalid_value("scale", extras.scale, "a finite number, or None for head_dim ** -0.5")
    if not (isinstance(extras.dropout, SupportsFloat) and 0.0 <= extras.dropout < 1.0):
        raise invalid_value("dropout", extras.dropout, "a number >= 0 and < 1")
    if not isinstance(extras.seed, Tensor):
        seed_of(extras)
    if not (isinstance(extras.softcap, SupportsFloat) and 0.0 <= extras.softcap < math.inf):
        raise invalid_value("softcap", extras.softcap, "a finite number > 0, or 0 for no cap")
    return sizes


def _check_layout(layout: Layout, sizes: Sizes, extras: Extras) -> None:
    if layout.num_heads != sizes.num_heads:
        raise invalid_value(
            "The number of heads of the layout",
            layout.num_heads,
            f"{sizes.num_heads}, the number of heads of q",
            f"Build the layout for {sizes.num_heads} heads.",
        )
    if extras.q_start < 0:
        raise invalid_value("q_start", extras.q_start, "a whole number >= 0")
    end = extras.q_start + sizes.num_queries
    if layout.num_rows * layout.block < end:
        raise invalid_value(
            "The number of block rows of the layout",
            layout.num_rows,
            f"at least {-(-end // layout.block)}, for {end} query positions in blocks of {layout.block}",
            "Build the layout for a longer sequence.",
        )
    if layout.num_cols * layout.block < sizes.num_keys:
        raise invalid_value(
            "The number of block columns of the layout",
            layout.num_cols,
            f"at least {-(-sizes.num_keys // layout.block)}, for {sizes.num_keys} keys in blocks of {layout.block}",
            "Build the layout for a longer sequence.",
        )


def _check_tensors(sizes: Sizes, extras: Extras, device: torch.device) -> None:
    for name, is_bool in (
        ("key_padding", True),
        ("mask", True),
        ("bias", False),
        ("relative", False),
        ("sinks", False),
    ):
        tensor = getattr(extras, name)
        if tensor is None:
            continue
        if (tensor.dtype == torch.bool) != is_bool or not (is_bool or tensor.is_floating_point()):
            raise invalid_value(
                f"{name}.dtype",
                tensor.dtype,
                "torch.bool, with True for entries that are used" if is_bool else "a float dtype",
            )
        if tensor.device != device:
            raise invalid_value(f"{name}.device", tensor.device, [device], f"Use {name}.to(q.device).")
    padding, relative, sinks = extras.key_padding, extras.relative, extras.sinks
    _check_documents(sizes, extras, device)
    if sinks is not None and tuple(sinks.shape) != (sizes.num_heads,):
        raise invalid_value("sinks.shape", tuple(sinks.shape), f"{(sizes.num_heads,)}, which is (heads,)")
    if padding is not None and padding.shape != (sizes.batch, sizes.num_keys):
        allowed = f"{(sizes.batch, sizes.num_keys)}, which is (batch, keys)"
        raise invalid_value("key_padding.shape", tuple(padding.shape), allowed)
    for name, tensor in (("mask", extras.mask), ("bias", extras.bias)):
        if tensor is not None and not _broadcasts(tuple(tensor.shape), sizes.scores):
            allowed = f"a shape that broadcasts to {sizes.scores}, which is (batch, heads, queries, keys)"
            raise invalid_value(f"{name}.shape", tuple(tensor.shape), allowed)
    width = sizes.num_queries + sizes.num_keys - 1
    if relative is not None and tuple(relative.shape) not in ((1, width), (sizes.num_heads, width)):
        allowed = f"{(sizes.num_heads, width)} or {(1, width)}, which is (heads or 1, queries + keys - 1)"
        raise invalid_value("relative.shape", tuple(relative.shape), allowed)


def _check_documents(sizes: Sizes, extras: Extras, device: torch.device) -> None:
    documents = extras.documents
    if documents is None:
        return
    if documents.dtype not in (torch.int32, torch.int64):
        raise invalid_value("documents.dtype", documents.dtype, [torch.int32, torch.int64])
    if documents.device != device:
        raise invalid_value("documents.device", documents.device, [device], "Use documents.to(q.device).")
    if documents.shape != (sizes.batch, sizes.num_keys):
        allowed = f"{(sizes.batch, sizes.num_keys)}, which is (batch, keys)"
        raise invalid_value("documents.shape", tuple(documents.shape), allowed)
    if extras.q_start + sizes.num_queries > sizes.num_keys:
        last = extras.q_start + sizes.num_queries
        allowed = (
            f"at least {last}, the position after the last query, because a query has the document of its position"
        )
        raise invalid_value("The number of keys", sizes.num_keys, allowed)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    ours = (1,) * (len(full) - len(shape)) + shape
    return len(shape) <= len(full) and all(one in (1, all_) for one, all_ in zip(ours, full, strict=True))


def seed_of(extras: Extras) -> int:
    """The seed as a number. Raises ValueError if it is too large or negative."""
    if isinstance(extras.seed, Tensor):
        return int(extras.seed) % 2**64
    if not 0 <= extras.seed < 2**64:
        raise invalid_value("seed", extras.seed, "a whole number from 0 to 2**64 - 1")
    return extras.seed


def seed_word(seed: int) -> int:
    """The 32-bit word with which the hash starts, from a seed of up to 64 bits."""
    return _mix(_mix(seed & WORD) ^ (seed >> 32 & WORD) * HEAD & WORD)


def threshold(dropout: float) -> int:
    """A score is dropped if its hash, as an unsigned number, is less than this value."""
    return min(round(dropout * 2**32), WORD)


def _mix(x: T) -> T:
    """Mix the bits of 32-bit words, given as int or as int64 tensors. An overflow does not change the low 32 bits."""
    x = x ^ x >> 16
    x = x * MIX_1 & WORD
    x = x ^ x >> 15
    x = x * MIX_2 & WORD
    return x ^ x >> 16


def dropout_hash(seed: int, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The hash of each score, 0 to 2**32 - 1, as int64. `heads` has batch index * number of heads + head.
    The tensors are int64 and broadcast."""
    head = _mix(heads * HEAD & WORD ^ seed_word(seed))
    row = _mix(queries * QUERY & WORD ^ head)
    return _mix(keys * KEY & WORD ^ row)


def dropout_keep(extras: Extras, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """A mask of the scores that dropout keeps. `queries` and `keys` are positions."""
    return dropout_hash(seed_of(extras), heads, queries, keys) >= threshold(extras.dropout)
