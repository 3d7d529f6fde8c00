# SPDX-License-Identifier: Apache-2.0
"""Tensors that tensor ranks store in shards: read whole, in any cut and as any other rank's shard, or refused."""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from twinflow.checkpoint import Checkpoint, Entry, PartOf, open_checkpoint, save, shards
from twinflow.checkpoint.exporting import export_checkpoint
from twinflow.checkpoint.manifest import MANIFEST, META, encode_manifest, read_manifest
from twinflow.checkpoint.shards import Split, gather, join_marks, parse_split, select, stored_name, to_mark
from twinflow.parallel.shard import TensorShard, even_shard

load_module = sys.modules[open_checkpoint.__module__]


@pytest.fixture(autouse=True)
def _no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# Index arithmetic


@st.composite
def dealt(draw: st.DrawFn, full: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The indices of a dim, dealt to ranks in ranges."""
    world = draw(st.integers(1, 4))
    edges = [0, *sorted(draw(st.lists(st.integers(0, full), max_size=6))), full]
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for start, stop in pairwise(edges):
        ranges[draw(st.integers(0, world - 1))].append((start, stop))
    return tuple(map(tuple, ranges))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Split, tuple[tuple[tuple[int, int], ...], ...]]:
    """A tensor cut along a dim, and another cut along the same."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    return Split(shape, dim, draw(dealt(shape[dim]))), draw(dealt(shape[dim]))


def shard_at(dim: int, full: int, ranges: Sequence[tuple[tuple[int, int], ...]], rank: int) -> TensorShard:
    return TensorShard(dim, full, ranges[rank], rank, len(ranges))


def part(whole: Tensor, dim: int, ranges: tuple[tuple[int, int], ...]) -> Tensor:
    """The truth, by torch's own indexing."""
    indices = [index for start, stop in ranges for index in range(start, stop)]
    return whole.index_select(dim, torch.tensor(indices, dtype=torch.int64))


class Counted:
    """A flat tensor that is read from, and what was."""

    def __init__(self, tensor: Tensor) -> None:
        self.flat = tensor.reshape(-1)
        self.reads: list[tuple[int, int]] = []

    def fill(self, start: int, into: Tensor) -> None:
        self.reads.append((start, start + into.numel()))
        into.copy_(self.flat[start : start + into.numel()])


def numbered(shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape)).view(tuple(shape))


@settings(max_examples=300, deadline=None)
@given(cut=cuts(), block=st.sampled_from([1, 7, 1 << 20]), data=st.data())
def test_any_range_of_any_other_cut_is_gathered(cut: Any, block: int, data: st.DataObject) -> None:
    split, others = cut
    whole = numbered(split.shape)
    full = ((0, split.shape[split.dim]),)
    wanted = data.draw(st.sampled_from([full, *others]))
    expected = part(whole, split.dim, wanted).reshape(-1)
    start = data.draw(st.integers(0, expected.numel()))
    into = torch.full((data.draw(st.integers(0, expected.numel() - start)),), -1)
    locals_ = [part(whole, split.dim, ranges) for ranges in split.ranges]
    assert [tuple(one.shape) for one in locals_] == [split.local_shape(rank) for rank in range(len(locals_))]
    sources = [Counted(one) for one in locals_]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_NUMEL", block)
        fills = [source.fill for source in sources]
        gather(select(split.shape, split.dim, split.ranges, wanted), fills, start, into)
    assert torch.equal(into, expected[start : start + into.numel()])
    for source, ranges in zip(sources, split.ranges, strict=True):
        needed = any(max(a, c) < min(b, d) for a, b in ranges for c, d in wanted)
        assert needed or not source.reads  # what a shard has nothing of is not looked for there
    if wanted == full and into.numel() == expected.numel():
        for source in sources:  # each once, from its start to its end: that is how checksums are checked
            assert [stop for _, stop in source.reads[:-1]] == [begin for begin, _ in source.reads[1:]]
            assert not source.flat.numel() or (source.reads[0][0], source.reads[-1][1]) == (0, source.flat.numel())


def test_no_more_is_read_than_is_wanted_where_rows_are_one() -> None:
    whole = numbered((12, 5))
    ranges = tuple(even_shard(0, 12, rank, 2, num_fused=3).ranges for rank in range(2))
    sources = [Counted(part(whole, 0, one)) for one in ranges]
    into = torch.empty(17, dtype=torch.int64)
    gather(select((12, 5), 0, ranges, ((0, 12),)), [source.fill for source in sources], 8, into)
    assert into.tolist() == list(range(8, 25))
    assert sum(stop - start for source in sources for start, stop in source.reads) == 17


