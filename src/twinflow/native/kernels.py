# SPDX-License-Identifier: Apache-2.0
"""One Python function for each native kernel, except those of packing.py. If the native library is missing, torch
functions of rules/ run instead. They are sufficient for the host optimizers of optim/, but not for offloaded training.

Arguments are checked before a buffer is modified (`check=False` omits this). A call releases the GIL while it runs.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twinflow.native.library import CSegment, load
from twinflow.native.library import set_isa as _set_isa
from twinflow.native.threads import check_threads
from twinflow.rules import formats, reference
from twinflow.rules.segment import FLOATS, Segment, Store, check_segment, check_tensor

__all__ = [
    "accumulate",
    "adopt",
    "advise_huge",
    "available",
    "cast",
    "crc32",
    "gather",
    "get_threads",
    "huge_zeros",
    "isa",
    "isa_names",
    "join",
    "joined_crc32",
    "scale_in_place",
    "set_isa",
    "set_threads",
    "split",
    "sum_squares",
    "update",
]

DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
FORMAT_CODES = {"fp32": 0, "bf16": 1, "int8": 2, "4bit": 3}
MASTER_KINDS = {torch.float32: 0, torch.int16: 1, torch.bfloat16: 2}  # by dtype of the master; tf_master of csrc/api.h


def update(segments: Sequence[Segment], check: bool = True) -> None:
    """One optimizer step of all segments, in one call and one pass over memory.

    `check=False` omits the checks, which take microseconds, for callers that have built the segments themselves.
    """
    for segment in segments if check else ():
        check_segment(segment)
    library = load().library
    if library is None:
        return reference.update(segments)
    table = (CSegment * len(segments))()
    for entry, segment in zip(table, segments, strict=True):
        _fill(entry, segment)
    library.tf_update(table, len(segments))  # the caller keeps the tensors alive until this returns


class Pointers(NamedTuple):
    """Addresses of the buffers of a store. None: the store does not have this buffer."""

    weight: int | None
    master: int | None
    states: tuple[int | None, int | None]
    scales: tuple[int | None, int | None]


def pointers(store: Store) -> Pointers:
    """Addresses of the buffers of a store. The buffers are not kept alive."""
    states = address(store.states[0]), address(store.states[1])
    scales = address(store.scales[0]), address(store.scales[1])
    return Pointers(address(store.weight), address(store.master), states, scales)


def address(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None


def _fill(entry: CSegment, segment: Segment) -> None:
    grad, store = segment.grad, segment.store
    entry.grad, entry.numel, entry.grad_type = grad.data_ptr(), grad.numel(), DTYPE_CODES[grad.dtype]
    entry.rule, entry.format = segment.rule.code, FORMAT_CODES[store.format]
    entry.first_index, entry.factor, entry.key = segment.first_index, segment.factor, segment.key
    entry.hyper[: len(segment.hyper)] = segment.hyper
    entry.weight_type = DTYPE_CODES[store.weight.dtype] if store.weight is not None else 0
    entry.master_kind = MASTER_KINDS[store.master.dtype]
    entry.weight_in, entry.master_in, entry.state_in, entry.scale_in = pointers(store)
    entry.weight, entry.master, entry.state, entry.scale = pointers(segment.target or store)


def sum_squares(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of squares of each tensor in fp64. The bits depend neither on the number of threads nor on the ISA.

    A sum is finite if and only if the tensor has no NaN and no infinity. It therefore also shows whether gradients are
    finite.
    """
    for i, tensor in enumerate(tensors):
        check_tensor(f"tensors[{i}]", tensor, FLOATS)
    library = load().library
    if library is None:
        return reference.sum_squares(tensors)
    count = len(tensors)
    sums = (ctypes.c_double * count)()
    library.tf_sum_squares(
        (ctypes.c_void_p * count)(*(t.data_ptr() for t in tensors)),
        (ctypes.c_int64 * count)(*(t.numel() for t in tensors)),
        (ctypes.c_int32 * count)(*(DTYPE_CODES[t.dtype] for t in tensors)),
        count,
        sums,
    )
    return list(sums)


def accumulate(into: Tensor, values: Tensor) -> None:
    """Add `values` (fp32, bf16 or fp16) to `into` (fp32)."""
    check_tensor("into", into, (torch.float32,))
    check_tensor("values", values, FLOATS, into.numel())
    library = load().library
    if library is None:
        return reference.accumulate(into, values)
    library.tf_accumulate(into.data_ptr(), values.data_ptr(), DTYPE_CODES[values.dtype], into.numel())


def cast(into: Tensor, values: Tensor) -> None:
    """Copy `values` to `into`, rounded to nearest. Both may be fp32, bf16 or fp16."""
    check_tensor("into", into, FLOATS)
    check_tensor("values", values, FLOATS, into.numel())
    library = load().library
    if library is None:
        return reference.cast(into, values)
    library.tf_cast(
        into.data_ptr(), DTYPE_CODES[into.dtype], values.data_ptr(), DTYPE_CODES[values.dtype], into.numel()
    )


