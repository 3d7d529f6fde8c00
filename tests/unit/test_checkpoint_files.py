# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: what goes in comes out, a crash or a full disk never costs a checkpoint, damage is always found."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinflow import native
from twinflow.checkpoint import Checkpoint, Entry, export_weights, open_checkpoint, save, sides
from twinflow.checkpoint import tensors as tensors_module
from twinflow.checkpoint.disk import LATEST, RESTORE, DurableFile
from twinflow.checkpoint.manifest import MANIFEST, META, encode_manifest, read_manifest
from twinflow.checkpoint.sides import side_path
from twinflow.checkpoint.tensors import DTYPES, TensorWriter, encode_header, read_header, read_range, split_entries
from twinflow.native.library import Loaded
from twinflow.state_dict import Halves, Parts


@pytest.fixture(scope="module", autouse=True)
def no_syncs() -> Iterator[None]:
    """Thousands of saves need not wait for the disk; what is synced and when has a test of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


def entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def entries(tensors: dict[str, Tensor]) -> list[Entry]:
    return [entry(name, tensor) for name, tensor in tensors.items()]


def bits(tensor: Tensor) -> bytes:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8).numpy().tobytes()


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def every_dtype() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), generator=gen)
        tensors[name] = raw.to(torch.uint8).view(dtype).view(2, 3)
        tensors[f"{name} of size zero"] = torch.empty(0, 3, dtype=dtype)
        tensors[f"{name} of no dims"] = tensors[name][0, 0].clone()
    return tensors


def opened(root: Path, tag: str | None = None) -> Checkpoint:
    found = open_checkpoint(root, tag)
    assert found is not None
    return found


def contents(found: Checkpoint) -> dict[str, Any]:
    found.verify()
    return {file: {name: bits(tensor) for name, tensor in found.tensors(file)} for file in found.files()}


def small(value: float) -> dict[str, list[Entry]]:
    """Two files, one of them in two parts if `part_bytes` is 32."""
    value = float(value)
    model = {"a": torch.full((4,), value), "b": torch.full((2, 3), value, dtype=torch.bfloat16)}
    return {"model": entries(model | {"c": torch.full((4,), value)}), "optim": entries({"m": torch.full((5,), value)})}


def put(root: Path, tag: str, value: float, **options: Any) -> Path:
    return save(root, tag, small(value), {"value": value, "step": int(value)}, part_bytes=32, **options)


def value_of(found: Checkpoint) -> float:
    """The value given to `put`, after checking that all of the checkpoint is of that one save."""
    found.verify()
    value = found.meta["value"]
    for file in found.files():
        assert found.names(file)
        for _, tensor in found.tensors(file):
            assert (tensor == value).all()
    return float(value)


def listing(root: Path) -> list[str]:
    return sorted(os.listdir(root))


# Round trips


def test_round_trip_of_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = every_dtype()
    path = save(tmp_path / "deep" / "root", "step-1", {"model": entries(tensors)}, {"step": 1})
    assert listing(path) == [MANIFEST, META, "model.safetensors"]
    found = opened(tmp_path / "deep" / "root")
    assert (found.path, found.tag, found.meta, found.files()) == (path, "step-1", {"step": 1}, ["model"])
    assert found.names("model") == list(tensors)
    for name, tensor in found.tensors("model"):
        assert same(tensor, tensors[name]), name
        assert found.shape("model", name) == tensors[name].shape
        assert found.dtype("model", name) == tensors[name].dtype
    tensor = found.tensor("model", "F32")
    tensor.fill_(7)  # of its own: neither the file nor a second reading changes
    assert same(found.tensor("model", "F32"), tensors["F32"])
    found.verify()


def test_views_are_saved_by_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    conj = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    views = {"t": base.t(), "s": base[:, ::2], "e": base[:1].expand(3, 6), "conj": conj, "neg": conj.imag}
    views["p"] = torch.nn.Parameter(base[1:3])
    views["empty"] = torch.from_numpy(np.empty(0, dtype=np.float32))  # of stride 0
    views["single"] = base.view(-1)[5::24]  # of stride 24
    save(tmp_path, "a", {"model": entries(views)}, {})
    for name, tensor in opened(tmp_path).tensors("model"):
        assert same(tensor, views[name].detach().resolve_conj().resolve_neg()), name


def test_parts_and_order(tmp_path: Path) -> None:
    assert [len(run) for run in split_entries(small(1)["model"], 32)] == [2, 1]
    assert [len(run) for run in split_entries(small(1)["model"], 1)] == [1, 1, 1]
    assert split_entries([], 1) == [[]]
    path = put(tmp_path, "a", 1)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "optim.safetensors"]
    assert listing(path) == [MANIFEST, META, *names]
    assert opened(tmp_path).names("model") == ["a", "b", "c"]
    save(tmp_path, "empty", {"none": []}, {})
    assert opened(tmp_path).names("none") == []
    opened(tmp_path).verify()


def test_safetensors_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    tensors = every_dtype()
    path = save(tmp_path, "a", {"model": entries(tensors)}, {})
    theirs = safetensors.torch.load_file(path / "model.safetensors")
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "pt"}
    assert all(same(theirs[name], tensors[name]) for name in tensors)

    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    header = read_header(tmp_path / "theirs.safetensors")
    assert {info.name for info in header.infos} == set(tensors)
    for info in header.infos:
        found = torch.empty(info.shape, dtype=info.dtype)
        read_range(tmp_path / "theirs.safetensors", header, info, 0, found)
        assert same(found, tensors[info.name]), info.name


def test_tensors_begin_at_multiples_of_their_item_size() -> None:
    _, header = encode_header(entries(every_dtype()))
    assert header.data_start % 8 == 0
    assert all(info.start % info.dtype.itemsize == 0 for info in header.infos)


def test_two_tensors_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "BLOCK_BYTES", 3 << 20)  # several blocks
    monkeypatch.setattr(tensors_module, "NUM_AHEAD", 0)
    monkeypatch.setattr(tensors_module, "CHUNK_BYTES", 3 << 20)
    alive: list[weakref.ref[Any]] = []

    def read(value: int) -> Tensor:
        # One whose last bytes are in the same block may be there.
        assert sum(ref() is not None for ref in alive) <= 1, "a tensor is still there that was written before"
        array = np.full((2 << 20,), value, dtype=np.float32)
        alive.append(weakref.ref(array))
        return torch.from_numpy(array)

    made = [Entry(f"t{i}", torch.float32, (2 << 20,), lambda i=i: read(i)) for i in range(3)]
    seen: list[tuple[int, int]] = []
    save(tmp_path, "a", {"m": made}, {}, on_progress=lambda done, total: seen.append((done, total)))
    assert len(alive) == 3
    assert len(seen) == 11  # 3 tensors and 9 blocks have 11 pieces
    assert seen == sorted(seen)
    assert seen[-1] == (24 << 20, 24 << 20)
    found = opened(tmp_path)
    for i, (_, tensor) in enumerate(found.tensors("m")):
        assert (tensor == i).all()
    seen.clear()
    found.verify(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (24 << 20, 24 << 20)
    crc32s = read_manifest(found.path).files["m"][0].tensors
    assert crc32s["t1"] == zlib.crc32(np.full((2 << 20,), 1, dtype=np.float32).tobytes())


def test_a_tensor_is_read_while_the_one_before_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = threading.Event()
    write = DurableFile.write

    def slow(self: DurableFile, data: bytes | memoryview, *start: int) -> None:
        assert is_read.wait(20.0), "the second tensor is not read before the first one is written"
        write(self, data, *start)

    def second() -> Tensor:
        is_read.set()
        return torch.ones(2)

    monkeypatch.setattr(DurableFile, "write", slow)
    both = [entry("first", torch.zeros(2)), Entry("second", torch.float32, (2,), second)]
    for part_bytes in (8, 1 << 20):  # in two files and in one
        is_read.clear()
        save(tmp_path, "a", {"m": both}, {}, part_bytes=part_bytes)
        assert opened(tmp_path).tensor("m", "second").tolist() == [1.0, 1.0]


def test_a_file_is_synced_while_the_next_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_written = threading.Event()
    put(tmp_path, "a", 1)

    def slow(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if name.startswith("m-00001"):
            assert is_written.wait(20.0), "the second file is not written while the first one is synced"
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def second() -> Tensor:
        is_written.set()
        return torch.ones(2)

    monkeypatch.setattr(os, "fsync", slow)
    files = {"m": [entry("first", torch.zeros(2)), Entry("second", torch.float32, (2,), second)]}
    threads = threading.active_count()
    with pytest.raises(OSError, match=r"m-00001-of-00002\.safetensors"):
        save(tmp_path, "a", files, {}, part_bytes=8)
    assert listing(tmp_path) == ["a", LATEST]
    assert value_of(opened(tmp_path)) == 1
    assert threading.active_count() == threads


@pytest.mark.parametrize("case", ["direct", "refused at once", "refused by the write", "short writes"])
@pytest.mark.parametrize("rest", [0, 5, 4096 + 8], ids=str)
def test_files_of_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: int, case: str) -> None:
    """Whole pages go around the page cache, unless the file system refuses that."""
    monkeypatch.setattr(tensors_module, "BLOCK_BYTES", 1 << 16)
    opens, pwrite, is_direct = os.open, os.pwrite, []

    def write(fd: int, data: memoryview, at: int) -> int:
        is_direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if case == "refused by the write" and is_direct[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, data[:4096] if case == "short writes" else data, at)

    def open_or_refuse(path: Path, flags: int, *rest: int) -> int:
        if case == "refused at once" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opens(path, flags, *rest)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "open", open_or_refuse)
    values = np.random.default_rng(0).integers(0, 256, 5 * (1 << 16) + rest, dtype=np.uint8)
    made = entry("values", torch.from_numpy(values))
    raw, header = encode_header([made])
    with TensorWriter() as writer:
        found = [writer.write(tmp_path / name, [made], raw, header) for name in ("one", "two")]
    assert found == [{"values": zlib.crc32(values.tobytes())}] * 2
    for name in ("one", "two"):
        assert (tmp_path / name).read_bytes() == raw + values.tobytes()
    if case != "refused at once":
        with suppress(OSError):  # only if the file system of the tests has direct writes
            os.close(opens(tmp_path / "one", os.O_WRONLY | os.O_DIRECT))
            assert any(is_direct)
    assert False in is_direct  # a file ends with a part of a page


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_tensors_are_written_as_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Parts and halves in any order of blocks give the bytes and checksums of whole tensors, and `done` comes once."""
    monkeypatch.setattr(tensors_module, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(tensors_module, "LARGE_BYTES", 1 << 13)
    monkeypatch.setattr(tensors_module, "NUM_AHEAD", seed)
    if seed % 2:  # as if there were no native library
        monkeypatch.setattr("twinflow.native.kernels.load", lambda: Loaded(None, None, "none"))
    gather, numbers, num_uncopied = native.gather, random.Random(seed), 0

    def slow(into: Any, given: Any) -> Any:
        nonlocal num_uncopied
        num_uncopied += into is None
        time.sleep(numbers.random() / 1000)
        return gather(into, given)

    monkeypatch.setattr(native, "gather", slow)
    torch.manual_seed(seed)
    wholes, parts, done = [], [], []
    for number in range(12):
        dtype = numbers.choice([torch.float32, torch.bfloat16, torch.float64, torch.uint8])
        sizes = [
            numbers.choice([0, 1, 5, 128, 3_000, 10_000, 1 << 13, 1 << 14]) for _ in range(numbers.randrange(1, 4))
        ]
        whole = at_a_page((100 * torch.randn(sum(sizes))).to(dtype))
        cut: list[Any] = list(whole.split(sizes))
        if dtype == torch.float32:
            cut = [Halves(*native.split(one)) if numbers.random() < 0.7 else one for one in cut]
        wholes.append(entry(f"t{number}", whole))
        parts.append(replace(wholes[-1], read=partial(Parts, tuple(cut)), done=partial(done.append, number)))
    raw, header = encode_header(wholes)
    with TensorWriter() as writer:
        one, other = (writer.write(tmp_path / str(i), some, raw, header) for i, some in enumerate((wholes, parts)))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    assert one == other == {whole.name: zlib.crc32(whole.tensor().view(torch.uint8).numpy()) for whole in wholes}
    for whole in wholes:
        assert torch.equal(safetensors.torch.load_file(tmp_path / "1")[whole.name], whole.tensor())
    assert sorted(done) == list(range(12))
    assert num_uncopied > 0


def at_a_page(tensor: Tensor) -> Tensor:
    raw = torch.empty(tensor.numel() * tensor.element_size() + 4096, dtype=torch.uint8)
    start = -raw.data_ptr() % 4096
    return raw[start : start + len(raw) - 4096].view(tensor.dtype).copy_(tensor)


def test_parts_of_another_size_are_refused(tmp_path: Path) -> None:
    for part in (torch.zeros(3), torch.zeros(4, dtype=torch.float64), Halves(*native.split(torch.zeros(5)))):
        made = Entry("x", torch.float32, (2, 2), partial(Parts, (part,)))
        with pytest.raises(ValueError, match=r"read\(\) of the entry 'x' returned parts of"):
            save(tmp_path, "a", {"m": [made]}, {})


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 63, 64, 127, 128, 129, 191, 1000, 4096, 70_001])
def test_the_checksum_is_that_of_zlib(numel: int) -> None:
    data = np.random.default_rng(numel).integers(0, 256, numel + 3, dtype=np.uint8).tobytes()
    for start in range(4):  # also at addresses that are not multiples of 16
        one = memoryview(data)[start : start + numel]
        for before in (0, 1, 0xDEADBEEF, 0xFFFFFFFF):
            assert native.crc32(one, before) == zlib.crc32(one, before)
    for half in (0, numel // 2, numel):
        first, second = native.crc32(data[:half]), native.crc32(data[half:])
        assert native.crc32(data[half:], first) == zlib.crc32(data)
        assert native.joined_crc32(first, second, len(data) - half) == zlib.crc32(data)


@pytest.mark.parametrize("numel", [1, 3, 4096, 4097, 70_001])
@pytest.mark.parametrize("start", [0, 1, 8, 15])
def test_gathered_values_are_those_of_the_parts(numel: int, start: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    values[::7] = torch.tensor([float("inf"), float("-inf"), 0.0, 1e-40])[torch.arange(len(values[::7])) % 4]
    raw = torch.randint(0, 256, (numel + 3,), dtype=torch.uint8)[3:]
    into = np.full(start + 5 * numel + 16, 7, dtype=np.uint8)
    wanted = [raw.numpy().tobytes(), values.numpy().tobytes()]
    parts = [raw, native.split(values)]
    assert native.gather(into[start : start + 5 * numel], parts) == [zlib.crc32(one) for one in wanted]
    assert into.tobytes() == bytes([7] * start) + b"".join(wanted) + bytes([7] * 16)
    assert native.gather(None, parts) == [zlib.crc32(one) for one in wanted]


def test_it_is_written_although_the_script_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a script, Python's executors take no more work, but the thread of a checkpoint still runs."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    large = torch.arange(1 << 20)
    save(tmp_path, "a", {"m": [entry("large", large)]}, {})
    assert torch.equal(opened(tmp_path).tensor("m", "large"), large)


# Meta, names and arguments


def test_meta_comes_back(tmp_path: Path) -> None:
    meta = {"none": None, "yes": True, "n": -(2**127), "f": 0.1, "s": "ü\ud800", "list": [1, [2.5, {}]], "d": {"": {}}}
    save(tmp_path, "a", {}, meta | {"tuple": (1, 2), "np": np.float64(0.5), "best": math.inf, "low": [-math.inf]})
    back = opened(tmp_path).meta
    assert back == meta | {"tuple": [1, 2], "np": 0.5, "best": math.inf, "low": [-math.inf]}
    save(tmp_path, "a", {}, {"loss": {"now": math.nan}})
    assert math.isnan(opened(tmp_path).meta["loss"]["now"])
    json.loads((tmp_path / "a" / META).read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"a": {"b": [0, torch.zeros(1)]}}, "meta['a']['b'][1] is of type Tensor"),
        ({"a": {1: 2}}, "A key of meta['a'] is 1"),
        ({"a": {"__nonfinite__": "x"}}, "A key of meta['a'] is '__nonfinite__'"),
        ({"a": {1, 2}}, "meta['a'] is of type set"),
        ({"a": b"x"}, "meta['a'] is of type bytes"),
        ({"a": 1 << 5000}, "meta['a'] is an integer of 5001 bits"),
        ({"a": np.int64(1)}, "meta['a'] is of type int64"),
        ([1], "meta is [1]"),
    ],
)
def test_meta_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path, meta: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        save(tmp_path / "root", "a", small(1), meta)
    assert not (tmp_path / "root").exists()


