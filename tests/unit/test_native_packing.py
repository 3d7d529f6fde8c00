# SPDX-License-Identifier: Apache-2.0
"""The native packing kernels against their torch reference, bit for bit; any variant, any thread count."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import as_integers, in_pairs
from torch import Tensor

from twinflow import native
from twinflow.codes import reference
from twinflow.codes.code import BLOCK, CODES, Code
from twinflow.native import packing
from twinflow.native.library import open_library
from twinflow.rules.segment import FLOATS

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not installed")
THREADS = sorted({1, 2, 3, os.cpu_count() or 4})
SHAPES = [(1, 1), (2, 7), (3, 64), (2, 1023), (1, BLOCK), (2, BLOCK + 1), (3, 2 * BLOCK - 1), (1, 40_001)]


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    isa, threads = native.isa(), native.get_threads()
    yield
    if native.available():
        native.set_isa(isa)
        native.set_threads(threads)


@dataclass(frozen=True)
class Case:
    """Everything that a call of `encode` reads."""

    values: Tensor
    error: Tensor | None = None
    base: Tensor | None = None
    exponents: Tensor | None = None
    is_scaled: bool = True
    factor: float = 0.37
    base_factor: float = -1.7
    num_rows: int = 1

    def encode(self, module: Any, code: Code) -> tuple[Tensor, Tensor | None]:
        """The packed rows and the error that a module leaves; fresh buffers hold 0xFF."""
        packed = torch.full(
            (self.num_rows, code.row_bytes(self.values.numel() // self.num_rows)), 255, dtype=torch.uint8
        )
        error = self.error.clone() if self.error is not None else None
        module.encode(
            code,
            packed,
            self.values,
            error,
            factor=self.factor,
            base=self.base,
            base_factor=self.base_factor,
            exponents=self.exponents,
            is_scaled=self.is_scaled,
        )
        return packed, error


def numbers(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many sizes, zeros of both signs among them; each block has a size of its own, some of them tiny."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 8, (numel,), generator=generator)
    sizes = torch.tensor([0, 0, 0, -20, -96, -104, -126, -140])
    powers = (
        powers
        + sizes[torch.randint(len(sizes), (numel // 1000 + 1,), generator=generator)].repeat_interleave(1000)[:numel]
    )
    found = torch.randn(numel, generator=generator) * torch.pow(2.0, powers.double()).float()
    found[::13], found[5::13] = 0.0, -0.0
    return found.to(dtype)


def some_exponents(numel: int, seed: int, span: tuple[int, int] = (110, 145)) -> Tensor:
    """Exponents with a fifth left out, and now and then a run of 5000."""
    generator = torch.Generator().manual_seed(seed + 1)
    found = torch.randint(*span, (numel,), generator=generator)
    found[torch.rand(numel, generator=generator) < 0.2] = 0
    if seed % 3 == 0:
        found[numel // 3 : numel // 3 + 5000] = 0
    return found.to(torch.uint8)


def make_case(
    dtype: torch.dtype, base: torch.dtype | None, exponents: str, has_error: bool, shape: tuple[int, int], seed: int = 0
) -> Case:
    numel = shape[0] * shape[1]
    return Case(
        values=numbers(numel, seed, dtype),
        error=numbers(numel, seed + 1) if has_error else None,
        base=numbers(numel, seed + 2, base) if base is not None else None,
        exponents=some_exponents(numel, seed) if exponents != "none" else None,
        is_scaled=exponents == "scaled",
        num_rows=shape[0],
    )


def assert_same(expected: Tensor | None, found: Tensor | None, note: str) -> None:
    """Bit for bit, but any NaN equals any NaN: sign and payload differ between CPUs."""
    if expected is None or found is None:
        assert expected is found
        return
    if expected.is_floating_point():
        assert torch.equal(expected.isnan(), found.isnan()), note
        expected, found = expected[~expected.isnan()], found[~found.isnan()]
    wrong = (as_integers(expected) != as_integers(found)).nonzero()[:3].tolist()
    assert not wrong, f"{note} differs first at {wrong}"


def check_case(code: Code, case: Case, note: str = "") -> None:
    """All three passes, the two back on what the first has packed."""
    packed, error = case.encode(reference, code)
    found, left = case.encode(packing, code)
    assert_same(packed, found, f"{note} packed")
    assert_same(error, left, f"{note} error")
    check_back(code, packed, case.values.dtype, case.exponents, case.is_scaled, note)


def check_back(
    code: Code, packed: Tensor, dtype: torch.dtype, exponents: Tensor | None, is_scaled: bool, note: str
) -> None:
    """`decode` and `mean` of any packed rows; exponents are for all rows together, the mean takes the first row's."""
    numel = packed_numel(code, packed, exponents)
    rows = packed.shape[0]
    for is_added in (False, True):
        outs = []
        for module in (reference, packing):
            out = numbers(rows * numel, 3, dtype) if is_added else torch.full((rows * numel,), math.nan, dtype=dtype)
            module.decode(code, out, packed, exponents=exponents, is_scaled=is_scaled, is_added=is_added)
            outs.append(out)
        assert_same(outs[0], outs[1], f"{note} decoded, added: {is_added}")
    means = []
    for module in (reference, packing):
        out = torch.full((numel,), math.nan, dtype=dtype)
        module.mean(code, out, packed, exponents[:numel].clone() if exponents is not None else None)
        means.append(out)
    assert_same(means[0], means[1], f"{note} mean")


