"""Open a checkpoint: the manifest, sizes and headers at once, the tensors one at a time and on demand."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from twinflow.checkpoint.tensors import Header, TensorInfo, read_header, read_tensor, verify_tensor
from twinflow.errors import bad_value


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and its checksum."""

    path: Path
    header: Header
    info: TensorInfo
    crc32: int


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
        return self._one(file, name).info.shape

    def dtype(self, file: str, name: str) -> torch.dtype:
        """The dtype of one tensor, without reading it."""
        return self._one(file, name).info.dtype

    def tensor(self, file: str, name: str) -> Tensor:
        """One tensor, in memory of its own; a ValueError where it does not match its checksum."""
        one = self._one(file, name)
        return read_tensor(one.path, one.header, one.info, one.crc32)

    def tensors(self, file: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `file` with their names, each read when it is its turn."""
        for name in self.names(file):
            yield name, self.tensor(file, name)

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Read everything and compare every checksum; `on_progress` is told the bytes read and all bytes to be read."""
        _, now = _read_folder(self.path)  # it may have been damaged since it was opened
        every = [one for stored in now.values() for one in stored.values()]
        on_bytes = counting(on_progress, sum(one.info.stop - one.info.start for one in every))
        for one in every:
            verify_tensor(one.path, one.header, one.info, one.crc32, on_bytes)

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
    stored = {file: _open_parts(folder, parts) for file, parts in manifest.files.items()}
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


def _open_parts(folder: Path, parts: tuple[PartRecord, ...]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for part in parts:
        path = folder / part.name
        header = read_header(path)
        if header.crc32 != part.header_crc32:
            raise ValueError(f"{path}: its header does not match its checksum; the file was changed or damaged")
        if {info.name for info in header.infos} != set(part.tensors):
            raise ValueError(f"{path} does not hold the tensors that {MANIFEST} lists; the file was changed or damaged")
        for info in header.infos:
            if info.name in stored:
                raise ValueError(f"{path}: tensor {info.name!r} is also in another part; the checkpoint is damaged")
            stored[info.name] = Stored(path, header, info, part.tensors[info.name])
    return stored
