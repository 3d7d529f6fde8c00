# SPDX-License-Identifier: Apache-2.0
"""Makes reads and writes of weights outside of a forward wait for the last update (the weight guard).

`step()` returns while updates still run. The forward of a block waits for the weights of the block (hooks.py). This
module handles all other code that uses a weight. Between a step and the next forward the class of a parameter is
replaced by a guarded subclass. The `__torch_function__` of this subclass waits for the weight, runs the operation with
the ordinary class, and then sets the guarded class again. torch changes classes in the same way when it materialises an
UninitializedParameter. A change of class takes 0.25 us.

Effect of each access:

    shape, dtype, grad, ...     does not wait, because it does not read values (metadata.py). A read of `grad` is noted
    p.data                      waits and notes the alias, because writes through `.data` do not change `p._version`
    p.data = x                  waits; the runtime finds the new memory before the next update
    any other operation         waits, then runs; torch counts in-place writes in `p._version`

A weight that lives on the host has no values on the device outside of its block. A read gets a copy on the device,
which autograd connects with the parameter. Written values are stored in the optimizer's state.

A weight of which this rank has only some rows can have a whole tensor for some time (`show_whole`). All operations then
use the whole tensor.

These accesses are not intercepted: aliases that were made before `step()`, memory that is read by address (C++
extensions, NumPy views), `torch.tensor(p)`, and `torch.func.grad` of a function whose argument is the parameter itself.
Call `optimizer.wait()` before such an access.

Threads: any thread may read a weight. The reading thread waits on the host until the copy to the device has ended, so
every stream sees the new values. Only the thread that runs the model changes classes, except during an access. There is
no lock.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from twinflow.errors import incompatible
from twinflow.offload.metadata import GRAD_ACCESS, METADATA

_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Setting the class this way is faster, because it does not call the Python `__setattr__` of a guarded class.
_SET_CLASS = object.__dict__["__class__"].__set__
_GET_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_PASSING = METADATA | GRAD_ACCESS
_LAYOUT = {Tensor.stride, Tensor.is_contiguous}
# These look up a parameter in an autograd graph and do not read its values.
_OF_GRAPHS = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.backward])
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(["__setitem__", *(f"__i{name}__" for name in _OPERATORS)])
_Result = TypeVar("_Result")
plain = torch._C.DisableTorchFunctionSubclass  # a context in which operations on guarded weights do not wait


class Owner(Protocol):
    """The methods of `Runtime` that guarded weights call. runtime.py describes them."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def is_forgotten(self) -> bool: ...
    def close(self) -> None: ...
    def settle(self, tensor: Tensor) -> None: ...
    def note_alias(self, tensor: Tensor, alias: Tensor) -> None: ...
    def lives_on_host(self, tensor: Tensor) -> bool: ...
    def check_fork(self, tensor: Tensor) -> None: ...
    def fetch_copy(self, tensor: Tensor) -> Tensor: ...
    def store(self, tensor: Tensor, values: Tensor, *, is_on_all_ranks: bool = False) -> None: ...
    def note_copy(self, tensor: Tensor, copied: Tensor, is_counted: bool) -> None: ...
    def note_gradient_read(self, tensor: Tensor) -> None: ...
    def note_filled(self, tensor: Tensor, is_filled: bool) -> None: ...


# A weak reference to the owner of each parameter, for all optimizers of the process. An attribute of the parameter
# would be saved with it.
_OWNERS: MutableMapping[Tensor, weakref.ref[Owner]] = WeakTensorKeyDictionary()
_WHOLE: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()  # whole tensors of partitioned parameters
_GUARDED: dict[type, type] = {}  # from a class of parameters to its guarded subclass
_ORDINARY: dict[type, type] = {}  # from a guarded subclass to the class of parameters


class OnAllRanks(Tensor):
    """Values that all ranks copy into a weight at the same time, each of them its part."""

    @classmethod
    def of(cls, values: Tensor) -> Tensor:
        return values.detach().as_subclass(cls)  # type: ignore[no-any-return,unused-ignore]


