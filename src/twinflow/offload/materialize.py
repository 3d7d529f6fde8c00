"""Building a model module by module, so that no second copy of it is ever in memory.

A model made under `torch.device("meta")` has shapes and no memory. Here each module in turn gets its tensors, is
initialised in fp32 and cast: beyond the model itself, only one module's fp32 values exist at a time.

What makes this exact:
- Children come before their parents, in registration order: as their constructors ran, and as `nn.Module.apply` goes.
  A parent may still change its children (nn.MultiheadAttention zeroes its out_proj's bias), in their final dtype.
- Fresh tensors are poisoned. What an initialiser leaves untouched is found and named, never trained on.
- What was real before, or was made for another owner of a tied weight, is behind a meta stand-in while an initialiser
  runs: it cannot be initialised twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from twinflow.errors import invalid_value

Init = Callable[[nn.Module], None]
Each = Callable[[nn.Module, list[nn.Parameter]], None]


def build(
    model: nn.Module | Callable[[], nn.Module],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    init: Init | None = None,
    each: Each | None = None,
) -> nn.Module:
    """A model with memory, from a module on the meta device or from a function that makes one (`lambda: GPT(config)`).

    The function runs under `torch.device("meta")`; the rest is `materialize`.
    """
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            made = model()
        if not isinstance(made, nn.Module):
            raise invalid_value("model", made, "an nn.Module, or a function that returns one")
        model = made
    return materialize(model, device, dtype, init, each)


@torch.no_grad()
def materialize(
    model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    init: Init | None = None,
    each: Each | None = None,
) -> nn.Module:
    """Give every tensor of `model` that is on the meta device memory on `device`, and a value; returns `model`.

    A module is initialised by `init(module)`; without it by the `_init_weights(module)` of the model around it, as
    Hugging Face's have it; else by its own `reset_parameters()`. What the first two leave out, `reset_parameters`
    fills before they run again, as in a constructor. A tensor that nothing fills is a ValueError that names it.

    `dtype` is the one of floating parameters; they are initialised in fp32 and then cast. Buffers keep theirs, and
    tensors that are real already stay as they are. `each(module, params)` is called once a module's own new parameters
    are final: at once where no module around it has an initialiser of its own, else after the outermost of those.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise invalid_value("device", str(device), "a device with memory, like 'cpu' or 'cuda'")
    if dtype is not None and not dtype.is_floating_point:
        raise invalid_value("dtype", dtype, "a floating dtype, like torch.bfloat16")
    real = {tensor for module in model.modules() for tensor in _own(module) if not tensor.is_meta}
    _Builder(device, dtype, init, each, real).visit(model, "", None, reached=False)
    _check_attributes(model)
    return model


@dataclass
class _Fresh:
    """A tensor that was just made for a module."""

    table: dict[str, Tensor | None]  # the module's `_parameters` or `_buffers`
    name: str
    meta: Tensor  # what it stands for

    @property
    def tensor(self) -> Tensor:
        """What is there now; an initialiser may have put another one in its place."""
        tensor = self.table[self.name]
        assert tensor is not None
        return tensor


