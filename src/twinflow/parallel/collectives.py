# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives between tensor ranks: backward applies the transpose of the forward's collective.

A replicated tensor is equal on all ranks, and so is its gradient. A split tensor is this rank's part. `copy_in` and
`reduce_out` are used around layers that are split by features. `gather_sequence` and `scatter_sequence` replace them if
the sequence is split between such layers. `split_*` and `join_*` convert between replicated and split tensors.

Half precision is summed in fp32. twinflow's reduction over gloo sums in fp32, whatever dtype is sent. NCCL sums in the
dtype that is sent, so fp32 is sent.
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

SEQUENCE_DIM = 1  # tokens in [batch, tokens, hidden]


def copy_in(x: Tensor, group: Group) -> Tensor:
    """Pass a replicated tensor to a split layer. Backward sums the gradients of all ranks."""
    return x if group.world == 1 else _go(x, _same, partial(summed, group=group))


def reduce_out(x: Tensor, group: Group) -> Tensor:
    """The sum of the tensors of all ranks, replicated. Backward passes the gradient on unchanged."""
    return x if group.world == 1 else _go(x, partial(summed, group=group), _same)


def split_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """This rank's part of a replicated tensor. Backward gathers the gradient of the whole tensor."""
    return _along(x, group, dim, own_part, joined)


def join_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """The parts of all ranks, concatenated, for a computation that every rank repeats. The gradient of the result is
    equal on all ranks, and backward returns this rank's part of it.
    """
    return _along(x, group, dim, joined, own_part)


def gather_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """The concatenated parts of all ranks, for a layer split by features. Backward reduce-scatters the gradient."""
    return _along(x, group, dim, joined, summed_part)


def scatter_sequence(x: Tensor, group: Group, dim: int = SEQUENCE_DIM) -> Tensor:
    """This rank's part of the sum of the tensors of all ranks."""
    return _along(x, group, dim, summed_part, joined)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, with equal bits on each of them. Not differentiable."""
    flat = x.detach().reshape(-1)
    total = torch.empty_like(flat)
    group.all_reduce(total, flat, _sent_dtype(group, x.dtype))
    return total.view(x.shape)


def joined(x: Tensor, group: Group, dim: int) -> Tensor:
    """The parts of all ranks, concatenated along a dim. Not differentiable."""
    parts = x.new_empty((group.world, *x.shape))
    parts[group.rank] = x
    group.all_gather(parts.view(-1))
    return torch.cat(parts.unbind(), dim)


def own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """A copy of this rank's part along a dim."""
    return x.chunk(group.world, dim)[group.rank].clone(memory_format=torch.contiguous_format)


def summed_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part of the sum over the ranks. Not differentiable."""
    parts = torch.stack(x.detach().chunk(group.world, dim))  # the part of each rank is contiguous
    out = torch.empty_like(parts[0])
    group.reduce_scatter(out.view(-1), parts.view(-1), _sent_dtype(group, x.dtype))
    return out


def _along(x: Tensor, group: Group, dim: int, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
    if group.world == 1:
        return x
    if there is not joined and x.shape[dim] % group.world:
        what = "number of features" if dim in (-1, x.dim() - 1) else "length of the sequence"
        allowed = f"a multiple of {group.world}, the number of tensor ranks, because each rank gets an equal part"
        raise invalid_value(f"The {what}", x.shape[dim], allowed, "Pad the tensor, or use fewer tensor ranks.")
    return _go(x, partial(there, group=group, dim=dim), partial(back, group=group, dim=dim))


def _sent_dtype(group: Group, dtype: torch.dtype) -> torch.dtype:
    return dtype if group.is_on_host else torch.promote_types(dtype, torch.float32)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _go(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    gone: Tensor = _Crossing.apply(x, there, back)  # type: ignore[no-untyped-call]
    return gone


class _Crossing(Function):
    """Applies one function to the tensor in forward and another one to its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
