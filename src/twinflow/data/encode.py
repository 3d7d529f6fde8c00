# SPDX-License-Identifier: Apache-2.0
"""Finds text files, reads their documents in pieces, and encodes them with a tokenizer: each byte is a token, or a
Hugging Face tokenizer makes the tokens. Tokens can be cached in a file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twinflow.data.files import TOKEN_SUFFIXES, missing_path, reading
from twinflow.errors import invalid_value
from twinflow.files import number_lines, open_regular, parse_json, read_bytes, read_json, write_whole

JSONL_SUFFIXES: Final = (".jsonl", ".ndjson")
LOOK_BYTES: Final = 2**20  # a file with a zero byte in its first LOOK_BYTES counts as binary
PIECE_BYTES: Final = 2**20
MAX_LINE_BYTES: Final = 2**28  # of a JSONL file, which is one document
MAX_TOKENIZER_BYTES: Final = 2**28
MAX_STDLIB_BYTES: Final = 16 * 2**20
# Tests are repetitive and have unusual encodings. Installed packages differ between machines.
STDLIB_SKIPPED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
Array = npt.NDArray[Any]

BATCH_BYTES: Final = 2**22  # size of a batch of text that is encoded at once, on all cores
VERSION: Final = "1"  # version of the format of the cache
TOKENIZER_FILE: Final = "tokenizer.json"
# End-of-text tokens that are tried if the tokenizer's settings name none.
END_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True)
class TextSource:
    """Text files in the order in which they are read."""

    files: tuple[Path, ...]
    num_bytes: int
    truncated: bool = False  # there were more files than the limit allows
    is_plain_file: bool = False  # one text file, whose bytes need no change


class Piece(NamedTuple):
    """A part of a text file, at most about PIECE_BYTES long, or a whole document of a JSONL file."""

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
            f"data: There are no {looked_for}. Empty, hidden and binary files are not read. "
            "Give a text file or a folder with text files."
        )
    return TextSource(tuple(taken), total, truncated)


def _is_binary(path: Path) -> bool:
    with reading(path), open_regular(path) as file:
        return b"\0" in file.read(LOOK_BYTES)


def is_jsonl(path: Path) -> bool:
    """Whether, by its suffix, the file has a JSON object with a document in each line."""
    return path.suffix in JSONL_SUFFIXES


def pieces(text: TextSource, json_key: str) -> Iterator[Piece]:
    """The pieces of all documents in order. A text file is one document, and each line of a JSONL file is one."""
    for path in text.files:
        with reading(path), open_regular(path) as file:
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
        # number of bytes that continue the last UTF-8 character
        num = next((i for i, byte in enumerate(ahead) if byte & 0xC0 != 0x80), len(ahead))
        file.seek(num - len(ahead), 1)
        piece += ahead[:num]
    return piece


def _json_lines(file: BinaryIO, path: Path, json_key: str) -> Iterator[Piece]:
    for number, line in number_lines(file, path, MAX_LINE_BYTES):
        if not line.strip():
            continue
        try:
            content = parse_json(line)
        except ValueError as error:  # also raised for invalid UTF-8
            raise ValueError(f"{path}, line {number} is not JSON ({error}). Correct or remove the line.") from error
        if not isinstance(content, dict) or not isinstance(content.get(json_key), str):
            raise _no_text(f"{path}, line {number}", content, json_key)
        yield Piece(content[json_key].encode("utf-8", "replace"), True, len(line))


def _no_text(where: str, content: object, json_key: str) -> ValueError:
    """The error for a line of a JSONL file without text in the field `json_key`."""
    expected = f"but must be an object with text in the field {json_key!r}"
    if not isinstance(content, dict):
        return ValueError(f"{where} is a {type(content).__name__}, {expected}. Correct or remove the line.")
    if json_key in content:
        found = f"has a value of type {type(content[json_key]).__name__} in the field {json_key!r}"
        return ValueError(f"{where} {found}, but must have text. Correct the line, or set json_key to another field.")
    found = f"has the fields {', '.join(map(repr, content))}" if content else "has no fields"
    return ValueError(f"{where} {found}, {expected}. Set json_key to the name of the field with the text.")


class Tokenizer(Protocol):
    """Encodes text as tokens, and decodes tokens as text."""

    name: str  # as the user gave it
    vocab_size: int  # All tokens are less than this number.
    dtype: np.dtype[Any]  # the narrowest for all tokens
    fingerprint: str  # Tokenizers with equal fingerprints give the same tokens.

    def encode(self, texts: Sequence[bytes]) -> Sequence[Array]: ...

    def end(self, text: bytes) -> Array:
        """The tokens between a document that ends with `text` and the next document."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. Bytes that are not valid UTF-8 are replaced."""
        ...


