# SPDX-License-Identifier: Apache-2.0
"""Packs numbers into codes of few bits, averages packed rows and unpacks them on the GPU, each in one pass over memory.

For equal scales, the codes, errors and decoded numbers have the same bits as those of codes/reference.py. The scales of
4-bit and 8-bit codes have the same bits, too. The scale of the 1-bit code may differ, because its sum is computed in
another order. This order is fixed, so results are reproducible.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from twinflow.attention.launch import on_device
from twinflow.codes.code import BLOCK, CODES, Code
from twinflow.gpu.update import runs

_WARPS = 8  # 256 threads: sixteen elements per thread
_MAX_REGISTERS = 64  # per thread, so that four programs fit on a multiprocessor; only incomplete blocks would use more
_WORDS = {1: torch.uint8, 4: torch.int16, 8: torch.int32}  # type of the words that the kernels read and write, by bits
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def is_usable(device: torch.device) -> bool:
    code, values = CODES["1bit"], torch.zeros(8, device=device)
    packed = torch.empty(1, code.row_bytes(8), dtype=torch.uint8, device=device)

    def trial() -> None:
        encode(code, packed, values)
        decode(code, values, packed)

    return runs(device, trial, "packed numbers")


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
    """Pack `values` into the rows of `packed`, in equal parts. codes/reference.py describes all arguments."""
    num_rows, numel = _check_packed(code, packed, values.numel())
    _check(packed, values.numel(), _DTYPES, values, base)
    _check(packed, values.numel(), (torch.float32,), error)
    _check(packed, values.numel(), (torch.uint8,), exponents)
    if numel == 0:
        return
    from twinflow.gpu import packing_kernel

    with on_device(packed.device):
        tensors = (*_views(code, packed), values, base, error, exponents)
        numbers = (float(factor), float(base_factor), numel, _part_stride(num_rows, numel), packed.stride(0))
        options = {"TOP": code.top, "IS_SCALED": is_scaled, "maxnreg": _MAX_REGISTERS, **_options(code)}
        packing_kernel.encode[(-(-numel // BLOCK), num_rows)](*tensors, *numbers, **options)


def mean(code: Code, out: Tensor, packed: Tensor, exponents: Tensor | None = None) -> None:
    """Write the mean of the rows of `packed`, added in order, times 2**-k, to `out`. k + 127 is in `exponents`."""
    numel = out.numel()
    num_rows, _ = _check_packed(code, packed, numel * packed.shape[0])
    _check(packed, numel, _DTYPES, out)
    _check(packed, numel, (torch.uint8,), exponents)
    if numel == 0:
        return
    from twinflow.gpu import packing_kernel

    with on_device(packed.device):
        args = (out, *_views(code, packed), exponents, numel, packed.stride(0))
        packing_kernel.mean[(-(-numel // BLOCK),)](*args, NUM_ROWS=num_rows, **_options(code))


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
    num_rows, numel = _check_packed(code, packed, out.numel())
    _check(packed, out.numel(), _DTYPES, out)
    _check(packed, out.numel(), (torch.uint8,), exponents)
    if numel == 0:
        return
    from twinflow.gpu import packing_kernel

    with on_device(packed.device):
        args = (out, *_views(code, packed), exponents, numel, _part_stride(num_rows, numel), packed.stride(0))
        options = {"IS_SCALED": is_scaled, "IS_ADDED": is_added, "maxnreg": _MAX_REGISTERS, **_options(code)}
        packing_kernel.decode[(-(-numel // BLOCK), num_rows)](*args, **options)


def _check_packed(code: Code, packed: Tensor, total_numel: int) -> tuple[int, int]:
    """Return the number of rows and the number of elements in a row.

    The kernels do not check addresses, so wrong arguments must be found here.
    """
    assert packed.dtype == torch.uint8 and packed.ndim == 2 and packed.shape[0] > 0, (packed.dtype, packed.shape)
    num_rows = packed.shape[0]
    assert total_numel % num_rows == 0, (total_numel, num_rows)
    numel = total_numel // num_rows
    assert packed.shape[1] == code.row_bytes(numel), (packed.shape, numel)
    assert packed.stride(1) == 1 and packed.stride(0) % 4 == 0 and packed.data_ptr() % 4 == 0, packed.stride()
    assert num_rows == 1 or packed.stride(0) >= packed.shape[1], packed.stride()
    return num_rows, numel


def _check(packed: Tensor, numel: int, dtypes: tuple[torch.dtype, ...], *tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            assert tensor.device == packed.device and tensor.is_contiguous(), (tensor.device, tensor.stride())
            assert tensor.numel() == numel and tensor.dtype in dtypes, (tensor.shape, numel, tensor.dtype)


def _views(code: Code, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Packed rows as words and as fp32, for codes and for scales."""
    return packed.view(_WORDS[code.bits]), packed.view(torch.float32)


def _part_stride(num_rows: int, numel: int) -> int:
    """Elements from one row to the next before packing; 0 for one row, which tells the compiler that it is aligned."""
    return numel if num_rows > 1 else 0


def _options(code: Code) -> dict[str, Any]:
    """Options of a launch. Multiply-adds are not fused, so that each operation is rounded as on the host."""
    return {"BITS": code.bits, "num_warps": _WARPS, "enable_fp_fusion": False}