def packed_numel(code: Code, packed: Tensor, exponents: Tensor | None) -> int:
    """Numbers of one row: what the exponents say, or the most that fit."""
    if exponents is not None:
        return exponents.numel() // packed.shape[0]
    numel = packed.shape[1] * 8 // code.bits
    while code.row_bytes(numel) > packed.shape[1]:
        numel -= 1
    return numel


@needs_native
@pytest.mark.parametrize(
    ("code", "dtype", "base", "exponents", "has_error", "shape"),
    in_pairs(list(CODES), FLOATS, (None, *FLOATS), ("none", "scaled", "mask"), (False, True), SHAPES),
)
def test_equals_the_reference(
    code: str, dtype: torch.dtype, base: torch.dtype | None, exponents: str, has_error: bool, shape: tuple[int, int]
) -> None:
    for isa in native.isa_names():
        native.set_isa(isa)
        check_case(CODES[code], make_case(dtype, base, exponents, has_error, shape, seed=shape[1]), isa)


@needs_native
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_case_equals_the_reference(data: st.DataObject) -> None:
    code = CODES[data.draw(st.sampled_from(list(CODES)))]
    shape = data.draw(st.integers(1, 9)), data.draw(st.one_of(st.integers(1, 300), st.integers(300, 20_000)))
    case = make_case(
        data.draw(st.sampled_from(FLOATS)),
        data.draw(st.sampled_from((None, *FLOATS))),
        data.draw(st.sampled_from(("none", "scaled", "mask"))),
        data.draw(st.booleans()),
        shape,
        data.draw(st.integers(0, 1000)),
    )
    factor = data.draw(st.sampled_from((1.0, 0.1, -3.0, 1e-40, 0.0)))
    native.set_isa(data.draw(st.sampled_from(native.isa_names())))
    check_case(code, replace(case, factor=factor))


@needs_native
@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
@pytest.mark.parametrize("isa", native.isa_names())
def test_threads_and_variants_change_no_bit(code: Code, isa: str) -> None:
    case = make_case(torch.bfloat16, torch.float32, "scaled", True, (3, 100_003))
    packed, error = case.encode(reference, code)
    out = torch.empty(100_003)
    reference.mean(code, out, packed)
    native.set_isa(isa)
    for threads in THREADS:
        native.set_threads(threads)
        found, left = case.encode(packing, code)
        assert_same(packed, found, f"{threads} threads: packed")
        assert_same(error, left, f"{threads} threads: error")
        again = torch.full_like(out, math.nan)
        packing.mean(code, again, packed)
        assert_same(out, again, f"{threads} threads: mean")


@needs_native
@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
@pytest.mark.parametrize("exponents", ["none", "scaled", "mask"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.0e38])
def test_a_block_that_is_not_finite_keeps_its_error(code: Code, exponents: str, bad: float) -> None:
    """The second of four blocks holds what is not finite, or numbers whose sum is not; the others are as they were."""
    numel = 2 * BLOCK - 3
    case = replace(make_case(torch.float32, None, exponents, True, (2, numel)), factor=1.0)
    case.values[BLOCK + 40 : BLOCK + 60] = bad
    for isa in native.isa_names():
        native.set_isa(isa)
        check_case(code, case, isa)
    packed, error = case.encode(packing, code)
    assert case.error is not None
    assert error is not None
    scales = packed[:, : code.scale_bytes(numel)].clone().view(torch.float32).flatten()
    if math.isfinite(bad):
        assert scales[[0, 2, 3]].isfinite().all()
        return
    assert scales.isnan().tolist() == [False, True, False, False]
    kept = case.error if case.exponents is None else torch.where(case.exponents != 0, case.error, 0.0)
    assert_same(kept[BLOCK:numel], error[BLOCK:numel], "the bad block's error")


