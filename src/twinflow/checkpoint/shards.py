"""A whole tensor that tensor ranks have in parts: which elements are whose, and how any of them are read again.

A part is not a run of the flattened whole: it is some indices of one dim. With the whole seen as [outer, dim, inner],
every outer row holds a run of each part. Parts are stored as they are, one tensor for each tensor rank, and whoever
reads names indices of the dim: all of them for the whole, those of another rank's part for another layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from twinflow.checkpoint.plain import JSON
from twinflow.checkpoint.tensors import is_possible
from twinflow.parallel.shard import TensorShard

BLOCK_NUMEL: Final = 4 << 20  # of a stored part in memory, beside what is filled from it
Ranges = tuple[tuple[int, int], ...]  # [start, stop) each: these indices of a dim, one range after the other
Fill = Callable[[int, Tensor], None]  # fills a flat tensor with the elements of a flattened one, from a start on


@dataclass(frozen=True)
class Split:
    """How a whole of `shape` is cut along `dim`: `ranges` of each tensor rank."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Ranges, ...]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of one rank's tensor."""
        return _with_size(self.shape, self.dim, _size(self.ranges[rank]))

    def to_json(self) -> JSON:
        """What `parse_split` reads."""
        return {"shape": self.shape, "dim": self.dim, "ranges": self.ranges}


def stored_name(name: str, rank: int) -> str:
    """What a tensor rank's part of the tensor `name` is stored as."""
    return f"{name}@{rank}"


