# SPDX-License-Identifier: Apache-2.0
"""Packs numbers into codes of 1, 4 or 8 bits with shared scales, averages packed rows and unpacks them, in plain torch.
The native kernels give the same bits. gpu/packing.py says which bits may differ on the GPU.

`encode` packs c = (base_factor * base + factor * values) * 2**k + error. It stores the rounding error, c minus the
decoded codes, in `error`, except in blocks with the scale NaN. `mean` computes the mean of rows that several ranks have
packed, and `decode` unpacks rows. Both multiply by 2**-k. Without `exponents`, k is 0.

`exponents` has k + 127 for each element, which is the exponent field of the fp32 number 2**k. It is 0 for excluded
elements, which are decoded as zero and do not affect a scale. The factors 2**k bring numbers of very different
magnitudes to about the same magnitude before they share a scale. If no result is subnormal, they add no rounding error.
If `is_scaled` is false, k is 0, and `exponents` only tells which elements are excluded.

All arithmetic is fp32, and each operation is rounded. The scale of the 1-bit code depends on the order of summation:
lane i of 64 lanes sums the magnitudes i, i + 64, ... of a block. Then the second half of the lanes is added to the
first half until one lane is left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twinflow.codes.code import BLOCK, Code

LANES = 64
MAX_EXPONENT = 127 + 46  # with this limit the rules do not flush the squares of decoded numbers to zero
TINY = 2.0**-100  # a smaller scale becomes zero, and the rounding error is then the whole value


def encode(
    code: Code,
    packed: Tensor,
    values: Tensor,
    error: Tensor | None = None,
    *,
    factor: float = 1.0,
    base: Tensor | None = None,
    base_factor: float = 0.0,
    exponents: Tensor | None = None,
    is_scaled: bool = True,
) -> None:
    """Pack `values` into the rows of `packed`. Each row gets an equal part. The module docstring has the formula."""
    num_rows = packed.shape[0]
    numel = values.numel() // num_rows
    given = values.float() * factor
    if base is not None:
        given = base.float() * base_factor + given
    if exponents is not None:
        given = torch.where(exponents != 0, given * two_to(exponents) if is_scaled else given, 0.0)
    if error is not None:
        given = given + error
    if exponents is not None:
        given = torch.where(exponents != 0, given, 0.0)
    is_in = torch.ones_like(given) if exponents is None else (exponents != 0).float()
    blocks, counted = _in_blocks(given, num_rows), _in_blocks(is_in, num_rows)
    scales = _scales(code, blocks, counted.sum(-1))
    told, codes = _codes(code, blocks, scales)
    left = _out_of_blocks(blocks - told, numel)
    for row, row_scales, row_codes in zip(packed, scales, _out_of_blocks(codes, numel), strict=True):
        row.zero_()
        raw = row_scales.contiguous().view(torch.uint8)
        row[: raw.numel()] = raw
        row[raw.numel() : raw.numel() + code.code_bytes(numel)] = pack(code, row_codes)
    if error is not None:
        is_bad = _out_of_blocks(scales.isnan()[..., None].expand(blocks.shape), numel)
        kept = torch.where(is_bad, error.view(num_rows, -1), left).view(-1)
        error.copy_(kept if exponents is None else torch.where(exponents != 0, kept, 0.0))


def mean(code: Code, out: Tensor, packed: Tensor, exponents: Tensor | None = None) -> None:
    """Write the mean of the rows of `packed`, times 2**-k, to `out`. The rows are added in their order."""
    total = unpack(code, packed[0], out.numel())
    for row in packed[1:]:
        total = total + unpack(code, row, out.numel())
    total = total * (1.0 / packed.shape[0])
    if exponents is not None:
        total = torch.where(exponents != 0, total * two_to(exponents, -1), 0.0)
    out.copy_(total)


def decode(
    code: Code,
    out: Tensor,
    packed: Tensor,
    *,
    exponents: Tensor | None = None,
    is_scaled: bool = True,
    is_added: bool = False,
) -> None:
    """Unpack the rows of `packed` in order, times 2**-k, into `out`, or add them to `out` if `is_added`."""
    numel = out.numel() // packed.shape[0]
    found = torch.cat([unpack(code, row, numel) for row in packed])
    if exponents is not None:
        found = torch.where(exponents != 0, found * two_to(exponents, -1) if is_scaled else found, 0.0)
    total = out.float() + found if is_added else found
    if is_added and exponents is not None:
        total = torch.where(exponents != 0, total, out.float())
    out.copy_(total)


def two_to(exponents: Tensor, sign: int = 1) -> Tensor:
    """2**k (or 2**-k if `sign` is negative) from the biased exponents k + 127."""
    biased = exponents.int() if sign > 0 else 254 - exponents.int()
    return (biased << 23).view(torch.float32)


def exponents_of(variance: Tensor, eps: float) -> Tensor:
    """Biased exponents k + 127 where 2**k is the power of two nearest to 1 / (sqrt(variance) + eps) on a logarithmic
    scale. They are limited to [1, MAX_EXPONENT], and 0 where the variance is zero.
    """
    inverse = 1.0 / (variance.float().sqrt() + eps)
    biased = ((inverse * math.sqrt(2.0)).view(torch.int32) >> 23).clamp(1, MAX_EXPONENT).to(torch.uint8)
    return torch.where(variance != 0, biased, 0)


def unpack(code: Code, row: Tensor, numel: int) -> Tensor:
    """The numbers of a packed row, in fp32."""
    num_scales = code.scale_bytes(numel)
    scales = row[:num_scales].clone().view(torch.float32)
    raw = row[num_scales : num_scales + code.code_bytes(numel)]
    if code.bits == 8:
        codes = raw.view(torch.int8).float()
    elif code.bits == 4:
        codes = torch.stack([raw & 15, raw >> 4], -1).view(-1)[:numel].float() - 8.0
    else:
        shifts = torch.arange(8, dtype=torch.uint8, device=row.device)
        codes = 1.0 - 2.0 * ((raw[:, None] >> shifts) & 1).view(-1)[:numel].float()
    return codes * scales.repeat_interleave(BLOCK)[:numel]


def pack(code: Code, codes: Tensor) -> Tensor:
    """Pack integer codes into bytes. Codes of the 1-bit code are 1 for negative numbers."""
    if code.bits == 8:
        return codes.to(torch.int8).view(torch.uint8)
    each = 8 // code.bits
    padded = torch.zeros(-(-codes.numel() // each) * each, dtype=torch.uint8, device=codes.device)
    padded[: codes.numel()] = (codes + 8.0 if code.bits == 4 else codes).to(torch.uint8)
    shifts = torch.arange(each, dtype=torch.uint8, device=codes.device) * code.bits
    return (padded.view(-1, each) << shifts).sum(-1, dtype=torch.uint8)


def _in_blocks(flat: Tensor, num_rows: int) -> Tensor:
    """`flat` as [rows, blocks, 4096]. The last block of a row is padded with zeros."""
    rows = flat.view(num_rows, -1)
    num_blocks = -(-rows.shape[1] // BLOCK)
    padded = rows.new_zeros(num_rows, num_blocks * BLOCK)
    padded[:, : rows.shape[1]] = rows
    return padded.view(num_rows, num_blocks, BLOCK)


def _out_of_blocks(blocks: Tensor, numel: int) -> Tensor:
    return blocks.reshape(blocks.shape[0], -1)[:, :numel]


def _scales(code: Code, blocks: Tensor, counts: Tensor) -> Tensor:
    """The scale of each block: 0 if below TINY, NaN if not finite. `counts`: elements that are not excluded."""
    magnitudes = blocks.abs()
    if code.bits > 1:
        scales = magnitudes.amax(-1) / code.top
    else:
        lanes = torch.zeros_like(magnitudes[..., :LANES])
        for part in magnitudes.view(*magnitudes.shape[:-1], -1, LANES).unbind(-2):
            lanes = lanes + part
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        scales = lanes[..., 0] / counts.clamp(min=1.0)
    scales = torch.where(scales < TINY, 0.0, scales)
    return torch.where(scales.isfinite(), scales, torch.nan)


def _codes(code: Code, blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The decoded numbers, and their codes."""
    scales = scales[..., None]
    if code.bits == 1:
        signs = ((blocks < 0) & scales.isfinite()).float()
        return torch.where(signs != 0, -scales, scales), signs
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    codes = (blocks * inverse).round().clamp(-code.top, code.top)
    codes = torch.where(scales.isfinite(), codes, 0.0)
    return codes * scales, codes