@needs_native
@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
def test_what_is_left_out_has_no_part(code: Code) -> None:
    """Infinities and errors where the exponent is 0 neither reach a scale nor stay in the error."""
    case = make_case(torch.float32, torch.float32, "scaled", True, (2, 6000))
    assert case.exponents is not None
    assert case.error is not None
    assert case.base is not None
    out = case.exponents == 0
    for tensor in (case.values, case.base, case.error):
        tensor[out] = math.inf
    check_case(code, case)
    packed, error = case.encode(packing, code)
    assert error is not None
    assert (error[out] == 0).all()
    assert not packed[:, : code.scale_bytes(6000)].clone().view(torch.float32).isnan().any()
    case.exponents.zero_()
    check_case(code, case, "nothing is left:")


@needs_native
@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 2.0**-101, 2.0**-100, 2.0**-99, 1e37, 3.4e38])
def test_scales_at_the_ends_of_the_range(code: Code, size: float) -> None:
    """Tiny scales are zero and leave everything in the error; the largest numbers and their sums are as in torch."""
    signs = torch.where(torch.arange(BLOCK + 9) % 3 == 0, -1.0, 1.0)
    for isa in native.isa_names():
        native.set_isa(isa)
        check_case(code, Case(signs * size, torch.zeros(BLOCK + 9), factor=1.0), isa)
        check_case(code, Case(signs * size, torch.full((BLOCK + 9,), -0.0), factor=-1.0), isa)


@needs_native
@pytest.mark.parametrize("code", [CODES["int4"], CODES["int8"]], ids=lambda code: code.name)
def test_halves_round_to_even(code: Code) -> None:
    values = torch.arange(-2 * code.top, 2 * code.top + 1) / 2.0  # the scale is 1
    for isa in native.isa_names():
        native.set_isa(isa)
        packed, _ = Case(values, factor=1.0).encode(packing, code)
        out = torch.empty_like(values)
        packing.decode(code, out, packed)
        assert torch.equal(out, values.round())
        check_case(code, Case(values, torch.zeros_like(values), factor=1.0), isa)


@needs_native
@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("exponents", ["none", "scaled", "mask"])
def test_any_bytes_decode_like_the_reference(code: Code, dtype: torch.dtype, exponents: str) -> None:
    """Bytes at random, so codes and scales that `encode` never writes, and every exponent."""
    generator = torch.Generator().manual_seed(11)
    for rows, numel in ((1, 5000), (5, 4097), (9, 130)):
        packed = torch.randint(0, 256, (rows, code.row_bytes(numel)), generator=generator).to(torch.uint8)
        chosen = some_exponents(rows * numel, 0, (0, 256)) if exponents != "none" else None
        for isa in native.isa_names():
            native.set_isa(isa)
            check_back(code, packed, dtype, chosen, exponents == "scaled", isa)


