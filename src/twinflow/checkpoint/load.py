"""Open a checkpoint: the manifest, sizes and headers at once, the tensors one at a time and on demand.

However many ranks wrote it, it reads as if one had: a tensor that is there in parts, or in the shards of several tensor
ranks, is put together from them.
"""

from __future__ import annotations

import heapq
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinflow.checkpoint.cover import Span, check_cover
from twinflow.checkpoint.disk import LATEST, check_tag, counting, read_latest
from twinflow.checkpoint.manifest import (
    MANIFEST,
    META,
    PICKLED,
    Manifest,
    PartRecord,
    check_files,
    describe,
    find_all,
    locate,
    read_manifest,
)
from twinflow.checkpoint.plain import decode_meta
from twinflow.checkpoint.shards import Split, check_shards, gather, parse_splits, select, stored_name
from twinflow.checkpoint.tensors import (
    DTYPE_NAMES,
    Header,
    TensorInfo,
    check_crc32,
    is_possible,
    read_header,
    read_range,
    verify_tensor,
)
from twinflow.errors import invalid_value
from twinflow.parallel.shard import TensorShard

Sums = dict[tuple[Path, str], int]  # of what was read so far of each piece


@dataclass(frozen=True)
class Piece:
    """Where the elements [start, stop) of a flattened tensor lie, and their checksum."""

    path: Path
    header: Header
    info: TensorInfo
    crc32: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.info.stop - self.info.start


@dataclass(frozen=True)
class Stored:
    """A tensor and where it lies: in one piece, or in several, in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def fill(self, start: int, into: Tensor, sums: Sums | None = None) -> None:
        """Fill the flat `into` with its elements from `start` on.

        A piece that is read in one go is checked. To check those that take several calls, made in order, `sums` keeps
        the sum of what was read of each so far.
        """
        for piece in self.pieces:
            first, stop = max(start, piece.start), min(start + into.numel(), piece.stop)
            if first < stop:
                _fill_from(piece, first, into[first - start : stop - start], sums)


@dataclass(frozen=True)
class Sharded:
    """A tensor that is stored as one for each tensor rank."""

    split: Split
    shards: tuple[Stored, ...]

    @property
    def dtype(self) -> torch.dtype:
        """That of every shard."""
        return self.shards[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return self.split.shape

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Of all shards."""
        return tuple(piece for shard in self.shards for piece in shard.pieces)

    def fill(self, start: int, into: Tensor, sums: Sums | None = None) -> None:
        """Fill the flat `into` with the whole's elements from `start` on; `sums` as for a tensor in one."""
        every = ((0, self.shape[self.split.dim]),)
        selection = select(self.shape, self.split.dim, self.split.ranges, every)
        gather(selection, [partial(shard.fill, sums=sums) for shard in self.shards], start, into)


AnyStored = Stored | Sharded
Files = Mapping[str, Mapping[str, AnyStored]]


