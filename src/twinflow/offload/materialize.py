# SPDX-License-Identifier: Apache-2.0
"""Gives memory and initial values to a model on the meta device, module by module, without a second copy of the model.

A model that is built under `torch.device("meta")` has shapes and no memory. Here one module after the other gets its
tensors, is initialised in fp32 and is cast to its dtype. Only one module at a time has fp32 values beside the model.

These rules make the initial values correct:
- Children are initialised before their parents, in registration order. Constructors and `nn.Module.apply` use the same
  order. A parent may then change its children, which have their final dtype by then (nn.MultiheadAttention sets the
  bias of its out_proj to zero).
- New tensors are filled with NaN (integers: a rare value), so that a tensor that no initialiser fills gives an error.
- While an initialiser runs, meta tensors replace two kinds of tensors, so that they are not initialised again: tensors
  that had memory before, and tied weights that another module has already initialised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from twinflow.errors import invalid_value

Init = Callable[[nn.Module], None]
Home = Callable[[Tensor], Tensor]  # moves values to the place where they stay; returns those unchanged that are there


def build(
    model: nn.Module | Callable[[], nn.Module],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    init: Init | None = None,
    home: torch.device | Home | None = None,
    stays: Collection[Tensor] = (),
) -> nn.Module:
    """Return a model with memory. `model`: a module on the meta device, or a function such as `lambda: GPT(config)`.

    The function is called under `torch.device("meta")`. The other arguments are those of `materialize`.
    """
    return materialize(on_meta(model), device, dtype, init, home, stays)


def on_meta(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the module, or call the function that builds it under `torch.device("meta")`."""
    if isinstance(model, nn.Module):
        return model
    check_maker(model)
    with torch.device("meta"):
        made = model()
    if not isinstance(made, nn.Module):
        raise invalid_value("The result of the function model()", made, "an nn.Module")
    return made


