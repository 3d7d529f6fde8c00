# SPDX-License-Identifier: Apache-2.0
"""Exports weights for other libraries: as one safetensors file, as shards with an index in the format of Hugging Face,
or as a model folder with a config.json.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from twinflow.checkpoint.disk import check_name, counting, damaged, remove, sync_folder, write_durable
from twinflow.checkpoint.load import Checkpoint, open_checkpoint
from twinflow.checkpoint.manifest import MANIFEST
from twinflow.checkpoint.plain import parse_json, tensor_names
from twinflow.checkpoint.save import Part, plan_parts
from twinflow.checkpoint.sides import abandoned, kept_alive, side_path, swap_in
from twinflow.checkpoint.tensors import TensorWriter
from twinflow.errors import invalid_value, unusable_path
from twinflow.files import read_bytes
from twinflow.rules.formats import rounds_to
from twinflow.state_dict import Entry

SHARD_BYTES: Final = 5_000_000_000
CONFIG: Final = "config.json"
# Number of elements of a weight, and of its master, that are in memory besides the tensor to be written.
CHUNK_NUMEL: Final = 4 << 20
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WRITTEN: Final = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json", CONFIG)


def export_weights(
    entries: Iterable[Entry],
    path: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Writes `entries` to the safetensors file `path` and replaces an existing file.

    Tensors of more than `shard_bytes` together are split into shards `<stem>-00001-of-0000N.safetensors` next to
    `path`, with the index `<path>.index.json`. All files are written under temporary names and renamed when all of them
    are on the disk. Two tensors, or those of a few blocks, are in memory. After a crash between the renames of shards
    there is no index. An index never refers to a mix of old and new shards. `on_bytes` is called with numbers of bytes
    that are written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise invalid_value("path", str(path), "a file name that ends in .safetensors")
    check_name("The stem of path", path.stem)
    parts = plan_parts({path.stem: list(entries)}, shard_bytes)
    index = path.with_name(f"{path.name}.index.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    partials = {side_path(path.parent, part.name, "partial"): path.with_name(part.name) for part in parts}
    index_partial = side_path(path.parent, index.name, "partial")
    for other, _ in abandoned(path.parent, lambda side: side.kind == "partial" and side.tag.startswith(path.stem)):
        remove(other)
    try:
        with kept_alive(*partials), TensorWriter(on_bytes) as writer:
            for partial, part in zip(partials, parts, strict=True):
                writer.write(partial, part.entries, part.raw_header, part.header)
        if len(parts) > 1:
            write_durable(index_partial, _encode_index(parts))
            path.unlink(missing_ok=True)  # Loaders prefer a single file to an index.
            index.unlink(missing_ok=True)
            sync_folder(path.parent)
        for partial, final in partials.items():
            os.replace(partial, final)
        if len(parts) > 1:
            os.replace(index_partial, index)
        else:
            index.unlink(missing_ok=True)  # An earlier export may have written shards.
        sync_folder(path.parent)
    except Exception:
        for partial in (*partials, index_partial):
            remove(partial)
        raise


def _encode_index(parts: list[Part]) -> bytes:
    total = sum(entry.num_bytes for part in parts for entry in part.entries)
    weight_map = {entry.name: part.name for part in parts for entry in part.entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"


@dataclass(frozen=True)
class Exported:
    path: Path
    source: Path
    num_tensors: int
    num_masters: int  # number of these tensors that came from an fp32 master
    num_bytes: int
    notes: tuple[str, ...]


def export_checkpoint(
    source: Path,
    out: Path,
    tag: str | None = None,
    *,
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
    config: Path | None = None,
    replace: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Writes the model folder `out` from the checkpoint `source`, which is a folder of tags or the folder of one tag.

    A parameter comes from its fp32 master, if it has one. A weight that was changed after the last update is exported
    instead of its master, unless a delayed update is in progress. The folder is written under a temporary name and
    renamed. Two tensors, or those of a few blocks, are in memory.
    """
    if dtype not in DTYPES:
        raise invalid_value("dtype", dtype, DTYPES)
    found = find_checkpoint(Path(source), tag)
    out = Path(os.path.abspath(out))
    check_name("The name of the output folder", out.name)
    _check_out(out, replace)
    raw_config = _read_config(config)
    masters = masters_of(found)
    entries = [make_entry(found, name, masters.get(name), DTYPES[dtype]) for name in found.names("model")]
    num_bytes = sum(entry.num_bytes for entry in entries)
    partial = side_path(out.parent, out.name, "partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, side in abandoned(out.parent, lambda side: side.tag == out.name):
        if side.kind == "old" and not os.path.lexists(out):
            os.rename(path, out)  # A process renamed `out` to replace it, and ended before the new folder got the name.
        else:
            remove(path)
    try:
        try:
            os.mkdir(partial)
        except (FileNotFoundError, PermissionError) as error:
            raise unusable_path("The output", out, "a folder that can be created", error) from error
        if raw_config is not None:
            write_durable(partial / CONFIG, raw_config)
        on_bytes = counting(on_progress, num_bytes)
        with kept_alive(partial):
            export_weights(entries, partial / "model.safetensors", shard_bytes=shard_bytes, on_bytes=on_bytes)
        swap_in(partial, out)
    except Exception:
        remove(partial)
        raise
    return Exported(out, found.path, len(entries), len(masters), num_bytes, _notes(found))


def find_checkpoint(source: Path, tag: str | None) -> Checkpoint:
    """Opens the checkpoint `source`. In a folder of checkpoints: the checkpoint `tag`, or the latest one. ValueError if
    there is none.
    """
    if tag is None and (source / MANIFEST).is_file():
        folder = source.resolve()
        source, tag = folder.parent, folder.name
    found = open_checkpoint(source, tag)
    if found is None:
        state = "This folder contains no checkpoint." if source.is_dir() else "This folder does not exist."
        remedy = f"{state} Check the path. twinflow train writes to the folder checkpoints in its --out."
        raise invalid_value("The checkpoint", str(source), "a folder that save_checkpoint wrote to", remedy)
    if "model" not in found.files():
        files = ", ".join(found.files())
        raise ValueError(f"{found.path} has no file 'model' with weights, but only {files}. Use another checkpoint.")
    return found


def _check_out(out: Path, replace: bool) -> None:
    """Raises ValueError unless `out` is missing or an empty folder. `replace`: files of an export may be in it."""
    if not os.path.lexists(out):
        return
    if not out.is_dir() or out.is_symlink():
        raise ValueError(f"{out} exists and is not a folder. Choose another name.")
    names = sorted(path.name for path in out.iterdir())
    if names and not replace:
        remedy = "Choose an empty folder, or replace this one with --force (replace=True in Python)."
        raise ValueError(f"{out} contains {names[0]}. {remedy}")
    others = [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in WRITTEN)]
    if others:  # Replacing the folder would delete them.
        raise ValueError(
            f"{out} contains {others[0]}, which `twinflow export` did not write. Move it, or choose another folder."
        )


