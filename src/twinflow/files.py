# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of files.

Readers: every file that comes from outside (configs, data, files of an earlier run) is read through `open_regular`,
`read_bytes`, `read_lines` and `parse_json`. They refuse what is not a regular file, what is larger than a file of its
kind can be, and JSON that is nested too deeply, so that no file makes a command hang or exhausts the memory. An error
names the file.

Writers: a reader, or a run that is resumed, never sees an incomplete file. A full disk costs a file, but not the run.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

SMALL_BYTES: Final = 2**20  # limit of a config, a hostfile or a description of data
LINE_BYTES: Final = 2**20  # limit of a line of metrics
MAX_NESTING: Final = 100  # levels of objects and lists in JSON
BUFFER_BYTES: Final = 2**16
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # errors that freeing space removes
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """Opens a file for reading. ValueError if it is not a regular file or has more than `max_bytes`."""
    _check_status(path, os.stat(path), max_bytes)  # before it is opened: opening a device can have effects
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_status(path, os.fstat(fd), max_bytes)  # it may have been replaced
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _check_status(path: Path, status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
        raise ValueError(f"{path} is {kind}, but must be a regular file. Give the path of such a file.")
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, f"{status.st_size:,} bytes", max_bytes)


def _too_large(where: object, found: str, max_bytes: int) -> ValueError:
    remedy = "The file is damaged, or it is not the one that was meant."
    return ValueError(f"{where} has {found}, but must have at most {max_bytes:,} bytes. {remedy}")


def read_bytes(path: Path, max_bytes: int = SMALL_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`."""
    with open_regular(path, max_bytes) as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:  # it grows while it is read, or the system does not report its size
        raise _too_large(path, f"more than {max_bytes:,} bytes", max_bytes)
    return raw


def read_text(path: Path, max_bytes: int = SMALL_BYTES) -> str:
    """The text of a file in UTF-8, with or without a byte order mark."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}). Save it as UTF-8.") from error


def read_lines(path: Path, max_bytes: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """The numbers (from 1) and contents of lines, with their line ends. A line may have at most `max_bytes`."""
    with open_regular(path) as file:
        yield from number_lines(file, path, max_bytes)


def number_lines(file: BinaryIO, path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """As `read_lines`, for a file that is open."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise _too_large(f"{path}, line {number}", f"more than {max_bytes:,} bytes", max_bytes)
        yield number, line


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text. `hooks`: arguments of `json.loads`. ValueError if it is not JSON in UTF-8, or is nested
    more than MAX_NESTING levels deep.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"), **hooks)
    except RecursionError:
        raise _too_deep() from None
    check_nesting(value)
    return value


def check_nesting(value: object) -> None:
    """Raises ValueError if dicts and lists are nested more than MAX_NESTING levels deep. Functions that copy, compare
    or print deeper values would exhaust the stack.
    """
    level = [value]
    for _ in range(MAX_NESTING):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"The text is nested more than {MAX_NESTING} levels deep")


def read_json(path: Path, max_bytes: int = SMALL_BYTES, **hooks: Any) -> Any:
    """The value in a JSON file. ValueError with its path if there is none. `hooks`: arguments of `json.loads`."""
    raw = read_bytes(path, max_bytes)
    try:
        return parse_json(raw, **hooks)
    except ValueError as error:
        raise ValueError(f"{path} does not contain valid JSON ({error}). Correct the file.") from error


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, a quota or the largest size of a file is exhausted."""
    return error.errno in FULL


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError. Errors of writes and syncs do not contain it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_whole(path: Path, content: str | Iterable[bytes]) -> None:
    """Replace the file at `path` atomically: readers see either the old content or the new one. Missing folders are
    created. If two processes write at the same time, the last one wins.
    """

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            # A path that is not UTF-8 has characters that cannot be encoded.
            whole = [content.encode("utf-8", "backslashreplace")] if isinstance(content, str) else content
            file.writelines(whole)

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace the file at `path` atomically by one that `write` writes to the path that it gets. An OSError has `path`
    as its file name.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with _naming_target(path, temporary):
            write(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _naming_target(path: Path, temporary: Path) -> Iterator[None]:
    """Puts `path` in place of the name of its temporary file, which a user does not know, in an OSError."""
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.filename != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def keep_lines(path: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Remove an incomplete last line and all lines for which `wanted` is false. A missing file is not created.

    ValueError with the number of the line if `wanted` raises one.
    """
    if not os.path.lexists(path):
        return
    end = kept_end = 0  # bytes that were read, and bytes up to the end of the last line that is kept
    num_lost = num_lost_before = 0  # lines that are removed, and those of them that another line follows
    for number, line in read_lines(path):
        end += len(line)
        if _is_kept(path, number, line, wanted):
            kept_end, num_lost_before = end, num_lost
        else:
            num_lost += 1
    if not num_lost:
        return
    try:
        lines = (line for number, line in read_lines(path) if _is_kept(path, number, line, wanted))
        write_whole(path, lines)
    except OSError as error:
        if not is_full(error) or num_lost_before:
            raise
        os.truncate(path, kept_end)  # needs no space


def _is_kept(path: Path, number: int, line: bytes, wanted: Callable[[str], bool] | None) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return wanted is None or wanted(line[:-1].decode("utf-8", "replace"))
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


class LineFile:
    """A file to which lines are appended.

    If a write fails, for example because the disk is full, `warn` gets one message, the lines are kept in memory, and
    the next `flush` tries again. The file then ends with its last complete line. Only a file that cannot be opened for
    another reason than a full disk raises an error.
    """

    def __init__(self, path: Path, warn: Callable[[str], object] = warnings.warn) -> None:
        self.path = path
        self._warn = warn
        self._fd = -1
        self._size = 0  # bytes of the file that are complete lines
        self._waiting = bytearray()
        self._reason = ""  # why the last flush has failed
        self.flush()

    @property
    def is_new(self) -> bool:
        """Whether the file has no lines, and none are waiting."""
        return not self._size and not self._waiting

    def add(self, line: str) -> None:
        """Adds a line, given with its line end."""
        self._waiting += line.encode("utf-8", "backslashreplace")
        if len(self._waiting) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the lines that wait."""
        try:
            with naming(self.path):
                self._open()
                self._write()
        except OSError as error:
            if self._fd < 0 and not is_full(error):
                raise
            if not self._reason:
                later = "The run continues. The lines are written when that is possible again."
                self._warn(f"{self.path} could not be written: {error.strerror}. {later}")
            self._reason = str(error.strerror)
        else:
            self._reason = ""

    def close(self) -> None:
        try:
            self.flush()
            if self._waiting:
                lost = self._waiting.count(b"\n")
                self._warn(f"{self.path}: The last {lost} lines could not be written: {self._reason}. They are lost.")
        finally:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open(self) -> None:
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, 0o666)
            self._size = os.fstat(self._fd).st_size

    def _write(self) -> None:
        done = 0
        try:
            with memoryview(self._waiting) as waiting:
                while done < len(waiting):
                    with waiting[done:] as rest:  # an error may keep it alive, and then `_waiting` could not change
                        done += os.write(self._fd, rest)
        except OSError:
            try:
                os.ftruncate(self._fd, self._size)  # half of a line would damage the next one
            except OSError:  # then the next flush writes the other half
                self._size += done
                del self._waiting[:done]
            raise
        self._size += done
        self._waiting.clear()