def check_free(tensors: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ValueError if another TwinOptimizer has one of these parameters. If that optimizer was freed, close its
    runtime instead.
    """
    for name, tensor in tensors:
        owner = owner_of(tensor)
        if owner is None:
            continue
        if owner.is_forgotten:
            owner.close()
        else:
            raise incompatible(
                "A second TwinOptimizer",
                f"the parameter {name}",
                f"{name} already has a TwinOptimizer",
                "Call close() of that optimizer before you build another one.",
            )


def claim(tensors: Iterable[Tensor], owner: Owner) -> None:
    for tensor in tensors:
        _OWNERS[tensor] = weakref.ref(owner)


def release(tensors: Iterable[Tensor]) -> None:
    """Set the ordinary class of these parameters and remove their owner."""
    for tensor in tensors:
        _OWNERS.pop(tensor, None)
        uncover_one(tensor)


def owner_of(tensor: Tensor) -> Owner | None:
    """The runtime of a parameter, unless it is closed."""
    reference = _OWNERS.get(tensor)
    owner = reference() if reference is not None else None
    return owner if owner is not None and not owner.is_closed else None


def _leave(tensor: Tensor) -> None:
    """Set the ordinary class of a parameter without an owner.

    Raises RuntimeError if its weights are on the host of the process from which this one was forked.
    """
    reference = _OWNERS.get(tensor)
    closed = reference() if reference is not None else None
    if closed is not None:
        closed.check_fork(tensor)
    uncover_one(tensor)


# Classes.


def cover(tensors: Iterable[Tensor]) -> None:
    """Set the guarded class of these parameters."""
    for tensor in tensors:
        kind = type(tensor)
        if kind not in _ORDINARY:
            _SET_CLASS(tensor, _GUARDED.get(kind) or _guarded(kind))


def uncover(tensors: Iterable[Tensor]) -> None:
    """Set the ordinary class of these parameters. The caller has waited for their weights."""
    for tensor in tensors:
        kind = _ORDINARY.get(type(tensor))
        if kind is not None and not (_WHOLE and tensor in _WHOLE):
            _SET_CLASS(tensor, kind)


def show_whole(tensor: Tensor, whole: Tensor) -> None:
    """Let all operations on a partitioned parameter use the tensor `whole`, until `hide_whole`."""
    _WHOLE[tensor] = whole
    cover((tensor,))


def hide_whole(tensor: Tensor) -> None:
    _WHOLE.pop(tensor, None)
    if owner_of(tensor) is None:
        uncover_one(tensor)


def whole_of(tensor: Tensor) -> Tensor | None:
    """The whole tensor of a parameter between `show_whole` and `hide_whole`."""
    return _WHOLE.get(tensor)


def uncover_one(tensor: Tensor) -> None:
    uncover((tensor,))


def _guarded(kind: type) -> type:
    if kind not in _GUARDED:
        methods = {
            "__torch_function__": classmethod(_intercept),
            "__deepcopy__": _deepcopy,
            "__reduce_ex__": _reduce,
            "__setattr__": _setattr,
            "__module__": __name__,
        }
        made = type(kind)(f"Guarded{kind.__name__}", (kind,), methods)
        _GUARDED[kind] = made
        _ORDINARY[made] = kind
    return _GUARDED[kind]


def _deepcopy(self: Tensor, memo: dict[int, object]) -> Tensor:
    """Copy the parameter. The copy has the ordinary class."""
    return _ordinarily(self, lambda it: copy.deepcopy(it, memo))


def _reduce(self: Tensor, protocol: int) -> object:
    """Pickle the parameter. The pickle holds the ordinary class."""
    return _ordinarily(self, lambda it: it.__reduce_ex__(protocol))  # type: ignore[no-untyped-call]


def _setattr(self: Tensor, name: str, value: object) -> None:
    """Set an attribute. If it is the mark that `nn.Parameter(p)` sets on its result, set the ordinary class too.

    `nn.Parameter(p)` needs p.detach() to return a tensor of p's class, so the result has the guarded class until here.
    """
    object.__setattr__(self, name, value)
    if name == "_is_param" and owner_of(self) is None:
        uncover_one(self)


def _ordinarily(tensor: Tensor, use: Callable[[Tensor], _Result]) -> _Result:
    """Run `use`, which does not call `__torch_function__`, with an ordinary parameter (a copy for one on the host)."""
    owner = owner_of(tensor)
    kind = type(tensor)
    if tensor in _WHOLE:
        return use(_WHOLE[tensor])
    if owner is not None and owner.lives_on_host(tensor):
        with torch.no_grad():
            values = owner.fetch_copy(tensor)
        return use(nn.Parameter(values, tensor.requires_grad))
    if owner is not None:
        owner.settle(tensor)
        uncover_one(tensor)
    else:
        _leave(tensor)
    try:
        return use(tensor)
    finally:
        if owner is not None:
            tensor.__class__ = kind


# Operations.


def _intercept(
    cls: type,
    func: Callable[..., object],
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    kwargs = kwargs or {}
    if func in _PASSING:
        owner = owner_of(_first(args)) if func == _GET_GRAD else None
        if owner is not None:
            owner.note_gradient_read(_first(args))
        with plain():
            if func in _LAYOUT and _lives_away(_first(args)):  # the expanded NaN on the device has another layout
                return func(torch.empty(_first(args).shape, device="meta"), *args[1:], **kwargs)
            return func(*args, **kwargs)
    return _operate(func, args, kwargs)


@torch._disable_dynamo  # type: ignore[attr-defined]  # does not import Dynamo, which takes seconds, before a call
def _operate(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    wholes = {id(it): _WHOLE[it] for it in _guarded_in((args, kwargs)) if it in _WHOLE} if _WHOLE else {}
    if wholes:
        return _operate_whole(func, args, kwargs, wholes)
    for tensor in _guarded_in((args, kwargs)):
        if owner_of(tensor) is None:  # made by nn.Parameter(p) from a guarded p, or its optimizer was freed or closed
            _leave(tensor)
    guarded = {id(tensor): tensor for tensor in _guarded_in((args, kwargs))}
    if func in _OF_GRAPHS:
        uncover(guarded.values())
        try:
            return func(*args, **kwargs)
        finally:
            cover(guarded.values())
    away = [tensor for tensor in guarded.values() if _lives_away(tensor)]
    if away:
        return _operate_away(func, args, kwargs, away)
    owners = []
    for tensor in guarded.values():
        owner = owner_of(tensor)
        if owner is not None:
            owner.settle(tensor)
            owners.append((tensor, owner))
    uncover(guarded.values())
    try:
        result = func(*args, **kwargs)
    finally:
        # A parameter whose optimizer was closed keeps its ordinary class.
        cover(tensor for tensor, owner in owners if not owner.is_closed)
    if func == _GET_DATA and owners:
        assert isinstance(result, Tensor)
        owners[0][1].note_alias(owners[0][0], result)
    elif func is Tensor.detach and owners and is_called_by_parameter():
        assert isinstance(result, Tensor)
        result.__class__ = type(owners[0][0])  # nn.Parameter(p) needs a tensor of p's class
    return result


def _operate_whole(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], wholes: dict[int, Tensor]
) -> object:
    """Run an operation on the whole tensors of partitioned parameters."""
    if func == _SET_DATA and id(args[0]) in wholes:
        with torch.no_grad():
            wholes[id(args[0])].copy_(wholes.get(id(args[1]), _first(args[1:])))
        return None
    result = func(
        *(_replaced(item, wholes) for item in args), **{key: _replaced(item, wholes) for key, item in kwargs.items()}
    )
    # an in-place operation returns the parameter
    return next((it for it in _guarded_in((args, kwargs)) if wholes.get(id(it)) is result), result)


def is_called_by_parameter() -> bool:
    """Whether a function is called by `nn.Parameter(tensor)`."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):  # between the two are frames of this module and of Dynamo
        if frame is None:
            return False
        if frame.f_code is nn.Parameter.__new__.__code__:
            return True
        frame = frame.f_back
    return False


def _operate_away(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], away: list[Tensor]
) -> object:
    """Run an operation on copies of weights that live on the host, and store the copies that it has written to."""
    if func == _SET_DATA and _lives_away(_first(args)):
        param, given = _first(args), _first(args[1:])
        if given is not param:  # model.to(...) with the current device and dtype assigns the parameter itself
            _need(param).store(param, _need(given).fetch_copy(given) if _lives_away(given) else given)
        return None
    if func is Tensor.copy_ and _lives_away(_first(args)) and isinstance(args[1], OnAllRanks):
        _need(_first(args)).store(_first(args), args[1].as_subclass(Tensor), is_on_all_ranks=True)
        return args[0]
    copies: dict[int, Tensor] = {}
    for tensor in away:
        with plain():
            values = _need(tensor).fetch_copy(tensor)
            if torch.is_grad_enabled() and tensor.requires_grad and not _writes(func):
                values = _Connected.apply(tensor, values)  # type: ignore[no-untyped-call]
        copies[id(tensor)] = values
    if func == _GET_DATA:  # `detach` and not `.data`, so that writes to the alias change the version of the copy
        alias = copies[id(args[0])].detach()
        # The owner gets another tensor, so that it can count the users of the memory.
        _need(_first(args)).note_copy(_first(args), alias.detach(), is_counted=False)
        return alias
    if func is Tensor.detach and is_called_by_parameter():  # nn.Parameter(p) needs a tensor of p's class
        alias = copies[id(args[0])].detach()
        alias.__class__ = type(_first(args))
        return alias
    versions = {key: values._version for key, values in copies.items()}
    result = func(
        *(_replaced(item, copies) for item in args), **{key: _replaced(item, copies) for key, item in kwargs.items()}
    )
    for tensor in away:
        values = copies[id(tensor)]
        owner = _need(tensor)
        if values._version != versions[id(tensor)]:
            owner.store(tensor, values)
        if any(_shares_memory(found, values) for found in tensors_in(result)):
            owner.note_copy(tensor, values.detach(), is_counted=True)
    if any(result is values for values in copies.values()):  # an in-place operation returns the parameter
        return next(tensor for tensor in away if copies[id(tensor)] is result)
    return result


class _Connected(torch.autograd.Function):
    """Connects a copy of a weight with the parameter: the gradient of the copy goes to the parameter."""

    @staticmethod
    def forward(ctx: object, param: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _writes(func: object) -> bool:
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _first(args: Sequence[object]) -> Tensor:
    tensor = args[0]
    assert isinstance(tensor, Tensor)
    return tensor


def _lives_away(tensor: Tensor) -> bool:
    owner = owner_of(tensor)
    return owner is not None and owner.lives_on_host(tensor)


def _need(tensor: Tensor) -> Owner:
    owner = owner_of(tensor)
    assert owner is not None
    return owner


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    if a is b or a.layout != torch.strided:
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _guarded_in(value: object) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(value) if type(tensor) in _ORDINARY)


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _replaced(value: object, copies: dict[int, Tensor]) -> object:
    if isinstance(value, Tensor):
        return copies.get(id(value), value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named_tuple: Callable[..., object] = type(value)
        return named_tuple(*(_replaced(item, copies) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(item, copies) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, copies) for key, item in value.items()}
    return value
