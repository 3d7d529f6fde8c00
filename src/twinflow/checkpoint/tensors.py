# SPDX-License-Identifier: Apache-2.0
"""The safetensors format with streaming: a header length, a JSON header, then the bytes of one tensor after another.

The `safetensors` package is not used for writing, because it needs all tensors of a file in memory. Tensors of whole
pages come first in a file, and then those of wide dtypes, so that each one starts at a multiple of its item size. If a
file is large, its data starts at a page. Memory of whole pages can then be written without a copy. The header keeps the
given order. A part of a tensor is stored as a flat tensor with the name `<name>@<start>`. The manifest contains the
name and shape of the whole tensor.
"""

from __future__ import annotations

import json
import math
import mmap
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from twinflow import native
from twinflow.checkpoint.disk import PAGE, RESTORE, DurableFile, damaged, file_status
from twinflow.checkpoint.plain import parse_json
from twinflow.checkpoint.threads import Threads
from twinflow.errors import invalid_value
from twinflow.state_dict import Entry, Halves, Parts

CHUNK_BYTES: Final = 4 << 20  # small enough for the cache of a processor, because each chunk is read twice
BLOCK_BYTES: Final = 16 << 20  # large enough for the full rate of disks and networks
LARGE_BYTES: Final = 4 << 20  # tensors from which on a block is written early, so that they need no copy
NUM_BUFFERS: Final = 4  # three blocks are written while one is filled
NUM_AHEAD: Final = NUM_BUFFERS + 1  # blocks that are not written yet when the next tensor is read
HUGE_PAGE: Final = 2 << 20
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors package
METADATA: Final = "__metadata__"
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file. `start` and `stop` are byte offsets from the beginning of the file's data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """The tensors of a file of `size` bytes in the header's order. The data starts at `data_start`."""

    infos: tuple[TensorInfo, ...]
    data_start: int
    size: int
    crc32: int  # checksum of all bytes before the data


def check_entries(entries: Sequence[Entry], where: str) -> None:
    """Raises ValueError for duplicate names, unsupported dtypes and invalid parts. `where` is the place of the entries,
    for errors.
    """
    seen = set()
    for entry in entries:
        if not isinstance(entry.name, str) or entry.name == METADATA:
            raise invalid_value(f"The name of a tensor in {where}", entry.name, f"a string other than {METADATA!r}")
        if entry.key in seen:
            raise ValueError(f"{where} has two tensors called {entry.key!r}. Give each tensor its own name.")
        if entry.dtype not in DTYPE_NAMES:
            raise invalid_value(f"The dtype of {entry.name!r} in {where}", entry.dtype, DTYPE_NAMES)
        if entry.part is not None:
            whole = math.prod(entry.part.shape)
            if len(entry.shape) != 1 or not 0 <= entry.part.start <= whole - entry.numel:
                raise ValueError(
                    f"The part of {entry.name!r} in {where} has the shape {list(entry.shape)} and starts at element "
                    f"{entry.part.start}, but must be flat and inside the {whole} elements of the tensor."
                )
        seen.add(entry.key)


def split_entries(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Splits `entries` into consecutive groups of at most `max_bytes`. A larger tensor has its own group."""
    parts: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if parts[-1] and used + entry.num_bytes > max_bytes:
            parts.append([])
            used = 0
        parts[-1].append(entry)
        used += entry.num_bytes
    return parts


def part_names(stem: str, num_parts: int) -> list[str]:
    """The names of the files for `num_parts` parts."""
    if num_parts == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{part:05}-of-{num_parts:05}.safetensors" for part in range(1, num_parts + 1)]