@dataclass
class _Builder:
    """One walk over a model."""

    device: torch.device
    dtype: torch.dtype | None
    init: Init | None
    each: Each | None
    real: set[Tensor]  # those that had memory before
    made: dict[Tensor, Tensor] = field(default_factory=dict)  # by their meta tensor, so that ties stay ties
    finished: list[tuple[nn.Module, list[nn.Parameter]]] = field(default_factory=list)  # not yet given to `each`
    seen: set[nn.Module] = field(default_factory=set)

    def visit(self, module: nn.Module, path: str, around: Init | None, reached: bool) -> bool:
        """Build the children, then the module itself; whether anything was made here.

        `around` is the `_init_weights` in force, and `reached` says that an initialiser further out runs after this.
        """
        if module in self.seen:
            return False
        self.seen.add(module)
        around = _init_weights(module) or around
        runs = self._has_init(module, around)
        fresh_below = [
            self.visit(child, f"{path}.{name}" if path else name, around, reached or runs)
            for name, child in module.named_children()
        ]
        label = f"{path or 'the model'} ({type(module).__name__})"
        fresh = self._make(module, label)
        if fresh or (any(fresh_below) and runs):
            self._initialise(module, label, fresh, around)
        self._finish(module, fresh, reached)
        return bool(fresh) or any(fresh_below)

    def _has_init(self, module: nn.Module, around: Init | None) -> bool:
        """Whether an initialiser will run on this module, which could change the modules inside it too."""
        if self.init is not None:
            return any(tensor.is_meta for tensor in _own(module))
        return around is not None or _reset(module) is not None

    def _make(self, module: nn.Module, label: str) -> list[_Fresh]:
        """Memory for the module's own meta tensors, poisoned; a tensor made for another owner is shared."""
        fresh = []
        for table in _tables(module):
            for name, meta in table.items():
                if meta is None or not meta.is_meta:
                    continue
                if is_lazy(meta):
                    raise invalid_value(
                        f"{label}: shape of {name!r}", "unknown", "known shapes", "Give the lazy module sizes"
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
        tensor.__dict__.update(meta.__dict__)  # marks that libraries leave on their parameters
        return tensor

    def _initialise(self, module: nn.Module, label: str, fresh: list[_Fresh], around: Init | None) -> None:
        own = {entry.tensor for entry in fresh}
        shared = {tensor for tensor in _own(module) if tensor not in own}
        first, reset = self.init or around, _reset(module)
        if first is not None:
            with _hidden(module, self.real, shared):
                first(module)
            if reset is not None and any(_is_poisoned(entry.tensor) for entry in fresh):
                # `first` has been on the modules inside already; a reset must not undo that.
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

    def _finish(self, module: nn.Module, fresh: list[_Fresh], reached: bool) -> None:
        """Cast what was made, and hand over what no initialiser can reach any more."""
        params = []
        for entry in fresh:
            tensor = entry.tensor
            self.made[entry.meta] = tensor
            if isinstance(tensor, nn.Parameter):
                if self.dtype is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.to(self.dtype)  # the same parameter: as nn.Module.to does it
                params.append(tensor)
        if params:
            self.finished.append((module, params))
        if not reached and self.each is not None:
            finished, self.finished = self.finished, []
            for owner, its in finished:
                self.each(owner, its)


def _init_weights(module: nn.Module) -> Init | None:
    """Hugging Face's `_init_weights(module)`, where this is a model that has it."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    params = inspect.signature(method).parameters.values()
    required = [p for p in params if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return method if len(required) == 1 else None  # others by this name initialise themselves


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
    """Put meta stand-ins in the place of these tensors, in `module` and below."""
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
    """Fill with what no initialiser leaves: NaN, or bytes of 0xA5 where the dtype has no NaN to calculate with."""
    if _has_nan(tensor.dtype):
        tensor.fill_(float("nan"))
    else:
        bits, poison = _bits(tensor)
        bits.fill_(poison)


def _is_poisoned(tensor: Tensor) -> bool:
    """Whether any element is still NaN; without NaN, whether all elements are as they were."""
    if tensor.is_meta or tensor.numel() == 0:
        return tensor.is_meta
    if _has_nan(tensor.dtype):
        # The sum needs no memory; it is NaN for inf - inf too, hence the second look.
        return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
    bits, poison = _bits(tensor)
    return bool((bits == poison).all())


def _has_nan(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor as integers, and 0xA5 repeated as one of them."""
    size = tensor.dtype.itemsize
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.view(integers), int.from_bytes(b"\xa5" * size, "little", signed=size > 1)


def _not_filled(label: str, entry: _Fresh, has_init: bool) -> ValueError:
    kind = "parameter" if isinstance(entry.meta, nn.Parameter) else "buffer"
    why = "its initialiser leaves it untouched" if has_init else "the module has no reset_parameters()"
    remedy = f"Pass init=, a function that fills it, give {label} a reset_parameters(), or make it on a real device."
    return ValueError(f"{label}: {kind} {entry.name!r} is on the meta device and {why}. {remedy}")


def _check_attributes(model: nn.Module) -> None:
    """Tensors that are plain attributes belong to nobody: none may stay on the meta device."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                place = f"{path or 'the model'} ({type(module).__name__}): attribute {name!r}"
                raise ValueError(f"{place} is on the meta device and cannot be rebuilt. Register it as a buffer.")