def test_a_block_is_no_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numbered((40, 6))
    ranges = (((0, 3),), ((3, 6),))
    sources = [Counted(part(whole, 1, one)) for one in ranges]
    monkeypatch.setattr(shards, "BLOCK_NUMEL", 30)
    into = torch.empty(240, dtype=torch.int64)
    gather(select((40, 6), 1, ranges, ((0, 6),)), [source.fill for source in sources], 0, into)
    assert torch.equal(into.view(40, 6), whole)
    assert {stop - start for source in sources for start, stop in source.reads} == {30}


# JSON


@settings(max_examples=100, deadline=None)
@given(cut=cuts())
def test_marks_of_all_ranks_make_the_split(cut: Any) -> None:
    split, _ = cut
    said = [
        json.loads(json.dumps({"model": {"w": to_mark(shard_at(split.dim, full, split.ranges, rank), shape)}}))
        for full in [split.shape[split.dim]]
        for rank, shape in enumerate(split.local_shape(rank) for rank in range(len(split.ranges)))
    ]
    joined = json.loads(json.dumps(join_marks([*said, {}, said[0]])))
    assert parse_split("it", joined["model"]["w"]) == split


def test_marks_that_do_not_make_a_whole_are_refused() -> None:
    mark = to_mark(even_shard(0, 4, 0, 2), (2, 3))
    other = to_mark(even_shard(0, 4, 1, 2), (2, 5))
    with pytest.raises(ValueError, match=r"tensor 'w' of 'model': The parts of tensor ranks \[1\] of 2 are missing"):
        join_marks([{"model": {"w": mark}}])
    with pytest.raises(
        ValueError, match=r"tensor 'w' of 'model': Tensor ranks 0 and 1 have parts of different tensors"
    ):
        join_marks([{"model": {"w": mark}}, {"model": {"w": other}}])
    again = {**to_mark(even_shard(0, 4, 1, 2), (2, 3)), "ranges": [[0, 2]]}
    with pytest.raises(ValueError, match=r"tensor 'w' of 'model': The ranges .* exactly once"):
        join_marks([{"model": {"w": mark}}, {"model": {"w": again}}])


GOOD = {"shape": [4, 3], "dim": 0, "ranges": [[[0, 2]], [[2, 4]]]}
BAD: list[tuple[Any, str]] = [
    (None, "must have exactly the keys"),
    ({"shape": [4, 3], "dim": 0}, "must have exactly the keys"),
    ({**GOOD, "more": 1}, "must have exactly the keys"),
    ({**GOOD, "shape": "43"}, "is not a shape"),
    ({**GOOD, "shape": [4, -3]}, "is not a shape"),
    ({**GOOD, "shape": [4, True]}, "is not a shape"),
    ({**GOOD, "shape": []}, "is not a shape"),
    ({**GOOD, "dim": 2}, "is not a shape"),
    ({**GOOD, "dim": -1}, "is not a shape"),
    ({**GOOD, "dim": 0.0}, "is not a shape"),
    ({**GOOD, "ranges": []}, "ascending ranges"),
    ({**GOOD, "ranges": {}}, "ascending ranges"),
    ({**GOOD, "ranges": [[0, 2], [2, 4]]}, "ascending ranges"),
    ({**GOOD, "ranges": [[[0, 2, 4]], [[2, 4]]]}, "ascending ranges"),
    ({**GOOD, "ranges": [[[2, 0]], [[2, 4]]]}, "ascending ranges"),
    ({**GOOD, "ranges": [[[2, 4], [0, 2]]]}, "ascending ranges"),
    ({**GOOD, "ranges": [[["a", 2]], [[2, 4]]]}, "ascending ranges"),
    ({**GOOD, "ranges": [[[0, 2]]]}, "once"),
    ({**GOOD, "ranges": [[[0, 2]], [[2, 5]]]}, "once"),
    ({**GOOD, "ranges": [[[0, 3]], [[2, 4]]]}, "once"),
    ({**GOOD, "ranges": [[[0, 2]], [[3, 4]]]}, "once"),
    ({**GOOD, "ranges": [[[1, 2]], [[2, 4]]]}, "once"),
]
LYING: list[tuple[Any, str]] = [
    ({**GOOD, "shape": [4, 2]}, "The part of tensor rank 0 has the shape"),
    ({**GOOD, "ranges": [[[0, 1]], [[1, 4]]]}, "The part of tensor rank 0 has the shape"),
    ({**GOOD, "ranges": [[[0, 2]], [[2, 4]], []]}, "The part of tensor rank 2 is missing"),
    ({**GOOD, "shape": [2, 6], "ranges": [[[0, 1]], [[1, 2]]]}, "The part of tensor rank 0 has the shape"),
]


