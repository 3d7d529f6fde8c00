# SPDX-License-Identifier: Apache-2.0
"""Opens a checkpoint. Opening reads the manifest, the sizes of the files and their headers. Each tensor is read later,
when it is needed.

The number of ranks that wrote the checkpoint does not matter: a tensor that is stored in parts, or in the shards of
several tensor ranks, is assembled.
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
from typing import Any, TypeVar

import torch
from torch import Tensor

from twinflow.checkpoint.disk import LATEST, RESTORE, check_tag, counting, damaged, read_latest
from twinflow.checkpoint.manifest import (
    MANIFEST,
    MAX_JSON_BYTES,
    META,
    PICKLED,
    PartRecord,
    describe,
    find_all,
    locate,
    read_complete,
)
from twinflow.checkpoint.plain import decode_meta
from twinflow.checkpoint.shards import Split, check_shards, gather, parse_splits, select, stored_name
from twinflow.checkpoint.tensors import (
    DTYPE_NAMES,
    Header,
    Span,
    TensorInfo,
    check_cover,
    check_crc32,
    is_possible,
    read_header,
    read_range,
    verify_tensor,
)
from twinflow.errors import invalid_value
from twinflow.files import read_bytes
from twinflow.parallel.shard import TensorShard
from twinflow.state_dict import Entry

Sums = dict[tuple[Path, str], int]  # by file and name of a piece: the checksum of its values that were read so far


@dataclass(frozen=True)
class Piece:
    """The place and the checksum of some elements of a flattened tensor, from `start` on."""

    path: Path
    header: Header
    info: TensorInfo
    crc32: int
    shape: tuple[int, ...]  # of the whole tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.info.shape)

    @property
    def num_bytes(self) -> int:
        return self.info.stop - self.info.start

    def fill(self, start: int, into: Tensor, sums: Sums | None) -> None:
        """Fills `into` with elements of the whole tensor from `start` on, all of which are in this piece. Compares the
        checksum if the piece is read to its end and all of it was read in order. `sums`: see `Stored.fill`.
        """
        key = self.path, self.info.name
        stop = start + into.numel()
        before = 0 if start == self.start else (sums or {}).get(key)
        if sums is None and stop < self.stop:
            before = None
        found = read_range(self.path, self.header, self.info, start - self.start, into, before)
        if found is not None and stop == self.stop:
            check_crc32(self.path, self.info, self.crc32, found)
        elif found is not None and sums is not None:
            sums[key] = found


@dataclass(frozen=True)
class Stored:
    """A tensor and its pieces in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def fill(self, start: int, into: Tensor, sums: Sums | None = None) -> None:
        """Fills the flat tensor `into` with the elements from `start` on.

        A piece that is read in one call is checked against its checksum. For pieces that are read in several calls in
        order, `sums` keeps the checksum of the values read so far.
        """
        for piece in self.pieces:
            first, stop = max(start, piece.start), min(start + into.numel(), piece.stop)
            if first < stop:
                piece.fill(first, into[first - start : stop - start], sums)


@dataclass(frozen=True)
class Sharded(Stored):
    """A tensor that is stored as one tensor for each tensor rank. `pieces`: the pieces of all tensor ranks."""

    split: Split
    shards: tuple[Stored, ...]

    def fill(self, start: int, into: Tensor, sums: Sums | None = None) -> None:
        """Fills the flat tensor `into` with elements of the whole tensor from `start` on. `sums`: see `Stored.fill`."""
        every = ((0, self.shape[self.split.dim]),)
        selection = select(self.shape, self.split.dim, self.split.ranges, every)
        gather(selection, [partial(shard.fill, sums=sums) for shard in self.shards], start, into)


Sized = TypeVar("Sized", Piece, Entry)
Tensors = Mapping[str, Stored]


