"""Files that a reader, or a run that is resumed, finds whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file; a reader sees the old one or the new one, never half of one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def keep_lines(path: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Drop a last line that was cut short, and the lines that are not `wanted`. A file that is not there stays so."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    lines = text.split("\n")[:-1]
    kept = "".join(line + "\n" for line in lines if wanted is None or wanted(line))
    if kept != text:
        write_whole(path, kept)
