# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint: all files go to a folder with a temporary name, which is renamed when they are on the disk. The
docstring of `sides` explains what a crash leaves behind.

Several ranks can write one checkpoint together. Rank 0 creates the folder. Every rank writes its own files to it. Rank
0 completes the folder when all ranks have reported that their files are on the disk. After each step all ranks exchange
their results, so that all of them continue or all of them fail. A failure or crash before the rename leaves an
incomplete folder that is never loaded.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from twinflow.checkpoint.disk import (
    LATEST,
    check_name,
    check_tag,
    counting,
    read_latest,
    remove,
    sync_folder,
    write_durable,
)
from twinflow.checkpoint.manifest import (
    MANIFEST,
    META,
    Manifest,
    PartRecord,
    check_files,
    encode_manifest,
    find_all,
    find_asides,
    may_replace,
    parse_files,
)
from twinflow.checkpoint.plain import JSON, encode_meta
from twinflow.checkpoint.sides import abandoned, discard, kept_alive, side_path, swap_in
from twinflow.checkpoint.tensors import (
    DTYPE_NAMES,
    Header,
    Span,
    TensorWriter,
    check_cover,
    check_entries,
    encode_header,
    part_names,
    split_entries,
)
from twinflow.checkpoint.together import Alone, Together, agree
from twinflow.errors import invalid_value, unusable_path
from twinflow.state_dict import Entry

PART_BYTES: Final = 4 << 30
SEEN_S: Final = 10.0  # limit for a new folder to become visible to all machines of a shared file system
SHARED: Final = "Use a save_dir on a file system that all ranks share"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """One file to be written: its tensors, and its header as bytes and as a `Header`."""

    file: str  # key in the argument `files` of `save`
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
    together: Together | None = None,
) -> Path:
    """Writes the checkpoint `root/<tag>`, replaces an existing one of that tag, and returns its folder.

    `files` are written as safetensors, each in parts of at most `part_bytes` or of one larger tensor. A tensor is read
    while those before are written: two are in memory, or those of a few blocks. `meta` is JSON with nan and inf, and
    tuples become lists. With `save_latest`, the new checkpoint is opened by default from now on. `keep_last` deletes
    the oldest checkpoints beyond that number, but never the latest one. A thread calls `on_progress` with the number of
    bytes written and the total.

    With `together`, all ranks call this function, each with its own tensors and parts of tensors in `files`. Every
    element must be in the files of exactly one rank. `meta`, `save_latest` and `keep_last` of rank 0 are used.
    `on_progress` counts the bytes of this rank.

    All ranks raise an error if one rank has an error. After an error, and after a crash of any rank at any time, the
    previous checkpoints are intact. Only one save at a time may run under a root.
    """
    together = together or Alone()
    root = Path(root)
    is_first = together.rank == 0

    def prepare() -> tuple[tuple[list[Part], bytes], JSON]:
        check_tag(tag)
        if keep_last is not None and keep_last < 1:
            raise invalid_value("keep_last", keep_last, "None or a number >= 1")
        parts = plan_parts(files, part_bytes, together.rank if together.world > 1 else None)
        if is_first:
            _check_place(root, tag)
        return (parts, encode_meta(meta)), {"tag": tag, "files": list(files), "spans": _spans(files)}

    (parts, raw_meta), plans = agree(together, prepare)
    _check_plans(plans)
    own = side_path(root, tag, "partial", fresh=together.world > 1)
    pointer = side_path(root, LATEST, "partial")

    def make_folder() -> tuple[None, JSON]:
        if is_first:
            try:
                root.mkdir(parents=True, exist_ok=True)
                clear_leftovers(root)
                os.mkdir(own)
            except (FileNotFoundError, PermissionError) as error:
                raise unusable_path("save_dir", root, "a folder in which files can be created", error) from error
        return None, own.name

    def finish() -> tuple[None, JSON]:
        if is_first:
            records = _merge([file for plan in plans for file in plan["files"]], written)
            step = meta.get("step")
            step = step if type(step) is int else None
            manifest = Manifest(time.time_ns(), step, save_latest, len(raw_meta), zlib.crc32(raw_meta), records)
            _finish(own, root / tag, pointer, raw_meta, manifest)
            if keep_last is not None:
                _prune(root, keep_last)
        return None, None

    try:
        with kept_alive(*([own] if is_first else [])):
            partial = root / agree(together, make_folder)[1][0]
            agree(together, lambda: _wait_until_seen(partial))
            _, written = agree(together, lambda: (None, _write_parts(partial, parts, on_progress)))
            agree(together, finish)
    except Exception:  # Not BaseException: a process that is stopped should not delete gigabytes first.
        if is_first:
            remove(own)
            remove(pointer)
        raise
    return root / tag


def _check_place(root: Path, tag: str) -> None:
    there = next((path for path in (root, *root.parents) if os.path.exists(path)), None)
    if there is not None and not there.is_dir():
        where = "" if there == root else f" ({there} is a file)"
        raise invalid_value("save_dir", str(root), f"a folder, and not a file{where}", "Choose another save_dir.")
    if not may_replace(root / tag):
        text = f"{root / tag} exists and is not a twinflow checkpoint, so it is not replaced"
        raise ValueError(f"{text}. Choose another tag or folder.")