class Checkpoint:
    """A checkpoint on the disk. Use `open_checkpoint` to create it. Tensors are read on demand.

    `path` is its folder, `tag` its name, `meta` the JSON data that was saved with the tensors.
    """

    def __init__(self, path: Path, tag: str, meta: dict[str, Any], stored: Mapping[str, Tensors]) -> None:
        self.path = path
        self.tag = tag
        self.meta = meta
        self._stored = stored

    def files(self) -> list[str]:
        """The names of the files of tensors, as given to `save`."""
        return list(self._stored)

    def names(self, file: str) -> list[str]:
        """The names of the tensors in `file`, in the order in which they were saved."""
        return list(self._of(file))

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        return self._one(file, name).shape

    def dtype(self, file: str, name: str) -> torch.dtype:
        """The dtype of one tensor, without reading it."""
        return self._one(file, name).dtype

    def tensor(self, file: str, name: str) -> Tensor:
        """One tensor in new memory. ValueError if it does not match its checksum."""
        one = self._one(file, name)
        made = torch.empty(one.shape, dtype=one.dtype)
        one.fill(0, made.view(-1), {})
        return made

    def tensors(self, file: str) -> Iterator[tuple[str, Tensor]]:
        """The names and tensors of `file`. A tensor is read when the iterator reaches it."""
        for name in self.names(file):
            yield name, self.tensor(file, name)

    def cut(self, file: str, name: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of one tensor, flat. No other elements are read.

        A checksum covers all values of a tensor that a rank saved, so only pieces that are read completely are checked.
        Call `verify` first to check all values.
        """
        one = self._one(file, name)
        made = _empty_cut(name, math.prod(one.shape), start, numel, one.dtype)
        one.fill(start, made)
        return made

    def cut_shard(self, file: str, name: str, shard: TensorShard | None, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a shard (a tensor rank's part), flat. `shard=None`: of the whole tensor.

        Only rows of the stored tensors that contain these elements are read. As with `cut`, call `verify` before.
        """
        if shard is None:
            return self.cut(file, name, start, numel)
        one = self._one(file, name)
        shape, dim = one.shape, shard.dim
        if dim >= len(shape) or shape[dim] != shard.full:
            expected = f"a shape with {shard.full} elements in dim {dim}, which is split over tensor ranks"
            raise invalid_value(f"The shape of {name!r}", shape, expected, "Build the model that was saved.")
        if isinstance(one, Sharded) and one.split.dim == dim:
            fills, ranges = [source.fill for source in one.shards], one.split.ranges
        else:  # The tensor is stored whole, or is split along another dim.
            fills, ranges = [one.fill], (((0, shard.full),),)
        made = _empty_cut(name, math.prod(shape) // max(1, shard.full) * shard.size, start, numel, one.dtype)
        gather(select(shape, dim, ranges, shard.ranges), fills, start, made)
        return made

    def chunks(self, file: str, name: str, numel: int) -> Iterator[Tensor]:
        """One tensor in flat chunks of `numel` elements. A chunk is read when the iterator reaches it.

        A checksum is compared after the last chunk of its values.
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
        """Reads all values and compares all checksums. `on_progress` is called with the number of bytes read and the
        total.

        With `share` (rank, world), only this rank's share of the bytes is read. The shares of all ranks cover
        all bytes.
        """
        _, now = _read_folder(self.path)  # The files may have changed since the checkpoint was opened.
        pieces = [piece for stored in now.values() for one in stored.values() for piece in one.pieces]
        if share is not None:
            rank, world = share
            if not 0 <= rank < world:
                raise invalid_value("share", share, "(rank, world) with 0 <= rank < world")
            pieces = deal(pieces, rank, world)
        on_bytes = counting(on_progress, sum(piece.num_bytes for piece in pieces))
        for piece in pieces:
            verify_tensor(piece.path, piece.header, piece.info, piece.crc32, on_bytes)

    def _of(self, file: str) -> Tensors:
        if file not in self._stored:
            raise invalid_value(f"The file of the checkpoint {self.path}", file, self._stored)
        return self._stored[file]

    def _one(self, file: str, name: str) -> Stored:
        stored = self._of(file)
        if name not in stored:
            expected = f"one of its {len(stored)} tensors"
            remedy = f"Call names({file!r}) for their names."
            raise invalid_value(f"The tensor in {file!r} of the checkpoint {self.path}", name, expected, remedy)
        return stored[name]


def _empty_cut(name: str, whole: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory for a range of a tensor of `whole` elements. ValueError if the range is not inside the tensor."""
    if not 0 <= start <= start + numel <= whole:
        expected = f"(start, numel) of a range inside its {whole} elements"
        raise invalid_value(f"The range of {name!r}", (start, numel), expected)
    return torch.empty(numel, dtype=dtype)


def deal(items: Sequence[Sized], rank: int, world: int) -> list[Sized]:
    """The items of one rank. Ranks get about the same number of bytes: the largest items come first, each to the rank
    with the fewest bytes so far.
    """
    loads = [(0, other) for other in range(world)]
    own = []
    for item in sorted(items, key=lambda item: -item.num_bytes):
        load, other = heapq.heappop(loads)
        heapq.heappush(loads, (load + item.num_bytes, other))
        if other == rank:
            own.append(item)
    return own


def open_checkpoint(root: Path, tag: str | None = None) -> Checkpoint | None:
    """Opens the checkpoint `tag` under `root`. ValueError if it does not exist. Without `tag`: the checkpoint that the
    file `latest` names, or None if `root` has no checkpoint.

    Sizes, headers and `meta` are checked here, and each tensor when it is read. `verify` checks all tensors. No file is
    changed: a checkpoint that a crash left under a temporary name is read under that name. If the file `latest` is
    missing, the newest checkpoint that was saved with `save_latest=True` is opened. If `latest` names a folder that
    does not exist, the newest one is opened too, with a warning.
    """
    root = Path(root)
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} must be a folder of checkpoints, but is {describe(root)}")
    if tag is None:
        tag = _default_tag(root) if root.is_dir() else None
        if tag is None:
            return None
    check_tag(tag)
    folder = locate(root, tag)
    if folder is None:
        tags = [found.tag for found in find_all(root)[0]] if root.is_dir() else []
        if not tags:
            raise ValueError(f"{root} has no checkpoint {tag!r}, and no other checkpoint. Give another folder.")
        raise invalid_value(f"The tag under {root}", tag, tags, "Pass one of these as tag, or no tag for the latest.")
    if not folder.is_dir():
        raise ValueError(f"{folder} must be the folder of a checkpoint, but is {describe(folder)}")
    return Checkpoint(folder, tag, *_read_folder(folder))


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """The `meta` and the tensors of a checkpoint, after all checks that do not read tensors."""
    manifest = read_complete(folder)
    stored = {file: _open_parts(folder, file, parts) for file, parts in manifest.files.items()}
    raw_meta = read_bytes(folder / META, MAX_JSON_BYTES)
    if zlib.crc32(raw_meta) != manifest.meta_crc32:
        raise damaged(f"{folder / META} does not match its checksum: it was changed or damaged")
    meta = decode_meta(raw_meta, folder / META)
    splits = parse_splits(str(folder / META), meta.get("shards", {}))
    unknown = sorted(set(splits) - set(stored))
    if unknown:
        raise damaged(f"{folder / META} describes shards of the file {unknown[0]!r}, which is missing")
    return meta, {file: _join_shards(folder, file, one, splits.get(file, {})) for file, one in stored.items()}


def _default_tag(root: Path) -> str | None:
    named = read_latest(root)
    if named is not None and locate(root, named) is not None:
        return named
    found, errors = find_all(root)
    resumable = [one.tag for one in found if one.manifest.latest]
    if named is not None:
        text = f"{root / LATEST} names {named!r}, which does not exist."
        if not resumable:
            raise ValueError(f"{text} Delete the file to start a new run, or restore the checkpoint.")
        warnings.warn(f"{text} {resumable[-1]!r}, the newest checkpoint, is opened instead.", stacklevel=3)
    if resumable:
        return resumable[-1]
    if errors:
        raise errors[-1]
    if found:
        tags = ", ".join(repr(one.tag) for one in found)
        text = f"{root} has no file {LATEST!r}, and no checkpoint was saved with save_latest=True"
        raise ValueError(f"{text}. Give one of the tags {tags}.")
    _refuse_foreign(root)
    return None


def _refuse_foreign(root: Path) -> None:
    """Raises ValueError if `root` itself is a checkpoint of any kind. The user meant to load it, and a new start would
    hide the mistake.
    """
    names = {path.name for path in root.iterdir()}
    if MANIFEST in names:
        raise ValueError(f"{root} is a checkpoint itself. Open {root.parent} with the tag {root.name!r}.")
    weights = any(name.endswith(".safetensors") for name in names)
    if ("config.json" in names and weights) or any(name.endswith(PICKLED) for name in names):
        raise ValueError(f"{root} contains no twinflow checkpoint. It is {describe(root)}")


def _open_parts(folder: Path, file: str, parts: tuple[PartRecord, ...]) -> dict[str, Stored]:
    """Checks the headers of the parts in which `file` is stored, and returns its tensors by name."""
    found: dict[str, list[Piece]] = {}
    for part in parts:
        path = folder / part.name
        header = read_header(path)
        if header.crc32 != part.header_crc32:
            raise damaged(f"The header of {path} does not match its checksum: the file was changed or damaged")
        if {info.name for info in header.infos} != set(part.tensors) or not set(part.parts) <= set(part.tensors):
            raise damaged(f"{path} was changed or damaged: it does not contain the tensors that {MANIFEST} lists")
        for info in header.infos:
            name, of = part.of(info.name)
            if of is not None and (len(info.shape) != 1 or not is_possible(of.shape, info.dtype)):
                flat = f"must be a flat part of a tensor of shape {list(of.shape)}"
                raise damaged(f"{path}: {info.name!r} has the shape {list(info.shape)}, but {flat}")
            start, shape = (0, info.shape) if of is None else (of.start, of.shape)
            found.setdefault(name, []).append(Piece(path, header, info, part.tensors[info.name], shape, start))
    return {name: _join(f"{folder}: tensor {name!r} of {file!r}", pieces) for name, pieces in found.items()}


def _join(what: str, pieces: list[Piece]) -> Stored:
    spans = [Span(DTYPE_NAMES[p.info.dtype], p.shape, p.start, p.stop - p.start, p.path.name) for p in pieces]
    check_cover(what, spans, RESTORE)
    pieces.sort(key=lambda piece: (piece.start, piece.stop))
    return Stored(pieces[0].info.dtype, pieces[0].shape, tuple(pieces))


def _join_shards(folder: Path, file: str, stored: Mapping[str, Stored], splits: Mapping[str, Split]) -> Tensors:
    """The tensors of one file. A sharded tensor takes the place of its first shard."""
    names = {stored_name(name, rank): name for name, split in splits.items() for rank in range(len(split.ranges))}
    joined: dict[str, Stored] = {}
    for key, one in stored.items():
        name = names.get(key, key)
        joined.setdefault(name, one if name == key else _join_one(folder, file, name, stored, splits[name]))
    lost = sorted(set(splits) - set(joined))
    if lost:
        raise damaged(f"{folder}: The shards of tensor {lost[0]!r} of {file!r} are missing")
    return joined


def _join_one(folder: Path, file: str, name: str, stored: Mapping[str, Stored], split: Split) -> Sharded:
    what = f"{folder}: tensor {name!r} of {file!r}"
    if name in stored:
        raise damaged(f"{what} is stored both whole and in shards")
    found = [stored.get(stored_name(name, rank)) for rank in range(len(split.ranges))]
    check_shards(what, split, [None if one is None else (one.dtype, one.shape) for one in found])
    shards = tuple(one for one in found if one is not None)
    pieces = tuple(piece for shard in shards for piece in shard.pieces)
    return Sharded(shards[0].dtype, split.shape, pieces, split, shards)
