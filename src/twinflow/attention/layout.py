# SPDX-License-Identifier: Apache-2.0
"""Layouts: the kept blocks of an attention matrix in compressed sparse row format.

A `Layout` has one list of columns for each block row of each distinct pattern. Each head refers to a pattern. The
memory is proportional to the number of kept blocks: a million tokens in blocks of 16 need megabytes, while a grid of
65536 x 65536 entries per head would need gigabytes.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from twinflow.errors import invalid_value, wrong_state

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCKS = (16, 32, 64, 128)
DENSE_LIMIT = 2**28
CHUNK_PAIRS = 2**22

PairTest = Callable[[Tensor, Tensor], Tensor]


_SOURCES: WeakValueDictionary[str, LayoutSource] = WeakValueDictionary()  # by handle
_PROCESS = uuid.uuid4().hex  # so that the handles of an exported graph name nothing in another process
_NUMBERS = itertools.count()


class LayoutSource:
    """An object that gives the layout of a call: a layout, a pattern, or the attention of a layer.

    `handle` names the object in operators and in graphs of torch.compile, which cannot have Python objects as
    arguments. It is different for every object, also for copies, and valid as long as the object exists.
    """

    handle: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        object.__setattr__(self, "handle", f"{_PROCESS}-{next(_NUMBERS)}")
        _SOURCES[self.handle] = self
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def layout_for(self, num_tokens: int, num_heads: int, q_start: int) -> Layout:
        """The layout for the positions of all keys and queries, of which the first query has the position `q_start`."""
        raise NotImplementedError


def source_of(handle: str) -> LayoutSource:
    """The object with a handle. Raises ValueError if it does not exist any more."""
    found = _SOURCES.get(handle)
    if found is None:
        raise wrong_state(
            "A compiled or exported graph cannot run",
            "the pattern or layout with which it was made does not exist in this process",
            "Keep the model, the pattern or the layout as long as the graph is used.",
        )
    return found


@dataclass(frozen=True, eq=False)
class Layout(LayoutSource):
    """The kept blocks of scores. Rows are blocks of `block` queries, and columns are blocks of `block` keys.

    The tensors must not be changed. Positions count from zero on both axes: row r has the queries from position r *
    block, and column c has the keys from position c * block.
    """

    block: int
    num_rows: int
    num_cols: int
    is_causal: bool  # causality is exact to the token; blocks that are wholly above the diagonal are not kept
    head_to_pattern: tuple[int, ...]
    row_starts: Tensor  # int64 [num_patterns, num_rows + 1], offsets into `cols`
    cols: Tensor  # int32 [kept], ascending within a row, no duplicates
    window: int | None = None  # a query sees only keys at a distance < window, exact to the token; None: all keys

    def __post_init__(self) -> None:
        _check_shape(self.block, self.num_rows, self.num_cols)

    def layout_for(self, num_tokens: int, num_heads: int, q_start: int) -> Layout:
        return self

    @property
    def num_heads(self) -> int:
        return len(self.head_to_pattern)

    @property
    def num_patterns(self) -> int:
        return self.row_starts.shape[0]

    @property
    def num_kept(self) -> int:
        """Number of kept blocks. Each pattern counts once."""
        return self.cols.numel()

    @property
    def density(self) -> float:
        """Share of the grid that is kept, over all heads."""
        kept = self.row_starts[:, -1] - self.row_starts[:, 0]
        total = sum(int(kept[pattern]) for pattern in self.head_to_pattern)
        return total / (self.num_heads * self.num_rows * self.num_cols)

    @cached_property
    def _digest(self) -> bytes:
        shape = (self.block, self.num_rows, self.num_cols, self.is_causal, self.head_to_pattern, self.window)
        digest = hashlib.blake2b(repr(shape).encode(), digest_size=16)
        for tensor in (self.row_starts, self.cols):
            digest.update(tensor.contiguous().numpy().data)
        return digest.digest()

    def key(self) -> bytes:
        """A key for caches. Layouts with equal keys keep the same blocks."""
        return self._digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def cols_of(self, pattern: int) -> Tensor:
        """Columns of the kept blocks of a pattern, row after row, as int32."""
        return self.cols[int(self.row_starts[pattern, 0]) : int(self.row_starts[pattern, -1])]

    def rows_of(self, pattern: int) -> Tensor:
        """Rows of the kept blocks of a pattern, in the order of `cols_of`, as int32."""
        lengths = self.row_starts[pattern].diff()
        return torch.repeat_interleave(torch.arange(self.num_rows, dtype=torch.int32), lengths)

    def corner(self, num_blocks: int, is_causal: bool) -> Layout:
        """The first `num_blocks` rows and columns of a square layout. With `is_causal`, later keys are dropped."""
        if self.num_rows == num_blocks and self.is_causal == is_causal:
            return self
        flats = []
        for pattern in range(self.num_patterns):
            rows, cols = self.rows_of(pattern).long(), self.cols_of(pattern).long()
            flats.append((rows * num_blocks + cols)[(rows < num_blocks) & (cols < num_blocks)])
        heads = self.head_to_pattern
        return from_flat(flats, num_blocks, num_blocks, self.block, is_causal=is_causal, head_to_pattern=heads)

    def windowed(self, window: int) -> Layout:
        """The layout with a window: without blocks in which every key is too far from every query."""
        if window < 1:
            raise invalid_value("window", window, "a whole number >= 1")
        flats = []
        for pattern in range(self.num_patterns):
            rows, cols = self.rows_of(pattern).long(), self.cols_of(pattern).long()
            is_near = ((rows - cols).abs() - 1) * self.block + 1 < window
            flats.append((rows * self.num_cols + cols)[is_near])
        options: dict[str, Any] = {"is_causal": self.is_causal, "head_to_pattern": self.head_to_pattern}
        return replace(from_flat(flats, self.num_rows, self.num_cols, self.block, **options), window=window)

    def transposed(self) -> tuple[Tensor, Tensor]:
        """The kept blocks by columns: col_starts int64 [num_patterns, num_cols + 1] and ascending rows int32 [kept]."""
        counts = torch.zeros(self.num_patterns, self.num_cols, dtype=torch.int64)
        rows = torch.empty_like(self.cols)
        for pattern in range(self.num_patterns):
            cols = self.cols_of(pattern)
            order = torch.argsort(cols, stable=True)
            start = int(self.row_starts[pattern, 0])
            rows[start : start + cols.numel()] = self.rows_of(pattern)[order]
            counts[pattern] = torch.bincount(cols, minlength=self.num_cols)
        return _starts(counts), rows

    def check_dense(self, remedy: str) -> None:
        """Raises ValueError with this remedy if a grid of all blocks would be too large."""
        shape = f"{self.num_heads} heads x {self.num_rows} rows x {self.num_cols} columns"
        numel = self.num_heads * self.num_rows * self.num_cols
        if numel > DENSE_LIMIT:
            name = f"The number of entries of a grid of all blocks ({shape})"
            raise invalid_value(name, numel, f"at most {DENSE_LIMIT}", remedy)

    def to_dense(self) -> Tensor:
        """The grid as bool [heads, rows, cols]. Raises ValueError for layouts that are too large."""
        self.check_dense("Call rows_of() and cols_of(), which return only the kept blocks.")
        patterns = torch.zeros(self.num_patterns, self.num_rows, self.num_cols, dtype=torch.bool)
        for pattern in range(self.num_patterns):
            patterns[pattern, self.rows_of(pattern).long(), self.cols_of(pattern).long()] = True
        return patterns[list(self.head_to_pattern)]

    def for_heads(self, start: int, stop: int) -> Layout:
        """The layout of the heads from `start` to `stop` (exclusive), for a rank that has only these heads."""
        if not 0 <= start < stop <= self.num_heads:
            raise invalid_value(
                "heads", (start, stop), f"a range (first, last + 1) of the {self.num_heads} heads of the layout"
            )
        wanted = self.head_to_pattern[start:stop]
        patterns = list(dict.fromkeys(wanted))
        counts = self.row_starts.diff(dim=1)[patterns]
        return Layout(
            self.block,
            self.num_rows,
            self.num_cols,
            self.is_causal,
            tuple(patterns.index(pattern) for pattern in wanted),
            _starts(counts),
            torch.cat([self.cols_of(pattern) for pattern in patterns]),
            self.window,
        )


def from_flat(
    flats: Sequence[Tensor],
    num_rows: int,
    num_cols: int,
    block: int,
    *,
    is_causal: bool = False,
    head_to_pattern: Sequence[int] | None = None,
) -> Layout:
    """A layout from one int64 tensor per pattern, with row * num_cols + col of each kept block. Order and duplicates do
    not matter.

    With `is_causal`, blocks that are wholly above the diagonal are dropped. Without `head_to_pattern`, there is one
    head per pattern. Equal patterns are merged.
    """
    _check_shape(block, num_rows, num_cols)
    heads = tuple(range(len(flats))) if head_to_pattern is None else tuple(int(p) for p in head_to_pattern)
    if not heads or any(not 0 <= pattern < len(flats) for pattern in heads):
        allowed = f"a list with at least one entry, each a pattern number >= 0 and < {len(flats)}"
        raise invalid_value("head_to_pattern", heads, allowed)
    found: dict[bytes, int] = {}
    kept: list[Tensor] = []
    counts: list[Tensor] = []
    merged: dict[int, int] = {}
    for pattern in dict.fromkeys(heads):
        flat = _sorted_unique(flats[pattern].reshape(-1).to(torch.int64), num_rows * num_cols)
        rows, cols = flat // num_cols, flat % num_cols
        if is_causal:
            below = cols <= rows
            rows, cols, flat = rows[below], cols[below], flat[below]
        digest = hashlib.blake2b(flat.numpy().data, digest_size=32).digest()
        merged[pattern] = found.setdefault(digest, len(kept))
        if merged[pattern] == len(kept):
            kept.append(cols.to(torch.int32))
            counts.append(torch.bincount(rows, minlength=num_rows))
    return Layout(
        block,
        num_rows,
        num_cols,
        bool(is_causal),
        tuple(merged[pattern] for pattern in heads),
        _starts(torch.stack(counts)),
        torch.cat(kept),
    )


def from_dense(grid: Tensor, block: int, is_causal: bool = False, num_heads: int | None = None) -> Layout:
    """A layout from a bool or integer grid [heads, rows, cols], or [rows, cols] for all `num_heads` heads."""
    if grid.dim() == 2:
        grid = grid[None]
    if grid.dim() != 3:
        raise invalid_value("grid.shape", tuple(grid.shape), "[heads, rows, cols] or [rows, cols]")
    if grid.is_floating_point() or grid.is_complex():
        raise invalid_value("grid.dtype", grid.dtype, "bool or an integer dtype", "Pass grid != 0.")
    if num_heads is not None and grid.shape[0] not in (1, num_heads):
        raise invalid_value("grid.shape[0]", grid.shape[0], f"1 or num_heads, which is {num_heads}")
    flats = [head.detach().cpu().reshape(-1).nonzero()[:, 0] for head in grid]
    heads = [0] * num_heads if num_heads is not None and len(flats) == 1 else None
    return from_flat(flats, grid.shape[1], grid.shape[2], block, is_causal=is_causal, head_to_pattern=heads)


def from_csr(
    row_starts: Tensor,
    cols: Tensor,
    num_cols: int,
    block: int,
    *,
    is_causal: bool = False,
    head_to_pattern: Sequence[int] | None = None,
) -> Layout:
    """A layout from offsets [patterns, rows + 1] or [rows + 1] into the columns of all patterns.

    The order of columns in a row does not matter. Offsets are absolute: the second pattern starts where the first ends.
    """
    starts = row_starts.cpu().to(torch.int64)
    starts = starts[None] if starts.dim() == 1 else starts
    cols = cols.cpu().to(torch.int64)
    if starts.dim() != 2 or starts.shape[0] == 0 or starts.shape[1] < 2:
        raise invalid_value("row_starts.shape", tuple(row_starts.shape), "[patterns, rows + 1] with at least one row")
    joined = bool((starts[1:, 0] == starts[:-1, -1]).all()) and int(starts[0, 0]) == 0
    if not joined or int(starts[-1, -1]) != cols.numel() or bool((starts.diff(dim=1) < 0).any()):
        raise ValueError(
            "row_starts does not fit cols. The offsets of all patterns, one pattern after the other, must ascend "
            f"from 0 to the length of cols, which is {cols.numel()}."
        )
    _check_range("An entry of cols", cols, num_cols)
    num_rows = starts.shape[1] - 1
    rows = torch.arange(num_rows).repeat(starts.shape[0])
    flat = torch.repeat_interleave(rows, starts.diff(dim=1).reshape(-1)) * num_cols + cols
    flats = [flat[int(start) : int(stop)] for start, stop in zip(starts[:, 0], starts[:, -1], strict=True)]
    return from_flat(flats, num_rows, num_cols, block, is_causal=is_causal, head_to_pattern=head_to_pattern)


def from_rows(
    patterns: Sequence[Sequence[Tensor]],
    num_cols: int,
    block: int,
    *,
    is_causal: bool = False,
    head_to_pattern: Sequence[int] | None = None,
) -> Layout:
    """A layout from lists. There is one list per pattern, with one tensor of columns per row."""
    sizes = {len(rows) for rows in patterns}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"The lists of the patterns have the lengths {sorted(sizes)}, but must have one length >= 1. Pass at least "
            "one list, and in each list one tensor per row of blocks."
        )
    counts = torch.tensor([[row.numel() for row in rows] for rows in patterns], dtype=torch.int64)
    cols = torch.cat([row.reshape(-1).to(torch.int64) for rows in patterns for row in rows])
    return from_csr(_starts(counts), cols, num_cols, block, is_causal=is_causal, head_to_pattern=head_to_pattern)


def from_function(
    keeps: PairTest | Sequence[PairTest],
    num_rows: int,
    num_cols: int,
    block: int,
    *,
    is_causal: bool = False,
    num_heads: int = 1,
) -> Layout:
    """A layout from a function keeps(rows, cols) -> bool, whose arguments are int64 tensors of block indices that
    broadcast.

    One function is used for `num_heads` heads; a list has one function per head. The function is called for all pairs,
    a few rows at a time. The time is proportional to the grid, and the memory to the number of kept blocks.
    """
    _check_shape(block, num_rows, num_cols)
    tests = [keeps] if callable(keeps) else list(keeps)
    cols = torch.arange(num_cols)[None]
    flats = []
    for test in tests:
        parts = []
        for rows in torch.split(torch.arange(num_rows), max(1, CHUNK_PAIRS // num_cols)):
            answer = test(rows[:, None], cols)
            if answer.dtype != torch.bool:
                raise invalid_value("keeps(rows, cols).dtype", answer.dtype, [torch.bool])
            parts.append(answer.expand(len(rows), num_cols).reshape(-1).nonzero()[:, 0] + rows[0] * num_cols)
        flats.append(torch.cat(parts))
    heads = [0] * num_heads if callable(keeps) else None
    return from_flat(flats, num_rows, num_cols, block, is_causal=is_causal, head_to_pattern=heads)


def _starts(counts: Tensor) -> Tensor:
    """Absolute offsets [patterns, n + 1] from counts [patterns, n]."""
    ends = counts.reshape(-1).cumsum(0).reshape(counts.shape)
    first = torch.cat([ends.new_zeros(1), ends[:-1, -1]])
    return torch.cat([first[:, None], ends], dim=1)


def _sorted_unique(flat: Tensor, size: int) -> Tensor:
    _check_range("A block index (row * num_cols + col)", flat, size)
    flat = torch.from_numpy(np.sort(flat.cpu().numpy()))  # torch's sort would also allocate the indices
    is_first = torch.ones_like(flat, dtype=torch.bool)
    is_first[1:] = flat[1:] != flat[:-1]
    return flat[is_first]


def _check_range(name: str, values: Tensor, size: int) -> None:
    if values.numel():
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= size:
            raise invalid_value(name, low if low < 0 else high, f"a number from 0 to {size - 1}")


def check_block(block: object) -> None:
    """Raise ValueError for a block size that is not supported."""
    if not isinstance(block, int) or block not in BLOCKS:
        raise invalid_value("block", block, BLOCKS)


def _check_shape(block: int, num_rows: int, num_cols: int) -> None:
    check_block(block)
    if num_rows < 1 or num_cols < 1:
        raise invalid_value("(rows, columns) of the layout", (num_rows, num_cols), "at least (1, 1)")
    if num_cols >= 2**31 or num_rows >= 2**31:
        raise invalid_value("(rows, columns) of the layout", (num_rows, num_cols), "a pair of numbers < 2**31")
