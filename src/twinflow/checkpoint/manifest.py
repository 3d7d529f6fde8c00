"""manifest.json: written last, it says what a checkpoint consists of, and by that that it is complete.

It carries a checksum of itself, so that a changed byte is found even where it would still make sense. Version 1 of the
format has whole tensors only.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from twinflow.checkpoint.disk import MAX_NAME_BYTES, check_name, file_status
from twinflow.checkpoint.plain import parse_json
from twinflow.checkpoint.sides import parse_side
from twinflow.checkpoint.tensors import PartOf
from twinflow.version import __version__

MANIFEST: Final = "manifest.json"
META: Final = "meta.json"
FORMAT: Final = "twinflow checkpoint"
FORMAT_VERSION: Final = 2
PICKLED: Final = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp")
NEVER: Final = "Pickled checkpoints are never loaded: they can run code"


@dataclass(frozen=True)
class PartRecord:
    """One file of tensors: its name, its bytes, the checksums of its header and of each tensor.

    `parts` says of those that are parts of a tensor what the whole is.
    """

    name: str
    size: int
    header_crc32: int
    tensors: dict[str, int]
    parts: dict[str, PartOf]

    def of(self, key: str) -> tuple[str, PartOf | None]:
        """The tensor that the file calls `key` or that this is a part of, and which part it is."""
        part = self.parts.get(key)
        return (key, None) if part is None else (key.removesuffix(part.key("")), part)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; `latest` says whether it was saved to be the one that a run goes on from."""

    time_ns: int
    step: int | None
    latest: bool
    meta_size: int
    meta_crc32: int
    files: dict[str, tuple[PartRecord, ...]]

    @property
    def age_key(self) -> tuple[int, int]:
        """Orders checkpoints from old to new: by time, since a run that went back to an early step is newer."""
        return self.time_ns, -1 if self.step is None else self.step

    def sizes(self) -> dict[str, int]:
        """The bytes of every file but the manifest."""
        return {META: self.meta_size} | {part.name: part.size for parts in self.files.values() for part in parts}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "twinflow_version": __version__}
    body = head | asdict(manifest)
    return json.dumps(body | {"crc32": _crc32_of(body)}, indent=1).encode()


def _crc32_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; a ValueError says what is there instead."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a twinflow checkpoint: it has no {MANIFEST}. Found {describe(folder)}")
    body = parse_json(path.read_bytes(), path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by twinflow, or is damaged. Found {describe(folder)}")
    version = body.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version!r}; twinflow {__version__} reads up to {FORMAT_VERSION}. "
            f"It was written by twinflow {body.get('twinflow_version')!r}: upgrade to that"
        )
    try:
        if body.pop("crc32", None) != _crc32_of(body):
            raise ValueError("it does not match its own checksum")
        return _parse(body)
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} was changed or damaged ({error}); use another checkpoint") from error


def parse_files(files: dict[str, Any], version: int = FORMAT_VERSION) -> dict[str, tuple[PartRecord, ...]]:
    """Records from their JSON; a ValueError, or what else Python raises, where they are none."""
    return {
        check_name("a file", file): tuple(
            PartRecord(
                check_name("a file's name", part["name"], 2 * MAX_NAME_BYTES),
                _count(part["size"]),
                _count(part["header_crc32"]),
                {name: _count(crc32) for name, crc32 in part["tensors"].items()},
                {key: _parse_part(key, one) for key, one in part["parts"].items()} if version > 1 else {},
            )
            for part in parts
        )
        for file, parts in files.items()
    }


def _parse_part(key: str, one: dict[str, Any]) -> PartOf:
    part = PartOf(tuple(_count(size) for size in one["shape"]), _count(one["start"]))
    if not key.endswith(part.key("")):
        raise ValueError(f"{key!r} is not what a part from {part.start} on is called")
    return part


def _parse(body: dict[str, Any]) -> Manifest:
    files = parse_files(body["files"], body["format_version"])
    names = [part.name for parts in files.values() for part in parts]
    if len(set(names)) < len(names):
        raise ValueError("a file is named twice")
    step = body["step"]
    if step is not None and type(step) is not int:
        raise ValueError(f"{step!r} is not a step")
    return Manifest(
        time_ns=_count(body["time_ns"]),
        step=step,
        latest=body["latest"] is True,
        meta_size=_count(body["meta_size"]),
        meta_crc32=_count(body["meta_crc32"]),
        files=files,
    )


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def check_files(folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint with a file that is missing or of another size than it was saved with."""
    for name, size in manifest.sizes().items():
        path = folder / name
        status = file_status(path)
        if status.st_size != size:
            word = "cut off" if status.st_size < size else "changed"
            raise ValueError(f"{path} is {word}: it has {status.st_size} bytes, it was saved with {size}")


def describe(path: Path) -> str:
    """What a file or folder without a manifest seems to be, for an error."""
    if path.is_file():
        return f"a {'pickled' if path.suffix in PICKLED else 'plain'} file. {NEVER}"
    if not path.is_dir():
        return "neither a file nor a folder"
    names = sorted(entry.name for entry in path.iterdir())
    pickled = next((name for name in names if name.endswith(PICKLED)), None)
    if pickled and "mp_rank" in pickled:
        return f"a DeepSpeed checkpoint ({pickled}). {NEVER}; `twinflow import` makes one of ours of it"
    if pickled:
        return f"a pickled checkpoint ({pickled}). {NEVER}; convert it to safetensors first"
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "a Hugging Face model folder: load it into the model with transformers, not as a checkpoint"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{shown or 'an empty folder'}. {NEVER}"


def may_replace(folder: Path) -> bool:
    """True where nothing is there, or a checkpoint of ours, be it damaged: other people's folders are left alone."""
    path = folder / MANIFEST
    if path.is_file():
        return FORMAT.encode() in path.read_bytes()
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


@dataclass(frozen=True)
class Found:
    """A checkpoint on the disk: its folder may be one that a crash left set aside."""

    tag: str
    folder: Path
    manifest: Manifest


def find_asides(root: Path, tag: str) -> list[Found]:
    """The complete checkpoints of `tag` that a crash left set aside, newest first."""
    asides = []
    for folder in root.iterdir():
        side = parse_side(folder.name)
        if side is None or side.tag != tag or side.kind != "old":
            continue
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except (ValueError, OSError):  # beyond help, or just now deleted
            continue
        asides.append(Found(tag, folder, manifest))
    return sorted(asides, key=lambda found: found.manifest.age_key, reverse=True)


def locate(root: Path, tag: str) -> Path | None:
    """The folder of `tag`: its own, or the one that a crash left set aside; None where there is none."""
    if os.path.lexists(root / tag):
        return root / tag
    asides = find_asides(root, tag) if root.is_dir() else []
    return asides[0].folder if asides else None


def find_all(root: Path) -> tuple[list[Found], list[ValueError]]:
    """The complete checkpoints under `root`, oldest first, and what is wrong with those that are damaged."""
    found: list[Found] = []
    damaged: list[ValueError] = []
    for folder in sorted(root.iterdir()):
        side = parse_side(folder.name)
        if side is None and (folder.name.startswith(".") or not (folder / MANIFEST).is_file()):
            continue
        if side is not None:
            if side.kind == "old" and locate(root, side.tag) == folder:
                found.append(Found(side.tag, folder, read_manifest(folder)))
            continue
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except ValueError as error:
            damaged.append(error)
        else:
            found.append(Found(folder.name, folder, manifest))
    return sorted(found, key=lambda one: one.manifest.age_key), damaged
