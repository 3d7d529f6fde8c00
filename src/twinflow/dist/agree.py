# SPDX-License-Identifier: Apache-2.0
"""Exchanges small values between ranks as JSON, over a group on the host. Nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch

from twinflow.dist.group import Group


def gather_json(group: Group, value: Any) -> list[Any]:
    """The values of all ranks, in the order of the ranks."""
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = group.gather_rows(torch.tensor([raw.numel()], dtype=torch.int64))[:, 0].tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: raw.numel()] = raw
    rows = group.gather_rows(padded)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def first_failure(group: Group, error: BaseException | None) -> str | None:
    """The error of the first rank that has one, as text. None if no rank has an error."""
    said = gather_json(group, None if error is None else f"{type(error).__name__}: {error}")
    return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None), None)