def local_shape(shard: TensorShard | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Of this rank's part of a whole; a shape that is not such a whole's stays, so that whoever compares it sees it."""
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
    """Indices of a dim that lie in a row of source number `source` from `start` on, and go to `target` of our row."""

    source: int
    start: int
    target: int
    size: int


def find_moves(sources: Sequence[Ranges], wanted: Ranges) -> tuple[Move, ...]:
    """Where the `wanted` indices lie in sources that have these ranges; in the order of the targets."""
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
    """Tensors [outer, size, inner] made of the sources' rows: `sizes` are those of the sources along the dim."""

    size: int
    inner: int
    sizes: tuple[int, ...]
    moves: tuple[Move, ...]

    @property
    def row_numel(self) -> int:
        """Elements of one outer row."""
        return self.size * self.inner

    def runs(self, row: int, first: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Elements [first, stop) of an outer row: of which source, from where on there, to where here, how many."""
        for move in self.moves:
            at = move.target * self.inner
            low, high = max(first, at), min(stop, at + move.size * self.inner)
            if low < high:
                begin = (row * self.sizes[move.source] + move.start) * self.inner
                yield move.source, begin + low - at, low - first, high - low


def select(shape: Sequence[int], dim: int, sources: Sequence[Ranges], wanted: Ranges) -> Selection:
    """The `wanted` indices along `dim` of a whole of `shape` that `sources` have together."""
    inner = math.prod(shape[dim + 1 :])
    return Selection(_size(wanted), inner, tuple(map(_size, sources)), find_moves(sources, wanted))


def gather(selection: Selection, fills: Sequence[Fill], start: int, into: Tensor) -> None:
    """Fill the flat `into` with the elements from `start` on of what is selected, flattened.

    A part of a row is read run by run, and nothing else. Many short rows are read as blocks of the sources that have
    some of them: a read for each run of each row would cost more than the elements beside it. Whoever reads all of a
    whole from its start to its end reads each source from its start to its end.
    """
    at, row_numel = start, selection.row_numel
    stop = start + into.numel()
    most = BLOCK_NUMEL // max(1, max(selection.sizes) * selection.inner)
    while at < stop:
        row, first = divmod(at, row_numel)
        num_rows = 0 if first else min((stop - at) // row_numel, most)
        end = at + num_rows * row_numel
        if num_rows > 1:
            _gather_rows(selection, fills, row, into[at - start : end - start].view(num_rows, selection.size, -1))
        else:
            end = min(stop, (row + 1) * row_numel)
            here = into[at - start : end - start]
            for source, begin, target, numel in selection.runs(row, first, first + end - at):
                fills[source](begin, here[target : target + numel])
        at = end


def _gather_rows(selection: Selection, fills: Sequence[Fill], row: int, into: Tensor) -> None:
    """Fill `into`, some whole rows from `row` on, with one source's rows after the other's in memory."""
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
    """What a rank says of its part, whose shape this is."""
    return {
        "shape": shard.whole_shape(shape),
        "dim": shard.dim,
        "rank": shard.rank,
        "world": shard.world,
        "ranges": shard.ranges,
    }


def join_marks(said: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, JSON]]:
    """By file and tensor, how it is cut: from the marks, by file and tensor, of the parts that each rank stores.

    A ValueError where they are not parts of one whole, all of it. Every rank comes to the same answer.
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
            raise ValueError(f"{what}: tensor ranks {first['rank']} and {mark['rank']} have parts of different wholes")
    ranges = {mark["rank"]: mark["ranges"] for mark in marks}
    if set(ranges) != set(range(first["world"])):
        missing = sorted(set(range(first["world"])) - set(ranges))
        raise ValueError(f"{what}: tensor ranks {missing} of {first['world']} do not store their parts")
    every = [ranges[rank] for rank in range(first["world"])]
    return parse_split(what, {"shape": list(first["shape"]), "dim": first["dim"], "ranges": every})


def parse_splits(where: str, value: object) -> dict[str, dict[str, Split]]:
    """By file and tensor, from JSON that anybody may have written; a ValueError names the tensor that is wrong."""
    if not isinstance(value, dict) or not all(isinstance(entries, dict) for entries in value.values()):
        raise ValueError(f"{where}: shards are not given by file and tensor")
    what = f"{where}: shards of tensor"
    return {
        file: {name: parse_split(f"{what} {name!r} of {file!r}", entry) for name, entry in entries.items()}
        for file, entries in value.items()
    }


def parse_split(what: str, entry: object) -> Split:
    """From JSON; a ValueError about `what` unless every index of the dim is in exactly one rank's ranges, in order."""
    if not isinstance(entry, dict) or set(entry) != {"shape", "dim", "ranges"}:
        raise ValueError(f"{what} are not described by shape, dim and ranges")
    shape, dim, ranges = entry["shape"], entry["dim"], entry["ranges"]
    if not _are_counts(shape) or not _are_counts([dim]) or dim >= len(shape):
        raise ValueError(f"{what}: {shape!r} is no shape with a dim {dim!r}")
    if not isinstance(ranges, list | tuple) or not ranges or not all(_are_ranges(one) for one in ranges):
        raise ValueError(f"{what}: {ranges!r} is not a list of rising ranges for each tensor rank")
    every = sorted((start, stop) for one in ranges for start, stop in one if start < stop)
    edges = [(0, 0), *every, (shape[dim], shape[dim])]
    if any(before[1] != after[0] for before, after in pairwise(edges)):
        raise ValueError(f"{what}: the ranges {ranges!r} do not have each of the {shape[dim]} indices of the dim once")
    split = tuple(tuple((start, stop) for start, stop in one) for one in ranges)
    return Split(tuple(shape), dim, split)


def _are_counts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is int and item >= 0 for item in value)


def _are_ranges(value: object) -> bool:
    """Whether these are ranges, each after the one before: the order in which a part is read beside the whole."""
    if not isinstance(value, list | tuple) or not all(_are_counts(one) and len(one) == 2 for one in value):
        return False
    flat = [end for one in value for end in one]
    return flat == sorted(flat)


def check_shards(what: str, split: Split, found: Sequence[tuple[torch.dtype, tuple[int, ...]] | None]) -> None:
    """Refuse what was found for each tensor rank, dtype and shape, unless these are the shards of one tensor `what`."""
    dtypes = set()
    for rank, one in enumerate(found):
        wanted = split.local_shape(rank)
        if one is None or one[1] != wanted:
            given = "not there" if one is None else f"of shape {list(one[1])}"
            raise ValueError(f"{what}: shard {rank} is {given}; it should be of shape {list(wanted)}")
        dtypes.add(one[0])
    if len(dtypes) > 1 or not all(is_possible(split.shape, dtype) for dtype in dtypes):
        raise ValueError(f"{what}: its shards do not make one tensor of shape {list(split.shape)}")
