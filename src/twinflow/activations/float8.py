# SPDX-License-Identifier: Apache-2.0
"""Activations in float8 between forward and backward: e4m3 with one fp32 scale for each token.

A value loses all but 4 of its significant bits, so that gradients differ from those without this format. It takes half
the memory of bf16.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

DTYPE: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(DTYPE).max
ROWS: Final = 1 << 16  # rows that are converted at a time, because the conversion needs fp32


class Encoded(NamedTuple):
    """A tensor in float8, with a scale in fp32 for each row."""

    memory: Tensor  # flat, uint8: the scales of all rows, then their values
    size: torch.Size
    dtype: torch.dtype


def encoded_bytes(size: torch.Size) -> int:
    """Bytes of a tensor in float8."""
    return size.numel() + 4 * size[:-1].numel()


def encode(tensor: Tensor) -> Encoded:
    """The tensor in float8. A row is a token, which is the last dimension."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    memory = torch.empty(encoded_bytes(tensor.shape), dtype=torch.uint8, device=tensor.device)
    scales, values = _parts(memory, len(rows))
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS].to(torch.float32)
        scale = part.abs().amax(1, keepdim=True).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        scales[start : start + ROWS] = scale
        values[start : start + ROWS] = (part / scale).to(DTYPE)
    return Encoded(memory, tensor.shape, tensor.dtype)


def decode(encoded: Encoded) -> Tensor:
    """The tensor in its own dtype, contiguous."""
    num_rows = encoded.size[:-1].numel()
    scales, values = _parts(encoded.memory, num_rows)
    out = torch.empty(encoded.size, dtype=encoded.dtype, device=encoded.memory.device)
    rows = out.view(num_rows, -1)
    for start in range(0, num_rows, ROWS):
        part = slice(start, start + ROWS)
        rows[part] = values[part].to(torch.float32) * scales[part]
    return out


def _parts(memory: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    scales = memory[: 4 * num_rows].view(torch.float32).view(num_rows, 1)
    return scales, memory[4 * num_rows :].view(DTYPE).view(num_rows, -1)