class BytesTokenizer:
    """A tokenizer for which each byte is a token. Documents end with a newline."""

    name: str = "bytes"
    vocab_size: int = 256
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    fingerprint: str = f"bytes {VERSION}"

    def encode(self, texts: Sequence[bytes]) -> Sequence[Array]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def end(self, text: bytes) -> Array:
        """A newline, unless `text` ends with one."""
        return np.frombuffer(b"" if text.endswith(b"\n") else b"\n", dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class HubTokenizer:
    """A Hugging Face tokenizer from its tokenizer.json. Documents end with its end-of-text token, if it has one.

    Only this file and the name of the end-of-text token are read. Code that comes with a tokenizer is not run.
    """

    def __init__(self, path: Path, name: str) -> None:
        try:
            library = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ValueError(
                f"tokenizer is {name!r}, but the package tokenizers, which reads it, is not installed. "
                "Install it with: pip install tokenizers"
            ) from error
        with reading(path):
            content = read_bytes(path, MAX_TOKENIZER_BYTES)
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises Exception itself
            raise ValueError(
                f"{path} is not a tokenizer that can be read ({error}). Save it again with save_pretrained()."
            ) from error
        self.name = name
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.dtype = np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")
        self._end = self._find_end(path.parent)
        self.fingerprint = hashlib.sha256(content).hexdigest() + f" {self._end} {VERSION}"

    def _find_end(self, folder: Path) -> int | None:
        settings: Any = {}
        with suppress(OSError, ValueError):  # on an error END_TOKENS are tried
            settings = read_json(folder / "tokenizer_config.json", MAX_TOKENIZER_BYTES)
        named = settings.get("eos_token") if isinstance(settings, dict) else None
        named = named.get("content") if isinstance(named, dict) else named
        ids = (self._tokenizer.token_to_id(token) for token in ([named] if isinstance(named, str) else END_TOKENS))
        return next((number for number in ids if number is not None), None)

    def encode(self, texts: Sequence[bytes]) -> Sequence[Array]:
        """The tokens of each text, without special tokens at its start and end."""
        decoded = [text.decode("utf-8", "replace") for text in texts]
        encoded = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(one.ids, dtype=self.dtype) for one in encoded]

    def end(self, text: bytes) -> Array:
        return np.array([] if self._end is None else [self._end], dtype=self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer. `name`: "bytes", the folder of a Hugging Face tokenizer, or its tokenizer.json. Raises
    ValueError if it is not found or cannot be read.
    """
    if name == BytesTokenizer.name:
        return BytesTokenizer()
    path = Path(name).expanduser()
    if not path.exists():
        raise missing_path("tokenizer", path, f"'bytes', or a folder with a {TOKENIZER_FILE}")
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        remedy = "Save a fast tokenizer of transformers there with tokenizer.save_pretrained()."
        raise invalid_value("tokenizer", name, f"'bytes', or a folder with a {TOKENIZER_FILE}", remedy)
    return HubTokenizer(file, name)


def encoded(
    text: TextSource, tokenizer: Tokenizer, json_key: str, progress: Callable[[int, int], None] | None = None
) -> Iterator[Array]:
    """Iterate over all tokens in order, in arrays for about `BATCH_BYTES` of text."""
    done, size, waiting = 0, 0, list[Piece]()
    for piece in pieces(text, json_key):
        waiting.append(piece)
        size += len(piece.text)
        done += piece.num_bytes
        if size >= BATCH_BYTES:
            yield _encode(waiting, tokenizer)
            size, waiting = 0, []
            if progress is not None:
                progress(done, text.num_bytes)
    if waiting:
        yield _encode(waiting, tokenizer)
    if progress is not None:
        progress(text.num_bytes, text.num_bytes)


def _encode(waiting: Sequence[Piece], tokenizer: Tokenizer) -> Array:
    arrays: list[Array] = []
    for piece, tokens in zip(waiting, tokenizer.encode([piece.text for piece in waiting]), strict=True):
        arrays.append(tokens)
        if piece.is_last:
            arrays.append(tokenizer.end(piece.text))
    return np.concatenate(arrays)


def default_cache() -> Path:
    """The default folder for cached tokens, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "twinflow" / "tokens"


def cached_tokens(
    text: TextSource,
    tokenizer: Tokenizer,
    json_key: str,
    fingerprint: str,
    cache: Path | str | None,
    progress: Callable[[int, int], None] | None = None,
) -> Array:
    """All tokens, memory-mapped from a cache file, which is written if missing. `load_data` can load this file."""
    folder = default_cache() if cache is None else Path(cache).expanduser()
    file, side = folder / f"{fingerprint}.bin", folder / f"{fingerprint}.json"
    try:
        if not _is_whole(file, side, tokenizer):
            arrays = encoded(text, tokenizer, json_key, progress)
            write_whole(file, (array.astype(tokenizer.dtype, copy=False).tobytes() for array in arrays))
            num_tokens = file.stat().st_size // tokenizer.dtype.itemsize
            facts = {"dtype": tokenizer.dtype.name, "vocab_size": tokenizer.vocab_size, "num_tokens": num_tokens}
            write_whole(side, json.dumps(facts))
    except OSError as error:
        raise ValueError(
            f"twinflow cannot write the tokens to {folder} ({error.strerror}). "
            "Choose a writable folder with free space: cache=FOLDER, or the environment variable XDG_CACHE_HOME."
        ) from error
    if file.stat().st_size == 0:
        return np.empty(0, tokenizer.dtype)
    return np.memmap(file, dtype=tokenizer.dtype, mode="r")


def _is_whole(file: Path, side: Path, tokenizer: Tokenizer) -> bool:
    try:
        num_tokens = read_json(side)["num_tokens"]
        return bool(file.stat().st_size == num_tokens * tokenizer.dtype.itemsize)
    except (OSError, ValueError, KeyError, TypeError):
        return False
