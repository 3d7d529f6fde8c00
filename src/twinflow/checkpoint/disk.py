# SPDX-License-Identifier: Apache-2.0
"""Writes durable files, checks file names, and reads the file with the tag of the latest checkpoint."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from twinflow.checkpoint.serial import SerialThread
from twinflow.errors import invalid_value
from twinflow.files import naming, read_bytes

LATEST: Final = "latest"
RESTORE: Final = "Restore this file from a copy, or give the tag of another checkpoint."
BLOCK_BYTES: Final = 16 << 20  # large enough for the full rate of disks and networks
_NUM_BLOCKS: Final = 3
MAX_NAME_BYTES: Final = 120  # With prefixes and suffixes, a name stays below the limit of 255 bytes for file names.

_DIRECT: Final = getattr(os, "O_DIRECT", 0)  # only Linux has it
_SYNC_FILE_RANGE_WRITE: Final = 2
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # only Linux has it
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def damaged(text: str) -> ValueError:
    """The error for a file of a checkpoint that is damaged or missing. `text` says what is wrong with it."""
    return ValueError(f"{text}. {RESTORE}")


def check_name(what: str, name: object, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Returns `name` if it is a plain file name, or raises ValueError. `what` is the subject of the error message."""
    plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and not re.search(r"[/\\]", name)
    if not plain or name != str(name).strip() or not 0 < len(os.fsencode(str(name))) <= max_bytes:
        allowed = f"a plain file name of 1 to {max_bytes} bytes: no slash, no leading dot, no control characters"
        raise invalid_value(what, name, allowed)
    return str(name)


def check_tag(tag: object) -> str:
    """Returns `tag` if a checkpoint's folder can have that name, or raises ValueError."""
    if tag == LATEST:
        raise invalid_value(
            "tag", tag, f"another name, because the file {LATEST!r} stores the tag of the latest checkpoint"
        )
    return check_name("tag", tag)


class Blocks:
    """Writes blocks of a file in threads, around the page cache if the file system can do that.

    Through the page cache, all bytes are copied by one more processor, and take memory that updates use beside a
    background checkpoint. Some disks are also several times as fast without it. Such writes need buffers that begin at
    a page. Each thread has one buffer: two of them write while the third is filled.
    """

    def __init__(self) -> None:
        self._buffers = [np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8) for _ in range(_NUM_BLOCKS)]
        self._threads = [SerialThread("block") for _ in self._buffers]
        self._which = 0
        self._num_filled = 0

    @property
    def is_full(self) -> bool:
        """Whether the present block must be written now."""
        return self._num_filled == BLOCK_BYTES

    def fill(self, data: memoryview) -> int:
        """Copies the first bytes of `data` into the present block, and returns their number."""
        if not self._num_filled:
            self._threads[self._which].wait()  # until the buffer is written; raises the error of the thread
        start, count = self._num_filled, min(len(data), BLOCK_BYTES - self._num_filled)
        self._buffers[self._which][start : start + count] = np.frombuffer(data[:count], np.uint8)
        self._num_filled += count
        return count

    def put(self, write: Callable[[memoryview], object]) -> None:
        """Lets a thread call `write` with the present block, and begins the next one."""
        self._threads[self._which].put(partial(write, self._buffers[self._which].data))
        self._which = (self._which + 1) % _NUM_BLOCKS
        self._num_filled = 0

    def take_rest(self) -> memoryview:
        """Waits until all full blocks are written, and returns the bytes of the present one."""
        for thread in self._threads:
            thread.wait()
        count, self._num_filled = self._num_filled, 0
        return self._buffers[self._which].data[:count]

    def close(self) -> None:
        """Ends the threads after the blocks that they write now."""
        for thread in self._threads:
            thread.close()