class Checkpoint:
    """A checkpoint on the disk; `open_checkpoint` makes it. Tensors are read when they are asked for.

    `path` is its folder, `tag` its name, `meta` what was saved beside the tensors.
    """

    def __init__(self, path: Path, tag: str, meta: dict[str, Any], stored: Files) -> None:
        self.path = path
        self.tag = tag
        self.meta = meta
        self._stored = stored

    def files(self) -> list[str]:
        """The files of tensors, by the names they were saved under."""
        return list(self._stored)

    def names(self, file: str) -> list[str]:
        """The tensors of `file`, in the order they were saved in."""
        return list(self._of(file))

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        return self._one(file, name).shape

    def dtype(self, file: str, name: str) -> torch.dtype:
        """The dtype of one tensor, without reading it."""
        return self._one(file, name).dtype

    def tensor(self, file: str, name: str) -> Tensor:
        """One tensor, in memory of its own; a ValueError where it does not match its checksum."""
        one = self._one(file, name)
        made = torch.empty(one.shape, dtype=one.dtype)
        one.fill(0, made.view(-1), {})
        return made

    def tensors(self, file: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `file` with their names, each read when it is its turn."""
        for name in self.names(file):
            yield name, self.tensor(file, name)

    def cut(self, file: str, name: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of one tensor, flat; no others are read.

        Where that is not all of what a rank has saved, there is no checksum for it: call `verify` before.
        """
        one = self._one(file, name)
        made = _empty_cut(name, math.prod(one.shape), start, numel, one.dtype)
        one.fill(start, made)
        return made

    def cut_shard(self, file: str, name: str, shard: TensorShard, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of the part that `shard` is of one tensor, flat.

        Little else is read: rows of the stored shards that have some of them. As with `cut`, call `verify` before.
        """
        one = self._one(file, name)
        shape, dim = one.shape, shard.dim
        if dim >= len(shape) or shape[dim] != shard.full:
            raise invalid_value(f"the shape of {name!r}", shape, f"{shard.full} elements along dim {dim}, which is cut")
        if isinstance(one, Sharded) and one.split.dim == dim:
            fills, ranges = [source.fill for source in one.shards], one.split.ranges
        else:  # a whole, or along this dim as good as one
            fills, ranges = [one.fill], (((0, shard.full),),)
        made = _empty_cut(name, math.prod(shape) // max(1, shard.full) * shard.size, start, numel, one.dtype)
        gather(select(shape, dim, ranges, shard.ranges), fills, start, made)
        return made

    def chunks(self, file: str, name: str, numel: int) -> Iterator[Tensor]:
        """One tensor in flat chunks of `numel` elements, each read when it is its turn.

        A checksum that does not match is found with the last chunk that it is for.
        """
        one = self._one(file, name)
        whole = math.prod(one.shape)
        sums: Sums = {}
        for start in range(0, whole, numel):
            chunk = torch.empty(min(numel, whole - start), dtype=one.dtype)
            one.fill(start, chunk, sums)
            yield chunk

    def verify(
        self, on_progress: Callable[[int, int], None] | None = None, *, share: tuple[int, int] | None = None
    ) -> None:
        """Read everything and compare every checksum; `on_progress` is told the bytes read and all bytes to be read.

        With the `share` (rank, world) only that rank's part of the bytes: all ranks' parts together are everything.
        """
        _, now = _read_folder(self.path)  # it may have been damaged since it was opened
        pieces = [piece for stored in now.values() for one in stored.values() for piece in one.pieces]
        if share is not None:
            pieces = _deal(pieces, *share)
        on_bytes = counting(on_progress, sum(piece.num_bytes for piece in pieces))
        for piece in pieces:
            verify_tensor(piece.path, piece.header, piece.info, piece.crc32, on_bytes)

    def _of(self, file: str) -> Mapping[str, AnyStored]:
        if file not in self._stored:
            raise invalid_value(f"a file of the checkpoint {self.path}", file, self._stored)
        return self._stored[file]

    def _one(self, file: str, name: str) -> AnyStored:
        stored = self._of(file)
        if name not in stored:
            allowed = f"one of its {len(stored)} tensors, see names({file!r})"
            raise invalid_value(f"a tensor in {file!r} of the checkpoint {self.path}", name, allowed)
        return stored[name]


def cut_for(found: Checkpoint, file: str, name: str, shard: TensorShard | None, start: int, numel: int) -> Tensor:
    """Elements [start, start + numel), flat, of what a rank has of one tensor: the part that `shard` is, or all."""
    if shard is None:
        return found.cut(file, name, start, numel)
    return found.cut_shard(file, name, shard, start, numel)


def _empty_cut(name: str, whole: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory for a cut that lies within a tensor of `whole` elements."""
    if not 0 <= start <= start + numel <= whole:
        raise invalid_value(f"the cut of {name!r}", (start, numel), f"start and numel within its {whole} elements")
    return torch.empty(numel, dtype=dtype)


def _fill_from(piece: Piece, start: int, into: Tensor, sums: Sums | None) -> None:
    """Fill `into` with elements of one piece, and check it where that makes all of it known."""
    key = piece.path, piece.info.name
    stop = start + into.numel()
    before = 0 if start == piece.start else (sums or {}).get(key)
    if sums is None and stop < piece.stop:
        before = None
    found = read_range(piece.path, piece.header, piece.info, start - piece.start, into, before)
    if found is not None and stop == piece.stop:
        check_crc32(piece.path, piece.info, piece.crc32, found)
    elif found is not None and sums is not None:
        sums[key] = found


def _deal(pieces: Sequence[Piece], rank: int, world: int) -> list[Piece]:
    """One rank's pieces, with about as many bytes for each rank: the largest first, to whoever has the fewest."""
    if not 0 <= rank < world:
        raise invalid_value("share", (rank, world), "(rank, world) with 0 <= rank < world")
    loads = [(0, other) for other in range(world)]
    own = []
    for piece in sorted(pieces, key=lambda piece: -piece.num_bytes):
        load, other = heapq.heappop(loads)
        heapq.heappush(loads, (load + piece.num_bytes, other))
        if other == rank:
            own.append(piece)
    return own


def open_checkpoint(root: Path, tag: str | None = None) -> Checkpoint | None:
    """The checkpoint `tag` under `root`, or the one that the file `latest` names; None where there is none at all.

    Sizes, headers and `meta` are checked here, each tensor when it is read; `verify` checks all of them. Nothing is
    written: what a crash left set aside is read where it is. Should `latest` be lost, or name a folder that is gone,
    then the newest checkpoint that was saved as the latest is opened; in the second case with a warning.
    """
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is not a folder of checkpoints, but {describe(root)}")
    if tag is None:
        tag = _default_tag(root) if root.is_dir() else None
        if tag is None:
            return None
    check_tag(tag)
    folder = locate(root, tag)
    if folder is None:
        there = [found.tag for found in find_all(root)[0]] if root.is_dir() else []
        raise invalid_value(f"tag under {root}", tag, there or "none: there is no checkpoint")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a checkpoint's folder, but {describe(folder)}")
    return Checkpoint(folder, tag, *_read_folder(folder))


def _read_folder(folder: Path) -> tuple[dict[str, Any], Files]:
    """What a checkpoint holds, after every check that does not need the tensors themselves."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    stored = {file: _open_parts(folder, file, parts) for file, parts in manifest.files.items()}
    meta = _read_meta(folder, manifest)
    splits = parse_splits(str(folder / META), meta.get("shards", {}))
    unknown = sorted(set(splits) - set(stored))
    if unknown:
        raise ValueError(f"{folder / META}: shards of the file {unknown[0]!r}, which the checkpoint does not have")
    return meta, {file: _join_shards(folder, file, one, splits.get(file, {})) for file, one in stored.items()}


def _default_tag(root: Path) -> str | None:
    named = read_latest(root)
    if named is not None and locate(root, named) is not None:
        return named
    found, damaged = find_all(root)
    resumable = [one.tag for one in found if one.manifest.latest]
    if resumable:
        if named is not None:
            warnings.warn(
                f"{root / LATEST} names {named!r}, which is gone; opening {resumable[-1]!r}, the newest that is there",
                stacklevel=3,
            )
        return resumable[-1]
    if named is not None:
        raise ValueError(f"{root / LATEST} names {named!r}, which is gone; delete the file to start anew")
    if damaged:
        raise damaged[-1]
    if found:
        tags = ", ".join(repr(one.tag) for one in found)
        raise ValueError(f"{root} has no file {LATEST!r} and no checkpoint saved as that; name one of {tags}")
    _refuse_foreign(root)
    return None


def _refuse_foreign(root: Path) -> None:
    """A root that is a checkpoint itself, of whatever kind, was meant to be loaded: starting anew would hide that."""
    names = {path.name for path in root.iterdir()}
    if MANIFEST in names:
        raise ValueError(f"{root} is a checkpoint itself: open {root.parent} with the tag {root.name!r}")
    weights = any(name.endswith(".safetensors") for name in names)
    if ("config.json" in names and weights) or any(name.endswith(PICKLED) for name in names):
        raise ValueError(f"{root} holds no twinflow checkpoint. Found {describe(root)}")


def _read_meta(folder: Path, manifest: Manifest) -> dict[str, Any]:
    path = folder / META
    raw = path.read_bytes()
    if zlib.crc32(raw) != manifest.meta_crc32:
        raise ValueError(f"{path} does not match its checksum; it was changed or damaged. Use another checkpoint")
    return decode_meta(raw, path)


def _open_parts(folder: Path, file: str, parts: tuple[PartRecord, ...]) -> dict[str, Stored]:
    """The tensors of one file, after every check of the headers and of what they say about parts."""
    found: dict[str, list[tuple[Piece, tuple[int, ...]]]] = {}
    for part in parts:
        path = folder / part.name
        header = read_header(path)
        if header.crc32 != part.header_crc32:
            raise ValueError(f"{path}: its header does not match its checksum; the file was changed or damaged")
        if {info.name for info in header.infos} != set(part.tensors) or not set(part.parts) <= set(part.tensors):
            raise ValueError(f"{path} does not hold the tensors that {MANIFEST} lists; the file was changed or damaged")
        for info in header.infos:
            name, of = part.of(info.name)
            if of is not None and (len(info.shape) != 1 or not is_possible(of.shape, info.dtype)):
                raise ValueError(f"{path}: {info.name!r} is no part of a tensor of shape {list(of.shape)}")
            start, shape = (0, info.shape) if of is None else (of.start, of.shape)
            piece = Piece(path, header, info, part.tensors[info.name], start, start + math.prod(info.shape))
            found.setdefault(name, []).append((piece, shape))
    return {name: _join(f"{folder}: tensor {name!r} of {file!r}", pieces) for name, pieces in found.items()}


def _join(what: str, found: Sequence[tuple[Piece, tuple[int, ...]]]) -> Stored:
    spans = [
        Span(DTYPE_NAMES[piece.info.dtype], shape, piece.start, piece.stop - piece.start, piece.path.name)
        for piece, shape in found
    ]
    check_cover(what, spans)
    pieces = sorted((piece for piece, _ in found), key=lambda piece: (piece.start, piece.stop))
    return Stored(pieces[0].info.dtype, found[0][1], tuple(pieces))


def _join_shards(
    folder: Path, file: str, stored: Mapping[str, Stored], splits: Mapping[str, Split]
) -> dict[str, AnyStored]:
    """The tensors of one file, with wholes in the places of their first shards."""
    names = {stored_name(name, rank): name for name, split in splits.items() for rank in range(len(split.ranges))}
    joined: dict[str, AnyStored] = {}
    for key, one in stored.items():
        name = names.get(key, key)
        joined.setdefault(name, one if name == key else _join_one(folder, file, name, stored, splits[name]))
    lost = sorted(set(splits) - set(joined))
    if lost:
        raise ValueError(f"{folder}: of tensor {lost[0]!r} of {file!r} there are no shards")
    return joined


def _join_one(folder: Path, file: str, name: str, stored: Mapping[str, Stored], split: Split) -> Sharded:
    what = f"{folder}: tensor {name!r} of {file!r}"
    if name in stored:
        raise ValueError(f"{what} is there as a whole and in shards")
    found = [stored.get(stored_name(name, rank)) for rank in range(len(split.ranges))]
    check_shards(what, split, [None if one is None else (one.dtype, one.shape) for one in found])
    return Sharded(split, tuple(one for one in found if one is not None))
