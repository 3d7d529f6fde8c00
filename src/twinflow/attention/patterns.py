# SPDX-License-Identifier: Apache-2.0
"""Patterns of block-sparse attention, with DeepSpeed's names, arguments and defaults.

There are two differences from DeepSpeed. First, with attention="unidirectional" a token sees no later token, also not
in its own block. Second, random blocks are drawn from a separate generator with its own seed, so that all ranks draw
the same blocks and torch's generators do not change. In a unidirectional pattern, random blocks are drawn only from the
columns that a row may see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from twinflow.attention.layout import DENSE_LIMIT, Layout, LayoutSource, check_block, from_flat
from twinflow.errors import incompatible, invalid_value

ATTENTIONS = ("unidirectional", "bidirectional")
KEPT_LIMIT = 2**30
CACHED_LAYOUTS = 32


@dataclass(frozen=True)
class SparsityConfig(LayoutSource):
    """Base class of all patterns: number of heads, block size, whether heads differ, and the seed of random blocks.

    A pattern keeps or drops blocks of `block` queries x `block` keys. Raises ValueError for invalid arguments.
    """

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    seed: int = field(default=0, kw_only=True)

    _MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("seed", "num_random_blocks")

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):
            if name == "seed" or name.startswith("num_"):
                check_count(name, getattr(self, name), 0 if name in self._MAY_BE_ZERO else 1)
        check_block(self.block)
        for name in ("different_layout_per_head", "horizontal_global_attention"):
            if not isinstance(getattr(self, name, False), bool):
                raise invalid_value(name, getattr(self, name), [True, False])
        attention = getattr(self, "attention", "bidirectional")
        if attention not in ATTENTIONS:
            raise invalid_value("attention", attention, ATTENTIONS)
        if self.is_causal and getattr(self, "horizontal_global_attention", False):
            raise incompatible(
                "horizontal_global_attention=True",
                f"attention={attention!r}",
                "the tokens of global blocks would see later tokens",
                "Set horizontal_global_attention to false.",
            )
        self._freeze_lists()

    def _freeze_lists(self) -> None:
        """Check lists of block numbers and store them as tuples, so that the pattern is hashable."""
        lists = {"local_window_blocks": 1, "global_block_indices": 0, "global_block_end_indices": 1}
        for name, least in lists.items():
            values = getattr(self, name, None)
            if values is None and (name == "global_block_end_indices" or not hasattr(self, name)):
                continue
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise invalid_value(name, values, f"a list of whole numbers >= {least}")
            for value in values:
                check_count(f"An entry of {name}", value, least)
            object.__setattr__(self, name, tuple(values))
        starts, ends = getattr(self, "global_block_indices", ()), getattr(self, "global_block_end_indices", None)
        if ends is not None and (len(ends) != len(starts) or any(a >= b for a, b in zip(starts, ends, strict=True))):
            allowed = (
                f"a list with an end for each start in global_block_indices {list(starts)}, greater than the start"
            )
            raise invalid_value("global_block_end_indices", ends, allowed)

    @property
    def is_causal(self) -> bool:
        """Whether a query sees only keys up to its own position."""
        return getattr(self, "attention", "bidirectional") == "unidirectional"

    def layout(self, seq_len: int) -> Layout:
        """The layout for `seq_len` tokens. The last block may be incomplete."""
        check_count("seq_len", seq_len, 1)
        num_blocks = -(-seq_len // self.block)
        generator = torch.Generator().manual_seed(self.seed)
        num_variants = self._num_variants()
        flats = [self._flat(num_blocks, variant, generator) for variant in range(num_variants)]
        heads = [head % num_variants for head in range(self.num_heads)]
        return from_flat(flats, num_blocks, num_blocks, self.block, is_causal=self.is_causal, head_to_pattern=heads)

    def layout_for(self, num_tokens: int, num_heads: int, q_start: int) -> Layout:
        """The layout for a call. The most recent ones are cached."""
        return _cached_layout(self, -(-num_tokens // self.block) * self.block)

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout as an int64 grid [heads, blocks, blocks], with 1 for kept blocks. Raises ValueError if `seq_len`
        is not a multiple of `block`, or if the grid is too large."""
        check_count("seq_len", seq_len, 1)
        if seq_len % self.block:
            raise invalid_value(
                "seq_len", seq_len, f"a multiple of block, which is {self.block}", "For any other length, use layout()."
            )
        most = math.isqrt(DENSE_LIMIT // self.num_heads) * self.block
        if seq_len > most:
            remedy = "Call layout(), which stores only the kept blocks."
            raise invalid_value("seq_len", seq_len, f"at most {most} for a grid of all blocks", remedy)
        return self.layout(seq_len).to_dense().to(torch.int64)

    def _num_variants(self) -> int:
        """Number of different patterns, which the heads use in turn."""
        num_random = getattr(self, "num_random_blocks", 0)
        return self.num_heads if self.different_layout_per_head and num_random else 1

    def _flat(self, num_blocks: int, variant: int, generator: torch.Generator) -> Tensor:
        """Kept blocks as row * num_blocks + col. Order and duplicates do not matter."""
        raise NotImplementedError(f"{type(self).__name__} defines no pattern. Use a class such as FixedSparsityConfig.")


@dataclass(frozen=True)
class DenseSparsityConfig(SparsityConfig):
    """All blocks are kept, as in dense attention."""

    def _flat(self, num_blocks: int, variant: int, generator: torch.Generator) -> Tensor:
        return _rows(torch.arange(num_blocks), num_blocks)


@dataclass(frozen=True)
class FixedSparsityConfig(SparsityConfig):
    """Local windows and global blocks. The last `num_global_blocks` of each window are global: all rows see them. In a
    unidirectional pattern, only their own and later rows see them.

    With `num_different_global_patterns`, heads use different global blocks in turn: each head uses the blocks before
    those of the previous head.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_local_blocks % self.num_global_blocks:
            allowed = f"a divisor of num_local_blocks, which is {self.num_local_blocks}"
            raise invalid_value("num_global_blocks", self.num_global_blocks, allowed)
        num_different = self.num_different_global_patterns
        if num_different > 1 and not self.different_layout_per_head:
            raise incompatible(
                f"num_different_global_patterns={num_different}",
                "different_layout_per_head=False",
                "all heads then have the same pattern",
                "Set different_layout_per_head to true.",
            )
        most = self.num_local_blocks // self.num_global_blocks
        if num_different > most:
            allowed = f"at most {most}, which is num_local_blocks // num_global_blocks"
            raise invalid_value("num_different_global_patterns", num_different, allowed)

    def _num_variants(self) -> int:
        return self.num_different_global_patterns

    def _flat(self, num_blocks: int, variant: int, generator: torch.Generator) -> Tensor:
        width, num_global = self.num_local_blocks, self.num_global_blocks
        rows = torch.arange(num_blocks)
        first = rows // width * width
        local = _spans(rows, first, (first + width).clamp(max=num_blocks), num_blocks, self.is_causal)
        offset = width - (1 + variant) * num_global
        whole = num_blocks - num_blocks % width
        starts = torch.arange(offset, whole, width) if whole else rows[:0]
        if whole < num_blocks:  # the global blocks of a short last window must end within the sequence
            last = max(0, min(whole + offset, num_blocks - num_global))
            starts = torch.cat([starts, torch.tensor([last])])
        chosen = (starts[:, None] + torch.arange(num_global)).reshape(-1)
        chosen = chosen[chosen < num_blocks]
        return torch.cat([local, *_globals(chosen, num_blocks, self.is_causal, self.horizontal_global_attention)])


@dataclass(frozen=True)
class VariableSparsityConfig(SparsityConfig):
    """Local windows of given widths (the last width is repeated), given global blocks, and random blocks."""

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.local_window_blocks:
            raise invalid_value("local_window_blocks", self.local_window_blocks, "a list with at least one width")

    def _flat(self, num_blocks: int, variant: int, generator: torch.Generator) -> Tensor:
        widths = torch.tensor(self.local_window_blocks)
        ends = widths.cumsum(0)
        rest = max(0, num_blocks - int(ends[-1]))
        more = torch.arange(1, -(-rest // int(widths[-1])) + 1) * widths[-1] + ends[-1]
        ends = torch.cat([ends, more])
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        rows = torch.arange(num_blocks)
        window = torch.searchsorted(ends, rows, right=True)
        local = _spans(rows, starts[window], ends[window].clamp(max=num_blocks), num_blocks, self.is_causal)
        chosen = _chosen(self.global_block_indices, self.global_block_end_indices, num_blocks)
        parts = _globals(chosen, num_blocks, self.is_causal, self.horizontal_global_attention)
        drawn = _random(num_blocks, self.num_random_blocks, self.is_causal, generator)
        return torch.cat([local, drawn, *parts])


@dataclass(frozen=True)
class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, a sliding window, and global blocks at the start. Global blocks see all blocks, and all blocks see
    them; in a unidirectional pattern, no block sees a later one."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"

    _MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("seed", "num_random_blocks", "num_global_blocks")

    def _flat(self, num_blocks: int, variant: int, generator: torch.Generator) -> Tensor:
        drawn = _random(num_blocks, self.num_random_blocks, self.is_causal, generator)
        window = _sliding(num_blocks, self.num_sliding_window_blocks, self.is_causal)
        chosen = torch.arange(num_blocks)[: self.num_global_blocks]
        return torch.cat([drawn, window, *_globals(chosen, num_blocks, self.is_causal, has_rows=True)])


@dataclass(frozen=True)
class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window and given global blocks. Global blocks see all blocks, and all blocks see them; in a
    unidirectional pattern, no block sees a later one."""

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def _flat(self, num_blocks: int, variant: int, generator: torch.Generator) -> Tensor:
        window = _sliding(num_blocks, self.num_sliding_window_blocks, self.is_causal)
        chosen = _chosen(self.global_block_indices, self.global_block_end_indices, num_blocks)
        return torch.cat([window, *_globals(chosen, num_blocks, self.is_causal, has_rows=True)])


@dataclass(frozen=True)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """Each block sees only the blocks in a window around it; in a unidirectional pattern, none of the later ones."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def _flat(self, num_blocks: int, variant: int, generator: torch.Generator) -> Tensor:
        return _sliding(num_blocks, self.num_sliding_window_blocks, self.is_causal)


MODES: Mapping[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local": LocalSlidingWindowSparsityConfig,
}


def pattern_from_config(section: Mapping[str, Any], num_heads: int) -> SparsityConfig:
    """The pattern of a JSON section with "mode" and the arguments of this mode. Missing arguments have DeepSpeed's
    defaults. Raises ValueError for unknown modes and arguments.
    """
    mode = section.get("mode", "fixed")
    if not isinstance(mode, str) or mode not in MODES:
        raise invalid_value("sparse_attention.mode", mode, MODES)
    takes = {
        name: [item.name for item in fields(pattern) if item.init and item.name != "num_heads"]
        for name, pattern in MODES.items()
    }
    given = {key: value for key, value in section.items() if key != "mode"}
    for key, value in given.items():
        if key not in takes[mode]:
            others = [name for name, keys in takes.items() if key in keys]
            remedy = (
                f"Remove the key, or use the mode {' or '.join(others)}."
                if others
                else f"Use only keys of this mode: {', '.join(takes[mode])}."
            )
            option = f"sparse_attention.{key}={value!r}"
            raise incompatible(option, f"sparse_attention.mode={mode!r}", "this mode has no such key", remedy)
    if mode == "bigbird":  # the default in JSON differs from that of the class
        given.setdefault("num_random_blocks", 0)
    return MODES[mode](num_heads, **given)


def _spans(rows: Tensor, first: Tensor, end: Tensor, num_blocks: int, is_causal: bool = False) -> Tensor:
    """Flat indices of the blocks in the columns from `first` to `end` (exclusive) of each row.

    If causal, columns after the diagonal are left out.
    """
    end = torch.minimum(end, rows + 1) if is_causal else end
    lengths = (end - first).clamp(min=0)
    _check_kept(int(lengths.sum()))
    before = lengths.cumsum(0) - lengths
    within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(before, lengths)
    return torch.repeat_interleave(rows * num_blocks + first, lengths) + within


def _rows(chosen: Tensor, num_blocks: int, is_causal: bool = False) -> Tensor:
    """All blocks of the chosen rows, or those up to the diagonal if causal."""
    return _spans(chosen, torch.zeros_like(chosen), torch.full_like(chosen, num_blocks), num_blocks, is_causal)


def _globals(chosen: Tensor, num_blocks: int, is_causal: bool, has_rows: bool) -> list[Tensor]:
    """The chosen blocks as columns that all rows see (if causal: their own and later rows), and with `has_rows` also as
    rows that see all columns (if causal: up to their own).
    """
    chosen = torch.unique(chosen)
    first = chosen if is_causal else torch.zeros_like(chosen)
    flipped = _spans(chosen, first, torch.full_like(chosen, num_blocks), num_blocks)  # rows of the transposed grid
    parts = [flipped % num_blocks * num_blocks + flipped // num_blocks]
    return [*parts, _rows(chosen, num_blocks, is_causal)] if has_rows else parts


def _sliding(num_blocks: int, width: int, is_causal: bool) -> Tensor:
    """For each row its own column and width // 2 columns on each side (if causal: only on the left)."""
    rows, half = torch.arange(num_blocks), width // 2
    return _spans(rows, (rows - half).clamp(min=0), (rows + half + 1).clamp(max=num_blocks), num_blocks, is_causal)


def _random(num_blocks: int, num_random: int, is_causal: bool, generator: torch.Generator) -> Tensor:
    """`num_random` different columns of each row, with equal probabilities. A row with fewer columns gets all of them.

    This is Floyd's sampling, with one step for all rows at once: draw j is from the first j + 1 columns, and a column
    that was drawn before is replaced by column j.
    """
    rows = torch.arange(num_blocks)
    available = rows + 1 if is_causal else torch.full_like(rows, num_blocks)
    drawn = torch.full((num_blocks, min(num_random, num_blocks)), -1)
    _check_kept(drawn.numel())
    for step in range(drawn.shape[1]):
        last = available - drawn.shape[1] + step
        uniform = torch.rand(num_blocks, dtype=torch.float64, generator=generator)
        draw = (uniform * (last + 1)).long()
        is_old = (drawn == draw[:, None]).any(dim=1)
        drawn[:, step] = torch.where(last < 0, -1, torch.where(is_old, last, draw))
    flat = rows[:, None] * num_blocks + drawn
    return flat[drawn >= 0]


def _chosen(indices: Sequence[int], ends: Sequence[int] | None, num_blocks: int) -> Tensor:
    """Indices of global blocks, given singly or as ranges. Blocks beyond the sequence are omitted."""
    if ends is None:
        chosen = torch.tensor(list(indices), dtype=torch.int64)
        return chosen[chosen < num_blocks]
    pairs = [(start, min(end, num_blocks)) for start, end in zip(indices, ends, strict=True) if start < num_blocks]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(start, end) for start, end in pairs)])


def check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise invalid_value(name, value, f"a whole number >= {least}")


def _check_kept(num_kept: int) -> None:
    if num_kept > KEPT_LIMIT:
        remedy = "Use a larger block or a sparser pattern."
        raise invalid_value("The number of kept blocks of a pattern", num_kept, f"at most {KEPT_LIMIT}", remedy)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _cached_layout(pattern: SparsityConfig, num_tokens: int) -> Layout:
    return pattern.layout(num_tokens)
