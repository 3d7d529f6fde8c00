"""Attention over this rank's heads, with the dropout that one process would have.

Every tensor rank draws the dropout mask of all heads, from generators in the same state, and takes its part. A fused
kernel draws a mask only for the heads that it gets. So with dropout the attention is computed here step by step, like
torch does on the CPU, and takes memory for the square of the sequence. Without dropout nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twinflow.dist.group import Group

HEADS_DIM = 1  # heads in [batch, heads, queries, keys]


def gpt_attention(module: Any, x: Tensor) -> Tensor:
    """The forward of the Attention of twinflow's GPT, with the width of this rank's heads instead of the width of
    `x`."""
    q, k, v = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in module.qkv(x).chunk(3, dim=-1))
    y = module.attend(q, k, v, module.dropout if module.training else 0.0)
    mixed: Tensor = module.out(y.transpose(1, 2).flatten(2))
    return mixed


def dropout_part(x: Tensor, p: float, group: Group, dim: int) -> Tensor:
    """Dropout of `x`, this rank's part of a tensor along `dim`, with the mask of the whole tensor."""
    shape = list(x.shape)
    shape[dim] *= group.world
    mask = F.dropout(x.new_ones(shape), p)
    return x * mask.chunk(group.world, dim)[group.rank].clone()  # the clone prevents that backward keeps the whole mask


def dropping_heads(group: Group, is_training: bool) -> AbstractContextManager[object]:
    """Context for an attention over this rank's heads, in which dropout of [batch, heads, ...] equals that of one
    process."""
    return _HeadsDropout(group) if is_training and group.world > 1 else nullcontext()


class _HeadsDropout(TorchFunctionMode):
    """Replaces the dropout of attention probabilities in any function that a model calls."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **given)
        if func is F.dropout and args[0].dim() == 4:
            return self._dropout(*args, **given)
        return func(*args, **given)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropout_part(x, p, self._group, HEADS_DIM) if training and p > 0.0 else x

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, **options)
        if options.pop("enable_gqa", False):
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        probs = probabilities(q, k, attn_mask, **options)
        return dropout_part(probs, dropout_p, self._group, HEADS_DIM) @ v


def probabilities(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """The attention probabilities, with the arguments of torch's attention."""
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)