def test_meta_with_a_cycle_is_refused(tmp_path: Path) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="nested more than"):
        save(tmp_path, "a", {}, {"cycle": cycle})


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "/a", "a\\b", ".hidden", "a\0", "a\n", " a", "x" * 121, "latest", 3]
)
def test_tags_that_are_not_plain_names_are_refused(tmp_path: Path, tag: Any) -> None:
    with pytest.raises(ValueError, match="tag is"):
        save(tmp_path / "root", tag, {}, {})
    with pytest.raises(ValueError, match="tag is"):
        open_checkpoint(tmp_path, tag)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ({"../x": []}, {}, "A key of files is '../x'"),
        ({"m": entries({"a": torch.zeros(1)}) * 2}, {}, "two tensors called 'a'"),
        ({"m": entries({"__metadata__": torch.zeros(1)})}, {}, "The name of a tensor"),
        ({"m": entries({"a": torch.zeros(1, dtype=torch.complex128)})}, {}, "The dtype of 'a'"),
        ({"m": small(1)["model"], "m-00001-of-00003": []}, {"part_bytes": 1}, "need equal file names. Rename one key"),
        ({}, {"keep_last": 0}, "keep_last is 0"),
        ({}, {"part_bytes": 0}, "part_bytes is 0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, files: Any, options: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        save(tmp_path / "root", "a", files, {}, **options)
    assert not (tmp_path / "root").exists()


def test_long_names_fit(tmp_path: Path) -> None:
    save(tmp_path, "t" * 120, {"f" * 120: small(1)["model"]}, {}, part_bytes=1)
    assert opened(tmp_path).names("f" * 120) == ["a", "b", "c"]


def test_unknown_file_and_tensor(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)
    found = opened(tmp_path)
    with pytest.raises(ValueError, match="'nope', but must be one of 'model', 'optim'"):
        found.names("nope")
    with pytest.raises(ValueError, match="'nope', but must be one of its 3 tensors"):
        found.tensor("model", "nope")


# Which checkpoint is opened


def test_a_save_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("{}")
    for root in (file, file / "inside"):
        with pytest.raises(ValueError, match=r"^save_dir is .*, but must be a folder, .* Choose another save_dir\.$"):
            put(root, "one", 1)
    assert file.read_text() == "{}"


def test_a_tag_that_does_not_exist_names_the_others(tmp_path: Path) -> None:
    put(tmp_path, "one", 1)
    with pytest.raises(ValueError, match=r"is 'two', but must be 'one'\. Pass one of these as tag, or no tag for the"):
        open_checkpoint(tmp_path, "two")


def test_latest_and_tags(tmp_path: Path) -> None:
    assert open_checkpoint(tmp_path / "nothing") is None
    assert open_checkpoint(tmp_path) is None
    put(tmp_path, "one", 1)
    put(tmp_path, "two", 2)
    put(tmp_path, "best", 3, save_latest=False)
    assert (tmp_path / LATEST).read_text() == "two\n"
    assert [value_of(opened(tmp_path, tag)) for tag in (None, "one", "two", "best")] == [2, 1, 2, 3]
    with pytest.raises(ValueError, match="is 'three', but must be one of 'one', 'two', 'best'"):
        open_checkpoint(tmp_path, "three")
    with pytest.raises(ValueError, match="has no checkpoint 'one', and no other checkpoint"):
        open_checkpoint(tmp_path / "nothing", "one")
    (tmp_path / LATEST).unlink()
    assert value_of(opened(tmp_path)) == 2  # "best" was not saved to go on from
    put(tmp_path, "two", 2)
    shutil.rmtree(tmp_path / "two")
    with pytest.warns(UserWarning, match="names 'two', which does not exist. 'one', the newest checkpoint, is opened"):
        assert value_of(opened(tmp_path)) == 1
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(ValueError, match="latest names 'two', which does not exist"):
        open_checkpoint(tmp_path)
    (tmp_path / LATEST).unlink()
    with pytest.raises(ValueError, match="Give one of the tags 'best'"):
        open_checkpoint(tmp_path)
    for raw in (b"", b"../one", b"\xff"):
        (tmp_path / LATEST).write_bytes(raw)
        with pytest.raises(ValueError, match="latest does not contain a tag"):
            open_checkpoint(tmp_path)


def test_what_was_set_aside_is_found_and_put_back(tmp_path: Path) -> None:
    put(tmp_path, "one", 1)
    aside = side_path(tmp_path, "one", "old")
    os.rename(tmp_path / "one", aside)
    for tag in (None, "one"):
        assert value_of(opened(tmp_path, tag)) == 1
    assert opened(tmp_path).path == aside  # reading changes nothing
    put(tmp_path, "two", 2)
    assert listing(tmp_path) == [LATEST, "one", "two"]
    assert value_of(opened(tmp_path, "one")) == 1


def test_keep_last_keeps_the_newest_and_the_latest(tmp_path: Path) -> None:
    put(tmp_path, "a", 9)
    for step in range(4):  # went back to an early step: newer all the same
        put(tmp_path, f"s{step}", step, save_latest=False)
    (tmp_path / "notes").mkdir()
    (tmp_path / "s0" / META).unlink()  # not complete: neither counted nor deleted
    put(tmp_path, "s4", 4, save_latest=False, keep_last=2)
    assert listing(tmp_path) == ["a", LATEST, "notes", "s0", "s3", "s4"]
    put(tmp_path, "s5", 5, keep_last=1)
    assert listing(tmp_path) == [LATEST, "notes", "s0", "s5"]


def side_of(pid: int, tag: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name that the running process `pid` would give to a folder."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        return side_path(Path(), tag, kind).name


def test_leftovers_of_dead_processes_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a", 1)
    dead, live = [".c.partial-9999999999"], [".other"]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        dead += [side_of(child.pid, *what, monkeypatch) for what in (("a", "partial"), ("b", "removed"), ("a", "old"))]
        pointer = side_of(child.pid, LATEST, "partial", monkeypatch)
        child.communicate(b"\n")
    live += [side_of(os.getppid(), *what, monkeypatch) for what in (("a", "partial"), ("b", "removed"))]
    reborn = re.sub("-[0-9]+$", "-1", live[1])  # of a process that had the same id before
    assert reborn != live[1]
    for name in [*dead, reborn, *live]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    (tmp_path / pointer).write_text("a")
    put(tmp_path, "b", 2, keep_last=3)
    assert listing(tmp_path) == sorted([*live, "a", "b", LATEST])


def test_a_zombie_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = side_of(child.pid, "a", "partial", monkeypatch)
    (tmp_path / name).mkdir()
    put(tmp_path, "b", 1)
    assert name in listing(tmp_path)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # over, and not yet buried
    put(tmp_path, "b", 2)
    assert name not in listing(tmp_path)
    child.wait()


@pytest.mark.parametrize("name", [".a.partial-77-0123456789abcdef-5", ".a.partial-77"])
def test_what_another_machine_may_be_writing_is_left_until_it_has_been_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("its process ids mean nothing here"))
    other = tmp_path / name
    other.mkdir()
    (other / "model-r00000.safetensors").write_text("half")
    put(tmp_path, "b", 1)
    assert listing(tmp_path) == sorted([name, "b", LATEST])
    monkeypatch.setattr(sides, "_idle_s", lambda path: sides.LEASE_S + 1 if path == other else 0)
    put(tmp_path, "b", 2)
    assert listing(tmp_path) == ["b", LATEST]


def test_idle_is_counted_from_the_last_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_text("x")
    time.sleep(0.5)
    assert 0.4 < sides._idle_s(folder) < 60
    assert listing(tmp_path) == ["folder"]
    aside = folder.rename(tmp_path / "aside")  # its age is no reason to take away what was set aside just now
    assert sides._idle_s(aside) <= time.time() - aside.stat().st_ctime + 0.1
    (aside / "x").write_text("more")
    assert sides._idle_s(aside) <= time.time() - (aside / "x").stat().st_mtime + 0.1
    assert sides._idle_s(tmp_path / "gone") == 0
    before = aside.stat().st_mtime_ns
    monkeypatch.setattr(sides, "BEAT_S", 0.01)
    with sides.kept_alive(tmp_path / "gone", aside):
        while aside.stat().st_mtime_ns == before:  # or the test runs out of time
            time.sleep(0.01)


# Errors and crashes while saving


class Crash(BaseException):
    """The process is gone: no handler of ours may tidy up after it."""


STEPS = ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


@contextmanager
def failing(at: int, error: BaseException, steps: tuple[str, ...] = STEPS) -> Iterator[list[str]]:
    """Raise `error` at the call of number `at` of these functions of `os`; a write is torn. The calls are listed."""
    calls: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
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


def error_of(act: Callable[[], object], at: int, code: int, steps: tuple[str, ...]) -> OSError | None:
    """What `act` raises where the step of number `at` fails; None where it goes through."""
    with failing(at, OSError(code, os.strerror(code)), steps):
        try:
            act()
        except OSError as error:
            return error
    return None


SCENES: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "first": ([], "b", {}),
    "same tag": (["b"], "b", {}),
    "another tag": (["a"], "b", {}),
    "same tag, keeping one": (["a", "b"], "b", {"keep_last": 1}),
    "another tag, keeping one": (["a", "c"], "b", {"keep_last": 1}),
    "not the latest": (["b", "a"], "b", {"save_latest": False}),
}


