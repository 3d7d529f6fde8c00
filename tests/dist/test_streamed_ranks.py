# SPDX-License-Identifier: Apache-2.0
"""State that is streamed to the device for its update, with weights on the hosts of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import streamed_ranks_cases as cases
import torch
from dist_support import run_ranks
from twin_support import matrix_but

from twinflow.offload.plan import HOST, STREAMED

CASES: list[tuple[torch.dtype, dict[str, float], dict[str, Any]]] = [
    (torch.float32, {}, {"max_grad_norm": 0.5}),
    (torch.bfloat16, {"streamed0": 0.01, "streamed1": 0.01}, {"states": "int8"}),
    (torch.float16, {"fetch": 0.005}, {"max_grad_norm": 0.5, "accumulation_steps": 2}),
    (torch.float32, {"streamed2": 0.01}, {"ratio": 0.6, "accumulation_steps": 2}),
]


@pytest.mark.parametrize(("dtype", "delays", "options"), matrix_but(CASES[1:3], CASES), ids=str)
def test_ranks_have_the_bits_of_updates_on_the_host(
    dtype: torch.dtype, delays: dict[str, float], options: dict[str, Any]
) -> None:
    expected = run_ranks(2, cases.train, 0.0, dtype, {}, options)
    assert [here.pop("places") for here in expected] == [[HOST], [HOST]]
    for share in (0.5, 1.0):
        found = run_ranks(2, cases.train, share, dtype, delays, options)
        for here, there in zip(expected, found, strict=True):
            assert STREAMED in there.pop("places")
            assert here == there
