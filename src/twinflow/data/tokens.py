# SPDX-License-Identifier: Apache-2.0
"""Training tokens, and the batch for each index.

`load_data` loads a source (the standard library, text, JSONL, or a file of tokens) as a `TokenData`. A split is divided
into adjacent windows. A window is `context` tokens and the token after them. An epoch uses every window once, in a
random order that differs between epochs. A batch depends only on (seed, split, index, batch size, context). A run that
stops after batch n can therefore resume with batch n + 1, no matter which other batches were drawn before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinflow.data.encode import (
    MAX_STDLIB_BYTES,
    BytesTokenizer,
    Tokenizer,
    cached_tokens,
    encoded,
    find_text,
    is_jsonl,
    load_tokenizer,
)
from twinflow.data.files import TOKEN_SUFFIXES, hash_text, hash_tokens, missing_path, open_tokens
from twinflow.errors import invalid_value

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
Split = Literal["train", "valid"]
Progress = Callable[[int, int], None]  # bytes of text encoded so far, and in total

VALID_SHARE: Final = 0.1
# Tokens of the bytes tokenizer from several files or from JSONL are joined in memory up to this size. Larger text is
# joined in a cache file.
MAX_IN_MEMORY_BYTES: Final = 2**28
# If the vocabulary size of a file is not known and its dtype has at most 16 bits, the range of the dtype is used.
MAX_GUESSED_VOCAB: Final = 2**16

# The order of windows in an epoch is a permutation that is computed for each index and never stored. A Feistel network
# is a permutation of 0 .. 4**k - 1 for any round function. A result that is too large goes through the network again
# until it is below the number of windows (cycle walking), which gives a permutation again.
NUM_ROUNDS: Final = 8


def epoch_keys(seed: int, stream: int, epoch: int) -> _Words:
    """The keys of the permutation of one epoch, one for each Feistel round. `stream`: 0 for training, 1 for validation.

    The keys are raw words of Philox, because numpy guarantees stable results across versions only for bit generators
    and not for `Generator`. After an upgrade of numpy, an index must give the same text.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, stream, epoch])).random_raw(NUM_ROUNDS)
    return np.asarray(words, dtype=np.uint64)


