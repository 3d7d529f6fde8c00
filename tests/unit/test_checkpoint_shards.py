# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several ranks write together: whole for every reader, or not there, whoever fails and whenever.

Run as a script it is the ranks themselves: real processes that are killed while they save, and ranks over gloo.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch import distributed as dist

from twinflow.checkpoint import Checkpoint, Entry, PartOf, Together, open_checkpoint, save, sides
from twinflow.checkpoint.disk import LATEST
from twinflow.checkpoint.exporting import export_checkpoint
from twinflow.checkpoint.manifest import MANIFEST, META
from twinflow.checkpoint.plain import put_together, take_apart
from twinflow.checkpoint.sides import parse_side

save_module = sys.modules[save.__module__]


@pytest.fixture(autouse=True)
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of saves need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# Ranks as threads


class Meeting:
    """Where threads hand each other their values; once one of them is gone it is over for all."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=120)
        self.values: list[Any] = [None] * world


@dataclass(frozen=True)
class Seat:
    rank: int
    world: int
    meeting: Meeting

    def gather(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = json.dumps(value, allow_nan=False)
        self.meeting.barrier.wait()
        found = [json.loads(text) for text in self.meeting.values]
        self.meeting.barrier.wait()
        return found


class Crash(BaseException):
    """The rank is gone: no handler of ours may tidy up after it."""


def on_ranks(world: int, act: Callable[[Seat], Any]) -> list[Any]:
    """What `act` returns or raises on each rank."""
    meeting = Meeting(world)
    outcomes: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            outcomes[rank] = act(Seat(rank, world, meeting))
        except Crash as crash:
            outcomes[rank] = crash
            meeting.barrier.abort()
        except Exception as error:  # all of them know by themselves: nobody is told here
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def succeed(outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


# Shards


class Shard(NamedTuple):
    """Elements [start, start + numel) of a tensor on a rank; all of it in its own shape where `start` is None."""

    rank: int
    start: int | None
    numel: int


def entry(name: str, tensor: Tensor, shard: Shard) -> Entry:
    if shard.start is None:
        return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)
    part = PartOf(tuple(tensor.shape), shard.start)
    return Entry(
        name, tensor.dtype, (shard.numel,), lambda: tensor.reshape(-1)[part.start : part.start + shard.numel], part
    )


def of_rank(rank: int, tensors: Mapping[str, Tensor], shards: Mapping[str, Sequence[Shard]]) -> list[Entry]:
    return [entry(name, tensor, s) for name, tensor in tensors.items() for s in shards[name] if s.rank == rank]


def even(numel: int, world: int) -> list[Shard]:
    cuts = [numel * rank // world for rank in range(world + 1)]
    return [Shard(rank, cuts[rank], cuts[rank + 1] - cuts[rank]) for rank in range(world)]


def small(value: float) -> dict[str, dict[str, Tensor]]:
    value = float(value)
    model = {"a": torch.full((4,), value), "b": torch.full((2, 3), value, dtype=torch.bfloat16)}
    return {"model": model, "optim": {"m": torch.full((7, 3), value), "v": torch.full((7, 3), value)}}


def small_of(rank: int, world: int, value: float) -> dict[str, list[Entry]]:
    """Weights whole, each on one rank; state cut over all ranks."""
    made = small(value)
    whole = {name: [Shard(i % world, None, 0)] for i, name in enumerate(made["model"])}
    flat = {name: even(tensor.numel(), world) for name, tensor in made["optim"].items()}
    return {"model": of_rank(rank, made["model"], whole), "optim": of_rank(rank, made["optim"], flat)}


def put_one(together: Together, root: Path, tag: str, value: float, **options: Any) -> Path:
    files = small_of(together.rank, together.world, value)
    meta = {"value": value, "step": int(value)} if together.rank == 0 else {}
    return save(root, tag, files, meta, part_bytes=40, together=together, **options)


def put(root: Path, tag: str, value: float, world: int = 3, **options: Any) -> None:
    succeed(on_ranks(world, lambda seat: put_one(seat, root, tag, value, **options)))


def opened(root: Path, tag: str | None = None) -> Checkpoint:
    found = open_checkpoint(root, tag)
    assert found is not None
    return found


def value_of(found: Checkpoint) -> float:
    """The value given to `put`, after checking that all of the checkpoint is of that one save."""
    found.verify()
    value = found.meta["value"]
    assert {file: set(found.names(file)) for file in found.files()} == {"model": {"a", "b"}, "optim": {"m", "v"}}
    for file, tensors in small(value).items():
        for name, tensor in tensors.items():
            assert same(found.tensor(file, name), tensor)
    return float(value)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def listing(root: Path) -> list[str]:
    return sorted(os.listdir(root))


# Round trips


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def random_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    if not math.prod(shape):
        return torch.empty(tuple(shape), dtype=dtype)
    top = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, top, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(tuple(shape))


@st.composite
def written(draw: st.DrawFn) -> tuple[int, dict[str, Tensor], dict[str, list[Shard]]]:
    """A number of ranks, tensors, and who has which elements of them."""
    world = draw(st.integers(1, 5))
    ranks = st.integers(0, world - 1)
    tensors, shards = {}, {}
    for i in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["w", "a@0", "x/y", "@"])) + str(i)
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        tensors[name] = random_tensor(draw(st.sampled_from(DTYPES)), shape, i)
        numel = tensors[name].numel()
        if draw(st.booleans()):
            shards[name] = [Shard(draw(ranks), None, numel)]
            continue
        inner = st.integers(0, numel)
        cuts = [0, *sorted(draw(st.lists(inner, max_size=6 if numel else 0))), numel]
        spans = [(cuts[i], cuts[i + 1] - cuts[i]) for i in range(len(cuts) - 1)]
        shards[name] = [Shard(draw(ranks), start, count) for start, count in draw(st.permutations(spans))]
    return world, tensors, shards


@settings(max_examples=150, deadline=None)
@given(what=written(), data=st.data())
def test_any_cut_of_any_tensors_comes_back_whole_and_by_any_other_cut(
    tmp_path_factory: pytest.TempPathFactory, what: tuple[int, Any, Any], data: st.DataObject
) -> None:
    world, tensors, shards = what
    root = tmp_path_factory.getbasetemp() / "cuts"
    shutil.rmtree(root, ignore_errors=True)
    part_bytes = data.draw(st.sampled_from([1, 64, 1 << 20]))

    def act(seat: Seat) -> Path:
        files = {"m": of_rank(seat.rank, tensors, shards), "none": []}
        return save(root, "t", files, {"world": world}, part_bytes=part_bytes, together=seat)

    paths = on_ranks(world, act)
    succeed(paths)
    assert set(paths) == {root / "t"}
    assert listing(root) == [LATEST, "t"]
    found = opened(root)
    assert found.meta == {"world": world}
    assert found.files() == ["m", "none"]
    assert sorted(found.names("m")) == sorted(tensors)
    assert found.names("none") == []
    for name, tensor in tensors.items():
        assert found.shape("m", name) == tensor.shape
        assert found.dtype("m", name) == tensor.dtype
        assert same(found.tensor("m", name), tensor)
        flat = tensor.reshape(-1)
        for _ in range(3):
            start = data.draw(st.integers(0, flat.numel()))
            numel = data.draw(st.integers(0, flat.numel() - start))
            assert same(found.cut("m", name, start, numel), flat[start : start + numel])
        chunks = list(found.chunks("m", name, data.draw(st.integers(1, 40))))
        assert same(torch.cat(chunks) if chunks else flat, flat)
        for start, numel in ((-1, 1), (0, flat.numel() + 1), (flat.numel(), 1), (0, -1)):
            with pytest.raises(ValueError, match="The range of"):
                found.cut("m", name, start, numel)
    found.verify()
    for rank in range(4):
        found.verify(share=(rank, 4))


def test_files_of_the_ranks(tmp_path: Path) -> None:
    seen: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(3)}

    def act(seat: Seat) -> Path:
        return put_one(seat, tmp_path, "a", 1, on_progress=lambda *at: seen[seat.rank].append(at))

    succeed(on_ranks(3, act))
    names = [
        *(f"model-r0000{rank}.safetensors" for rank in range(2)),
        *(f"optim-r0000{rank}-0000{part}-of-00002.safetensors" for rank in range(3) for part in (1, 2)),
    ]
    assert listing(tmp_path / "a") == [MANIFEST, META, *names]
    assert value_of(opened(tmp_path)) == 1
    totals = {rank: values[-1] for rank, values in seen.items()}  # each of its own bytes
    assert totals == {0: (72, 72), 1: (68, 68), 2: (56, 56)}
    body = json.loads((tmp_path / "a" / MANIFEST).read_text())
    assert body["format_version"] == 2
    assert body["files"]["optim"][2]["parts"] == {"m@7": {"shape": [7, 3], "start": 7}}


def test_only_what_is_asked_for_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(120.0).view(4, 30)
    shards = {"w": even(120, 3)}
    succeed(
        on_ranks(
            3, lambda seat: save(tmp_path, "a", {"m": of_rank(seat.rank, {"w": tensor}, shards)}, {}, together=seat)
        )
    )
    found = opened(tmp_path)
    second = tmp_path / "a" / "m-r00001.safetensors"
    raw = second.read_bytes()
    second.write_bytes(raw[:-4] + b"\0\0\0\0")  # the last element of the second part
    assert found.cut("m", "w", 0, 40).tolist() == tensor.view(-1)[:40].tolist()
    assert found.cut("m", "w", 30, 20).tolist() == tensor.view(-1)[30:50].tolist()
    for read in (
        lambda: found.cut("m", "w", 40, 40),  # a whole part has a checksum
        lambda: found.cut("m", "w", 39, 60),
        lambda: found.tensor("m", "w"),
        lambda: list(found.chunks("m", "w", 7)),
        found.verify,
    ):
        with pytest.raises(ValueError, match=r"m-r00001.safetensors: tensor 'w@40' does not match its checksum"):
            read()
    second.unlink()
    assert found.cut("m", "w", 85, 10).tolist() == tensor.view(-1)[85:95].tolist()


def test_shares_of_a_verification_are_all_of_it_and_even(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10 + i,), float(i)) for i in range(40)}
    save(tmp_path, "a", {"m": [entry(name, tensor, Shard(0, None, 0)) for name, tensor in tensors.items()]}, {})
    found = opened(tmp_path)
    totals = []
    for rank in range(3):
        seen: list[tuple[int, int]] = []
        found.verify(lambda *at, seen=seen: seen.append(at), share=(rank, 3))
        assert seen[-1][0] == seen[-1][1]
        totals.append(seen[-1][1])
    assert sum(totals) == sum(tensor.numel() * 4 for tensor in tensors.values())
    assert max(totals) - min(totals) <= 50 * 4
    path = tmp_path / "a" / "m.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    outcomes = on_ranks(3, lambda seat: found.verify(share=(seat.rank, 3)))
    assert outcomes.count(None) == 2
    with pytest.raises(ValueError, match="'t39' does not match its checksum"):
        succeed(outcomes)
    for share in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="share is"):
            found.verify(share=share)


def test_two_parts_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinflow.checkpoint.tensors.BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr("twinflow.checkpoint.tensors.NUM_AHEAD", 0)
    alive: list[weakref.ref[Any]] = []

    def read(value: int) -> Tensor:
        assert sum(ref() is not None for ref in alive) <= 1, "a part is still there that was written before"
        array = np.full((1 << 16,), value, dtype=np.float32)
        alive.append(weakref.ref(array))
        return torch.from_numpy(array)

    parts = [
        Entry("w", torch.float32, (1 << 16,), lambda i=i: read(i), PartOf((4, 1 << 16), i << 16)) for i in range(4)
    ]
    save(tmp_path, "a", {"m": parts}, {})  # a process alone may cut as well
    assert len(alive) == 4
    assert same(opened(tmp_path).tensor("m", "w"), torch.arange(4.0)[:, None].expand(4, 1 << 16))


def test_parts_in_nested_values() -> None:
    values = torch.arange(6.0)
    of = PartOf((2, 3), 2)
    tree = {
        key: Entry(key, torch.float32, (2,), lambda: values[2:4], part) for key, part in (("cut", of), ("all", None))
    }
    stripped, leaves = take_apart({"step": 1, **tree}, "p")
    assert leaves == list(tree.values())
    assert [leaf.part for leaf in leaves] == [of, None]
    assert put_together(stripped, str.upper) == {"step": 1, "cut": "CUT", "all": "ALL"}  # type: ignore[arg-type]


V1 = {
    MANIFEST: b'{"format": "twinflow checkpoint", "format_version": 1, "twinflow_version": "0.1.0",'
    b' "time_ns": 1794756095327600605, "step": 1, "latest": true, "meta_size": 14, "meta_crc32": 3155519897,'
    b' "files": {"model": [{"name": "model-00001-of-00002.safetensors", "size": 108, "header_crc32": 685245044,'
    b' "tensors": {"a": 818461808}}, {"name": "model-00002-of-00002.safetensors", "size": 100,'
    b' "header_crc32": 3379106189, "tensors": {"b@1": 2896259690}}]}, "crc32": 4159652863}',
    META: b'{\n "step": 1\n}',
    "model-00001-of-00002.safetensors": b"X\0\0\0\0\0\0\0"
    b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}  '
    b"\0\0\0\0\0\0\x80?\0\0\0@",
    "model-00002-of-00002.safetensors": b"X\0\0\0\0\0\0\0"
    b'{"__metadata__":{"format":"pt"},"b@1":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}\0\0\x80?',
}


def test_checkpoints_of_version_1_still_open(tmp_path: Path) -> None:
    (tmp_path / "s1").mkdir()
    for name, raw in V1.items():
        (tmp_path / "s1" / name).write_bytes(raw)
    found = opened(tmp_path)
    found.verify()
    assert found.names("model") == ["a", "b@1"]
    assert found.tensor("model", "a").tolist() == [0, 1, 2]
    assert found.cut("model", "a", 1, 2).tolist() == [1, 2]
    assert same(found.tensor("model", "b@1"), torch.arange(2, dtype=torch.bfloat16))
    put(tmp_path, "s1", 2)
    assert value_of(opened(tmp_path)) == 2


# What is refused


def refused(world: int, act: Callable[[Seat], Any], kind: type[Exception], words: str) -> None:
    """Every rank raises, and says the same."""
    outcomes = on_ranks(world, act)
    assert all(isinstance(outcome, kind) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
    assert words in str(outcomes[0])


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([(0, 0, 4), (1, 6, 6)], "tensor 'w' of files['m']: Elements 4 to 5 of 12 are in no part"),
        ([(0, 0, 4), (1, 4, 7)], "Elements 11 to 11 of 12 are in no part"),
        ([(1, 1, 11)], "Elements 0 to 0 of 12 are in no part"),
        ([(2, 5, 0)], "Elements 0 to 11 of 12 are in no part"),
        ([(0, 0, 8), (2, 6, 6)], "Elements 6 to 7 are in rank 0 and again in rank 2"),
        ([(0, None, 0), (2, None, 0)], "Elements 0 to 11 are in rank 0 and again in rank 2"),
        ([(0, 0, 6), (1, 6, 6), (2, 0, 6)], "Elements 0 to 5 are in rank 0 and again in rank 2"),
    ],
)
def test_parts_that_are_not_a_whole_are_refused_before_anything_is_written(
    tmp_path: Path, shards: Any, words: str
) -> None:
    tensors = {"w": torch.zeros(3, 4)}

    def act(seat: Seat) -> Path:
        files = {"m": of_rank(seat.rank, tensors, {"w": [Shard(*shard) for shard in shards]})}
        return save(tmp_path / "root", "a", files, {}, together=seat)

    refused(3, act, ValueError, words)
    assert not (tmp_path / "root").exists()


def test_ranks_that_do_not_fit_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    refused(
        3,
        lambda s: put_one(s, root, f"step{s.rank // 2}", 1),
        ValueError,
        "tag on rank 2 is 'step1', but must be 'step0'",
    )
    refused(3, lambda s: put_one(s, root, "../x" if s.rank == 1 else "x", 1), ValueError, "rank 1: tag is '../x'")
    refused(2, lambda s: put_one(s, root, "a/b", 1), ValueError, "rank 0 (and 1 more): tag is 'a/b'")

    def other_shape(seat: Seat) -> Path:
        tensor = torch.zeros(3, 4) if seat.rank else torch.zeros(12)
        return save(root, "a", {"m": of_rank(seat.rank, {"w": tensor}, {"w": even(12, 2)})}, {}, together=seat)

    refused(2, other_shape, ValueError, "tensor 'w' of files['m'] is F32 [12] in rank 0, but F32 [3, 4] in rank 1")
    assert not root.exists()
    with pytest.raises(ValueError, match="The part of 'w'"):
        save(root, "a", {"m": [Entry("w", torch.float32, (2,), lambda: torch.zeros(2), PartOf((3,), 2))]}, {})
    with pytest.raises(ValueError, match="The part of 'w'"):
        save(root, "a", {"m": [Entry("w", torch.float32, (2, 1), lambda: torch.zeros(2, 1), PartOf((3,), 0))]}, {})
    (root / "a").mkdir(parents=True)
    (root / "a" / "mine.txt").write_text("x")
    refused(2, lambda s: put_one(s, root, "a", 1), ValueError, "is not a twinflow checkpoint, so it is not replaced")
    assert listing(root) == ["a"]


def test_ranks_without_a_shared_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "0", "a", 1)
    monkeypatch.setattr(save_module, "SEEN_S", 0.1)
    shared = "Use a save_dir on a file system that all ranks share"
    refused(3, lambda s: put_one(s, tmp_path / str(s.rank // 2), "a", 2), ValueError, shared)
    assert listing(tmp_path / "0") == ["a", LATEST]
    assert value_of(opened(tmp_path / "0")) == 1
    monkeypatch.setattr(save_module, "_wait_until_seen", lambda at: (at.mkdir(parents=True, exist_ok=True), None))
    refused(3, lambda s: put_one(s, tmp_path / str(s.rank // 2), "a", 2), ValueError, shared)
    assert listing(tmp_path / "0") == ["a", LATEST]
    assert value_of(opened(tmp_path / "0")) == 1


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that says something else, with the right checksum of itself."""
    body = json.loads(path.read_text())
    del body["crc32"]
    change(body)
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda optim: optim.pop(2), "tensor 'm' of 'optim': Elements 7 to 13 of 21 are in no part"),
        (lambda optim: optim.pop(5), "tensor 'v' of 'optim': Elements 14 to 20 of 21 are in no part"),
        (lambda optim: optim[0]["parts"].clear(), "tensor 'm' of 'optim': Elements 0 to 6 of 21 are in no part"),
        (lambda optim: optim[0]["parts"]["m@0"].update(shape=[21]), "is F32 [21] in optim-r00000-00001-of-00002"),
        (
            lambda optim: [part["parts"][key].update(shape=[2]) for part in optim for key in part["parts"]],
            "but the tensor has only 2",
        ),
        (
            lambda optim: optim[0]["parts"]["m@0"].update(shape=[0, 1 << 40, 1 << 40]),
            "must be a flat part of a tensor of shape",
        ),
        (lambda optim: optim[0]["parts"].update({"x@0": {"shape": [1], "start": 0}}), "does not contain the tensors"),
    ],
)
def test_manifests_whose_parts_are_not_a_whole_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    put(tmp_path, "a", 1)
    changed(tmp_path / "a" / MANIFEST, lambda body: change(body["files"]["optim"]))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        opened(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path / "a") in str(caught.value)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("fuzzed")
    put(root, "a", 1)
    return root, {str(path.relative_to(root)): path.read_bytes() for path in (root / "a").iterdir()}


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_to_any_ranks_file_goes_unseen(fuzzed: tuple[Path, dict[str, bytes]], data: st.DataObject) -> None:
    root, files = fuzzed
    name = data.draw(st.sampled_from(sorted(files)))
    raw = files[name]
    at = data.draw(st.integers(0, len(raw) - 1))
    other = {
        "flip": lambda: raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :],
        "truncate": lambda: raw[:at],
        "extend": lambda: raw + data.draw(st.binary(min_size=1, max_size=16)),
        "of another rank": lambda: files[data.draw(st.sampled_from(sorted(files)))],
        "gone": lambda: None,
    }[data.draw(st.sampled_from(["flip", "truncate", "extend", "of another rank", "gone"]))]()
    try:
        (root / name).unlink() if other is None else (root / name).write_bytes(other)
        found = opened(root, "a")
        for rank in range(2):
            found.verify(share=(rank, 2))
        assert value_of(found) == 1  # blank space in a manifest is not damage
        assert name.endswith(MANIFEST) or other == raw
    except ValueError as error:
        assert Path(name).name in str(error)  # noqa: PT017
    finally:
        (root / name).write_bytes(raw)


