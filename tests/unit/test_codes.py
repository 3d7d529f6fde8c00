# SPDX-License-Identifier: Apache-2.0
"""Codes of few bits: what is packed and what is left over are together what was given, and feedback makes up for it.

Checked against definitions in float64 and bytes written by hand. The fused kernels are checked against the same module
elsewhere (test_native_packing.py, test_gpu_packing.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import in_pairs
from torch import Tensor

from twinflow.codes import BLOCK, CODES, Code, code_named, reference
from twinflow.rules.segment import FLOATS

SIZES = (1, 2, 7, 128, 4095, 4096, 4097, 8193)
EVERY_CODE = pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.name)


def noise(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_like(code: Code, numel: int, num_rows: int = 1) -> Tensor:
    """Room for rows of `numel` numbers, full of 0xFF: what is not written shows."""
    return torch.full((num_rows, code.row_bytes(numel)), 255, dtype=torch.uint8)


def scales_of(code: Code, packed: Tensor, numel: int) -> Tensor:
    return packed[:, : code.scale_bytes(numel)].clone().view(torch.float32)


def round_trip(code: Code, values: Tensor, error: Tensor | None = None, **rest: Any) -> tuple[Tensor, ...]:
    """What one packed row stands for, and its scale for each element."""
    packed = packed_like(code, values.numel())
    reference.encode(code, packed, values, error, **rest)
    out = torch.full((values.numel(),), math.nan)
    reference.decode(code, out, packed, exponents=rest.get("exponents"), is_scaled=rest.get("is_scaled", True))
    return out, scales_of(code, packed, values.numel())[0].repeat_interleave(BLOCK)[: values.numel()]


def ulp(x: Tensor) -> Tensor:
    """Of fp32 numbers, as float64."""
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), torch.frexp(x.float()).exponent - 24)


@pytest.mark.parametrize(("code", "dtype", "numel"), in_pairs(list(CODES), FLOATS, SIZES))
def test_what_is_packed_and_what_is_left_are_what_was_given(code: str, dtype: torch.dtype, numel: int) -> None:
    values, before = noise(numel, 1, dtype), noise(numel, 2) * 0.3
    error = before.clone()
    out, scale = round_trip(CODES[code], values, error, factor=0.25)
    given = values.float() * 0.25 + before
    off = (out.double() + error.double() - given.double()).abs()
    assert (off <= ulp(torch.maximum(given.abs(), scale))).all()
    assert (out.abs() <= scale * max(CODES[code].top, 1)).all()
    # Whole numbers are off by half of a scale at most.
    most = torch.maximum(given.abs(), scale) if CODES[code].bits == 1 else scale * 0.5001
    assert (error.abs() <= most).all()


@EVERY_CODE
def test_scales_are_those_of_their_definition(code: Code) -> None:
    """For each block of each row: the mean magnitude, or the largest over the largest code."""
    numel, num_rows = BLOCK + 905, 3
    values = noise(num_rows * numel, 3) * torch.logspace(-3, 3, num_rows).repeat_interleave(numel)
    packed = packed_like(code, numel, num_rows)
    reference.encode(code, packed, values)
    for row, scales in zip(values.view(num_rows, numel), scales_of(code, packed, numel), strict=True):
        for block, scale in zip(row.double().split(BLOCK), scales.tolist(), strict=True):
            magnitudes = block.abs()
            assert scale == pytest.approx(float(magnitudes.mean() if code.bits == 1 else magnitudes.max() / code.top))


# Bytes as the docstring of code.py defines them; the scale of each row is 1.
LITERAL: dict[str, tuple[list[float], list[int]]] = {
    "1bit": ([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0], [0b00010010, 0b1]),
    "int4": ([7.0, -7.0, 0.4, -2.6, 3.0], [0x1F, 0x58, 0x0B]),
    "int8": ([127.0, -127.0, 0.5, 1.5, -3.2], [127, 129, 0, 2, 253]),
}


@EVERY_CODE
def test_bytes_are_where_they_are_said_to_be(code: Code) -> None:
    values, codes = LITERAL[code.name]
    packed = packed_like(code, len(values))
    reference.encode(code, packed, torch.tensor(values))
    assert packed.shape == (1, 16)
    assert scales_of(code, packed, len(values)).item() == 1.0
    assert packed[0, 4:].tolist() == codes + [0] * (12 - len(codes))


@pytest.mark.parametrize(
    ("code", "numel", "found"), [("1bit", 4096, 528), ("1bit", 4097, 528), ("int4", 4097, 2064), ("int8", 1, 16)]
)
def test_bytes_of_a_row(code: str, numel: int, found: int) -> None:
    assert CODES[code].row_bytes(numel) == found


def test_a_code_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="2bit"):
        code_named("2bit")


# What cannot be packed, and what is left out.


@EVERY_CODE
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_block_says_so_and_keeps_its_error(code: Code, bad: float) -> None:
    numel = 2 * BLOCK + 33
    values, before = noise(numel, 4), noise(numel, 5)
    values[BLOCK + 7] = bad
    error = before.clone()
    out, _ = round_trip(code, values, error)
    inside = slice(BLOCK, 2 * BLOCK)
    assert out[inside].isnan().all()
    assert torch.equal(error[inside], before[inside])
    rest = torch.ones(numel, dtype=torch.bool)
    rest[inside] = False
    assert out[rest].isfinite().all()
    assert torch.allclose((out + error)[rest], (values + before)[rest], rtol=0, atol=1e-6)


@EVERY_CODE
@pytest.mark.parametrize("numel", [7, 4097])
def test_elements_without_an_exponent_are_left_out(code: Code, numel: int) -> None:
    """They come out as zero, keep no error, have no part in a scale, and no NaN of theirs matters."""
    values, error = noise(numel, 6), noise(numel, 7) * 0.1
    exponents = torch.full((numel,), 127, dtype=torch.uint8)
    exponents[::3] = 0
    given = (values + error)[exponents != 0]
    values[::3], error[::3] = math.nan, 1e9
    out, scale = round_trip(code, values, error, exponents=exponents)
    assert (out[::3] == 0).all()
    assert (error[::3] == 0).all()
    first = given[: int((exponents[:BLOCK] != 0).sum())].abs()
    assert scale[0].item() == pytest.approx(float(first.mean() if code.bits == 1 else first.max() / code.top))
    kept = exponents != 0
    assert torch.allclose((out + error)[kept], given, rtol=0, atol=1e-6)


@EVERY_CODE
def test_powers_of_two_bring_numbers_to_one_size(code: Code) -> None:
    """With exponents an error is small beside its own number, without them beside the largest."""
    numel = 4097
    size = 2.0 ** (torch.arange(numel) % 12 - 6)
    values = noise(numel, 8).sign() * size * (1.0 + 0.2 * noise(numel, 9).clamp(-1, 1))
    exponents = reference.exponents_of(size.square(), 0.0)
    out, _ = round_trip(code, values, exponents=exponents)
    assert ((out - values).abs() / size).max() < 0.4
    out, _ = round_trip(code, values)
    assert ((out - values).abs() / size).max() > (10 if code.bits == 1 else 0.5 if code.bits == 4 else 0.1)


def test_exponents_are_those_of_one_over_the_root() -> None:
    variance = (noise(4096, 10) * 10.0 ** noise(4096, 11)).square()
    variance[::7] = 0.0
    for eps in (0.0, 1e-8, 1e-2):
        found = reference.exponents_of(variance, eps)
        assert (found[variance == 0] == 0).all()
        size = reference.two_to(found).double() * (variance.double().sqrt() + eps)
        is_in = variance != 0
        assert (size[is_in].log2().abs() <= 0.5 + 1e-6).all()  # the nearest power
        assert torch.equal(reference.two_to(found)[is_in] * reference.two_to(found, -1)[is_in], torch.ones(is_in.sum()))


@EVERY_CODE
def test_the_mean_is_that_of_all_rows(code: Code) -> None:
    numel, num_rows = 4099, 5
    exponents = torch.full((numel,), 130, dtype=torch.uint8)
    exponents[5::11] = 0
    rows, single = [], []
    for i in range(num_rows):
        packed = packed_like(code, numel)
        reference.encode(code, packed, noise(numel, 20 + i), exponents=exponents)
        out = torch.empty(numel)
        reference.decode(code, out, packed, exponents=exponents)
        rows.append(packed)
        single.append(out)
    found = torch.full((numel,), math.nan)
    reference.mean(code, found, torch.cat(rows), exponents)
    assert torch.allclose(found.double(), torch.stack(single).double().mean(0), rtol=1e-6, atol=1e-7)
    assert (found[5::11] == 0).all()


# Feedback.


def lying(numel: int) -> Tensor:
    """Where signs alone lie: a few large numbers, and many small ones of the other sign."""
    return torch.where(torch.arange(numel) % 5 == 0, 2.0, -0.1)


def outcome(code: Code, inputs: list[Tensor], has_feedback: bool) -> tuple[Tensor, Tensor]:
    """The mean of what came out of the inputs, and the last error."""
    error = torch.zeros_like(inputs[0])
    total = torch.zeros(error.numel(), dtype=torch.float64)
    for given in inputs:
        total += round_trip(code, given, error if has_feedback else None)[0]
    return total / len(inputs), error


@EVERY_CODE
@pytest.mark.parametrize("numel", [7, 4097])
@pytest.mark.parametrize("is_constant", [True, False])
def test_over_time_the_mean_is_that_of_what_was_given(code: Code, numel: int, is_constant: bool) -> None:
    """What came out differs from what went in by the last error alone, which stays bounded: with T steps by 1/T."""
    means = []
    for num_steps in (6, 36):
        inputs = [lying(numel) + (0.0 if is_constant else 0.5) * noise(numel, 50 + i) for i in range(num_steps)]
        mean, error = outcome(code, inputs, has_feedback=True)
        wanted = torch.stack(inputs).double().mean(0)
        assert torch.allclose(mean + error.double() / num_steps, wanted, rtol=0, atol=2e-6)
        assert error.abs().max() < (25.0 if code.bits == 1 else 0.5)
        means.append(float((mean - wanted).abs().max()))
    assert means[1] < means[0] / 3 or means[1] < 0.005


@EVERY_CODE
def test_without_feedback_it_is_not(code: Code) -> None:
    numel = 7
    inputs = [lying(numel)] * 64
    mean, _ = outcome(code, inputs, has_feedback=False)
    off = float((mean - lying(numel)).abs().max())
    kept, _ = outcome(code, inputs, has_feedback=True)
    assert off > {1: 0.3, 4: 0.05, 8: 0.001}[code.bits]
    assert float((kept - lying(numel)).abs().max()) < off / 3
