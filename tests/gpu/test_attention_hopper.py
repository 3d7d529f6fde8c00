# SPDX-License-Identifier: Apache-2.0
"""The attention kernels made for Hopper against dense attention, and against the kernels for every GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hopper_emulator as emulator
import pytest
import torch

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    Extras,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    hopper,
)
from twinflow.attention.direct_launch import Given
from twinflow.attention.launch import Launch
from twinflow.attention.layout import Layout, from_dense
from twinflow.attention.operators import attend
from twinflow.attention.triton_attention import _CALLS
from twinflow.attention.tuning import Tunings, tunings_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not hopper._has_language(),
        reason="needs a Hopper GPU and a Triton that its kernels know",
    ),
]
LENGTH = 1024


def make_layout(name: str, num_heads: int, block: int, is_causal: bool) -> Layout:
    kwargs: dict[str, Any] = {"attention": "unidirectional" if is_causal else "bidirectional"}
    unit = 128 // block
    if name == "window":
        return LocalSlidingWindowSparsityConfig(num_heads, block, num_sliding_window_blocks=3 * unit, **kwargs).layout(
            LENGTH
        )
    if name == "fixed":
        local = {"num_local_blocks": 4 * unit, "num_global_blocks": unit}
        return FixedSparsityConfig(num_heads, block, **local, **kwargs).layout(LENGTH)
    if name == "bigbird":
        return BigBirdSparsityConfig(num_heads, block, num_sliding_window_blocks=3, **kwargs).layout(LENGTH)
    if name == "longformer":
        indices = list(range(unit))
        window = {"num_sliding_window_blocks": 3 * unit, "global_block_indices": indices}
        return BSLongformerSparsityConfig(num_heads, block, **window, **kwargs).layout(LENGTH)
    assert name == "holes"  # rows and columns without a block, rows with one, and rows with all
    grid = torch.zeros(LENGTH // block, LENGTH // block, dtype=torch.bool)
    grid[2 * unit : 4 * unit] = True
    grid[4 * unit, : 2 * unit] = True
    grid[5 * unit :, 6 * unit :] = True
    return from_dense(grid, block, is_causal=is_causal, num_heads=num_heads)


CASES = [
    ("window", 128, False, (2, 2), 2, torch.bfloat16),
    ("bigbird", 128, False, (4, 4), 2, torch.bfloat16),
    ("bigbird", 128, False, (4, 2), 1, torch.float16),
    ("bigbird", 128, True, (2, 2), 1, torch.bfloat16),
    ("holes", 128, False, (4, 2), 2, torch.bfloat16),
    ("holes", 128, True, (2, 1), 2, torch.bfloat16),
    ("longformer", 64, False, (2, 2), 2, torch.bfloat16),
    ("fixed", 64, True, (4, 1), 1, torch.bfloat16),
    ("holes", 64, False, (2, 1), 2, torch.float16),
    ("window", 32, False, (4, 2), 2, torch.bfloat16),
    ("longformer", 32, True, (2, 2), 1, torch.float16),
    ("window", 16, False, (2, 2), 1, torch.bfloat16),
    ("fixed", 16, True, (2, 2), 2, torch.bfloat16),
    ("longformer", 16, False, (4, 2), 1, torch.bfloat16),
]


def names_of(case: tuple[Any, ...]) -> str:
    name, block, is_causal, heads, batch, dtype = case
    return f"{name}-{block}-{'causal' if is_causal else 'both'}-{heads[0]}:{heads[1]}x{batch}-{str(dtype)[6:]}"


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> torch.Tensor:
    """The truth, in the dtype of its inputs."""
    keep = layout.to_dense().to(q.device)
    keep = keep.repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
    if layout.is_causal:
        keep = keep.tril()
    keep = keep[:, : q.shape[2], : k.shape[2]]
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~keep, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v


def gradients(out: torch.Tensor, grad: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels made for Hopper that have run."""
    names: list[str] = []
    launch = Launch.__call__

    def count(self: Launch, given: Given, device: torch.device) -> None:
        if self.kernel.fn.__module__.endswith("kernels_hopper"):
            names.append(self.kernel.fn.__name__)
        launch(self, given, device)

    monkeypatch.setattr(Launch, "__call__", count)
    return names


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tunings]:
    """Uncut and cut, on all multiprocessors, and on three: then each takes item after item."""
    whole = tunings_for(128, torch.bfloat16)

    def each() -> Iterator[Tunings]:
        for tunings in (whole, replace(whole, min_piece=2)):
            yield tunings
            with monkeypatch.context() as patch:
                patch.setattr(hopper, "_num_processors", lambda device: 3)
                _CALLS.clear()  # they have grids for all multiprocessors
                yield tunings
            _CALLS.clear()

    return each()