def plan_parts(files: Mapping[str, Sequence[Entry]], part_bytes: int, rank: int | None = None) -> list[Part]:
    """The files to be written. `rank`, if given, becomes a part of their names. ValueError for a name or dtype that
    cannot be saved.
    """
    if part_bytes < 1:
        raise invalid_value("part_bytes", part_bytes, "a number >= 1")
    parts = []
    for file, entries in files.items():
        check_name("A key of files", file)
        entries = [entry for entry in entries if not entry.is_nothing]
        check_entries(entries, f"files[{file!r}]")
        runs = split_entries(entries, part_bytes)
        if rank is not None:
            runs = [run for run in runs if run]  # With many ranks, most files would be empty.
        stem = file if rank is None else f"{file}-r{rank:05}"
        for name, run in zip(part_names(stem, len(runs)), runs, strict=True):
            parts.append(Part(file, name, tuple(run), *encode_header(run)))
    if len({part.name for part in parts}) < len(parts):
        raise ValueError(f"Two of the keys of files ({', '.join(files)}) need equal file names. Rename one key.")
    return parts


def _spans(files: Mapping[str, Sequence[Entry]]) -> JSON:
    """The elements that this rank writes, for the other ranks."""
    spans: list[JSON] = []
    for file, entries in files.items():
        for entry in entries:
            start, shape = (entry.part.start, entry.part.shape) if entry.part else (0, entry.shape)
            spans.append([file, entry.name, DTYPE_NAMES[entry.dtype], list(shape), start, entry.numel])
    return spans


def _check_plans(plans: Sequence[Any]) -> None:
    """Checks that the plans of all ranks make one checkpoint. Every rank gets the same result, and nothing is written
    yet.
    """
    tags = [plan["tag"] for plan in plans]
    if len(set(tags)) > 1:
        other = next(rank for rank, tag in enumerate(tags) if tag != tags[0])
        raise invalid_value(f"The tag on rank {other}", tags[other], [tags[0]], "Give the same tag on all ranks.")
    spans: dict[tuple[str, str], list[Span]] = {}
    for rank, plan in enumerate(plans):
        for file, name, dtype, shape, start, numel in plan["spans"]:
            spans.setdefault((file, name), []).append(Span(dtype, tuple(shape), start, numel, f"rank {rank}"))
    for (file, name), found in spans.items():
        remedy = "Give parts of one tensor, with each element in exactly one part."
        check_cover(f"tensor {name!r} of files[{file!r}]", found, remedy)


def _wait_until_seen(partial: Path) -> tuple[None, JSON]:
    """Waits for the folder of rank 0. Network file systems may show a new folder to other machines with a delay."""
    end = time.monotonic() + SEEN_S
    while not partial.is_dir():
        if time.monotonic() > end:
            raise ValueError(f"{partial} does not exist on this rank, but rank 0 has created it. {SHARED}.")
        with suppress(OSError):
            os.listdir(partial.parent)  # Refreshes the client's cache of the file system.
        time.sleep(0.05)
    return None, None


def _write_parts(folder: Path, parts: Sequence[Part], on_progress: Progress | None) -> JSON:
    """Writes the files of this rank to the disk and returns their records."""
    on_bytes = counting(on_progress, sum(entry.num_bytes for part in parts for entry in part.entries))
    records: dict[str, list[JSON]] = {}
    with TensorWriter(on_bytes) as writer:
        all_crc32s = [writer.write(folder / part.name, part.entries, part.raw_header, part.header) for part in parts]
    for part, crc32s in zip(parts, all_crc32s, strict=True):
        of_tensors = {entry.key: entry.part for entry in part.entries if entry.part}
        record = PartRecord(part.name, part.header.size, part.header.crc32, crc32s, of_tensors)
        records.setdefault(part.file, []).append(asdict(record))
    sync_folder(folder)
    return records


def _merge(files: Sequence[str], written: Sequence[Any]) -> dict[str, tuple[PartRecord, ...]]:
    """The records of all ranks by file. A file without tensors is kept."""
    merged: dict[str, tuple[PartRecord, ...]] = dict.fromkeys(files, ())
    for records in written:
        for file, found in parse_files(records).items():
            merged[file] = (*merged.get(file, ()), *found)
    return merged


def _finish(partial: Path, final: Path, pointer: Path, raw_meta: bytes, manifest: Manifest) -> None:
    """Completes the folder with the files of all ranks and gives it its final name."""
    write_durable(partial / META, raw_meta)
    try:
        check_files(partial, manifest)
    except ValueError as error:
        raise ValueError(f"Rank 0 does not see a file that another rank has written: {error} {SHARED}.") from error
    write_durable(partial / MANIFEST, encode_manifest(manifest))  # Last, because it marks the folder as complete.
    sync_folder(partial)
    if manifest.latest:  # Before the rename, so that a full disk does not affect the previous checkpoint.
        write_durable(pointer, f"{final.name}\n".encode())
    swap_in(partial, final)
    if manifest.latest:
        os.replace(pointer, final.parent / LATEST)
        sync_folder(final.parent)


def clear_leftovers(root: Path) -> None:
    """Deletes temporary folders of ended processes. A replaced folder is restored if its tag has no other folder."""
    for path, side in abandoned(root):
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
