"""Writing of files so that a reader, or a run that is resumed, never sees an incomplete one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path


def write_whole(path: Path, content: str | Iterable[bytes]) -> None:
    """Replace the file at `path` atomically: readers see either the old content or the new one. Missing folders are
    created. If two processes write at the same time, the last one wins.
    """

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines([content.encode()] if isinstance(content, str) else content)

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, write)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace the file at `path` atomically by one that `write` writes to the path that it gets."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def keep_lines(path: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Remove an incomplete last line and all lines for which `wanted` is false. A missing file is not created."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    lines = text.split("\n")[:-1]
    kept = "".join(line + "\n" for line in lines if wanted is None or wanted(line))
    if kept != text:
        write_whole(path, kept)
