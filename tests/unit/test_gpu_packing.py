# SPDX-License-Identifier: Apache-2.0
"""The fused packing without a GPU: codes, errors and numbers have the bits of codes/reference.py.

The kernels run in Triton's interpreter, which is chosen when Triton is first imported: so they get a process of their
own, `TRITON_INTERPRET=1 python tests/unit/test_gpu_packing.py CASE ...`. Without the variable the same runs on CUDA.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter_support import in_the_interpreter, needs_triton, run_cases, wanted_cases
from support import as_integers, cell_name, in_pairs
from torch import Tensor

from twinflow.codes import CODES, Code, reference
from twinflow.gpu import packing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GUARD = 16  # elements after every buffer that must stay as they are
OPTIONS = ("alone", "base", "exponents", "unscaled")  # but for the first all with an error, the last with all there is
SIZES = ((1, 4096), (2, 4099), (2, 13))  # rows, elements of one: a whole block; a ragged one after it; half a byte


# What runs in the other process, or on a GPU.


@dataclass(frozen=True)
class Inputs:
    """Of one encode, on the host."""

    code: Code
    num_rows: int
    values: Tensor
    error: Tensor | None = None
    base: Tensor | None = None
    exponents: Tensor | None = None
    is_scaled: bool = True
    factor: float = 1.0
    base_factor: float = 0.0

    @property
    def numel(self) -> int:
        return self.values.numel() // self.num_rows


def make_inputs(code: str, dtype: torch.dtype, options: str, size: tuple[int, int], seed: int = 0) -> Inputs:
    """Numbers of all sizes, zeros of both signs among them."""
    total = size[0] * size[1]
    generator = torch.Generator().manual_seed(seed)
    values, error, base = (torch.randn(total, generator=generator) for _ in range(3))
    values *= torch.tensor([1.0, 1.0, -0.0, 0.0, 1e-3, 1e-7])[torch.randint(6, (total,), generator=generator)]
    error[::3] = -0.0
    exponents = torch.randint(121, 133, (total,), generator=generator, dtype=torch.uint8)
    exponents[torch.rand(total, generator=generator) < 0.25] = 0
    has_exponents = options in ("exponents", "unscaled")
    has_base = options in ("base", "unscaled")
    return Inputs(
        CODES[code],
        size[0],
        values.to(dtype),
        None if options == "alone" else error * 0.1,
        base.to(dtype) if has_base else None,
        exponents if has_exponents else None,
        options != "unscaled",
        0.3,
        0.7 if has_base else 0.0,
    )


def exact_inputs(code: str, size: tuple[int, int], dtype: torch.dtype = BF16) -> Inputs:
    """Small whole numbers: in whichever order they are added, the sum is the same."""
    total, generator = size[0] * size[1], torch.Generator().manual_seed(1)
    values, error, base = (torch.randint(-9, 10, (total,), generator=generator).float() for _ in range(3))
    exponents = torch.randint(124, 130, (total,), generator=generator, dtype=torch.uint8)
    exponents[torch.rand(total, generator=generator) < 0.25] = 0
    return Inputs(CODES[code], size[0], values.to(dtype), error, base.to(dtype), exponents, True, 0.5, 0.25)


def guarded(tensor: Tensor, device: str, first: int = 0) -> Tensor:
    """A copy on the device, `first` elements into a buffer that goes on after it."""
    room = torch.full((first + tensor.numel() + GUARD,), 77, dtype=tensor.dtype, device=device)
    inside = room[first : first + tensor.numel()]
    inside.copy_(tensor)
    return inside


def check_guard(tensor: Tensor, note: str) -> None:
    end = tensor.storage_offset() + tensor.numel()
    after = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), end, (GUARD,), (1,))
    assert (after == 77).all(), f"{note}: written past the end"


def new_packed(code: Code, num_rows: int, numel: int, device: str) -> Tensor:
    """Rows full of ones with 16 bytes between them."""
    row_bytes = code.row_bytes(numel)
    return torch.full((num_rows, row_bytes + 16), 255, dtype=torch.uint8, device=device)[:, :row_bytes]


def same(a: Tensor, b: Tensor, note: str) -> None:
    """Equal bits; a NaN has many."""
    a, b = a.cpu(), b.cpu()
    differs = as_integers(a.contiguous()) != as_integers(b.contiguous())
    if a.is_floating_point():
        differs &= ~(a.isnan() & b.isnan())
    where = differs.nonzero()[:3].tolist()
    assert not where, (note, where, [(a[tuple(i)].item(), b[tuple(i)].item()) for i in where])


def run(inputs: Inputs, device: str, first: int = 0) -> tuple[Tensor, Tensor | None]:
    """Packed rows and the error that the kernel leaves."""
    packed = new_packed(inputs.code, inputs.num_rows, inputs.numel, device)
    error, base, exponents = (
        None if tensor is None else guarded(tensor, device, first)
        for tensor in (inputs.error, inputs.base, inputs.exponents)
    )
    packing.encode(
        inputs.code,
        packed,
        guarded(inputs.values, device, first),
        error,
        factor=inputs.factor,
        base=base,
        base_factor=inputs.base_factor,
        exponents=exponents,
        is_scaled=inputs.is_scaled,
    )
    if error is not None:
        check_guard(error, "error")
    between = packed.as_strided((inputs.num_rows, 16), packed.stride(), packed.shape[1])
    assert (between == 255).all(), "written past a row's end"
    return packed, error


@contextmanager
def scales_of(packed: Tensor, rtol: float) -> Any:
    """The truth takes these scales for its own, once it has seen that they are close."""
    original = reference._scales

    def scales(code: Code, blocks: Tensor, counts: Tensor) -> Tensor:
        true = original(code, blocks, counts)
        ours = packed[:, : 4 * true.shape[1]].cpu().contiguous().view(FP32)
        torch.testing.assert_close(ours, true, rtol=rtol, atol=0.0, equal_nan=True)
        return ours

    reference._scales = scales
    try:
        yield
    finally:
        reference._scales = original


def true_encode(inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    packed = new_packed(inputs.code, inputs.num_rows, inputs.numel, "cpu")
    error = None if inputs.error is None else inputs.error.clone()
    reference.encode(
        inputs.code,
        packed,
        inputs.values,
        error,
        factor=inputs.factor,
        base=inputs.base,
        base_factor=inputs.base_factor,
        exponents=inputs.exponents,
        is_scaled=inputs.is_scaled,
    )
    return packed, error


def check_encode(inputs: Inputs, device: str, first: int = 0) -> Tensor:
    """Rows and errors for the same scales."""
    packed, error = run(inputs, device, first)
    with scales_of(packed, 2e-6 if inputs.code.bits == 1 else 0.0):
        true_packed, true_error = true_encode(inputs)
    same(packed, true_packed, "packed")
    if error is not None and true_error is not None:
        same(error, true_error, "error")
    return packed


def check_decode(inputs: Inputs, packed: Tensor, device: str, dtype: torch.dtype, first: int = 0) -> None:
    """Written and added, and the mean of all rows."""
    own = packed.cpu()
    before = torch.randn(inputs.values.numel(), generator=torch.Generator().manual_seed(9)).to(dtype)
    before[::5] = -0.0
    exponents = None if inputs.exponents is None else guarded(inputs.exponents, device, first)
    for is_added in (False, True):
        out, true = guarded(before, device, first), before.clone()
        options: dict[str, Any] = {"is_scaled": inputs.is_scaled, "is_added": is_added}
        packing.decode(inputs.code, out, packed, exponents=exponents, **options)
        reference.decode(inputs.code, true, own, exponents=inputs.exponents, **options)
        same(out, true, f"decoded, {is_added=}")
        check_guard(out, "decoded")
    part = None if inputs.exponents is None else inputs.exponents[: inputs.numel]
    out, true = guarded(before[: inputs.numel], device, first), before[: inputs.numel].clone()
    packing.mean(inputs.code, out, packed, None if part is None else guarded(part, device, first))
    reference.mean(inputs.code, true, own, part)
    same(out, true, "mean")
    check_guard(out, "mean")


def check_cell(device: str, code: str, dtype: torch.dtype, options: str, size: tuple[int, int], first: int = 0) -> None:
    inputs = make_inputs(code, dtype, options, size)
    check_decode(inputs, check_encode(inputs, device, first), device, dtype, first)


def check_exact(device: str, code: str, size: tuple[int, int] = (2, 4096 + 1001)) -> None:
    """Where sums are exact every bit is the truth's, scales too."""
    inputs = exact_inputs(code, size)
    packed, error = run(inputs, device)
    true_packed, true_error = true_encode(inputs)
    same(packed, true_packed, "packed")
    assert error is not None
    assert true_error is not None
    same(error, true_error, "error")