# Errors and crashes


STEPS = ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


@contextmanager
def failing(rank: int, at: int, error: BaseException, steps: Sequence[str] = STEPS) -> Iterator[list[str]]:
    """Raise `error` at a rank's call of number `at` of these functions of `os`; a write is torn."""
    calls: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith(f"rank {rank}"):  # or a thread that it has made
                calls.append(name)
                if len(calls) == at:
                    if name == "pwrite":
                        real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                    raise error
            return real(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in steps:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


@pytest.mark.parametrize("tag", ["a", "b"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_full_disk_of_one_rank_fails_all_and_leaves_everything(tmp_path: Path, tag: str, rank: int) -> None:
    put(tmp_path, "a", 1)
    for at in range(1, 100):
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with failing(rank, at, error, ("pwrite",)) as calls:
            outcomes = on_ranks(3, lambda seat: put_one(seat, tmp_path, tag, 7))
        if len(calls) < at:
            break
        for outcome in outcomes:
            assert isinstance(outcome, OSError), outcomes
            assert outcome.errno == errno.ENOSPC
            assert f"rank {rank}: No space left on device" in str(outcome)
            assert str(tmp_path) in outcome.filename
        assert outcomes[rank].__cause__ is error or outcomes[rank].__cause__.__cause__ is error
        assert listing(tmp_path) == ["a", LATEST]
        assert value_of(opened(tmp_path)) == 1
    assert at > 1
    succeed(outcomes)
    assert value_of(opened(tmp_path)) == 7


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (RuntimeError("no such buffer"), RuntimeError, "rank 1: RuntimeError: no such buffer"),
        (KeyError("x"), RuntimeError, "rank 1: KeyError: 'x'"),
        (OSError("odd"), OSError, "rank 1: odd"),
        (ValueError("bad"), ValueError, "rank 1: bad"),
    ],
)
def test_a_read_that_fails_on_one_rank(tmp_path: Path, raised: Exception, kind: type[Exception], words: str) -> None:
    put(tmp_path, "a", 1)

    def broken() -> Tensor:
        raise raised

    def act(seat: Seat) -> Path:
        read = broken if seat.rank == 1 else lambda: torch.zeros(2)
        files = {"m": [Entry(f"w{seat.rank}", torch.float32, (2,), read)]}
        return save(tmp_path, "a", files, {}, together=seat)

    refused(3, act, kind, words)
    assert listing(tmp_path) == ["a", LATEST]
    assert value_of(opened(tmp_path)) == 1


@pytest.mark.parametrize("before", [[], ["a"], ["b"], ["a", "b"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_of_any_rank_at_any_point_leaves_a_checkpoint(tmp_path: Path, rank: int, before: list[str]) -> None:
    base, root = tmp_path / "base", tmp_path / "root"
    base.mkdir()
    for value, name in enumerate(before, 1):
        put(base, name, value, world=1)
    old = len(before)
    outcomes = set()
    at, crashed = 0, True
    while crashed:
        at += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        with failing(rank, at, Crash()):
            raised = on_ranks(2, lambda seat: put_one(seat, root, "b", 7, keep_last=1))
        crashed = isinstance(raised[rank], Crash)
        if crashed and rank:
            assert isinstance(raised[0], threading.BrokenBarrierError)
            assert not [name for name in listing(root) if name.startswith(".")]  # rank 0 has tidied up
        found = open_checkpoint(root)
        outcomes.add(0 if found is None else value_of(found))
        for name in set(listing(root)) - {LATEST}:
            assert name.startswith(".") or value_of(opened(root, name))
        put(root, "b", 9, world=2)
        assert value_of(opened(root)) == 9
        assert not [name for name in listing(root) if name.startswith(".")]
    assert at > (15 if rank == 0 else 5)
    assert outcomes == {old, 7}


def test_ranks_that_wait_for_each_other_keep_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written meanwhile, and still another machine can see that somebody is at work."""
    monkeypatch.setattr(sides, "BEAT_S", 0.01)
    put(tmp_path, "a", 1)
    names: list[str] = []

    def slow() -> Tensor:
        folder = next(path for path in tmp_path.iterdir() if parse_side(path.name))
        names.append(folder.name)
        for _ in range(2):
            before, end = folder.stat().st_mtime_ns, time.monotonic() + 100
            while folder.stat().st_mtime_ns == before:
                assert time.monotonic() < end
                time.sleep(0.01)
        return torch.zeros(2)

    def act(seat: Seat) -> Path:
        read = slow if seat.rank == 1 else lambda: torch.zeros(2)
        return save(tmp_path, "a", {"m": [Entry(f"w{seat.rank}", torch.float32, (2,), read)]}, {}, together=seat)

    for _ in range(2):
        succeed(on_ranks(2, act))
    assert names[0] != names[1]  # a machine may remember where a name led the last time


# Export


def trained(seed: int) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """A model of bf16 weights with fp32 masters, one weight written to since, and integers beside."""
    gen = torch.Generator().manual_seed(seed)
    masters = {f"w{i}": torch.randn(5, 3 + i, generator=gen) for i in range(3)}
    model = {name: master.bfloat16() for name, master in masters.items()}
    model["w1"][2, 1] += 1
    model["count"] = torch.arange(4)
    state = {name: {"step": 1, "master": {"__tensor__": f"{name}/master"}} for name in masters}
    files = {"model": model, "optimizer": {f"{name}/master": master for name, master in masters.items()}}
    return files, {"optimizer": {"has_unsent": False}, "optimizer_state": state, "aliases": {}, "excluded": []}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_is_the_same_whoever_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr("twinflow.checkpoint.exporting.CHUNK_NUMEL", 4)
    files, meta = trained(0)
    for world in (1, 3):

        def act(seat: Seat, world: int = world) -> Path:
            model = {name: [Shard(i % world, None, 0)] for i, name in enumerate(files["model"])}
            model["w2"] = even(25, world)
            masters = {name: even(tensor.numel(), world) for name, tensor in files["optimizer"].items()}
            mine = {
                "model": of_rank(seat.rank, files["model"], model),
                "optimizer": of_rank(seat.rank, files["optimizer"], masters),
            }
            return save(tmp_path / str(world), "a", mine, meta, together=seat)

        succeed(on_ranks(world, act))
    real = Checkpoint.tensor

    def integers_only(self: Checkpoint, file: str, name: str) -> Tensor:
        assert name == "count", "a whole tensor in memory beside the one that is written"
        return real(self, file, name)

    monkeypatch.setattr(Checkpoint, "tensor", integers_only)
    back = {}
    for world in (1, 3):
        done = export_checkpoint(tmp_path / str(world), tmp_path / f"out{world}", dtype=dtype)
        assert (done.num_tensors, done.num_masters) == (4, 3)
        back[world] = load_file(tmp_path / f"out{world}" / "model.safetensors")
    for name, tensor in files["model"].items():
        expected = tensor
        if name != "count":
            expected = files["optimizer"][f"{name}/master"].clone()
            if name == "w1":
                expected[2, 1] = tensor[2, 1].float()
            expected = expected.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        assert same(back[1][name], expected), name
        assert same(back[3][name], expected), name
    path = tmp_path / "3" / "a" / "optimizer-r00002.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"optimizer-r00002.safetensors: tensor .* does not match its checksum"):
        export_checkpoint(tmp_path / "3", tmp_path / "bad", dtype=dtype)
    assert not (tmp_path / "bad").exists()


# Ranks as processes


def run_script(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.matrix
def test_processes_killed_while_they_save(tmp_path: Path) -> None:
    child = run_script("kills", tmp_path / "root")
    out, _ = child.communicate(timeout=240)
    assert child.returncode == 0, out
    told = json.loads(out.splitlines()[-1])
    assert told["old"] > 3, told
    assert told["new"] > 3, told
    assert value_of(opened(tmp_path / "root")) == told["value"]
    assert not [name for name in listing(tmp_path / "root") if parse_side(name)]


@pytest.mark.matrix
def test_ranks_over_gloo(tmp_path: Path) -> None:
    parent = run_script("gloo", tmp_path / "root", tmp_path / "store", 3)
    told, _ = parent.communicate(timeout=240)
    assert parent.returncode == 0, told
    assert told.count("rank 2: No space left on device") == 3, told  # each of them says so
    assert value_of(opened(tmp_path / "root")) == 5


def _receive(sock: socket.socket) -> Any:
    raw = b""
    while not raw.endswith(b"\n"):
        chunk = sock.recv(1 << 16)
        if not chunk:
            raise ConnectionError("a rank is gone")
        raw += chunk
    return json.loads(raw)


def _send(sock: socket.socket, value: Any) -> None:
    sock.sendall(json.dumps(value).encode() + b"\n")


@dataclass(frozen=True)
class Wire:
    """A rank's end of the line to the process that hands values around."""

    rank: int
    world: int
    sock: socket.socket

    def gather(self, value: Any) -> list[Any]:
        _send(self.sock, value)
        found: list[Any] = _receive(self.sock)
        return found


def _die_at(number: int) -> None:
    """Let this process be killed at its call of that number of functions that change files; a write is torn."""
    left = [number]

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                if name == "pwrite":
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return step

    for name in STEPS:
        setattr(os, name, wrap(name, getattr(os, name)))


def _be_rank(rank: int, sock: socket.socket, root: Path, value: int, die_at: int | None) -> int:
    real = os.pwrite

    def slow(fd: int, data: Any, at: int) -> int:
        time.sleep(0.001)
        return real(fd, data, at)

    os.pwrite = slow
    if die_at is not None:
        _die_at(die_at)
    try:
        put_one(Wire(rank, 3, sock), root, "ab"[value % 2], value, keep_last=1)
    except Exception as error:
        return 3 if isinstance(error, ConnectionError) or "is gone" in str(error) else 4
    return 0


def _one_save(root: Path, value: int, die_at: dict[int, int], kill_all_s: float | None) -> list[int]:
    """Fork three ranks that save; hand their values around, kill them, and return how they ended."""
    pairs = [socket.socketpair() for _ in range(3)]
    pids = []
    for rank in range(3):
        pid = os.fork()
        if not pid:
            for other, (ours, theirs) in enumerate(pairs):
                ours.close()
                if other != rank:
                    theirs.close()
            code = 5
            try:
                code = _be_rank(rank, pairs[rank][1], root, value, die_at.get(rank))
            finally:
                os._exit(code)
        pids.append(pid)
    socks = [ours for ours, theirs in pairs]
    for _, theirs in pairs:
        theirs.close()
    began, said, is_over = time.monotonic(), {}, False
    while not is_over:
        if kill_all_s is not None and time.monotonic() - began > kill_all_s:
            break
        assert time.monotonic() - began < 100, "a rank waits for one that is gone"
        ready = select.select([sock for sock in socks if sock not in said], [], [], 0.002)[0]
        for sock in ready:
            with suppress(OSError):
                said[sock] = _receive(sock)
            is_over = is_over or sock not in said
        if len(said) == 3:
            for sock in socks:
                with suppress(OSError):
                    _send(sock, [said[one] for one in socks])
            said = {}
    if kill_all_s is not None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for sock in socks:
        sock.close()
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kills(root: Path) -> None:
    """Save again and again, with one rank or all of them killed on the way; what is there must always open, whole."""
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed, flush=True)
    rng = random.Random(seed)
    began = time.monotonic()
    assert _one_save(root, 1, {}, None) == [0, 0, 0]
    usual_s = time.monotonic() - began
    value, counts = 1, {"old": 0, "new": 0}
    for trial in range(24):
        victim = trial % 4
        die_at = {victim: rng.randint(1, 60 if victim == 0 else 20)} if victim < 3 else {}
        codes = _one_save(root, value + 1, die_at, None if die_at else rng.uniform(0, 1.5 * usual_s))
        assert set(codes) <= {0, 3, -signal.SIGKILL}, (trial, codes, die_at)
        found = value_of(opened(root))
        assert found in (value, value + 1), (found, value, trial)
        for name in set(listing(root)) - {LATEST}:
            assert name.startswith(".") or value_of(opened(root, name))
        counts["new" if found > value else "old"] += 1
        value = int(found)
    assert _one_save(root, value + 1, {}, None) == [0, 0, 0]
    print(json.dumps({**counts, "value": value + 1}))


class Gloo:
    """Values as JSON over a process group, which is nothing but bytes: no pickles."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([raw.numel()]))
        longest = int(max(sizes))
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(found, torch.nn.functional.pad(raw, (0, longest - raw.numel())))
        return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(found, sizes, strict=True)]


def gloo(root: Path, store: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    together = Gloo()
    put_one(together, root, "a", 5)
    real = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = full if rank == 2 else real
    try:
        put_one(together, root, "a", 6)
    except OSError as error:
        print(error)
    os.pwrite = real
    opened(root).verify(share=(rank, world))
    dist.barrier()
    dist.destroy_process_group()


def fork_gloo(root: Path, store: Path, world: int) -> int:
    """Ranks that need not import anything again; how many of them failed."""
    pids = []
    for rank in range(world):
        pids.append(os.fork())
        if not pids[-1]:
            gloo(root, store, rank, world)
            sys.stdout.flush()
            os._exit(0)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


if __name__ == "__main__":
    if sys.argv[1] == "kills":
        kills(Path(sys.argv[2]))
    else:
        sys.exit(fork_gloo(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
