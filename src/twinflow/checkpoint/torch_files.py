"""The container that torch.save writes: a zip of one pickle and the bytes of each storage, none of it compressed.

Nothing is unpickled here. A tensor is a place in the file, read when it is asked for, and only the part asked for.
"""

from __future__ import annotations

import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from twinflow.checkpoint.disk import file_status

MAX_PICKLE_BYTES: Final = 1 << 30  # names and numbers only: far more than any model has
LOCAL_HEADER_BYTES: Final = 30


@dataclass(frozen=True)
class Storage:
    """Bytes of a file that hold values of one dtype; `start` is counted from the beginning of the file."""

    path: Path
    key: str
    dtype: torch.dtype
    start: int
    numel: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a file. Strides and offset are counted in elements, as torch does."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""
        return self.storage.dtype

    @property
    def numel(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """Whether its values lie one after another in the file."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def read(self) -> Tensor:
        """All values, in memory of their own."""
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.is_flat:
            return self.read_range(0, self.numel).view(self.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self._load(self.offset, span).as_strided(self.shape, self.stride).contiguous()

    def read_range(self, start: int, numel: int) -> Tensor:
        """Values `start` to `start + numel` of the tensor seen as one row."""
        assert start >= 0 and start + numel <= self.numel
        if not self.is_flat:  # a weight kept transposed, say: all of it is needed to find its rows
            return self.read().view(-1)[start : start + numel]
        return self._load(self.offset + start, numel)

    def _load(self, first: int, numel: int) -> Tensor:
        tensor = torch.empty(numel, dtype=self.dtype)
        view = tensor.view(torch.uint8).numpy().data
        with open(self.storage.path, "rb", buffering=0) as file:
            file.seek(self.storage.start + first * self.dtype.itemsize)
            filled = 0
            while filled < len(view):
                count = file.readinto(view[filled:])
                if not count:
                    raise ValueError(f"{self.storage.path} is cut off: it ends within storage {self.storage.key!r}")
                filled += count
        return tensor


class TorchFile:
    """The entries of a file of torch.save: its pickle as bytes, its storages as places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = file_status(path).st_size
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as error:
            raise ValueError(
                f"{path} is not a file of torch.save, or is cut off ({error}). Files of torch before 1.6 are not zip "
                "archives: load and save them again with a newer torch"
            ) from error
        pickles = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{path} is not a file of torch.save: it has {len(pickles)} entries 'data.pkl', not 1")
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in self._entries and self._bytes(order) != b"little":
            raise ValueError(f"{path} has byte order {self._bytes(order)!r}, but must have b'little'.")

    def pickle(self) -> bytes:
        """The bytes of the pickle."""
        return self._bytes(f"{self._prefix}data.pkl")

    def storage(self, key: str, dtype: torch.dtype, numel: int) -> Storage:
        """Where the storage `key` lies."""
        name = f"{self._prefix}data/{key}"
        if name not in self._entries:
            raise ValueError(f"{self.path} has no entry {name!r}; the file is damaged")
        start, size = self._place(name)
        if numel < 0 or size != numel * dtype.itemsize:
            raise ValueError(f"{self.path}: {name!r} has {size} bytes for {numel} values of {dtype}; it is damaged")
        return Storage(self.path, key, dtype, start, numel)

    def _bytes(self, name: str) -> bytes:
        start, size = self._place(name)
        if size > MAX_PICKLE_BYTES:
            raise ValueError(f"{self.path}: {name!r} has {size} bytes, but may have at most {MAX_PICKLE_BYTES}.")
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def _place(self, name: str) -> tuple[int, int]:
        """Where an entry's bytes begin in the file, and how many there are."""
        info = self._entries[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError(f"{self.path}: {name!r} is compressed or encrypted, which torch.save never does")
        with open(self.path, "rb") as file:
            file.seek(info.header_offset)
            head = file.read(LOCAL_HEADER_BYTES)
        # The lengths of name and padding stand in front of the data; those in the zip's index may differ.
        skip = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = info.header_offset + LOCAL_HEADER_BYTES + skip
        if head[:4] != b"PK\3\4" or start + info.file_size > self._size:
            raise ValueError(f"{self.path} is cut off or damaged: {name!r} does not lie within it")
        return start, info.file_size