def check_maker(model: object) -> None:
    """Raises ValueError unless `model` can be called without arguments."""
    expected = "an nn.Module, or a function without arguments that returns one"
    if not callable(model):
        raise invalid_value("model", model, expected, "Build the model, and pass it.")
    try:
        inspect.signature(model).bind()
    except TypeError:
        name = getattr(model, "__name__", type(model).__name__)
        raise invalid_value("model", model, expected, f"Pass {name}(...), or lambda: {name}(...).") from None
    except ValueError:  # some functions in C have no signature
        return


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    init: Init | None = None,
    home: torch.device | Home | None = None,
    stays: Collection[Tensor] = (),
) -> nn.Module:
    """Allocate and initialise on `device` every tensor of `model` that is on the meta device. Returns `model`.

    A module is initialised by `init(module)` if `init` is given. Otherwise it is initialised by the method
    `_init_weights(module)` of the enclosing model, which Hugging Face models have. If there is none, the module's own
    `reset_parameters()` is called. If one of the first two does not fill all tensors of a module, `reset_parameters()`
    is called and then the first initialiser again, as in a constructor. Raises ValueError for a tensor that no
    initialiser fills.

    `dtype` is the dtype of floating-point parameters. They are initialised in fp32 and then cast. Buffers keep their
    dtype. Tensors that are not on the meta device do not change.

    With `home`, parameters are initialised on `device` and then move to the device `home`, or to where the function
    `home` moves their values, so that `device` never has all of them. The members of the outermost ModuleLists and
    Sequentials move one after the other, when they are complete, and the other parameters at the end. If the
    initialiser of an enclosing module changes parameters that have moved, it computes their values there. `stays`:
    parameters (on the meta device) that do not move.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise invalid_value("device", str(device), "a device with memory, such as 'cpu' or 'cuda'")
    if dtype is not None and not dtype.is_floating_point:
        raise invalid_value("dtype", dtype, "a floating-point dtype, such as torch.bfloat16")
    real = {tensor for module in model.modules() for tensor in _own(module) if not tensor.is_meta}
    builder = _Builder(device, dtype, init, home, real, stays)
    builder.visit(model, "", None, is_in_list=False)
    builder.bring_home(model)
    _check_attributes(model)
    return model


@dataclass
class _Fresh:
    """A tensor that was just allocated for a module."""

    table: dict[str, Tensor | None]  # the module's `_parameters` or `_buffers`
    name: str
    meta: Tensor  # the meta tensor that it replaces

    @property
    def tensor(self) -> Tensor:
        """The tensor that the module has under this name now. An initialiser may have replaced the allocated one."""
        tensor = self.table[self.name]
        assert tensor is not None
        return tensor


@dataclass
class _Builder:
    """Materialises all modules of one model."""

    device: torch.device
    dtype: torch.dtype | None
    init: Init | None
    home: torch.device | Home | None
    real: set[Tensor]  # tensors that had memory before
    stays: Collection[Tensor]  # meta tensors that do not move to `home`
    made: dict[Tensor, Tensor] = field(default_factory=dict)  # new tensors by their meta tensor; tied weights stay tied
    seen: set[nn.Module] = field(default_factory=set)

    def visit(self, module: nn.Module, path: str, around: Init | None, is_in_list: bool) -> bool:
        """Build the children, then the module itself. Returns whether at least one tensor was allocated.

        `around`: the `_init_weights` of the nearest enclosing model that has one. `is_in_list`: the module is inside a
        member of a ModuleList or Sequential.
        """
        if module in self.seen:
            return False
        self.seen.add(module)
        around = _init_weights(module) or around
        runs = self._has_init(module, around)
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and not is_in_list
        fresh_below = []
        for name, child in module.named_children():
            fresh_below.append(self.visit(child, f"{path}.{name}" if path else name, around, is_in_list or is_list))
            if is_list:
                self.bring_home(child)
        label = f"{path or 'the model'} ({type(module).__name__})"
        fresh = self._make(module, label)
        if fresh or (any(fresh_below) and runs):
            self._initialise(module, label, fresh, around)
        self._cast(fresh)
        return bool(fresh) or any(fresh_below)

    def _has_init(self, module: nn.Module, around: Init | None) -> bool:
        """Whether an initialiser will run on this module. It could also change the modules inside."""
        if self.init is not None:
            return any(tensor.is_meta for tensor in _own(module))
        return around is not None or _reset(module) is not None

    def _make(self, module: nn.Module, label: str) -> list[_Fresh]:
        """Allocate the module's own meta tensors and fill them with NaN. Tied tensors that exist already are reused."""
        fresh = []
        for table in _tables(module):
            for name, meta in table.items():
                if meta is None or not meta.is_meta:
                    continue
                if is_lazy(meta):
                    raise ValueError(
                        f"{label}: the shape of {name!r} is not known, because the module is lazy, but must be known "
                        "before the first forward. Use a module that is not lazy, such as nn.Linear instead of "
                        "nn.LazyLinear."
                    )
                if meta not in self.made:
                    self.made[meta] = self._empty(meta)
                    fresh.append(_Fresh(table, name, meta))
                table[name] = self.made[meta]
        return fresh

    def _empty(self, meta: Tensor) -> Tensor:
        is_param = isinstance(meta, nn.Parameter)
        wide = is_param and meta.is_floating_point() and self.dtype is not None
        tensor = torch.empty_like(meta, device=self.device, dtype=torch.float32 if wide else meta.dtype)
        _poison(tensor)
        if is_param:
            tensor = nn.Parameter(tensor, meta.requires_grad)
        tensor.__dict__.update(meta.__dict__)  # attributes that libraries set on their parameters
        return tensor

    def _initialise(self, module: nn.Module, label: str, fresh: list[_Fresh], around: Init | None) -> None:
        own = {entry.tensor for entry in fresh}
        shared = {tensor for tensor in _own(module) if tensor not in own}
        first, reset = self.init or around, _reset(module)
        if first is not None:
            with _hidden(module, self.real, shared):
                first(module)
            if reset is not None and any(_is_poisoned(entry.tensor) for entry in fresh):
                # `first` has already initialised the modules inside, and `reset` must not change them.
                inside = {tensor for child in module.modules() for tensor in _own(child)} - own
                with _hidden(module, inside):
                    reset()
                with _hidden(module, self.real, shared):
                    first(module)
        elif reset is not None:
            with _hidden(module, self.real, shared):
                reset()
        for entry in fresh:
            if _is_poisoned(entry.tensor):
                raise _not_filled(label, entry, has_init=first is not None or reset is not None)

    def _cast(self, fresh: list[_Fresh]) -> None:
        """Cast new parameters to the dtype of the model."""
        for entry in fresh:
            tensor = entry.tensor
            self.made[entry.meta] = tensor
            if isinstance(tensor, nn.Parameter) and self.dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(self.dtype)  # keeps the parameter object, as nn.Module.to does

    def bring_home(self, module: nn.Module) -> None:
        """Move the new parameters of a module, and of the modules inside, to `home`."""
        if self.home is None:
            return
        stays = {self.made[meta] for meta in self.stays if meta in self.made}
        for param in module.parameters():
            if param not in self.real and param not in stays:
                param.data = self.home(param.data) if callable(self.home) else param.data.to(self.home)


