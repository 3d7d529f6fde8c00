# SPDX-License-Identifier: Apache-2.0
"""Packs numbers into codes of few bits, averages packed rows and unpacks them, each in one pass over memory.

codes/reference.py gives the same bits, and runs if the library is missing. Arguments are checked before any buffer is
modified. A call releases the GIL while the kernel runs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from twinflow.codes import reference
from twinflow.codes.code import Code
from twinflow.errors import invalid_value
from twinflow.native.kernels import DTYPE_CODES, address
from twinflow.native.library import CPacking, load
from twinflow.rules.segment import FLOATS, check_tensor

_DTYPES = {"error": (torch.float32,), "base": FLOATS, "exponents": (torch.uint8,)}


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
    """Pack (base_factor * base + factor * values) * 2**k + error into the rows of `packed`, in equal parts.

    k + 127 is in `exponents`. The rounding error is stored in `error`. codes/reference.py describes all arguments.
    """
    numel = _check(code, packed, "values", values, error=error, base=base, exponents=exponents)
    if numel == 0:
        return
    library = load().library
    if library is None:
        reference.encode(
            code,
            packed,
            values.view(-1),
            _flat(error),
            factor=factor,
            base=_flat(base),
            base_factor=base_factor,
            exponents=_flat(exponents),
            is_scaled=is_scaled,
        )
        return
    packing = _packing(code, packed, values, numel, exponents, is_scaled)
    packing.factor, packing.base_factor, packing.error = factor, base_factor, address(error)
    packing.base, packing.base_type = address(base), DTYPE_CODES[base.dtype] if base is not None else 0
    library.tf_encode(ctypes.byref(packing))


def mean(code: Code, out: Tensor, packed: Tensor, exponents: Tensor | None = None) -> None:
    """Write the mean of the rows of `packed`, times 2**-k, to `out`. k + 127 is in `exponents`."""
    numel = _check(code, packed, "out", out, is_row=True, exponents=exponents)
    if numel == 0:
        return
    library = load().library
    if library is None:
        return reference.mean(code, out.view(-1), packed, _flat(exponents))
    packing = _packing(code, packed, out, numel, exponents, is_scaled=True)
    packing.factor = 1.0 / packed.shape[0]
    library.tf_mean(ctypes.byref(packing))


def decode(
    code: Code,
    out: Tensor,
    packed: Tensor,
    *,
    exponents: Tensor | None = None,
    is_scaled: bool = True,
    is_added: bool = False,
) -> None:
    """Unpack the rows of `packed` in order, times 2**-k, to `out`, or add them to `out` if `is_added`.

    k + 127 is in `exponents`; k is 0 without `is_scaled`.
    """
    numel = _check(code, packed, "out", out, exponents=exponents)
    if numel == 0:
        return
    library = load().library
    if library is None:
        exponents = _flat(exponents)
        reference.decode(code, out.view(-1), packed, exponents=exponents, is_scaled=is_scaled, is_added=is_added)
        return
    packing = _packing(code, packed, out, numel, exponents, is_scaled)
    packing.factor, packing.is_added = 1.0, is_added
    library.tf_decode(ctypes.byref(packing))


def _check(code: Code, packed: Tensor, name: str, values: Tensor, is_row: bool = False, **others: Tensor | None) -> int:
    """Checks the tensors of a call and returns the number of elements of one row of `packed`. With `is_row`, each row
    has as many elements as `values`. Otherwise the rows are equal parts of `values`.
    """
    check_tensor(name, values, FLOATS)
    num_rows = packed.shape[0] if packed.dim() == 2 else 0
    if num_rows == 0 or (values.numel() % num_rows and not is_row):
        allowed = f"two-dimensional, with a number of rows that divides {values.numel()}, the length of {name}"
        raise invalid_value("The shape of packed", tuple(packed.shape), allowed)
    numel = values.numel() if is_row else values.numel() // num_rows
    check_tensor("packed", packed, (torch.uint8,))
    row_bytes = code.row_bytes(numel)
    if packed.shape[1] != row_bytes:
        allowed = f"{(num_rows, row_bytes)}, because {numel} numbers need {row_bytes} bytes in the code {code.name!r}"
        raise invalid_value("The shape of packed", tuple(packed.shape), allowed)
    for other, tensor in others.items():
        if tensor is not None:
            check_tensor(other, tensor, _DTYPES[other], values.numel())
    return numel


def _packing(
    code: Code, packed: Tensor, values: Tensor, numel: int, exponents: Tensor | None, is_scaled: bool
) -> CPacking:
    return CPacking(
        packed=packed.data_ptr(),
        values=values.data_ptr(),
        exponents=address(exponents),
        num_rows=packed.shape[0],
        numel=numel,
        bits=code.bits,
        values_type=DTYPE_CODES[values.dtype],
        is_scaled=is_scaled,
    )


def _flat(tensor: Tensor | None) -> Tensor | None:
    return tensor.view(-1) if tensor is not None else None
