# SPDX-License-Identifier: Apache-2.0
"""manifest.json lists the files of a checkpoint. It is written last, so that its presence shows that the checkpoint is
complete.

The manifest contains its own checksum, so that every changed byte is detected. Version 1 of the format has only whole
tensors.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from twinflow.checkpoint.disk import MAX_NAME_BYTES, check_name, damaged, file_status
from twinflow.checkpoint.plain import parse_json
from twinflow.checkpoint.sides import parse_side
from twinflow.files import open_regular, read_bytes
from twinflow.state_dict import PartOf
from twinflow.version import __version__

MANIFEST: Final = "manifest.json"
META: Final = "meta.json"
MAX_JSON_BYTES: Final = 2**28  # of the manifest, and of `meta`
LOOK_BYTES: Final = 2**16  # the format is named at the start of a manifest
FORMAT: Final = "twinflow checkpoint"
FORMAT_VERSION: Final = 2
PICKLED: Final = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp")
NEVER: Final = "Pickled checkpoints are never loaded, because they can run code"


def _check_size(value: object) -> object:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not an integer >= 0")
    return value


def _check_parts(parts: dict[str, PartOf]) -> dict[str, PartOf]:
    for key, part in parts.items():
        for size in (*part.shape, part.start):
            _check_size(size)
        if not key.endswith(part.key("")):
            raise ValueError(f"the key {key!r} does not belong to a part that starts at {part.start}")
    return parts


Size = Annotated[int, BeforeValidator(_check_size)]
FileKey = Annotated[str, BeforeValidator(lambda key: check_name("A key of files", key))]
FileName = Annotated[str, BeforeValidator(lambda name: check_name("The name of a file", name, 2 * MAX_NAME_BYTES))]


@dataclass(frozen=True)
class PartRecord:
    """One file of tensors: its name, its size in bytes, and the checksums of its header and of each tensor.

    `parts`: for each tensor in the file that is only a part, the start of the part and the shape of the whole tensor.
    """

    name: FileName
    size: Size
    header_crc32: Size
    tensors: dict[str, Size]
    parts: Annotated[dict[str, PartOf], AfterValidator(_check_parts)] = field(default_factory=dict)

    def of(self, key: str) -> tuple[str, PartOf | None]:
        """The name of the tensor with this key in the file, and its part if the file contains only a part of it."""
        part = self.parts.get(key)
        return (key, None) if part is None else (key.removesuffix(part.key("")), part)


Files = dict[FileKey, tuple[PartRecord, ...]]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. `latest`: whether it was saved as the checkpoint from which a run resumes."""

    time_ns: Size
    step: Annotated[int, Field(strict=True)] | None
    latest: bool
    meta_size: Size
    meta_crc32: Size
    files: Files

    @property
    def age_key(self) -> tuple[int, int]:
        """The key that sorts checkpoints from old to new. The time comes before the step: after a run went back to an
        early step, its new checkpoints have lower steps.
        """
        return self.time_ns, -1 if self.step is None else self.step

    def sizes(self) -> dict[str, int]:
        """The sizes in bytes of all files except the manifest."""
        return {META: self.meta_size} | {part.name: part.size for parts in self.files.values() for part in parts}


parse_files: Final = TypeAdapter(Files).validate_python
_parse: Final = TypeAdapter(Manifest).validate_python


def encode_manifest(manifest: Manifest) -> bytes:
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "twinflow_version": __version__}
    body = head | asdict(manifest)
    return json.dumps(body | {"crc32": _crc32_of(body)}, indent=1).encode()