def check_again(device: str, code: str, size: tuple[int, int] = (1, 4096 + 5)) -> None:
    """A sum is always added in the same order."""
    inputs = make_inputs(code, FP32, "base", size)
    (first, first_error), (second, second_error) = run(inputs, device), run(inputs, device)
    same(first, second, "packed")
    assert first_error is not None
    assert second_error is not None
    same(first_error, second_error, "error")


def check_bad_numbers(device: str, code: str, value: float, place: str, options: str) -> None:
    """A block that is not finite says so, keeps its error and leaves others alone."""
    inputs = make_inputs(code, BF16, options, (1, 4096 + 700))
    bad = inputs.values if place == "values" else inputs.error
    assert bad is not None
    bad[4096 + 333] = value
    if inputs.exponents is not None:
        inputs.exponents[4096 + 333] = 127
    packed = check_encode(inputs, device)
    assert packed[0, :8].cpu().contiguous().view(FP32).isnan().tolist() == [False, True]
    check_decode(inputs, packed, device, BF16)


def check_left_out(device: str, code: str) -> None:
    """Elements whose exponent is zero may be anything and count for nothing; a block may have no others."""
    inputs = make_inputs(code, FP32, "exponents", (1, 2 * 4096))
    assert inputs.exponents is not None
    assert inputs.error is not None
    inputs.exponents[4096:] = 0
    for tensor in (inputs.values, inputs.error):
        tensor[inputs.exponents == 0] = math.nan
    packed, error = run(inputs, device)
    assert packed[0, 4:8].cpu().contiguous().view(FP32).item() == 0.0
    assert error is not None
    assert (error.cpu()[inputs.exponents == 0] == 0.0).all()
    check_decode(inputs, check_encode(inputs, device), device, FP32)


