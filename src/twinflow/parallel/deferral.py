"""Weight gradients that are put off: the two halves I and W of a backward, for zero-bubble schedules.

A linear layer's backward gives its input's gradient at once. Where a `Deferral` collects, the weight's is only written
down, as a function that keeps the input and the output's gradient; W calls it. Biases, norms and embeddings get theirs
in I. So a checkpointed layer runs again once, in I, whatever the schedule: W works on tensors that I has left.

The products are those of plain autograd, in the same order, so that the same bits come out.
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
    """Weight gradients of one backward that are still to be made."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Tensor, Callable[[], Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """`make` gives one addend of a weight's gradient; it may be called from any thread, and is called once."""
        self._jobs.append((weight, make))

    def run(self) -> None:
        """W: make them all and hand them to autograd, so that hooks on the weights fire as ever, once for each.

        What a job keeps is freed before the next one. Views are what backward starts at: their gradients are new
        tensors, which a weight without a gradient takes as they are instead of copying them.
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
    """Whether weight gradients are made at once or put off: one object for all layers of a rank.

    Backward may run on threads of autograd's own, so what is set here holds for all threads.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None

    @contextmanager
    def collecting(self) -> Iterator[Batch]:
        """I: put off what backward finds inside the block."""
        assert self._batch is None, "a backward inside another one"
        self._batch = batch = Batch()
        try:
            yield batch
        finally:
            self._batch = None

    def add(self, weight: Tensor, make: Callable[[], Tensor]) -> None:
        """For a layer's backward: put one addend of the weight's gradient off, or deliver it where nothing collects."""
        batch = self._batch if self._batch is not None else Batch()
        batch.add(weight, make)
        if self._batch is None:
            batch.run()


def defer(module: nn.Module, deferral: Deferral) -> None:
    """Make the linear layers of a module able to put off their weights' gradients.

    A forward of a subclass's own, or one that somebody has put on the instance, stays: it may call `linear`, else the
    weight's gradient is made in I, which is right too.
    """
    for layer in module.modules():
        if not (isinstance(layer, nn.Linear) or is_conv1d(layer)):
            continue
        setattr(layer, _MARK, deferral)
        is_plain = is_conv1d(layer) or type(layer).forward is nn.Linear.forward
        if is_plain and "forward" not in layer.__dict__:
            layer.forward = MethodType(_forward, layer)


def linear(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """What a linear layer computes of `x`, with this bias; by the module's deferral, if it has one."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    deferral: Deferral | None = module.__dict__.get(_MARK)
    is_in_out = is_conv1d(module)
    dtype = _compute_dtype(x)
    is_trained = torch.is_grad_enabled() and weight.requires_grad
    # A weight that is computed (a parametrization) has a graph behind it, which I would free. Where dtypes do not
    # match, the plain call says so.
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
    """Whether it is Hugging Face's Conv1D: a linear layer with a weight of [in, out]; known without importing it."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _compute_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would compute a product of `x` in; None where it leaves it alone."""
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
    """Where a weight's gradient goes."""

    weight: Tensor
    deferral: Deferral
    is_in_out: bool


class _Linear(torch.autograd.Function):
    """A linear layer whose weight's gradient may come later. `x` and `bias` are in the dtype to compute in.

    Autograd does not see the parameter here, only its values: it would call the parameter's hooks in I too, with no
    gradient. An anchor, which never gets one either, makes backward come by where nothing else needs a gradient. The
    weight is cast here, and again in backward: a copy for each micro-batch under way would take more memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor | None, target: _Target
    ) -> Tensor:
        """As without."""
        ctx.save_for_backward(x, weight)
        ctx.target = target
        return _product(x, weight.to(x.dtype), bias, target.is_in_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """I, and W or a note for it."""
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
    """A function of its own, so that nothing but these two tensors is kept."""
    return lambda: (x.t().mm(grad) if is_in_out else grad.t().mm(x)).to(dtype)