class DurableFile:
    """A new file. Its bytes are on the disk after `flush` and `sync`, or after a `with` block without an error. Errors
    contain its path.

    With `blocks`, they write the file. Only one file at a time may use them, until `flush`.
    """

    def __init__(self, path: Path, blocks: Blocks | None = None) -> None:
        self.path = path
        self._blocks = blocks
        self._fd = -1
        self._num_put = 0  # bytes of full blocks
        self._is_direct = False

    def __enter__(self) -> DurableFile:
        self.open()
        return self

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        if self._blocks is not None:
            self._set_direct(True)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        if self._blocks is None:
            self._write_at(self._num_put, rest)
            self._num_put += len(rest)
            return
        while len(rest):
            rest = rest[self._blocks.fill(rest) :]
            if self._blocks.is_full:
                self._blocks.put(partial(self._write_at, self._num_put))
                self._num_put += BLOCK_BYTES

    def flush(self) -> None:
        """Writes the bytes that are still in a block."""
        if self._blocks is not None:
            rest = self._blocks.take_rest()
            self._set_direct(False)  # because the rest is not a number of whole sectors
            self._write_at(self._num_put, rest)
            self._num_put += len(rest)

    def sync(self) -> None:
        with naming(self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
                self.sync()
        finally:
            self.close()

    def _set_direct(self, is_direct: bool) -> None:
        """Turns writes around the page cache on or off. File systems without such writes refuse the flag."""
        if _DIRECT and is_direct != self._is_direct:
            with suppress(OSError):
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _DIRECT if is_direct else flags & ~_DIRECT)
                self._is_direct = is_direct

    def _write_at(self, start: int, data: memoryview) -> None:
        with naming(self.path):
            for_disk = data
            at = start
            while len(for_disk):
                try:
                    count = os.pwrite(self._fd, for_disk, at)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._is_direct:
                        raise
                    self._set_direct(False)  # a file system that accepts the flag and refuses the write
                    continue
                for_disk = for_disk[count:]
                at += count
        if self._blocks is not None and not self._is_direct:
            # Otherwise the disk would be idle until the system has many changed pages, or until `sync`.
            start_write_back(self._fd, start, len(data))


def start_write_back(fd: int, start: int, num_bytes: int) -> None:
    """Asks the system to write these bytes of a file to the disk, without waiting for it."""
    if _SYNC_FILE_RANGE is not None:
        # The result is not used: this call only saves time. `fsync` reports errors of the disk.
        _SYNC_FILE_RANGE(fd, start, num_bytes, _SYNC_FILE_RANGE_WRITE)


def write_durable(path: Path, data: bytes) -> None:
    """Writes `data` to the new file `path` and syncs it to the disk."""
    with DurableFile(path) as file:
        file.write(data)


def file_status(path: Path) -> os.stat_result:
    """The status of a regular file. ValueError if it does not exist or is not a regular file."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise damaged(f"{path} is missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise damaged(f"{path} is not a regular file, but must be one")
    return status


def counting(on_progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """A function that adds up numbers of bytes and calls `on_progress` with the sum and the total."""
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress(done, total)

    return on_bytes


def sync_folder(folder: Path) -> None:
    """Syncs `folder` to the disk, so that new and renamed files in it survive a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(folder):
            os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Deletes a temporary file or folder. If this fails, no error is raised, and the next save deletes what is left."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_latest(root: Path) -> str | None:
    """The tag in the file `latest`. None if there is no such file."""
    path = root / LATEST
    if path.is_dir():
        raise ValueError(f"{path} is a folder, but must be a file with the tag of a checkpoint. Rename the folder.")
    try:
        raw = read_bytes(path, 16 * MAX_NAME_BYTES)
    except FileNotFoundError:
        return None
    try:
        return check_tag(raw.decode("utf-8").strip())
    except ValueError as error:
        remedy = "Write the tag of a checkpoint (the name of its folder) to the file, or pass a tag."
        raise ValueError(f"{path} does not contain a tag. {remedy} The reason: {error}") from error
