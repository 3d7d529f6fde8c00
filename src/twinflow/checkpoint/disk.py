# SPDX-License-Identifier: Apache-2.0
"""Writes durable files, checks file names, and reads the file with the tag of the latest checkpoint."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from twinflow.errors import invalid_value
from twinflow.files import naming, read_bytes

LATEST: Final = "latest"
RESTORE: Final = "Restore this file from a copy, or give the tag of another checkpoint."
PAGE: Final = 4096  # memory and offsets of writes around the page cache are multiples of it
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


class DurableFile:
    """A new file. Its bytes are on the disk after `sync`, or after a `with` block without an error. Errors contain its
    path. Several threads may write parts of it at the same time.

    With `is_direct`, whole pages are written around the page cache, if the file system can do that. Through the page
    cache, all bytes are copied by one more processor, and take memory that updates use beside a background checkpoint.
    Some disks are also several times as fast without it.
    """

    def __init__(self, path: Path, is_direct: bool = False) -> None:
        self.path = path
        self._is_direct = is_direct
        self._takes_direct = is_direct and bool(_DIRECT)
        self._fd = -1
        self._direct_fd = -1

    def __enter__(self) -> DurableFile:
        self.open()
        return self

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        if self._takes_direct:
            try:
                self._direct_fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
            except OSError:  # a file system without such writes
                self._takes_direct = False

    def write(self, data: bytes | memoryview, start: int = 0) -> None:
        """Writes `data` at the offset `start`. Only memory that begins at a page is written around the page cache."""
        rest = memoryview(data)
        with naming(self.path):
            done = self._write_direct(rest, start)
            at, rest = start + done, rest[done:]
            num_cached = len(rest)
            while len(rest):
                count = os.pwrite(self._fd, rest, at + num_cached - len(rest))
                rest = rest[count:]
        if self._is_direct and num_cached:
            # Otherwise the disk would be idle until the system has many changed pages, or until `sync`.
            start_write_back(self._fd, at, num_cached)

    def _write_direct(self, data: memoryview, start: int) -> int:
        """Writes the whole pages of `data`, and returns the number of bytes written."""
        done = 0
        is_aligned = self._takes_direct and not (start | np.frombuffer(data, np.uint8).ctypes.data) % PAGE
        num_bytes = len(data) // PAGE * PAGE if is_aligned else 0
        try:
            while done < num_bytes:
                done += os.pwrite(self._direct_fd, data[done:num_bytes], start + done)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._takes_direct = False  # a file system that accepts the flag and refuses the write
        return done

    def sync(self) -> None:
        with naming(self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        fds = self._fd, self._direct_fd
        self._fd = self._direct_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            self.close()


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