@pytest.mark.parametrize("scene", SCENES)
def test_a_crash_at_any_point_leaves_a_checkpoint(tmp_path: Path, scene: str) -> None:
    before, tag, options = SCENES[scene]
    base = tmp_path / "base"
    base.mkdir()
    for value, name in enumerate(before, 1):
        put(base, name, value)
    old = len(before)
    outcomes = set()
    at, crashed = 0, True
    while crashed:
        at += 1
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        crashed = False
        with failing(at, Crash()):
            try:
                put(root, tag, 7, **options)
            except Crash:
                crashed = True
        found = open_checkpoint(root)
        outcomes.add(None if found is None else value_of(found))
        if before and tag in before:  # by its name too it is there at every moment
            assert value_of(opened(root, tag)) in (before.index(tag) + 1, 7)
        for name in set(listing(root)) - {LATEST}:  # no half of a checkpoint under a name that can be opened
            assert name.startswith(".") or value_of(opened(root, name))
        # The next save goes on from whatever was left, and so does the one after it, should it crash as well.
        with failing(at % 11 + 1, Crash()), suppress(Crash):
            put(root, "b", 8)
        assert not before or value_of(opened(root))
        put(root, "b", 9)
        assert value_of(opened(root)) == 9
        assert not [name for name in listing(root) if name.startswith(".")]
    assert at > 20
    after = {old} if options.get("save_latest") is False else {old, 7}
    assert outcomes == {value or None for value in after}


