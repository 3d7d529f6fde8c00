"""Durable files, plain names, and the file that says which checkpoint is the latest."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from twinflow.errors import invalid_value

LATEST: Final = "latest"
MAX_NAME_BYTES: Final = 120  # with all that is put around a name it stays within the 255 bytes of a file name


def check_name(what: str, name: object, max_bytes: int = MAX_NAME_BYTES) -> str:
    """`name`, if it is a plain file name that stays in its folder; `what` says in the error what it names."""
    plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and not re.search(r"[/\\]", name)
    if not plain or name != str(name).strip() or not 0 < len(os.fsencode(str(name))) <= max_bytes:
        allowed = f"a plain file name of 1 to {max_bytes} bytes: no slash, no leading dot, no control characters"
        raise invalid_value(what, name, allowed)
    return str(name)


def check_tag(tag: object) -> str:
    """`tag`, if a checkpoint's folder may have that name."""
    if tag == LATEST:
        raise invalid_value("tag", tag, "any name but that of the file that says which checkpoint is the latest")
    return check_name("tag", tag)


class DurableFile:
    """A new file whose bytes are on the disk once its `with` block ends; its errors name it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def __enter__(self) -> DurableFile:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`; no copy is made."""
        rest = memoryview(data)
        with _naming(self.path):
            while len(rest):
                rest = rest[os.write(self._fd, rest) :]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                with _naming(self.path):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put `path` into an OSError: those of writes and syncs do not say which file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_durable(path: Path, data: bytes) -> None:
    """Write `data` to the new file `path`, onto the disk."""
    with DurableFile(path) as file:
        file.write(data)


def file_status(path: Path) -> os.stat_result:
    """Of a plain file; a ValueError where there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; use another checkpoint, or bring the file back") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a plain file")
    return status


def counting(on_progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Takes counts of bytes as they come; tells `on_progress` how many there were, of how many."""
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress(done, total)

    return on_bytes


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _naming(folder):
            os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Delete a file or a folder; what cannot be deleted stays for the next save to clear away."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_latest(root: Path) -> str | None:
    """The tag in the file `latest`; None where there is no such file."""
    path = root / LATEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        raise ValueError(f"{path} is a folder; it should be a file holding a tag. Move it away") from error
    try:
        return check_tag(raw.decode("utf-8").strip())
    except ValueError as error:
        raise ValueError(
            f"{path} does not hold a tag ({error}); write the tag of a checkpoint into it, or open one by its tag"
        ) from error
