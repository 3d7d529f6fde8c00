# SPDX-License-Identifier: Apache-2.0
"""The linear operation whose result a module returns, which is not computed when the module runs again in backward.

The backward of a linear operation needs its input and its weight, and not its result. A module that runs again only
for its backward, such as a tile of an MLP, can leave out this product: it is a third of the forward of an MLP.
`find_last` finds the operation while the module runs for the first time. Nothing but the return of the module may
use its result, so that no operation ever sees values that were not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.overrides import TorchFunctionMode

_PLAIN: Final = (Tensor, nn.Parameter)


class _Linears(TorchFunctionMode):
    """Counts the linear operations of a module that runs inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._result: Tensor | None = None  # of a linear operation, if no other operation came after it

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
            if _is_plain(*args, **(kwargs or {})):
                self._result = out
        return out

    def last(self, returned: object) -> int | None:
        """The number of the linear operation that has computed what the module returned; None if none has."""
        return self._count if self._result is not None and returned is self._result else None


class _Without(TorchFunctionMode):
    """Does not compute the result of the linear operation with a given number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            self._left -= 1
            if self._left == 0:
                return _apply(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def find_last(module: nn.Module, x: Tensor) -> tuple[Any, int | None]:
    """The result of a module, and the number of the linear operation that has computed it. The number is None if another
    operation has computed it, if a hook may read it, and under autocast, which would change its input.
    """
    if torch.is_autocast_enabled(x.device.type) or any(part._forward_hooks for part in module.modules()):
        return module(x), None
    with _Linears() as linears:
        out = module(x)
    return out, linears.last(out)


def without(number: int | None) -> AbstractContextManager[object]:
    """Inside, the result of the linear operation with this number is NaN. Its gradients are right."""
    return nullcontext() if number is None else _Without(number)


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    given = [x, weight] if bias is None else [x, weight, bias]
    return all(type(tensor) in _PLAIN and tensor.dtype == x.dtype for tensor in given) and weight.dim() == 2


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = _NoResult.apply(x, weight, bias)  # type: ignore[no-untyped-call]
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
            (flat @ weight).view_as(x) if wants_x else None,
            flat.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )
