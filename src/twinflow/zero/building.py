# SPDX-License-Identifier: Apache-2.0
"""Builds a model in parts (DeepSpeed's `zero.Init`), so that no rank ever has all of its weights.

Every module is built as usual, with the usual draws of random numbers. When the next module begins, the weights of the
one before are sent from the first rank to all ranks, and each rank keeps its rows (`torch.chunk` along the first
dimension, as `fully_shard` does). The parameter stays the same object with the same shape, dtype and strides, and its
storage is resized to 0 bytes: it is closed.

The class of a closed parameter is replaced by `ClosedParameter`. Its `__torch_function__` opens the parameter before
any operation that uses values: ranks gather their rows, and the parameter is whole until an operation opens the
parameters of another module. Code that changes weights later (`apply(init)`, tying, `load_state_dict`, `to`) therefore
works as on a whole model, and the result is that of the first rank.

A parameter is not closed while other tensors use its memory (a view, `state_dict()`, an autograd graph), because their
reads and writes cannot be intercepted. Ranks agree which parameters they close. They meet before each exchange, so that
code that runs on some ranks only gives an error instead of a hang (dist/meeting.py).

These accesses are not intercepted, and end the process if the parameter is closed, because its memory has no address:
`torch.tensor(p)`, `torch.Tensor(p)`, and `torch.func.grad` with respect to the parameter itself.

A model that a library loads from files (unread.py) has closed parameters too. Their rows are read from the files when
they are needed, and in one process a parameter that was opened stays open.

Parameters that stay whole: those of other classes than `nn.Parameter`, without dimensions or elements, not contiguous,
on the meta device, and of modules that were built without the context. `initialize` partitions them as usual.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group, alone, new_group
from twinflow.dist.meeting import Meeting
from twinflow.offload.metadata import GRAD_ACCESS, METADATA
from twinflow.offload.weight_guard import is_called_by_parameter, tensors_in
from twinflow.zero.unread import Unread, UnreadTensor, read

# `Module.to` calls the last one for each parameter.
_PASSING = METADATA | GRAD_ACCESS | {torch._has_compatible_shallow_copy_type}
_SIZES = frozenset([Tensor.dim, Tensor.size])
_VMAP = "torch._functorch"  # torch.vmap calls only the functions in `_SIZES` before it reads the values in C++
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_REASON = "each rank has rows of the weights of a model that is built in zero.Init"
_CLOSE, _KEEP, _GONE = "close", "keep", "gone"


@dataclass(eq=False)
class _Record:
    """A parameter of a model that is built in parts."""

    label: str  # class of its module, name there, and a number; the same on all ranks
    param: TensorWeakRef
    home: weakref.ref[nn.Module] | None  # the module that has registered it first; None for a copy
    site: Site
    rows: Tensor | Unread | None = None  # this rank's rows if the parameter is closed
    num_pins: int = 0  # blocks of code in which it must stay whole


_RECORDS: MutableMapping[Tensor, _Record] = WeakTensorKeyDictionary()


class ClosedParameter(nn.Parameter):
    """A parameter of which this rank has some rows. Operations that use its values make it an ordinary one first."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        is_size = func in _SIZES and not sys._getframe(1).f_globals.get("__name__", "").startswith(_VMAP)
        if func in _PASSING or is_size:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.to and _changes_nothing(args, kwargs):
            return args[0]
        if func is Tensor.cpu and isinstance(args[0], ClosedParameter) and args[0].device.type == "cpu":
            return args[0]
        if func == _SET_DATA and args[0] is args[1]:  # `Module.to` without a change
            return None
        open_all(one for one in tensors_in((args, kwargs)) if type(one) is ClosedParameter)
        result = func(*args, **kwargs)
        if func is Tensor.detach and is_called_by_parameter():
            assert isinstance(result, Tensor)
            result.__class__ = nn.Parameter  # nn.Parameter(p) needs a tensor of p's class
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        open_all([self])
        copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        open_all([self])
        found: str | tuple[object, ...] = nn.Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]
        return found