def test_whoever_stops_the_process_does_not_wait(tmp_path: Path) -> None:
    with failing(9, Crash()), pytest.raises(Crash):
        put(tmp_path, "a", 1)
    assert listing(tmp_path) == [side_path(tmp_path, "a", "partial").name]
    assert open_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("steps", "code"), [(("pwrite",), errno.ENOSPC), (("fsync",), errno.EIO), (("rename",), errno.EIO)]
)
@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path, tag: str, steps: tuple[str, ...], code: int) -> None:
    put(tmp_path, "a", 1)
    names = listing(tmp_path)
    for at in range(1, 100):
        error = error_of(lambda: put(tmp_path, tag, 7), at, code, steps)
        if error is not None:
            assert error.errno == code
            assert str(tmp_path) in str(error.filename) or steps == ("rename",)
        done = value_of(opened(tmp_path)) == 7 or (tmp_path / "b").exists()
        if done:  # all of it was on the disk: the sync of the folder's names or the deletion of the old one failed
            break
        assert listing(tmp_path) == names
        assert value_of(opened(tmp_path)) == 1
    assert at > (3 if steps != ("rename",) else 1)


def test_a_read_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    put(tmp_path, "a", 1)

    def broken() -> Tensor:
        raise RuntimeError("no such buffer")

    wrong = Entry("w", torch.float32, (2,), lambda: torch.zeros(3))
    failures = [(Entry("x", torch.float32, (2,), broken), RuntimeError, "no such buffer"), (wrong, ValueError, "'w'")]
    for bad, kind, words in failures:
        with pytest.raises(kind, match=words):
            save(tmp_path, "a", {"m": [*small(2)["model"], bad]}, {})
        assert listing(tmp_path) == ["a", LATEST]
        assert value_of(opened(tmp_path)) == 1


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a", 1)
    events: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def on_sync(fd: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        real["fsync"](fd)

    def on_move(kind: str, source: Any, target: Any) -> None:
        events.append(f"{Path(source).name} to {Path(target).name}")
        real[kind](source, target)

    monkeypatch.setattr(os, "fsync", on_sync)
    for kind in ("rename", "replace"):
        monkeypatch.setattr(os, kind, lambda source, target, kind=kind: on_move(kind, source, target))
    put(tmp_path, "a", 2)
    partial, old, removed = (side_path(tmp_path, "a", kind).name for kind in ("partial", "old", "removed"))
    pointer = side_path(tmp_path, LATEST, "partial").name
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "optim.safetensors"]
    assert sorted(events[:3]) == [f"sync {name}" for name in files]  # in the order in which their blocks are written
    assert events[3:] == [
        *(f"sync {name}" for name in (partial, META, MANIFEST, partial, pointer)),
        f"a to {old}",
        f"{partial} to a",
        f"sync {tmp_path.name}",
        f"{old} to {removed}",
        f"{pointer} to {LATEST}",
        f"sync {tmp_path.name}",
    ]


