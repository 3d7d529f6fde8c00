# SPDX-License-Identifier: Apache-2.0
"""The patterns keep the blocks that their rules say: drawn by hand, and asked block by block at many sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    pattern_from_config,
)
from twinflow.attention.patterns import _random

DRAWN: list[tuple[SparsityConfig, list[str]]] = [
    (DenseSparsityConfig(1), ["xxx"] * 3),
    (
        FixedSparsityConfig(1, num_local_blocks=3),  # windows 012 345 6; global 2, 5, 6
        ["xxx..xx", "xxx..xx", "xxx..xx", "..xxxxx", "..xxxxx", "..xxxxx", "..x..xx"],
    ),
    (
        FixedSparsityConfig(1, num_local_blocks=3, attention="unidirectional"),
        ["x......", "xx.....", "xxx....", "..xx...", "..xxx..", "..xxxx.", "..x..xx"],
    ),
    (
        FixedSparsityConfig(1, num_local_blocks=2, horizontal_global_attention=True),
        ["xx.x", "xxxx", ".xxx", "xxxx"],
    ),
    (
        FixedSparsityConfig(1, num_local_blocks=4, num_global_blocks=2),  # the short window has its last two
        ["xxxxxx", "xxxxxx", "xxxxxx", "xxxxxx", "..xxxx", "..xxxx"],
    ),
    (
        VariableSparsityConfig(1, local_window_blocks=[1, 2], global_block_indices=[3]),  # windows 0 12 34 5
        ["x..x..", ".xxx..", ".xxx..", "...xx.", "...xx.", "...x.x"],
    ),
    (
        VariableSparsityConfig(1, local_window_blocks=[2], global_block_indices=[1], attention="unidirectional"),
        ["x....", "xx...", ".xx..", ".xxx.", ".x..x"],
    ),
    (
        VariableSparsityConfig(
            1,
            local_window_blocks=[1],
            global_block_indices=[0, 3],
            global_block_end_indices=[2, 9],
            horizontal_global_attention=True,
        ),
        ["xxxxx", "xxxxx", "xxxxx", "xxxxx", "xxxxx"],
    ),
    (
        VariableSparsityConfig(
            1, local_window_blocks=[1], global_block_indices=[2, 7], global_block_end_indices=[3, 9]
        ),
        ["x.x..", ".xx..", "..x..", "..xx.", "..x.x"],
    ),
    (
        BigBirdSparsityConfig(1, num_random_blocks=0),
        ["xxxxx", "xxx..", "xxxx.", "x.xxx", "x..xx"],
    ),
    (
        BigBirdSparsityConfig(1, num_random_blocks=0, num_global_blocks=2, attention="unidirectional"),
        ["x....", "xx...", "xxx..", "xxxx.", "xx.xx"],
    ),
    (
        BSLongformerSparsityConfig(1, global_block_indices=[2], num_sliding_window_blocks=2),
        ["xxx..", "xxx..", "xxxxx", "..xxx", "..xxx"],
    ),
    (
        BSLongformerSparsityConfig(1, global_block_indices=[2, 99], num_sliding_window_blocks=1),
        ["x.x..", ".xx..", "xxxxx", "..xx.", "..x.x"],
    ),
    (
        BSLongformerSparsityConfig(
            1, global_block_indices=[0], global_block_end_indices=[2], attention="unidirectional"
        ),
        ["x....", "xx...", "xxx..", "xxxx.", "xx.xx"],
    ),
    (LocalSlidingWindowSparsityConfig(1), ["x...", "xx..", ".xx.", "..xx"]),
    (LocalSlidingWindowSparsityConfig(1, 16, 5, "bidirectional"), ["xxx..", "xxxx.", "xxxxx", ".xxxx", "..xxx"]),
]


@pytest.mark.parametrize(("pattern", "drawn"), DRAWN, ids=[str(i) for i in range(len(DRAWN))])
def test_drawn_by_hand(pattern: SparsityConfig, drawn: list[str]) -> None:
    grid = pattern.make_layout(len(drawn) * pattern.block)
    assert ["".join(".x"[mark] for mark in row) for row in grid[0].tolist()] == drawn
    assert grid.dtype == torch.int64


def fixed_by_rule(pattern: FixedSparsityConfig, num_blocks: int) -> Tensor:
    """One block at a time, from the description of the pattern."""
    width, num_global = pattern.num_local_blocks, pattern.num_global_blocks
    grid = torch.zeros(pattern.num_heads, num_blocks, num_blocks, dtype=torch.int64)
    for head in range(pattern.num_heads):
        offset = width - (1 + head % pattern.num_different_global_patterns) * num_global
        chosen = set()
        for window in range(0, num_blocks, width):
            is_short = window + width > num_blocks
            start = min(window + offset, num_blocks - num_global) if is_short else window + offset
            chosen |= set(range(max(start, 0), start + num_global))
        for row in range(num_blocks):
            for col in range(num_blocks):
                kept = row // width == col // width or col in chosen
                kept |= pattern.horizontal_global_attention and row in chosen
                grid[head, row, col] = kept and (col <= row or not pattern.is_causal)
    return grid


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize(
    ("width", "num_global", "num_different"), [(4, 1, 1), (4, 2, 2), (4, 1, 4), (6, 2, 3), (1, 1, 1)]
)
def test_fixed_at_all_lengths(attention: str, width: int, num_global: int, num_different: int) -> None:
    for is_horizontal in {False, attention == "bidirectional"}:
        pattern = FixedSparsityConfig(4, 32, True, width, num_global, attention, is_horizontal, num_different)
        for num_blocks in (1, 2, 3, 4, 5, 6, 7, 8, 11, 13):
            assert torch.equal(pattern.make_layout(num_blocks * 32), fixed_by_rule(pattern, num_blocks))
        layout = pattern.layout(13 * 32)
        assert layout.is_causal == (attention == "unidirectional")
        assert layout.num_patterns == num_different


def window_by_rule(pattern: BSLongformerSparsityConfig, num_blocks: int) -> Tensor:
    rows, cols = torch.arange(num_blocks)[:, None], torch.arange(num_blocks)
    chosen = torch.zeros(num_blocks, dtype=torch.bool)
    for index in pattern.global_block_indices:
        chosen[index : index + 1] = True
    kept = ((rows - cols).abs() <= pattern.num_sliding_window_blocks // 2) | chosen | chosen[:, None]
    return kept & (cols <= rows) if pattern.is_causal else kept


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_windows_at_all_lengths(attention: str, width: int) -> None:
    longformer = BSLongformerSparsityConfig(2, 16, False, width, [0, 4, 5], None, attention)
    bigbird = BigBirdSparsityConfig(2, 16, False, 0, width, 1, attention)
    local = LocalSlidingWindowSparsityConfig(2, 16, width, attention)
    none = BSLongformerSparsityConfig(2, 16, False, width, [], None, attention)
    first = BSLongformerSparsityConfig(2, 16, False, width, [0], None, attention)
    for num_blocks in range(1, 12):
        assert torch.equal(longformer.layout(num_blocks * 16).to_dense()[1], window_by_rule(longformer, num_blocks))
        assert torch.equal(bigbird.layout(num_blocks * 16).to_dense()[1], window_by_rule(first, num_blocks))
        assert torch.equal(local.layout(num_blocks * 16).to_dense()[0], window_by_rule(none, num_blocks))


@pytest.mark.parametrize("is_causal", [False, True])
def test_random_columns_are_different_and_within_reach(is_causal: bool) -> None:
    flat = _random(20, 6, is_causal, torch.Generator().manual_seed(3))
    rows, cols = flat // 20, flat % 20
    assert flat.unique().numel() == flat.numel()
    expected = [min(6, row + 1) if is_causal else 6 for row in range(20)]
    assert torch.bincount(rows, minlength=20).tolist() == expected
    assert not is_causal or bool((cols <= rows).all())


def test_random_columns_are_equally_likely() -> None:
    """Each of 40 columns is drawn 4000 * 5 / 40 = 500 times on average; five sigma is 105."""
    generator = torch.Generator().manual_seed(0)
    counts = sum(torch.bincount(_random(40, 5, False, generator) % 40, minlength=40) for _ in range(100))
    assert isinstance(counts, Tensor)
    assert counts.sum() == 100 * 40 * 5
    assert (counts - 500).abs().max() < 105


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_random_blocks_come_from_their_own_seed(attention: str) -> None:
    patterns = [
        BigBirdSparsityConfig(3, 16, True, 2, 1, 1, attention, seed=5),
        VariableSparsityConfig(3, 16, True, 2, [1], [0], None, attention, seed=5),
    ]
    for pattern in patterns:
        before = torch.get_rng_state()
        layout = pattern.layout(16 * 40)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(7)
        assert pattern.layout(16 * 40) == layout
        assert layout.num_patterns == 3
        assert type(pattern)(3, different_layout_per_head=True, attention=attention, seed=6).layout(16 * 40) != layout
        assert not layout.is_causal or bool((layout.to_dense().int().triu(1) == 0).all())
    alike = BigBirdSparsityConfig(3, 16, False, 2)
    assert alike.layout(640).head_to_pattern == (0, 0, 0)


def test_random_blocks_are_added_to_the_rest() -> None:
    with_random = BigBirdSparsityConfig(1, 16, False, 3).make_layout(16 * 30)[0]
    without = BigBirdSparsityConfig(1, 16, False, 0).make_layout(16 * 30)[0]
    more = with_random - without
    assert more.min() == 0
    assert more.sum(dim=1).max() <= 3
    assert more.sum() > 30


def test_any_length_and_whole_blocks() -> None:
    pattern = FixedSparsityConfig(2)
    assert pattern.layout(100) == pattern.layout(112)
    with pytest.raises(
        ValueError, match=r"seq_len is 100, but must be a multiple of block, which is 16. For any other length"
    ):
        pattern.make_layout(100)
    with pytest.raises(ValueError, match=r"seq_len is 1048576, but must be at most 185360 for .* Call layout\(\)"):
        LocalSlidingWindowSparsityConfig(2).make_layout(2**20)


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_a_million_tokens(attention: str) -> None:
    num_blocks, half = 2**16, 4
    pattern = BSLongformerSparsityConfig(8, 16, False, 2 * half + 1, [0], None, attention)
    layout = pattern.layout(2**20)
    window = num_blocks * (half + 1) - half * (half + 1) // 2
    kept = window + num_blocks - 1 - half
    if attention == "bidirectional":
        kept = 2 * kept - num_blocks
    assert layout.num_kept == kept
    assert layout.cols.nbytes + layout.row_starts.nbytes == 4 * kept + 8 * (num_blocks + 1)
    with pytest.raises(ValueError, match="Use a larger block"):
        DenseSparsityConfig(1).layout(2**20)


def test_config_sections() -> None:
    assert pattern_from_config({}, 4) == FixedSparsityConfig(4)
    assert pattern_from_config({"mode": "dense", "block": 64}, 2) == DenseSparsityConfig(2, 64)
    section: dict[str, Any] = {"mode": "variable", "local_window_blocks": [1, 2], "num_random_blocks": 1, "seed": 3}
    variable = VariableSparsityConfig(4, num_random_blocks=1, local_window_blocks=(1, 2), seed=3)
    assert pattern_from_config(section, 4) == variable
    assert pattern_from_config({"mode": "bigbird"}, 4) == BigBirdSparsityConfig(4, num_random_blocks=0)
    longformer = {"mode": "bslongformer", "global_block_indices": [0, 3], "attention": "unidirectional"}
    assert pattern_from_config(longformer, 4).layout(64) == BSLongformerSparsityConfig(
        4, global_block_indices=[0, 3], attention="unidirectional"
    ).layout(64)
    assert pattern_from_config({"mode": "local"}, 4) == LocalSlidingWindowSparsityConfig(4)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"mode": "sparse"}, "sparse_attention.mode is 'sparse', but must be one of 'dense', 'fixed'"),
        ({"mode": ["fixed"]}, "sparse_attention.mode"),
        (
            {"mode": "fixed", "num_local_block": 4},
            "sparse_attention.num_local_block=4 cannot be used with .*mode='fixed'.*Use only keys of this mode: block",
        ),
        (
            {"mode": "fixed", "num_random_blocks": 4},
            "num_random_blocks=4 cannot be used with .*mode='fixed'.*"
            "Remove the key, or use the mode variable or bigbird",
        ),
        ({"mode": "local", "different_layout_per_head": True}, "different_layout_per_head=True cannot be used with"),
        ({"num_heads": 4}, "sparse_attention.num_heads"),
        ({"block": 8}, "block is 8"),
        ({"block": 16.0}, "block is 16.0"),
        ({"attention": "causal"}, "attention is 'causal'"),
        ({"num_local_blocks": True}, "num_local_blocks is True"),
        ({"num_local_blocks": 4, "num_global_blocks": 3}, "a divisor of num_local_blocks, which is 4"),
        ({"num_different_global_patterns": 2}, "Set different_layout_per_head to true"),
        ({"num_different_global_patterns": 5, "different_layout_per_head": True}, "at most 4"),
        ({"different_layout_per_head": "yes"}, "different_layout_per_head is 'yes'"),
        (
            {"horizontal_global_attention": True, "attention": "unidirectional"},
            "horizontal_global_attention=True cannot be",
        ),
        ({"horizontal_global_attention": 1}, "horizontal_global_attention is 1"),
        ({"mode": "variable", "local_window_blocks": []}, "at least one width"),
        ({"mode": "variable", "local_window_blocks": 4}, "local_window_blocks is 4"),
        ({"mode": "variable", "local_window_blocks": [0]}, "local_window_blocks is 0"),
        ({"mode": "variable", "global_block_indices": [-1]}, "global_block_indices is -1"),
        ({"mode": "variable", "global_block_end_indices": [1, 2]}, "an end for each start"),
        (
            {"mode": "bslongformer", "global_block_indices": [2], "global_block_end_indices": [2]},
            "greater than the start",
        ),
        ({"mode": "bigbird", "num_sliding_window_blocks": 0}, "num_sliding_window_blocks is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_mistakes_are_named(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pattern_from_config(section, 4)


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match="num_heads is 0"):
        FixedSparsityConfig(0)
    with pytest.raises(ValueError, match="seq_len is 0"):
        FixedSparsityConfig(1).layout(0)
    with pytest.raises(NotImplementedError, match=r"defines no pattern\. Use a class"):
        SparsityConfig(1).layout(16)
