# SPDX-License-Identifier: Apache-2.0
"""Ring attention: causal attention over a sequence whose tokens are on several ranks.

Each rank keeps its queries. The keys and values travel around the ring of ranks. In each step a rank computes the
attention of its queries to the keys that it has now, while these keys are on their way to the next rank. The results of
the steps are merged with their log-sum-exps, in fp32 or wider. In backward the keys travel again, and the gradients of
keys and values travel with them, in fp32 or wider, until they are back at their owners.

Ranks have chunks of the sequence (`SequenceRanks.chunks`). The attention of a chunk of queries to a chunk of keys is a
square with a causal mask if both are the same chunk, a rectangle without a mask if the keys come first, and nothing
otherwise. Packed sequences cut these squares and rectangles into smaller ones. With two chunks on each rank, one from
the start and one from the end of the sequence, all ranks have equally much work in each step.

torch has a ring for its own attention (torch.distributed.tensor.experimental.context_parallel). It needs a GPU, and
neither supports packed sequences nor gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from twinflow.dist.group import Group

Range = tuple[int, int]
_FLASH_DTYPES = (torch.float16, torch.bfloat16)


class Block(NamedTuple):
    """A rectangle of scores: queries and keys by their indices on their ranks."""

    queries: slice
    keys: slice
    is_causal: bool  # The rectangle is a square of which only the lower triangle counts.


Step = Sequence[Block]  # the work of a rank while it has the keys of one rank


def plan_steps(chunks: Sequence[Sequence[Range]], rank: int, documents: Sequence[int]) -> list[Step]:
    """The steps of a rank. `chunks`: the ranges of positions of every rank. `documents`: the starts of the packed
    sequences, and the end of the last one.
    """
    world, ranges = len(chunks), list(pairwise(documents))
    return [list(_blocks(chunks[rank], chunks[(rank - step) % world], ranges)) for step in range(world)]


def _blocks(own: Sequence[Range], theirs: Sequence[Range], documents: Sequence[Range]) -> Iterator[Block]:
    q_offset = 0
    for q_start, q_stop in own:
        k_offset = 0
        for k_start, k_stop in theirs:
            for start, stop in documents if k_start <= q_start else ():
                rows = max(q_start, start), min(q_stop, stop)
                cols = max(k_start, start), min(k_stop, stop)
                if rows[0] < rows[1] and cols[0] < cols[1]:
                    queries = slice(q_offset + rows[0] - q_start, q_offset + rows[1] - q_start)
                    keys = slice(k_offset + cols[0] - k_start, k_offset + cols[1] - k_start)
                    yield Block(queries, keys, k_start == q_start)
            k_offset += k_stop - k_start
        q_offset += q_stop - q_start


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, steps: Sequence[Step], scale: float | None = None
) -> Tensor:
    """The causal attention of this rank's queries to the keys of all ranks.

    q is [batch, heads, tokens of this rank, head_dim], k and v are [batch, kv_heads, tokens of this rank, head_dim],
    where kv_heads divides heads. `steps` is the result of `plan_steps`. `scale`: None means head_dim ** -0.5. Values
    may be wider or narrower than queries and keys, as in multi-head latent attention.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    width = v.shape[3]
    widest = max(width, q.shape[3])
    # Keys and values travel as one tensor. Columns of zeros change no score and no gradient.
    q, k, v = (F.pad(x, (0, widest - x.shape[3])) if x.shape[3] < widest else x for x in (q, k, v))
    out: Tensor = _Ring.apply(q, k, v, group, steps, scale)  # type: ignore[no-untyped-call]
    return out if width == widest else out[..., :width]


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, steps: Sequence[Step], scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
        sums = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)  # log-sum-exp of each query so far
        pair = torch.stack([k, v])
        for number, step in enumerate(steps):
            moving = group.shift(pair) if number + 1 < len(steps) else None
            for block in step:
                keys, values = pair[:, :, :, block.keys]
                part, part_sums = attend_block(q[:, :, block.queries], keys, values, block.is_causal, scale)
                _merge(out[:, :, block.queries], sums[:, :, block.queries], part, part_sums)
            if moving is not None:
                pair = moving.wait()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.group, ctx.steps, ctx.scale = group, steps, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        group: Group = ctx.group
        wide = sums.dtype
        grad = grad.contiguous()
        grad_q = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
        pair = torch.stack([k, v])
        grad_pair = torch.zeros_like(pair, dtype=wide)  # of the keys and values that this rank has now
        for number, step in enumerate(ctx.steps):
            moving = group.shift(pair) if number + 1 < len(ctx.steps) else None
            for block in step:
                rows, cols = block.queries, block.keys
                keys, values = pair[:, :, :, cols]
                own = [tensor[:, :, rows] for tensor in (grad, q, out)]
                grads = attend_block_backward(
                    own[0], own[1], own[2], sums[:, :, rows], keys, values, block.is_causal, ctx.scale
                )
                grad_q[:, :, rows] += grads[0]
                grad_pair[0, :, :, cols] += grads[1]
                grad_pair[1, :, :, cols] += grads[2]
            grad_pair = group.shift(grad_pair).wait()  # after the last step they are at their owner
            if moving is not None:
                pair = moving.wait()
        return grad_q.to(q.dtype), grad_pair[0].to(k.dtype), grad_pair[1].to(v.dtype), None, None, None


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Adds the attention to more keys to `out`, in place. Both are means with weights whose sums are exp(sums)."""
    part_sums = part_sums.to(sums.dtype)
    total = torch.logaddexp(sums, part_sums)
    out.mul_((sums - total).exp_()[..., None]).add_(part * (part_sums - total).exp_()[..., None])
    sums.copy_(total)


# The attention of one block, with the log-sum-exp of each query. torch's kernels return it, but its public function
# does not. Their backward uses the result and the log-sum-exp that it gets, so with those of all blocks it computes the
# gradients of one block.


def attend_block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The attention, and the log-sum-exp of the scores of each query [batch, heads, queries]."""
    if _has_cpu_kernel(q):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return found[0], found[1]
    if _has_flash(q):
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        return found[0], found[1][:, :, : q.shape[2]]
    scores = _scores(q, k, is_causal, scale)
    sums = scores.logsumexp(-1)
    probs = (scores - sums[..., None]).exp_()
    return (probs @ _repeated(v, q).to(probs.dtype)).to(q.dtype), sums


