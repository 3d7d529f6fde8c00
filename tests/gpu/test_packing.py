# SPDX-License-Identifier: Apache-2.0
"""The fused packing on a GPU: the bits of codes/reference.py on the host, for every code, dtype, option and odd size.

The truth runs on the host: torch divides by a number on the GPU as it multiplies by its inverse, and scales differ.
"""

from __future__ import annotations

import itertools
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cell_name

from twinflow.codes import BLOCK, CODES, reference
from twinflow.gpu import is_available, packing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not is_available(), reason="needs CUDA and Triton"),
]
UNIT = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "test_gpu_packing.py"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((2, 12_345), (2, 16 * 1025))  # the second row is not aligned, and is
# One element; one for each row; part of a byte; the last block whole; many blocks.
ODD_SIZES = ((1, 1), (2, 1), (3, 15), (2, 4097), (4, 3 * BLOCK), (1, 1_000_077))


@pytest.mark.parametrize("name", UNIT["CASES"])
def test_small_cases(name: str) -> None:
    UNIT["CASES"][name]("cuda")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("cell", list(itertools.product(CODES, DTYPES, UNIT["OPTIONS"])), ids=cell_name)
def test_every_code_dtype_and_option(cell: tuple[Any, ...], size: tuple[int, int]) -> None:
    UNIT["check_cell"]("cuda", *cell, size)


@pytest.mark.parametrize("size", ODD_SIZES, ids=str)
@pytest.mark.parametrize(("code", "dtype"), list(itertools.product(CODES, DTYPES[:2])))
def test_odd_sizes(code: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    UNIT["check_cell"]("cuda", code, dtype, "unscaled", size)


@pytest.mark.parametrize("first", [1, 4, 8])  # 8: of these the exponents alone are not aligned
@pytest.mark.parametrize(("code", "dtype"), list(itertools.product(CODES, DTYPES[:2])))
def test_buffers_that_are_not_aligned(code: str, dtype: torch.dtype, first: int) -> None:
    UNIT["check_cell"]("cuda", code, dtype, "unscaled", (2, 5008), first)


@pytest.mark.parametrize("code", CODES)
def test_sums_that_are_exact(code: str) -> None:
    """Every bit, scales too, of many blocks."""
    UNIT["check_exact"]("cuda", code, (3, 1_000_077))


@pytest.mark.parametrize("code", CODES)
def test_a_second_run_has_the_same_bits(code: str) -> None:
    UNIT["check_again"]("cuda", code, (1, 5_000_011))


@pytest.mark.parametrize("num_rows", [2, 4, 5, 8, 9, 21, 64])
@pytest.mark.parametrize("code", CODES)
def test_means_of_many_rows(code: str, num_rows: int) -> None:
    UNIT["check_many_rows"]("cuda", code, num_rows)


@pytest.mark.parametrize("size", [(1, 2**31 + 5003), (3, 2**30 + 8)], ids=str)
@pytest.mark.parametrize("code", ["1bit", "int4"])
def test_offsets_that_32_bits_do_not_hold(code: str, size: tuple[int, int]) -> None:
    """The last blocks of the last row, encoded and decoded with all of it, are what they are alone."""
    own, (num_rows, numel) = CODES[code], size
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    start = numel // BLOCK * BLOCK - BLOCK
    tail = numel - start
    values = torch.zeros(num_rows * numel, dtype=torch.bfloat16, device="cuda")
    values[-tail:] = torch.randint(-9, 10, (tail,), device="cuda").bfloat16()  # sums in any order are the same
    packed = torch.full((num_rows, own.row_bytes(numel)), 255, dtype=torch.uint8, device="cuda")
    alone = torch.empty(1, own.row_bytes(tail), dtype=torch.uint8, device="cuda")
    packing.encode(own, packed, values)
    packing.encode(own, alone, values[-tail:].clone())
    scales_at, codes_at = start // BLOCK * 4, own.scale_bytes(numel) + start * own.bits // 8
    found = torch.zeros_like(alone[0])
    found[:8] = packed[-1, scales_at : scales_at + 8]
    codes = packed[-1, codes_at : codes_at + own.code_bytes(tail)]
    found[8 : 8 + codes.numel()] = codes
    assert torch.equal(found, alone[0])
    assert not packed[-1, codes_at + codes.numel() :].any()

    before = values[-tail:].clone()
    packing.decode(own, values, packed, is_added=True)
    true = before.cpu()
    reference.decode(own, true, alone.cpu(), is_added=True)
    assert torch.equal(values[-tail:].cpu(), true)


def test_it_runs_on_the_current_stream() -> None:
    """Queued behind slow work of the same stream that makes its values, it must wait for them."""
    code, numel = CODES["int8"], 1 << 20
    values, out = torch.full((numel,), float("nan"), device="cuda"), torch.zeros(numel, device="cuda")
    packed = torch.zeros(1, code.row_bytes(numel), dtype=torch.uint8, device="cuda")
    work = [partial(packing.encode, code, packed, values), partial(packing.decode, code, out, packed)]
    for part in work:  # compiled
        part()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        values.fill_(127.0)
        for part in work:
            part()
    assert not stream.query()  # nothing waited on the host
    stream.synchronize()
    assert (out == 127.0).all()


def test_it_is_usable() -> None:
    assert packing.is_usable(torch.device("cuda", torch.cuda.current_device()))
