# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values are in a file and have not been read yet.

A loader of another library renames, casts, splits and joins the tensors of a checkpoint before it puts them into a
model. `UnreadTensor` lets it do so without memory: an operation on unread tensors is recorded, and its result is an
unread tensor too. `read` runs the recorded operations. An operation that needs values, such as `torch.equal`, and one
that writes to a tensor read their arguments at once.

`Unread` is a range of rows of such a tensor, with the dtype and device that they will have. Rows of a tensor that the
file has in this form, or in another dtype, are read alone. For other tensors the whole tensor is computed first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_ATEN = torch.ops.aten
# These need values, although torch can compute the metadata of their results or has none for them.
_VALUES = frozenset([_ATEN.equal.default, _ATEN._local_scalar_dense.default, _ATEN.is_nonzero.default])
# The rows of their results are the results for the rows of their first argument.
_BY_ROWS = frozenset(
    [_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.lift_fresh.default]
)


class Leaf(Protocol):
    """A tensor of a file."""

    def read(self, start: int, into: Tensor) -> None:
        """Fills a contiguous tensor on the host with the elements from `start` on."""
        ...


class _Operator(Protocol):
    """The part of torch's operators that is used here."""

    _schema: torch.FunctionSchema

    def __call__(self, *args: object, **kwargs: object) -> object: ...


@dataclass(frozen=True)
class _Call:
    """A recorded operation, and the place of the tensor among its results; None if there is only one."""

    operator: _Operator
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    place: int | None


class UnreadTensor(Tensor):
    """A tensor without memory. `meta` has its shape, strides and dtype."""

    meta: Tensor
    source: Leaf | _Call | Tensor  # a tensor: it was read, because an operation wrote to it

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, source: Leaf | _Call) -> UnreadTensor:
        make: Callable[..., UnreadTensor] = Tensor._make_wrapper_subclass
        found = make(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        found.meta = meta
        found.source = source
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch's is not annotated
        return f"UnreadTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates the function that disables it
        cls,
        func: _Operator,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        unread = [one for one in tree_leaves((args, kwargs)) if isinstance(one, UnreadTensor)]
        if func in _VALUES or any(
            one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments
        ):
            return _run_now(func, args, kwargs)
        try:
            on_meta = {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
            shaped = tree_map_only(Tensor, _as_meta, (args, on_meta))
            found = func(*shaped[0], **shaped[1])
        except (NotImplementedError, RuntimeError):  # torch has no metadata for this operation
            return _run_now(func, args, kwargs)
        given = kwargs.get("device")
        device = given if isinstance(given, torch.device) else unread[0].device
        if isinstance(found, Tensor):
            return UnreadTensor(found, device, _Call(func, args, kwargs, None))
        if isinstance(found, (list, tuple)) and all(isinstance(one, Tensor) for one in found):
            return [UnreadTensor(one, device, _Call(func, args, kwargs, i)) for i, one in enumerate(found)]
        return _run_now(func, args, kwargs)


def _writes(func: _Operator) -> bool:
    return any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)


def _as_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, UnreadTensor):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _run_now(func: _Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Reads the arguments and runs an operation. A tensor that the operation may write to keeps its values."""

    def value(tensor: UnreadTensor) -> Tensor:
        values = read(tensor)
        if writes:
            tensor.source = values
        return values

    writes = _writes(func)
    given = tree_map_only(UnreadTensor, value, (args, dict(kwargs)))
    found = func(*given[0], **given[1])
    if writes and args and isinstance(args[0], UnreadTensor) and isinstance(found, Tensor):
        return args[0]  # an operation in place returns its first argument
    return found


def unread(leaf: Leaf, shape: Sequence[int], dtype: torch.dtype) -> UnreadTensor:
    """The tensor of a file, on the host."""
    return UnreadTensor(torch.empty(tuple(shape), dtype=dtype, device="meta"), torch.device("cpu"), leaf)


def leaves(tensor: UnreadTensor) -> list[Leaf]:
    """The tensors of files from which this tensor is computed."""
    if isinstance(tensor.source, _Call):
        given = tree_leaves((tensor.source.args, tensor.source.kwargs))
        return [leaf for one in given if isinstance(one, UnreadTensor) for leaf in leaves(one)]
    return [] if isinstance(tensor.source, Tensor) else [tensor.source]


@torch.no_grad()
def read(tensor: UnreadTensor) -> Tensor:
    """The values. They may share memory with other tensors only if an operation wrote to this tensor."""
    source = tensor.source
    if isinstance(source, Tensor):
        return source
    if not isinstance(source, _Call):
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        source.read(0, values)
        return values
    args, kwargs = tree_map_only(UnreadTensor, read, (source.args, dict(source.kwargs)))
    found = source.operator(*args, **kwargs)
    if source.place is not None:
        assert isinstance(found, (list, tuple))
        found = found[source.place]
    assert isinstance(found, Tensor)
    return found


@torch.no_grad()
def _read_rows(tensor: UnreadTensor, start: int, stop: int) -> Tensor:
    """The rows from `start` to `stop`, not included."""
    source = tensor.source
    if isinstance(source, _Call) and source.operator in _BY_ROWS and isinstance(source.args[0], UnreadTensor):
        rows = _read_rows(source.args[0], start, stop)
        found = source.operator(rows, *source.args[1:], **source.kwargs)
        assert isinstance(found, Tensor)
        return found
    if isinstance(source, (Tensor, _Call)):
        return read(tensor)[start:stop].clone()  # without the memory of the other rows
    rows = torch.empty((stop - start, *tensor.shape[1:]), dtype=tensor.dtype)
    source.read(start * rows[:1].numel() if len(rows) else 0, rows)
    return rows


@dataclass(frozen=True)
class Unread:
    """The rows from `start` to `stop` of a tensor that has not been read, as they will be in a parameter."""

    tensor: UnreadTensor
    start: int
    stop: int
    dtype: torch.dtype
    device: torch.device

    def read(self) -> Tensor:
        """The values, in memory that nothing else uses."""
        rows = _read_rows(self.tensor, self.start, self.stop)
        return rows.to(device=self.device, dtype=self.dtype).contiguous()

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Unread:
        return replace(self, device=device or self.device, dtype=dtype or self.dtype)
