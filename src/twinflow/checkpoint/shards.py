# SPDX-License-Identifier: Apache-2.0
"""Tensors that tensor ranks store in parts: which elements each rank has, and how to read elements of the whole tensor.

A part contains some indices of one dim. In general it is therefore not a contiguous range of the flattened whole
tensor: in a view [outer, dim, inner], with all dims before and after this dim flattened, every outer row has elements
of each part. Each tensor rank stores its part as one tensor. A reader selects indices of the dim: all indices for the
whole tensor, or the indices of its own part, which may differ from the stored parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from twinflow.checkpoint.disk import damaged
from twinflow.checkpoint.plain import JSON
from twinflow.checkpoint.tensors import are_sizes, is_possible
from twinflow.parallel.shard import TensorShard

BLOCK_NUMEL: Final = 4 << 20  # elements of a stored part in memory, besides the tensor that is filled
Ranges = tuple[tuple[int, int], ...]  # indices of a dim, as ranges [start, stop) in order
Fill = Callable[[int, Tensor], None]  # fill(start, into): fills `into` with elements from `start` of a flattened tensor


@dataclass(frozen=True)
class Split:
    """The split of a whole tensor of `shape` along `dim`. `ranges`: the indices of each tensor rank."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Ranges, ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        return _with_size(self.shape, self.dim, _size(self.ranges[rank]))

    def to_json(self) -> JSON:
        """The JSON that `parse_split` reads."""
        return {"shape": self.shape, "dim": self.dim, "ranges": self.ranges}


def stored_name(name: str, rank: int) -> str:
    """The name under which the part of a tensor rank is stored."""
    return f"{name}@{rank}"


