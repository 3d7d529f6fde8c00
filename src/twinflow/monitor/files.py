"""Writing of files so that a reader, or a run that is resumed, never sees an incomplete one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` atomically. A reader sees either the old text or the new text. Missing folders are
    created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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