def rewrite(folder: Path, value: Any) -> None:
    """Let meta.json say something else of shards, as if it had been saved so."""
    meta = json.loads((folder / META).read_bytes())
    raw = json.dumps({**meta, "shards": value}).encode()
    manifest = read_manifest(folder)
    (folder / META).write_bytes(raw)
    fields = {**vars(manifest), "meta_size": len(raw), "meta_crc32": zlib.crc32(raw)}
    (folder / MANIFEST).write_bytes(encode_manifest(type(manifest)(**fields)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    entries = [
        whole_entry("w@0", torch.zeros(2, 3)),
        whole_entry("w@1", torch.ones(2, 3)),
        whole_entry("v", torch.ones(2)),
    ]
    entries.append(whole_entry("d@0", torch.zeros(2, 3)))
    entries.append(whole_entry("d@1", torch.zeros(2, 3, dtype=torch.float64)))
    save(root, "t", {"model": entries}, {})
    return root


def whole_entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


@pytest.mark.parametrize(("entry", "words"), [*BAD, *LYING])
def test_shards_that_nobody_wrote_are_refused(small: Path, entry: Any, words: str) -> None:
    rewrite(small / "t", {"model": {"w": entry}})
    with pytest.raises(ValueError, match="'w' of 'model'") as caught:
        open_checkpoint(small)
    assert words in str(caught.value)
    assert str(small / "t") in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "must map each file to a dict of splits"),
        ({"model": []}, "must map each file to a dict of splits"),
        ({"modle": {"w": GOOD}}, "the file 'modle'"),
        ({"model": {"x": GOOD}}, "The shards of tensor 'x' of 'model' are missing"),
        ({"model": {"d": GOOD}}, "tensor 'd' of 'model': The parts of the tensor ranks do not make one"),
        ({"model": {"w": GOOD, "w@0": {**GOOD, "ranges": [[[0, 4]]]}}}, "'w@0' of 'model' are missing"),
    ],
)
def test_shards_of_what_is_not_there_are_refused(small: Path, value: Any, words: str) -> None:
    rewrite(small / "t", value)
    with pytest.raises(ValueError, match=r".") as caught:
        open_checkpoint(small)
    assert words in str(caught.value)


def test_a_whole_beside_its_shards_is_refused(tmp_path: Path) -> None:
    entries = [whole_entry(name, torch.zeros(2, 3)) for name in ("w@0", "w@1", "w")]
    save(tmp_path, "t", {"model": entries}, {"shards": {"model": {"w": GOOD}}})
    with pytest.raises(ValueError, match="both whole and in shards"):
        open_checkpoint(tmp_path)


