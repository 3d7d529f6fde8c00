# SPDX-License-Identifier: Apache-2.0
"""What was sent in codes and then not used goes back into the error of the rank that sent it."""

from __future__ import annotations

import pytest
import torch

from twinflow.codes import CODES
from twinflow.codes.code import BLOCK
from twinflow.dist.compressed import Coding, Errors, compressed_reduce_scatter, take_back
from twinflow.dist.group import alone


@pytest.mark.parametrize("code", CODES)
def test_as_if_nothing_had_been_said(code: str) -> None:
    """But in places that are not named; and a block that held an infinity was never said."""
    numel = 3 * BLOCK
    torch.manual_seed(0)
    before, given = torch.randn(numel), torch.randn(numel)
    given[5] = torch.inf
    exponents = torch.randint(120, 134, (numel,)).to(torch.uint8)
    exponents[BLOCK : BLOCK + 100] = 0  # no gradient was ever seen
    before[BLOCK : BLOCK + 100] = 0.0
    error, said = before.clone(), torch.zeros(1, CODES[code].row_bytes(numel), dtype=torch.uint8)
    coding = Coding(CODES[code], exponents, 0.5)
    compressed_reduce_scatter(alone(), torch.empty(numel), given, coding, Errors(error, None, said))
    sent = error.clone()
    take_back(coding.code, error, said, exponents, [slice(0, BLOCK + 200), slice(BLOCK + 200, 2 * BLOCK)])
    wanted = before.clone()
    scaled = 0.5 * given * 2.0 ** (exponents.float() - 127) * (exponents != 0)
    wanted[BLOCK:] += scaled[BLOCK:]
    assert torch.allclose(error[: 2 * BLOCK], wanted[: 2 * BLOCK], rtol=1e-5, atol=1e-5)
    assert torch.equal(error[2 * BLOCK :], sent[2 * BLOCK :])
    assert not torch.allclose(sent[BLOCK : 2 * BLOCK], wanted[BLOCK : 2 * BLOCK], atol=1e-2)
