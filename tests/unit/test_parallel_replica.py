# SPDX-License-Identifier: Apache-2.0
"""Digests of batches: equal for equal batches, different for any other."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch

from twinflow.parallel import replica
from twinflow.parallel.replica import digest, hash_values

BATCH = {"tokens": torch.arange(6).view(2, 3), "rest": [torch.tensor([0.5, -1.0]), 3, None, True]}


def test_equal_batches() -> None:
    again = {"tokens": torch.arange(6).view(3, 2).t().contiguous().t().reshape(2, 3), "rest": list(BATCH["rest"])}
    assert digest(BATCH) == digest(again)
    assert digest(BATCH).device is None


@pytest.mark.parametrize(
    "other",
    [
        {**BATCH, "tokens": torch.arange(6).view(3, 2)},
        {**BATCH, "tokens": torch.arange(6).view(2, 3).int()},
        {**BATCH, "tokens": torch.arange(6).view(2, 3).flip(0)},
        {**BATCH, "rest": [torch.tensor([0.5, -1.0]), 4, None, True]},
        {**BATCH, "rest": [torch.tensor([0.5, -1.0]), 3, None]},
        {**BATCH, "rest": [torch.tensor([-1.0, 0.5]), 3, None, True]},
    ],
)
def test_other_batches(other: object) -> None:
    assert digest(BATCH) != digest(other)


@dataclass
class Batch:
    tokens: torch.Tensor


def test_values_in_other_containers() -> None:
    for kind in (UserDict, Batch):
        first, same, other = (kind(**{"tokens": torch.tensor([i])}) for i in (1, 1, 2))
        assert digest(first) == digest(same)
        assert digest(first) != digest(other)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
def test_small_changes(dtype: torch.dtype) -> None:
    """Every single change of small tensors gives another hash, also of those whose sums are equal."""
    rows = torch.cartesian_prod(*[torch.arange(2)] * 8)
    assert len({int(hash_values(row.to(dtype))) for row in rows}) == len(rows)


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100)
    whole = hash_values(x)
    monkeypatch.setattr(replica, "_CHUNK_NUMEL", 7)
    assert hash_values(x) == whole
    assert hash_values(torch.zeros(0)) == 0