# What is not a checkpoint, or no longer


def test_folders_of_others_are_neither_loaded_nor_replaced(tmp_path: Path) -> None:
    foreign = {
        "ds": (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "a DeepSpeed checkpoint"),
        "pipe": (["layer_00-model_states.pt", "mp_rank_00_model_states.pt"], "`twinflow import`"),
        "pt": (["model.pt"], "a pickled checkpoint"),
        "hf": (["config.json", "model.safetensors"], "a Hugging Face model folder"),
        "bin": (["config.json", "pytorch_model.bin"], "a pickled checkpoint"),
        "some": (["a.txt"], "a.txt"),
        "none": ([], "an empty folder"),
        "web": (["manifest.json"], "was not written by twinflow"),
    }
    for tag, (names, words) in foreign.items():
        (tmp_path / tag).mkdir()
        for name in names:
            (tmp_path / tag / name).write_text("{}")
        with pytest.raises(ValueError, match=words):
            open_checkpoint(tmp_path, tag)
        if names:
            with pytest.raises(ValueError, match="exists and is not a twinflow checkpoint"):
                save(tmp_path, tag, {}, {})
        assert listing(tmp_path / tag) == sorted(names)
    put(tmp_path, "none", 1)  # an empty folder is no loss
    assert value_of(opened(tmp_path)) == 1
    for tag in ("ds", "pt", "hf", "bin"):  # as the root
        with pytest.raises(ValueError, match=foreign[tag][1]):
            open_checkpoint(tmp_path / tag)
    (tmp_path / LATEST).write_text("ds")
    with pytest.raises(ValueError, match="Pickled checkpoints are never loaded"):
        open_checkpoint(tmp_path)


