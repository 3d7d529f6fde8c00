"""What `.grad` holds once the runtime has taken a gradient.

The stand-in has no memory of its own. Whoever uses it gets the gradient: the runtime gives all gradients of the step
back into `.grad`, drops what it has begun, and `step()` then updates from `.grad` as torch does. Code that never looks
at `.grad` does not notice any of this.

A stand-in is in one of three conditions:

    taken     the runtime has the gradient; a use asks it to give all of them back
    held      the stand-in itself has the gradient; a use puts it into `.grad`, or a copy while an update reads it
    used      `step()` has used the gradient, and its memory serves others: a use raises, unless it overwrites all

`__torch_function__` sees what Python code does. `__torch_dispatch__` sees what C++ does, which is autograd adding the
gradient of another backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from twinflow.offload.metadata import GRAD_ACCESS, METADATA

_ADD_INTO = torch.ops.aten.add_.Tensor
_ADD = torch.ops.aten.add.Tensor
_OVERWRITING = frozenset([Tensor.fill_, Tensor.zero_, Tensor.copy_, Tensor.normal_, Tensor.uniform_])
_PASSING = METADATA | GRAD_ACCESS | {Tensor.dim, Tensor.size}


class Giver(Protocol):
    """Who has taken gradients."""

    def give_back(self, tensor: Tensor) -> None:
        """Put the gradients of this step back into `.grad`, that of `tensor` among them; raise where that is too
        late."""
        ...

    def expects_more(self, tensor: Tensor) -> bool:
        """Whether another gradient of this parameter belongs to the ones that were taken."""
        ...


class TakenGradient(Tensor):
    """Stands for a parameter's gradient."""

    _param: weakref.ref[Tensor]
    _giver: weakref.ref[Giver]
    held: Tensor | None  # the gradient, where it is held
    arrived: Tensor | None  # another gradient that autograd has added, to be taken next
    is_used: bool  # by `step()`
    is_lent: bool  # `held` is still read by the update: whoever writes needs a copy

    @staticmethod
    def __new__(cls, param: Tensor, giver: Giver) -> TakenGradient:
        """A stand-in for a gradient of `param`."""
        made: TakenGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
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
        """The gradient, which is in `.grad` from now on."""
        param = self._param()
        if self.held is None:
            giver = self._giver()
            if self.is_used or param is None or giver is None:
                raise RuntimeError(
                    "The gradient was used by step(), and its memory serves others now. Read .grad between backward() "
                    "and step(), or build the optimizer with early=False, which keeps gradients until zero_grad()."
                )
            giver.give_back(param)
            assert self.held is not None, "the runtime gives a gradient to its stand-in too"
        elif self.is_lent:
            self.held = self.held.clone()
            self.is_lent = False
        if param is not None and param.grad is self:
            param.grad = self.held
        return self.held

    def renew(self) -> None:
        """All values are about to be overwritten: those that `step()` has used need not be there."""
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
        """Whatever is done with it is done with the gradient."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # An operator of C++ comes here by way of a dispatch mode (a counter of operations, say): see below.
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
        """What autograd does with it, when it has another gradient for the parameter."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func in (_ADD_INTO, _ADD) and isinstance(args[0], cls) and isinstance(args[1], Tensor):
            return args[0]._accumulate(args[1], into=func is _ADD_INTO)
        return func(*map(_values, args), **{key: _values(item) for key, item in (kwargs or {}).items()})

    def _accumulate(self, more: Tensor, into: bool) -> Tensor:
        """Add the gradient of another backward; `into`: to this very tensor."""
        param = self._param()
        giver = self._giver()
        if self.is_used and self.held is None:
            raise RuntimeError(
                "backward() would add to gradients that step() has used. Call zero_grad() between step() and the next "
                "backward(), or build the optimizer with early=False to add to them as torch does."
            )
        if self.held is None and giver is not None and param is not None and giver.expects_more(param):
            more = more if self.arrived is None else self.arrived + more
            self.arrived = more
            return self if into else more
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
