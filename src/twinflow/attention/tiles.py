# SPDX-License-Identifier: Apache-2.0
"""Plans of the kernels: the tiles of scores that each program processes, and their order. A plan is computed from a
layout on the CPU.

A program computes the results of one tile of `own` tokens, its own tile, and iterates over tiles of `other` tokens. Own
tokens are queries, or keys for the gradients of keys and values. The sizes of both kinds of tiles may differ from the
block of the layout:

- blocks that are smaller than an own tile are merged: an own tile has one sub-row for each block row in it, and the
  program processes the union of their blocks, with a bit for each sub-row that keeps a block;
- an other tile is gathered from units of min(block, tile) tokens, so that scattered small blocks fill whole tiles;
- units that every sub-row keeps whole come first and need no mask; units that do not fill a tile are added to the rest.

A unit is described by one int32, its code: number << 8 | bits. Rows that are much longer than others (global tokens)
are cut into pieces. Each piece writes its result to a slot of scratch memory, and a second kernel combines them.
The work of one program is an item: an own tile, or a piece of it.

The kernels for Hopper have plans of their own, see `cell_plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from twinflow.attention.layout import Layout

BITS = 8  # bits of a code for sub-rows
_ALL = (1 << BITS) - 1
# smallest number of other tiles in a piece; for smaller pieces the second kernel costs more than a balanced load saves
MIN_PIECE = 16
NUM_PIECES = 132 * 16  # number of programs that balances the load of a large GPU
LONG = 1.5  # items longer than this multiple of the mean come first, for all heads
CACHED_PLANS = 64

# Plans of the kernels for Hopper.
OWN = 128  # tokens of an own tile, in two halves
CELL = 64  # tokens of a half, and of an other tile
SUB = 16  # tokens per bit of a word, on each side of a cell
WHOLE = 0xFFFF
DIAGONAL = 1 << 16
EDGE = 1 << 17
WINDOW = 1 << 18  # the first of four bits
MIN_FILL = 0.6  # smallest kept share of computed cells; below it, kernels that gather small blocks are faster
_PER_CELL = CELL // SUB

T = TypeVar("T")


@dataclass(frozen=True)
class Span:
    """Start and stop of the positions of queries, and of keys, in a call."""

    queries: tuple[int, int]
    keys: tuple[int, int]


@dataclass(frozen=True)
class TileSize:
    """Tokens of the own tile and of other tiles. Both are powers of two."""

    own: int
    other: int


@dataclass(frozen=True)
class Work:
    """The grid of a plan: the pattern of each head, the batch size, the query heads of a program, and the smallest
    number of other tiles (times query heads) of a piece.
    """

    heads: tuple[int, ...]
    batch: int = 1
    group: int = 1
    min_piece: int = MIN_PIECE


class Tables(NamedTuple):
    """The int32 tensors of a plan, as an argument of the kernels."""

    codes: Tensor  # codes of units, tile after tile
    items: Tensor  # [n, 5]: own tile; start of other tiles, first one with a mask, stop; slot in scratch memory or -1
    item_starts: Tensor  # [patterns + 1]
    cuts: Tensor  # [m, 3]: own tile, its first slot, number of its slots
    cut_starts: Tensor  # [patterns + 1]
    heads: Tensor  # [heads, 2]: pattern, first slot


@dataclass(frozen=True)
class TilePlan:
    """The work of all programs of one kernel."""

    tables: Tables
    size: TileSize
    max_items: int  # maximum items of a pattern
    num_long: int  # maximum long items of a pattern; they come first
    max_cuts: int
    num_slots: int  # slots of all heads, for one element of the batch
    has_full: bool  # there is a tile without a mask
    has_partial: bool  # there is a tile with a mask
    mean_tiles: float  # mean number of other tiles of an item
    words: Tensor | None = None  # of `cell_plan`: int32 [codes, 2 halves]; None if no tile has a mask

    @property
    def num_bytes(self) -> int:
        """Size of `tables` in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tables)

    def to(self, device: torch.device) -> TilePlan:
        """A copy of the plan on a device."""
        words = None if self.words is None else self.words.to(device)
        return replace(self, tables=Tables(*(tensor.to(device) for tensor in self.tables)), words=words)