def _crc32_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. ValueError with a description of the folder if there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / META).is_file():
            raise damaged(f"{folder} is an incomplete twinflow checkpoint: its {MANIFEST} is missing")
        raise ValueError(f"{folder} is not a twinflow checkpoint: it has no {MANIFEST}. It is {describe(folder)}")
    body = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise damaged(f"{path} was not written by twinflow, or is damaged: its key 'format' must be {FORMAT!r}")
    version = body.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"{path} has the format version {version!r}, but twinflow {__version__} reads versions 1 to "
            f"{FORMAT_VERSION}. Load it with twinflow {body.get('twinflow_version')!r}, which wrote it."
        )
    try:
        if body.pop("crc32", None) != _crc32_of(body):
            raise ValueError("its content does not match its checksum")
        manifest = _parse(body)
        names = [part.name for parts in manifest.files.values() for part in parts]
        if len(set(names)) < len(names):
            raise ValueError("two files have the same name")
    except (ValueError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else error
        raise damaged(f"{path} was changed or damaged ({reason})") from error
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises ValueError if a file of the checkpoint is missing or has another size than the saved one."""
    for name, size in manifest.sizes().items():
        path = folder / name
        status = file_status(path)
        if status.st_size != size:
            word = "cut off" if status.st_size < size else "changed"
            raise damaged(f"{path} is {word}: it has {status.st_size} bytes, but was saved with {size}")


def read_complete(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, after `check_files`."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def describe(path: Path) -> str:
    """A description of a file or of a folder without a manifest, for error messages."""
    if path.is_file():
        if path.suffix in PICKLED:
            return f"a pickled file. {NEVER}. Load its weights with torch.load() and model.load_state_dict()."
        return "a regular file. Give the folder that save_checkpoint() wrote to."
    if not path.is_dir():
        return "neither a file nor a folder. Give the folder of a checkpoint."
    names = sorted(entry.name for entry in path.iterdir())
    # Of a pipeline of DeepSpeed, files of layers come first.
    pickled = max((name for name in names if name.endswith(PICKLED)), key=lambda name: "mp_rank" in name, default=None)
    if pickled and "mp_rank" in pickled:
        return f"a DeepSpeed checkpoint ({pickled}). {NEVER}. Convert it with `twinflow import`."
    if pickled:
        return f"a pickled checkpoint ({pickled}). {NEVER}. Convert it to safetensors first."
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return "a Hugging Face model folder. Load it with transformers, not as a checkpoint."
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{f'a folder with {shown}' if shown else 'an empty folder'}. Give the folder of a checkpoint."


def may_replace(folder: Path) -> bool:
    """Whether a save may replace `folder`: it does not exist, or is empty, or is a twinflow checkpoint, which may be
    damaged. Other folders are never deleted.
    """
    path = folder / MANIFEST
    if path.is_file():
        with open_regular(path) as file:
            return FORMAT.encode() in file.read(LOOK_BYTES)
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


@dataclass(frozen=True)
class Found:
    """A checkpoint on the disk. After a crash, its folder may have a temporary name."""

    tag: str
    folder: Path
    manifest: Manifest


def find_asides(root: Path, tag: str) -> list[Found]:
    """The complete checkpoints of `tag` that a crash left under temporary names, newest first."""
    asides = []
    for folder in root.iterdir():
        side = parse_side(folder.name)
        if side is None or side.tag != tag or side.kind != "old":
            continue
        with suppress(ValueError, OSError):  # The folder is damaged, or another process deletes it.
            asides.append(Found(tag, folder, read_complete(folder)))
    return sorted(asides, key=lambda found: found.manifest.age_key, reverse=True)


def locate(root: Path, tag: str) -> Path | None:
    """The folder of `tag`, or the one that a crash left under a temporary name. None if there is neither."""
    if os.path.lexists(root / tag):
        return root / tag
    asides = find_asides(root, tag) if root.is_dir() else []
    return asides[0].folder if asides else None


def find_all(root: Path) -> tuple[list[Found], list[ValueError]]:
    """The complete checkpoints under `root`, oldest first, and the errors of the damaged ones."""
    found: list[Found] = []
    errors: list[ValueError] = []
    for folder in sorted(root.iterdir()):
        side = parse_side(folder.name)
        if side is not None and side.kind == "old" and locate(root, side.tag) == folder:
            found.append(Found(side.tag, folder, read_manifest(folder)))
        elif not folder.name.startswith(".") and (folder / MANIFEST).is_file():
            try:
                found.append(Found(folder.name, folder, read_complete(folder)))
            except ValueError as error:
                errors.append(error)
    return sorted(found, key=lambda one: one.manifest.age_key), errors
