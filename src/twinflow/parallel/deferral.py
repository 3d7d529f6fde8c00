# SPDX-License-Identifier: Apache-2.0
"""Deferred weight gradients: the two halves I and W of a backward, for zero-bubble schedules.

The backward of a linear layer computes the gradient of its input at once (I). Inside `with deferral.collecting()`, the
gradient of the weight is only recorded, as a function that keeps the layer's input and output gradient. W calls it.
Gradients of biases, norms and embeddings are computed in I. A checkpointed layer is recomputed once, in I, because W
uses the tensors that I has kept.

The matrix products are those of plain autograd, in the same order, so the results have equal bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_MARK = "_twinflow_deferral"


class Batch:
    """Deferred weight gradients of one backward."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Tensor, Callable[[], Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """Record `make`, which returns one addend of a weight's gradient. It is called once, on whichever thread."""
        self._jobs.append((weight, make))

    def run(self) -> None:
        """Compute all deferred gradients (the half W) and pass them to autograd, so that hooks on the weights run once
        for each weight.

        The tensors of one deferred gradient are freed before the next one is computed. Backward starts at views of the
        weights: the gradient of a view is a new tensor, which a weight without a gradient takes over without a copy.
        """
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            while self._jobs:
                weight, make = self._jobs.popleft()
                grad = make()
                del make
                first = sums.get(id(weight))
                sums[id(weight)] = (weight, grad if first is None else first[1] + grad)
        if not sums:
            return
        with torch.enable_grad():
            views = [weight.view_as(weight) for weight, _ in sums.values()]
        torch.autograd.backward(views, [grad for _, grad in sums.values()])


class Deferral:
    """Decides whether weight gradients are computed at once or deferred. All layers of a rank share one object.

    Backward may run on threads of autograd, so the setting applies to all threads.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None

    @contextmanager
    def collecting(self) -> Iterator[Batch]:
        """Defer the weight gradients of every backward inside the `with` block."""
        assert self._batch is None, "collecting() is called inside of another collecting()"
        self._batch = batch = Batch()
        try:
            yield batch
        finally:
            self._batch = None

    def add(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """Record `make`, which returns one addend of a weight's gradient. The backward of a layer calls this method.

        Inside a `with collecting()` block the addend is computed later (W), otherwise at once.
        """
        batch = self._batch if self._batch is not None else Batch()
        batch.add(weight, make)
        if self._batch is None:
            batch.run()


def defer(module: nn.Module, deferral: Deferral) -> None:
    """Enable the linear layers of a module to defer their weight gradients.

    A subclass's own forward, and a forward that was set on the instance, are kept. They may call `linear`. If they do
    not, the weight gradient is computed in I, which is also correct.
    """
    for layer in module.modules():
        if not (isinstance(layer, nn.Linear) or is_conv1d(layer)):
            continue
        setattr(layer, _MARK, deferral)
        is_plain = is_conv1d(layer) or type(layer).forward is nn.Linear.forward
        if is_plain and "forward" not in layer.__dict__:
            layer.forward = MethodType(_forward, layer)


def linear(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a linear layer with this bias. A module with a deferral can defer its weight gradient."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    deferral: Deferral | None = module.__dict__.get(_MARK)
    is_in_out = is_conv1d(module)
    dtype = _compute_dtype(x)
    is_trained = torch.is_grad_enabled() and weight.requires_grad
    # A weight from a parametrization is not a leaf, and the input half (I) of the backward would free its graph. If the
    # dtypes do not match, the plain call raises the error.
    if deferral is None or not is_trained or not weight.is_leaf or (dtype is None and x.dtype != weight.dtype):
        return _product(x, weight, bias, is_in_out)
    if dtype is not None:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    is_reached = x.requires_grad or (bias is not None and bias.requires_grad)
    anchor = None if is_reached else torch.empty(0, device=x.device, requires_grad=True)
    target = _Target(weight, deferral, is_in_out)
    made: Tensor = _Linear.apply(x, weight.detach(), bias, anchor, target)  # type: ignore[no-untyped-call]
    return made


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    return linear(module, x, module.bias)  # type: ignore[arg-type]


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is Hugging Face's Conv1D: a linear layer with a weight of [in, out]. Nothing is imported."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _compute_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast would compute a product of `x`. None if autocast does not apply."""
    kind = x.device.type
    is_cast = x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_in_out: bool) -> Tensor:
    if not is_in_out:
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    made = rows.mm(weight) if bias is None else torch.addmm(bias, rows, weight)
    return made.view(*x.shape[:-1], weight.shape[-1])


class _Target(NamedTuple):
    """The weight that gets the gradient, and how to compute it."""

    weight: Tensor
    deferral: Deferral
    is_in_out: bool  # the shape of the weight is [in, out]


class _Linear(torch.autograd.Function):
    """A linear layer with a deferred weight gradient. `x` and `bias` have the dtype to compute in.

    Autograd gets the values of the parameter, not the parameter itself. Otherwise autograd would run the parameter's
    hooks in the half I without a gradient. If no other input requires a gradient, the dummy input `anchor` makes
    autograd call backward. The anchor never gets a gradient. The weight is cast in forward and again in backward,
    because a copy for each micro-batch in flight would take more memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor | None, target: _Target
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.target = target
        return _product(x, weight.to(x.dtype), bias, target.is_in_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """Compute the gradient of the input (I). Compute or defer the gradient of the weight (W)."""
        x, weight = ctx.saved_tensors
        target: _Target = ctx.target
        rows, taken = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        for_x = for_bias = None
        if ctx.needs_input_grad[0]:
            cast = weight.to(x.dtype)
            for_x = rows.mm(cast.t() if target.is_in_out else cast).view(x.shape)
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
        target.deferral.add(target.weight, _weight_grad(taken, rows, target.is_in_out, weight.dtype))
        return for_x, None, for_bias, None, None


def _weight_grad(x: Tensor, grad: Tensor, is_in_out: bool, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The function that computes the weight gradient. It is made here, so that it keeps only `x` and `grad` alive."""
    return lambda: (x.t().mm(grad) if is_in_out else grad.t().mm(x)).to(dtype)