def shuffled(indices: Indices, num: int, keys: _Words) -> Indices:
    """Apply the permutation of 0 .. num - 1 that `keys` define to `indices`, which must be in this range."""
    half_bits = max(1, ((num - 1).bit_length() + 1) // 2)
    places = _feistel(indices.astype(np.uint64), half_bits, keys)
    while (outside := places >= num).any():  # less than three quarters of the places are outside
        places[outside] = _feistel(places[outside], half_bits, keys)
    return places.astype(np.int64)


def _feistel(values: _Words, half_bits: int, keys: _Words) -> _Words:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    mixed: _Words = (left << shift) | right
    return mixed


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed


OF_THE_FILE: Final = "of the file"  # the tokenizer of a file of tokens, which is not known


@dataclass(frozen=True, eq=False)
class TokenData:
    """A stream of tokens, in memory or memory-mapped, with a training split and a validation split."""

    name: str  # the source as the user gave it
    tokens: npt.NDArray[Any]  # one dimension, any integer dtype
    num_train: int  # the first `num_train` tokens are the training split
    vocab_size: int
    tokenizer: str
    fingerprint: str  # runs with equal fingerprints read the same tokens
    num_files: int = 1
    truncated: bool = False  # the source was larger than the limit and was not read completely
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens in both splits."""
        return len(self.tokens)

    def describe(self) -> str:
        """One line with name, size and fingerprint."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files:,} files"
        cut = f", only the first {MAX_STDLIB_BYTES >> 20} MiB" if self.truncated else ""
        return (
            f"{self.name}: {_amount(self.num_tokens)} tokens in {files}{cut}, tokenizer {self.tokenizer}, "
            f"vocabulary {self.vocab_size:,}, fingerprint {self.fingerprint}"
        )

    def batch(self, split: Split, index: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (the tokens shifted by one) of batch `index`, each [batch_size, context] int64."""
        data = self._part(split)
        rows = [data[start : start + context + 1] for start in self._starts(split, index, batch_size, context)]
        windows = np.stack(rows).astype(np.int64)
        self._check_ids(windows)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def num_windows(self, split: Split, context: int) -> int:
        """Number of windows in an epoch. Remaining tokens at the end of the split are not used."""
        return max(0, (len(self._part(split)) - 1) // context)

    def check_context(self, context: int) -> None:
        """Raise ValueError if a split is too short for one window, which has `context` + 1 tokens."""
        for split in ("train", "valid") if self.num_train < self.num_tokens else ("train",):
            if self.num_windows(split, context) < 1:
                raise self._too_short(split, context)

    def _starts(self, split: Split, index: int, batch_size: int, context: int) -> list[int]:
        """Start positions of the windows of one batch. A batch may continue in the next epoch."""
        for name, value, least in (("index", index, 0), ("batch_size", batch_size, 1), ("context", context, 1)):
            if value < least:
                raise invalid_value(name, value, f"a whole number >= {least}")
        num = self.num_windows(split, context)
        if num < 1:
            raise self._too_short(split, context)
        starts: list[int] = []
        position, end = index * batch_size, (index + 1) * batch_size
        while position < end:
            epoch, place = divmod(position, num)
            places = np.arange(place, min(num, place + end - position))
            windows = shuffled(places, num, epoch_keys(self.seed, int(split == "valid"), epoch))
            starts += (windows * context).tolist()
            position += len(places)
        return starts

    def _part(self, split: Split) -> npt.NDArray[Any]:
        if split not in ("train", "valid"):
            raise invalid_value("split", split, ("train", "valid"))
        return self.tokens[: self.num_train] if split == "train" else self.tokens[self.num_train :]

    def _check_ids(self, windows: npt.NDArray[np.int64]) -> None:
        lowest, highest = int(windows.min()), int(windows.max())
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise invalid_value(
                f"A token of {self.name}",
                wrong,
                f"from 0 to {self.vocab_size - 1}, because the vocabulary size is {self.vocab_size:,}",
                "Give the tokenizer and the dtype with which the file was written.",
            )

    def _too_short(self, split: Split, context: int) -> ValueError:
        size = len(self._part(split))
        shorter = f", or a context of at most {size - 1:,}" if size > 1 else ""
        return ValueError(
            f"data is {self.name!r} with {self.num_tokens:,} tokens, {size:,} of them for {split}, but context "
            f"{context} needs at least {context + 1:,}. Give more text{shorter}."
        )


def load_data(
    source: str,
    tokenizer: str = "bytes",
    seed: int = 0,
    valid_share: float = VALID_SHARE,
    *,
    json_key: str = "text",
    vocab_size: int | None = None,
    cache: Path | str | None = None,
    progress: Progress | None = None,
) -> TokenData:
    """Load the tokens of `source`: "stdlib", a text file, a .jsonl file, a folder of such files, or a file of tokens
    (.bin, .npy).

    `tokenizer` is "bytes", or a folder with a Hugging Face tokenizer.json. With such a folder, text is encoded once.
    The tokens are cached in a file in the folder `cache` (default: in the user's cache folder). The name of the file
    depends on text and tokenizer. The last `valid_share` of the tokens is the validation split. `json_key` is the field
    with the text in a line of JSONL.

    A file of tokens needs no tokenizer, only its vocabulary size. The vocabulary size is `vocab_size`, or else that of
    the JSON file beside it, or else that of the tokenizer's folder, or else the range of the file's dtype if that has
    at most 16 bits. Raises ValueError for a source that cannot be read, is empty, or has no known vocabulary size.
    """
    if seed < 0:
        raise invalid_value("seed", seed, "a whole number >= 0")
    if not 0.0 <= valid_share < 1.0:
        raise invalid_value("valid_share", valid_share, "a number >= 0 and < 1")
    path = Path(source).expanduser()
    if source != "stdlib" and not path.exists():
        raise missing_path("data", path, "'stdlib', a .txt, .jsonl, .bin or .npy file, or a folder of text files")
    if source != "stdlib" and path.suffix in TOKEN_SUFFIXES and path.is_file():
        data = _token_file(source, path, tokenizer, vocab_size)
    else:
        data = _text(source, load_tokenizer(tokenizer), json_key, cache, progress)
        if vocab_size is not None and vocab_size < data.vocab_size:
            remedy = f"The tokenizer {tokenizer!r} has {data.vocab_size:,} tokens."
            raise invalid_value("vocab_size", vocab_size, f"at least {data.vocab_size:,}", remedy)
    if data.num_tokens == 0:
        raise ValueError(f"data is {source!r}, but this source has no tokens. Give a source with text or tokens.")
    num_train = data.num_tokens - int(data.num_tokens * valid_share)
    return replace(data, num_train=num_train, seed=seed, vocab_size=vocab_size or data.vocab_size)


def _token_file(source: str, path: Path, tokenizer: str, vocab_size: int | None) -> TokenData:
    tokens, known = open_tokens(path)
    if vocab_size is None:
        vocab_size = known
    if vocab_size is None and tokenizer != BytesTokenizer.name:
        vocab_size = load_tokenizer(tokenizer).vocab_size
    if vocab_size is None:
        if tokens.dtype.itemsize > 2:
            raise ValueError(
                f"data is {source!r}, but the size of its vocabulary is not known. Give vocab_size, the folder of its "
                f"tokenizer, or a file {path.stem}.json in the same folder with "
                f'{{"dtype": "{tokens.dtype}", "vocab_size": ...}}.'
            )
        vocab_size = min(MAX_GUESSED_VOCAB, np.iinfo(tokens.dtype).max + 1)
    return TokenData(source, tokens, len(tokens), vocab_size, OF_THE_FILE, hash_tokens(tokens))


def _text(
    source: str, tokenizer: Tokenizer, json_key: str, cache: Path | str | None, progress: Progress | None
) -> TokenData:
    text = find_text(source)
    if isinstance(tokenizer, BytesTokenizer) and text.is_plain_file:
        tokens: npt.NDArray[Any] = np.memmap(text.files[0], dtype=np.uint8, mode="r")
        fingerprint = hash_tokens(tokens)
    else:
        fingerprint = hash_text(text.files, tokenizer.fingerprint, json_key if any(map(is_jsonl, text.files)) else "")
        if isinstance(tokenizer, BytesTokenizer) and text.num_bytes <= MAX_IN_MEMORY_BYTES:
            tokens = np.concatenate([np.empty(0, tokenizer.dtype), *encoded(text, tokenizer, json_key)])
        else:
            tokens = cached_tokens(text, tokenizer, json_key, fingerprint, cache, progress)
    return TokenData(
        source,
        tokens,
        num_train=len(tokens),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        fingerprint=fingerprint,
        num_files=len(text.files),
        truncated=text.truncated,
    )


def _amount(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
