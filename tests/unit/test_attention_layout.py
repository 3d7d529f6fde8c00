# SPDX-License-Identifier: Apache-2.0
"""Layouts keep exactly the blocks of the grid, list or function that they are made from, in memory of what is kept."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinflow.attention import Layout, dense_attention, from_csr, from_dense, from_flat, from_function, from_rows


def grid_of(*rows: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


SMALL = grid_of("x..x", "....", ".xx.")


@st.composite
def grids(draw: st.DrawFn) -> Tensor:
    """Grids of heads, with empty rows and columns and heads that are alike."""
    heads, rows, cols = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    grid = torch.rand(heads, rows, cols, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    if draw(st.booleans()):
        grid[-1] = grid[0]
    return grid


def triangle(grid: Tensor) -> Tensor:
    return grid & torch.ones(grid.shape[-2:], dtype=torch.bool).tril()


def check_parts(layout: Layout, grid: Tensor) -> None:
    """The stored tensors, one by one, against the grid."""
    assert layout.row_starts.dtype == torch.int64
    assert layout.cols.dtype == torch.int32
    for head, pattern in enumerate(layout.head_to_pattern):
        for row in range(grid.shape[1]):
            start, stop = layout.row_starts[pattern, row : row + 2].tolist()
            assert layout.cols[start:stop].tolist() == grid[head, row].nonzero()[:, 0].tolist()
    assert layout.num_patterns == len({tuple(head.reshape(-1).tolist()) for head in grid})
    assert layout.density == pytest.approx(grid.double().mean().item())


def test_a_small_grid() -> None:
    layout = from_dense(SMALL, 16)
    assert layout.row_starts.tolist() == [[0, 2, 2, 4]]
    assert layout.cols.tolist() == [0, 3, 1, 2]
    assert layout.rows_of(0).tolist() == [0, 0, 2, 2]
    assert layout.head_to_pattern == (0,)
    assert layout.num_kept == 4
    col_starts, rows = layout.transposed()
    assert col_starts.tolist() == [[0, 1, 2, 3, 4]]
    assert rows.tolist() == [0, 2, 2, 0]


def test_causal_drops_blocks_above_the_diagonal() -> None:
    layout = from_dense(SMALL, 32, is_causal=True)
    assert torch.equal(layout.to_dense()[0], grid_of("x...", "....", ".xx."))
    assert layout.is_causal


def test_heads_that_are_alike_share_a_pattern() -> None:
    other = grid_of("....", "x...", "...x")
    layout = from_dense(torch.stack([SMALL, other, SMALL, other]), 16)
    assert layout.head_to_pattern == (0, 1, 0, 1)
    assert layout.num_patterns == 2
    assert layout.row_starts.tolist() == [[0, 2, 2, 4], [4, 4, 5, 6]]
    assert from_dense(SMALL, 16, num_heads=5).head_to_pattern == (0,) * 5


def test_causal_heads_that_become_alike_share_a_pattern() -> None:
    layout = from_dense(torch.stack([torch.ones(3, 3), torch.ones(3, 3).tril()]).bool(), 16, is_causal=True)
    assert layout.head_to_pattern == (0, 0)


@settings(max_examples=60, deadline=None)
@given(grids(), st.booleans())
def test_all_constructors_agree(grid: Tensor, is_causal: bool) -> None:
    truth = triangle(grid) if is_causal else grid
    layout = from_dense(grid, 16, is_causal)
    assert torch.equal(layout.to_dense(), truth)
    check_parts(layout, truth)
    heads, num_rows, num_cols = grid.shape

    lists = [[row.nonzero()[:, 0].flip(0) for row in head] for head in grid]
    assert from_rows(lists, num_cols, 16, is_causal=is_causal) == layout

    counts = grid.sum(dim=2).reshape(-1)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    starts = torch.stack([ends[head * num_rows : (head + 1) * num_rows + 1] for head in range(heads)])
    cols = grid.nonzero()[:, 2]
    assert from_csr(starts, cols, num_cols, 16, is_causal=is_causal) == layout

    tests = [lambda row, col, head=head: grid[head][row, col] for head in range(heads)]
    assert from_function(tests, num_rows, num_cols, 16, is_causal=is_causal) == layout

    flats = [head.reshape(-1).nonzero()[:, 0].repeat(2) for head in grid]
    assert from_flat(flats, num_rows, num_cols, 16, is_causal=is_causal) == layout


@settings(max_examples=40, deadline=None)
@given(grids(), st.data())
def test_transposed_and_heads_of_a_rank(grid: Tensor, data: st.DataObject) -> None:
    layout = from_dense(grid, 64)
    col_starts, rows = layout.transposed()
    flipped = from_dense(grid.transpose(1, 2), 64)
    assert torch.equal(col_starts, flipped.row_starts)
    assert torch.equal(rows, flipped.cols)
    start = data.draw(st.integers(0, grid.shape[0] - 1))
    stop = data.draw(st.integers(start + 1, grid.shape[0]))
    part = layout.for_heads(start, stop)
    assert torch.equal(part.to_dense(), grid[start:stop])
    assert part == from_dense(grid[start:stop], 64)


def test_a_function_is_asked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinflow.attention.layout.CHUNK_PAIRS", 20)
    asked: list[int] = []

    def keeps(row: Tensor, col: Tensor) -> Tensor:
        asked.append(torch.broadcast_shapes(row.shape, col.shape).numel())
        return (row - col).abs() <= 1

    layout = from_function(keeps, 7, 9, 16, num_heads=2)
    assert torch.equal(layout.to_dense(), ((torch.arange(7)[:, None] - torch.arange(9)).abs() <= 1).expand(2, 7, 9))
    assert max(asked) <= 20
    assert sum(asked) == 63


def test_keys_tell_layouts_apart() -> None:
    layouts = [
        from_dense(SMALL, 16),
        from_dense(SMALL, 32),
        from_dense(SMALL, 16, num_heads=2),
        from_dense(SMALL, 16, is_causal=True),
        from_dense(~SMALL, 16),
        from_dense(torch.zeros_like(SMALL), 16),
        from_dense(torch.zeros(4, 4).bool(), 16),
        from_dense(torch.ones(2, 3, 4).bool(), 16),
    ]
    assert len({layout.key() for layout in layouts}) == len(layouts)
    assert from_dense(SMALL, 16) in set(layouts)
    assert from_dense(SMALL, 16) != SMALL


def test_memory_is_that_of_what_is_kept() -> None:
    """A window over a million tokens, where a grid would have 2**32 entries a head."""
    num_rows, width = 2**16, 8
    rows = torch.arange(num_rows)[:, None]
    cols = (rows + torch.arange(width)).clamp(max=num_rows - 1)
    layout = from_flat([(rows * num_rows + cols).reshape(-1)], num_rows, num_rows, 16, head_to_pattern=[0] * 12)
    assert layout.num_kept == num_rows * width - width * (width - 1) // 2
    assert layout.cols.nbytes + layout.row_starts.nbytes <= 4 * num_rows * width + 8 * (num_rows + 1)
    shape = r"12 heads x 65536 rows x 65536 columns\) is 51539607552, but must be at most 268435456. Call rows_of"
    with pytest.raises(ValueError, match=shape):
        layout.to_dense()
    q = torch.zeros(1, 12, 16, 16)
    with pytest.raises(ValueError, match="Call block_attention"):
        dense_attention(q, q, q, layout)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: from_dense(SMALL, 24), "block is 24, but must be one of 16, 32, 64, 128"),
        (lambda: from_dense(SMALL.float(), 16), "grid.dtype"),
        (lambda: from_dense(SMALL[0], 16), "grid.shape is"),
        (
            lambda: from_dense(SMALL.expand(2, 3, 4), 16, num_heads=3),
            "grid.shape[0] is 2, but must be 1 or num_heads, which is 3",
        ),
        (lambda: from_dense(torch.zeros(1, 0, 3).bool(), 16), "at least (1, 1"),
        (
            lambda: from_flat([torch.tensor([12])], 3, 4, 16),
            "block index (row * num_cols + col) is 12, but must be a number from 0 to 11",
        ),
        (lambda: from_flat([torch.tensor([-1])], 3, 4, 16), "block index (row * num_cols + col) is -1"),
        (lambda: from_flat([torch.tensor([1])], 3, 4, 16, head_to_pattern=[0, 1]), "head_to_pattern"),
        (lambda: from_flat([torch.tensor([1])], 3, 4, 16, head_to_pattern=[]), "head_to_pattern"),
        (
            lambda: from_csr(torch.tensor([0, 1, 2]), torch.tensor([0, 4]), 4, 16),
            "An entry of cols is 4, but must be a number from 0 to 3",
        ),
        (lambda: from_csr(torch.tensor([0, 2, 1]), torch.tensor([0]), 4, 16), "row_starts"),
        (lambda: from_csr(torch.tensor([0, 1]), torch.tensor([0, 1]), 4, 16), "row_starts"),
        (lambda: from_csr(torch.tensor([[0, 1], [0, 2]]), torch.tensor([0, 1]), 4, 16), "one pattern after the other"),
        (lambda: from_rows([[torch.tensor([0])], []], 4, 16), "have the lengths [0, 1], but must have one length"),
        (lambda: from_function(lambda row, col: row + col, 2, 2, 16), "torch.bool"),
        (lambda: from_dense(SMALL, 16).for_heads(0, 2), "heads"),
    ],
)
def test_mistakes_are_named(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=re.escape(words)):
        make()
