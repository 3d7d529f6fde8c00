# SPDX-License-Identifier: Apache-2.0
"""The linear operation whose result a module returns, which is not computed when the module runs again in backward.

The backward of a linear operation needs its input and its weight, and not its result. A module that runs again only
for its backward, such as a tile of an MLP, can leave out this product: it is a third of the forward of an MLP.
`find_last` finds the operation while the module runs for the first time. Nothing but the return of the module may
use its result, so that no operation ever sees values that were not computed. A module may run in another way when it
runs again, because of its input, or because gradients are switched on: `run_without` then raises `ResultUsedError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.modules.module import _global_forward_hooks
from torch.overrides import TorchFunctionMode

_PLAIN: Final = (Tensor, nn.Parameter)


class _Linears(TorchFunctionMode):
    """Counts the linear operations of a module that runs inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._result: Tensor | None = None  # of a linear operation, if no other operation came after it
        self._version = 0  # of the result; code in C++ may write to it

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._result = None
        if func is F.linear:
            self._count += 1
            if _is_plain(*args, **(kwargs or {})) and not out.is_inference():
                self._result, self._version = out, out._version
        return out

    def last(self, returned: object) -> int | None:
        """The number of the linear operation that has computed what the module returned; None if none has."""
        result = self._result
        return self._count if result is not None and result is returned and result._version == self._version else None


class ResultUsedError(Exception):
    """A module runs in another way than before, and may have used the result that was not computed."""


class _Without(TorchFunctionMode):
    """Does not compute the result of the linear operation with a given number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number
        self.result: Tensor | None = None  # the result that was not computed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.result is not None:
            raise ResultUsedError
        if func is F.linear:
            self._left -= 1
            if self._left == 0 and _can_leave_out() and _is_plain(*args, **(kwargs or {})):
                self.result = _apply(*args, **(kwargs or {}))
                return self.result
        return func(*args, **(kwargs or {}))


def find_last(module: nn.Module, x: Tensor) -> tuple[Any, int | None]:
    """The result of a module, and the number of the linear operation that has computed it. The number is None if
    another operation has computed it, and if a hook may read it.
    """
    if _global_forward_hooks or any(part._forward_hooks for part in module.modules()):
        return module(x), None
    with _Linears() as linears:
        out = module(x)
    return out, linears.last(out)


def run_without(number: int | None, run: Callable[[], Any]) -> Any:
    """The result of `run`, which runs a module. The result is NaN if it is that of the linear operation with this
    number, and its gradients are right. Raises ResultUsedError if this operation was not the last one.
    """
    if number is None:
        return run()
    with _Without(number) as mode:
        out = run()
    if mode.result is not None and out is not mode.result:
        raise ResultUsedError
    return out


def _can_leave_out() -> bool:
    """Whether the backward of an operation is that of torch. The backward of a custom Function, whose forward runs
    without gradients, may use any result. Hooks of saved tensors, such as those of a checkpoint inside the module, may
    run the operation again and compare what it saves.
    """
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def _is_plain(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:  # the names of F.linear
    """Whether `_NoResult` can replace an operation. Autocast would change the dtype of its input."""
    given = [input, weight] if bias is None else [input, weight, bias]
    if not all(type(tensor) in _PLAIN and tensor.dtype == input.dtype for tensor in given) or weight.dim() != 2:
        return False
    device = input.device.type
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return not is_cast and (bias is None or bias.shape == weight.shape[:1])


def _apply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _NoResult.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _NoResult(Function):
    """A linear operation with the gradients of F.linear, whose result is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_full((1,) * x.dim(), torch.nan).expand(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            (flat @ weight.conj()).view_as(x) if wants_x else None,
            flat.t() @ x.reshape(-1, x.shape[-1]).conj() if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )
