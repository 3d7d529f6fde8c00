"""Plans of the kernels for Hopper. As in tiles.py, a program computes the results of one tile of tokens, its own tile,
and iterates over other tiles. An own tile has 128 tokens in two halves. The other tiles have 64 or 128 tokens each.

If blocks have 128 tokens and the layout is not causal, both halves keep whole blocks, and the plan of tiles.py is
sufficient. Otherwise the other tiles have 64 tokens, and each half has an int32 word for each other tile. The scores of
one half and one other tile are a cell. The word is 0 if the cell is skipped, and WHOLE if all of it is kept. Otherwise
the word has a bit for each square of 16 x 16 scores. Bit 4 * i + j is for the i-th 16 own tokens and the j-th 16 other
tokens. In a causal layout, the word of a cell on the diagonal also has the bit DIAGONAL. The kernel then masks every
score of this cell whose key comes after its query.

A cell is always computed as a whole, so these plans are fast only if kept blocks are adjacent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from twinflow.attention.layout import Layout, from_flat
from twinflow.attention.tiles import BITS, CACHED_PLANS, Span, TilePlan, TileSize, Work, cells, tile_plan

OWN = 128
CELL = 64
SUB = 16  # tokens per bit of a word, on each side of a cell
WHOLE = 0xFFFF
DIAGONAL = 1 << 16
MIN_FILL = 0.6  # smallest kept share of computed cells; below it, kernels that gather small blocks are faster

_PER_CELL = CELL // SUB

T = TypeVar("T")


@dataclass(frozen=True)
class CellPlan:
    """The work of all programs of one kernel."""

    tiles: TilePlan
    size: TileSize
    words: Tensor | None  # int32 [codes, 2 halves]; None if every tile is whole


@lru_cache(maxsize=CACHED_PLANS)
def device_cells(
    layout: Layout, span: Span, other: int, by_keys: bool, work: Work, device: torch.device
) -> CellPlan | None:
    """The result of `cell_plan` on a device. The most recent plans are cached."""
    plan = cell_plan(layout, span, other, by_keys, work)
    if plan is None:
        return None
    words = plan.words.to(device) if plan.words is not None else None
    return replace(plan, tiles=plan.tiles.to(device), words=words)


def cell_plan(layout: Layout, span: Span, other: int, by_keys: bool, work: Work) -> CellPlan | None:
    """The plan of a layout with one pattern, for whole own tiles. Returns None if too few of the computed scores would
    be kept.

    `other`: the number of tokens of an other tile, used if all tiles are whole.
    """
    assert layout.num_patterns == 1
    if layout.block >= OWN and not layout.is_causal:
        size = TileSize(OWN, other)
        return CellPlan(tile_plan(layout, span, size, by_keys, work), size, None)
    num_own, num_other = (-(-stop // CELL) for _, stop in _turned(span.queries, span.keys, by_keys))
    places, words = _words(layout, span, by_keys, num_other)
    if float(_counts(words & WHOLE).sum()) < MIN_FILL * len(words) * _PER_CELL**2:
        return None
    own, others = places // num_other, places % num_other
    rows, cols = _turned(own, others, by_keys)
    num_rows, num_cols = _turned(num_own, num_other, by_keys)
    heads = [0] * layout.num_heads
    coarse = from_flat([rows * num_cols + cols], num_rows, num_cols, CELL, head_to_pattern=heads)
    size = TileSize(OWN, CELL)
    tiles = tile_plan(coarse, span, size, by_keys, work)
    return CellPlan(tiles, size, _halves(tiles, places, words, num_other))


def _turned(queries: T, keys: T, by_keys: bool) -> tuple[T, T]:
    """(queries, keys) as (own, other). The function is its own inverse."""
    return (keys, queries) if by_keys else (queries, keys)


def _words(layout: Layout, span: Span, by_keys: bool, num_other: int) -> tuple[Tensor, Tensor]:
    """Positions own * num_other + other of all cells with scores, in ascending order, and their words."""
    width = min(layout.block, CELL)
    own, other = _turned(*cells(layout, 0, span, width), by_keys)
    per_cell, subs = CELL // width, width // SUB
    square = sum(1 << (row * _PER_CELL + col) for row in range(subs) for col in range(subs))
    shift = (own % per_cell) * (subs * _PER_CELL) + (other % per_cell) * subs
    places, inverse = torch.unique(own // per_cell * num_other + other // per_cell, return_inverse=True)
    words = torch.zeros_like(places).index_add_(0, inverse, torch.full_like(shift, square) << shift)
    if layout.is_causal:
        is_diagonal = places // num_other == places % num_other
        words = torch.where(is_diagonal, words & _below(by_keys) | DIAGONAL, words)
    return places, words


def _below(by_keys: bool) -> int:
    """A word with the bits of all squares of a diagonal cell in which at least one query sees a key."""
    pairs = ((own, other) for own in range(_PER_CELL) for other in range(_PER_CELL))
    kept = [own * _PER_CELL + other for own, other in pairs if (own <= other if by_keys else other <= own)]
    return sum(1 << bit for bit in kept)


def _counts(words: Tensor) -> Tensor:
    """Number of bits that are set in each word."""
    return sum((((words >> bit) & 1) for bit in range(_PER_CELL**2)), torch.zeros_like(words))


def _halves(tiles: TilePlan, places: Tensor, words: Tensor, num_other: int) -> Tensor:
    """For each code of a plan: the words of both halves of its own tile."""
    items = tiles.tables.items.long()
    items = items[torch.argsort(items[:, 1], stable=True)]
    own = torch.repeat_interleave(items[:, 0], items[:, 3] - items[:, 1])
    other = tiles.tables.codes[: len(own)].long() >> BITS
    found = torch.zeros(len(tiles.tables.codes), 2, dtype=torch.int32)
    for half in range(2):
        wanted = (own * 2 + half) * num_other + other
        at = torch.searchsorted(places, wanted).clamp(max=len(places) - 1)
        found[: len(own), half] = torch.where(places[at] == wanted, words[at], 0).to(torch.int32)
    return found
