# SPDX-License-Identifier: Apache-2.0
"""Token data: every kind of source gives the tokens it should, batches depend on their index alone, errors help."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinflow.data import encode, files, load_data, tokens
from twinflow.data.encode import BytesTokenizer, TextSource, pieces, stdlib_files
from twinflow.data.tokens import Split, TokenData, epoch_keys, shuffled

# The order.


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_a_shuffle_is_a_permutation(num: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(num), num, epoch_keys(seed, 0, epoch))
    assert np.array_equal(np.sort(order), np.arange(num))


def test_a_shuffle_of_a_trillion_needs_no_memory() -> None:
    num = 10**12 + 7
    places = np.array([0, 1, 2, num - 1])
    order = shuffled(places, num, epoch_keys(0, 0, 0))
    assert len(set(order.tolist())) == 4
    assert order.min() >= 0
    assert order.max() < num


def test_a_shuffle_looks_random() -> None:
    num = 10_000
    order = shuffled(np.arange(num), num, epoch_keys(1, 0, 0))
    other = shuffled(np.arange(num), num, epoch_keys(1, 0, 1))
    assert abs(np.corrcoef(order, np.arange(num))[0, 1]) < 0.05
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    assert (order == np.arange(num)).sum() < 10


def test_small_shuffles_reach_every_order_about_equally() -> None:
    counts = Counter(tuple(shuffled(np.arange(3), 3, epoch_keys(0, 0, epoch)).tolist()) for epoch in range(600))
    assert len(counts) == 6
    assert min(counts.values()) > 60


def test_a_position_keeps_its_meaning() -> None:
    # These numbers are part of what a saved position means: a change here makes old runs resume elsewhere.
    assert shuffled(np.arange(8), 8, epoch_keys(0, 0, 0)).tolist() == [1, 2, 5, 6, 3, 4, 0, 7]
    assert shuffled(np.arange(4), 10**9, epoch_keys(7, 1, 3)).tolist() == [24398887, 10150116, 718133770, 483595954]


# Batches.


@pytest.fixture
def counted() -> TokenData:
    """Every token tells its own place."""
    return TokenData("counted", np.arange(1000, dtype=np.uint16), 900, 1000, "none", "0", seed=3)


def test_targets_are_the_tokens_one_on(counted: TokenData) -> None:
    found, targets = counted.batch("train", 0, batch_size=4, context=16)
    assert found.shape == targets.shape == (4, 16)
    assert found.dtype == targets.dtype == torch.int64
    assert torch.equal(found + 1, targets)


@pytest.mark.parametrize(("split", "low", "high"), [("train", 0, 900), ("valid", 900, 1000)])
def test_an_epoch_uses_every_window_of_its_split_once(counted: TokenData, split: Split, low: int, high: int) -> None:
    context, batch_size = 7, 3
    num = counted.num_windows(split, context)
    assert num == (high - low - 1) // context
    rows = torch.cat([counted.batch(split, i, batch_size, context)[0] for i in range(-(-3 * num // batch_size))])
    firsts = rows[:, 0].tolist()
    expected = list(range(low, low + num * context, context))
    epochs = [firsts[e * num : (e + 1) * num] for e in range(3)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2], "each in its own order"


def test_a_batch_depends_on_its_index_alone(counted: TokenData) -> None:
    straight = [counted.batch("train", i, 4, 16)[0] for i in range(40)]
    counted.batch("valid", 0, 4, 16)
    again = TokenData("counted", counted.tokens, 900, 1000, "none", "0", seed=3)
    for i in (39, 7, 20):
        assert torch.equal(again.batch("train", i, 4, 16)[0], straight[i])
    other = TokenData("counted", counted.tokens, 900, 1000, "none", "0", seed=4)
    assert not torch.equal(other.batch("train", 7, 4, 16)[0], straight[7])


def test_a_batch_larger_than_an_epoch_goes_on_in_the_next(counted: TokenData) -> None:
    rows = counted.batch("valid", 0, 10, 30)[0]
    assert Counter(rows[:9, 0].tolist()) == {900: 3, 930: 3, 960: 3}


@pytest.mark.parametrize("what", [("train", -1, 1, 4), ("train", 0, 0, 4), ("train", 0, 1, 0), ("test", 0, 1, 4)])
def test_a_batch_that_cannot_be_is_refused(counted: TokenData, what: tuple[Any, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"but must be (a whole|one of 'train')"):
        counted.batch(*what)


def test_too_few_tokens_for_a_context(counted: TokenData) -> None:
    assert counted.batch("valid", 0, 1, 99)[0].shape == (1, 99)
    counted.check_context(99)
    with pytest.raises(
        ValueError, match=r"'counted' with 1,000 tokens, 100 of them for valid, but context 100 needs at least 101"
    ):
        counted.batch("valid", 0, 1, 100)
    with pytest.raises(ValueError, match="context 100 needs at least 101"):
        counted.check_context(100)


@pytest.mark.parametrize(("array", "wrong"), [(np.array([1, 2, 9, 3] * 5), 9), (np.array([1, -2, 3] * 5), -2)])
def test_a_token_outside_of_the_vocabulary_is_named(array: Any, wrong: int, tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", array)
    data = load_data(str(tmp_path / "some.npy"), vocab_size=9, valid_share=0.0)
    with pytest.raises(ValueError, match=rf"some\.npy is {wrong}, but must be from 0 to 8") as error:
        data.batch("train", 0, 2, 4)
    assert str(tmp_path) in str(error.value)


# Text.


def read_all(data: TokenData) -> bytes:
    return np.asarray(data.tokens, dtype=np.uint8).tobytes()


def test_stdlib_is_real_text() -> None:
    data = load_data("stdlib", "bytes", 0)
    assert data.vocab_size == 256
    assert data.num_tokens > 10**6
    assert b"def " in read_all(data)[:100_000]
    assert data.fingerprint == load_data("stdlib").fingerprint
    for words in ("stdlib", "M tokens", "files", "bytes", data.fingerprint):
        assert words in data.describe()


def test_a_text_file_is_mapped_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes("naïve text\nwithout an end".encode())
    data = load_data(str(path), valid_share=0.2)
    assert isinstance(data.tokens, np.memmap)
    assert read_all(data) == path.read_bytes()
    assert (data.num_tokens, data.num_train) == (26, 21)
    assert (data.name, data.num_files, data.tokenizer) == (str(path), 1, "bytes")
    before = data.fingerprint
    path.write_bytes(b"Naive text\nwithout an end")
    assert load_data(str(path)).fingerprint != before


def test_without_a_valid_share_everything_is_for_training(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 40)
    data = load_data(str(tmp_path / "a.txt"), valid_share=0.0)
    assert data.num_train == 40
    data.check_context(39)
    with pytest.raises(ValueError, match="0 of them for valid"):
        data.batch("valid", 0, 1, 4)


def test_a_folder_is_read_in_order_without_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("first\n")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "tokens.bin").write_bytes(b"abcd")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    data = load_data(str(tmp_path))
    assert read_all(data) == b"first\nsecond\nthird\n"
    assert data.num_files == 3


def test_jsonl_under_the_named_field(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    rows = [{"text": "one", "body": "eins"}, {"text": "two\n", "body": "zwei"}, {"text": "drei\ud800", "body": "ü"}]
    path.write_text("\n".join(map(json.dumps, rows[:2])) + "\n\n" + json.dumps(rows[2]))
    assert read_all(load_data(str(path))) == b"one\ntwo\ndrei?\n"
    assert read_all(load_data(str(path), json_key="body")) == "eins\nzwei\nü\n".encode()
    assert load_data(str(path)).fingerprint != load_data(str(path), json_key="body").fingerprint


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', "is not JSON"),
        ('{"body": "x"}', "has the fields 'body', but must be an object with text in the field 'text'"),
        ('{"text": 3}', "has a value of type int in the field 'text', but must have text"),
        ("[1, 2]", "is a list, but must be an object"),
        ("{}", "has no fields"),
    ],
)
def test_a_bad_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"some\.jsonl, line 2 ") as error:
        load_data(str(path))
    assert words in str(error.value)


def test_much_text_of_several_files_goes_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_IN_MEMORY_BYTES", 10)
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / name).write_text(name * 9)
    data = load_data(str(tmp_path / "in"), cache=tmp_path / "cache")
    assert isinstance(data.tokens, np.memmap)
    assert read_all(data) == b"aaaaaaaaa\nbbbbbbbbb\nccccccccc\n"


@pytest.mark.parametrize(
    "text", [b"a line\n" * 9, b"no end of line" * 5, ("\u20ac" * 30).encode(), b"x\n" * 2 + b"y" * 99]
)
def test_pieces_are_the_text_cut_between_lines_or_characters(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "PIECE_BYTES", 10)
    (tmp_path / "text").write_bytes(text)
    found = list(pieces(TextSource((tmp_path / "text",), len(text)), "text"))
    assert b"".join(piece.text for piece in found) == text
    assert sum(piece.num_bytes for piece in found) == len(text)
    assert [piece.is_last for piece in found] == [False] * (len(found) - 1) + [True]
    assert max(len(piece.text) for piece in found) <= 23
    for piece in found:
        piece.text.decode()


# Files of tokens.


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("side", ["some.json", "some.bin.json"])
def test_a_bin_file_with_a_file_beside_it(dtype: str, side: str, tmp_path: Path) -> None:
    np.arange(100, dtype=dtype).tofile(tmp_path / "some.bin")
    (tmp_path / side).write_text(json.dumps({"dtype": dtype, "vocab_size": 120}))
    data = load_data(str(tmp_path / "some.bin"))
    assert isinstance(data.tokens, np.memmap)
    assert np.array_equal(data.tokens, np.arange(100))
    assert (data.vocab_size, data.num_train) == (120, 90)
    assert load_data(str(tmp_path / "some.bin"), vocab_size=128).vocab_size == 128


def test_a_bin_file_alone_is_uint16(tmp_path: Path) -> None:
    np.array([1, 50256, 7], dtype="<u2").tofile(tmp_path / "some.bin")
    data = load_data(str(tmp_path / "some.bin"))
    assert data.tokens.tolist() == [1, 50256, 7]
    assert data.vocab_size == 65536


@pytest.mark.parametrize(("code", "dtype"), [(8, "uint16"), (4, "int32")])
def test_megatrons_files(code: int, dtype: str, tmp_path: Path) -> None:
    documents_ = [np.arange(5), np.arange(7) + 100]
    np.concatenate(documents_).astype(dtype).tofile(tmp_path / "some.bin")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 2, 3)
    sizes = np.array([5, 7], dtype=np.int32).tobytes()
    (tmp_path / "some.idx").write_bytes(header + sizes + np.zeros(5, dtype=np.int64).tobytes())
    data = load_data(str(tmp_path / "some.bin"), vocab_size=200)
    assert data.tokens.tolist() == [*range(5), *range(100, 107)]
    (tmp_path / "some.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 6, 2, 3))
    with pytest.raises(ValueError, match=r"dtype code in .*some\.idx is 6"):
        load_data(str(tmp_path / "some.bin"))
    (tmp_path / "some.idx").write_bytes(b"something else")
    assert load_data(str(tmp_path / "some.bin")).tokens.dtype == np.uint16


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", ">i4", "int64"])
def test_npy_files(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "some.npy", np.arange(100).astype(dtype))
    data = load_data(str(tmp_path / "some.npy"), vocab_size=100)
    assert isinstance(data.tokens, np.memmap)
    found, targets = data.batch("train", 0, 2, 8)
    assert torch.equal(found + 1, targets)


def test_a_large_file_is_mapped_and_sampled_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    num_bytes = 8 * 2**30
    with path.open("wb") as file:
        file.truncate(num_bytes)  # holes: it takes no room
    data = load_data(str(path))
    assert data.num_tokens == num_bytes // 2
    assert data.batch("train", 10**6, 2, 64)[0].sum() == 0
    assert data.fingerprint == load_data(str(path)).fingerprint


@pytest.mark.parametrize("size", [100, 200])
def test_a_fingerprint_sees_the_ends(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WHOLE_HASH_BYTES", 100)
    monkeypatch.setattr(files, "SAMPLE_BYTES", 8)
    array = np.zeros(size, dtype=np.uint8)
    seen = {files.hash_tokens(array)}
    for place in (0, size // 2, size - 1):
        changed = array.copy()
        changed[place] = 1
        seen.add(files.hash_tokens(changed))
    assert len(seen) == 4


# A tokenizer.


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    library = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "</s>": 4}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<pad>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_tokens_become_text_again(tokenizer: str) -> None:
    for name, text in ((tokenizer, "two three one"), ("bytes", "two thr\u00e9\u00e9")):
        made = encode.load_tokenizer(name)
        assert made.decode(made.encode([text.encode()])[0].tolist()) == text
    assert encode.load_tokenizer("bytes").decode([97, 255]) == "a\ufffd"


def test_text_is_encoded_once_into_a_file(tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one two three\n")
    (tmp_path / "text" / "b.jsonl").write_text('{"text": "three four"}\n{"text": "one"}\n')
    cache, told = tmp_path / "cache", list[tuple[int, int]]()
    source = str(tmp_path / "text")
    data = load_data(source, tokenizer, cache=cache, progress=lambda *at: told.append(at))
    assert data.tokens.tolist() == [1, 2, 3, 4, 3, 0, 4, 1, 4]
    assert (data.vocab_size, data.tokens.dtype) == (6, np.uint16)
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "text").iterdir())
    assert told[-1] == (num_bytes, num_bytes)
    assert sorted(path.name for path in cache.iterdir()) == [f"{data.fingerprint}.bin", f"{data.fingerprint}.json"]
    assert load_data(str(cache / f"{data.fingerprint}.bin")).tokens.tolist() == data.tokens.tolist()

    def never(*_: Any) -> Any:
        raise AssertionError("encoded twice")

    with monkeypatch.context() as patch:
        patch.setattr(encode, "encoded", never)
        assert load_data(source, tokenizer, cache=cache).fingerprint == data.fingerprint
    (tmp_path / "text" / "a.txt").write_text("two two three\n")
    changed = load_data(source, tokenizer, cache=cache)
    assert changed.tokens[0] == 2
    assert changed.fingerprint != data.fingerprint
    (Path(tokenizer) / "tokenizer_config.json").write_text('{"eos_token": {"content": "<pad>"}}')
    assert load_data(source, tokenizer, cache=cache).tokens[-1] == 5


def test_a_cut_short_cache_is_made_again(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three " * 10)
    cache = tmp_path / "cache"
    data = load_data(str(tmp_path / "a.txt"), tokenizer, cache=cache)
    expected = data.tokens.tolist()
    os.truncate(cache / f"{data.fingerprint}.bin", 10)
    assert load_data(str(tmp_path / "a.txt"), tokenizer, cache=cache).tokens.tolist() == expected


def test_a_failure_leaves_no_half_a_file(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnot json\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        load_data(str(tmp_path / "a.jsonl"), tokenizer, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tokenizers_vocabulary_serves_for_a_file_of_tokens(tokenizer: str, tmp_path: Path) -> None:
    np.arange(20, dtype="<u2").tofile(tmp_path / "some.bin")
    data = load_data(str(tmp_path / "some.bin"), tokenizer)
    assert data.vocab_size == 6
    with pytest.raises(ValueError, match="but must be from 0 to 5"):
        data.batch("train", 0, 1, 17)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        load_data(str(tmp_path / "a.txt"), str(tmp_path))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_data("stdlib", str(tmp_path))


class Pairs(BytesTokenizer):
    """Two bytes a token: stands in for a tokenizer where the package is absent."""

    name = "pairs"
    vocab_size = 65536
    dtype = np.dtype("<u2")
    fingerprint = "pairs"

    def encode(self, texts: Any) -> Any:
        return [np.frombuffer(text + b" " * (len(text) % 2), dtype="<u2") for text in texts]

    def end(self, text: bytes) -> Any:
        return np.array([0], dtype="<u2")


def test_the_cache_with_any_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PIECE_BYTES", 100)
    monkeypatch.setattr(encode, "BATCH_BYTES", 1000)
    (tmp_path / "a.txt").write_bytes(b"0123456789\n" * 999)
    text = encode.find_text(str(tmp_path / "a.txt"))
    told: list[tuple[int, int]] = []
    found = encode.cached_tokens(text, Pairs(), "text", "name", tmp_path / "c", lambda *at: told.append(at))
    decoded = found.tobytes().replace(b" ", b"")
    assert decoded == b"0123456789\n" * 999 + b"\0\0"
    assert told == sorted(told)
    assert told[-1] == (text.num_bytes, text.num_bytes)
    assert len(told) > 5
    assert json.loads((tmp_path / "c" / "name.json").read_text())["num_tokens"] == len(found)


# What goes wrong.


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "wikitext.txt").write_text("x")
    with pytest.raises(ValueError, match=r"data is .*wikitxt\.txt.*'stdlib'.*there is 'wikitext\.txt'"):
        load_data(str(tmp_path / "wikitxt.txt"))
    with pytest.raises(ValueError, match=r"nor is there a folder .*nowhere"):
        load_data(str(tmp_path / "nowhere" / "a.txt"))
    with pytest.raises(ValueError, match=r"tokenizer is .*'bytes', or a folder with a tokenizer\.json"):
        load_data("stdlib", str(tmp_path / "no"))
    with pytest.raises(ValueError, match=r"tokenizer is .*folder with a tokenizer\.json.*save_pretrained"):
        load_data("stdlib", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", "is empty"),
        ("a.jsonl", b"\n\n", "has no tokens"),
        ("a.bin", b"", "has no tokens"),
        ("a.txt", b"text\0", "has no zero bytes"),
        ("a.bin", b"abc", "size of .*a.bin is 3, but must be a multiple of 2"),
        ("a.npy", b"text", "is not a .npy file"),
        ("a.npy", b"\x93NUMPY", "cannot be mapped"),
    ],
)
def test_a_file_without_what_its_name_says(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_data(str(tmp_path / name))


@pytest.mark.parametrize("array", [np.zeros((2, 3), dtype=int), np.zeros(3), np.array([{}])])
def test_an_array_of_something_else(array: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=r"a\.npy"):
        load_data(str(tmp_path / "a.npy"))


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("{", "but is not JSON"),
        ("[]", "an object like"),
        ('{"dtype": "float"}', "dtype in"),
        ('{"vocab_size": 0}', ">= 1"),
    ],
)
def test_a_wrong_file_beside_the_tokens(side: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(8))
    (tmp_path / "a.json").write_text(side)
    with pytest.raises(ValueError, match=words) as error:
        load_data(str(tmp_path / "a.bin"))
    assert "a.json" in str(error.value)


def test_wide_tokens_need_a_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(50))
    with pytest.raises(ValueError, match=r"vocabulary is not known.*vocab_size.*a\.json"):
        load_data(str(tmp_path / "a.npy"))


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="There are no text files in"):
        load_data(str(tmp_path))


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)  # root may read everything
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ValueError, match=r"cannot read .*a\.txt \(Permission denied\)"):
            load_data(str(source))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    text = encode.find_text(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match=r"cannot write the tokens to .*a\.txt.*writable folder.*cache=FOLDER"):
        encode.cached_tokens(text, Pairs(), "text", "name", tmp_path / "a.txt" / "in a file")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"valid_share": 1.0}, "valid_share is 1.0"),
        ({"vocab_size": 8}, "vocab_size is 8"),
    ],
)
def test_bad_arguments(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=words):
        load_data(str(tmp_path / "a.txt"), **change)


def test_the_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert encode.default_cache() == tmp_path / "twinflow" / "tokens"


def test_stdlib_has_no_tests_and_no_packages() -> None:
    files = stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-4:]) for path in files)
