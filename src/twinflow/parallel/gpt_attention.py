"""Attention over some of the heads, with the numbers that one process would have.

Dropout is drawn for all heads on every tensor rank, from generators in the same state, and this rank's part is taken.
A fused kernel draws its own numbers, of the heads it is given: with dropout, attention is therefore written out here,
as torch writes it on the CPU, and takes memory for the square of the sequence. Without dropout nothing is changed.
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

HEADS_DIM = 1  # of [batch, heads, queries, keys]


def gpt_attention(module: Any, x: Tensor) -> Tensor:
    """The forward of our GPT's Attention, whose own takes its width from `x`: here from what the rank has of it."""
    q, k, v = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in module.qkv(x).chunk(3, dim=-1))
    y = module.attend(q, k, v, module.dropout if module.training else 0.0)
    mixed: Tensor = module.out(y.transpose(1, 2).flatten(2))
    return mixed


def dropout_part(x: Tensor, p: float, group: Group, dim: int) -> Tensor:
    """Dropout of `x`, this rank's part of a whole along `dim`, with the whole's mask."""
    shape = list(x.shape)
    shape[dim] *= group.world
    mask = F.dropout(x.new_ones(shape), p)
    return x * mask.chunk(group.world, dim)[group.rank].clone()  # the clone: backward is not to keep the whole's


def dropping_heads(group: Group, is_training: bool) -> AbstractContextManager[object]:
    """Around an attention over this rank's heads: what is dropped of [batch, heads, ...] is what one process drops."""
    return _HeadsDropout(group) if is_training and group.world > 1 else nullcontext()


class _HeadsDropout(TorchFunctionMode):
    """Takes over dropout of probabilities, whoever asks for it: models of any make do so in functions of their own."""

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
    """What each query gives to each key, with the arguments of torch's attention."""
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)
