"""The corpus: what is read, how it is split, and that a batch depends on seed and step alone."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinflow.data import text
from twinflow.data.text import Corpus, load_corpus, split_corpus, stdlib_files, window_starts


@pytest.fixture
def corpus() -> Corpus:
    return split_corpus(np.random.default_rng(0).integers(1, 256, 5000, dtype=np.uint8).tobytes(), "noise", seed=3)


def test_targets_are_the_tokens_one_byte_on(corpus: Corpus) -> None:
    tokens, targets = corpus.batch("train", 1, batch_size=4, context=32)
    assert tokens.shape == targets.shape == (4, 32)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("split", ["train", "valid"])
def test_every_window_is_a_piece_of_its_own_split(corpus: Corpus, split: text.Split) -> None:
    whole = (corpus.train if split == "train" else corpus.valid).tobytes()
    tokens, targets = corpus.batch(split, 5, batch_size=16, context=32)
    for row, last in zip(tokens, targets[:, -1:], strict=True):
        assert bytes(torch.cat([row, last]).tolist()) in whole


def test_a_resumed_run_sees_the_batches_it_would_have_seen(corpus: Corpus) -> None:
    straight = [corpus.batch("train", step, 4, 16) for step in range(1, 11)]
    corpus.batch("valid", 0, 4, 16)
    again = split_corpus(corpus.train.tobytes() + corpus.valid.tobytes(), "noise", seed=3)
    resumed = [again.batch("train", step, 4, 16) for step in range(6, 11)]
    for (tokens, targets), (expected, expected_targets) in zip(resumed, straight[5:], strict=True):
        assert torch.equal(tokens, expected)
        assert torch.equal(targets, expected_targets)


def test_steps_seeds_and_splits_draw_differently() -> None:
    drawn = {
        (seed, split, step): tuple(window_starts(seed, split, step, 8, 10**6))
        for seed in (0, 1)
        for split in ("train", "valid")
        for step in (1, 2)
    }
    assert len(set(drawn.values())) == len(drawn)


def test_a_position_keeps_its_meaning() -> None:
    # These numbers are part of what a saved position means: a change here makes old runs resume elsewhere.
    assert window_starts(0, "train", 1, 4, 10**6).tolist() == [753497, 493364, 158354, 780542]
    assert window_starts(7, "valid", 100, 3, 1000).tolist() == [372, 344, 542]


@given(
    seed=st.integers(0, 2**63), step=st.integers(0, 2**40), batch=st.integers(1, 64), num_starts=st.integers(1, 2**31)
)
def test_starts_are_in_range(seed: int, step: int, batch: int, num_starts: int) -> None:
    starts = window_starts(seed, "train", step, batch, num_starts)
    assert starts.shape == (batch,)
    assert starts.min() >= 0
    assert starts.max() < num_starts


def test_the_split_is_the_text_cut_in_two() -> None:
    corpus = split_corpus(bytes(range(1, 201)), "bytes")
    assert (corpus.train.size, corpus.valid.size) == (180, 20)
    assert corpus.train.tobytes() + corpus.valid.tobytes() == bytes(range(1, 201))


def test_the_shortest_text_that_is_enough() -> None:
    enough = split_corpus(b"x" * 170, "short")
    assert enough.batch("valid", 0, 2, context=16)[0].shape == (2, 16)
    too_short = split_corpus(b"x" * 169, "short")
    with pytest.raises(ValueError, match=r"'short' with 169 bytes.*context 16.*at least 170"):
        too_short.batch("train", 0, 2, context=16)


def test_stdlib_is_real_text_without_tests_and_packages() -> None:
    files = stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any({"site-packages", "test", "tests"} & set(path.parts[-4:]) for path in files)
    corpus = load_corpus("stdlib")
    assert corpus.train.size > 10**6
    assert b"def " in corpus.train[:100_000].tobytes()
    assert corpus.fingerprint == load_corpus("stdlib").fingerprint


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("first\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    corpus = load_corpus(str(tmp_path))
    assert corpus.train.tobytes() + corpus.valid.tobytes() == b"first\nsecond\n"
    assert (corpus.num_files, corpus.truncated) == (2, False)


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefghij")
    corpus = load_corpus(str(tmp_path / "text"))
    assert corpus.train.tobytes() + corpus.valid.tobytes() == b"abcdefghij\n"


def test_the_cap_is_kept_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a" * 9 + "\n")
    (tmp_path / "b").write_text("b" * 9 + "\n")
    monkeypatch.setattr(text, "MAX_PATH_BYTES", 15)
    corpus = load_corpus(str(tmp_path))
    assert corpus.train.tobytes() + corpus.valid.tobytes() == b"a" * 9 + b"\n" + b"b" * 5
    assert corpus.truncated
    monkeypatch.setattr(text, "MAX_PATH_BYTES", 20)
    assert not load_corpus(str(tmp_path)).truncated


def test_a_missing_path_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data is") as error:
        load_corpus(str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in str(error.value)
    assert "'stdlib'" in str(error.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="found no text files in"):
        load_corpus(str(tmp_path))


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed is -1"):
        load_corpus("stdlib", seed=-1)
