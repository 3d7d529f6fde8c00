# SPDX-License-Identifier: Apache-2.0
"""A file with the optimizer state of buckets, or with weights (weight_source.py), and its buffers in memory
(csrc/state_file.h).

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A record is the
part of the file with the state of one bucket.

The file is scratch: checkpoints are the only copy of a run that outlives it. It has no name in the folder while it is
in use, so the system frees its space when the process ends, also by SIGKILL. All of its space is reserved before
training begins.

Threads: the native executor asks for records in the order of updates or of fetches. Other threads hold one record at a
time (`hold`). The library reads and writes with a few threads that have an io_uring each, or with a thread for each
request.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from twinflow.config.fields import DiskIo
from twinflow.errors import not_enough, unusable_path, wrong_state
from twinflow.native.executor import CFileCounters, CFileFailure, CFileSettings, ExecutorLibrary, executor_library

LOGGER = logging.getLogger("twinflow")

IO_URING: Final = "io_uring"
THREADS: Final = "threads"
AUTO: DiskIo = THREADS  # what "auto" means: the faster of both, or as fast, in benchmarks/disk_tier.py
PAGE: Final = 4096  # reads and writes around the page cache begin and end at multiples of the sectors of a disk
_DIRECT: Final = getattr(os, "O_DIRECT", 0)  # only Linux has it
_VERBS: Final = {1: "reading", 2: "writing", 3: "reading"}
_CHECKSUM: Final = 3
# Threads with an io_uring each. One computes the checksums of about 8 GB/s, which the fastest disks exceed.
_MOST_RINGS: Final = 2
_RESTART: Final = ". Remove the cause, build a new optimizer and load the last checkpoint."
_IN_USE: Final[list[Tensor]] = []  # buffers that the kernel may still use, because an io_uring has failed


@dataclass(frozen=True)
class Reserved:
    """Sizes of a file and its buffers."""

    folder: Path
    total_bytes: int  # of the records that exist from the start
    buffer_bytes: int  # of the largest record
    num_buffers: int
    num_threads: int  # number of reads and writes at the same time
    block_bytes: int  # bytes of one read or write
    io: DiskIo = "auto"
    what: str = "optimizer state"  # the content of the file, for errors

    @property
    def memory_bytes(self) -> int:
        return self.num_buffers * self.buffer_bytes


class StateFile:
    """A file in `sizes.folder`. Raises OSError, before anything is written, if there is too little space."""

    def __init__(
        self,
        sizes: Reserved,
        new_memory: Callable[[int], Tensor] | None = None,
        release: Callable[[Tensor], None] = lambda memory: None,
    ) -> None:
        """`new_memory` allocates the buffers, if they must be page-locked. `release` is called with this memory at the
        end.
        """
        self.sizes = sizes
        _check_space(sizes)
        fd, self.path, self.is_direct = new_file(sizes.folder)
        self.fd = fd
        self._library = library = executor_library()
        self._end = 0  # offset of the next record
        self._records: dict[int, tuple[int, int]] = {}  # by bucket: the record and its bytes
        self.handle = None
        try:
            reserve(fd, 0, sizes.total_bytes, sizes.folder, sizes.what)
            self._num_reserved = sizes.total_bytes
            memory = new_memory(sizes.memory_bytes) if new_memory is not None else None
            rings = num_rings(sizes.io, sizes.num_threads, self.is_direct)
            numbers = fd, sizes.num_buffers, sizes.num_threads, sizes.buffer_bytes, sizes.block_bytes, rings
            settings = CFileSettings(*numbers, memory.data_ptr() if memory is not None else None)
            self.handle = library.tf_file_new(ctypes.byref(settings))
            if not self.handle:
                needed = f"{sizes.num_buffers * sizes.buffer_bytes} bytes"
                remedy = "Use fewer buffers (buffer_count) or smaller buckets (bucket_numel)."
                raise not_enough("host memory", f"the buffers of the {sizes.what} on the disk", needed, "fewer", remedy)
        except BaseException:
            os.close(fd)
            raise
        self.io = IO_URING if library.tf_file_num_rings(self.handle) else THREADS
        self._open, self._pid = [fd], os.getpid()
        self._memory = [memory] if memory is not None else []
        self._release = release
        weakref.finalize(
            self, _close, library, self.handle, self._open, self._pid, self._memory, release, is_freed=True
        )

    def add(self, bucket: int, num_bytes: int) -> None:
        """Adds the record of a bucket, with zeros. Has no effect if the bucket has one. Raises OSError if the disk is
        full."""
        if bucket in self._records:
            return
        num_bytes = in_pages(num_bytes)
        if self._end + num_bytes > self._num_reserved:
            missing = self._end + num_bytes - self._num_reserved
            reserve(self.fd, self._num_reserved, missing, self.sizes.folder, self.sizes.what)
            self._num_reserved = self._end + num_bytes
        self._records[bucket] = (self._library.tf_file_add(self.handle, self._end, num_bytes), num_bytes)
        self._end += num_bytes

    def has(self, bucket: int) -> bool:
        return bucket in self._records

    def record_of(self, bucket: int) -> int:
        """The number of the record of a bucket, for the native executor."""
        return self._records[bucket][0]

    @contextmanager
    def hold(self, bucket: int, is_changed: bool) -> Iterator[Tensor]:
        """The bytes of a record, inside the context. `is_changed`: the caller writes to them.

        Raises OSError if the disk has failed, and RuntimeError in a forked process. Must not be nested.
        """
        self._check_process()
        record, num_bytes = self._records[bucket]
        address = self._library.tf_file_hold(self.handle, record)
        if not address:
            raise self.failure(_RESTART) or wrong_state(
                f"The {self.sizes.what} on the disk cannot be read",
                "the file is closed",
                "Build a new one to go on training.",
            )
        try:
            yield torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
        finally:
            self._library.tf_file_release(self.handle, record, is_changed)

    def expect(self, keys: Sequence[int]) -> None:
        """Tells which records will be used next, in this order. They are read ahead."""
        records = [self._records[key][0] for key in keys[: self.sizes.num_buffers]]
        self._library.tf_file_expect(self.handle, (ctypes.c_int64 * len(records))(*records), len(records))

    def flush(self) -> None:
        """Blocks until all changed records are in the file. Raises OSError if the disk has failed, and RuntimeError in
        a forked process.
        """
        self._check_process()
        if not self._library.tf_file_flush(self.handle) and (error := self.failure(_RESTART)) is not None:
            raise error

    def failure(self, remedy: str = "") -> OSError | None:
        """The first error of the disk; None if it has worked until now. `remedy`: the end of its message."""
        found = CFileFailure()
        self._library.tf_file_failed(self.handle, ctypes.byref(found))
        if not found.kind:
            return None
        where = f"the {self.sizes.what} in {self.path} failed at byte {found.offset}"
        if found.kind == _CHECKSUM:
            reason = "the checksum of the data is not that of the data that was written"
        else:
            reason = os.strerror(found.error) if found.error else "the file ends there"
        return OSError(found.error or errno.EIO, f"{_VERBS[found.kind]} {where}: {reason}{remedy}")

    @property
    def counters(self) -> CFileCounters:
        """Bytes that were read and written so far, and numbers of updates."""
        found = CFileCounters()
        self._library.tf_file_count(self.handle, ctypes.byref(found))
        return found

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise wrong_state(
                f"The {self.sizes.what} on the disk cannot be used",
                "this process was forked after the file was opened, and has neither its threads nor its buffers",
                "Use it in the process that has opened it.",
            )

    def close(self) -> None:
        """Ends the threads and frees buffers and file. State that is not in a checkpoint is lost."""
        _close(self._library, self.handle, self._open, self._pid, self._memory, self._release)


def _close(
    library: ExecutorLibrary,
    handle: int | None,
    open_fds: list[int],
    pid: int,
    memory: list[Tensor],
    release: Callable[[Tensor], None],
    is_freed: bool = False,
) -> None:
    """Ends the threads of a file. `is_freed`: no Python object refers to it any more."""
    is_own = os.getpid() == pid  # a forked process has neither the threads nor the buffers
    if is_own:
        if not library.tf_file_close(handle):
            _IN_USE.extend(memory)
            memory.clear()
        while memory:
            release(memory.pop())
    while open_fds:
        os.close(open_fds.pop())
    if is_own and is_freed:
        library.tf_file_free(handle)  # the native executor keeps what it still needs


def ring_refusal() -> str | None:
    """Why this process cannot use io_uring, which containers often block. None: it can."""
    error = executor_library().tf_ring_error()
    return os.strerror(error) if error else None


def num_rings(io: DiskIo, num_requests: int, is_direct: bool) -> int:
    """Number of io_urings of a file; 0: threads read and write it."""
    if io == THREADS or (io == "auto" and (AUTO == THREADS or not is_direct)):
        return 0
    refusal = ring_refusal()
    if refusal is None:
        return min(_MOST_RINGS, num_requests)
    if io == IO_URING:
        LOGGER.warning(
            f'disk_io is "io_uring", but the kernel refuses it ({refusal}), so threads read and write the files '
            "on the disk. Allow the system call io_uring_setup, for example in the seccomp profile of the container."
        )
    return 0


def reserve(fd: int, start: int, num_bytes: int, folder: Path, what: str) -> None:
    """Reserves space of a file in `folder`, from the byte `start` on. Raises OSError if there is too little.

    `what`: the content of the file, for the error.
    """
    try:
        if num_bytes:
            os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        raise _full(folder, what, start + num_bytes, error) from error


def in_pages(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def _check_space(sizes: Reserved) -> None:
    try:
        sizes.folder.mkdir(parents=True, exist_ok=True)
        found = os.statvfs(sizes.folder)
    except OSError as error:
        raise unusable_path("nvme_path", sizes.folder, "a folder in which files can be created", error) from error
    if found.f_bavail * found.f_frsize < sizes.total_bytes:
        raise _full(sizes.folder, sizes.what, sizes.total_bytes, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _full(folder: Path, what: str, num_bytes: int, error: OSError) -> OSError:
    found = os.statvfs(folder)
    needs = "need" if what.endswith("blocks") else "needs"
    free = found.f_bavail * found.f_frsize
    return OSError(
        error.errno,
        f"nvme_path {str(folder)!r} has too little space: the {what} {needs} {num_bytes / 1e9:.3f} GB, and "
        f"{free / 1e9:.3f} GB are free ({error.strerror}). Use another disk, a smaller format of the states, or a "
        "smaller ratio.",
    )


def new_file(folder: Path, option: str = "nvme_path") -> tuple[int, Path, bool]:
    """Creates a file and removes its name. Returns its descriptor, the former path, and whether it is used around the
    page cache, which some file systems refuse. `option`: the option with the folder, for errors.
    """
    try:
        fd, name = tempfile.mkstemp(prefix="twinflow-state-", dir=folder)
    except OSError as error:
        raise unusable_path(option, folder, "a folder in which files can be created", error) from error
    direct = -1
    try:
        if _DIRECT:
            with suppress(OSError):
                direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
    finally:
        os.unlink(name)
    if direct >= 0 and _works(direct):
        os.close(fd)
        return direct, Path(name), True
    if direct >= 0:
        os.close(direct)
    LOGGER.warning(
        f"{option} {str(folder)!r} is on a file system without direct I/O, so reads and writes pass through the page "
        "cache. Use a local disk with ext4 or XFS."
    )
    return fd, Path(name), False


def _works(fd: int) -> bool:
    """Whether a page can be written around the page cache. Some file systems accept the flag and refuse the write."""
    with mmap.mmap(-1, PAGE) as page:
        try:
            os.pwrite(fd, page, 0)
            os.ftruncate(fd, 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True
