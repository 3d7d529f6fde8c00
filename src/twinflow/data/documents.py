"""Text to be encoded: the search for its files, and an iterator over their documents in pieces."""

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
LOOK_BYTES: Final = 2**20  # a file with a zero byte in its first LOOK_BYTES counts as binary
PIECE_BYTES: Final = 2**20
MAX_STDLIB_BYTES: Final = 16 * 2**20
# Tests are repetitive and have unusual encodings. Installed packages differ between machines.
STDLIB_SKIPPED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class TextSource:
    """Text files in the order in which they are read."""

    files: tuple[Path, ...]
    num_bytes: int
    truncated: bool = False  # there were more files than the limit allows
    is_plain_file: bool = False  # one text file, whose bytes need no change


class Piece(NamedTuple):
    """A part of a document, at most about PIECE_BYTES long."""

    text: bytes
    is_last: bool  # this piece ends the document
    num_bytes: int  # bytes read from the file, for the progress display


def stdlib_files(folder: Path) -> list[Path]:
    """Python files of the standard library, in an order that does not depend on the file system."""
    found = (path for path in folder.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(path.relative_to(folder).parts))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def path_files(path: Path) -> list[Path]:
    """The file itself, or all files below a folder that are not hidden, sorted."""
    if path.is_file():
        return [path]
    visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted((p for p in visible if p.is_file()), key=lambda p: p.relative_to(path).as_posix())


def find_text(source: str) -> TextSource:
    """The text files of a source: "stdlib" (the sources of Python's standard library), a text file, or a folder of text
    files. Raises ValueError if there is no text.
    """
    if source == "stdlib":
        folder = Path(sysconfig.get_paths()["stdlib"])
        return _known(stdlib_files(folder), f"*.py files of the standard library in {folder}", MAX_STDLIB_BYTES)
    path = Path(source).expanduser()
    if path.is_dir():
        files = [file for file in path_files(path) if file.suffix not in (*TOKEN_SUFFIXES, ".idx")]
        return _known(files, f"text files in {path.absolute()}")
    if _is_binary(path):
        allowed = "a file of text, which has no zero bytes"
        raise invalid_value("data", str(path), allowed, "Save text as UTF-8. Name a file of tokens .bin or .npy.")
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise ValueError(f"data is {source!r}, but this file is empty. Give a file with text.")
    return TextSource((path,), num_bytes, is_plain_file=not is_jsonl(path))


def _known(files: list[Path], looked_for: str, max_bytes: int | None = None) -> TextSource:
    """A source of the files that contain text, up to `max_bytes` in total."""
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
            f"data: found no {looked_for}. Empty, hidden and binary files are not read. "
            "Give a text file or a folder with text files."
        )
    return TextSource(tuple(taken), total, truncated)


def _is_binary(path: Path) -> bool:
    with reading(path), path.open("rb") as file:
        return b"\0" in file.read(LOOK_BYTES)


def is_jsonl(path: Path) -> bool:
    """Whether each line of the file is a JSON object with a document."""
    return path.suffix in JSONL_SUFFIXES


def pieces(text: TextSource, json_key: str) -> Iterator[Piece]:
    """The pieces of all documents in order. A text file is one document, and each line of a JSONL file is one."""
    for path in text.files:
        with reading(path), path.open("rb") as file:
            yield from _json_lines(file, path, json_key) if is_jsonl(path) else _plain(file)


def _plain(file: BinaryIO) -> Iterator[Piece]:
    """Pieces of a text file. A piece ends at the end of a line, or between two characters if the line is too long."""
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
        # bytes of an incomplete UTF-8 character
        num = next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))
        file.seek(num - len(ahead), 1)
        piece += ahead[:num]
    return piece


def _json_lines(file: BinaryIO, path: Path, json_key: str) -> Iterator[Piece]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:  # also raised for invalid UTF-8
            raise ValueError(f"{path}, line {number} is not JSON ({error}). Correct or remove the line.") from error
        if not isinstance(content, dict) or not isinstance(content.get(json_key), str):
            has = ", ".join(map(repr, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
            raise ValueError(
                f"{path}, line {number} has no text under {json_key!r}; it has {has or 'nothing'}. "
                "Set json_key to the name of the field with the text."
            )
        yield Piece(content[json_key].encode("utf-8", "replace"), True, len(line))
