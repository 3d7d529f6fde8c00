"""Reads a file of torch.save without running code in it.

Why a restricted Unpickler is not enough: a pickle is a program. It can name any function of any module, call it, and
set attributes of the result. This module interprets the few instructions that torch.save writes. A global is never
imported: `_meanings` maps names to values and functions of this module, and other names raise RefusedError. Only the
functions in this file are called, and attributes are never set.

Every DeepSpeed checkpoint contains objects of three classes of DeepSpeed. They are read as records of their values,
without DeepSpeed.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from twinflow.checkpoint.torch_files import SavedTensor, Storage, TorchFile

MAX_EXPANDED: Final = 1 << 24  # largest number of values of a tensor that is larger than its storage
_FLOATS: Final = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64")
_INTS: Final = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in (*_FLOATS, *_INTS)}
STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}
RECORDS: Final = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)


class RefusedError(ValueError):
    """The file contains more than tensors and plain values."""


@dataclass
class Record:
    """The attributes of an object of a known class."""

    name: str
    state: dict[Any, Any] = field(default_factory=dict)


class PlainDict(dict[Any, Any]):
    """An OrderedDict of the file. Its attributes are dropped."""


@dataclass(frozen=True)
class Meaning:
    """A global of the file, and the function of this module that a call of it runs."""

    name: str
    call: Callable[..., Any]


@dataclass(frozen=True)
class StorageKind:
    """The class of a storage, which determines the dtype of its values."""

    dtype: torch.dtype


def load_torch_file(path: Path) -> Any:
    """The contents of a file of torch.save, with a SavedTensor for each tensor. RefusedError if it contains anything
    but tensors and plain values, ValueError if it is damaged.
    """
    file = TorchFile(path)
    try:
        return _Machine(file).run(file.pickle())
    except RefusedError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        message = str(error) if str(path) in str(error) else f"{path} is damaged: its pickle cannot be read ({error})."
        raise ValueError(message) from error


def _meanings() -> Mapping[tuple[str, str], Any]:
    """The allowed globals and their replacements."""
    found: dict[tuple[str, str], Any] = {("torch", name): dtype for name, dtype in DTYPES.items()}
    found |= {("torch", name): StorageKind(dtype) for name, dtype in STORAGES.items()}
    # The size of an untyped storage is in bytes. The rebuild function has the dtype.
    found[("torch.storage", "UntypedStorage")] = StorageKind(torch.uint8)
    calls: dict[tuple[str, str], Callable[..., Any]] = {
        ("collections", "OrderedDict"): lambda items=(): PlainDict(items),
        ("collections", "Counter"): lambda items=(): PlainDict(items),
        ("torch", "Size"): lambda sizes: torch.Size(_sizes(sizes)),
        ("torch", "device"): lambda *parts: ":".join(str(part) for part in parts),
        ("torch", "Tensor"): _never,
        ("torch.nn.parameter", "Parameter"): _never,
        ("torch._utils", "_rebuild_tensor"): _tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _same_tensor,
        ("torch._utils", "_rebuild_parameter_with_state"): _same_tensor,
        ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
        ("_codecs", "encode"): _latin1,
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"): int,
    }
    for module in ("builtins", "__builtin__"):
        calls |= {(module, "set"): lambda items=(): set(items), (module, "frozenset"): lambda items=(): set(items)}
        calls[(module, "bytearray")] = _latin1
    found |= {key: Meaning(".".join(key), call) for key, call in calls.items()}
    return found


def _never(*_: Any) -> Any:
    raise ValueError("the pickle calls a tensor class, which torch.save never writes")


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise ValueError(f"{sizes!r} is not a tuple of sizes")
    return sizes


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> SavedTensor:
    """`_rebuild_tensor_v2`. The arguments after the stride (requires_grad, hooks, metadata) are ignored."""
    if not isinstance(storage, Storage):
        raise ValueError("a tensor has no storage")
    tensor = SavedTensor(storage, _sizes([offset])[0], _sizes(shape), _sizes(stride))
    if len(tensor.shape) != len(tensor.stride):
        raise ValueError(f"a tensor has the shape {tensor.shape}, which does not fit its stride {tensor.stride}")
    last = tensor.offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    if tensor.numel and last >= storage.numel:
        raise ValueError(f"a tensor of shape {tensor.shape} exceeds its storage {storage.key!r}")
    if tensor.numel > max(storage.numel, MAX_EXPANDED):  # A stride of 0 expands one value to any size.
        raise ValueError(f"a tensor of shape {tensor.shape} is larger than its storage {storage.key!r}")
    return tensor


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Any:
    """`_rebuild_tensor_v3`: a tensor with an untyped storage and a dtype."""
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no storage or no dtype")
    typed = Storage(storage.path, storage.key, dtype, storage.start, storage.numel // dtype.itemsize)
    return _tensor(typed, offset, shape, stride)


def _same_tensor(tensor: Any, *_: Any) -> SavedTensor:
    if not isinstance(tensor, SavedTensor):
        raise ValueError("a parameter is not made from a tensor")
    return tensor


def _of_type(function: Any, kind: Any, arguments: Any, *_: Any) -> SavedTensor:
    """A tensor with attributes, which are dropped."""
    if not isinstance(function, Meaning) or not isinstance(kind, Meaning) or not isinstance(arguments, tuple):
        raise ValueError("a tensor is not made by a function of torch")
    return _same_tensor(function.call(*arguments))


def _latin1(text: Any = "", encoding: Any = "latin1") -> bytes:
    """Bytes, which torch's pickle protocol writes as latin1 text."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are not encoded as latin1")
    return text.encode("latin1")


