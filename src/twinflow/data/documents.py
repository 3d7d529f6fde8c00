"""Text to be encoded: which files, and the documents in them, a piece at a time."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from twinflow.data.files import TOKEN_SUFFIXES, reading
from twinflow.errors import invalid_value

JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")
LOOK_BYTES: Final = 2**20  # a zero byte within these makes a file binary
PIECE_BYTES: Final = 2**20
MAX_STDLIB_BYTES: Final = 16 * 2**20
# Tests repeat themselves and hold odd encodings; installed packages differ from machine to machine.
STDLIB_SKIPPED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class TextSource:
    """Files of text, in order."""

    files: tuple[Path, ...]
    num_bytes: int
    truncated: bool = False  # there were more
    is_plain_file: bool = False  # one file, to be taken as it is


class Piece(NamedTuple):
    """A part of a document, of about PIECE_BYTES at most."""

    text: bytes
    is_last: bool  # the document ends here
    num_bytes: int  # of the file, to tell progress by


def stdlib_files(folder: Path) -> list[Path]:
    """The library's own sources, in an order that does not depend on the file system."""
    found = (path for path in folder.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(path.relative_to(folder).parts))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def path_files(path: Path) -> list[Path]:
    """The file itself, or every visible file below a folder, sorted."""
    if path.is_file():
        return [path]
    visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted((p for p in visible if p.is_file()), key=lambda p: p.relative_to(path).as_posix())


def find_text(source: str) -> TextSource:
    """The files of `stdlib` (the source of Python's standard library), a text file, or a folder of text files."""
    if source == "stdlib":
        folder = Path(sysconfig.get_paths()["stdlib"])
        return _known(stdlib_files(folder), f"*.py files of the standard library in {folder}", MAX_STDLIB_BYTES)
    path = Path(source).expanduser()
    if path.is_dir():
        files = [file for file in path_files(path) if file.suffix not in (*TOKEN_SUFFIXES, ".idx")]
        return _known(files, f"text files in {path.absolute()}")
    if _is_binary(path):
        allowed = "a file of text, which has no zero bytes"
        raise invalid_value("data", str(path), allowed, "Save it as UTF-8; a file of tokens is named .bin or .npy.")
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise ValueError(f"data is {source!r}, which is empty. Give a file that holds some text.")
    return TextSource((path,), num_bytes, is_plain_file=not is_jsonl(path))


def _known(files: list[Path], looked_for: str, max_bytes: int | None = None) -> TextSource:
    """Those with text in them, as many as fit."""
    taken: list[Path] = []
    total, truncated = 0, False
    for path in files:
        size = path.stat().st_size
        if size == 0 or _is_binary(path):
            continue
        if max_bytes is not None and total + size > max_bytes:
            truncated = True
            break
        taken.append(path)
        total += size
    if not taken:
        raise ValueError(
            f"data: found no {looked_for} (empty, hidden and binary files are left out). "
            "Give a text file or a folder that holds some."
        )
    return TextSource(tuple(taken), total, truncated)


def _is_binary(path: Path) -> bool:
    with reading(path), path.open("rb") as file:
        return b"\0" in file.read(LOOK_BYTES)


def is_jsonl(path: Path) -> bool:
    """Whether each line is a JSON object with a document in it."""
    return path.suffix in JSONL_SUFFIXES


def pieces(text: TextSource, json_key: str) -> Iterator[Piece]:
    """All documents, one after the other; a text file is one, and so is each line of a JSONL file."""
    for path in text.files:
        with reading(path), path.open("rb") as file:
            yield from _json_lines(file, path, json_key) if is_jsonl(path) else _plain(file)


def _plain(file: BinaryIO) -> Iterator[Piece]:
    """Cut at the ends of lines, or where a line has none between characters."""
    piece = _read_piece(file)
    while piece:
        following = _read_piece(file)
        yield Piece(piece, not following, len(piece))
        piece = following


def _read_piece(file: BinaryIO) -> bytes:
    piece = file.read(PIECE_BYTES)
    if len(piece) < PIECE_BYTES or piece.endswith(b"\n"):
        return piece
    piece += file.readline(PIECE_BYTES)
    if not piece.endswith(b"\n"):
        ahead = file.read(3)
        num = next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))  # the rest of a character
        file.seek(num - len(ahead), 1)
        piece += ahead[:num]
    return piece


def _json_lines(file: BinaryIO, path: Path, json_key: str) -> Iterator[Piece]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:  # bad UTF-8 too
            raise ValueError(f"{path}, line {number} is not JSON ({error}). Mend the line or take it out.") from error
        if not isinstance(content, dict) or not isinstance(content.get(json_key), str):
            has = ", ".join(map(repr, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
            raise ValueError(
                f"{path}, line {number} has no text under {json_key!r}; it has {has or 'nothing'}. "
                "Name the field that holds the text with json_key."
            )
        yield Piece(content[json_key].encode("utf-8", "replace"), True, len(line))
