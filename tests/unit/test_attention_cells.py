# SPDX-License-Identifier: Apache-2.0
"""Plans of the kernels made for Hopper: walked in plain Python, they keep the scores that the layout keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinflow.attention import (
    Extras,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    hopper,
)
from twinflow.attention.extras import check_call
from twinflow.attention.launch import Call
from twinflow.attention.layout import Layout, from_dense
from twinflow.attention.tiles import CELL, DIAGONAL, EDGE, OWN, WHOLE, Span, TilePlan, Work, cell_plan
from twinflow.attention.tuning import HOPPER, tunings_for

needs_language = pytest.mark.skipif(not hopper._has_language(), reason="needs a Triton that the kernels know")


def call_of(q: torch.Tensor, layout: Layout, k: torch.Tensor | None = None, **options: Any) -> Call:
    """A call with the same keys and values, which are the queries without `k`."""
    k, extras = q if k is None else k, Extras(**options)
    sizes = check_call(q, k, k, layout, extras)
    return Call(layout, extras, sizes, q.dtype, q.device, tunings_for(sizes.head_dim, q.dtype))


def kept_tokens(layout: Layout) -> torch.Tensor:
    """Bool [queries, keys] of the first head."""
    tokens = layout.to_dense()[0].repeat_interleave(layout.block, 0).repeat_interleave(layout.block, 1)
    return tokens.tril() if layout.is_causal else tokens


def walk(plan: TilePlan, num_own: int, num_other: int) -> torch.Tensor:
    """How often each score is visited, bool and never twice, [own, other]."""
    seen = torch.zeros(-(-num_own // OWN) * OWN, -(-num_other // OWN) * OWN, dtype=torch.int64)
    for tile, start, mid, stop, _ in plan.tables.items.tolist():
        for place in range(start, stop):
            if place < mid and plan.words is not None:
                assert plan.words[place, 0] == WHOLE
            col = (int(plan.tables.codes[place]) >> 8) * plan.size.other
            for half in range(2):
                row = tile * OWN + half * CELL
                part = seen[row : row + CELL, col : col + plan.size.other]
                part += bits_of(plan, place, half)
    seen = seen[:num_own, :num_other]
    assert seen.max() <= 1
    return seen.bool()


def bits_of(plan: TilePlan, place: int, half: int) -> torch.Tensor:
    """What a half keeps of a tile, but for the triangle of a cell on the diagonal, as int64."""
    if plan.words is None:
        return torch.ones(CELL, plan.size.other, dtype=torch.int64)
    word = int(plan.words[place, half])
    bits = torch.tensor([word >> bit & 1 for bit in range(16)]).view(4, 4)
    bits = bits.repeat_interleave(16, 0).repeat_interleave(16, 1)
    if word & DIAGONAL:
        assert word & WHOLE != WHOLE  # else kernels would not look at the diagonal
    return bits


def check(layout: Layout, by_keys: bool, other: int = 64, cut: int = 0) -> TilePlan | None:
    """`cut`: tokens of the last block that the call does not have."""
    num_queries, num_keys = layout.num_rows * layout.block - cut, layout.num_cols * layout.block - cut
    span, work = Span((0, num_queries), (0, num_keys)), Work(layout.head_to_pattern, min_piece=2)
    plan = cell_plan(layout, span, other, by_keys, work)
    if plan is None:
        return None
    seen = walk(plan, *((num_keys, num_queries) if by_keys else (num_queries, num_keys)))
    seen = seen.T if by_keys else seen
    if layout.is_causal:  # the triangles are the kernels'
        seen = seen.tril()
    assert torch.equal(seen, kept_tokens(layout)[:num_queries, :num_keys])
    if plan.words is not None and (num_queries if by_keys else num_keys) % CELL:
        last = (plan.tables.codes >> 8) == (num_queries if by_keys else num_keys) // CELL
        words = plan.words[last[: len(plan.words)]]
        assert bool(((words == 0) | (words & EDGE != 0)).all())
    return plan


@settings(deadline=None, max_examples=40)
@given(
    block=st.sampled_from([16, 32, 64, 128]),
    is_causal=st.booleans(),
    by_keys=st.booleans(),
    density=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    cut=st.integers(0, 15),
)
def test_every_score_once(
    block: int, is_causal: bool, by_keys: bool, density: float, seed: int, sizes: tuple[int, int], cut: int
) -> None:
    """Whatever the layout, empty rows and layouts included."""
    rows, cols = (size * OWN // block for size in sizes)
    grid = torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) < density
    check(from_dense(grid, block, is_causal=is_causal, num_heads=2), by_keys, cut=cut)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_structures_whose_blocks_lie_together(block: int, is_causal: bool, by_keys: bool) -> None:
    attention = "unidirectional" if is_causal else "bidirectional"
    window = LocalSlidingWindowSparsityConfig(2, block, num_sliding_window_blocks=384 // block, attention=attention)
    fixed = FixedSparsityConfig(2, block, num_local_blocks=512 // block, num_global_blocks=128 // block,
                                attention=attention)  # fmt: skip
    for pattern in (window, fixed):
        plan = check(pattern.layout(1024), by_keys, other=128)
        assert plan is not None
        assert plan.size.other == (128 if block == 128 and not is_causal else 64)
        assert (plan.words is None) == (block == 128 and not is_causal)


def test_scattered_small_blocks_are_left_to_others() -> None:
    """Cells would be mostly empty."""
    grid = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.1
    assert check(from_dense(grid, 16, num_heads=1), False) is None
    assert check(from_dense(grid[:8, :8], 128, num_heads=1), False) is not None


@needs_language
def test_which_calls_have_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of some widths in half precision, and nothing added to scores."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def has_plan(num_tokens: int = 512, dim: int = 128, dtype: torch.dtype = torch.bfloat16, **options: object) -> bool:
        layout = LocalSlidingWindowSparsityConfig(2, 128, num_sliding_window_blocks=3).layout(512)
        q = torch.zeros(1, 2, num_tokens, dim, dtype=dtype)
        call = call_of(q, layout, **options)
        found = hopper.plan_for("forward", {"q": q}, call)
        assert hopper.plan_for("forward", {"q": q}, replace(call, tunings=replace(call.tunings, hopper=False))) is None
        assert hopper.plan_for("forward", {"q": q.transpose(2, 3)}, call) is None
        return found is not None

    assert has_plan()
    assert has_plan(dtype=torch.float16, scale=0.3)
    assert has_plan(num_tokens=500)
    assert all(has_plan(dim=dim) for dim in (*HOPPER, 40, 72, 136))
    assert has_plan(key_padding=torch.ones(1, 512, dtype=torch.bool))
    assert has_plan(documents=torch.zeros(1, 512, dtype=torch.int64))
    assert not has_plan(dim=76)  # rows that are not multiples of 16 bytes
    assert not has_plan(dim=32)
    assert not has_plan(num_tokens=60)
    assert has_plan(softcap=2.0)
    assert not has_plan(dtype=torch.float32)
    assert not has_plan(scale=-1.0)
    assert not has_plan(dropout=0.1)


@needs_language
def test_long_rows_of_narrow_heads_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host decides from the plan, and does not wait for the GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for num_tokens, dim, has_plan in ((1024, 64, True), (2048, 64, False), (2048, 128, True)):
        layout = from_dense(torch.ones(num_tokens // 128, num_tokens // 128, dtype=torch.bool), 128)
        q = torch.zeros(1, 1, num_tokens, dim, dtype=torch.bfloat16, device="meta")  # values cannot be read
        call = call_of(q, layout)
        assert (hopper.plan_for("forward", {"q": q}, call) is not None) == has_plan


def test_another_triton_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its language may differ; the kernels for every GPU are written in one that is settled."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert hopper._has_language.__wrapped__()
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert not hopper._has_language.__wrapped__()


@needs_language
def test_heads_that_differ_have_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """All patterns have equally many items; what is missing comes after the last token. Heads that share keys must have
    equal patterns for the gradients of these keys."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    grid = torch.ones(2, 8, 8, dtype=torch.bool).tril()
    grid[1] = False
    grid[1, :, :2] = True
    layout = from_dense(grid, 128)
    q = torch.zeros(1, 2, 1024, 128, dtype=torch.bfloat16)
    for num_kv_heads in (2, 1):
        k = q[:, :num_kv_heads]
        tunings = replace(tunings_for(128, q.dtype), min_piece=1)
        call = Call(layout, Extras(), check_call(q, k, k, layout, Extras()), q.dtype, q.device, tunings)
        plan = hopper.plan_for("forward", {"q": q}, call)
        assert plan is not None
        assert plan.tables.items.shape == (2 * plan.max_items, 5)
        is_filling = plan.tables.items[:, 0] == 8
        assert bool(is_filling.any())
        assert bool((plan.tables.items[is_filling, 1:4] == 0).all())
        rows = plan.tables.items[~is_filling]
        assert plan.mean_tiles == float((rows[:, 3] - rows[:, 1]).double().mean())
        assert (hopper.plan_for("key_gradients", {"k": k}, call) is None) == (num_kv_heads == 1)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(70, 90), (90, 70), (80, 80)])