def test_files_in_place_of_folders(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pt")
    for root, tag in ((tmp_path / "x.pt", None), (tmp_path, "x.pt")):
        with pytest.raises(ValueError, match=r"a pickled file\. Pickled checkpoints are never loaded"):
            open_checkpoint(root, tag)
    os.symlink("nowhere", tmp_path / "link")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path, "link")
    with pytest.raises(ValueError, match=r"is not a twinflow checkpoint, so it is not replaced. Choose another tag"):
        save(tmp_path, "link", {}, {})
    put(tmp_path / "root", "a", 1)
    with pytest.raises(ValueError, match=r"is a checkpoint itself. Open .* with the tag 'a'"):
        open_checkpoint(tmp_path / "root" / "a")
    (tmp_path / "root" / LATEST).unlink()
    (tmp_path / "root" / LATEST).mkdir()
    with pytest.raises(ValueError, match="latest is a folder"):
        open_checkpoint(tmp_path / "root")


def test_damage_to_files(tmp_path: Path) -> None:
    base = put(tmp_path, "a", 1)
    file = "optim.safetensors"
    raw = (base / file).read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(ValueError, match=words):
            opened(tmp_path).verify()

    found = opened(tmp_path)
    (base / file).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    for check in (found.verify, lambda: found.tensor("optim", "m"), lambda: list(found.tensors("optim"))):
        with pytest.raises(ValueError, match=f"{file}: tensor 'm' does not match its checksum.*{RESTORE}"):
            check()
    assert found.tensor("model", "a").tolist() == [1] * 4  # the others can still be read
    (base / file).write_bytes(raw[:-1])
    refused(f"{file} is cut off.*{RESTORE}")
    with pytest.raises(ValueError, match=f"{file} is cut off: it ends within tensor 'm'"):
        found.tensor("optim", "m")
    (base / file).write_bytes(raw + b"\0")
    refused(f"{file} is changed: it has")
    (base / file).write_bytes(raw.replace(b'"F32"', b'"I32"'))
    refused(f"The header of .*{file} does not match its checksum.*{RESTORE}")
    (base / file).unlink()
    refused(f"{file} is missing. {RESTORE}")
    with pytest.raises(ValueError, match=f"{file} is missing"):
        found.tensor("optim", "m")
    (base / file).mkdir()
    refused(f"{file} is not a regular file")
    (base / file).rmdir()
    (base / file).write_bytes(raw)
    assert value_of(found) == 1
    (base / META).write_bytes((base / META).read_bytes().replace(b"1", b"2"))
    refused(f"{META} does not match its checksum.*{RESTORE}")
    (tmp_path / LATEST).unlink()
    (base / MANIFEST).write_text("{")
    refused(f"{MANIFEST} does not contain valid JSON")