def adopt(master: Tensor, values: Tensor) -> None:
    """Set fp32 `master` to `values`, except in elements that `values` are nearest neighbours of in their dtype."""
    check_tensor("master", master, (torch.float32,))
    check_tensor("values", values, FLOATS, master.numel())
    library = load().library
    if library is None:
        master.copy_(torch.where(formats.rounds_to(master, values), master, values.float()))
        return
    library.tf_adopt(master.data_ptr(), values.data_ptr(), DTYPE_CODES[values.dtype], master.numel())


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Upper (bf16) and lower (int16) halves of fp32 values: the format of a split master."""
    check_tensor("values", values, (torch.float32,))
    library = load().library
    if library is None:
        upper, lower = formats.split(values.reshape(-1))
        return upper.view(values.shape), lower.view(values.shape)
    upper, lower = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    library.tf_split(values.data_ptr(), upper.data_ptr(), lower.data_ptr(), values.numel())
    return upper, lower


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The fp32 values from the halves that `split` returns."""
    check_tensor("upper", upper, (torch.bfloat16,))
    check_tensor("lower", lower, (torch.int16,), upper.numel())
    library = load().library
    if library is None:
        return formats.join(upper.reshape(-1), lower.reshape(-1)).view(upper.shape)
    values = torch.empty_like(upper, dtype=torch.float32)
    library.tf_join(upper.data_ptr(), lower.data_ptr(), values.data_ptr(), values.numel())
    return values


def scale_in_place(values: Tensor, factor: float) -> None:
    """Multiply `values` by `factor`, with the threads of the pool. Benchmarks compare kernels with its memory rate."""
    check_tensor("values", values, (torch.float32,))
    library = load().library
    if library is None:
        values.mul_(factor)
        return
    library.tf_scale_in_place(values.data_ptr(), factor, values.numel())


def advise_huge(tensor: Tensor) -> Tensor:
    """Ask the system for huge pages for a tensor that has not been written yet, and return the tensor. Never raises."""
    library = load().library
    if library is not None and tensor.device.type == "cpu" and tensor.numel():
        library.tf_advise_huge(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """The result of `zlib.crc32`. `value`: the result for the bytes before `data`."""
    library = load().library
    if library is None:
        return zlib.crc32(data, value)
    found: int = library.tf_crc32(value, np.frombuffer(data, np.uint8).ctypes.data, len(data))
    return found


class _CPart(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("lower", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("crc32", ctypes.c_uint32),
    )


def gather(into: np.ndarray | None, parts: Sequence[Tensor | tuple[Tensor, Tensor]]) -> list[int]:
    """Copies flat, contiguous tensors on the host one after the other to the bytes `into`, and returns their checksums.

    A pair has the halves that `split` returns. Its values are joined. With None, nothing is copied. The calling thread
    does all work, so that updates can use the threads of the pool meanwhile.
    """
    library = load().library
    if library is None:
        values = [formats.join(*part) if isinstance(part, tuple) else part for part in parts]
        found = [one.view(torch.uint8).numpy() for one in values]
        if into is not None:
            np.concatenate(found, out=into)
        return [zlib.crc32(one.data) for one in found]
    table = (_CPart * len(parts))()
    for row, part in zip(table, parts, strict=True):
        first, lower = part if isinstance(part, tuple) else (part, None)
        row.data = first.data_ptr()
        row.lower = lower.data_ptr() if lower is not None else None
        row.num_bytes = first.numel() * (first.element_size() if lower is None else 4)
    library.tf_gather(into.ctypes.data if into is not None else None, table, len(parts))
    return [row.crc32 for row in table]


def joined_crc32(first: int, second: int, num_bytes: int) -> int:
    """The crc32 of two runs of bytes, one after the other, from their own ones. The second has `num_bytes` bytes."""
    return _times(_power(8 * num_bytes), first) ^ second


@lru_cache(maxsize=64)
def _power(exponent: int) -> int:
    """x^exponent modulo the polynomial of crc32, whose bit 31 is the coefficient of x^0."""
    found, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            found = _times(found, square)
        square = _times(square, square)
        exponent >>= 1
    return found


def _times(first: int, second: int) -> int:
    """The product of two such polynomials."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (0xEDB88320 if second & 1 else 0)
    return product


def huge_zeros(numel: int, /, *, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, on huge pages if the system provides them."""
    return advise_huge(torch.empty(numel, dtype=dtype)).zero_()


def set_threads(num_threads: int) -> None:
    """Set the number of threads of the kernels, including the calling thread. No effect if the library is missing."""
    number = check_threads(num_threads, "num_threads")
    library = load().library
    if library is not None:
        library.tf_set_threads(number)


def get_threads() -> int:
    """Number of threads of the kernels, or of torch if the library is missing."""
    library = load().library
    return int(library.tf_get_threads()) if library is not None else torch.get_num_threads()


def available() -> bool:
    """Whether the native library was loaded."""
    return load().library is not None


def isa() -> str:
    """Name of the ISA variant in use, or "torch" if the library is missing."""
    library = load().library
    return library.tf_isa().decode() if library is not None else "torch"


def isa_names() -> list[str]:
    """ISA variants that this CPU can run, the fastest first; empty if the library is missing."""
    library = load().library
    return library.tf_isa_available().decode().split() if library is not None else []


def set_isa(name: str) -> None:
    """Select the ISA variant of all kernels. Raises ValueError if this CPU cannot run it or the library is missing."""
    library = load().library
    if library is None:
        raise ValueError(
            f"isa is {name!r}, but no variant of the kernels can be selected, because the native library is not loaded."
            " Run `twinflow doctor`, which shows the cause."
        )
    _set_isa(library, name)