@lru_cache(maxsize=CACHED_PLANS)
def device_plan(
    layout: Layout, span: Span, size: TileSize, by_keys: bool, work: Work, device: torch.device
) -> TilePlan:
    """The result of `tile_plan` on a device. The most recent plans are cached."""
    return tile_plan(layout, span, size, by_keys, work).to(device)


def cells(layout: Layout, pattern: int, span: Span, width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of all squares of `width` (at most the block) that contain kept scores of a pattern."""
    rows, cols = _expanded(layout.block, layout.row_starts[pattern], layout.cols, width, width, span.queries)
    inside = _overlaps(rows, width, span.queries) & _overlaps(cols, width, span.keys)
    if layout.is_causal:
        inside &= cols <= rows
    return rows[inside], cols[inside]


@dataclass(frozen=True)
class _Tiles:
    """Tiles of one pattern. For each own tile: the number of other tiles without a mask, and the number of all other
    tiles.
    """

    codes: Tensor
    first: int  # number of the first own tile
    full: Tensor
    total: Tensor


def tile_plan(layout: Layout, span: Span, size: TileSize, by_keys: bool, work: Work) -> TilePlan:
    """The plan for programs whose own tiles are queries, or keys if `by_keys`."""
    starts, others = layout.transposed() if by_keys else (layout.row_starts, layout.cols)
    lists = [_pattern_tiles(layout, starts[i], others, span, size, by_keys) for i in range(layout.num_patterns)]
    return _plan_of(lists, size, work)


def _plan_of(lists: Sequence[_Tiles], size: TileSize, work: Work) -> TilePlan:
    """The plan for the tiles of each pattern."""
    piece = _piece_length([int(tiles.total.sum()) for tiles in lists], work)
    items, cuts, slots = [], [], []
    offset = 0
    for tiles in lists:
        own_items, own_cuts, num_slots = _cut(tiles, piece, offset)
        items.append(own_items)
        cuts.append(own_cuts)
        slots.append(num_slots)
        offset += int(tiles.total.sum())
    heads = torch.tensor([[pattern, slots[pattern]] for pattern in work.heads], dtype=torch.int64)
    first_slot = heads[:, 1].cumsum(0) - heads[:, 1]
    num_slots = int(heads[:, 1].sum())
    tables = (
        torch.cat([*(tiles.codes for tiles in lists), torch.zeros(size.other, dtype=torch.int64)]),
        torch.cat(items),
        _offsets([len(x) for x in items]),
        torch.cat(cuts),
        _offsets([len(x) for x in cuts]),
        torch.stack([heads[:, 0], first_slot], dim=1),
    )
    return TilePlan(
        Tables(*(table.to(torch.int32) for table in tables)),
        size,
        max(len(x) for x in items),
        _num_long(items),
        max(len(x) for x in cuts),
        num_slots,
        any(bool(tiles.full.any()) for tiles in lists),
        any(bool((tiles.total > tiles.full).any()) for tiles in lists),
        float(_lengths(torch.cat(items)).mean()),
    )


def _num_long(items: Sequence[Tensor]) -> int:
    return max(int((own > LONG * own.mean()).sum()) for own in map(_lengths, items))


def _lengths(items: Tensor) -> Tensor:
    """Number of other tiles of each item."""
    return (items[:, 3] - items[:, 1]).double()


def _piece_length(totals: Sequence[int], work: Work) -> int:
    """Number of other tiles of a piece: an equal share of the total work, but not less than the minimum. Rows of up to
    two pieces are not cut.
    """
    total = sum(totals[pattern] for pattern in work.heads) * work.batch
    return max(-(-work.min_piece // work.group), -(-total // NUM_PIECES))


def _pattern_tiles(layout: Layout, starts: Tensor, others: Tensor, span: Span, size: TileSize, by_keys: bool) -> _Tiles:
    """The tiles of one pattern, from the other blocks of each own block."""
    own, other = _turned(span.queries, span.keys, by_keys)
    unit, sub = min(layout.block, size.other), min(layout.block, size.own)
    subs, units = _expanded(layout.block, starts, others, sub, unit, own)
    # Units outside of the call, and units that are wholly above the diagonal, are omitted.
    inside = _overlaps(subs, sub, own) & _overlaps(units, unit, other)
    if layout.is_causal:
        queries, keys = ((units + 1) * unit - 1, subs * sub) if by_keys else ((subs + 1) * sub - 1, units * unit)
        inside &= keys <= queries
    if layout.window is not None:
        inside &= _distances(_bounds(subs, sub), _bounds(units, unit))[0] < layout.window
    subs, units = subs[inside], units[inside]

    num_units, num_subs = -(-other[1] // unit), size.own // sub
    assert num_units < 2 ** (31 - BITS), f"{num_units} blocks of {unit} are too many"
    flat, place = torch.unique(subs // num_subs * num_units + units, return_inverse=True)
    bits = torch.zeros_like(flat).index_add_(0, place, 1 << (subs % num_subs))
    tile, unit_number = flat // num_units, flat % num_units

    is_full = bits == _wanted_bits(tile, sub, num_subs, own)
    is_full &= (unit_number * unit >= other[0]) & ((unit_number + 1) * unit <= other[1])
    if layout.is_causal:
        if by_keys:
            is_full &= (tile + 1).mul(size.own).clamp(max=own[1]) - 1 <= unit_number * unit
        else:
            is_full &= (unit_number + 1) * unit - 1 <= (tile * size.own).clamp(min=own[0])
    if layout.window is not None:
        is_full &= _distances(_bounds(tile, size.own), _bounds(unit_number, unit))[1] < layout.window
    first, stop = own[0] // size.own, -(-own[1] // size.own)
    return _packed(tile - first, unit_number, bits, is_full, stop - first, first, size.other // unit)


def _bounds(numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Positions of the first and of the last token of pieces of `width` tokens."""
    return numbers * width, (numbers + 1) * width - 1


def _distances(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Smallest and largest distance between a token of `a` and a token of `b`."""
    smallest = torch.maximum(a[0] - b[1], b[0] - a[1]).clamp(min=0)
    return smallest, torch.maximum(a[1] - b[0], b[1] - a[0])


def _expanded(
    block: int, starts: Tensor, others: Tensor, sub: int, unit: int, bounds: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Kept blocks as pairs of (sub-row, unit). Blocks are split if sub-rows or units are smaller.

    Only own blocks within the call are considered: a call with one query has one row, for any length of the layout.
    """
    first, stop = bounds[0] // block, -(-bounds[1] // block)
    starts = starts[first : stop + 1]
    own = torch.repeat_interleave(torch.arange(first, stop), starts.diff())
    other = others[int(starts[0]) : int(starts[-1])].long()
    rows, cols = block // sub, block // unit
    own = own[:, None, None] * rows + torch.arange(rows)[:, None]
    other = other[:, None, None] * cols + torch.arange(cols)
    shape = (len(other), rows, cols)
    return own.expand(shape).reshape(-1), other.expand(shape).reshape(-1)


def _overlaps(numbers: Tensor, width: int, bounds: tuple[int, int]) -> Tensor:
    return (numbers * width < bounds[1]) & ((numbers + 1) * width > bounds[0])


def _wanted_bits(tile: Tensor, sub: int, num_subs: int, bounds: tuple[int, int]) -> Tensor:
    """The bits of the sub-rows of a tile that contain tokens of the call."""
    numbers = tile[:, None] * num_subs + torch.arange(num_subs)
    return (_overlaps(numbers, sub, bounds).long() << torch.arange(num_subs)).sum(1)


def _packed(
    tile: Tensor, unit: Tensor, bits: Tensor, is_full: Tensor, num_tiles: int, first: int, per_tile: int
) -> _Tiles:
    """Units in the order of the kernel. Own tiles are counted from zero."""
    order = torch.argsort(tile * 2 + (~is_full).long(), stable=True)
    tile, unit, bits, is_full = tile[order], unit[order], bits[order], is_full[order]
    count = torch.bincount(tile, minlength=num_tiles)
    full = torch.bincount(tile[is_full], minlength=num_tiles) // per_tile
    total = -(-count // per_tile)
    codes = torch.zeros(int(total.sum()) * per_tile, dtype=torch.int64)
    rank = torch.arange(len(tile)) - (count.cumsum(0) - count)[tile]
    start = (total.cumsum(0) - total) * per_tile
    codes[start[tile] + rank] = unit << BITS | torch.where(is_full, torch.full_like(bits, _ALL), bits)
    return _Tiles(codes, first, full, total)


def _cut(tiles: _Tiles, piece: int, offset: int) -> tuple[Tensor, Tensor, int]:
    """Items, the longest first, and cut rows of one pattern. Its other tiles start at `offset`."""
    total, number = tiles.total, torch.arange(len(tiles.total))
    pieces = torch.where(total > 2 * piece, -(-total // piece), 1)
    own = torch.repeat_interleave(number, pieces)
    rank = torch.arange(len(own)) - torch.repeat_interleave(pieces.cumsum(0) - pieces, pieces)
    row_start = (total.cumsum(0) - total + offset)[own]
    start = row_start + rank * total[own] // pieces[own]
    stop = row_start + (rank + 1) * total[own] // pieces[own]
    mid = torch.minimum(torch.maximum(row_start + tiles.full[own], start), stop)

    is_cut = pieces > 1
    slots = torch.where(is_cut, pieces, 0)
    first_slot = slots.cumsum(0) - slots
    slot = torch.where(is_cut[own], first_slot[own] + rank, -1)
    items = torch.stack([own + tiles.first, start, mid, stop, slot], dim=1)
    items = items[torch.argsort(start - stop, stable=True)]
    cuts = torch.stack([number + tiles.first, first_slot, slots], dim=1)[is_cut]
    return items, cuts, int(slots.sum())


def _offsets(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)


@lru_cache(maxsize=CACHED_PLANS)
def device_cells(
    layout: Layout, span: Span, other: int, by_keys: bool, work: Work, device: torch.device
) -> TilePlan | None:
    """The result of `cell_plan` on a device. The most recent plans are cached."""
    plan = cell_plan(layout, span, other, by_keys, work)
    return None if plan is None else plan.to(device)


def cell_plan(layout: Layout, span: Span, other: int, by_keys: bool, work: Work) -> TilePlan | None:
    """The plan of the kernels for Hopper, with own tiles of 128 tokens in two halves. Returns None if too few of the
    computed scores would be kept.

    If blocks have at least `other` tokens and no tile needs a mask, the plan is that of `tile_plan`. Otherwise other
    tiles have 64 tokens, and each half has an int32 word for each other tile. The scores of one half and one other tile
    are a cell. The word is 0 if the cell is skipped, and WHOLE if all of it is kept. Otherwise the word has a bit for
    each square of 16 x 16 scores. Bit 4 * i + j is for the i-th 16 own tokens and the j-th 16 other tokens. In a causal
    layout, the word of a cell on the diagonal also has the bit DIAGONAL. The kernel then masks every score of this cell
    whose key comes after its query. The word of a cell at the end of the other tokens has the bit EDGE if the cell is
    not full. The words of cells at the ends of a window have some of four more bits, see `_windowed`.

    A cell is always computed as a whole, so these plans are fast only if kept blocks are adjacent. Tiles that both
    halves keep whole come first. All patterns get equally many items: some have an own tile after the last token.
    """
    plan = tile_plan(layout, span, TileSize(OWN, other), by_keys, work) if layout.block >= other else None
    if plan is None or plan.has_partial:
        found = [_cells_of_pattern(layout, pattern, span, by_keys) for pattern in range(layout.num_patterns)]
        num_kept = sum(float(_counts(words & WHOLE).sum()) for _, words in found)
        if num_kept < MIN_FILL * sum(len(words) for _, words in found) * _PER_CELL**2:
            return None
        own, others = _turned(span.queries, span.keys, by_keys)
        lists = [_cell_tiles(*cells_of, own[1], others[1]) for cells_of in found]
        plan = _plan_of([tiles for tiles, _ in lists], TileSize(OWN, CELL), work)
        halves = torch.cat([*(words for _, words in lists), torch.zeros(CELL, 2, dtype=torch.int64)])
        plan = replace(plan, words=halves.to(torch.int32))
    if layout.num_patterns == 1:
        return plan
    own_stop = _turned(span.queries, span.keys, by_keys)[0][1]
    rows, starts = plan.tables.items, plan.tables.item_starts.tolist()
    items = torch.zeros(layout.num_patterns, plan.max_items, rows.shape[1], dtype=torch.int32)
    items[:, :, 0] = -(-own_stop // OWN)
    items[:, :, -1] = -1
    for pattern, (start, stop) in enumerate(itertools.pairwise(starts)):
        items[pattern, : stop - start] = rows[start:stop]
    return replace(plan, tables=plan.tables._replace(items=items.flatten(0, 1)))


def _turned(queries: T, keys: T, by_keys: bool) -> tuple[T, T]:
    """(queries, keys) as (own, other). The function is its own inverse."""
    return (keys, queries) if by_keys else (queries, keys)


def _cells_of_pattern(layout: Layout, pattern: int, span: Span, by_keys: bool) -> tuple[Tensor, Tensor]:
    """Positions own * (cells of other tokens) + other of all cells with scores, in ascending order, and their words."""
    width = min(layout.block, CELL)
    own, other = _turned(*cells(layout, pattern, span, width), by_keys)
    other_stop = _turned(span.queries, span.keys, by_keys)[1][1]
    num_other = -(-other_stop // CELL)
    per_cell, subs = CELL // width, width // SUB
    square = sum(1 << (row * _PER_CELL + col) for row in range(subs) for col in range(subs))
    shift = (own % per_cell) * (subs * _PER_CELL) + (other % per_cell) * subs
    places, inverse = torch.unique(own // per_cell * num_other + other // per_cell, return_inverse=True)
    words = torch.zeros_like(places).index_add_(0, inverse, torch.full_like(shift, square) << shift)
    if layout.is_causal:
        is_diagonal = places // num_other == places % num_other
        words = torch.where(is_diagonal, words & _below(by_keys) | DIAGONAL, words)
    if layout.window is not None:
        words = _windowed(words, places // num_other - places % num_other, layout.window)
        places, words = places[words != 0], words[words != 0]
    if other_stop % CELL:
        words = torch.where(places % num_other == num_other - 1, words | EDGE, words)
    return places, words


def _windowed(words: Tensor, distance: Tensor, window: int) -> Tensor:
    """Words with the bits of cells through which an end of the window passes. `distance` counts cells, own - other.

    A score at row i and column j of a cell is kept if 64 * distance + i - j is less than the window, and so is its
    negative. Words are 0 for cells without such scores. The four bits are: i - j < r, i - j < r - 64, j - i < r, and
    j - i < r - 64, with r = window % 64.
    """
    last = window // CELL
    for bit, far in enumerate((distance - last, distance - last - 1, -distance - last, -distance - last - 1)):
        words = torch.where(far == 0, words | WINDOW << bit, words)
    least = (distance.abs() - 1).clamp(min=-1) * CELL + 1  # the smallest distance of a score of a cell
    return torch.where((least >= window) & (distance != 0), 0, words)


def _cell_tiles(places: Tensor, words: Tensor, own_stop: int, other_stop: int) -> tuple[_Tiles, Tensor]:
    """The tiles of a pattern from its cells, and for each code of them the words of both halves."""
    num_other = -(-other_stop // CELL)
    halves = places // num_other
    flat, inverse = torch.unique(halves // 2 * num_other + places % num_other, return_inverse=True)
    found = torch.zeros(len(flat), 2, dtype=torch.int64)
    found[inverse, halves % 2] = words
    tile, other = flat // num_other, flat % num_other
    has_second = (tile * OWN + CELL) < own_stop  # the second half of the last tile may have no tokens
    is_full = (found[:, 0] == WHOLE) & ((found[:, 1] == WHOLE) | ~has_second)
    bits = (found != 0).long() @ torch.tensor([1, 2])
    tiles = _packed(tile, other, bits, is_full, -(-own_stop // OWN), 0, 1)
    order = torch.argsort(tile * 2 + (~is_full).long(), stable=True)  # the order of codes
    return tiles, found[order]


def _below(by_keys: bool) -> int:
    """A word with the bits of all squares of a diagonal cell in which at least one query sees a key."""
    pairs = ((own, other) for own in range(_PER_CELL) for other in range(_PER_CELL))
    kept = [own * _PER_CELL + other for own, other in pairs if (own <= other if by_keys else other <= own)]
    return sum(1 << bit for bit in kept)


def _counts(words: Tensor) -> Tensor:
    """Number of bits that are set in each word."""
    return sum((((words >> bit) & 1) for bit in range(_PER_CELL**2)), torch.zeros_like(words))
