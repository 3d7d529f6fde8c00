# SPDX-License-Identifier: Apache-2.0
"""The part `shapes` of `sparse_attention.py`: one table of our speed on the kept area over the dense kernel's speed.
Its lines are widths, padding, patterns of heads, odd lengths, causal attention and packed sequences.

    python benchmarks/sparse_attention.py --only shapes                                  # about 150 s on an H200
    python benchmarks/sparse_attention.py --only shapes --tokens 32768 --case causal 96  # some lines only
    python benchmarks/sparse_attention.py --only shapes --kernels triton                 # not the kernels for Hopper

The share is dense time x kept area / our time, of forward and backward. The kept area counts the scores that the
pattern, causality, padding and sequences keep, over the scores of dense attention: all of them, or for causal
attention those that causality keeps. Padding and sequences do not change the dense kernel's work. For 8 sequences of
2,048 tokens the area counts as 1: the question is whether a call is slower than dense flash attention.

Longer sequences have fewer heads: at 128k tokens a quarter of those at 32k. All calls then fill the GPU equally, and
the dense kernel takes less than a second. It is measured once for each width, length and causality.

Every case is first compared with float64 at a short length. That also checks the kept area. A case that is wrong or
that fails has no time; the others are measured nevertheless.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from sparse_common import (
    PASSES,
    TOLERANCE,
    Clock,
    Row,
    Scale,
    Shape,
    Way,
    dense,
    inputs,
    layout_of,
    measure_dense,
    ours,
    relative,
    run_once,
    shown,
    table,
    try_passes,
)
from torch import Tensor
from torch.nn.attention import SDPBackend

from twinflow.attention import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    Layout,
    documents_of,
    from_flat,
    triton_attention,
)
from twinflow.attention.tuning import Tunings, tunings_for

PATTERNS = ("random 10%", "fixed", "bigbird", "longformer", "window")
KINDS = ("causal", "padding", "heads", "odd", "packed")
MAIN_SHARE, OTHER_SHARE = 0.8, 0.7
CHECK_LENGTH = {"cuda": 1024, "cpu": 256}
FULL_LENGTH = {"cuda": 32768, "cpu": 512}  # with more tokens than this, a case has fewer heads
SHORT_BATCH, SHORT_HEADS, SHORT_WIDTH = 8, 12, 64
MISSING = 37  # tokens by which an odd length is shorter than whole blocks
PADDED = 0.1  # of the keys
NUM_SEQUENCES = 8
Interval = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A line of the table. `kind` is one of KINDS, "short", or empty."""

    pattern: str
    shape: Shape
    kind: str = ""

    @property
    def name(self) -> str:
        names = {"heads": "pattern per head", "odd": "odd length", "short": "8 sequences"}
        return ", ".join([self.pattern, *([names.get(self.kind, self.kind)] if self.kind else [])])

    @property
    def is_causal(self) -> bool:
        return self.kind == "causal"

    @property
    def wanted(self) -> float:
        if self.kind == "short":
            return 1.0
        return MAIN_SHARE if not self.kind and self.shape.head_dim in (64, 128) else OTHER_SHARE


def use_kernels(name: str) -> None:
    """From now on, calls use the kernels for Hopper wherever these support them ("hopper"), or never ("triton")."""

    def chosen(head_dim: int, dtype: torch.dtype) -> Tunings:
        found = tunings_for(head_dim, dtype)
        return replace(found, hopper=name == "hopper" and found.hopper, hopper_tokens=math.inf)

    triton_attention.tunings_for = chosen  # type: ignore[assignment]


def cases(scale: Scale, words: list[str] | None = None) -> list[Case]:
    """All cases, or those whose name or width contains one of the words."""
    narrow, wide = scale.shapes
    found = [Case(pattern, shape) for shape in scale.shapes for pattern in PATTERNS]
    found += [Case(pattern, shape) for shape in scale.others for pattern in ("bigbird", "random 10%")]
    for shape in (wide, narrow):
        found += [Case("bigbird", shape, kind) for kind in KINDS]
        found += [Case("fixed", shape, "causal"), Case("random 10%", shape, "heads"), Case("window", shape, "packed")]
    found.append(Case("bigbird", Shape(SHORT_HEADS, SHORT_WIDTH) if scale.device == "cuda" else narrow, "short"))
    return [case for case in found if not words or any(word in f"{case.name}, {case.shape}" for word in words)]


def lengths_of(scale: Scale, case: Case) -> tuple[int, ...]:
    if case.kind == "short":
        return (scale.short_length,)
    missing = MISSING if case.kind == "odd" else 0
    return tuple(length - missing for length in scale.lengths)