def check_extremes(device: str, code: str) -> None:
    """Scales below 2**-100 are zero; numbers whose sum overflows; every exponent there is; subnormal numbers."""
    generator, numel = torch.Generator().manual_seed(3), 4096
    spread = torch.randn(numel, generator=generator)
    every = torch.arange(numel).remainder(253).add(1).to(torch.uint8)
    zeros = torch.zeros(numel)
    for inputs in (
        Inputs(CODES[code], 1, spread * 2.0**-104, zeros),
        Inputs(CODES[code], 1, spread * 1e-42, zeros),
        Inputs(CODES[code], 1, spread.sign() * 3e38, zeros),
        Inputs(CODES[code], 1, zeros, zeros),
        Inputs(CODES[code], 1, spread * (2.0 ** (127 - every.float())), zeros, exponents=every),
    ):
        packed = check_encode(inputs, device)
        check_decode(inputs, packed, device, FP16)


def check_many_rows(device: str, code: str, num_rows: int = 6) -> None:
    """More rows than a mean loads at once."""
    inputs = make_inputs(code, BF16, "exponents", (num_rows, 77))
    check_decode(inputs, check_encode(inputs, device), device, FP32)


CELL_NAMES, BAD_NAMES = ("code", "dtype", "options", "size"), ("code", "value", "place", "options")
CELLS = in_pairs(tuple(CODES), (FP32, BF16, FP16), OPTIONS, SIZES)
BAD = list(itertools.product(CODES, (math.inf, -math.inf, math.nan), ("values", "error"), ("base", "exponents")))
SPECIAL: dict[str, Callable[..., None]] = {
    "exact": check_exact,
    "again": check_again,
    "left out": check_left_out,
    "extremes": check_extremes,
    "many rows": check_many_rows,
}
CASES: dict[str, Callable[[str], None]] = {
    **{cell_name(c.values): partial(check_cell, **dict(zip(CELL_NAMES, c.values, strict=True))) for c in CELLS},
    **{cell_name(c): partial(check_bad_numbers, **dict(zip(BAD_NAMES, c, strict=True))) for c in BAD},
    **{f"{name}, {code}": partial(check, code=code) for name, check in SPECIAL.items() for code in CODES},
}


# The tests.

QUICK_BAD = ("1bit-inf-values-exponents", "int8-nan-error-base")
PARAMS = [
    *(pytest.param(cell_name(cell.values), marks=cell.marks) for cell in CELLS),
    *(pytest.param(name, marks=[] if name in QUICK_BAD else [pytest.mark.matrix]) for name in map(cell_name, BAD)),
    *(
        pytest.param(f"{name}, {code}", marks=[] if code == "1bit" else [pytest.mark.matrix])
        for name, code in itertools.product(SPECIAL, CODES)
    ),
]


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> dict[str, str]:
    """What went wrong in each case that this session runs, all of them in one process with the interpreter on."""
    return in_the_interpreter(__file__, *wanted_cases(request))