def test_ids_of_padding_alone(num_queries: int, num_keys: int) -> None:
    """Every query has the same id, and so have all keys but padding."""
    layout = from_dense(torch.ones(2, 2, dtype=torch.bool), 64)
    q, k = (torch.zeros(2, 1, num_tokens, 64, dtype=torch.bfloat16) for num_tokens in (num_queries, num_keys))
    padding = torch.rand(2, num_keys) < 0.7
    call = call_of(q, layout, k, key_padding=padding)
    found = hopper._ids_of(call.given(call.extras), call)
    assert all(hopper._is_described(ids.flatten()) and ids.is_contiguous() for ids in found.values())
    assert torch.equal(found["query_ids"], torch.zeros(2, num_queries, dtype=torch.int32))
    assert torch.equal(found["key_ids"] == 0, padding)


def test_tensors_that_descriptors_can_describe() -> None:
    """Heads one after the other, side by side, side by side with those of other tensors, and single ones."""
    whole = torch.zeros(3, 4, 8, 16)
    fused = torch.zeros(3, 8, 6 * 16)
    side_by_side = fused[..., 16:80].unflatten(2, (4, 16)).transpose(1, 2)
    for tensor in (whole, whole.transpose(1, 2), side_by_side, whole[:1, :1], side_by_side[:1], whole[:, ::2]):
        assert hopper._is_described(tensor)
    for tensor in (whole.transpose(2, 3), whole[..., 1:], fused[:, :, None, 1:17], whole[:, :1].expand(3, 4, 8, 16)):
        assert not hopper._is_described(tensor)
    lse = torch.zeros(3, 4, 12)
    assert hopper._is_described(lse)
    assert hopper._is_described(lse.flatten()[4:].view(1, 4, 35))
    for tensor in (lse.flatten()[1:-3].view(1, 4, 35), lse[..., ::2]):
        assert not hopper._is_described(tensor)


def test_ids_are_copied_if_their_address_is_odd() -> None:
    """The documents of a user may be a slice, which begins anywhere."""
    layout = from_dense(torch.ones(4, 4, dtype=torch.bool), 64)
    q = torch.zeros(1, 1, 200, 64, dtype=torch.bfloat16)
    for first in range(5):
        documents = torch.arange(210, dtype=torch.int32)[None, first : first + 200]
        padding = torch.arange(200)[None] < 190
        call = call_of(q, layout, documents=documents)
        for more in ({}, {"padding": padding.view(torch.uint8)}):
            found = hopper._ids_of({"documents": documents, **more}, call)
            assert all(hopper._is_described(ids.flatten()) for ids in found.values())
            assert torch.equal(found["query_ids"], documents)
            hidden = torch.where(padding, documents, hopper.NO_ID) if more else documents
            assert torch.equal(found["key_ids"], hidden)
            assert torch.equal(found["key_id_bits"].view(torch.int32), hidden)