def check(
    layout: Layout,
    tensors: list[torch.Tensor],
    grad: torch.Tensor,
    settings: Iterator[Tunings],
    launched: list[str],
) -> None:
    """Each of the three kernels has run, two runs have the same bits, and the error is that of any GPU's kernels."""
    inputs = [tensor.requires_grad_() for tensor in tensors]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = gradients(dense(*exact, layout, 0.1), grad, *exact)
    extras = Extras(scale=0.1)
    for tunings in settings:
        others = gradients(attend(*inputs, layout, extras, "triton", replace(tunings, hopper=False)), grad, *inputs)
        assert not launched
        runs = [gradients(attend(*inputs, layout, extras, "triton", tunings), grad, *inputs) for _ in range(2)]
        assert sorted(launched) == sorted(["forward", "key_gradients", "query_gradients"] * 2)
        launched.clear()
        for found, again, other, wanted in zip(*runs, others, expected, strict=True):
            assert torch.equal(found, again)
            assert far(found, wanted) < 1.05 * far(other, wanted) + 1e-4, (far(found, wanted), far(other, wanted))
            assert far(found, wanted) < 6e-3


def draw(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("case", CASES, ids=names_of)
def test_against_the_truth(case: tuple[Any, ...], settings: Iterator[Tunings], launched: list[str]) -> None:
    name, block, is_causal, (num_heads, num_kv_heads), batch, dtype = case
    layout = make_layout(name, num_heads, block, is_causal)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    *tensors, grad = draw(dtype, *((batch, count, LENGTH, 128) for count in heads))
    check(layout, tensors, grad, settings, launched)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("width", [72, 80, 96, 120])
def test_widths_that_fill_no_tile(width: int, is_fused: bool, settings: Iterator[Tunings], launched: list[str]) -> None:
    """Heads one after the other, and side by side: a tile has columns of no head, or of the next one."""
    layout = make_layout("bigbird", 4, 64, width == 96)
    *tensors, grad = draw(torch.bfloat16, *((2, count, LENGTH, width) for count in (4, 2, 2, 4)))
    if is_fused:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    check(layout, tensors, grad, settings, launched)


@pytest.mark.parametrize("lengths", [(512, 1024), (1024, 384)], ids=str)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
def test_part_of_a_layout(
    lengths: tuple[int, int], block: int, is_causal: bool, settings: Iterator[Tunings], launched: list[str]
) -> None:
    """Fewer queries than keys, fewer keys than queries, and fewer of one than the layout has."""
    layout = make_layout("longformer", 2, block, is_causal)
    num_queries, num_keys = lengths
    shape, kv_shape = (2, 2, num_queries, 128), (2, 1, num_keys, 128)
    *tensors, grad = draw(torch.bfloat16, shape, kv_shape, kv_shape, shape)
    check(layout, tensors, grad, settings, launched)


@pytest.mark.parametrize("case", [CASES[2], CASES[12]], ids=names_of)
def test_heads_side_by_side(case: tuple[Any, ...], launched: list[str]) -> None:
    """As a projection leaves them, q, k and v in one tensor: the same bits, from the same kernels, and no copy."""
    name, block, is_causal, (num_heads, num_kv_heads), batch, dtype = case
    layout = make_layout(name, num_heads, block, is_causal)
    counts = (num_heads, num_kv_heads, num_kv_heads)
    fused, grad = draw(dtype, (batch, LENGTH, sum(counts) * 128), (batch, LENGTH, num_heads, 128))
    split = fused.split([count * 128 for count in counts], dim=2)
    views = [part.unflatten(2, (-1, 128)).transpose(1, 2).requires_grad_() for part in split]
    whole = [view.detach().contiguous().requires_grad_() for view in views]
    grad = grad.transpose(1, 2)
    found = gradients(attend(*views, layout, Extras(), "triton"), grad, *views)
    assert len(launched) == 3
    expected = gradients(attend(*whole, layout, Extras(), "triton"), grad.contiguous(), *whole)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert found[0].stride() == grad.stride()


@pytest.mark.parametrize("case", emulator.CASES, ids=lambda case: case.name)
def test_cases_of_the_emulator(case: emulator.Case) -> None:
    """Other widths, padding, documents, patterns of heads, odd lengths, and heads side by side."""
    emulator.run_case(case, "cuda")
    emulator.run_case(replace(case, length=case.length * 3 + 5, keys=case.keys and case.keys * 3 + 5), "cuda")


@pytest.mark.parametrize("width", [64, 128, 72])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_launches_through_the_driver(width: int, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call. They give the bits of Triton's own launches, also with another seed."""
    layout = make_layout("bigbird", 2, 128, False)
    tensors = [tensor.requires_grad_() for tensor in draw(torch.bfloat16, *[(2, 2, LENGTH, width)] * 4)]
    *inputs, grad = tensors
    launches: set[Launch] = set()
    call = Launch.__call__

    def remember(self: Launch, given: Given, device: torch.device) -> None:
        launches.add(self)
        call(self, given, device)

    monkeypatch.setattr(Launch, "__call__", remember)

    def run(seed: int) -> list[torch.Tensor]:
        out = attend(*inputs, layout, Extras(dropout=dropout, seed=seed), "triton")
        return gradients(out, grad.detach(), *inputs)

    _CALLS.clear()
    run(1)
    found = [run(1), run(2**40 + 1)]
    assert launches
    assert all(launch._direct is not None for launch in launches)
    for launch in launches:
        launch._direct = None  # Triton's own
    for one, seed in zip(found, (1, 2**40 + 1), strict=True):
        for a, b in zip(one, run(seed), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(found[0][0], found[1][0]) == (dropout == 0.0)


def test_saved_tensors_with_other_strides() -> None:
    """Hooks for saved tensors, such as those of offloaded activations, may return them in another form."""
    layout = make_layout("bigbird", 2, 128, False)
    *inputs, grad = draw(torch.bfloat16, *[(2, 2, LENGTH, 128)] * 4)
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def transposed(tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor, with its dimensions of batch and heads in another order in memory."""
        return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 2 else tensor

    def run(unpack: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            out = attend(*inputs, layout, Extras(), "triton")
        return gradients(out, grad, *inputs)

    for a, b in zip(run(transposed), run(lambda tensor: tensor), strict=True):
        assert torch.equal(a, b)


def test_a_cuda_graph_of_direct_launches() -> None:
    """A replay reads the values that its inputs have then."""
    layout = make_layout("bigbird", 2, 64, True)
    q, k, v = draw(torch.bfloat16, *[(1, 2, LENGTH, 96)] * 3)
    padding = torch.ones(1, LENGTH, dtype=torch.bool, device="cuda")
    padding[:, 900:] = False
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            attend(q, k, v, layout, Extras(key_padding=padding), "triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, layout, Extras(key_padding=padding), "triton")
    q.normal_()
    padding[:, 500:] = False
    graph.replay()
    assert torch.equal(out, attend(q, k, v, layout, Extras(key_padding=padding), "triton"))