def _read_config(path: Path | None) -> bytes | None:
    if path is None:
        return None
    if not path.is_file():
        raise invalid_value("config", str(path), "an existing file")
    raw = read_bytes(path)
    with suppress(ValueError):
        if isinstance(parse_json(raw, path), dict):
            return raw
    raise ValueError(f"{path} must contain a valid JSON object, as the {CONFIG} of a model does. Give another file.")


def masters_of(found: Checkpoint) -> dict[str, str]:
    """Maps the name of each weight that has an fp32 master to the name of the master in the optimizer's file."""
    if "optimizer" not in found.files():
        return {}
    stored, names = found.meta.get("optimizer_state") or {}, set(found.names("model"))
    tensors = {name: tensor_names(entry).get("master") for name, entry in stored.items() if name in names}
    there = set(found.names("optimizer"))
    return {name: master for name, master in tensors.items() if master in there}


def make_entry(found: Checkpoint, name: str, master: str | None, dtype: torch.dtype) -> Entry:
    """The entry that exports one weight, in `dtype` if it is floating-point. Its values are read when it is written."""
    own = found.dtype("model", name)
    shape = found.shape("model", name)
    if not own.is_floating_point:  # such as a mask or a counter
        return Entry(name, own, shape, lambda: found.tensor("model", name))
    if master is not None and found.shape("optimizer", master) != shape:
        shapes = f"the shape {found.shape('optimizer', master)}, but the weight has {shape}"
        raise damaged(f"{found.path}: The fp32 master of the weight {name} has {shapes}")
    return Entry(name, dtype, shape, lambda: _read(found, name, master, dtype))


def _read(found: Checkpoint, name: str, master: str | None, dtype: torch.dtype) -> Tensor:
    """One tensor to export. The stored tensors are read in chunks."""
    made = torch.empty(found.shape("model", name), dtype=dtype)
    flat, start = made.view(-1), 0
    for value in _values(found, name, master):
        flat[start : start + value.numel()] = _narrow(value, dtype, name, found.path)
        start += value.numel()
    return made


def _values(found: Checkpoint, name: str, master: str | None) -> Iterator[Tensor]:
    weights = found.chunks("model", name, CHUNK_NUMEL)
    if master is None:
        return weights
    masters = found.chunks("optimizer", master, CHUNK_NUMEL)
    if (found.meta.get("optimizer") or {}).get("has_unsent"):
        return masters  # With a delayed update in progress, the masters are newer than the weights.
    if found.dtype("model", name) == torch.float32:
        return weights
    # The user may have changed a weight after the update. Then the weight is exported: load_checkpoint loads it too.
    pairs = zip(weights, masters, strict=True)
    return (torch.where(rounds_to(wide, weight), wide, weight.float()) for weight, wide in pairs)


def _narrow(value: Tensor, dtype: torch.dtype, name: str, path: Path) -> Tensor:
    narrow = value.to(dtype)
    if dtype == torch.float16 and bool((narrow.isinf() & value.isfinite()).any()):
        remedy = 'Set dtype (--dtype of `twinflow export`) to "bf16" or "fp32".'
        raise ValueError(f"{path}: Values of {name} exceed 65504, the largest value of fp16. {remedy}")
    return narrow


def _notes(found: Checkpoint) -> tuple[str, ...]:
    aliases, excluded = found.meta.get("aliases") or {}, found.meta.get("excluded") or []
    notes = [f"{name} is tied to {first} and stored once, as {first}" for name, first in aliases.items()]
    if excluded:
        notes.append(
            f"{len(excluded)} frozen tensors, such as {excluded[0]}, are not in the checkpoint. Copy them from the "
            "model"
        )
    return tuple(notes)