# Folders


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def valued(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Values that are all different, as far as the dtype has so many."""
    numel = math.prod(shape)
    if dtype == torch.bool:
        return (torch.arange(numel) % 3 == 0).view(tuple(shape))
    raw = (torch.arange(numel * dtype.itemsize) * 37 % 251).to(torch.uint8)
    return raw.view(dtype).view(tuple(shape)) if numel else torch.empty(tuple(shape), dtype=dtype)


def shard_entries(name: str, whole: Tensor, split: Split, num_parts: int) -> list[Entry]:
    """A whole as tensor ranks store it, each in so many parts of several replicas."""
    made = []
    for rank, ranges in enumerate(split.ranges):
        local = part(whole.view(torch.int16) if whole.dtype == torch.uint16 else whole, split.dim, ranges)
        flat, key = local.contiguous().view(whole.dtype).reshape(-1), stored_name(name, rank)
        if num_parts == 1 or not flat.numel():
            made.append(whole_entry(key, flat.view(local.shape)))
            continue
        edges = [flat.numel() * i // num_parts for i in range(num_parts + 1)]
        for start, stop in pairwise(edges):
            values = flat[start:stop]
            one = Entry(
                key, whole.dtype, (stop - start,), lambda values=values: values, PartOf(tuple(local.shape), start)
            )
            made.append(one)
    return made


@settings(max_examples=120, deadline=None)
@given(
    cut=cuts(),
    dtype=st.sampled_from(DTYPES),
    parts=st.sampled_from([1, 3]),
    block=st.sampled_from([3, 1 << 20]),
    data=st.data(),
)
def test_stored_in_shards_it_reads_as_a_whole_and_as_any_shard(
    tmp_path_factory: pytest.TempPathFactory, cut: Any, dtype: torch.dtype, parts: int, block: int, data: st.DataObject
) -> None:
    split, others = cut
    whole = valued(dtype, split.shape)
    root = tmp_path_factory.getbasetemp() / "wholes"
    entries = [*shard_entries("w", whole, split, parts), whole_entry("b", torch.ones(3))]
    save(root, "t", {"model": entries}, {"shards": {"model": {"w": split.to_json()}}})
    found = open_checkpoint(root)
    assert found is not None
    found.verify()
    assert found.names("model") == ["w", "b"]
    assert (found.shape("model", "w"), found.dtype("model", "w")) == (split.shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_NUMEL", block)
        assert bits(found.tensor("model", "w")) == bits(whole)
        assert {name: bits(value) for name, value in found.tensors("model")} == {
            "w": bits(whole),
            "b": bits(torch.ones(3)),
        }
        chunks = list(found.chunks("model", "w", data.draw(st.integers(1, 9))))
        assert b"".join(map(bits, chunks)) == bits(whole)
        start = data.draw(st.integers(0, whole.numel()))
        numel = data.draw(st.integers(0, whole.numel() - start))
        assert bits(found.cut("model", "w", start, numel)) == bits(whole.reshape(-1)[start : start + numel])
        check_as_shards(found, whole, split, others, data)


def check_as_shards(found: Checkpoint, whole: Tensor, split: Split, others: Any, data: st.DataObject) -> None:
    """Into another layout, along the same dim or any."""
    dim = data.draw(st.integers(0, len(split.shape) - 1))
    full = split.shape[dim]
    layout = others if dim == split.dim else data.draw(dealt(full))
    shard = shard_at(dim, full, layout, data.draw(st.integers(0, len(layout) - 1)))
    plain = whole.view(torch.int16) if whole.dtype == torch.uint16 else whole
    expected = part(plain, dim, shard.ranges).contiguous().view(whole.dtype).reshape(-1)
    start = data.draw(st.integers(0, expected.numel()))
    numel = data.draw(st.integers(0, expected.numel() - start))
    assert bits(found.cut_shard("model", "w", shard, start, numel)) == bits(expected[start : start + numel])
    assert bits(found.cut_shard("model", "w", None, 0, whole.numel())) == bits(whole)
    with pytest.raises(ValueError, match="The range of 'w'"):
        found.cut_shard("model", "w", shard, start, expected.numel() - start + 1)


def test_a_shard_of_a_whole_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a whole, and the own shard of one that is cut the same way: no other bytes are read from the files."""
    whole = valued(torch.float32, (8, 6))
    split = Split((8, 6), 1, (((0, 3),), ((3, 6),)))
    save(
        tmp_path,
        "t",
        {"model": [whole_entry("a", whole), *shard_entries("w", whole, split, 1)]},
        {"shards": {"model": {"w": split.to_json()}}},
    )
    found = open_checkpoint(tmp_path)
    assert found is not None
    reads: list[tuple[str, int]] = []
    real = load_module.read_range

    def counted(path: Path, header: Any, info: Any, start: int, into: Tensor, crc32: int | None = None) -> int | None:
        reads.append((info.name, into.numel()))
        return real(path, header, info, start, into, crc32)

    monkeypatch.setattr(load_module, "read_range", counted)
    rows = even_shard(0, 8, 1, 2)
    assert torch.equal(found.cut_shard("model", "a", rows, 6, 12), whole[4:].reshape(-1)[6:18])
    assert reads == [("a", 12)]
    reads.clear()
    columns = even_shard(1, 6, 1, 2)
    assert torch.equal(found.cut_shard("model", "w", columns, 0, 24).view(8, 3), whole[:, 3:])
    assert reads == [("w@1", 24)]
    reads.clear()
    assert torch.equal(found.cut_shard("model", "w", columns, 7, 4), whole[:, 3:].reshape(-1)[7:11])
    assert reads == [("w@1", 2), ("w@1", 2)]


def test_a_shard_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "t", {"model": [whole_entry("a", torch.ones(4, 3))]}, {})
    found = open_checkpoint(tmp_path)
    assert found is not None
    for shard in (even_shard(0, 6, 0, 2), even_shard(2, 4, 0, 2)):
        with pytest.raises(ValueError, match="shape of 'a'"):
            found.cut_shard("model", "a", shard, 0, 1)


