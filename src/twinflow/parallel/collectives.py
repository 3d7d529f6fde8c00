"""Collectives between tensor ranks that autograd sees: each goes one way in forward and its transpose in backward.

Two kinds of tensors pass here. A replicated one is the same on all ranks, and so is its gradient. A split one is this
rank's part. `copy_in` and `reduce_out` stand around work that is split by features; `gather_sequence` and
`scatter_sequence` stand there instead where the ranks share the sequence between such works. `split_*` and `join_*`
lead from replicated to split and back.

Half precision is summed in fp32: gloo's sums are ours and are in fp32 whatever is sent, NCCL's are in what is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from twinflow.dist.group import Group
from twinflow.errors import invalid_value

SEQUENCE_DIM = 1  # of [batch, tokens, hidden]


def copy_in(x: Tensor, group: Group) -> Tensor:
    """A replicated tensor for work that is split: every rank's part of its gradient is summed in backward."""
    return x if group.world == 1 else _go(x, _same, partial(summed, group=group))


def reduce_out(x: Tensor, group: Group) -> Tensor:
    """The sum of what all ranks have made, replicated."""
    return x if group.world == 1 else _go(x, partial(summed, group=group), _same)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """All ranks' features, replicated."""
    return join_sequence(x, group, -1)


def split_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """This rank's part of a replicated tensor; the whole's gradient is gathered in backward."""
    if group.world == 1:
        return x
    _check_divides(x, group, dim)
    return _go(x, partial(own_part, group=group, dim=dim), partial(joined, group=group, dim=dim))


def join_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """All ranks' parts, for work that every rank does: its gradient is replicated, and this rank's part is taken."""
    if group.world == 1:
        return x
    return _go(x, partial(joined, group=group, dim=dim), partial(own_part, group=group, dim=dim))


def gather_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """All ranks' parts, for work that is split by features: the gradient's parts are summed by their owners."""
    if group.world == 1:
        return x
    return _go(x, partial(joined, group=group, dim=dim), partial(summed_part, group=group, dim=dim))


def scatter_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """This rank's part of the sum of what all ranks have made."""
    if group.world == 1:
        return x
    _check_divides(x, group, dim)
    return _go(x, partial(summed_part, group=group, dim=dim), partial(joined, group=group, dim=dim))


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, the same bits on each; not seen by autograd."""
    flat = x.detach().reshape(-1)
    total = torch.empty_like(flat)
    group.all_reduce(total, flat, _sent_dtype(group, x.dtype))
    return total.view(x.shape)


def joined(x: Tensor, group: Group, dim: int) -> Tensor:
    """All ranks' parts along a dim; not seen by autograd."""
    parts = x.new_empty((group.world, *x.shape))
    parts[group.rank] = x
    group.all_gather(parts.view(-1))
    return torch.cat(parts.unbind(), dim)


def own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part along a dim, in memory of its own."""
    return x.chunk(group.world, dim)[group.rank].clone(memory_format=torch.contiguous_format)


def summed_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of the sum over the ranks; not seen by autograd."""
    parts = torch.stack(x.detach().chunk(group.world, dim))  # the part of each rank in one piece
    out = torch.empty_like(parts[0])
    group.reduce_scatter(out.view(-1), parts.view(-1), _sent_dtype(group, x.dtype))
    return out


def _check_divides(x: Tensor, group: Group, dim: int) -> None:
    if x.shape[dim] % group.world:
        what = "number of features" if dim in (-1, x.dim() - 1) else "length of the sequence"
        allowed = f"a multiple of the {group.world} tensor ranks, which share it"
        raise invalid_value(what, x.shape[dim], allowed, "Pad it, or use fewer tensor ranks.")


def _sent_dtype(group: Group, dtype: torch.dtype) -> torch.dtype:
    return dtype if group.is_on_host else torch.promote_types(dtype, torch.float32)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _go(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    gone: Tensor = _Crossing.apply(x, there, back)  # type: ignore[no-untyped-call]
    return gone


class _Crossing(Function):
    """One function of the tensor in forward, another one of its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
