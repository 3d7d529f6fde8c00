# SPDX-License-Identifier: Apache-2.0
"""Every reader of files that others may have written: whatever a file is, it is read, or an error names it, soon and in
little memory. No other exception is raised.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from twinflow.checkpoint import save
from twinflow.checkpoint.disk import read_latest
from twinflow.checkpoint.manifest import read_manifest
from twinflow.checkpoint.plain import decode_meta
from twinflow.checkpoint.tensors import read_header
from twinflow.checkpoint.torch_files import load_torch_file
from twinflow.cli.main import app
from twinflow.cli.plan_input import PlanOptions, choose_model
from twinflow.cli.settings import check_saved
from twinflow.config import load_config
from twinflow.data.encode import find_text, load_tokenizer, pieces
from twinflow.data.files import INDEX_HEADER, INDEX_MAGIC, open_tokens
from twinflow.files import MAX_NESTING, keep_lines, parse_json, read_bytes, read_json, read_text
from twinflow.launch.commands import parse_hostfile
from twinflow.monitor.metrics import MetricsWriter, ValidRecord, read_metrics, to_json
from twinflow.planner.probe import read_rates
from twinflow.state_dict import Entry

LIMIT_S = 20.0  # of one file; the machine may be busy
FUZZ_S = 2.0
SPARSE_BYTES = 1 << 38
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
SETTINGS = {"batch_size": 2, "accumulation": 1, "world": 1, "model": {}, "file_config": {}, "num_valid": 8}
RECORD = f"{to_json(ValidRecord(1, 2.0))}\n"
CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "fp16": {"enabled": False}}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}


@dataclass(frozen=True)
class Reader:
    """A reader, the name of its file, and a file that it reads. `is_silent`: it may also ignore a damaged file."""

    name: str
    content: Callable[[Path], bytes]
    read: Callable[[Path], Any]
    is_silent: bool = False
    is_json: bool = False


def as_json(value: Any) -> Callable[[Path], bytes]:
    return lambda folder: json.dumps(value).encode()


def tokens_beside(path: Path) -> Any:
    tokens = path.with_name("tokens.bin")
    tokens.write_bytes(bytes(64))
    return open_tokens(tokens)


def npy(folder: Path) -> bytes:
    np.save(folder / "made.npy", np.arange(50, dtype=np.uint16))
    return (folder / "made.npy").read_bytes()


def torch_file(folder: Path) -> bytes:
    torch.save({"a": torch.arange(6.0), "b": [1, {"c": (2.0, None)}]}, folder / "made.pt")
    return (folder / "made.pt").read_bytes()


def of_checkpoint(name: str) -> Callable[[Path], bytes]:
    def content(folder: Path) -> bytes:
        value = torch.arange(6.0).view(2, 3)
        save(folder / "root", "t", {"model": [Entry("w", value.dtype, (2, 3), lambda: value)]}, {"step": 1})
        return next((folder / "root").rglob(name)).read_bytes()

    return content


def read_documents(path: Path) -> Any:
    return list(pieces(find_text(str(path)), "text"))


READERS = (
    Reader("config.hjson", lambda _: b"{train_batch_size: 4 # sequences\n fp16: {enabled: false}}", load_config),
    Reader("ds.json", as_json(CONFIG), load_config, is_json=True),
    Reader("tokens.json", as_json({"dtype": "uint16", "vocab_size": 300}), tokens_beside, is_json=True),
    Reader("tokens.idx", lambda _: INDEX_HEADER.pack(INDEX_MAGIC, 1, 8, 3, 2), tokens_beside, is_silent=True),
    Reader("tokens.npy", npy, open_tokens),
    Reader("text.jsonl", lambda _: b'{"text": "one"}\n{"text": "two", "n": [1]}\n', read_documents, is_json=True),
    Reader("text.txt", lambda _: b"some text\n" * 20, read_documents),
    Reader("tokenizer.json", as_json(TOKENIZER), lambda path: load_tokenizer(str(path)), is_json=True),
    Reader("config.json", as_json(LLAMA), lambda path: choose_model(PlanOptions(model=str(path))), is_json=True),
    Reader("hostfile", lambda _: b"a slots=2\nb.c slots=4 # big\n", lambda p: parse_hostfile(read_text(p), str(p))),
    Reader("settings.json", as_json(SETTINGS), lambda p: check_saved(read_json(p), str(p)), is_json=True),
    Reader("metrics.jsonl", lambda _: RECORD.encode() * 3, read_metrics, is_json=True),
    Reader("cut.jsonl", lambda _: RECORD.encode(), lambda path: MetricsWriter(path, 1).__exit__(), is_json=True),
    Reader("loss.csv", lambda _: b"step,loss\n8,1.0\n16,0.5\n", lambda p: keep_lines(p, lambda line: "," in line)),
    Reader("latest", lambda _: b"global_step3\n", lambda path: read_latest(path.parent)),
    Reader("manifest.json", of_checkpoint("manifest.json"), lambda p: read_manifest(p.parent), is_json=True),
    Reader("meta.json", of_checkpoint("meta.json"), lambda path: decode_meta(read_bytes(path), path), is_json=True),
    Reader("x.safetensors", of_checkpoint("*.safetensors"), read_header),
    Reader("x.pt", torch_file, load_torch_file),
    Reader("rates.json", as_json({"machine": {}, "rates": {}}), lambda p: read_rates(p, {}), is_silent=True),
)


@contextmanager
def bounded(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raises an exception that no reader catches if the block takes longer, and checks its memory."""

    def late(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"still reading after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20  # KiB


def error_of(reader: Reader, path: Path) -> str:
    """The reader's error, which has the name of the file. Empty if the file was read."""
    with bounded():
        try:
            reader.read(path)
        except (ValueError, OSError) as error:
            text = str(error)
        else:
            return ""
    assert path.name in text or path.parent.name in text, text
    return text


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"a": [')
        file.truncate(SPARSE_BYTES)


def deep(path: Path) -> None:
    path.write_bytes(b'{"dtype":' + b"[" * 10**6 + b"]" * 10**6 + b"}\n")


BAD = [
    pytest.param(reader, make, id=f"{reader.name}-{make.__name__}")
    for reader in READERS
    for make in (fifo, device, sparse, deep)
    if (reader.is_json or make is not deep) and (reader.name != "text.txt" or make is not sparse)  # texts may be large
]


@pytest.mark.parametrize(("reader", "make"), BAD)
def test_what_is_no_such_file_is_refused_at_once(reader: Reader, make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / reader.name
    make(path)
    text = error_of(reader, path)
    assert text or reader.is_silent


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_good_file_is_read(reader: Reader, tmp_path: Path) -> None:
    path = tmp_path / reader.name
    path.write_bytes(reader.content(tmp_path))
    assert error_of(reader, path) == ""


def test_nesting_is_limited_and_not_below() -> None:
    assert parse_json("[" * MAX_NESTING + "]" * MAX_NESTING)
    for depth in (MAX_NESTING + 1, 900, 10**6):
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            parse_json("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999999,), }",
        b"{'descr': '<u2', 'fortran_order': False, 'shape': (-1,), }",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
        b"{'descr': [('a', '<u2', (1000000000,))], 'fortran_order': False, 'shape': (3,), }",
        b"{'descr': '<u2', 'shape': (3,)}",
        b"(" * 200 + b")" * 200,
    ],
)
def test_absurd_headers_of_npy(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with bounded(), pytest.raises(ValueError, match=r"tokens\.npy"):
        open_tokens(path)


@pytest.mark.parametrize(
    "line",
    [
        "a;b slots=2",
        "$(id) slots=2",
        "-oProxyCommand=x slots=2",
        "a slots=99999",
        "a slots=" + "9" * 5000,
        "a'b slots=1",
    ],
)
def test_hosts_have_legal_names_and_slots(line: str) -> None:
    with pytest.raises(ValueError, match="hostfile, line 1") as caught:
        parse_hostfile(line)
    assert len(str(caught.value)) < 800


OUT = ("--out", "runs/x")
ABSURD = (
    ("train", "--batch-size", "2000000000", *OUT),
    ("train", "--num-layers", "1000000000", *OUT),
    ("train", "--hidden-size", "1000000007", "--num-attention-heads", "1000000006", *OUT),
    ("train", "--vocab-size", str(10**30), *OUT),
    ("train", "--context", str(10**12), *OUT),
    ("train", "--seed", str(2**32), *OUT),
    ("train", "--steps", str(10**30), *OUT),
    ("train", "--accumulation", str(10**30), *OUT),
    ("plan", "--preset", "tiny", "--gpu", "h200", "--gpus", str(10**12)),
    ("plan", "--params", "99999999t", "--gpu", "h200"),
    ("plan", "--preset", "tiny", "--gpu", "h200", "--accumulation", str(10**9)),
    ("plan", "--preset", "tiny", "--gpu", "h200", "--scaling", str(10**15)),
    ("attention", "show", "--seq", str(10**12)),
    ("attention", "show", "--heads", str(10**9)),
    ("launch", "--num_procs", str(10**12), __file__),
    ("launch", "--master_addr", "a;b", __file__),
)


@pytest.mark.parametrize("words", ABSURD, ids=lambda words: " ".join(words)[:40])
def test_absurd_numbers_are_refused_at_once(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text\n" * 1000)
    given = [*words, "--data", str(tmp_path / "text")] if words[0] == "train" else words
    with bounded():
        result = CliRunner().invoke(app, list(given))
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "it fits" not in result.output


DAMAGED = {
    "settings.json": (b"[]", b"{", b'{"batch_size": "x"}', b'{"batch_size": 1, "accumulation": 1, "num_valid": -1}'),
    "metrics.jsonl": (b"[]\n", b'{"kind": []}\n', b'{"kind": "valid", "step": "x", "loss": 1}\n', b"\xff\n"),
}


@pytest.mark.parametrize(("name", "content"), [(name, raw) for name, raws in DAMAGED.items() for raw in raws])
def test_a_run_with_a_damaged_file_is_not_resumed(name: str, content: bytes, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "settings.json").write_text(json.dumps(SETTINGS))
    (out / name).write_bytes(content)
    (tmp_path / "text").write_text("text\n" * 1000)
    result = CliRunner().invoke(app, ["train", "--resume", "--out", str(out), "--data", str(tmp_path / "text")])
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert str(out / name) in line
    assert "start a new run in another --out." in line


# Bytes and values that readers take for something else.
PIECES = (
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"\0", b"\n", b"\xff", b"\xed\xb2\x80", b"#", b"'''", b"/*"),
    *(
        b"null",
        b"true",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-1",
        b"9" * 40,
        b"9" * 5000,
        b'"a"',
        b'{"a":[{}]}',
        b"[" * 300,
    ),
    *(b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff", b"(", b")", b"lambda", b"slots=", b"__tensor__", b"\xef\xbb\xbf"),
)


def mutate(raw: bytes, dice: random.Random) -> bytes:
    """A file with one to four changes."""
    for _ in range(dice.randint(1, 4)):
        at = dice.randint(0, len(raw))
        other = dice.randint(at, min(len(raw), at + dice.choice((1, 4, 40))))
        kind = dice.randrange(5)
        if kind == 0:
            raw = raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :]
        elif kind == 1:
            raw = raw[:at] + raw[other:]
        elif kind == 2:
            raw = raw[:at] + dice.choice(PIECES) + raw[other:]
        elif kind == 3:
            raw = raw[:at] + raw[at:other] * dice.choice((2, 50)) + raw[other:]
        else:
            raw = raw[:at] if dice.random() < 0.3 else raw[other:] + raw[:at]
    return raw


@pytest.mark.matrix
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_fuzzed_files_are_read_or_refused_by_name(reader: Reader, tmp_path: Path) -> None:
    good, path = reader.content(tmp_path), tmp_path / reader.name
    end, seed = time.monotonic() + FUZZ_S, 0
    while time.monotonic() < end or seed < 50:
        with suppress(FileNotFoundError):
            path.unlink()
        raw = mutate(good, random.Random(f"{reader.name} {seed}"))
        path.write_bytes(raw)
        try:
            error_of(reader, path)
        except BaseException as error:
            raise AssertionError(f"{reader.name}, seed {seed}: {raw[:500]!r}") from error
        seed += 1


@pytest.mark.matrix
def test_fuzzed_pickles_in_a_sound_archive(tmp_path: Path) -> None:
    """The archive has right checksums, so that the reader of pickles itself gets the changed bytes."""
    reader = next(one for one in READERS if one.name == "x.pt")
    (tmp_path / "good").write_bytes(torch_file(tmp_path))
    with zipfile.ZipFile(tmp_path / "good") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pickle = next(name for name in entries if name.endswith("data.pkl"))
    end, seed, path = time.monotonic() + FUZZ_S, 0, tmp_path / "x.pt"
    while time.monotonic() < end or seed < 50:
        changed = entries | {pickle: mutate(entries[pickle], random.Random(seed))}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, raw in changed.items():
                archive.writestr(name, raw)
        error_of(reader, path)
        seed += 1
