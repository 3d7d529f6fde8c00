# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch: the dense one against a loop over scores, the one over blocks against the dense one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    Extras,
    FixedSparsityConfig,
    Layout,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
    block_attention,
    dense_attention,
    documents_of,
    from_dense,
    reference,
)
from twinflow.attention.extras import dropout_hash, dropout_keep, seed_word, threshold

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, BATCH, DIM = 4, 2, 8
STRUCTURES = ["dense", "fixed", "variable", "bigbird", "bslongformer", "local", "scattered"]
EXTRAS = ["none", "padding", "bias", "relative", "mask", "dropout", "cap and sinks", "documents", "all"]


def layout_of(structure: str, seq_len: int, is_causal: bool, num_heads: int = HEADS) -> Layout:
    attention = "unidirectional" if is_causal else "bidirectional"
    num_blocks = -(-seq_len // 16)
    if structure == "dense":
        return from_dense(DenseSparsityConfig(num_heads).make_layout(num_blocks * 16), 16, is_causal)
    if structure == "fixed":
        return FixedSparsityConfig(num_heads, 16, True, 2, 1, attention, False, 2).layout(seq_len)
    if structure == "variable":
        return VariableSparsityConfig(num_heads, 16, True, 1, [1, 2], [1], None, attention).layout(seq_len)
    if structure == "bigbird":
        return BigBirdSparsityConfig(num_heads, 16, True, 1, 1, 1, attention).layout(seq_len)
    if structure == "bslongformer":
        return BSLongformerSparsityConfig(num_heads, attention=attention).layout(seq_len)
    if structure == "local":
        return LocalSlidingWindowSparsityConfig(num_heads, attention=attention).layout(seq_len)
    generator = torch.Generator().manual_seed(1)
    grid = torch.rand(num_heads, num_blocks, num_blocks, generator=generator) < 0.4
    grid[:, 1] = False
    return from_dense(grid, 16, is_causal)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def options_of(extra: str, nq: int, nk: int) -> dict[str, Any]:
    """Options by name; biases differ in which dimensions they have."""
    coin = torch.Generator().manual_seed(7)
    made: dict[str, dict[str, Any]] = {
        "none": {"scale": 0.3},
        "padding": {"key_padding": torch.rand(BATCH, nk, generator=coin) < 0.7},
        "bias": {"bias": randn(1, HEADS, nq, nk, seed=8).requires_grad_()},
        "relative": {"relative": randn(HEADS, nq + nk - 1, seed=9).requires_grad_()},
        "mask": {"mask": torch.rand(nq, nk, generator=coin) < 0.7},
        "dropout": {"dropout": 0.3, "seed": 5},
        "cap and sinks": {"softcap": 1.3, "sinks": randn(HEADS, seed=10).requires_grad_()},
    }
    if extra == "documents":
        return {"documents": (torch.rand(BATCH, nk, generator=coin) < 0.1).cumsum(1), **made["padding"]}
    if extra != "all":
        return made[extra]
    made["bias"] = {"bias": randn(BATCH, 1, 1, nk, seed=8).requires_grad_()}
    made["relative"] = {"relative": randn(1, nq + nk - 1, seed=9).requires_grad_()}
    made["mask"] = {"mask": torch.rand(BATCH, 1, nq, 1, generator=coin) < 0.8}
    return {key: value for part in made.values() for key, value in part.items()}


def check_equal(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Tensor:
    """Outputs and all gradients of both, to the accuracy of float64."""
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    inputs += [options[name] for name in ("bias", "relative", "sinks") if name in options]
    truth = dense_attention(q, k, v, layout, **options)
    found = block_attention(q, k, v, layout, **options)
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    grad = randn(*truth.shape, seed=11)
    true_grads = torch.autograd.grad(truth, inputs, grad)
    grads = torch.autograd.grad(found, inputs, grad)
    for one, true in zip(grads, true_grads, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, true, rtol=1e-9, atol=1e-11)
    return found


def looped(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Tensor:
    """One score at a time, from the words of `Extras`."""
    extras = Extras(**options)
    (batch, num_heads, nq, dim), (_, num_kv, nk, _) = q.shape, k.shape
    out = torch.zeros_like(q)
    grid = layout.to_dense()
    for b in range(batch):
        for h in range(num_heads):
            for i in range(nq):
                place = i + extras.q_start
                scores: dict[int, float] = {}
                for j in range(nk):
                    kept = bool(grid[h, place // layout.block, j // layout.block])
                    kept &= not layout.is_causal or j <= place
                    kept &= layout.window is None or abs(j - place) < layout.window
                    kept &= extras.key_padding is None or bool(extras.key_padding[b, j])
                    kept &= extras.documents is None or bool(extras.documents[b, j] == extras.documents[b, place])
                    kept &= extras.mask is None or bool(extras.mask.expand(batch, num_heads, nq, nk)[b, h, i, j])
                    if not kept:
                        continue
                    score = float(q[b, h, i] @ k[b, h * num_kv // num_heads, j])
                    score *= dim**-0.5 if extras.scale is None else extras.scale
                    if extras.softcap:
                        score = extras.softcap * math.tanh(score / extras.softcap)
                    if extras.bias is not None:
                        score += float(extras.bias.expand(batch, num_heads, nq, nk)[b, h, i, j])
                    if extras.relative is not None:
                        score += float(extras.relative.expand(num_heads, -1)[h, j - i + nq - 1])
                    scores[j] = score
                total = sum(math.exp(score) for score in scores.values())
                total += 0.0 if extras.sinks is None else math.exp(float(extras.sinks[h]))
                for j, score in scores.items():
                    factor = 1.0
                    if extras.dropout:
                        word = hash_by_hand(extras.seed, b * num_heads + h, place, j)
                        factor = (word >= extras.dropout * 2**32) / (1 - extras.dropout)
                    out[b, h, i] += math.exp(score) / total * factor * v[b, h * num_kv // num_heads, j]
    return out


def mix_by_hand(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)


def hash_by_hand(seed: int, head: int, query: int, key: int) -> int:
    word = mix_by_hand(mix_by_hand(seed % 2**32) ^ ((seed >> 32) * 0x9E3779B1 % 2**32))
    word = mix_by_hand(word ^ (head * 0x9E3779B1 % 2**32))
    word = mix_by_hand(word ^ (query * 0x85EBCA77 % 2**32))
    return mix_by_hand(word ^ (key * 0xC2B2AE3D % 2**32))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("extra", EXTRAS)
def test_dense_against_a_loop(extra: str, is_causal: bool) -> None:
    nq, nk, q_start = 5, 37, 29
    q, k, v = randn(BATCH, HEADS, nq, DIM), randn(BATCH, 2, nk, DIM, seed=1), randn(BATCH, 2, nk, DIM, seed=2)
    layout = layout_of("scattered", 48, is_causal)
    options = options_of(extra, nq, nk) | {"q_start": q_start}
    options = {key: value.detach() if isinstance(value, Tensor) else value for key, value in options.items()}
    for its in (layout, layout.windowed(12)) if extra == "none" else (layout,):
        truth = looped(q, k, v, its, **options)
        torch.testing.assert_close(dense_attention(q, k, v, its, **options), truth, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("extra", EXTRAS)
def test_blocks_against_dense(extra: str, structure: str, is_causal: bool) -> None:
    n = 75
    q, k, v = (randn(BATCH, HEADS, n, DIM, seed=seed) for seed in range(3))
    check_equal(q, k, v, layout_of(structure, n, is_causal), **options_of(extra, n, n))


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_with_a_window_against_dense(is_causal: bool) -> None:
    """Its edge is inside a block, at an edge of blocks, or beyond all tokens."""
    q, k, v = (randn(BATCH, HEADS, 75, DIM, seed=seed) for seed in range(3))
    whole = layout_of("dense", 75, is_causal)
    found = [check_equal(q, k, v, whole.windowed(window)) for window in (1, 17, 23, 32, 100)]
    assert torch.equal(found[-1], block_attention(q, k, v, whole))
    assert whole.windowed(17).num_kept < whole.num_kept
    assert whole.windowed(17) != whole.windowed(23)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("extra", ["none", "all"])
def test_grouped_heads(extra: str, num_kv_heads: int) -> None:
    q = randn(BATCH, HEADS, 64, DIM)
    k, v = (randn(BATCH, num_kv_heads, 64, DIM, seed=seed) for seed in (1, 2))
    check_equal(q, k, v, layout_of("bigbird", 64, True), **options_of(extra, 64, 64))


@pytest.mark.parametrize("extra", ["none", "all"])
@pytest.mark.parametrize(("nq", "q_start", "nk"), [(1, 60, 61), (1, 0, 1), (7, 41, 48), (20, 13, 80), (40, 3, 17)])
def test_queries_that_start_later(nq: int, q_start: int, nk: int, extra: str) -> None:
    q, k, v = randn(BATCH, HEADS, nq, DIM), randn(BATCH, HEADS, nk, DIM, seed=1), randn(BATCH, HEADS, nk, DIM, seed=2)
    for structure in ("scattered", "fixed"):
        layout = layout_of(structure, 80, True)
        check_equal(q, k, v, layout, **options_of(extra, nq, nk), q_start=q_start)


def test_packed_sequences_equal_separate_ones() -> None:
    """With a pattern that keeps the same keys at every position."""
    lengths = [17, 1, 30]
    q, k, v = (randn(1, HEADS, sum(lengths) + 3, DIM, seed=seed) for seed in range(3))
    documents = documents_of(torch.tensor([0, 17, 18, 48], dtype=torch.int32), 51)
    assert documents.tolist() == [[0] * 17 + [1] + [2] * 30 + [3] * 3]
    layout = layout_of("dense", 64, True)
    found = block_attention(q, k, v, layout, documents=documents)
    start = 0
    for length in (*lengths, 3):
        own = slice(start, start + length)
        truth = block_attention(q[:, :, own], k[:, :, own], v[:, :, own], layout)
        torch.testing.assert_close(found[:, :, own], truth)
        start += length


def test_decoding_is_a_row_of_the_whole() -> None:
    """Token after token gives what one call gives, dropout included."""
    n = 50
    q, k, v = (randn(BATCH, HEADS, n, DIM, seed=seed) for seed in range(3))
    layout = layout_of("bigbird", n, True)
    whole = block_attention(q, k, v, layout, dropout=0.2, seed=3)
    for at in (0, 15, 16, 33, 49):
        part = slice(at, at + 1)
        row = block_attention(
            q[:, :, part], k[:, :, : at + 1], v[:, :, : at + 1], layout, dropout=0.2, seed=3, q_start=at
        )
        torch.testing.assert_close(row, whole[:, :, part])


@st.composite
def calls(draw: st.DrawFn) -> tuple[Layout, int, int, int, int]:
    heads, block = draw(st.integers(1, 3)), draw(st.sampled_from([16, 32]))
    rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 10**6))
    density = draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    grid = torch.rand(heads, rows, cols, generator=torch.Generator().manual_seed(seed)) < density
    q_start = draw(st.integers(0, rows * block - 1))
    nq, nk = draw(st.integers(1, rows * block - q_start)), draw(st.integers(1, cols * block))
    return from_dense(grid, block, draw(st.booleans())), q_start, nq, nk, seed


@settings(max_examples=40, deadline=None)
@given(calls())
def test_any_layout_and_length(call: tuple[Layout, int, int, int, int]) -> None:
    layout, q_start, nq, nk, seed = call
    q = randn(2, layout.num_heads, nq, DIM, seed=seed)
    k, v = (randn(2, 1, nk, DIM, seed=seed + more) for more in (1, 2))
    relative = randn(1, nq + nk - 1, seed=seed + 3).requires_grad_()
    check_equal(q, k, v, layout, relative=relative, q_start=q_start, dropout=0.1, seed=seed)


def test_rows_without_keys_are_zeros() -> None:
    n = 40
    q, k, v = (randn(BATCH, HEADS, n, DIM, seed=seed).requires_grad_() for seed in range(3))
    padding = torch.ones(BATCH, n, dtype=torch.bool)
    padding[1] = False
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[3] = False
    bias = torch.zeros(n, n, dtype=torch.float64)
    bias[7] = -torch.inf
    bias.requires_grad_()
    layout = layout_of("scattered", n, False)
    for attention in (dense_attention, block_attention):
        out = attention(q, k, v, layout, key_padding=padding, mask=mask, bias=bias)
        empty = torch.zeros(BATCH, HEADS, n, dtype=torch.bool)
        empty[1], empty[:, :, 16:32], empty[:, :, 3], empty[:, :, 7] = True, True, True, True
        assert (out[empty] == 0).all()
        grads = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[0][empty] == 0).all()
        assert (grads[1][1] == 0).all()
        assert (grads[3][3] == 0).all()
    check_equal(q, k, v, layout, key_padding=padding, mask=mask, bias=bias)


def test_pieces_are_bounded_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    n, dim = 200, 24
    layout = layout_of("bslongformer", n, False)
    q, k, v = (randn(BATCH, HEADS, n, dim, seed=seed) for seed in range(3))
    sizes = reference.check_call(q, k, v, layout, Extras())
    blocks = reference._to_blocks(q, k, v, layout, Extras())
    for limit in (2**24, 20000, 3000):
        monkeypatch.setattr(reference, "PIECE_NUMEL", limit)
        pieces = list(reference._pieces(layout, sizes, blocks))
        assert (len(pieces) > 8) == (limit < 2**24)
        seen = torch.zeros(BATCH, HEADS, layout.num_rows, dtype=torch.int64)
        total = 0
        for piece in pieces:
            rows, width = piece.cols.shape
            numel = piece.heads.numel() * rows * width * 16 * dim
            assert numel <= limit or piece.heads.numel() == rows == 1
            seen[piece.batch[:, None], piece.heads[:, None], piece.rows] += 1
            total += piece.heads.numel() * rows * width
        assert (seen == 1).all()
        assert total <= BATCH * HEADS * layout.num_kept * 1.125
        relative = randn(1, 2 * n - 1, seed=3).requires_grad_()
        check_equal(q, k, v, layout, relative=relative, dropout=0.1)


def test_groups_waste_little() -> None:
    lengths = torch.arange(0, 700)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    cols = torch.cat([torch.arange(length) for length in lengths]).int()
    groups = list(reference._groups(starts, cols, 10**6))
    assert len(groups) < 64
    rows = torch.cat([found for found, _ in groups])
    assert rows.sort().values.tolist() == list(range(1, 700))
    for found, columns in groups:
        for row, its in zip(found.tolist(), columns, strict=True):
            assert its[:row].tolist() == list(range(row))
            assert (its[row:] == 10**6).all()
            assert len(its) <= row * 1.125


def test_half_precision_is_computed_in_float32() -> None:
    n = 70
    layout = layout_of("fixed", n, True)
    exact = [randn(BATCH, HEADS, n, DIM, seed=seed) for seed in range(3)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in exact]
        truth_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
        bias = randn(n, n, seed=4).to(dtype).requires_grad_()
        truth_bias = bias.detach().double().requires_grad_()
        out = block_attention(*inputs, layout, bias=bias)
        truth = dense_attention(*truth_inputs, layout, bias=truth_bias)
        assert out.dtype == dtype
        rtol = torch.finfo(dtype).eps  # one rounding, of the result
        torch.testing.assert_close(out.double(), truth, rtol=rtol, atol=2e-6)
        grads = torch.autograd.grad(out, [*inputs, bias], torch.ones_like(out))
        truths = torch.autograd.grad(truth, [*truth_inputs, truth_bias], torch.ones_like(truth))
        for grad, true, one in zip(grads, truths, [*inputs, bias], strict=True):
            assert grad.dtype == one.dtype
            atol = 1e-6 * max(1.0, true.abs().max().item())
            torch.testing.assert_close(grad.double(), true, rtol=rtol, atol=atol)


def test_autocast_does_not_lower_the_precision() -> None:
    q, k, v = (randn(1, HEADS, 40, DIM, seed=seed, dtype=torch.float32) for seed in range(3))
    layout = layout_of("dense", 40, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = block_attention(q, k, v, layout)
    assert torch.equal(out, block_attention(q, k, v, layout))


def test_strided_inputs_and_large_scores() -> None:
    q, k, v = (randn(BATCH, 50, HEADS, DIM, seed=seed).transpose(1, 2) * 100 for seed in range(3))
    mask = torch.rand(50, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    found = check_equal(
        q.detach(), k.detach(), v.detach(), layout_of("local", 50, True), mask=mask.expand(2, 4, 50, 50)
    )
    assert found.abs().max() > 50


def test_against_torch() -> None:
    q, k, v = (randn(BATCH, HEADS, 48, DIM, seed=seed) for seed in range(3))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(block_attention(q, k, v, layout_of("dense", 48, True)), truth)


def test_gradcheck() -> None:
    q, k, v = (randn(1, 2, 20, 3, seed=seed).requires_grad_() for seed in range(3))
    bias, relative = randn(1, 2, 1, 20).requires_grad_(), randn(2, 39).requires_grad_()
    layout = layout_of("bigbird", 20, True, num_heads=2)

    def attention(*tensors: Tensor) -> Tensor:
        return block_attention(*tensors[:3], layout, bias=tensors[3], relative=tensors[4], dropout=0.2, seed=1)

    assert torch.autograd.gradcheck(attention, (q, k, v, bias, relative), fast_mode=True)


def test_the_hash_of_dropout() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in (0, 1, 2**32 - 1, 2**40 + 17, 2**64 - 1):
        head, query, key = (torch.randint(0, 2**31, (50,), generator=generator) for _ in range(3))
        found = dropout_hash(seed, head, query, key).tolist()
        triples = zip(head.tolist(), query.tolist(), key.tolist(), strict=True)
        assert found == [hash_by_hand(seed, *triple) for triple in triples]
        assert 0 <= seed_word(seed) < 2**32
    assert threshold(0.0) == 0
    assert threshold(0.25) == 2**30


def test_dropout_drops_what_it_says_everywhere() -> None:
    """Over all, by heads, by rows and by columns, and not the same for the next seed."""
    heads, queries, keys = torch.arange(8)[:, None, None], torch.arange(256)[:, None], torch.arange(256)
    kept = [dropout_keep(Extras(dropout=0.3, seed=seed), heads, queries, keys).double() for seed in (0, 1)]
    deviation = 0.3 * 0.7
    for dims, count in (((0, 1, 2), 8 * 256**2), ((1, 2), 256**2), ((0, 2), 8 * 256), ((0, 1), 8 * 256)):
        limit = 5 * math.sqrt(deviation / count)
        for one in kept:
            assert (one.mean(dims) - 0.7).abs().max() < limit
    centred = [one - 0.7 for one in kept]
    pairs = [(centred[0], centred[1])]
    pairs += [(centred[0].narrow(dim, 0, 7), centred[0].narrow(dim, 1, 7)) for dim in range(3)]
    for one, other in pairs:
        assert abs(float((one * other).mean())) < 5 * deviation / math.sqrt(one.numel())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": randn(4, 40, DIM)}, "q.shape"),
        ({"k": randn(BATCH, HEADS, 40, DIM).float()}, r"device\) of k is"),
        ({"k": randn(BATCH, 3, 40, DIM), "v": randn(BATCH, 3, 40, DIM)}, "heads of k is 3"),
        ({"v": randn(BATCH, HEADS, 39, DIM)}, r"\(k.shape, v.shape\) is"),
        ({"q": randn(BATCH, HEADS, 60, DIM)}, "rows of the layout is 3"),
        ({"q_start": 9}, "rows of the layout is 3.*49 query positions"),
        ({"q_start": -1}, "q_start is -1"),
        ({"q": randn(BATCH, 8, 40, DIM)}, "heads of the layout is 4"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"sinks": torch.zeros(3)}, r"sinks.shape is \(3,\)"),
        ({"seed": -1}, "seed is -1"),
        ({"scale": math.inf}, "scale is inf"),
        ({"key_padding": torch.ones(BATCH, 40)}, "key_padding.dtype"),
        ({"key_padding": torch.ones(BATCH, 39).bool()}, "key_padding.shape"),
        ({"documents": torch.ones(BATCH, 40)}, "documents.dtype"),
        ({"documents": torch.ones(BATCH, 39, dtype=torch.int32)}, "documents.shape"),
        ({"documents": torch.ones(BATCH, 40, dtype=torch.int32), "q_start": 5}, "at least 45"),
        ({"mask": torch.ones(39, 40).bool()}, "mask.shape"),
        ({"bias": torch.ones(1, 1, 1, 40, 40)}, "bias.shape"),
        ({"bias": torch.ones(40, 40, dtype=torch.int64)}, "bias.dtype"),
        ({"relative": torch.ones(3, 79)}, "relative.shape"),
        ({"relative": torch.ones(HEADS, 80)}, "relative.shape"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], words: str) -> None:
    call: dict[str, Any] = {name: randn(BATCH, HEADS, 40, DIM) for name in "qkv"} | changes
    for attention in (dense_attention, block_attention):
        with pytest.raises(ValueError, match=words):
            attention(layout=layout_of("dense", 40, False), **call)