def at_length(scale: Scale, case: Case, length: int) -> Case:
    """The case with fewer heads at longer lengths."""
    if case.kind == "short":
        return case
    whole = length + (MISSING if case.kind == "odd" else 0)
    num_heads = case.shape.num_heads * FULL_LENGTH[scale.device] // max(whole, FULL_LENGTH[scale.device])
    return replace(case, shape=replace(case.shape, num_heads=max(1, num_heads)))


@lru_cache(maxsize=8)
def layout_for(scale: Scale, case: Case, length: int) -> Layout:
    heads, block = case.shape.num_heads, scale.base
    whole = -(-length // block) * block
    if case.kind == "short":
        block = min(64, block)
        return layout_of(case.pattern, heads, block, length, block)
    if case.kind == "causal":
        one_way: dict[str, Any] = {"attention": "unidirectional"}
        if case.pattern == "fixed":
            return FixedSparsityConfig(heads, block, num_local_blocks=4, num_global_blocks=1, **one_way).layout(whole)
        return BigBirdSparsityConfig(heads, block, **one_way).layout(whole)
    if case.kind == "heads":
        if case.pattern == "bigbird":
            return BigBirdSparsityConfig(heads, block, different_layout_per_head=True).layout(whole)
        num = whole // block
        generator = torch.Generator().manual_seed(0)
        rows = torch.arange(num)[:, None] * num
        drawn = (torch.rand(num, num, generator=generator).topk(max(1, round(0.1 * num))).indices for _ in range(heads))
        return from_flat([(rows + cols).reshape(-1) for cols in drawn], num, num, block)
    return layout_of(case.pattern, heads, block, whole, block)


def sequences(case: Case, length: int) -> list[Interval]:
    """Starts and ends of packed sequences; those within the row are not at multiples of a block."""
    if case.kind != "packed":
        return [(0, length)]
    ends = [length * number // NUM_SEQUENCES - 5 * number for number in range(1, NUM_SEQUENCES)]
    return list(itertools.pairwise([0, *ends, length]))


def num_keys(case: Case, length: int) -> int:
    """Keys that are not padding."""
    return length - round(PADDED * length) if case.kind == "padding" else length


def options_of(case: Case, length: int, device: str) -> dict[str, Tensor]:
    """The options of the call besides the layout."""
    positions = torch.arange(length, device=device)
    if case.kind == "padding":
        return {"key_padding": (positions < num_keys(case, length))[None]}
    if case.kind == "packed":
        starts = [0, *(stop for _, stop in sequences(case, length))]
        return {"documents": documents_of(torch.tensor(starts, dtype=torch.int32, device=device), length)}
    return {}


def kept_share(layout: Layout, case: Case, length: int) -> float:
    """Kept scores over those of dense attention, from the kept blocks."""
    block, kept = layout.block, 0.0
    for pattern in layout.head_to_pattern:
        rows, cols = layout.rows_of(pattern).long(), layout.cols_of(pattern).long()
        for start, stop in sequences(case, length):
            keys = (start, min(stop, num_keys(case, length)))
            heights, widths = (_overlaps(part, block, at) for part, at in ((rows, (start, stop)), (cols, keys)))
            scores = heights * widths
            if layout.is_causal:  # a block on the diagonal is square, because causal cases have no other limits
                scores -= torch.where(rows == cols, heights * (heights - 1) / 2, 0.0)
            kept += float(scores.sum())
    whole = length * (length + 1) / 2 if layout.is_causal else float(length) ** 2
    return kept / layout.num_heads / whole


def _overlaps(blocks: Tensor, block: int, interval: Interval) -> Tensor:
    """Tokens of each block that lie in an interval."""
    start, stop = interval
    return ((blocks * block + block).clamp(max=stop) - (blocks * block).clamp(min=start)).clamp(min=0).double()


def data_of(scale: Scale, case: Case, length: int) -> tuple[Tensor, ...]:
    if case.kind != "short":
        return inputs(scale, case.shape, length)
    size = (SHORT_BATCH, case.shape.num_heads, length, case.shape.head_dim)
    drawn = [torch.randn(size, device=scale.device).to(scale.dtype) for _ in range(4)]
    return *(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3]


def way_of(scale: Scale, case: Case, length: int) -> Way:
    return ours(layout_for(scale, case, length), **options_of(case, length, scale.device))


def check(scale: Scale, case: Case) -> float:
    """The error of the result and of the gradients of a case with few heads. Also checks the kept area."""
    length = CHECK_LENGTH[scale.device] - (MISSING if case.kind == "odd" else 0)
    few = replace(case, shape=replace(case.shape, num_heads=min(3, case.shape.num_heads)))
    layout, data = layout_for(scale, few, length), data_of(scale, few, length)
    kept = layout.to_dense().to(scale.device)
    kept = kept.repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)[:, :length, :length]
    kept = kept.tril() if layout.is_causal else kept
    options = options_of(few, length, scale.device)
    if "key_padding" in options:
        kept = kept & options["key_padding"]
    if "documents" in options:
        kept = kept & (options["documents"] == options["documents"].T)
    whole = length * (length + 1) / 2 if layout.is_causal else length**2
    share = kept_share(layout, few, length)
    if abs(float(kept.double().sum()) / layout.num_heads / whole - share) > 1e-9:
        raise AssertionError(f"The kept area of {case} is not {share}.")
    exact = tuple(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in data)

    def truth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return scores.masked_fill(~kept, -math.inf).softmax(-1).nan_to_num(0.0) @ v

    return relative(run_once(way_of(scale, few, length), data), run_once(truth, exact))


def jobs(scale: Scale, words: list[str] | None) -> list[Callable[[], object]]:
    """All that must be compiled, each to be run once. Cases that have kernels in common are one job."""

    def run(group: list[Case]) -> None:
        for case in group:
            print(f"compiling: {case}", file=sys.stderr, flush=True)
            check(scale, case)
            for length in lengths_of(scale, case):
                here = at_length(scale, case, length)
                run_once(way_of(scale, here, length), data_of(scale, here, length))

    groups: dict[tuple[Shape, str], list[Case]] = {}
    for case in cases(scale, words):
        groups.setdefault((case.shape, case.kind), []).append(case)
    return [partial(run, group) for group in groups.values()]


def measure(scale: Scale, clock: Clock, words: list[str] | None) -> Iterator[Row]:
    """A row for each case and length, the dense kernel's times included."""
    errors: dict[Case, float] = {}
    wholes: dict[tuple[Any, ...], dict[str, float]] = {}
    order = [(length, case) for case in cases(scale, words) for length in lengths_of(scale, case)]
    for length, case in sorted(order, key=lambda pair: -(-pair[0] // scale.base)):
        if case not in errors:
            errors[case] = _error(scale, case)
        here = at_length(scale, case, length)
        layout, data = layout_for(scale, here, length), data_of(scale, here, length)
        dense_length = length + MISSING if case.kind == "odd" else length
        key = (here.shape, dense_length, case.is_causal, case.kind == "short")
        if key not in wholes:
            wholes[key] = _measure_dense(scale, clock, here, dense_length)
            print(f"dense, {here.shape}, {dense_length} tokens: {wholes[key]}", file=sys.stderr, flush=True)
        times = dict.fromkeys(PASSES, math.inf)
        if errors[case] <= TOLERANCE:
            times = try_passes(clock, case.name, way_of(scale, here, length), data)
        yield {
            "shape": str(here.shape), "tokens": length, "pattern": case.name, "block": layout.block,
            "density": kept_share(layout, case, length), "ours": times, "dense": wholes[key], "wanted": case.wanted,
            "area": 1.0 if case.kind == "short" else kept_share(layout, case, length), "error": errors[case],
        }  # fmt: skip


def _error(scale: Scale, case: Case) -> float:
    """The result of `check`, infinite if the case fails."""
    try:
        error = check(scale, case)
    except Exception as problem:  # a kernel that does not compile or is not built has many names
        print(f"{case}: {type(problem).__name__} {str(problem)[:200]}", file=sys.stderr, flush=True)
        return math.inf
    if error > TOLERANCE:
        print(f"no speed is reported: {case}: error {error:.2e}", file=sys.stderr, flush=True)
    return error


def _measure_dense(scale: Scale, clock: Clock, case: Case, length: int) -> dict[str, float]:
    """The dense kernel at a whole length. The short case is compared with flash attention alone."""
    data = data_of(scale, case, length)
    if case.kind == "short" and scale.device == "cuda":
        return try_passes(clock, "flash", dense(SDPBackend.FLASH_ATTENTION), data)
    return measure_dense(scale, clock, data, case.is_causal)


def share_of(row: Row, name: str) -> float | None:
    """Our speed on the kept area over the dense kernel's."""
    found = row["dense"][name] * row["area"] / row["ours"][name]
    return float(found) if math.isfinite(row["ours"][name]) and math.isfinite(found) else None


def lines_of(rows: list[Row]) -> list[str]:
    """The table."""
    body = []
    for row in rows:
        cells = [row["pattern"], f"{row['tokens']:,}", row["shape"], f"{row['density']:.4f}"]
        cells += [shown(row[key][name], 3) for key in ("ours", "dense") for name in PASSES]
        found = share_of(row, "both")
        verdict = "failed" if found is None else "met" if found >= row["wanted"] else "below"
        body.append([*cells, shown(share_of(row, "forward")), shown(found), f"{row['wanted']:g}", verdict])
    heads = ["case", "tokens", "heads x width", "kept", "ours, forward", "ours, both", "dense, forward", "dense, both"]
    heads += ["share, forward", "share", "wanted", ""]
    return table("Our speed on the kept area over the dense kernel's, ms of forward and backward", heads, body)
