# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention in Triton without a GPU: the kernels in Triton's interpreter against the truth in float64, and
compiled for a GPU: products on tensor cores, tiles in registers, loads ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attention_support as support
import attention_variants_support as variants
import pytest
import torch
from interpreter_support import in_the_interpreter, needs_triton, run_python, wanted_cases

from twinflow.attention import BigBirdSparsityConfig, Extras, block_attention, hopper, sparse_attention
from twinflow.attention.bias_gradients import _diagonal_sums
from twinflow.attention.extras import check_call
from twinflow.attention.launch import Call
from twinflow.attention.layout import Layout, from_dense
from twinflow.attention.operators import attend
from twinflow.attention.tuning import TUNING, WITH_DESCRIPTORS, Tuning, Tunings, tunings_for

SHARED_BYTES = 227 * 1024  # that a program can have on an H100 or H200
RESERVED_BYTES = 1024  # of shared memory, for each program
REGISTERS = 64 * 1024  # of a multiprocessor


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What went wrong in each case that this session runs, all of them in one process with the interpreter on."""
    return in_the_interpreter(variants.__file__, *wanted_cases(request))


@needs_triton
@pytest.mark.parametrize("name", [case.name for case in support.DEFAULT])
def test_kernels_against_the_truth(name: str, interpreted: dict[str, str]) -> None:
    assert not interpreted[name], interpreted[name]


@needs_triton
@pytest.mark.matrix
@pytest.mark.parametrize("block", support.BLOCKS)
@pytest.mark.parametrize("structure", support.STRUCTURES)
def test_kernels_against_the_truth_everywhere(structure: str, block: int) -> None:
    names = [case.name for case in support.MATRIX if (case.structure, case.block) == (structure, block)]
    assert len(names) == 18
    assert in_the_interpreter(variants.__file__, *names) == dict.fromkeys(names, "")


@needs_triton
@pytest.mark.matrix
def test_the_other_ways_too() -> None:
    names = [case.name for case in support.MORE]
    assert in_the_interpreter(variants.__file__, *names) == dict.fromkeys(names, "")


@needs_triton
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "shared" in name else pytest.mark.matrix) for name in variants.VARIANTS],
)
def test_variants_against_the_truth(name: str, interpreted: dict[str, str]) -> None:
    """Tiles by descriptors."""
    assert not interpreted[name], interpreted[name]


ALLOWED: dict[str, Any] = {"structure": "dense", "block": 64, "dtype": "fp16", "heads": (4, 2)}


@pytest.mark.parametrize(
    ("change", "length", "is_allowed"),
    [
        ({}, 128, True),
        ({"structure": "random", "block": 128}, 256, True),
        ({"cached": 64}, 192, True),
        ({"cached": 20}, 148, False),
        ({"dtype": "fp32"}, 128, False),
        ({"is_causal": True}, 128, False),
        ({"extra": "padding"}, 128, False),
        ({"extra": "relative"}, 128, False),
        ({"extra": "dropout"}, 128, False),
        ({"block": 32}, 128, False),
        ({"is_strided": True}, 128, False),
        ({}, 139, False),
    ],
)
def test_descriptors_are_for_calls_that_allow_them(change: dict[str, Any], length: int, is_allowed: bool) -> None:
    case = support.Case(**(ALLOWED | change))
    layout, inputs = support.make_layout(case, length), support.make_inputs(case, length, 16, "cpu")
    extras, q, k, v = Extras(**inputs.options), inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    tuning = Tuning(64, 64, 4, 2, tma=True, otherwise=Tuning(64, 32, 4, 2))
    call = Call(layout, extras, check_call(q, k, v, layout, extras), q.dtype, q.device, Tunings(tuning, tuning, tuning))
    for others, by_keys in (((k, v), False), ((q, inputs.grad), True)):
        chosen, plan, shape = call.prepare(tuning, others, by_keys)
        assert chosen is (tuning if is_allowed else tuning.otherwise)
        assert is_allowed == shape.TMA
        assert (chosen.tile_rows, chosen.tile_cols) == (shape.OWN, shape.OTHER)
        assert not (is_allowed and plan.has_partial)
    if is_allowed:  # rows that do not start where a descriptor can
        moved = torch.zeros(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
        assert not call.prepare(tuning, (moved, v), False)[0].tma


def test_tunings_are_chosen() -> None:
    """By head dimension and precision; each with descriptors has one of the first table to fall back on."""
    for dim in WITH_DESCRIPTORS:
        found, table = tunings_for(dim, torch.float16), TUNING[dim, False]
        for kernel in ("forward", "queries", "keys"):
            assert getattr(found, kernel).tma
            assert getattr(found, kernel).otherwise == getattr(table, kernel)
    assert tunings_for(80, torch.bfloat16).forward == TUNING[128, False].forward  # rows that are not whole
    assert [dim for dim in range(1, 257) if tunings_for(dim, torch.bfloat16).hopper] == list(range(40, 257, 8))
    assert tunings_for(128, torch.float32) is TUNING[128, True]


def compiled(cache: Path, *names: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Figures of each kernel of each call, compiled for an H100 or H200."""
    script = str(Path(support.__file__).with_name("attention_compile_support.py"))
    env = {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    return {(found["call"], found["kernel"]): found for found in run_python(script, *names, **env)}


@needs_triton
@pytest.mark.matrix  # the interpreter runs these kernels; those for Hopper, below, it cannot
@pytest.mark.parametrize("call", ["64-bf16-128-2-2-portable", "128-bf16-128-2-2-portable"])
def test_compiled_they_use_what_the_gpu_has(tmp_path: Path, call: str) -> None:
    """In bf16 every product is on tensor cores, loads of a loop run ahead of it, and next to nothing is spilled."""
    products = {"forward": 2, "query_gradients": 3, "key_gradients": 4}
    found = compiled(tmp_path, call)
    assert len(found) == 3
    for (_, kernel), figures in found.items():
        assert figures["is_direct"], figures
        assert figures["tensor_products"] == products[kernel], figures
        is_deep = (call[:3], kernel) != ("128", "forward")  # else three programs on a multiprocessor hide its loads
        assert figures["descriptor_copies"] >= (2 * 2 if is_deep else 2), figures  # two tiles, and the next ones
        # Of 168 registers some bytes are spilled, and three programs are faster than two that spill nothing.
        assert figures["spilled_bytes"] <= (0 if call.startswith("64") else 32 if is_deep else 64), figures
        num_programs = 2 if is_deep else 3
        assert figures["registers"] * figures["warps"] * 32 * num_programs <= REGISTERS, figures
        assert (figures["shared_bytes"] + RESERVED_BYTES) * num_programs <= SHARED_BYTES + RESERVED_BYTES, figures


@pytest.mark.skipif(not hopper._has_language(), reason="needs a Triton that the kernels know")
@pytest.mark.matrix
@pytest.mark.parametrize(
    "call",
    [
        "128-bf16-128-2-2",
        "128-fp16-16-4-2-causal",
        "64-bf16-128-2-2",
        "80-fp16-64-2-2-odd-heads",
        "64-bf16-64-4-2-causal-softcap-window",
        "96-bf16-128-2-2-causal-padding-odd",
        "72-bf16-128-4-2-causal",
        "192-bf16-64-2-2-padding",
        "256-bf16-128-2-2",
    ],
)
def test_compiled_those_for_hopper_fit(tmp_path: Path, call: str) -> None:
    """A program has a multiprocessor to itself: two warpgroups with products, each with its own half, and a loader."""
    dim, _, _, heads, kv_heads, *_ = call.split("-")
    num_parts, is_single = len(hopper.widths_of(int(dim))), heads == kv_heads
    products = {"forward": 4, "query_gradients": 3, "key_gradients": 4}
    copies = {"forward": 4, "query_gradients": 6, "key_gradients": 6}
    found = compiled(tmp_path, call)
    assert len(found) == 3
    for (_, kernel), figures in found.items():
        assert not figures["stale_numbers"], figures  # see the notes of the kernels
        assert not figures["unwritten_operands"], figures
        # Loops over tiles with a mask have their own products. For wide heads the last launch is that of values.
        if call.endswith("128-2-2") and not call.startswith("256"):
            assert figures["tensor_products"] == 2 * products[kernel] * num_parts, figures
        assert figures["tensor_products"] > 0, figures
        assert figures["descriptor_copies"] >= copies[kernel] * num_parts, figures
        assert figures["warps"] == 12, figures
        assert figures["registers"] * figures["warps"] * 32 <= REGISTERS, figures
        assert figures["shared_bytes"] <= SHARED_BYTES, figures
        # Between items, and with wide heads or query heads that share keys also in loops.
        limit = 1000 if call.startswith(("192", "256")) else 340 if is_single else 560
        assert figures["spilled_bytes"] <= limit, figures
        assert figures["is_direct"], figures


@needs_triton
@pytest.mark.matrix
@pytest.mark.parametrize(("dim", "is_fp32"), TUNING)
def test_compiled_every_entry_of_the_table_fits(dim: int, is_fp32: bool, tmp_path: Path) -> None:
    """With small blocks and a diagonal, where kernels are largest, and with shared heads."""
    dtype = "fp32" if is_fp32 else "bf16"
    found = compiled(tmp_path, f"{dim}-{dtype}-16-2-2-causal-portable", f"{dim}-{dtype}-64-4-2-causal-portable")
    assert len(found) >= 6
    for figures in found.values():
        assert figures["shared_bytes"] <= SHARED_BYTES, figures
        assert figures["spilled_bytes"] <= 512, figures
        if not is_fp32 and not figures["kernel"].startswith("reduce"):
            assert figures["tensor_products"] > 0, figures


def small(num_heads: int = 2, num_tokens: int = 40) -> tuple[list[torch.Tensor], Layout]:
    layout = from_dense(torch.ones(1, 3, 3, dtype=torch.bool), 16, num_heads=num_heads)
    return [torch.randn(1, num_heads, num_tokens, 16) for _ in range(3)], layout


def test_the_backend_is_chosen() -> None:
    tensors, layout = small()
    expected = block_attention(*tensors, layout, scale=0.3)
    for backend in ("auto", "torch"):
        assert torch.equal(sparse_attention(*tensors, layout, backend=backend, scale=0.3), expected)


def test_a_pattern_is_laid_out_for_the_length() -> None:
    """Queries after cached keys too."""
    pattern = BigBirdSparsityConfig(2, 16, num_sliding_window_blocks=1, attention="unidirectional")
    q, k, v = (torch.randn(1, 2, 75, 16) for _ in range(3))
    whole = sparse_attention(q, k, v, pattern)
    assert torch.equal(whole, block_attention(q, k, v, pattern.layout(75)))
    last = sparse_attention(q[:, :, 70:], k, v, pattern, q_start=70)
    torch.testing.assert_close(last, whole[:, :, 70:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cuda"}, "backend is 'cuda', but must be one of 'auto', 'triton', 'flex', 'torch'"),
        ({"layout": "bigbird"}, "layout is of type str, but must be a Layout or a SparsityConfig"),
        ({"dropuot": 0.1}, "The name of an argument of sparse_attention is 'dropuot', but must be one of 'scale'"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        (
            {"backend": "triton"},
            "q.device is 'cpu', but must be a CUDA device. Move q, k and v to a GPU, or use backend=\"torch\"",
        ),
        ({"backend": "flex"}, 'block is 16, but must be 128 with backend="flex", whose kernels use tiles of this size'),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors, layout = small()
    with pytest.raises(ValueError, match="is ") as found:
        sparse_attention(*tensors, **{"layout": layout, **options})  # type: ignore[arg-type]
    assert message in str(found.value)


def test_what_the_kernels_cannot_do_is_named() -> None:
    tensors, layout = small()
    with pytest.raises(ValueError, match=r"q\.dtype is torch\.float64"):
        attend(*[tensor.double() for tensor in tensors], layout, Extras(), "triton")
    with pytest.raises(ValueError, match="head_dim is 320, but must be at most 256"):
        attend(*[torch.zeros(1, 2, 40, 320) for _ in range(3)], layout, Extras(), "triton")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, 'dropout is 0.1, but must be 0.0 with backend="flex"'),
        ({"bias": torch.zeros(256, 256, requires_grad=True)}, "bias.requires_grad is True"),
        ({"relative": torch.zeros(1, 511, requires_grad=True)}, "relative.requires_grad is True"),
        ({}, "q.device is 'cpu', but must be a CUDA device"),
    ],
)
def test_flex_refuses_with_reasons(options: dict[str, Any], message: str) -> None:
    layout = from_dense(torch.ones(1, 2, 2, dtype=torch.bool), 128, num_heads=2)
    tensors = [torch.randn(1, 2, 256, 16) for _ in range(3)]
    with pytest.raises(ValueError, match="is ") as found:
        sparse_attention(*tensors, layout, backend="flex", **options)
    assert message in str(found.value)
    with pytest.raises(ValueError, match="multiples of 128"):
        sparse_attention(*[tensor[:, :, :200] for tensor in tensors], layout, backend="flex")


@pytest.mark.parametrize("extra", ["none", "padding", "mask", "bias", "relative"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
def test_flex_is_told_the_same_scores(is_causal: bool, extra: str) -> None:
    """Its blocks and functions, put together here as its kernels do: without a GPU it would ignore blocks."""
    from twinflow.attention.flex import block_mask, score_mod

    case = support.Case("random", 128, "fp32", is_causal, extra, heads=(4, 2), batch=2)
    inputs, layout = support.make_inputs(case, 384, 16, "cpu"), support.make_layout(case, 384)
    options = {name: value.detach() if hasattr(value, "detach") else value for name, value in inputs.options.items()}
    q, k, v = (tensor.detach() for tensor in (inputs.q, inputs.k, inputs.v))
    extras = Extras(**options)
    sizes = check_call(q, k, v, layout, extras)
    index = torch.meshgrid(*(torch.arange(n) for n in sizes.scores), indexing="ij")
    told = block_mask(layout, extras, sizes, q.device)
    keep = tokens(told.kv_num_blocks, told.kv_indices).expand(sizes.scores) & told.mask_mod(*index)
    if told.full_kv_num_blocks is not None:
        keep = keep | tokens(told.full_kv_num_blocks, told.full_kv_indices)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 16**-0.5
    added = score_mod(extras, sizes)
    if added is not None:
        scores = added(scores, *index)
    probs = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    expected = block_attention(q, k, v, layout, **options)
    torch.testing.assert_close(probs @ v.repeat_interleave(2, 1), expected, atol=1e-5, rtol=1e-5)


def tokens(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Blocks of a BlockMask as kept tokens."""
    grid = torch.zeros(indices.shape, dtype=torch.bool)
    grid.scatter_(-1, indices.long(), torch.arange(indices.shape[-1]) < counts[..., None])
    return grid.repeat_interleave(128, -1).repeat_interleave(128, -2)


def test_diagonals_are_summed() -> None:
    squares = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    expected = torch.stack([squares.diagonal(offset, -2, -1).sum(-1) for offset in range(-4, 5)], dim=-1)
    torch.testing.assert_close(_diagonal_sums(squares), expected)


def test_cases_hold_every_structure_and_block() -> None:
    assert len(support.MATRIX) == 504
    assert {case.structure for case in support.DEFAULT} == set(support.STRUCTURES)
    assert {case.block for case in support.DEFAULT} == set(support.BLOCKS)