def _init_weights(module: nn.Module) -> Init | None:
    """The method `_init_weights(module)` of a Hugging Face model; None if `module` has no such method."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    params = inspect.signature(method).parameters.values()
    required = [p for p in params if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return method if len(required) == 1 else None  # methods of this name without an argument initialise themselves


def _reset(module: nn.Module) -> Callable[[], None] | None:
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def _tables(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    return module._parameters, module._buffers  # type: ignore[return-value]  # a dict of parameters is one of tensors


def _own(module: nn.Module) -> list[Tensor]:
    """The tensors registered in this module itself."""
    return [tensor for table in _tables(module) for tensor in table.values() if tensor is not None]


@contextmanager
def _hidden(module: nn.Module, *tensors: set[Tensor]) -> Iterator[None]:
    """Replace these tensors by meta tensors inside the context, in `module` and all modules below it."""
    places = [
        (table, name, tensor)
        for inner in module.modules()
        for table in _tables(inner)
        for name, tensor in table.items()
        if tensor is not None and not tensor.is_meta and any(tensor in group for group in tensors)
    ]
    for table, name, tensor in places:
        meta = torch.empty_like(tensor, device="meta")
        table[name] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    try:
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor


def _poison(tensor: Tensor) -> None:
    """Fill with values that no initialiser sets: NaN, or bytes of 0xA5 for integers and 8-bit floats."""
    if _has_nan(tensor.dtype):
        tensor.fill_(float("nan"))
    else:
        bits, poison = _bits(tensor)
        bits.fill_(poison)


def _is_poisoned(tensor: Tensor) -> bool:
    """Whether at least one element is NaN. For dtypes without NaN: whether all elements are as `_poison` set them."""
    if tensor.is_meta or tensor.numel() == 0:
        return tensor.is_meta
    if _has_nan(tensor.dtype):
        # The sum is a fast test without temporary memory. It is also NaN for inf - inf, so `isnan` checks again.
        return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
    bits, poison = _bits(tensor)
    return bool((bits == poison).all())


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor viewed as integers, and the integer whose bytes are all 0xA5."""
    size = tensor.dtype.itemsize
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.view(integers), int.from_bytes(b"\xa5" * size, "little", signed=size > 1)


def _not_filled(label: str, entry: _Fresh, has_init: bool) -> ValueError:
    kind = "parameter" if isinstance(entry.meta, nn.Parameter) else "buffer"
    why = f"the module's initialiser does not fill this {kind}" if has_init else "the module has no reset_parameters()"
    remedy = (
        f"Pass a function that fills the {kind} as init=, give {label} a method reset_parameters(), or create the "
        f"{kind} on a device with memory."
    )
    return ValueError(f"{label}: {kind} {entry.name!r} is on the meta device and {why}. {remedy}")


def _check_attributes(model: nn.Module) -> None:
    """Raise ValueError if a tensor on the meta device is a plain attribute, because such a tensor gets no memory."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                place = f"{path or 'the model'} ({type(module).__name__}): attribute {name!r}"
                raise ValueError(
                    f"{place} is on the meta device, and only parameters and buffers get memory. "
                    "Register the tensor as a buffer with register_buffer()."
                )