def local_shape(shard: TensorShard | None, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of this rank's part of a whole tensor. Without a shard, `shape` is returned. It is also returned if it
    does not fit the shard, so that the caller's comparison fails.
    """
    if shard is None or shard.dim >= len(shape) or shape[shard.dim] != shard.full:
        return tuple(shape)
    return _with_size(shape, shard.dim, shard.size)


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


# Reading


@dataclass(frozen=True)
class Move:
    """A range of `size` indices of the dim. It starts at `start` in a row of the source (stored part) number `source`,
    and at `target` in the row of the result.
    """

    source: int
    start: int
    target: int
    size: int


def find_moves(sources: Sequence[Ranges], wanted: Ranges) -> tuple[Move, ...]:
    """The places of the `wanted` indices in sources with these ranges, in the order of the targets."""
    moves = []
    target = 0
    for first, last in wanted:
        for source, ranges in enumerate(sources):
            begin = 0
            for start, stop in ranges:
                low, high = max(first, start), min(last, stop)
                if low < high:
                    moves.append(Move(source, begin + low - start, target + low - first, high - low))
                begin += stop - start
        target += last - first
    return tuple(sorted(moves, key=lambda move: move.target))


@dataclass(frozen=True)
class Selection:
    """A tensor [outer, size, inner] made from rows of the sources. `sizes`: the sizes of the sources along the dim."""

    size: int
    inner: int
    sizes: tuple[int, ...]
    moves: tuple[Move, ...]


def select(shape: Sequence[int], dim: int, sources: Sequence[Ranges], wanted: Ranges) -> Selection:
    """The selection of the `wanted` indices along `dim` from a whole tensor of `shape` that the `sources` have
    together.
    """
    inner = math.prod(shape[dim + 1 :])
    return Selection(_size(wanted), inner, tuple(map(_size, sources)), find_moves(sources, wanted))


def gather(selection: Selection, fills: Sequence[Fill], start: int, into: Tensor) -> None:
    """Fills the flat tensor `into` with the elements of the flattened selection from `start` on.

    Parts of a row are read range by range. Many short rows are read as blocks of whole rows of the sources, because one
    read for each range would cost more than also reading the elements between the ranges. A caller that reads the whole
    selection in order reads each source in order.
    """
    at, stop = start, start + into.numel()
    inner, row_numel = selection.inner, selection.size * selection.inner
    most = BLOCK_NUMEL // max(1, max(selection.sizes) * inner)
    while at < stop:
        row, first = divmod(at, row_numel)
        num_rows = 0 if first else min((stop - at) // row_numel, most)
        end = at + num_rows * row_numel
        if num_rows > 1:
            _gather_rows(selection, fills, row, into[at - start : end - start].view(num_rows, selection.size, -1))
        else:
            end = min(stop, (row + 1) * row_numel)
            for move in selection.moves:
                target = row * row_numel + move.target * inner
                low, high = max(at, target), min(end, target + move.size * inner)
                if low < high:
                    begin = (row * selection.sizes[move.source] + move.start) * inner + low - target
                    fills[move.source](begin, into[low - start : high - start])
        at = end


def _gather_rows(selection: Selection, fills: Sequence[Fill], row: int, into: Tensor) -> None:
    """Fills whole rows from `row` on. One block of rows of one source is in memory at a time."""
    for source, size in enumerate(selection.sizes):
        moves = [move for move in selection.moves if move.source == source]
        if not moves:
            continue
        block = torch.empty((into.shape[0], size, selection.inner), dtype=into.dtype)
        fills[source](row * size * selection.inner, block.view(-1))
        for move in moves:
            into[:, move.target : move.target + move.size] = block[:, move.start : move.start + move.size]


# As JSON


def to_mark(shard: TensorShard, shape: Sequence[int]) -> JSON:
    """The description (mark) of this rank's part, which has the shape `shape`."""
    return {
        "shape": shard.whole_shape(shape),
        "dim": shard.dim,
        "rank": shard.rank,
        "world": shard.world,
        "ranges": shard.ranges,
    }


def join_marks(said: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, JSON]]:
    """The split of each tensor by file and name, from the marks of the parts that each rank stores.

    ValueError if the parts do not make one whole tensor. Every rank gets the same result.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    for files in said:
        for file, own in files.items():
            for name, mark in own.items():
                found.setdefault((file, name), []).append(mark)
    joined: dict[str, dict[str, JSON]] = {}
    for (file, name), marks in found.items():
        joined.setdefault(file, {})[name] = _join(f"tensor {name!r} of {file!r}", marks).to_json()
    return joined


def _join(what: str, marks: Sequence[Mapping[str, Any]]) -> Split:
    first = marks[0]
    for mark in marks:
        if any(mark[key] != first[key] for key in ("shape", "dim", "world")):
            ranks = f"Tensor ranks {first['rank']} and {mark['rank']} have parts of different tensors"
            raise ValueError(f"{what}: {ranks}. Build the same model with the same config on all ranks.")
    ranges, world = {mark["rank"]: mark["ranges"] for mark in marks}, first["world"]
    missing = sorted(set(range(world)) - set(ranges))
    if missing:
        lost = f"The parts of tensor ranks {missing} of {world} are missing"
        raise ValueError(f"{what}: {lost}. Call save_checkpoint() on all ranks.")
    every = [ranges[rank] for rank in range(world)]
    return parse_split(what, {"shape": first["shape"], "dim": first["dim"], "ranges": every})


def parse_splits(where: str, value: object) -> dict[str, dict[str, Split]]:
    """Splits by file and tensor from untrusted JSON. ValueError with the name of a tensor whose split is invalid."""
    if not isinstance(value, dict) or not all(isinstance(entries, dict) for entries in value.values()):
        raise damaged(f"{where}: The key 'shards' must map each file to a dict of splits by tensor")
    what = f"{where}: shards of tensor"
    return {
        file: {name: parse_split(f"{what} {name!r} of {file!r}", entry) for name, entry in entries.items()}
        for file, entries in value.items()
    }


def parse_split(what: str, entry: object) -> Split:
    """A split from JSON. ValueError about `what` unless each index of the dim is in exactly one range and the ranges
    of each rank ascend.
    """
    if not isinstance(entry, dict) or set(entry) != {"shape", "dim", "ranges"}:
        raise damaged(f"{what} must have exactly the keys shape, dim and ranges")
    shape, dim, ranges = entry["shape"], entry["dim"], entry["ranges"]
    if not are_sizes(shape) or not are_sizes([dim]) or dim >= len(shape):
        raise damaged(f"{what}: {shape!r} is not a shape with a dim {dim!r}")
    if not isinstance(ranges, list | tuple) or not ranges or not all(_are_ranges(one) for one in ranges):
        raise damaged(f"{what}: {ranges!r} is not a list of ascending ranges for each tensor rank")
    every = sorted((start, stop) for one in ranges for start, stop in one if start < stop)
    edges = [(0, 0), *every, (shape[dim], shape[dim])]
    if any(before[1] != after[0] for before, after in pairwise(edges)):
        raise damaged(f"{what}: The ranges {ranges!r} must contain each of the {shape[dim]} indices exactly once")
    split = tuple(tuple((start, stop) for start, stop in one) for one in ranges)
    return Split(tuple(shape), dim, split)


def _are_ranges(value: object) -> bool:
    """Whether these are ascending ranges. Then reading the whole tensor in order reads each part in order."""
    if not isinstance(value, list | tuple) or not all(are_sizes(one) and len(one) == 2 for one in value):
        return False
    flat = [end for one in value for end in one]
    return flat == sorted(flat)


def check_shards(what: str, split: Split, found: Sequence[tuple[torch.dtype, tuple[int, ...]] | None]) -> None:
    """Raises ValueError unless the parts of all tensor ranks have the shapes that `split` gives them, and one dtype.

    `found` has the dtype and shape of each tensor rank's part, or None if the part is missing. `what` is the name of
    the tensor in the error message.
    """
    dtypes = set()
    for rank, one in enumerate(found):
        wanted = split.local_shape(rank)
        if one is None or one[1] != wanted:
            state = "is missing" if one is None else f"has the shape {list(one[1])}"
            raise damaged(f"{what}: The part of tensor rank {rank} {state}, but must have the shape {list(wanted)}")
        dtypes.add(one[0])
    if len(dtypes) > 1 or not all(is_possible(split.shape, dtype) for dtype in dtypes):
        raise damaged(
            f"{what}: The parts of the tensor ranks do not make one tensor of shape {list(split.shape)} and one dtype"
        )
