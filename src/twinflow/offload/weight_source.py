# SPDX-License-Identifier: Apache-2.0
"""Where the weights of offloaded blocks are: in host memory, or in a file on a disk (`offload_param`).

A record is the part of the file with the weights of one bucket, or with some frozen weights of one block. Records of
buckets have the index of the bucket as key, and records of frozen weights have negative keys. The state of the bucket
is on the disk too (disk_updater.py), and contains the weights once more. So an update reads no weights from this file:
it writes them. Fetches of the native executor, and the Python threads that call `hold`, read them.

The buffers of the file are page-locked, because blocks are copied from them to the device.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from twinflow.device import Device, to_host
from twinflow.errors import unusable_path
from twinflow.offload.plan import padded
from twinflow.offload.settings import Tuning
from twinflow.offload.state_file import PAGE, Reserved, StateFile, in_pages, reserve

Frozen = TypeVar("Frozen", bound=Tensor)
WHAT = "weights of blocks"  # the content of the file, for errors


class WeightSource(Protocol):
    """Weights of one block that are copied together: all of them, or this rank's part."""

    @property
    def numel(self) -> int: ...

    @property
    def record(self) -> int:
        """The record of the file, for the native executor; -1 if the weights are in memory."""
        ...

    def hold(self, is_changed: bool = False) -> AbstractContextManager[Tensor]:
        """The values, inside of the context. `is_changed`: the caller writes to them. Must not be nested."""
        ...

    def read(self, start: int, numel: int) -> Tensor:
        """Some of the values: a view if they are in memory, otherwise a copy."""
        ...


@dataclass(frozen=True, eq=False)
class InMemory:
    """Weights in page-locked memory. `find` returns them as they are at the time of the call: stores are swapped."""

    find: Callable[[], Tensor]
    record: int = -1

    @property
    def numel(self) -> int:
        return self.find().numel()

    @contextmanager
    def hold(self, is_changed: bool = False) -> Iterator[Tensor]:
        yield self.find()

    def read(self, start: int, numel: int) -> Tensor:
        return self.find()[start : start + numel]


@dataclass(frozen=True, eq=False)
class OnDisk:
    """Weights in the record `key` of a file."""

    file: StateFile
    key: int
    numel: int
    dtype: torch.dtype

    @property
    def record(self) -> int:
        return self.file.record_of(self.key)

    @contextmanager
    def hold(self, is_changed: bool = False) -> Iterator[Tensor]:
        with self.file.hold(self.key, is_changed) as raw:
            yield raw[: self.numel * self.dtype.itemsize].view(self.dtype)

    def read(self, start: int, numel: int) -> Tensor:
        with self.hold() as values:
            return values[start : start + numel].clone()


def frozen_groups(params: Sequence[Frozen], max_bytes: int | None) -> Iterator[list[Frozen]]:
    """Frozen weights of a block that are copied together: of one dtype and, with `max_bytes`, of at most so many bytes,
    unless it is one tensor.
    """
    for dtype in dict.fromkeys(param.dtype for param in params):
        group: list[Frozen] = []
        for param in (param for param in params if param.dtype == dtype):
            if group and max_bytes is not None and bytes_of([*group, param], 1) > max_bytes:
                yield group
                group = []
            group.append(param)
        yield group


def bytes_of(group: Sequence[Tensor], world: int) -> int:
    """Bytes of the part of one of `world` ranks."""
    return -(-sum(padded(one.numel()) for one in group) // world) * group[0].dtype.itemsize


def new_file(
    tuning: Tuning, buckets: Sequence[tuple[int, int]], frozen: Sequence[int], device: Device
) -> StateFile | None:
    """The file for weights, with all of its space. None if nothing would be in it.

    `buckets`: elements and bytes of an element of each bucket. `frozen`: bytes of each record of frozen weights.
    """
    assert tuning.param_nvme_path is not None
    sizes = [*(in_pages(numel * each) for numel, each in buckets), *(in_pages(size) for size in frozen)]
    if not sizes:
        return None
    largest, total = max(sizes), sum(sizes)
    # Elements have two bytes or more.
    num_buffers = min(len(sizes), max(tuning.param_buffer_count, 2 * tuning.max_in_cpu // largest))
    reserved = Reserved(
        Path(tuning.param_nvme_path),
        total,
        largest,
        num_buffers,
        tuning.disk_requests,
        in_pages(tuning.disk_block_bytes),
        tuning.disk_io,
        WHAT,
    )
    return StateFile(reserved, lambda num_bytes: _aligned(device, num_bytes), device.release)


def home_of_weights(tuning: Tuning) -> Callable[[Tensor], Tensor]:
    """A function that moves values of a model that is being built to the host: into memory, or into files, each without
    a name, in the folder for weights on a disk. The space of a file is freed with its tensor.
    """
    if not tuning.param_nvme_path:
        return to_host
    folder = Path(tuning.param_nvme_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_path("nvme_path", folder, "a folder in which files can be created", error) from error
    there: set[int] = set()  # addresses of values that are in a file

    def move(values: Tensor) -> Tensor:
        if not values.numel() or values.data_ptr() in there:
            return values
        num_bytes = values.numel() * values.element_size()
        with tempfile.TemporaryFile(prefix="twinflow-weights-", dir=folder) as file:
            reserve(file.fileno(), 0, num_bytes, folder, WHAT)
            pages = mmap.mmap(file.fileno(), num_bytes)
        found = torch.frombuffer(pages, dtype=values.dtype).view(values.shape)
        found.copy_(values)
        pages.flush()
        pages.madvise(mmap.MADV_DONTNEED)  # read again from the file when they are copied into the state
        there.add(found.data_ptr())
        return found

    return move


def max_frozen_bytes(tuning: Tuning) -> int:
    """Bytes of frozen weights in one record, like those of a bucket of 16-bit weights."""
    return max(PAGE, 2 * tuning.bucket_numel)


def _aligned(device: Device, num_bytes: int) -> Tensor:
    """Page-locked bytes that start at a page, as reads and writes around the page cache need it."""
    raw = device.pinned(num_bytes + PAGE, torch.uint8)
    return raw[-raw.data_ptr() % PAGE :][:num_bytes]