def attend_block_backward(
    grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for this block. `out` and `sums` are those over all blocks of the queries."""
    if _has_cpu_kernel(q):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        # The kernel reads the log-sum-exps with the strides of those that it has written.
        found: tuple[Tensor, Tensor, Tensor] = backward(
            grad, q, k, v, out, _token_major(sums), 0.0, is_causal, scale=scale
        )
        return found
    if _has_flash(q):
        # Without dropout the kernel does not read the state of the random numbers. A tensor of cumulative lengths, even
        # an empty one, would select the kernel for batches of several lengths.
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        sizes = q.shape[2], k.shape[2]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        found = backward(
            grad, q, k, v, out, sums.contiguous(), None, None, *sizes, 0.0, is_causal, seed, seed, scale=scale
        )
        return found
    probs = (_scores(q, k, is_causal, scale) - sums[..., None]).exp_()
    grad, out = grad.to(probs.dtype), out.to(probs.dtype)
    grad_v = probs.transpose(2, 3) @ grad
    grad_scores = probs * (grad @ _repeated(v, q).to(probs.dtype).transpose(2, 3) - (grad * out).sum(-1, keepdim=True))
    grad_q = grad_scores @ _repeated(k, q).to(probs.dtype) * scale
    grad_k = grad_scores.transpose(2, 3) @ q.to(probs.dtype) * scale
    return grad_q, _summed(grad_k, k), _summed(grad_v, v)


def _has_cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _has_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in _FLASH_DTYPES and q.shape[3] % 8 == 0 and q.shape[3] <= 256


def _token_major(sums: Tensor) -> Tensor:
    return sums.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _repeated(k, q).to(wide).transpose(2, 3) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """A head of keys for each head of queries."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _summed(grad: Tensor, k: Tensor) -> Tensor:
    """The sums of the gradients of `_repeated`."""
    batch, _, num_keys, width = grad.shape
    return grad.view(batch, k.shape[1], -1, num_keys, width).sum(2)
