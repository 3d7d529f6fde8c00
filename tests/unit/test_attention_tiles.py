# SPDX-License-Identifier: Apache-2.0
"""Tile plans, read back: every score that a layout keeps is visited once, and only those, in any tile size."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import in_pairs
from torch import Tensor

from twinflow.attention import BigBirdSparsityConfig, LocalSlidingWindowSparsityConfig
from twinflow.attention.layout import Layout, from_dense
from twinflow.attention.tiles import BITS, NUM_PIECES, Span, TilePlan, TileSize, Work, cells, device_plan, tile_plan
from twinflow.attention.tuning import TUNING, WITH_DESCRIPTORS, tunings_for

CPU = torch.device("cpu")


def kept_tokens(layout: Layout, pattern: int, span: Span) -> Tensor:
    """Which scores [queries, keys] of a call a pattern keeps; the truth."""
    queries, keys = torch.arange(*span.queries)[:, None], torch.arange(*span.keys)[None]
    head = layout.head_to_pattern.index(pattern)
    keep = layout.to_dense()[head][queries // layout.block, keys // layout.block]
    return keep & (keys <= queries) if layout.is_causal else keep


def visited_tokens(plan: TilePlan, layout: Layout, pattern: int, span: Span, size: TileSize, by_keys: bool) -> Tensor:
    """How often each score [queries, keys] is visited, as a kernel reads the plan."""
    own_span, other_span = (span.keys, span.queries) if by_keys else (span.queries, span.keys)
    sub, unit = min(layout.block, size.own), min(layout.block, size.other)
    per_tile = size.other // unit
    counts = torch.zeros(own_span[1] - own_span[0], other_span[1] - other_span[0], dtype=torch.int64)
    for item in range(int(plan.tables.item_starts[pattern]), int(plan.tables.item_starts[pattern + 1])):
        tile, start, mid, stop, _ = plan.tables.items[item].tolist()
        assert start <= mid <= stop
        own = torch.arange(tile * size.own, (tile + 1) * size.own)
        for number in range(start, stop):
            codes = plan.tables.codes[number * per_tile : (number + 1) * per_tile].long().repeat_interleave(unit)
            other = (codes >> BITS) * unit + torch.arange(size.other) % unit
            has_own = (own >= own_span[0]) & (own < own_span[1])
            has_other = (other >= other_span[0]) & (other < other_span[1])
            if number < mid:
                assert bool(has_other.all())  # kernels read these without a mask
                keep = has_own[:, None] & has_other
            else:
                bits = codes[None] >> ((own - tile * size.own) // sub)[:, None] & 1
                keep = (bits != 0) & has_own[:, None] & has_other
                if layout.is_causal:
                    keep &= (own[:, None] <= other) if by_keys else (other <= own[:, None])
            rows = (own - own_span[0]).clamp(0, len(counts) - 1)[:, None].expand_as(keep)
            cols = (other - other_span[0]).clamp(0, counts.shape[1] - 1).expand_as(keep)
            counts.index_put_((rows[keep], cols[keep]), torch.ones(int(keep.sum()), dtype=torch.int64), accumulate=True)
    return counts.T if by_keys else counts


SIZES = (TileSize(16, 16), TileSize(32, 64), TileSize(64, 32), TileSize(128, 64), TileSize(128, 128))


@pytest.mark.parametrize(("block", "is_causal", "by_keys"), in_pairs([16, 32, 64, 128], [False, True], [False, True]))
def test_each_kept_score_is_visited_once(block: int, is_causal: bool, by_keys: bool) -> None:
    generator = torch.Generator().manual_seed(block)
    spans = [Span((0, 256), (0, 256)), Span((0, 211), (0, 137)), Span((75, 250), (0, 250)), Span((249, 250), (0, 250))]
    for number, (size, span) in enumerate(itertools.product(SIZES, spans)):
        grid = torch.rand(2, 256 // block, 256 // block, generator=generator) < 0.4
        grid[1] |= number % 3 == 0  # all of it
        layout = from_dense(grid, block, is_causal=is_causal)
        work = Work(layout.head_to_pattern, min_piece=(1, 1000)[number % 2])
        plan = tile_plan(layout, span, size, by_keys, work)
        for pattern in range(layout.num_patterns):
            found = visited_tokens(plan, layout, pattern, span, size, by_keys)
            assert torch.equal(found, kept_tokens(layout, pattern, span).long())
        check_items(plan, span.keys if by_keys else span.queries, size)


def check_items(plan: TilePlan, own: tuple[int, int], size: TileSize) -> None:
    """Every own tile is there, longest items come first, and slots are what cuts say."""
    wanted = list(range(own[0] // size.own, -(-own[1] // size.own)))
    for pattern in range(len(plan.tables.item_starts) - 1):
        items = plan.tables.items[plan.tables.item_starts[pattern] : plan.tables.item_starts[pattern + 1]]
        cuts = plan.tables.cuts[plan.tables.cut_starts[pattern] : plan.tables.cut_starts[pattern + 1]]
        assert sorted(set(items[:, 0].tolist())) == wanted
        lengths = items[:, 3] - items[:, 1]
        assert torch.equal(lengths, lengths.sort(descending=True).values)
        slots = {(tile, first + i) for tile, first, count in cuts.tolist() for i in range(count)}
        assert {(item[0], item[4]) for item in items.tolist() if item[4] >= 0} == slots
        whole = [item[0] for item in items.tolist() if item[4] < 0]
        assert sorted(whole + cuts[:, 0].tolist()) == wanted


def test_whole_tiles_need_no_mask() -> None:
    """Of a layout whose blocks are tiles or more, in whole tiles; one partial unit is enough to need one."""
    span = Span((0, 512), (0, 512))
    grid = torch.ones(1, 4, 4, dtype=torch.bool)
    work = Work((0,))
    plan = tile_plan(from_dense(grid, 128), span, TileSize(128, 64), False, work)
    assert (plan.has_full, plan.has_partial) == (True, False)
    short = tile_plan(from_dense(grid, 128), Span((0, 512), (0, 511)), TileSize(128, 64), False, work)
    assert (short.has_full, short.has_partial) == (True, True)
    causal = tile_plan(from_dense(grid, 128, is_causal=True), span, TileSize(128, 64), True, work)
    assert (causal.has_full, causal.has_partial) == (True, True)
    alternating = from_dense((torch.arange(32)[:, None] + torch.arange(32)) % 2 == 0, 16)
    checks = tile_plan(alternating, span, TileSize(128, 64), False, work)
    assert (checks.has_full, checks.has_partial) == (False, True)


def test_scattered_small_blocks_fill_tiles() -> None:
    """Columns that few rows keep are gathered: 4 blocks of 16 make a tile of 64 wherever they lie."""
    grid = torch.zeros(1, 8, 64, dtype=torch.bool)
    grid[:, :, ::16] = True
    plan = tile_plan(from_dense(grid, 16), Span((0, 128), (0, 1024)), TileSize(128, 64), False, Work((0,)))
    assert plan.tables.items.tolist() == [[0, 0, 1, 1, -1]]
    assert (plan.tables.codes[:4] >> BITS).tolist() == [0, 16, 32, 48]


def test_long_rows_are_cut_evenly() -> None:
    """A row of global tokens is no longer than an even share of all work, or the least that is worth a piece."""
    num_tokens = 131_072
    layout = BigBirdSparsityConfig(12, 128).layout(num_tokens)
    span, size = Span((0, num_tokens), (0, num_tokens)), TileSize(128, 64)
    for by_keys in (False, True):
        plan = tile_plan(layout, span, size, by_keys, Work(layout.head_to_pattern))
        lengths = plan.tables.items[:, 3] - plan.tables.items[:, 1]
        total = int(lengths.sum()) * 12
        assert int(lengths.max()) <= 2 * max(16, -(-total // NUM_PIECES))
        assert plan.num_long == int((lengths > 1.5 * lengths.double().mean()).sum())
        assert 0 < plan.num_long < len(lengths) / 4
        assert plan.num_slots == 12 * int((plan.tables.items[:, 4] >= 0).sum())


def test_a_larger_batch_is_cut_less() -> None:
    layout = BigBirdSparsityConfig(2, 128).layout(32_768)
    span, size = Span((0, 32_768), (0, 32_768)), TileSize(128, 64)
    slots = [tile_plan(layout, span, size, False, Work((0, 0), batch)).num_slots for batch in (1, 64, 1024)]
    assert slots[0] > slots[1] > slots[2]


def test_cells_are_the_kept_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    for block, width, is_causal in ((16, 16, False), (64, 32, True), (128, 64, True)):
        layout = from_dense(torch.rand(1, 256 // block, 256 // block, generator=generator) < 0.5, block, is_causal)
        span = Span((75, 250), (0, 250))
        rows, cols = cells(layout, 0, span, width)
        grid = torch.zeros(256 // width, 256 // width, dtype=torch.bool)
        grid[rows, cols] = True
        keep = torch.zeros(256, 256, dtype=torch.bool)
        keep[75:250, :250] = kept_tokens(layout, 0, span)
        squares = keep.reshape(256 // width, width, 256 // width, width).any(3).any(1)
        assert torch.equal(grid | squares, grid)  # none is missing
        assert len(rows) == int(grid.sum())  # none is there twice
        assert int((grid & ~squares).sum()) == 0


def test_plans_are_kept() -> None:
    layout = from_dense(torch.ones(1, 2, 2, dtype=torch.bool), 64)
    args = (Span((0, 128), (0, 128)), TileSize(64, 64), False, Work((0,)), CPU)
    again = from_dense(torch.ones(1, 2, 2, dtype=torch.bool), 64)
    assert device_plan(layout, *args) is device_plan(again, *args)


@pytest.mark.parametrize(
    ("block", "heads", "dim"), [(128, 16, 128), pytest.param(16, 12, 64, marks=pytest.mark.matrix)]
)
def test_a_million_tokens_need_little_besides_their_tensors(block: int, heads: int, dim: int) -> None:
    """Plans, pieces of cut rows, log-sum-exp and delta of forward and backward together: less than 4 GB."""
    num_tokens = 2**20
    span = Span((0, num_tokens), (0, num_tokens))
    layouts = [
        BigBirdSparsityConfig(heads, block).layout(num_tokens),
        LocalSlidingWindowSparsityConfig(heads, block, num_sliding_window_blocks=2048 // block + 1).layout(num_tokens),
    ]
    tunings = tunings_for(dim, torch.bfloat16)
    for layout in layouts:
        num_bytes = 2 * 4 * heads * num_tokens  # log-sum-exp and delta
        kernels = ((tunings.forward, False, 1), (tunings.queries, False, 1), (tunings.keys, True, 2))
        for tuning, by_keys, buffers in kernels:
            plan = tile_plan(layout, span, tuning.size, by_keys, Work(layout.head_to_pattern))
            num_bytes += plan.num_bytes + plan.num_slots * tuning.tile_rows * dim * 4 * buffers
        assert num_bytes < 4e9 / 8


def test_scratch_is_bounded_whatever_is_attended() -> None:
    """Dense rows are cut into no more than about two pieces for each of NUM_PIECES, whatever the batch."""
    layout = from_dense(torch.ones(1, 256, 256, dtype=torch.bool), 128)
    span, size = Span((0, 32_768), (0, 32_768)), TileSize(128, 64)
    for batch in (1, 4, 64):
        plan = tile_plan(layout, span, size, False, Work((0,), batch))
        assert plan.num_slots * batch <= 2 * NUM_PIECES


def test_tiles_of_the_table_fit_the_codes() -> None:
    for tunings in (*TUNING.values(), *WITH_DESCRIPTORS.values()):
        for tuning in (tunings.forward, tunings.queries, tunings.keys):
            assert tuning.tile_rows // 16 <= BITS
            assert tuning.tile_rows % 16 == 0
            assert tuning.tile_cols >= 16
