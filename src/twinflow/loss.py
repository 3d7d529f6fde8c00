# SPDX-License-Identifier: Apache-2.0
"""Cross entropy for a large vocabulary without storing all logits.

The logits of 10,000 tokens and 50,000 symbols need 2 GB in fp32, and their gradient needs another 2 GB. This is more
than any layer needs. Here the forward processes one chunk of tokens at a time. It computes the logits and the loss of
the chunk, and the gradients of `hidden` and `weight`, and then frees the logits. The backward only scales the
gradients. Only first-order gradients are available.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from twinflow.errors import invalid_value

IGNORE_INDEX: Final = -100  # target of a token that is ignored, as in F.cross_entropy
LOSS_CHUNK: Final = 2048  # number of tokens whose logits exist at a time
PRODUCT_ROWS: Final = 8192  # rows of a wide product that exist at a time, see `_add_product`
# A probability of 2e-5 (1 / 50,000) has six significant bits in fp16. Multiplied by this factor it has all eleven bits.
FP16_GAIN: Final = 256.0


class Targets(NamedTuple):
    """The targets of a chunk as rows of the weight on this rank."""

    rows: Tensor  # [tokens, 1]: row of the target; 0 if this rank does not have the row
    is_here: Tensor  # [tokens]: whether this rank has the row
    is_counted: Tensor  # [tokens]: whether the token counts, because its target is not IGNORE_INDEX


class Softmax(Protocol):
    """The softmax over all symbols. The weight may contain only a part of the symbols."""

    def find(self, targets: Tensor, num_rows: int) -> Targets: ...

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """The loss of each token, 0 for ignored ones, and the probabilities, which overwrite the logits."""
        ...


class WholeSoftmax:
    """The softmax for a weight with a row for each symbol."""

    def find(self, targets: Tensor, num_rows: int) -> Targets:
        is_counted = targets != IGNORE_INDEX
        return Targets(targets.where(is_counted, 0)[:, None], is_counted, is_counted)

    def losses_and_probs(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        largest = logits.amax(-1, keepdim=True)
        chosen = logits.gather(-1, targets.rows) - largest
        probs = logits.sub_(largest).exp_()
        sums = probs.sum(-1, keepdim=True)
        losses = (sums.log() - chosen).squeeze(-1).where(targets.is_counted, 0.0)
        return losses, probs.div_(sums)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = LOSS_CHUNK, softmax: Softmax | None = None
) -> Tensor:
    """`F.cross_entropy(hidden @ weight.T, targets)` in fp32 or wider, with at most `chunk` rows of logits at a time.

    `hidden` is [tokens, hidden], `weight` is [vocab, hidden], `targets` is [tokens]. Tokens with the target -100 are
    ignored. The gradient of `weight` is summed over the chunks in fp32, or in its own dtype if that is wider.
    `softmax`: the softmax for a weight that has rows for only a part of the symbols.
    """
    softmax = softmax or WholeSoftmax()
    if chunk < 1:
        raise invalid_value("chunk", chunk, "a whole number >= 1")
    device = hidden.device.type
    if not torch.amp.is_autocast_available(device):
        return _apply(hidden, weight, targets, softmax, chunk)
    if torch.is_autocast_enabled(device):  # Autocast does not affect the in-place products below.
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        return _apply(hidden, weight, targets, softmax, chunk)


def _apply(hidden: Tensor, weight: Tensor, targets: Tensor, softmax: Softmax, chunk: int) -> Tensor:
    # Inside a Function gradients are always disabled, and needs_input_grad ignores no_grad.
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
        # The range of fp16 is small, so gradients are divided by the number of targets last.
        is_fp16 = hidden.dtype == torch.float16
        mean = 1.0 / num_targets.clamp(min=1)  # Without targets the loss is NaN and the gradient is 0.
        gain = torch.full_like(mean, FP16_GAIN) if is_fp16 else mean
        total = torch.zeros_like(num_targets)

        def add_chunk(rows: slice) -> None:
            """A function of its own, so that the logits of a chunk are freed before those of the next one are made."""
            found = softmax.find(targets[rows], len(weight))
            losses, probs = softmax.losses_and_probs(F.linear(hidden[rows], weight).to(wide), found)
            total.add_(losses.sum())
            if grad_hidden is None and grad_weight is None:
                return
            grad_logits = _grad_of_logits(probs, found, gain).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[rows])

        for start in range(0, len(hidden), chunk):
            add_chunk(slice(start, start + chunk))
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
            # With a half-precision tensor, torch would round the scale to half precision too.
            grad_hidden = (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype)
        if grad_weight is not None:
            out = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)  # The product is rounded once.
            grad_weight = torch.mul(grad_weight, scale, out=out)
        return grad_hidden, grad_weight, None, None, None, None


def _grad_of_logits(probs: Tensor, targets: Targets, gain: Tensor) -> Tensor:
    """(probs - one-hot targets) * gain, in place. Rows of ignored tokens are 0."""
    probs.scatter_add_(-1, targets.rows, -targets.is_here[:, None].to(probs.dtype))
    return probs.mul_((targets.is_counted * gain)[:, None])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. If `total` is wider than `a` and `b`, the product is computed in the dtype of `total`, for
    PRODUCT_ROWS rows at a time.
    """
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