def encode_header(entries: Sequence[Entry]) -> tuple[bytes, Header]:
    """The bytes before the data of a file with `entries`, and the same header as a `Header`."""
    spans = {}
    stop = 0
    for entry in sorted(entries, key=lambda entry: (entry.num_bytes % PAGE > 0, -entry.dtype.itemsize)):
        start, stop = stop, stop + entry.num_bytes
        spans[entry.key] = start, stop
    infos = tuple(TensorInfo(entry.key, entry.dtype, tuple(entry.shape), *spans[entry.key]) for entry in entries)
    fields: dict[str, Any] = {METADATA: {"format": "pt"}}
    for info in infos:
        span = [info.start, info.stop]
        fields[info.name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": span}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % (PAGE if stop >= LARGE_BYTES else 8))
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"The safetensors header of a file with {len(infos)} tensors has {len(text)} bytes, but must have at most "
            f"{MAX_HEADER_BYTES}. Put fewer tensors into a file with a smaller part_bytes (save), shard_bytes (export) "
            "or --max-shard-size (twinflow export), or use shorter names of tensors."
        )
    raw = len(text).to_bytes(8, "little") + text
    return raw, Header(infos, len(raw), len(raw) + stop, zlib.crc32(raw))


def read_header(path: Path) -> Header:
    """The header of the file at `path`. ValueError if it is invalid."""
    status = file_status(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        # The length is checked before it is used: in a damaged file it may be any number.
        if len(prefix) < 8 or length > min(status.st_size - 8, MAX_HEADER_BYTES):
            sizes = f"it has {status.st_size} bytes, but gives the length of its header as {length} bytes"
            raise damaged(f"{path} is cut off or damaged: {sizes}")
        text = file.read(length)
    infos = _parse_infos(text, status.st_size - 8 - length, path)
    return Header(infos, 8 + length, status.st_size, zlib.crc32(text, zlib.crc32(prefix)))


def _parse_infos(text: bytes, data_bytes: int, path: Path) -> tuple[TensorInfo, ...]:
    fields = parse_json(text, path)
    if not isinstance(fields, dict):
        raise damaged(f"The header of {path} is a {type(fields).__name__}, but must be an object")
    fields.pop(METADATA, None)
    infos = tuple(_parse_info(name, field, path) for name, field in fields.items())
    end = 0
    for info in sorted(infos, key=lambda info: (info.start, info.stop)):
        if info.start != end:
            word = "overlaps another tensor" if info.start < end else "has a gap before it"
            raise damaged(f"{path}: tensor {info.name!r} {word}")
        end = info.stop
    if end != data_bytes:
        raise damaged(f"{path} is cut off or damaged: its tensors need {end} bytes, but it has {data_bytes}")
    return infos


def _parse_info(name: str, field: object, path: Path) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise damaged(f"{where} must have exactly the keys dtype, shape and data_offsets")
    dtype = DTYPES.get(field["dtype"]) if isinstance(field["dtype"], str) else None
    if dtype is None:
        raise invalid_value(f"{where}: its dtype", field["dtype"], DTYPES, RESTORE)
    shape, offsets = field["shape"], field["data_offsets"]
    if not are_sizes(shape) or not is_possible(shape, dtype):
        raise damaged(f"{where} has the impossible shape {shape!r}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise damaged(f"{where} has the data_offsets {offsets!r}, which must be two numbers that differ by {num_bytes}")
    return TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])


