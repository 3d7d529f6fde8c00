"""Tokens to train on, and the batch that belongs to an index.

`load_data` turns a source (the standard library, text, JSONL, or a file of tokens) into a `TokenData`. A split is cut
into windows of one context and the token after it, next to each other. An epoch goes through all of them once, in an
order of its own. A batch is a function of (seed, split, index, batch size, context) and nothing else: a run that stops
after batch n goes on with batch n + 1, whatever was drawn in between.
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

from twinflow.data.documents import find_text, is_jsonl
from twinflow.data.encode import BytesTokenizer, Tokenizer, cached_tokens, load_tokenizer, tokens_in_memory
from twinflow.data.files import TOKEN_SUFFIXES, hash_text, hash_tokens, missing_path, open_tokens
from twinflow.data.order import epoch_keys, shuffled
from twinflow.errors import invalid_value

Split = Literal["train", "valid"]
Progress = Callable[[int, int], None]  # bytes of text done, and of all

VALID_SHARE: Final = 0.1
# Bytes from several files or from JSONL are put together in memory up to this size, above it in a file.
MAX_IN_MEMORY_BYTES: Final = 2**28
# What a narrow dtype can hold serves as the vocabulary where nothing says better.
MAX_GUESSED_VOCAB: Final = 2**16


@dataclass(frozen=True, eq=False)
class TokenData:
    """A stream of tokens, in memory or mapped from a file, cut into a part to learn from and a part to check on."""

    name: str  # the source as it was given
    tokens: npt.NDArray[Any]  # one dimension, any integer dtype
    num_train: int  # tokens before this one are for training
    vocab_size: int
    tokenizer: str
    fingerprint: str  # two runs with the same one read the same tokens
    num_files: int = 1
    truncated: bool = False  # the source held more than was read
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Of both parts."""
        return len(self.tokens)

    def describe(self) -> str:
        """Name, size and fingerprint, in a line."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files:,} files"
        cut = ", cut at the limit" if self.truncated else ""
        return (
            f"{self.name}: {_amount(self.num_tokens)} tokens in {files}{cut}, tokenizer {self.tokenizer}, "
            f"vocabulary {self.vocab_size:,}, fingerprint {self.fingerprint}"
        )

    def batch(self, split: Split, index: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (the same stream one token on), each [batch_size, context] int64, of batch `index`."""
        data = self._part(split)
        rows = [data[start : start + context + 1] for start in self._starts(split, index, batch_size, context)]
        windows = np.stack(rows).astype(np.int64)
        self._check_ids(windows)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def num_windows(self, split: Split, context: int) -> int:
        """Windows of an epoch; what is left over at the end of the split is not used."""
        return max(0, (len(self._part(split)) - 1) // context)

    def check_context(self, context: int) -> None:
        """Raise when a split is too short for one window of `context` tokens and the one after it."""
        for split in ("train", "valid") if self.num_train < self.num_tokens else ("train",):
            if self.num_windows(split, context) < 1:
                raise self._too_short(split, context)

    def _starts(self, split: Split, index: int, batch_size: int, context: int) -> list[int]:
        """Where the windows of one batch begin; it may reach over the end of an epoch into the next."""
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
                f"a token of {self.name}",
                wrong,
                f"0 to {self.vocab_size - 1}, the vocabulary being {self.vocab_size:,}",
                "Was the file made with another tokenizer, or is its dtype another one?",
            )

    def _too_short(self, split: Split, context: int) -> ValueError:
        size = len(self._part(split))
        return ValueError(
            f"data is {self.name!r} with {self.num_tokens:,} tokens, {size:,} of them for {split}; context {context} "
            f"needs {context + 1:,} there. Give more text, a smaller context, or another valid_share."
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
    """Tokens of `source`: "stdlib", a text file, a .jsonl file, a folder of those, or a file of tokens (.bin, .npy).

    `tokenizer` is "bytes", or a folder that holds a Hugging Face tokenizer.json. With the latter, text is encoded once
    into a file in the folder `cache` (default: the user's own), named after its content and the tokenizer. The last
    `valid_share` of the tokens is kept for validation. `json_key` is the field of a JSONL line that holds its text.

    A file of tokens needs no tokenizer, only the size of its vocabulary: `vocab_size`, else what the file beside it
    says, else that of a tokenizer that is a folder, else what 16 bits can hold.
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
            remedy = f"The tokenizer {tokenizer!r} has that many symbols."
            raise invalid_value("vocab_size", vocab_size, f"at least {data.vocab_size:,}", remedy)
    if data.num_tokens == 0:
        raise ValueError(f"data is {source!r}, which holds no tokens. Give one that does.")
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
                f"data is {source!r}; the size of its vocabulary is not known. Give vocab_size, its tokenizer's "
                f'folder, or a file {path.stem}.json with {{"dtype": "{tokens.dtype}", "vocab_size": ...}} beside it.'
            )
        vocab_size = min(MAX_GUESSED_VOCAB, np.iinfo(tokens.dtype).max + 1)
    return TokenData(source, tokens, len(tokens), vocab_size, "of the file", hash_tokens(tokens))


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
            tokens = tokens_in_memory(text, tokenizer, json_key)
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