def trained() -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Two layers, bf16 weights and fp32 masters; one weight was written to since."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.up": (6, 4), "0.down": (4, 6), "0.norm": (4,), "1.up": (6, 4), "1.down": (4, 6), "1.norm": (4,)}
    masters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    model = {name: value.bfloat16() for name, value in masters.items()}
    model["1.down"][2, 3] += 1
    state = {name: {"step": 1, "master": {"__tensor__": f"{name}/master"}} for name in masters}
    meta = {"optimizer": {"has_unsent": False}, "optimizer_state": state, "aliases": {}, "excluded": []}
    return {"model": model, "optimizer": {f"{name}/master": value for name, value in masters.items()}}, meta


def as_two_by_two(files: dict[str, dict[str, Tensor]]) -> tuple[dict[str, list[Entry]], dict[str, Any]]:
    """What 2 stages of 2 tensor ranks write together: ups by rows, with ranges as of fused ones; downs by columns."""
    dims = {"up": (0, 3), "down": (1, 1)}
    made: dict[str, list[Entry]] = {}
    told: dict[str, dict[str, Any]] = {}
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            kind = name.split("/")[0].split(".")[-1]
            if kind == "norm":
                made.setdefault(file, []).append(whole_entry(name, tensor))
                continue
            dim, num_fused = dims[kind]
            ranges = tuple(even_shard(dim, tensor.shape[dim], rank, 2, num_fused).ranges for rank in range(2))
            split = Split(tuple(tensor.shape), dim, ranges)
            made.setdefault(file, []).extend(shard_entries(name, tensor, split, 2 if file == "optimizer" else 1))
            told.setdefault(file, {})[name] = split.to_json()
    return made, told


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr("twinflow.checkpoint.exporting.CHUNK_NUMEL", 5)
    files, meta = trained()
    save(
        tmp_path / "one",
        "t",
        {f: [whole_entry(*item) for item in tensors.items()] for f, tensors in files.items()},
        meta,
    )
    entries, told = as_two_by_two(files)
    save(tmp_path / "four", "t", entries, {**meta, "shards": told})
    exports = {}
    for name in ("one", "four"):
        done = export_checkpoint(tmp_path / name, tmp_path / f"out-{name}", dtype=dtype)
        assert (done.num_tensors, done.num_masters) == (6, 6)
        exports[name] = load_file(tmp_path / f"out-{name}" / "model.safetensors")
    assert exports["one"].keys() == exports["four"].keys()
    for name, value in exports["one"].items():
        assert bits(value) == bits(exports["four"][name]), name


def test_damage_to_a_shard_is_found_however_it_is_read(tmp_path: Path) -> None:
    files, meta = trained()
    entries, told = as_two_by_two(files)
    save(tmp_path, "t", entries, {**meta, "shards": told})
    found = open_checkpoint(tmp_path)
    assert found is not None
    file = tmp_path / "t" / "optimizer.safetensors"
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    for name in ("0.up/master@1@6", "1.down/master@0@0"):  # the last part of one shard, the first of another
        raw = bytearray(file.read_bytes())
        at = 8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][1] - 2
        raw[at] ^= 1
        file.write_bytes(bytes(raw))
        whole = name.partition("@")[0]
        with pytest.raises(ValueError, match="does not match its checksum"):
            found.tensor("optimizer", whole)
        with pytest.raises(ValueError, match="does not match its checksum"):
            list(found.chunks("optimizer", whole, 5))
        with pytest.raises(ValueError, match="does not match its checksum"):
            found.verify()
        raw[at] ^= 1
        file.write_bytes(bytes(raw))
        found.verify()


def test_in_shards_no_more_than_a_tensor_and_a_block_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = valued(torch.float32, (64, 32))
    split = Split((64, 32), 1, (((0, 16),), ((16, 32),)))
    save(tmp_path, "t", {"model": shard_entries("w", whole, split, 1)}, {"shards": {"model": {"w": split.to_json()}}})
    found = open_checkpoint(tmp_path)
    assert found is not None
    made: list[int] = []
    real = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = real(*args, **kwargs)
        made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(shards, "BLOCK_NUMEL", 128)
    monkeypatch.setattr(torch, "empty", counted)
    assert torch.equal(found.tensor("model", "w"), whole)
    assert made[0] == whole.numel()
    assert set(made[1:]) == {128}  # one after the other
