"""Writes durable files, checks file names, and reads the file with the tag of the latest checkpoint."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from twinflow.errors import invalid_value
from twinflow.files import naming, read_bytes

LATEST: Final = "latest"
RESTORE: Final = "Restore this file from a copy, or give the tag of another checkpoint."
WRITE_BACK_BYTES: Final = 8 << 20  # large enough for the disk's full rate
MAX_NAME_BYTES: Final = 120  # With prefixes and suffixes, a name stays below the limit of 255 bytes for file names.

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
    path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._num_written = 0
        self._num_started = 0  # bytes for which write-back to the disk was started

    def __enter__(self) -> DurableFile:
        self.open()
        return self

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        with naming(self.path):
            while len(rest):
                rest = rest[os.write(self._fd, rest) :]
        self._num_written += len(data)
        if self._num_written - self._num_started >= WRITE_BACK_BYTES:
            # Otherwise the disk would be idle until the system has many changed pages, or until `sync`.
            start_write_back(self._fd, self._num_started, self._num_written - self._num_started)
            self._num_started = self._num_written

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
