"""Cross entropy where each tensor rank has some rows of the head's weight, without all logits at once.

A rank makes logits of its own symbols, a chunk of tokens at a time. Of each token the ranks tell each other three
numbers: the largest logit, the sum of exponentials below it, and the target's logit where it is theirs. From these all
ranks have the same loss, in the same bits, and each has the gradient of its own logits. As in one process, both
gradients are made in forward, and backward only scales them. First-order gradients only.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from twinflow.dist.group import Group
from twinflow.errors import bad_value
from twinflow.parallel.collectives import copy_in

IGNORE_INDEX: Final = -100  # as in F.cross_entropy: a target that counts for nothing
LOSS_CHUNK: Final = 2048  # tokens whose logits exist at a time
PRODUCT_ROWS: Final = 8192  # of a weight's gradient, whose sum over chunks is wider than its factors
# A probability of 2e-5, one of 50,000, would have six bits in fp16; times this it has all eleven.
FP16_GAIN: Final = 256.0


def vocab_parallel_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, chunk: int = LOSS_CHUNK
) -> Tensor:
    """Mean of `F.cross_entropy(hidden @ whole.T, targets)` in fp32 or wider, where `weight` is this rank's rows.

    `hidden` is [tokens, hidden] and replicated, `weight` [vocab / world, hidden], `targets` [tokens]; -100 leaves a
    token out. A target that is in nobody's rows makes the loss infinite. The gradient of `hidden` is replicated too.
    """
    if chunk < 1:
        raise bad_value("chunk", chunk, "a whole number >= 1")
    hidden = copy_in(hidden, group)
    device = hidden.device.type
    if not torch.amp.is_autocast_available(device):
        return _apply(hidden, weight, targets, group, chunk)
    if torch.is_autocast_enabled(device):  # it does not reach the in-place products below
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        return _apply(hidden, weight, targets, group, chunk)


def _apply(hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, chunk: int) -> Tensor:
    # Asked for here: inside a Function gradients are always off, and needs_input_grad does not know of no_grad.
    wants_grad = torch.is_grad_enabled()
    loss: Tensor = _ShardedCrossEntropy.apply(hidden, weight, targets, group, chunk, wants_grad)  # type: ignore[no-untyped-call]
    return loss


class _ShardedCrossEntropy(Function):
    """Gives this rank's share of the gradient of `hidden`: who made it replicated sums the shares."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, chunk: int, wants_grad: bool
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        num_targets = (targets != IGNORE_INDEX).sum().to(wide)
        grad_hidden = torch.empty_like(hidden) if wants_grad and ctx.needs_input_grad[0] else None
        grad_weight = None
        if wants_grad and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        is_fp16 = hidden.dtype == torch.float16  # whose range asks that the mean be taken last
        mean = 1.0 / num_targets.clamp(min=1)  # without any target the loss is NaN, and the gradient 0
        gain = torch.full_like(mean, FP16_GAIN) if is_fp16 else mean
        total = torch.zeros_like(num_targets)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            own = own_targets(targets[rows], len(weight), group.rank)
            logits = F.linear(hidden[rows], weight).to(wide)
            losses, probs = _losses_and_probs(logits, own, group)
            total += losses.sum()
            if grad_hidden is None and grad_weight is None:
                continue
            grad_logits = _grad_of_logits(probs, own, gain).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.scale = mean / FP16_GAIN if is_fp16 else None
        ctx.weight_dtype = weight.dtype
        return total / num_targets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad if ctx.scale is None else grad * ctx.scale
        if grad_hidden is not None:
            # Widened first: beside a half precision tensor the scale itself would be rounded to half precision.
            grad_hidden = (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype)
        if grad_weight is not None:
            out = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)  # rounded as it is written, once
            grad_weight = torch.mul(grad_weight, scale, out=out)
        return grad_hidden, grad_weight, None, None, None, None


class OwnTargets(NamedTuple):
    """Of a chunk's targets, those among this rank's symbols."""

    rows: Tensor  # [tokens, 1] which of this rank's; 0 where the target is not there
    is_here: Tensor  # [tokens]
    is_counted: Tensor  # [tokens]; not left out


def own_targets(targets: Tensor, num_rows: int, rank: int) -> OwnTargets:
    """Where this rank, with `num_rows` rows like all others, has the targets."""
    is_counted = targets != IGNORE_INDEX
    local = targets - rank * num_rows
    is_here = is_counted & (local >= 0) & (local < num_rows)
    return OwnTargets(local.where(is_here, 0)[:, None], is_here, is_counted)


def _losses_and_probs(logits: Tensor, own: OwnTargets, group: Group) -> tuple[Tensor, Tensor]:
    """Loss of each token, 0 where it is left out, and this rank's probabilities, in the place of the logits."""
    largest = logits.amax(-1)
    chosen = logits.gather(-1, own.rows).squeeze(-1).where(own.is_here, -torch.inf)
    probs = logits.sub_(largest[:, None]).exp_()
    said = torch.stack([largest, probs.sum(-1), chosen])
    heard = said.new_empty((group.world, *said.shape))
    heard[group.rank] = said
    group.all_gather(heard.view(-1))
    top = heard[:, 0].amax(0)
    sums = (heard[:, 1] * (heard[:, 0] - top).exp()).sum(0)
    losses = (sums.log() - (heard[:, 2].amax(0) - top)).where(own.is_counted, 0.0)
    return losses, probs.mul_(((largest - top).exp() / sums)[:, None])


def _grad_of_logits(probs: Tensor, own: OwnTargets, gain: Tensor) -> Tensor:
    """(probs - one-hot targets) * gain, 0 where a token is left out, in place."""
    probs.scatter_add_(-1, own.rows, -own.is_here[:, None].to(probs.dtype))
    return probs.mul_((own.is_counted * gain)[:, None])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than both: then the product too, some rows of it at a time."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
        return
    for start in range(0, len(total), PRODUCT_ROWS):
        rows = slice(start, start + PRODUCT_ROWS)
        total[rows] += _wide_product(a[rows], b, total.dtype)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