def is_possible(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the number of bytes of such a tensor fits torch's 64-bit integers."""
    # Zeros count as one: such a tensor has no bytes, but torch still multiplies the other sizes.
    return math.prod(max(size, 1) for size in shape) * dtype.itemsize < 1 << 63


def are_sizes(value: object) -> TypeGuard[Sequence[int]]:
    """Whether a value from JSON is a list of integers >= 0."""
    return isinstance(value, list | tuple) and all(type(item) is int and item >= 0 for item in value)


class TensorWriter:
    """Writes files in threads, so that the caller can read the next tensor while those before are written.

    The caller reads tensors and divides a file into blocks. A thread "block" copies the values of a block to a buffer
    that begins at a page, computes their checksums in the same pass over memory, and writes the buffer. A block that is
    contiguous in memory from a page on is written from there. The threads do this for different blocks at the same
    time. The thread "sync" syncs a complete file to the disk while the next file is written. Besides the tensor that
    the caller reads, the tensors of at most `NUM_AHEAD` + 1 blocks are in memory. When the `with` block ends without an
    error, all files are on the disk.
    """

    def __init__(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """`on_bytes` is called with numbers of bytes that are written, by one thread at a time."""
        self._on_bytes = on_bytes
        self._files: list[DurableFile] = []
        self._lock = threading.Lock()
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(NUM_BUFFERS):
            self._buffers.put(_new_buffer())
        self._blocks = Threads("block", NUM_BUFFERS)
        self._syncs = Threads("sync")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._blocks.wait()
                self._syncs.wait()
        finally:
            self._blocks.close()
            self._syncs.close()
            for file in self._files:
                file.close()

    def write(self, path: Path, entries: Iterable[Entry], raw: bytes, header: Header) -> dict[str, int]:
        """Reads `entries` and writes them to the new file `path`.

        `raw` and `header` are the results of `encode_header(entries)`. The result is the crc32 of each tensor by key.
        It is complete when the `with` block has ended.
        """
        by_key = {entry.key: entry for entry in entries}
        crc32s = dict.fromkeys(by_key, 0)
        file = DurableFile(path, is_direct=True)
        self._files.append(file)
        file.open()
        progress = _FileProgress(file)
        block: list[_Piece] = []
        start = num_filled = 0
        for values, tensor in self._values(by_key, header, raw, crc32s):
            if block and _num_bytes(values) >= LARGE_BYTES and _is_at_page(values) and not num_filled % PAGE:
                self._put(progress, start, block)
                block, start, num_filled = [], start + num_filled, 0
            rest: Tensor | Halves = values
            while num_bytes := _num_bytes(rest):
                num_bytes = min(num_bytes, BLOCK_BYTES - num_filled)
                first, rest = _cut(rest, num_bytes)
                block.append(_Piece(first, num_bytes, tensor, tensor.add() if tensor is not None else 0))
                num_filled += num_bytes
                if num_filled == BLOCK_BYTES:
                    self._put(progress, start, block)
                    block, start, num_filled = [], start + BLOCK_BYTES, 0
            del values, first, rest  # so that only blocks refer to the tensor while the next one is read
        if block:
            self._put(progress, start, block)
        self._end_part(progress)
        return crc32s

    def _put(self, file: _FileProgress, start: int, block: list[_Piece]) -> None:
        with self._lock:
            file.num_left += 1
        self._blocks.put(partial(self._write_block, file, start, block))

    def _end_part(self, file: _FileProgress) -> None:
        """Notes that a block is written, or that the caller has read all tensors."""
        with self._lock:
            file.num_left -= 1
            is_complete = not file.num_left
        if is_complete:
            self._syncs.put(file.file.sync)
            self._syncs.put(file.file.close)

    def _values(
        self, by_key: Mapping[str, Entry], header: Header, raw: bytes, crc32s: dict[str, int]
    ) -> Iterator[tuple[Tensor | Halves, _TensorProgress | None]]:
        """The bytes of a file in order, each with its tensor."""
        yield torch.frombuffer(bytearray(raw), dtype=torch.uint8), None
        # An empty tensor may have the same start as the next one. It must come first.
        for info in sorted(header.infos, key=lambda info: (info.start, info.stop)):
            entry = by_key[info.name]
            self._blocks.wait(NUM_AHEAD)
            tensor = _TensorProgress(entry, crc32s)
            parts = [part for part in _read(entry) if _num_bytes(part)]
            if parts:
                while parts:
                    yield parts.pop(0), tensor
            elif entry.done is not None:
                entry.done()

    # The threads "block".

    def _write_block(self, file: _FileProgress, start: int, block: list[_Piece]) -> None:
        sizes = [piece.num_bytes for piece in block if piece.tensor is not None]
        values = block[0].values
        if len(block) == 1 and isinstance(values, Tensor) and _is_at_page(values):
            sums = native.gather(None, [values])
            file.file.write(values.numpy().data, start)
            self._note(block, sums)
        else:
            buffer = self._buffers.get()
            try:
                into = buffer[: sum(piece.num_bytes for piece in block)]
                sums = native.gather(into, [piece.values for piece in block])
                del values
                self._note(block, sums)
                file.file.write(into.data, start)
            finally:
                self._buffers.put(buffer)
        if self._on_bytes is not None:
            with self._lock:
                for size in sizes:
                    self._on_bytes(size)
        self._end_part(file)

    def _note(self, block: list[_Piece], sums: list[int]) -> None:
        """Takes the checksums of a block whose values are not needed any more."""
        for piece, crc32 in zip(block, sums, strict=True):
            if piece.tensor is not None:
                piece.tensor.note(piece.number, crc32, piece.num_bytes)
        block.clear()  # so that tensors in a buffer are freed while it is written


class _Piece(NamedTuple):
    """The part of a tensor, or of the header, that is in one block."""

    values: Tensor | Halves
    num_bytes: int
    tensor: _TensorProgress | None  # None for the header
    number: int  # of the pieces of the tensor


@dataclass
class _FileProgress:
    file: DurableFile
    num_left: int = 1  # blocks that are not written yet, and the caller while it reads tensors


class _TensorProgress:
    """The checksums of the pieces of a tensor, which come in any order."""

    def __init__(self, entry: Entry, crc32s: dict[str, int]) -> None:
        self._entry = entry
        self._crc32s = crc32s
        self._lock = threading.Lock()
        self._num_bytes_left = entry.num_bytes
        self._sums: list[tuple[int, int]] = []  # of each piece: crc32 and bytes

    def add(self) -> int:
        """Adds a piece after those before, and returns its number."""
        with self._lock:
            self._sums.append((0, 0))
            return len(self._sums) - 1

    def note(self, number: int, crc32: int, num_bytes: int) -> None:
        """Takes the checksum of a piece whose values are not needed any more."""
        with self._lock:
            self._sums[number] = (crc32, num_bytes)
            self._num_bytes_left -= num_bytes
            if self._num_bytes_left:
                return
        total = 0
        for crc32, num_bytes in self._sums:
            total = native.joined_crc32(total, crc32, num_bytes)
        self._crc32s[self._entry.key] = total
        if self._entry.done is not None:
            self._entry.done()


def _new_buffer() -> Bytes:
    """Memory of a block that begins at a page, on huge pages if there are any: a write around the page cache locks each
    page.
    """
    memory = mmap.mmap(-1, BLOCK_BYTES + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    with suppress(AttributeError, OSError):  # only Linux has these
        memory.madvise(mmap.MADV_DONTFORK)  # after a fork, each page would be copied when it is written
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -raw.ctypes.data % HUGE_PAGE
    return raw[start : start + BLOCK_BYTES]


def _is_at_page(values: Tensor | Halves) -> bool:
    return isinstance(values, Tensor) and not values.data_ptr() % PAGE


def _num_bytes(values: Tensor | Halves) -> int:
    return 4 * values.upper.numel() if isinstance(values, Halves) else values.numel()


def _cut(values: Tensor | Halves, num_bytes: int) -> tuple[Tensor | Halves, Tensor | Halves]:
    """The first bytes of values, and the rest. Blocks end at multiples of all item sizes."""
    if isinstance(values, Halves):
        upper, lower = values
        at = num_bytes // 4
        return Halves(upper[:at], lower[:at]), Halves(upper[at:], lower[at:])
    return values[:num_bytes], values[num_bytes:]


def _read(entry: Entry) -> list[Tensor | Halves]:
    """The values of an entry in host memory: bytes, or halves of fp32 values."""
    found = entry.read()
    if isinstance(found, Parts):
        parts = list(found.parts)
        numel = sum(part.upper.numel() if isinstance(part, Halves) else part.numel() for part in parts)
        dtypes = {torch.float32 if isinstance(part, Halves) else part.dtype for part in parts}
        given = f"parts of {numel} elements of {', '.join(map(str, dtypes))}"
        is_right = dtypes == {entry.dtype} and numel == entry.numel
    else:
        parts = [found]
        given = f"a tensor {found.dtype} {list(found.shape)}"
        is_right = found.dtype == entry.dtype and tuple(found.shape) == tuple(entry.shape)
    if not is_right:
        raise ValueError(
            f"read() of the entry {entry.name!r} returned {given}, but the entry has {entry.dtype} "
            f"{list(entry.shape)}. Give the entry the dtype and shape of the tensor."
        )
    return [part if isinstance(part, Halves) else _as_bytes(_on_host(part)) for part in parts]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # A contiguous tensor of one element or none may have any stride.
    return flat.view(torch.uint8)


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    view: memoryview = _as_bytes(tensor).numpy().data
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def read_range(
    path: Path, header: Header, info: TensorInfo, start: int, into: Tensor, crc32: int | None = None
) -> int | None:
    """Fills `into` with the elements of one tensor of a file from `start` on.

    `crc32` is the checksum of the elements before `start`. The result is the checksum including the elements read. If
    `crc32` is None, no checksum is computed, and the result is None.
    """
    with _open_data(path, header, info, start) as file:
        for chunk in _chunks(into):
            if file.readinto(chunk) < len(chunk):
                raise _cut_off(path, info)
            if crc32 is not None:
                crc32 = native.crc32(chunk, crc32)
    return crc32


def verify_tensor(
    path: Path, header: Header, info: TensorInfo, crc32: int, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Checks the checksum of one tensor, chunk by chunk. `on_bytes` is called with the size of each chunk."""
    found = 0
    with _open_data(path, header, info) as file:
        rest = info.stop - info.start
        while rest:
            chunk = file.read(min(rest, CHUNK_BYTES))
            if not chunk:
                raise _cut_off(path, info)
            found = native.crc32(chunk, found)
            rest -= len(chunk)
            if on_bytes:
                on_bytes(len(chunk))
    check_crc32(path, info, crc32, found)


@contextmanager
def _open_data(path: Path, header: Header, info: TensorInfo, start: int = 0) -> Iterator[BufferedReader]:
    try:
        with open(path, "rb") as file:
            file.seek(header.data_start + info.start + start * info.dtype.itemsize)
            yield file
    except FileNotFoundError as error:
        raise damaged(f"{path} is missing, but existed when the checkpoint was opened") from error


def _cut_off(path: Path, info: TensorInfo) -> ValueError:
    return damaged(f"{path} is cut off: it ends within tensor {info.name!r}")


def check_crc32(path: Path, info: TensorInfo, expected: int, found: int) -> None:
    """Raises ValueError if the checksum of a tensor is not the saved one."""
    if found != expected:
        raise damaged(f"{path}: tensor {info.name!r} does not match its checksum: the file was changed or damaged")


# Parts of a tensor.


@dataclass(frozen=True)
class Span:
    """Elements [start, start + numel) of a flattened tensor of `dtype` and `shape`. `where`: the rank or file that has
    them, for errors.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    where: str


def check_cover(what: str, spans: Sequence[Span], remedy: str) -> None:
    """Raises ValueError with this remedy if the spans of the tensor `what` leave out elements, overlap, or belong to
    different tensors."""
    first = spans[0]
    for span in spans:
        if (span.dtype, span.shape) != (first.dtype, first.shape):
            one, other = (f"{s.dtype} {list(s.shape)} in {s.where}" for s in (first, span))
            raise ValueError(f"{what} is {one}, but {other}. {remedy}")
    numel = math.prod(first.shape)
    parts = sorted((span for span in spans if span.numel), key=lambda span: span.start)
    end, last = 0, first
    for span in (*parts, Span(first.dtype, first.shape, numel, 0, "the end")):
        if span.start > end:
            missing = f"Elements {end} to {span.start - 1} of {numel} are in no part"
            raise ValueError(f"{what}: {missing}. {remedy}")
        if span.numel and span.start < end:
            twice = f"Elements {span.start} to {min(end, span.start + span.numel) - 1} are in {last.where}"
            raise ValueError(f"{what}: {twice} and again in {span.where}. {remedy}")
        if not span.numel and end > numel:
            beyond = f"{last.where} has elements up to {end - 1}, but the tensor has only {numel} elements"
            raise ValueError(f"{what}: {beyond}. {remedy}")
        end, last = span.start + span.numel, span