@needs_native
@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)
def test_buffers_off_their_alignment(code: Code) -> None:
    def shifted(tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return torch.cat([tensor[:1], tensor])[1:]

    case = make_case(torch.bfloat16, torch.bfloat16, "scaled", True, (2, 5001))
    expected, error = case.encode(reference, code)
    room = torch.full((expected.numel() + 2,), 255, dtype=torch.uint8)
    packed, left, exponents = room[1:-1].view(2, -1), shifted(case.error), shifted(case.exponents)
    factors = {"factor": case.factor, "base_factor": case.base_factor}
    packing.encode(code, packed, shifted(case.values), left, base=shifted(case.base), exponents=exponents, **factors)
    assert_same(expected, packed, "packed")
    assert_same(error, left, "error")
    assert room[0] == room[-1] == 255
    out, twin = shifted(case.values), case.values.clone()
    packing.decode(code, out, packed, exponents=exponents, is_added=True)
    reference.decode(code, twin, expected, exponents=case.exponents, is_added=True)
    assert_same(twin, out, "decoded")


@needs_native
def test_the_callers_flush_mode_does_not_matter() -> None:
    values, error = torch.full((BLOCK,), 1e-39), torch.zeros(BLOCK)
    packed = torch.empty(1, CODES["1bit"].row_bytes(BLOCK), dtype=torch.uint8)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush mode")
    try:
        packing.encode(CODES["1bit"], packed, values, error)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(error, values)


def test_the_reference_runs_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(torch.float16, torch.bfloat16, "scaled", True, (2, 5000))
    monkeypatch.setattr("twinflow.native.packing.load", lambda: open_library(None))
    for code in CODES.values():
        check_case(code, case)
        grid = torch.zeros(100, 100)  # any shape
        packing.decode(code, grid, case.encode(reference, code)[0], exponents=case.exponents)
        out = torch.zeros(10_000)
        reference.decode(code, out, case.encode(reference, code)[0], exponents=case.exponents)
        assert_same(out, grid.view(-1), "decoded")


def test_nothing_is_packed_into_nothing() -> None:
    code = CODES["1bit"]
    packing.encode(code, torch.empty(3, 0, dtype=torch.uint8), torch.empty(0))
    packing.mean(code, torch.empty(0), torch.empty(3, 0, dtype=torch.uint8))
    packing.decode(code, torch.empty(0), torch.empty(3, 0, dtype=torch.uint8))


GOOD = torch.zeros(2, CODES["1bit"].row_bytes(50), dtype=torch.uint8)
BAD_ENCODE: dict[str, tuple[dict[str, Any], str]] = {
    "values dtype": ({"values": torch.zeros(100).double()}, "values dtype is torch.float64"),
    "values strides": ({"values": torch.zeros(200)[::2]}, "values has the strides"),
    "rows": (
        {"values": torch.zeros(99)},
        r"shape of packed is \(2, 16\), but must be two-dimensional, with a number of rows that divides 99",
    ),
    "no rows": ({"packed": GOOD[:0]}, "shape of packed"),
    "one dimension": ({"packed": GOOD.view(-1)}, "shape of packed"),
    "row bytes": (
        {"packed": torch.zeros(2, 32, dtype=torch.uint8)},
        r"but must be \(2, 16\), because 50 numbers need 16 bytes in the code '1bit'",
    ),
    "packed dtype": ({"packed": GOOD.view(torch.int8)}, "packed dtype is torch.int8"),
    "packed strides": ({"packed": torch.zeros(2, 32, dtype=torch.uint8)[:, :16]}, "packed has the strides"),
    "error dtype": ({"error": torch.zeros(100).bfloat16()}, "error dtype is torch.bfloat16"),
    "error length": ({"error": torch.zeros(99)}, "error length is 99, but must be 100"),
    "base dtype": ({"base": torch.zeros(100).int()}, "base dtype"),
    "exponents dtype": ({"exponents": torch.zeros(100)}, "exponents dtype"),
    "exponents length": ({"exponents": torch.zeros(50, dtype=torch.uint8)}, "exponents length is 50, but must be 100"),
    "device": ({"base": torch.zeros(100, device="meta")}, "base device is 'meta', but must be 'cpu'"),
}


@pytest.mark.parametrize("case", sorted(BAD_ENCODE))
def test_bad_arguments_are_named_and_nothing_is_touched(case: str) -> None:
    changes, message = BAD_ENCODE[case]
    error = torch.full((100,), 3.0)
    arguments: dict[str, Any] = {"packed": GOOD.clone(), "values": torch.ones(100), "error": error, **changes}
    before = arguments["packed"].clone()
    with pytest.raises(ValueError, match=message):
        packing.encode(CODES["1bit"], **arguments)
    assert torch.equal(arguments["packed"], before)
    assert (error == 3.0).all()


def test_bad_arguments_of_the_way_back() -> None:
    code, out = CODES["1bit"], torch.ones(100)
    with pytest.raises(ValueError, match="out dtype"):
        packing.decode(code, out.int(), GOOD)
    with pytest.raises(
        ValueError, match=r"but must be \(2, 32\), because 100 numbers need 32 bytes in the code '1bit'"
    ):
        packing.mean(code, out, GOOD)
    with pytest.raises(ValueError, match="exponents length is 100, but must be 50"):
        packing.mean(code, out[:50], GOOD, torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match="exponents dtype"):
        packing.decode(code, out, GOOD, exponents=torch.zeros(100))
    assert (out == 1.0).all()