class _Machine:
    """An interpreter with the stack, the marks and the memo of one pickle."""

    def __init__(self, file: TorchFile) -> None:
        self._file = file
        self._meanings = _meanings()
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, raw: bytes) -> Any:
        """Interprets the pickle and returns its value."""
        steps = self._steps()
        for opcode, argument, _ in pickletools.genops(raw):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in _VALUES:
                self._stack.append(_VALUES[name]() if name in _FRESH else argument)
            elif name in steps:
                steps[name](argument)
            else:
                raise RefusedError(
                    f"{self._file.path} is refused: its pickle uses the instruction {name}, which torch.save never "
                    "writes. Save the file again with torch.save."
                )
        raise ValueError("the STOP instruction is missing")

    def _steps(self) -> dict[str, Callable[[Any], None]]:
        push = self._stack.append
        puts = dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), lambda at: self._memo.__setitem__(at, self._stack[-1]))
        gets = dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), lambda at: push(self._memo[at]))
        nothing = dict.fromkeys(("PROTO", "FRAME"), lambda _: None)
        return {
            **puts,
            **gets,
            **nothing,
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self._stack[-1]),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "POP": lambda _: self._stack.pop(),
            "POP_MARK": lambda _: self._to_mark(),
            "TUPLE": lambda _: push(tuple(self._to_mark())),
            "TUPLE1": lambda _: push(tuple(self._take(1))),
            "TUPLE2": lambda _: push(tuple(self._take(2))),
            "TUPLE3": lambda _: push(tuple(self._take(3))),
            "APPEND": lambda _: self._append(self._take(1)),
            "APPENDS": lambda _: self._append(self._to_mark()),
            "SETITEM": lambda _: self._set(self._take(2)),
            "SETITEMS": lambda _: self._set(self._to_mark()),
            "EMPTY_SET": lambda _: push(set()),
            "ADDITEMS": lambda _: self._add(self._to_mark()),
            "FROZENSET": lambda _: push(set(self._to_mark())),
            "GLOBAL": lambda name: push(self._global(*name.split(" ", 1))),
            "STACK_GLOBAL": lambda _: push(self._global(*self._take(2))),
            "BINPERSID": lambda _: push(self._persistent(self._stack.pop())),
            "REDUCE": lambda _: push(self._call(*self._take(2))),
            "NEWOBJ": lambda _: push(self._call(*self._take(2))),
            "BUILD": lambda _: self._build(self._stack.pop()),
        }

    def _take(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("the stack has too few values")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        taken = self._stack[mark:]
        del self._stack[mark:]
        return taken

    def _append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("the target of an append is not a list")
        self._stack[-1].extend(values)

    def _add(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not set:
            raise ValueError("the target of an add is not a set")
        self._stack[-1].update(values)

    def _set(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict):
            raise ValueError("the target of a set item is not a dict")
        self._stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def _global(self, module: Any, name: Any) -> Any:
        if (module, name) in self._meanings:
            return self._meanings[(module, name)]
        if (module, name) in RECORDS:
            return Meaning(f"{module}.{name}", lambda *_: Record(name))
        raise RefusedError(
            f"{self._file.path} is refused: its pickle contains {module}.{name}. No code of the file was run. Only "
            "tensors, numbers, strings and containers of them are allowed. Save the file again without this object."
        )

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Meaning) or type(arguments) is not tuple:
            raise RefusedError(
                f"{self._file.path} is refused: its pickle calls a {type(function).__name__}, which torch.save never "
                "writes. No code of the file was run."
            )
        return function.call(*arguments)

    def _build(self, state: Any) -> None:
        target = self._stack[-1]
        if isinstance(target, Record):
            target.state.update(state)
        elif not isinstance(target, (PlainDict, SavedTensor)):
            raise RefusedError(
                f"{self._file.path} is refused: its pickle sets attributes of a {type(target).__name__}, which "
                "torch.save never writes. No code of the file was run."
            )

    def _persistent(self, key: Any) -> Storage:
        kind, storage, name, _, numel = key
        if kind != "storage" or not isinstance(storage, StorageKind) or type(numel) is not int:
            raise ValueError(f"{kind!r} is not a storage")
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not the name of a storage")
        return self._file.storage(name, storage.dtype, numel)


# Instructions that push their argument, or a new empty container.
_FRESH: Final[Mapping[str, Callable[[], Any]]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CARRY: Final = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
_BYTES: Final = ("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE", "INT", "LONG", "FLOAT")
_VALUES: Final[Mapping[str, Callable[[], Any]]] = {**_FRESH, **dict.fromkeys((*_CARRY, *_BYTES), tuple)}
