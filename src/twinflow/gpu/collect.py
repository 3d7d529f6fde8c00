# SPDX-License-Identifier: Apache-2.0
"""The norm of the gradients of a bucket on the GPU. A bucket holds slices of parameters that are updated together.

A kernel writes the fp32 norm of each block of 128 elements to the `rows` of the bucket. The norm of the bucket is the
fp64 norm of all rows. The bits of rows and norm do not depend on the order in which gradients arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from twinflow.attention.launch import on_device
from twinflow.gpu.update import runs
from twinflow.rules.formats import BLOCK

TILE = 4096  # elements of one program
_WARPS = 8  # 256 threads: sixteen elements per thread, which are two wide loads of bf16
_NORM_WARPS = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def is_usable(device: torch.device) -> bool:
    return runs(
        device, lambda: put_norms(new_rows(BLOCK, device), 0, torch.zeros(BLOCK, device=device)), "gradient norms"
    )


def new_rows(numel: int, device: torch.device) -> Tensor:
    """A buffer for the norms of the blocks of a bucket, filled with zeros."""
    assert numel % BLOCK == 0, numel
    return torch.zeros(numel // BLOCK, dtype=torch.float32, device=device)


def put_norms(rows: Tensor, offset: int, values: Tensor) -> None:
    """Write the norms of a slice's blocks to `rows`. `offset`: its start in the bucket. `values`: its gradient."""
    from twinflow.gpu.collect_kernel import collect

    if not values.is_contiguous():
        values = values.contiguous()
    numel = values.numel()
    # The kernel does not check addresses, so wrong arguments must be found here.
    assert offset % BLOCK == 0 and -(-(offset + numel) // BLOCK) <= rows.numel(), (offset, numel, rows.shape)
    assert rows.dtype == torch.float32 and values.device == rows.device, (rows.dtype, values.device)
    assert values.dtype in _DTYPES, values.dtype
    if numel == 0:
        return
    with on_device(rows.device):
        collect[(-(-numel // TILE),)](
            values,
            rows,
            offset,
            numel,
            TILE=TILE,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # each square must be rounded before it is added
        )


def norm_of(norm: Tensor, rows: Tensor) -> None:
    """Write the norm of a bucket, computed from the norms of its blocks, to the fp64 scalar `norm`."""
    from twinflow.gpu import collect_kernel

    assert norm.dtype == torch.float64 and rows.dtype == torch.float32 and norm.device == rows.device, norm.dtype
    with on_device(rows.device):
        collect_kernel.norm[(1,)](rows, rows.numel(), norm, num_warps=_NORM_WARPS, enable_fp_fusion=False)


def measure_many(norms: Tensor, flats: Sequence[tuple[int, Tensor]]) -> None:
    """Compute the norms of whole buckets with two launches. `flats`: pairs of an index in `norms` and flat gradients.

    The results have the same bits as those of `put_norms` and `norm_of`.
    """
    from twinflow.gpu import collect_kernel

    flat = flats[0][1]
    table = torch.empty(len(flats), 4, dtype=torch.int64, pin_memory=norms.is_cuda)
    entries = table.numpy()
    total = 0
    for row, (index, one) in enumerate(flats):
        assert one.is_contiguous() and one.dtype == flat.dtype and one.numel() % BLOCK == 0, (one.dtype, one.shape)
        assert one.data_ptr() % 16 == 0 and one.device == norms.device, (one.data_ptr(), one.device)
        entries[row] = one.data_ptr(), one.numel(), total, index
        total += one.numel()
    there = table.to(norms.device, non_blocking=True)
    rows = torch.empty(total // BLOCK, dtype=torch.float32, device=norms.device)
    num_tiles = -(-max(one.numel() for _, one in flats) // TILE)
    element = collect_kernel.ELEMENTS[flat.dtype]
    with on_device(norms.device):
        collect_kernel.collect_many[(num_tiles, len(flats))](
            there, rows, ELEMENT=element, TILE=TILE, num_warps=_WARPS, enable_fp_fusion=False
        )
        collect_kernel.norm_many[(len(flats),)](there, rows, norms, num_warps=_NORM_WARPS, enable_fp_fusion=False)


def row_norms(flat: Tensor) -> Tensor:
    """The values that the kernel writes to `rows`, computed with torch. Tests compare the kernel with this function."""
    squares = flat.float().view(-1, BLOCK).square()
    while squares.shape[1] > 1:
        squares = squares[:, 0::2] + squares[:, 1::2]
    return squares.double().sqrt().float().view(-1)  # torch's fp32 sqrt on a CPU may be off by one in the last bit
