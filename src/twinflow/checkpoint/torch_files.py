"""The file format of torch.save: an uncompressed zip archive with one pickle and the bytes of each storage.

This module unpickles nothing. A tensor is a place in the file, of which only the requested part is read.
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

MAX_PICKLE_BYTES: Final = 1 << 30  # A pickle has only names and numbers. No model needs this much.
LOCAL_HEADER_BYTES: Final = 30


@dataclass(frozen=True)
class Storage:
    """Bytes of a file that contain values of one dtype. `start` is the offset from the beginning of the file."""

    path: Path
    key: str
    dtype: torch.dtype
    start: int
    numel: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a file. Stride and offset are in elements, as in torch."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """Whether the values are contiguous in the file."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def read(self) -> Tensor:
        """All values in new memory."""
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.is_flat:
            return self.read_range(0, self.numel).view(self.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self._load(self.offset, span).as_strided(self.shape, self.stride).contiguous()

    def read_range(self, start: int, numel: int) -> Tensor:
        """Values `start` to `start + numel` of the flattened tensor."""
        assert start >= 0 and start + numel <= self.numel
        if not self.is_flat:  # For example a transposed weight, whose rows are spread over the whole storage.
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
                    raise ValueError(
                        f"{self.storage.path} is cut off: it ends within the storage {self.storage.key!r}. "
                        "Copy it again."
                    )
                filled += count
        return tensor


class TorchFile:
    """The entries of a file of torch.save: the bytes of its pickle and the places of its storages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = file_status(path).st_size
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, struct.error) as error:
            raise ValueError(
                f"{path} is not a file of torch.save, or is cut off ({error}). Files of torch before 1.6 are not zip "
                "archives. Load and save them again with a newer torch."
            ) from error
        pickles = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(
                f"{path} is not a file of torch.save: it has {len(pickles)} entries 'data.pkl', but must have one."
            )
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in self._entries and self._bytes(order) != b"little":
            raise ValueError(
                f"{path} has the byte order {self._bytes(order)!r}, but must have b'little'. Save it again on a "
                "little-endian machine."
            )

    def pickle(self) -> bytes:
        return self._bytes(f"{self._prefix}data.pkl")

    def storage(self, key: str, dtype: torch.dtype, numel: int) -> Storage:
        """The place of the storage `key`. ValueError if its size does not fit."""
        name = f"{self._prefix}data/{key}"
        if name not in self._entries:
            raise ValueError(f"{self.path} has no entry {name!r}. The file is damaged.")
        start, size = self._place(name)
        if numel < 0 or size != numel * dtype.itemsize:
            raise ValueError(
                f"{self.path}: {name!r} has {size} bytes for {numel} values of {dtype}. The file is damaged."
            )
        return Storage(self.path, key, dtype, start, numel)

    def _bytes(self, name: str) -> bytes:
        start, size = self._place(name)
        if size > MAX_PICKLE_BYTES:
            raise ValueError(
                f"{self.path}: {name!r} has {size} bytes, but must have at most {MAX_PICKLE_BYTES}. "
                "The file is damaged."
            )
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(size)

    def _place(self, name: str) -> tuple[int, int]:
        """The offset and the size of an entry in the file."""
        info = self._entries[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError(
                f"{self.path}: {name!r} is compressed or encrypted, but torch.save never writes such entries. "
                "Save the file again with torch.save."
            )
        with open(self.path, "rb") as file:
            file.seek(info.header_offset)
            head = file.read(LOCAL_HEADER_BYTES)
        # The lengths of name and padding come from the local header. Those in the zip's index may differ.
        skip = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = info.header_offset + LOCAL_HEADER_BYTES + skip
        if head[:4] != b"PK\3\4" or start + info.file_size > self._size:
            raise ValueError(f"{self.path} is cut off or damaged: the entry {name!r} exceeds the file. Copy it again.")
        return start, info.file_size
