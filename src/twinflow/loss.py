"""Cross entropy of a large vocabulary without its logits.

The logits of 10,000 tokens over 50,000 symbols are 2 GB in fp32, and as much again for their gradient: more than any
layer. Here a chunk of tokens at a time is taken through the head, the loss and the gradients of both, all in forward,
and only the two gradients are kept: backward has nothing to do but scale them. First-order gradients only.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from twinflow.errors import invalid_value

IGNORE_INDEX: Final = -100  # as in F.cross_entropy: a target that counts for nothing
LOSS_CHUNK: Final = 2048  # tokens whose logits exist at a time
PRODUCT_ROWS: Final = 8192  # of a weight's gradient, whose sum over chunks is wider than its factors
# A probability of 2e-5, one of 50,000, would have six bits in fp16; times this it has all eleven.
FP16_GAIN: Final = 256.0


class Targets(NamedTuple):
    """A chunk's targets among the rows of the weight that are here."""

    rows: Tensor  # [tokens, 1] which row; 0 where the target is not here
    is_here: Tensor  # [tokens]
    is_counted: Tensor  # [tokens]; not left out


class Softmax(Protocol):
    """Over all symbols, of which the weight may have a part."""

    def find(self, targets: Tensor, num_rows: int) -> Targets:
        """Where targets are among the weight's rows."""
        ...

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Loss of each token, 0 where it is left out, and the probabilities, in the place of the logits."""
        ...


class WholeSoftmax:
    """The weight has a row for every symbol."""

    def find(self, targets: Tensor, num_rows: int) -> Targets:
        """All of them; one that is no symbol is the lookup's error."""
        is_counted = targets != IGNORE_INDEX
        return Targets(targets.where(is_counted, 0)[:, None], is_counted, is_counted)

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """In place."""
        largest = logits.amax(-1, keepdim=True)
        chosen = logits.gather(-1, targets.rows) - largest
        probs = logits.sub_(largest).exp_()
        sums = probs.sum(-1, keepdim=True)
        losses = (sums.log() - chosen).squeeze(-1).where(targets.is_counted, 0.0)
        return losses, probs.div_(sums)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = LOSS_CHUNK, softmax: Softmax | None = None
) -> Tensor:
    """Mean of `F.cross_entropy(hidden @ weight.T, targets)` in fp32 or wider, with at most `chunk` rows of logits.

    `hidden` is [tokens, hidden], `weight` [vocab, hidden], `targets` [tokens]; -100 leaves a token out. The gradient of
    `weight` is summed over the chunks in fp32, or in its own dtype where that is wider. `softmax`: over more symbols
    than the weight has rows for.
    """
    softmax = softmax or WholeSoftmax()
    if chunk < 1:
        raise invalid_value("chunk", chunk, "a whole number >= 1")
    device = hidden.device.type
    if not torch.amp.is_autocast_available(device):
        return _apply(hidden, weight, targets, softmax, chunk)
    if torch.is_autocast_enabled(device):  # it does not reach the in-place products below
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        return _apply(hidden, weight, targets, softmax, chunk)


def _apply(hidden: Tensor, weight: Tensor, targets: Tensor, softmax: Softmax, chunk: int) -> Tensor:
    # Asked for here: inside a Function gradients are always off, and needs_input_grad does not know of no_grad.
    wants_grad = torch.is_grad_enabled()
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, softmax, chunk, wants_grad)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softmax: Softmax, chunk: int, wants_grad: bool
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
            found = softmax.find(targets[rows], len(weight))
            losses, probs = softmax.losses_and_probs(F.linear(hidden[rows], weight).to(wide), found)
            total += losses.sum()
            if grad_hidden is None and grad_weight is None:
                continue
            grad_logits = _grad_of_logits(probs, found, gain).to(hidden.dtype)
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


def _grad_of_logits(probs: Tensor, targets: Targets, gain: Tensor) -> Tensor:
    """(probs - one-hot targets) * gain, 0 where a token is left out, in place."""
    probs.scatter_add_(-1, targets.rows, -targets.is_here[:, None].to(probs.dtype))
    return probs.mul_((targets.is_counted * gain)[:, None])


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
