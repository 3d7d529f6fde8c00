# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in torch.compile and torch.export: the operators, and calls that become one graph."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from twinflow.attention import (
    BigBirdSparsityConfig,
    DenseSparsityConfig,
    Extras,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseSelfAttention,
    sparse_attention,
)
from twinflow.attention.function import PatternAttention
from twinflow.attention.layout import Layout, from_dense, source_of

HEADS, TOKENS = 2, 40
WINDOW = LocalSlidingWindowSparsityConfig(HEADS, 16, num_sliding_window_blocks=1)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(tokens: int = TOKENS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, tokens, 8, generator=generator).requires_grad_() for _ in range(3)]


def graph(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    return compiled


def gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def operator_args(tensors: list[Tensor], **options: Any) -> tuple[Any, ...]:
    extras = Extras(**options)
    seed = torch.tensor(5) if extras.dropout else None
    more = (extras.key_padding, extras.mask, extras.bias, extras.relative, extras.sinks, seed, extras.documents)
    return (*tensors, *more, WINDOW.handle, "torch", extras.scale, extras.dropout, extras.softcap, 0)


def test_opcheck() -> None:
    """Schemas, fake kernels and gradients are those that the operators declare."""
    q, k, v = inputs()
    padding = torch.ones(1, TOKENS, dtype=torch.bool)
    bias = torch.randn(HEADS, TOKENS, TOKENS, requires_grad=True)
    sinks = torch.randn(HEADS, requires_grad=True)
    documents = torch.arange(TOKENS)[None] // 15
    options = {"key_padding": padding, "bias": bias, "dropout": 0.2, "sinks": sinks, "softcap": 2.0}
    full = operator_args([q, k, v], documents=documents, **options)
    torch.library.opcheck(torch.ops.twinflow.attention.default, full)
    out, lse = torch.ops.twinflow.attention(*(x.detach() if isinstance(x, Tensor) else x for x in full))
    tensors = [tensor.detach() for tensor in (out, q, k, v, out, lse)]
    rest = [x.detach() if isinstance(x, Tensor) else x for x in full[3:]]
    args = (*tensors, *rest, [True, True, False, True, False, True])
    torch.library.opcheck(torch.ops.twinflow.attention_backward.default, args)


@pytest.mark.parametrize("kind", ["layout", "pattern", "layer"])
def test_a_call_is_one_graph(kind: str) -> None:
    """With the bits of an eager call, gradients included."""
    given = inputs()
    layer = SparseSelfAttention(WINDOW, max_seq_length=64)
    calls: dict[str, Callable[..., Tensor]] = {
        "layout": lambda q, k, v: sparse_attention(q, k, v, LAYOUT, scale=0.3),
        "pattern": lambda q, k, v: sparse_attention(q, k, v, WINDOW),
        "layer": layer,
    }
    function = calls[kind]
    check_equal(gradients(graph(function)(*given), given), gradients(function(*given), given))


LAYOUT = WINDOW.layout(TOKENS)


def test_values_of_another_width() -> None:
    """Wider and narrower than keys, as in DeepSeek, with the scale of the keys."""
    q, k, _ = inputs()
    for width in (5, 12):
        v = torch.randn(1, HEADS, TOKENS, width, requires_grad=True)
        found = gradients(sparse_attention(q, k, v, WINDOW), [q, k, v])
        scores = (q @ k.transpose(2, 3) * 8**-0.5).masked_fill(~kept_tokens(), -torch.inf)
        for a, b in zip(found, gradients(scores.softmax(-1) @ v, [q, k, v]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def kept_tokens() -> Tensor:
    assert LAYOUT.is_causal
    return LAYOUT.to_dense().repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :TOKENS, :TOKENS].tril()


def test_another_pattern_is_another_graph() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return sparse_attention(q, k, v, layout)

    given = inputs()
    compiled = graph(call)
    for layout in (LAYOUT, from_dense(torch.ones(3, 3, dtype=torch.bool), 16, num_heads=HEADS)):
        assert torch.equal(compiled(*given, layout), call(*given, layout))


def test_one_graph_for_all_lengths() -> None:
    """The layout belongs to the length of a call, not of the call that was traced; also with cached keys."""
    attention = PatternAttention(FixedSparsityConfig(HEADS, 16, num_local_blocks=2, attention="unidirectional"), 128)
    compiled = graph(attention, dynamic=True)
    for tokens in (40, 70):
        given = inputs(tokens)
        assert torch.equal(compiled(*given), attention(*given))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(*inputs(90)), attention(*inputs(90)))
    q, k, v = inputs(70)
    assert torch.equal(compiled(q[:, :, 60:], k, v), attention(q[:, :, 60:], k, v))


def test_dropout_is_drawn_in_each_call() -> None:
    attention = PatternAttention(WINDOW)
    compiled = graph(lambda q, k, v: attention(q, k, v, 0.5))
    given = inputs()
    torch.manual_seed(3)
    first, second = (compiled(*given) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(attention(*given, 0.5), first)


def test_an_exported_program_has_the_call() -> None:
    layer = SparseSelfAttention(BigBirdSparsityConfig(HEADS, 16, num_sliding_window_blocks=1), max_seq_length=64)
    given = tuple(tensor.detach() for tensor in inputs(64))
    exported = torch.export.export(layer, given)
    assert [node.target for node in exported.graph.nodes].count(torch.ops.twinflow.attention.default) == 1
    assert torch.equal(exported.module()(*given), layer(*given))


def test_a_handle_names_one_object() -> None:
    """A copy has its own, so that it does not depend on the life of the first."""
    pattern = BigBirdSparsityConfig(HEADS, 16)
    attention = PatternAttention(pattern, 64)
    for one in (pattern, pattern.layout(64), attention.source(False)):
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert source_of(other.handle) is other
            assert other.handle != one.handle
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert hash(copy.deepcopy(pattern)) == hash(pattern)


def test_a_graph_whose_pattern_is_gone_says_so() -> None:
    pattern = DenseSparsityConfig(HEADS, 32)
    args = (*operator_args(inputs())[:10], pattern.handle, "torch", None, 0.0, 0.0, 0)
    torch.ops.twinflow.attention(*args)
    from twinflow.attention import patterns

    patterns._cached_layout.cache_clear()
    del pattern
    gc.collect()
    with pytest.raises(RuntimeError, match="does not exist in this process"):
        torch.ops.twinflow.attention(*args)
