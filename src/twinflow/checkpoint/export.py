"""Exports weights to one safetensors file, or to shards with an index in the format of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from twinflow.checkpoint.disk import check_name, remove, sync_folder, write_durable
from twinflow.checkpoint.save import Part, plan_parts
from twinflow.checkpoint.sides import is_abandoned, kept_alive, parse_side, side_path
from twinflow.checkpoint.tensors import Entry, write_tensors
from twinflow.errors import invalid_value

SHARD_BYTES: Final = 5_000_000_000


def export_weights(entries: Iterable[Entry], path: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `entries` to the safetensors file `path` and replaces an existing file.

    More than `shard_bytes` are split into shards `<stem>-00001-of-0000N.safetensors` next to `path`, with the index
    `<path>.index.json`. All files are written under temporary names and renamed when all of them are on the disk. One
    tensor is in memory at a time. After a crash between the renames of shards there is no index. An index never refers
    to a mix of old and new shards.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise invalid_value("path", str(path), "a file name that ends in .safetensors")
    check_name("The stem of path", path.stem)
    parts = plan_parts({path.stem: list(entries)}, shard_bytes)
    assert all(entry.part is None for part in parts for entry in part.entries), (
        "other libraries read whole tensors only"
    )
    index = path.with_name(f"{path.name}.index.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    partials = {side_path(path.parent, part.name, "partial"): path.with_name(part.name) for part in parts}
    index_partial = side_path(path.parent, index.name, "partial")
    _clear_leftovers(path)
    try:
        with kept_alive(*partials):
            for partial, part in zip(partials, parts, strict=True):
                write_tensors(partial, part.entries, part.raw_header, part.header)
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


def _clear_leftovers(path: Path) -> None:
    for other in path.parent.iterdir():
        side = parse_side(other.name)
        if side and side.kind == "partial" and side.tag.startswith(path.stem) and is_abandoned(other, side):
            remove(other)


def _encode_index(parts: list[Part]) -> bytes:
    total = sum(entry.num_bytes for part in parts for entry in part.entries)
    weight_map = {entry.name: part.name for part in parts for entry in part.entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"
