"""Open a checkpoint: the manifest, sizes and headers at once, the tensors one at a time and on demand.

However many ranks wrote it, it reads as if one had: a tensor that is there in parts is put together from them.
"""

from __future__ import annotations

import heapq
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from twinflow.errors import bad_value


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


class Checkpoint:
    """A checkpoint on the disk; `open_checkpoint` makes it. Tensors are read when they are asked for.

    `path` is its folder, `tag` its name, `meta` what was saved beside the tensors.
    """

    def __init__(self, path: Path, tag: str, meta: dict[str, Any], stored: dict[str, dict[str, Stored]]) -> None:
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
        _fill(one, 0, made.view(-1))
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
        whole = math.prod(one.shape)
        if not 0 <= start <= start + numel <= whole:
            raise bad_value(f"the cut of {name!r}", (start, numel), f"start and numel within its {whole} elements")
        made = torch.empty(numel, dtype=one.dtype)
        _fill(one, start, made)
        return made

    def chunks(self, file: str, name: str, numel: int) -> Iterator[Tensor]:
        """One tensor in flat chunks of `numel` elements, each read when it is its turn.

        A checksum that does not match is found with the last chunk that it is for.
        """
        one = self._one(file, name)
        whole = math.prod(one.shape)
        crc32s: dict[int, int] = {}
        for start in range(0, whole, numel):
            chunk = torch.empty(min(numel, whole - start), dtype=one.dtype)
            _fill(one, start, chunk, crc32s)
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

    def _of(self, file: str) -> dict[str, Stored]:
        if file not in self._stored:
            raise bad_value(f"a file of the checkpoint {self.path}", file, self._stored)
        return self._stored[file]

    def _one(self, file: str, name: str) -> Stored:
        stored = self._of(file)
        if name not in stored:
            allowed = f"one of its {len(stored)} tensors, see names({file!r})"
            raise bad_value(f"a tensor in {file!r} of the checkpoint {self.path}", name, allowed)
        return stored[name]


def _fill(one: Stored, start: int, into: Tensor, crc32s: dict[int, int] | None = None) -> None:
    """Fill the flat `into` with the elements of a tensor from `start` on.

    A piece that is read in one go is checked. To check those that take several calls, made in order, `crc32s` keeps
    the sum of what was read of each so far.
    """
    for piece in one.pieces:
        first, stop = max(start, piece.start), min(start + into.numel(), piece.stop)
        if first >= stop:
            continue
        before = 0 if first == piece.start else (crc32s or {}).get(piece.start)
        if crc32s is None and stop < piece.stop:
            before = None
        target = into[first - start : stop - start]
        found = read_range(piece.path, piece.header, piece.info, first - piece.start, target, before)
        if found is not None and stop == piece.stop:
            check_crc32(piece.path, piece.info, piece.crc32, found)
        elif found is not None and crc32s is not None:
            crc32s[piece.start] = found


def _deal(pieces: Sequence[Piece], rank: int, world: int) -> list[Piece]:
    """One rank's pieces, with about as many bytes for each rank: the largest first, to whoever has the fewest."""
    if not 0 <= rank < world:
        raise bad_value("share", (rank, world), "(rank, world) with 0 <= rank < world")
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
        raise bad_value(f"tag under {root}", tag, there or "none: there is no checkpoint")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a checkpoint's folder, but {describe(folder)}")
    return Checkpoint(folder, tag, *_read_folder(folder))


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Stored]]]:
    """What a checkpoint holds, after every check that does not need the tensors themselves."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    stored = {file: _open_parts(folder, file, parts) for file, parts in manifest.files.items()}
    return _read_meta(folder, manifest), stored


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
