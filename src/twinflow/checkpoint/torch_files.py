# SPDX-License-Identifier: Apache-2.0
"""Reads a file of torch.save without running code in it. Tensors are mapped from the file, so that their values are
read when they are used.

The file is an uncompressed zip archive with one pickle and the bytes of each storage. A pickle is a program: it can
name any function of any module, call it, and set attributes of the result. Here a global is never imported: `_MEANINGS`
maps names to values and functions of this module, and other names raise RefusedError. Only these functions are called,
attributes are never set, and instructions that torch.save does not write are refused.

`torch.load(weights_only=True, mmap=True)` is not as strict. Before torch 2.10 it can be made to corrupt memory and run
code (CVE-2026-24747). With mmap it does not compare the sizes of storages with those of the entries in the archive. It
does not read pickles of protocol 4.

DeepSpeed checkpoints contain objects of the DeepSpeed classes in `RECORDS`. They are read as records of their values,
without DeepSpeed.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from twinflow.checkpoint.disk import file_status
from twinflow.checkpoint.tensors import DTYPES
from twinflow.errors import invalid_value

MAX_PICKLE_BYTES: Final = 1 << 30  # A pickle has only names and numbers. No model needs this much.
MAX_EXPANDED: Final = 1 << 24  # largest number of values of a tensor that is larger than its storage
LOCAL_HEADER_BYTES: Final = 30
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
    """The attributes of an object of a class in `RECORDS`."""

    state: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Meaning:
    """The function of this module that runs when the pickle calls a global such as `torch._utils._rebuild_tensor`."""

    call: Callable[..., Any]


def load_torch_file(path: Path) -> Any:
    """The contents of a file of torch.save. Its tensors are mapped from the file and must not be changed.

    RefusedError if it contains anything but tensors and plain values, ValueError if it is damaged.
    """
    archive = _Archive(path)
    try:
        return _Unpickler(archive).load()
    except RefusedError as error:
        allowed = "Save the file again with only tensors, numbers, strings and containers of them."
        raise RefusedError(f"{path} is refused: its pickle {error}. No code of the file was run. {allowed}") from error
    except Exception as error:  # A damaged pickle can cause any error.
        text = f"{path} is damaged: its pickle cannot be read ({error}). Copy it again."
        raise ValueError(str(error) if str(path) in str(error) else text) from error


class _Archive:
    """The entries of a file of torch.save, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file_status(path)
        try:
            with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
                self._entries = {info.filename: info for info in archive.infolist()}
                self._raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as error:
            remedy = "If it was saved with torch before 1.6, load and save it with a newer torch."
            raise ValueError(f"{path} is not a file of torch.save, or is cut off ({error}). {remedy}") from error
        pickles = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{path} has {len(pickles)} pickles, but a file of torch.save has one. Use another file.")
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = self.read("byteorder") if f"{self._prefix}byteorder" in self._entries else b"little"
        if order != b"little":
            raise invalid_value(f"The byte order of {path}", order, [b"little"], "Save it on a little-endian machine.")

    def read(self, name: str) -> bytes:
        start, size = self._place(name)
        if size > MAX_PICKLE_BYTES:
            remedy = "The entry has only names and numbers, so the file is damaged. Copy it again, or save it again."
            raise invalid_value(f"{self.path}: The size of {name!r}", size, f"at most {MAX_PICKLE_BYTES} bytes", remedy)
        return self._raw[start : start + size]

    def storage(self, key: str, dtype: torch.dtype, numel: int) -> Tensor:
        """The values of a storage. ValueError if its size is not that of `numel` values of `dtype`."""
        start, size = self._place(f"data/{key}")
        if numel < 0 or size != numel * dtype.itemsize:
            raise ValueError(f"the storage {key!r} has {size} bytes for {numel} values of {dtype}")
        if not numel:
            return torch.empty(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mapped memory cannot be written.
            return torch.frombuffer(self._raw, dtype=dtype, count=numel, offset=start)

    def _place(self, name: str) -> tuple[int, int]:
        """The offset and the size of an entry in the file."""
        info = self._entries.get(f"{self._prefix}{name}")
        if info is None:
            raise ValueError(f"{self.path} has no entry {name!r}. The file is damaged. Copy it again.")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError(f"{self.path}: {name!r} is compressed or encrypted. Save the file with torch.save.")
        head = self._raw[info.header_offset : info.header_offset + LOCAL_HEADER_BYTES]
        # The lengths of name and padding come from the local header. Those in the zip's index may differ.
        skip = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = info.header_offset + LOCAL_HEADER_BYTES + skip
        if head[:4] != b"PK\3\4" or start + info.file_size > len(self._raw):
            raise ValueError(f"{self.path} is cut off or damaged: the entry {name!r} exceeds the file. Copy it again.")
        return start, info.file_size


def _never(*_: Any) -> Any:
    raise ValueError("the pickle calls a tensor class, which torch.save never writes")


def _items(value: Any = ()) -> Any:
    if not isinstance(value, list | tuple | set | dict):
        raise ValueError(f"a {type(value).__name__} is not a container")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(_items(value))
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise ValueError(f"{sizes!r} is not a tuple of sizes")
    return sizes


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    """Replaces torch's `_rebuild_tensor` and `_rebuild_tensor_v2`. Arguments after the stride are ignored."""
    (offset,), shape, stride = _sizes([offset]), _sizes(shape), _sizes(stride)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    numel = math.prod(shape)
    if numel and last >= _same_tensor(storage).numel():
        raise ValueError(f"a tensor of shape {shape} exceeds its storage")
    if numel > max(storage.numel(), MAX_EXPANDED):  # A stride of 0 expands one value to any size.
        raise ValueError(f"a tensor of shape {shape} is larger than its storage")
    return torch.as_strided(storage, shape, stride, offset)


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Any:
    """Replaces torch's `_rebuild_tensor_v3`: a tensor with an untyped storage and a dtype."""
    numel = _same_tensor(storage).numel() // dtype.itemsize
    return _tensor(storage[: numel * dtype.itemsize].view(dtype), offset, shape, stride)


def _same_tensor(tensor: Any, *_: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError("a tensor or parameter is not made from a storage or tensor")
    return tensor


def _of_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Tensor:
    """A tensor with attributes, which are dropped."""
    if not isinstance(function, Meaning) or not isinstance(kind, Meaning) or not isinstance(arguments, tuple):
        raise ValueError("a tensor is not made by a function of torch")
    return _same_tensor(function.call(*arguments))


def _latin1(text: Any = "", encoding: Any = "latin1") -> bytes:
    """Bytes, which torch's pickle protocol writes as latin1 text."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are not encoded as latin1")
    return text.encode("latin1")


_CALLS: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("collections", "OrderedDict"): lambda *items: OrderedDict(_items(*items)),
    ("collections", "Counter"): lambda *items: OrderedDict(_items(*items)),
    ("builtins", "set"): lambda *items: set(_items(*items)),
    ("__builtin__", "set"): lambda *items: set(_items(*items)),
    ("builtins", "frozenset"): lambda *items: set(_items(*items)),
    ("__builtin__", "frozenset"): lambda *items: set(_items(*items)),
    ("builtins", "bytearray"): _latin1,
    ("__builtin__", "bytearray"): _latin1,
    ("_codecs", "encode"): _latin1,
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
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): int,
}
_MEANINGS: Final[Mapping[tuple[str, str], Any]] = {
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
    # The size of an untyped storage is in bytes. The rebuild function has the dtype.
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{key: Meaning(call) for key, call in _CALLS.items()},
    **dict.fromkeys(RECORDS, Meaning(lambda *_: Record())),
}
# Instructions of the standard library. `_Unpickler` has its own versions of those that call or change something.
_NAMES: Final = """
    PROTO FRAME STOP MARK POP POP_MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT EMPTY_SET FROZENSET GLOBAL STACK_GLOBAL BINPERSID
"""
_CODES: Final = [getattr(pickle, name)[0] for name in _NAMES.split()]


class _Dispatch(dict[int, Callable[[Any], None]]):
    """The functions of instructions by their codes."""

    def __missing__(self, code: int) -> Any:
        name = next((opcode.name for opcode in pickletools.opcodes if opcode.code == chr(code)), code)
        raise RefusedError(f"uses the instruction {name}, which torch.save never writes")


class _Unpickler(pickle._Unpickler):
    """The unpickler of the standard library. It runs few instructions, takes globals from `_MEANINGS` and sets no
    attributes.

    Its base class is the version in Python, because a damaged file can make the version in C allocate any amount of
    memory.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, archive: _Archive) -> None:
        super().__init__(io.BytesIO(archive.read("data.pkl")))
        self._archive = archive

    def find_class(self, module: Any, name: Any) -> Any:
        if (module, name) not in _MEANINGS:
            raise RefusedError(f"contains {module}.{name}")
        return _MEANINGS[(module, name)]

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numel) is not int:
            raise ValueError(f"{kind!r} is not a storage")
        return self._archive.storage(key, dtype, numel)

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Meaning) or type(arguments) is not tuple:
            raise RefusedError(f"calls a {type(function).__name__}, which torch.save never writes")
        self.stack.append(function.call(*arguments))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record):
            target.state.update(state)
        elif not isinstance(target, OrderedDict | Tensor):  # Attributes of these are dropped.
            raise RefusedError(f"sets attributes of a {type(target).__name__}, which torch.save never writes")

    def _append(self) -> None:
        self._fill([self.stack.pop()])

    def _set_item(self) -> None:
        self._fill([self.stack.pop(-2), self.stack.pop()])

    def _fill_from_mark(self) -> None:
        self._fill(self.pop_mark())

    def _fill(self, values: list[Any]) -> None:
        """Adds values to a container. A tensor must not be a target: writing to mapped memory ends the process."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update(values)
        elif isinstance(target, dict):
            target.update(zip(values[::2], values[1::2], strict=True))
        else:
            raise ValueError(f"a {type(target).__name__} is not a container")

    dispatch = _Dispatch(
        {
            **{code: pickle._Unpickler.dispatch[code] for code in _CODES},
            pickle.REDUCE[0]: _call,
            pickle.NEWOBJ[0]: _call,
            pickle.BUILD[0]: _build,
            pickle.APPEND[0]: _append,
            pickle.SETITEM[0]: _set_item,
            **dict.fromkeys((pickle.APPENDS[0], pickle.SETITEMS[0], pickle.ADDITEMS[0]), _fill_from_mark),
        }
    )
