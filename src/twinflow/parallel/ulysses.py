# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences that ranks share, with whole sequences for some heads ("Ulysses"), and with gathered keys.

Ulysses: before attention, the ranks exchange tokens for heads (an all-to-all). Each rank then has all tokens of its
heads, and any attention function can run. Its result is exchanged back. If there are fewer heads of keys and values
than ranks, several ranks get the same head.

Gathered keys: a rank keeps its queries, and gathers the keys and values of all ranks, of which it uses those up to its
own last token. This is for sparse attention, whose queries see few keys at any position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from twinflow.dist.group import Group
from twinflow.parallel.sequence import check_heads

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and the result are [batch, heads, tokens, head_dim]


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, attend: Attention) -> Tensor:
    """The attention of this rank's queries. `attend` gets all tokens of some heads.

    q is [batch, heads, tokens of this rank, head_dim], k and v have kv_heads, a divisor of heads. `attend` gets as many
    heads of queries for each head of keys as there are, or fewer if ranks share heads of keys.
    """
    num_heads = q.shape[1]
    check_heads(num_heads, group.world)
    num_copies = kv_copies(num_heads, k.shape[1], group.world)
    if num_copies > 1:
        k, v = k.repeat_interleave(num_copies, 1), v.repeat_interleave(num_copies, 1)
    q, k, v = (to_heads(tensor, group) for tensor in (q, k, v))
    return to_tokens(attend(q, k, v), group)


def kv_copies(num_heads: int, num_kv_heads: int, world: int) -> int:
    """How many ranks or heads of queries get a copy of each head of keys and values."""
    if num_kv_heads % world == 0:
        return 1
    if world % num_kv_heads == 0:
        return world // num_kv_heads  # each rank needs one head
    return num_heads // num_kv_heads  # a rank needs several: one head of keys for each head of queries


def to_heads(x: Tensor, group: Group) -> Tensor:
    """[batch, heads, tokens of a rank, width] of all heads -> [batch, heads of a rank, all tokens, width]."""
    world = group.world
    batch, heads, tokens, width = x.shape
    rows = x.reshape(batch, world, heads // world, tokens, width).transpose(0, 1)
    parts = _exchange(rows, group)  # by the rank that has the tokens
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)


def to_tokens(x: Tensor, group: Group) -> Tensor:
    """[batch, heads of a rank, all tokens, width] -> [batch, heads, tokens of a rank, width] of all heads."""
    rows = _by_tokens(x, group.world)
    parts = _exchange(rows, group)  # by the rank that has the heads
    return parts.transpose(0, 1).flatten(1, 2)


def _by_tokens(x: Tensor, world: int) -> Tensor:
    """[batch, heads, all tokens, width] -> [ranks, batch, heads, tokens of a rank, width]."""
    batch, heads, tokens, width = x.shape
    return x.reshape(batch, heads, world, tokens // world, width).permute(2, 0, 1, 3, 4)


def _exchange(rows: Tensor, group: Group) -> Tensor:
    found: Tensor = _Exchange.apply(rows, group)  # type: ignore[no-untyped-call]
    return found


class _Exchange(Function):
    """Sends row i to rank i. The gradients take the same way back, which is the same operation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchanged(rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(rows: Tensor, group: Group) -> Tensor:
    rows = rows.contiguous()
    raw = rows.view(group.world, -1).view(torch.uint8)
    return group.exchange(raw).view(rows.dtype).view(rows.shape)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, attend: Attention) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks up to its last token. Ranks have contiguous parts
    of the sequence. `attend` gets more keys than queries, whose positions are the last ones of the keys.
    """
    stop = (group.rank + 1) * k.shape[2]
    k, v = (_Gather.apply(tensor, group)[:, :, :stop] for tensor in (k, v))  # type: ignore[no-untyped-call]
    return attend(q, k, v)


class _Gather(Function):
    """[batch, heads, tokens of a rank, width] -> [batch, heads, all tokens, width]. Gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        whole = x.new_empty(group.world, *x.shape)
        whole[group.rank] = x
        group.all_gather(whole.view(-1))
        return whole.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group: Group = ctx.group
        rows = _by_tokens(grad, group.world).contiguous()
        own = torch.empty_like(rows[0])
        group.reduce_scatter(own.view(-1), rows.view(-1), torch.promote_types(grad.dtype, torch.float32))
        return own, None