def _changes_nothing(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether `Tensor.to` returns the parameter itself."""
    param = args[0]
    flags = [item for item in args[1:] if isinstance(item, bool)]  # non_blocking, copy
    if not isinstance(param, ClosedParameter) or kwargs.get("copy") or len(flags) > 1:
        return False
    parse: Callable[..., tuple[object, object, bool, object]] = torch._C._nn._parse_to
    try:
        device, dtype, _, memory_format = parse(*args[1:], **kwargs)
    except (TypeError, RuntimeError):  # torch raises the error for these arguments
        return False
    # Accelerate calls the CPU cpu:0.
    is_here = device in (None, param.device) or (
        isinstance(device, torch.device) and device.type == param.device.type == "cpu"
    )
    return is_here and dtype in (None, param.dtype) and memory_format is None


@contextmanager
def _internal() -> Iterator[None]:
    """A context without autograd, and without the user's modes: `torch.device("meta")` would create meta tensors."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


class Site:
    """All models that the ranks of one process group build in parts. All ranks create it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._meeting = Meeting(group)
        self._open: list[_Record] = []  # whole parameters; the same list on all ranks
        self._count = 0  # of parameters so far
        self._depth = 0  # of nested contexts
        self._lock = threading.RLock()

    @property
    def world(self) -> int:
        return self._group.world

    @contextmanager
    def building(self) -> Iterator[None]:
        """A context in which modules are built in parts. After an exception, ranks do not meet."""
        self._depth += 1
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        begin, copy = nn.Module.__init__, nn.Parameter.__deepcopy__

        def begin_module(module: nn.Module, *args: object, **kwargs: object) -> None:
            self.close()
            begin(module, *args, **kwargs)

        def copy_param(param: nn.Parameter, memo: dict[int, object]) -> nn.Parameter:
            copied: nn.Parameter = copy(param, memo)  # type: ignore[no-untyped-call]
            self.adopt(copied, "a copy of a parameter", None)
            return copied

        def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None:
                self.adopt(param, f"{type(module).__name__}.{name}", module)

        hook = register_module_parameter_registration_hook(registered)
        nn.Module.__init__ = begin_module  # type: ignore[method-assign,assignment]
        nn.Parameter.__deepcopy__ = copy_param  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__init__, nn.Parameter.__deepcopy__ = begin, copy  # type: ignore[method-assign]
            hook.remove()
            self._depth -= 1
        self.close()

    def adopt(self, param: nn.Parameter, label: str, home: nn.Module | None) -> None:
        """Takes over a whole parameter, which is closed later. Parameters of other modules are closed now."""
        if type(param) is not nn.Parameter or not _can_close(param):
            return
        with self._lock, _internal():
            if param in _RECORDS:  # a tied weight
                return
            self.close([home])
            self._count += 1
            name = f"{label} (parameter {self._count})"
            record = _Record(name, TensorWeakRef(param), weakref.ref(home) if home is not None else None, self)
            _RECORDS[param] = record
            self._open.append(record)

    def open(self, records: Sequence[_Record]) -> None:
        """Makes closed parameters whole, and closes those of other modules."""
        with self._lock, _internal():
            self.close([record.home() for record in records if record.home is not None])
            labels = ", ".join(record.label for record in records)
            self._meeting.meet(f"An operation on the values of {labels}", _REASON)
            for record in records:
                param = record.param()
                assert param is not None and record.rows is not None
                param.__class__ = nn.Parameter
                if self._group.world == 1:
                    param.data = _values(record.rows)
                    record.rows = None
                    _RECORDS.pop(param, None)
                    continue
                param.untyped_storage().resize_(param.numel() * param.element_size())
                self.gather(_values(record.rows), param)
                record.rows = None
                self._open.append(record)

    def close_unread(self, tensor: UnreadTensor, label: str, home: nn.Module) -> nn.Parameter:
        """A closed parameter whose rows are read when they are needed. All ranks call it."""
        with self._lock, _internal():
            group = self._group
            param = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype), tensor.requires_grad)
            _empty(param, tensor.dtype, param.device)
            self._count += 1
            num = -(-param.shape[0] // group.world)
            start, stop = (min(rank * num, param.shape[0]) for rank in (group.rank, group.rank + 1))
            rows = Unread(tensor, start, stop, tensor.dtype, param.device)
            name = f"{label} (parameter {self._count})"
            _RECORDS[param] = _Record(name, TensorWeakRef(param), weakref.ref(home), self, rows)
            param.__class__ = ClosedParameter
        return param

    def gather(self, rows: Tensor, whole: Tensor) -> None:
        """Gathers the rows of all ranks into a contiguous tensor."""
        group = self._group
        size = -(-whole.shape[0] // group.world) * (whole.numel() // whole.shape[0])  # of each rank but the last ones
        is_even = size * group.world == whole.numel()
        flat = whole.detach().view(-1)
        padded = flat if is_even else torch.empty(size * group.world, dtype=whole.dtype, device=whole.device)
        padded[group.rank * size : group.rank * size + rows.numel()] = rows.view(-1)
        group.all_gather(padded)
        if not is_even:
            flat.copy_(padded[: flat.numel()])

    def forget(self, record: _Record) -> None:
        """Ends the care for a parameter. All ranks call it."""
        if record in self._open:
            self._open.remove(record)

    def close(self, homes: Sequence[nn.Module | None] = ()) -> None:
        """Closes all parameters except those of the modules `homes`, those that must stay whole, and those whose memory
        other tensors use on at least one rank.
        """
        with self._lock, _internal():
            asked = [
                record
                for record in self._open
                if not record.num_pins
                and not any(home is not None and record.home is not None and record.home() is home for home in homes)
            ]
            if not asked:
                return
            self._meeting.meet(f"zero.Init, after {', '.join(record.label for record in asked)},", _REASON)
            said = gather_json(self._group, [_state_of(record) for record in asked])
            for i, record in enumerate(asked):
                states = {states[i] for states in said}
                param = record.param()
                if _GONE in states:  # it is not used any more; garbage collectors of ranks find that at different times
                    self._open.remove(record)
                    if param is not None:
                        _RECORDS.pop(param, None)
                elif _KEEP not in states:
                    assert isinstance(param, nn.Parameter)
                    self._open.remove(record)
                    self._close_one(record, param)

    def _close_one(self, record: _Record, param: nn.Parameter) -> None:
        group = self._group
        group.broadcast(param.detach())
        num = -(-param.shape[0] // group.world)
        record.rows = param.detach()[group.rank * num : (group.rank + 1) * num].clone()
        _empty(param, param.dtype, param.device)
        param.__class__ = ClosedParameter


def _can_close(param: nn.Parameter) -> bool:
    if param.is_meta or param.layout != torch.strided or param.is_inference():
        return False
    return param.dim() > 0 and param.numel() > 0 and param.is_contiguous()


def _state_of(record: _Record) -> str:
    """Whether this rank can close a whole parameter."""
    param = record.param()
    if param is None:
        return _GONE
    if not isinstance(param, nn.Parameter) or not _can_close(param):  # the user has changed its memory
        return _KEEP
    storage = param.untyped_storage()
    uses_memory = torch._C._storage_Use_Count(storage._cdata) > 2  # `param` and `storage`
    in_graph = hasattr(param, "_use_count") and param._use_count() > 1
    return _KEEP if uses_memory or in_graph else _CLOSE


def _empty(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Releases the memory of a parameter. Its shape and strides stay."""
    is_same = (param.dtype, param.device) == (dtype, device)
    storage = param.untyped_storage()
    nbytes = param.numel() * param.element_size()
    if not is_same or not storage.resizable() or storage.nbytes() not in (0, nbytes):
        # The memory of a file, or a part of the memory of another tensor.
        shape = param.shape
        param.data = torch.empty(0, dtype=dtype, device=device)
        param.data = torch.empty(shape, dtype=dtype, device=device)
        storage = param.untyped_storage()
    storage.resize_(0)


_SITES: MutableMapping[object, Site] = weakref.WeakKeyDictionary()  # by torch's process group


def site() -> Site | None:
    """The site of this process group. None for one process. All ranks make the first call together."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    world = dist.group.WORLD
    if world not in _SITES:
        with _internal():
            _SITES[world] = Site(new_group("gloo"))
    return _SITES[world]


def take_unread(model: nn.Module) -> None:
    """Closes the parameters of a model that have not been read from their files (unread.py), and reads its buffers.
    All ranks call it.
    """
    here = site() or Site(alone())
    made: dict[Tensor, nn.Parameter] = {}  # a tied weight has several names
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, UnreadTensor):
                module._buffers[name] = read(buffer).contiguous()
        for name, param in module._parameters.items():
            if not isinstance(param, UnreadTensor):
                continue
            if param not in made:
                label = f"{type(module).__name__}.{name}"
                can_close = param.dim() > 0 and param.numel() > 0
                made[param] = (
                    here.close_unread(param, label, module)
                    if can_close
                    else nn.Parameter(read(param).contiguous(), param.requires_grad)
                )
            module._parameters[name] = made[param]


def _values(rows: Tensor | Unread) -> Tensor:
    return rows.read() if isinstance(rows, Unread) else rows


def take_over(model: nn.Module, here: Site) -> None:
    """Closes the parameters of a model that exists already. All ranks call it."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                here.adopt(param, f"{type(module).__name__}.{name}", module)
    here.close()


def _records_of(params: Iterable[Tensor]) -> list[_Record]:
    if not _RECORDS:
        return []
    with _internal():
        return [record for param in dict.fromkeys(params) if (record := _RECORDS.get(param)) is not None]


def open_all(params: Iterable[Tensor]) -> None:
    """Makes closed parameters whole. All ranks call it."""
    records = [record for record in _records_of(params) if record.rows is not None]
    if records:
        records[0].site.open(records)


@contextmanager
def kept_whole(params: Iterable[Tensor]) -> Iterator[None]:
    """A context in which these parameters are whole. All ranks enter it."""
    records = _records_of(params)
    for record in records:
        record.num_pins += 1
    try:
        open_all([param for record in records if (param := record.param()) is not None])
        yield
    finally:
        for record in records:
            record.num_pins -= 1
    if records:
        records[0].site.close()


def make_whole(params: Iterable[Tensor]) -> bool:
    """Makes parameters whole for good. Returns whether one was built in parts. All ranks call it."""
    records = _records_of(params)
    for record in records:
        record.num_pins += 1
    for record in records:
        if record.rows is not None:
            record.site.open([record])
    for record in records:
        _forget(record)
    return bool(records)


def _forget(record: _Record) -> None:
    param = record.param()
    if param is not None:
        _RECORDS.pop(param, None)
    record.site.forget(record)


def move(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    """Moves and casts the rows of closed parameters as `Module.to` does for whole ones, without gathering them."""
    for record in _records_of(model.parameters()):
        param = record.param()
        if record.rows is not None and isinstance(param, nn.Parameter):
            with _internal():
                is_cast = dtype is not None and (param.is_floating_point() or param.is_complex())
                record.rows = record.rows.to(device=device, dtype=dtype if is_cast else None)
                _empty(param, record.rows.dtype, record.rows.device)


class Rows(Mapping[Tensor, Tensor]):
    """This rank's rows of parameters that were closed, as `take_rows` has found them."""

    def __init__(self, rows: dict[Tensor, Tensor | Unread], site: Site | None) -> None:
        self._rows = rows
        self._site = site

    def __getitem__(self, param: Tensor) -> Tensor:
        """The rows. Those of a file are read for each call."""
        return _values(self._rows[param])

    def __contains__(self, param: object) -> bool:  # without reading the rows
        return param in self._rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()

    def drop(self, param: Tensor) -> None:
        """Forgets the rows of a parameter, if it has some."""
        self._rows.pop(param, None)

    def gather(self, param: Tensor) -> Tensor:
        """The whole values, on the device of the rows. All ranks call it."""
        assert self._site is not None
        rows = self[param]
        if self._site.world == 1:
            return rows
        with torch.no_grad():
            whole = torch.empty(param.shape, dtype=rows.dtype, device=rows.device)
            self._site.gather(rows, whole)
        return whole


def take_rows(params: Iterable[Tensor]) -> Rows:
    """Takes the rows of closed parameters for good. The caller replaces these parameters, or gives them other memory.

    Parameters that cannot be closed now stay whole. All ranks call it.
    """
    rows: dict[Tensor, Tensor | Unread] = {}
    found = None
    records = _records_of(params)
    if records:
        records[0].site.close()
    for record in records:
        param = record.param()
        assert param is not None
        if record.rows is not None:
            rows[param], record.rows = record.rows, None
            param.__class__ = nn.Parameter
            found = record.site
        _forget(record)
    return Rows(rows, found)
