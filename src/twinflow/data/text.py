"""Text as bytes: a corpus read once, and the batch that belongs to a step.

A batch is a function of (seed, split, step) and nothing else, so a run that stops at step n goes on at step n + 1 with
the batches it would have seen, whatever was drawn in between.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinflow.errors import bad_value

Split = Literal["train", "valid"]

VOCAB_SIZE: Final = 256
VALID_SHARE: Final = 10  # one byte in this many, from the end of the text, is kept for validation
MAX_STDLIB_BYTES: Final = 16 * 2**20
MAX_PATH_BYTES: Final = 2**30  # the corpus lives in memory
# Tests repeat themselves and hold odd encodings; installed packages differ from machine to machine.
STDLIB_SKIPPED: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes to check on, read-only."""

    name: str
    train: npt.NDArray[np.uint8]
    valid: npt.NDArray[np.uint8]
    num_files: int
    fingerprint: str  # of all bytes: two runs with the same one read the same text
    truncated: bool  # the source held more than the cap
    seed: int = 0

    def batch(self, split: Split, step: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (the same text one byte on), each [batch_size, context] int64, for this step."""
        data = self.train if split == "train" else self.valid
        self.check_context(context)
        starts = window_starts(self.seed, split, step, batch_size, num_starts=data.size - context)
        windows = data[starts[:, None] + np.arange(context + 1)].astype(np.int64)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def check_context(self, context: int) -> None:
        """Raise when a split is too short for one window of `context` bytes and its targets."""
        shortest = min(self.train.size, self.valid.size)
        if shortest < context + 1:
            total = self.train.size + self.valid.size
            raise ValueError(
                f"data is {self.name!r} with {total:,} bytes; context {context} needs at least "
                f"{(context + 1) * VALID_SHARE:,} (a tenth is kept for validation). Give more text or smaller context."
            )


def window_starts(seed: int, split: Split, step: int, batch_size: int, num_starts: int) -> npt.NDArray[np.int64]:
    """Where the windows of one batch begin, drawn from 0 .. num_starts - 1.

    Raw Philox words rather than `Generator.integers`: numpy keeps bit generators stable across versions and only them,
    and a position must mean the same text after an upgrade. The bias of the modulo is below 2**-33.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, int(split == "valid"), step])).random_raw(batch_size)
    starts: npt.NDArray[np.int64] = (np.asarray(words, dtype=np.uint64) % np.uint64(num_starts)).astype(np.int64)
    return starts


def load_corpus(source: str, seed: int = 0) -> Corpus:
    """Read `stdlib` (the source of Python's standard library), a text file, or a folder of text files."""
    if seed < 0:
        raise bad_value("seed", seed, "a whole number >= 0")
    if source == "stdlib":
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = stdlib_files(folder)
        looked_for, cap = f"*.py files of the standard library in {folder}", MAX_STDLIB_BYTES
    else:
        path = Path(source).expanduser()
        files, looked_for, cap = path_files(path), f"text files in {path.absolute()}", MAX_PATH_BYTES
    text, num_files, truncated = read_capped(files, cap)
    if not text:
        raise ValueError(
            f"data is {source!r}; found no {looked_for} (empty and binary files are left out). "
            "Give a text file or a folder that holds some."
        )
    return split_corpus(text, source, num_files, truncated, seed)


def split_corpus(text: bytes, name: str, num_files: int = 1, truncated: bool = False, seed: int = 0) -> Corpus:
    """The last tenth of the text is for validation: whole files the training never saw, when there are many."""
    data = np.frombuffer(text, dtype=np.uint8)
    num_train = data.size - data.size // VALID_SHARE
    fingerprint = hashlib.sha256(text).hexdigest()[:12]
    return Corpus(name, data[:num_train], data[num_train:], num_files, fingerprint, truncated, seed)


def stdlib_files(folder: Path) -> list[Path]:
    """The library's own sources, in an order that does not depend on the file system."""
    found = (path for path in folder.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(path.relative_to(folder).parts))
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def path_files(path: Path) -> list[Path]:
    """The file itself, or every visible file below a folder, sorted."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        allowed = "'stdlib', a text file, or a folder of text files"
        raise bad_value("data", str(path), allowed, f"There is no file or folder at {path.absolute()}.")
    visible = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted((p for p in visible if p.is_file()), key=lambda p: p.relative_to(path).as_posix())


def read_capped(files: Iterable[Path], cap_bytes: int) -> tuple[bytes, int, bool]:
    """The text of the files one after the other, how many were read, and whether the cap cut something off."""
    parts: list[bytes] = []
    size = 0
    for text in text_of(files, cap_bytes):
        if size + len(text) > cap_bytes:
            parts.append(text[: cap_bytes - size])
            return b"".join(parts), len(parts), True
        parts.append(text)
        size += len(text)
    return b"".join(parts), len(parts), False


def text_of(files: Iterable[Path], cap_bytes: int) -> Iterator[bytes]:
    """Each file's bytes, ending in a newline; empty and binary files (those with a zero byte) are left out."""
    for path in files:
        try:
            with path.open("rb") as file:
                text = file.read(cap_bytes + 1)
        except OSError as error:
            raise ValueError(
                f"data: cannot read {path} ({error.strerror}). Make it readable or leave it out."
            ) from error
        if text and b"\0" not in text:
            yield text if text.endswith(b"\n") else text + b"\n"