def record(name: Any, parts: Any = None) -> dict[str, Any]:
    return {"name": name, "size": 1, "header_crc32": 1, "tensors": {}, "parts": parts or {}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 3, "twinflow_version": "9.9"}, "Load it with twinflow '9.9', which wrote it"),
        ({"format_version": True}, "format version True"),
        ({"format": "other"}, "was not written by twinflow"),
        ({"step": "x"}, "step: Input should be a valid integer"),
        ({"time_ns": -1}, "-1 is not an integer >= 0"),
        ({"meta_size": 0.5}, "0.5 is not an integer >= 0"),
        ({"files": []}, rf"changed or damaged .*\. {RESTORE}"),
        ({"files": {"m": [1]}}, "changed or damaged"),
        ({"files": {"m": [{"name": "a"}]}}, r"files\.m\.0\.size: Field required"),
        ({"files": {"../m": []}}, "A key of files is '../m'"),
        *(
            ({"files": {"m": [record(name)]}}, "The name of a file is")
            for name in ("../x", "/etc/passwd", "..", "a/b", "a\0", "", 3)
        ),
        ({"files": {"m": [record("x")] * 2}}, "two files have the same name"),
        (
            {"files": {"m": [record("x", {"a@1": {"shape": [2], "start": 0}})]}},
            "does not belong to a part that starts at 0",
        ),
        ({"files": {"m": [record("x", {"a@0": {"shape": [-2], "start": 0}})]}}, "-2 is not an integer >= 0"),
        ({"files": {"m": [record("x", {"a@0": [2]})]}}, "changed or damaged"),
    ],
)
def test_manifests_that_nobody_wrote_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = put(tmp_path, "a", 1) / MANIFEST
    body = json.loads(path.read_text())
    del body["crc32"]
    body |= change
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(body))
    with pytest.raises(ValueError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert MANIFEST in str(caught.value)


def test_a_manifest_of_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, "a", 1) / MANIFEST
    text = encode_manifest(read_manifest(path.parent)).decode()
    for depth in (500, 900, 100_000):
        path.write_text(text.rstrip("}") + ', "deep": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(ValueError, match=MANIFEST):
            open_checkpoint(tmp_path)


def one(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": one(dtype="F31")}, "its dtype is 'F31'"),
        ({"a": one(dtype=["F32"])}, "its dtype is"),
        ({"a": one(shape=[-2])}, "impossible shape"),
        ({"a": one(shape=[True, 2])}, "impossible shape"),
        ({"a": one(shape=[2.0])}, "impossible shape"),
        ({"a": one(shape=2)}, "impossible shape"),
        ({"a": one(shape=[0, 2**40, 2**40], offsets=[0, 0])}, "impossible shape"),
        ({"a": one(shape=[3])}, "data_offsets"),
        ({"a": one(offsets=[-8, 0])}, "data_offsets"),
        ({"a": one(offsets=[8, 0])}, "data_offsets"),
        ({"a": one(offsets=[0, 8, 8])}, "data_offsets"),
        ({"a": one(offsets=[8, 16])}, "has a gap before it"),
        ({"a": one(shape=[2**40], offsets=[0, 2**42])}, "its tensors need"),
        ({"a": one(), "b": one()}, "overlaps another tensor"),
        ({"a": one(), "b": one(offsets=[4, 12])}, "overlaps another tensor"),
        ({}, "its tensors need 0 bytes, but it has 8"),
        ({"a": {"dtype": "F32"}}, "must have exactly the keys"),
        ({"a": 1}, "must have exactly the keys"),
        ([1], "The header of .* is a list"),
        (b"{", "does not contain valid JSON"),
        (b'{"a": NaN}', "does not contain valid JSON"),
        (b"\xff\xfe", "does not contain valid JSON"),
        (b"[" * 100_000, "does not contain valid JSON"),
        (b"1" * 5000, "does not contain valid JSON"),
    ],
)
def test_headers_that_are_not_sound_are_refused(tmp_path: Path, header: Any, words: str) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=words) as caught:
        read_header(path)
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"\1", (2**63).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}"])
def test_header_lengths_that_cannot_be_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"cut off or damaged: it has .* bytes, but gives the length of its header as"):
        read_header(path)
    with open(path, "wb") as file:  # it would fit, but nobody has such a header
        file.write((10**11).to_bytes(8, "little"))
        file.truncate(10**11 + 8)
    with pytest.raises(ValueError, match=r"cut off or damaged: it has .* bytes, but gives the length of its header as"):
        read_header(path)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], Any]:
    root = tmp_path_factory.mktemp("fuzzed")
    put(root, "a", 1)
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    found = opened(root)
    return root, files, (contents(found), found.meta)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_damage_goes_unseen(fuzzed: tuple[Path, dict[str, bytes], Any], data: st.DataObject) -> None:
    root, files, expected = fuzzed
    name = data.draw(st.sampled_from(sorted(files)))
    raw = files[name]
    kind = data.draw(st.sampled_from(["flip", "truncate", "extend", "insert", "swap"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    other = {
        "flip": lambda: raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :],
        "truncate": lambda: raw[:at],
        "extend": lambda: raw + data.draw(st.binary(min_size=1, max_size=16)),
        "insert": lambda: raw[:at] + data.draw(st.binary(min_size=1, max_size=16)) + raw[at:],
        "swap": lambda: raw[at:] + raw[:at],
    }[kind]()
    (root / name).write_bytes(other)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `latest` may now name a folder that is not there
            found = opened(root)
            assert (contents(found), found.meta) == expected
    except ValueError as error:
        assert Path(name).name in str(error)  # noqa: PT017
    finally:
        (root / name).write_bytes(raw)


# Export


def test_export_of_one_file_and_of_shards(tmp_path: Path) -> None:
    path = tmp_path / "out" / "model.safetensors"
    tensors = every_dtype()
    export_weights(iter(entries(tensors)), path)
    assert listing(path.parent) == ["model.safetensors"]
    back = safetensors.torch.load_file(path)
    assert all(same(back[name], tensors[name]) for name in tensors)

    weights = {f"w{i}": torch.full((10,), float(i)) for i in range(5)}
    (path.parent / f".model-00001-of-00002.safetensors.partial-{2**31 - 1}").write_text("left by a crash")
    export_weights(entries(weights), path, shard_bytes=80)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert listing(path.parent) == [*names, "model.safetensors.index.json"]
    index = json.loads((path.parent / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"] == {"w0": names[0], "w1": names[0], "w2": names[1], "w3": names[1], "w4": names[2]}
    for name, file in index["weight_map"].items():
        assert same(safetensors.torch.load_file(path.parent / file)[name], weights[name])
    export_weights(entries(weights), path)
    assert "model.safetensors.index.json" not in listing(path.parent)
    with pytest.raises(ValueError, match=r"ends in .safetensors"):
        export_weights([], tmp_path / "x.bin")


@pytest.mark.parametrize("shard_bytes", [16, 1000])
def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path, shard_bytes: int) -> None:
    path = tmp_path / "model.safetensors"

    def export(value: float) -> None:
        export_weights(small(value)["model"], path, shard_bytes=shard_bytes)

    export(1)
    names = listing(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    for at in range(1, 100):
        error = error_of(lambda: export(2), at, errno.ENOSPC, ("pwrite",))
        if error is None:
            break
        assert str(tmp_path) in error.filename
        assert {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)} == before
    assert at > 1
    for at in range(1, 100):  # after a crash all files that can be loaded are of one export
        export(1)
        with failing(at, Crash()) as calls, suppress(Crash):
            export(2)
        index = tmp_path / "model.safetensors.index.json"
        loadable = [path] if path.exists() else []
        if index.exists():
            loadable = [tmp_path / name for name in set(json.loads(index.read_text())["weight_map"].values())]
        values = {
            v for file in loadable for t in safetensors.torch.load_file(file).values() for v in t.flatten().tolist()
        }
        assert len(values) <= 1
        if len(calls) < at:
            break
    assert values == {2}
    assert listing(tmp_path) == names