@needs_triton
@pytest.mark.parametrize("name", PARAMS)
def test_bits_are_the_truths(name: str, interpreted: dict[str, str]) -> None:
    assert not interpreted[name], interpreted[name]


def test_without_triton_or_a_gpu_nothing_is_fused() -> None:
    assert not packing.is_usable(torch.device("cpu"))


def test_buffers_are_checked() -> None:
    """The kernels write wherever they are told to."""
    code, values = CODES["1bit"], torch.zeros(100)
    packed = torch.zeros(2, code.row_bytes(50), dtype=torch.uint8)
    for wrong in (values[:99], torch.zeros(200)[::2], values.to(torch.float64), values.to("meta")):
        with pytest.raises(AssertionError):
            packing.encode(code, packed, wrong)
        with pytest.raises(AssertionError):
            packing.decode(code, wrong, packed)
    for options in ({"base": values[:50]}, {"error": values.bfloat16()}, {"exponents": values}):
        with pytest.raises(AssertionError):
            packing.encode(code, packed, values, **options)  # type: ignore[arg-type]
    for rows in (packed[:, :-1], packed.int(), torch.zeros(3, 16, dtype=torch.uint8)):
        with pytest.raises(AssertionError):
            packing.encode(code, rows, values)
    with pytest.raises(AssertionError):
        packing.mean(code, values, packed)


def compiled(name: str, types: dict[str, str], constants: dict[str, Any], cache: Path) -> str:
    """The PTX for an H100 or H200. No GPU is needed for that."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from twinflow.gpu import packing_kernel

    kernel = getattr(packing_kernel, name)
    types = types | dict.fromkeys(("numel", "part_stride", "row_stride"), "i32")
    names = [(i, arg) for i, arg in enumerate(kernel.arg_names)]
    signature = {arg: types.get(arg, "constexpr") for _, arg in names}
    constexprs = {(i,): constants.get(arg) for i, arg in names if arg not in types}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in names
        if types.get(arg, "").startswith("*") or arg in ("part_stride", "row_stride")
    }
    source = ASTSource(kernel, signature, constexprs, aligned)
    options = {"num_warps": 8, "enable_fp_fusion": False, "maxnreg": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


ENCODED = {"words": "*u8", "scales": "*fp32", "error": "*fp32", "factor": "fp32", "base_factor": "fp32"}
BYTES = {"int4": "*i16", "int8": "*i32"}


@needs_triton
@pytest.mark.parametrize(
    ("values", "extras", "wide_loads"),
    [
        pytest.param("*bf16", {"exponents": "*u8"}, 4, marks=pytest.mark.matrix),
        pytest.param("*fp32", {}, 8, marks=pytest.mark.matrix),
        pytest.param("*fp32", {"base": "*fp32", "exponents": "*u8"}, 12, marks=pytest.mark.matrix),
    ],
)
def test_compiled_encode_reads_once_in_wide_words(
    values: str, extras: dict[str, str], wide_loads: int, tmp_path: Path
) -> None:
    """Sixteen elements for each thread: four loads of fp32, four stores of the error, nothing twice."""
    constants = {"BITS": 1, "TOP": 0, "IS_SCALED": True}
    text = compiled("encode", ENCODED | {"values": values} | extras, constants, tmp_path)
    assert text.count("ld.global.v4.b32") == wide_loads
    assert text.count("st.global.v4.b32") == 4
    assert text.count("ld.global.v2.b32") == (4 if values == "*bf16" else 0)
    assert not re.search(r"\bfma\.|\.ftz|\.approx|div\.full", text)
    assert "div.rn.f32" in text


@needs_triton
@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param(name, code, marks=[] if (name, code) == ("decode", "1bit") else [pytest.mark.matrix])
        for name, code in itertools.product(("encode", "mean", "decode"), CODES)
    ],
)
def test_compiled_kernels_round_every_operation(name: str, code: str, tmp_path: Path) -> None:
    constants = {"BITS": CODES[code].bits, "TOP": CODES[code].top, "IS_SCALED": True, "IS_ADDED": True, "NUM_ROWS": 11}
    types = {"words": BYTES.get(code, "*u8"), "exponents": "*u8", "scales": "*fp32"}
    types |= ENCODED | types | {"values": "*fp16"} if name == "encode" else {"out": "*fp16"}
    text = compiled(name, types, constants, tmp_path)
    assert not re.search(r"\bfma\.|\.ftz|\.approx|div\.full", text)


if __name__ == "__main__":
    run_cases(CASES)
