"""Write a checkpoint: everything beside its place and onto the disk, then in with one rename; `disk` says why."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twinflow.checkpoint.disk import (
    LATEST,
    check_name,
    check_tag,
    counting,
    discard,
    is_abandoned,
    parse_side,
    read_latest,
    remove,
    side_path,
    swap_in,
    sync_folder,
    write_durable,
)
from twinflow.checkpoint.manifest import (
    MANIFEST,
    META,
    Manifest,
    PartRecord,
    describe,
    encode_manifest,
    find_all,
    find_asides,
    may_replace,
)
from twinflow.checkpoint.plain import JSON, encode_meta
from twinflow.checkpoint.tensors import (
    Entry,
    Header,
    check_entries,
    encode_header,
    part_names,
    split_entries,
    write_tensors,
)
from twinflow.errors import bad_value

PART_BYTES: Final = 4 << 30

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """One file to be written: its tensors, the bytes in front of them, and what these say."""

    file: str
    name: str
    entries: tuple[Entry, ...]
    raw_header: bytes
    header: Header


def save(
    root: Path,
    tag: str,
    files: Mapping[str, Sequence[Entry]],
    meta: Mapping[str, JSON],
    *,
    save_latest: bool = True,
    keep_last: int | None = None,
    on_progress: Progress | None = None,
    part_bytes: int = PART_BYTES,
) -> Path:
    """Write the checkpoint `root/<tag>` in place of one of that tag, and return its folder.

    `files` are written as safetensors, each in parts of at most `part_bytes`, with one tensor in memory at a time.
    `meta` is JSON; the floats nan and inf are kept, tuples come back as lists. `save_latest` makes it the checkpoint
    that is opened by default. `keep_last` deletes the oldest checkpoints beyond that number, but never the latest one.
    `on_progress` is told the bytes written and all bytes to be written.

    On an error, and on a crash at any point, the checkpoints that were there still are. One process at a time may save
    under a root.
    """
    root = Path(root)
    check_tag(tag)
    if keep_last is not None and keep_last < 1:
        raise bad_value("keep_last", keep_last, "None or at least 1")
    raw_meta = encode_meta(meta)
    parts = plan_parts(files, part_bytes)
    final = root / tag
    if not may_replace(final):
        raise ValueError(
            f"{final} exists and is not a twinflow checkpoint, so it is not replaced; found {describe(final)}. "
            "Choose another tag or folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    clear_leftovers(root)

    partial, pointer = side_path(root, tag, "partial"), side_path(root, LATEST, "partial")
    try:
        os.mkdir(partial)
        records = _write_parts(partial, parts, on_progress)
        write_durable(partial / META, raw_meta)
        step = meta.get("step")
        step = step if isinstance(step, int) and not isinstance(step, bool) else None
        manifest = Manifest(time.time_ns(), step, save_latest, len(raw_meta), zlib.crc32(raw_meta), records)
        write_durable(partial / MANIFEST, encode_manifest(manifest))  # last: it says that the rest is there
        sync_folder(partial)
        if save_latest:  # written while a full disk can still be backed out of
            write_durable(pointer, f"{tag}\n".encode())
        swap_in(partial, final)
        if save_latest:
            os.replace(pointer, root / LATEST)
            sync_folder(root)
    except Exception:  # not BaseException: whoever stops the process does not wait for gigabytes to be deleted
        remove(partial)
        remove(pointer)
        raise
    if keep_last is not None:
        _prune(root, keep_last)
    return final


def plan_parts(files: Mapping[str, Sequence[Entry]], part_bytes: int) -> list[Part]:
    """The files to be written; a ValueError where a name or a dtype does not go into one."""
    if part_bytes < 1:
        raise bad_value("part_bytes", part_bytes, "at least 1")
    parts = []
    for file, entries in files.items():
        check_name("a key of files", file)
        check_entries(entries, f"files[{file!r}]")
        runs = split_entries(entries, part_bytes)
        for name, run in zip(part_names(file, len(runs)), runs, strict=True):
            parts.append(Part(file, name, tuple(run), *encode_header(run, {"format": "pt"})))
    if len({part.name for part in parts}) < len(parts):
        raise ValueError(
            f"of the keys of files, {', '.join(files)}, two need files of the same name; rename one of them"
        )
    return parts


def _write_parts(
    folder: Path, parts: Sequence[Part], on_progress: Progress | None
) -> dict[str, tuple[PartRecord, ...]]:
    on_bytes = counting(on_progress, sum(entry.num_bytes for part in parts for entry in part.entries))
    records: dict[str, tuple[PartRecord, ...]] = {}
    for part in parts:
        crc32s = write_tensors(folder / part.name, part.entries, part.raw_header, part.header, on_bytes)
        record = PartRecord(part.name, part.header.size, part.header.crc32, crc32s)
        records[part.file] = (*records.get(part.file, ()), record)
    return records


def clear_leftovers(root: Path) -> None:
    """Delete what dead processes left half written or half deleted; put back what they had set aside."""
    for path in sorted(root.iterdir()):
        side = parse_side(path.name)
        if side is None or not is_abandoned(side):
            continue
        if side.kind != "old":
            remove(path)
        elif os.path.lexists(root / side.tag):
            discard(path, side.tag)
        else:
            asides = find_asides(root, side.tag)
            if asides:
                os.rename(asides[0].folder, root / side.tag)
                sync_folder(root)


def _prune(root: Path, keep_last: int) -> None:
    latest = read_latest(root)
    found, _ = find_all(root)
    for old in found[:-keep_last]:
        if old.tag != latest:
            discard(old.folder, old.tag)
