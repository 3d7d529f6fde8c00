# SPDX-License-Identifier: Apache-2.0
"""The tensor that replaces a gradient in `.grad` after the runtime has taken the gradient (the stand-in).

The stand-in has no memory of its own. When code uses the stand-in, the runtime puts all gradients of the step back into
`.grad` and drops the updates that it has begun. `step()` then updates from `.grad` as torch does. Code that does not
use `.grad` is not affected.

A stand-in is in one of three states:

    taken     the runtime has the gradient; using the stand-in makes the runtime put all gradients back
    held      the stand-in refers to the gradient; using the stand-in puts the gradient, or a copy, into `.grad`
    used      `step()` has used the gradient and reused its memory; using the stand-in raises an error, unless the
              operation overwrites all values; a gradient that another backward adds to it is lost

`__torch_function__` intercepts operations that Python code calls. `__torch_dispatch__` intercepts operations that C++
code calls. The only such operation that matters is autograd's addition of the gradient of another backward.

Threads: autograd's thread and the user's thread use stand-ins, never at the same time, because backward() blocks its
caller. There is no lock. An update may still read `held` after `step()` has returned (`is_lent`), so a write goes to a
copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from twinflow.errors import wrong_state
from twinflow.offload.metadata import GRAD_ACCESS, METADATA

_ADD_INTO = torch.ops.aten.add_.Tensor
_ADD = torch.ops.aten.add.Tensor
_OVERWRITING = frozenset([Tensor.fill_, Tensor.zero_, Tensor.copy_, Tensor.normal_, Tensor.uniform_])
_PASSING = METADATA | GRAD_ACCESS | {Tensor.dim, Tensor.size}


class Giver(Protocol):
    """The runtime that has taken the gradients."""

    def give_back(self, tensor: Tensor) -> None:
        """Put all gradients of this step back into `.grad`. Raise if updates have already changed weights."""
        ...

    def expects_more(self, tensor: Tensor) -> bool:
        """Whether the runtime will take the next gradient of this parameter too."""
        ...

    def note_added(self) -> None:
        """Note that a backward adds a gradient to one that `step()` has used and that was not reset."""
        ...


class TakenGradient(Tensor):
    """The stand-in for the gradient of one parameter."""

    _param: weakref.ref[Tensor]
    _giver: weakref.ref[Giver]
    held: Tensor | None  # the gradient, in the state `held`
    arrived: Tensor | None  # another gradient that autograd has added and that the runtime will take next
    is_used: bool  # `step()` has used the gradient
    is_lent: bool  # the update still reads `held`, so a write needs a copy

    @staticmethod
    def __new__(cls, param: Tensor, giver: Giver) -> TakenGradient:
        strides = param.stride()
        if 0 in strides:  # a weight on the host that has no values on the device now is an expanded scalar
            strides = torch.empty(param.shape, device="meta").stride()
        made: TakenGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=strides, dtype=param.dtype, device=param.device
        )
        made._param = weakref.ref(param)
        made._giver = weakref.ref(giver)
        made.held = None
        made.arrived = None
        made.is_used = False
        made.is_lent = False
        return made

    def __repr__(self, *_: object, **__: object) -> str:  # type: ignore[override]
        if self.is_used:
            return f"TakenGradient(shape={tuple(self.shape)}, used by step())"
        return repr(self.value())

    def value(self) -> Tensor:
        """Put the gradient into `.grad` and return it. Raises RuntimeError if `step()` has used the gradient."""
        param = self._param()
        if self.held is None:
            giver = self._giver()
            if self.is_used or param is None or giver is None:
                raise wrong_state(
                    "The gradient cannot be read",
                    "it was used by step() and its memory has been reused",
                    "Read .grad between backward() and step() and call zero_grad() after step(), or build the "
                    "optimizer with early=False, which keeps gradients until zero_grad().",
                )
            giver.give_back(param)
            assert self.held is not None, "the runtime must give the gradient to the stand-in too"
        elif self.is_lent:
            self.held = self.held.clone()
            self.is_lent = False
        if param is not None and param.grad is self:
            param.grad = self.held
        return self.held

    def renew(self) -> None:
        """Allocate memory if `step()` has used the gradient. Called before an operation that overwrites all values."""
        param = self._param()
        if self.is_used and self.held is None and param is not None:
            self.held = torch.empty_like(param)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation on the gradient instead of the stand-in, unless it needs only metadata."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # A C++ operator arrives here if a dispatch mode is active, for example one that counts operations.
            # `__torch_dispatch__` handles it.
            if func in _PASSING or isinstance(func, torch._ops.OpOverload):
                return func(*args, **kwargs)
            if func in _OVERWRITING and isinstance(args[0], cls):
                args[0].renew()
            args = [_values(item) for item in args]
            kwargs = {key: _values(item) for key, item in kwargs.items()}
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Handle autograd's accumulation of another gradient into the parameter."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func in (_ADD_INTO, _ADD) and isinstance(args[0], cls) and isinstance(args[1], Tensor):
            return args[0]._accumulate(args[1], into=func is _ADD_INTO)
        return func(*map(_values, args), **{key: _values(item) for key, item in (kwargs or {}).items()})

    def _accumulate(self, more: Tensor, into: bool) -> Tensor:
        """Add the gradient of another backward. `into`: the addition is in place."""
        param = self._param()
        giver = self._giver()
        if self.is_used and self.held is None:
            # The sum is unknown, and most loops drop it: the backward of another model has passed through this one, and
            # zero_grad() follows. `step` and reads raise an error if it does not.
            return self
        if self.held is None and giver is not None and param is not None and giver.expects_more(param):
            more = more if self.arrived is None else self.arrived + more
            self.arrived = more
            return self if into else more
        if self.is_used and giver is not None:
            giver.note_added()
        value = self.value()
        return value.add_(more) if into else value + more


def _values(value: object) -> object:
    if isinstance(value, TakenGradient):
        return value.value()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named_tuple: Callable[..., object] = type(value)
        return named_tuple(*map(_values, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_values, value))
    if isinstance(value, dict):
        return {key: _values(item) for key, item in value.items()}
    return value
