"""The norm of a bucket's gradients on the GPU.

A kernel writes the norm of each block of 128 in fp32 to the bucket's `rows`; the bucket's norm is the fp64 norm of all
rows. However gradients have come, a row has the same bits, and so has the norm.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from twinflow.gpu.update import is_available, is_interpreting
from twinflow.rules.formats import BLOCK

TILE = 4096  # elements of one program
_WARPS = 8  # of 32 threads: sixteen elements for each thread, two wide loads of bf16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Whether the kernel runs on this device: tried once, since to compile it takes more than Triton."""
    if not is_available() or (device.type == "cuda") == is_interpreting():
        return False
    try:
        put_norms(new_rows(BLOCK, device), 0, torch.zeros(BLOCK, device=device))
    except Exception as error:
        warnings.warn(f"gradients are gathered and measured by slower torch kernels ({error})", stacklevel=2)
        return False
    return True


def new_rows(numel: int, device: torch.device) -> Tensor:
    """Norms of a bucket's blocks, zeros so far."""
    assert numel % BLOCK == 0, numel
    return torch.zeros(numel // BLOCK, dtype=torch.float32, device=device)


def put_norms(rows: Tensor, offset: int, values: Tensor) -> None:
    """Norms of the blocks of a slice that starts at `offset` in its bucket; its values may lie anywhere."""
    from twinflow.gpu.collect_kernel import collect

    values = values.contiguous()
    numel = values.numel()
    # The kernel writes wherever it is told to: our mistakes have to end here.
    assert offset % BLOCK == 0 and -(-(offset + numel) // BLOCK) <= rows.numel(), (offset, numel, rows.shape)
    assert rows.dtype == torch.float32 and values.device == rows.device, (rows.dtype, values.device)
    assert values.dtype in _DTYPES, values.dtype
    if numel == 0:
        return
    with torch.cuda.device(rows.device if rows.is_cuda else -1):  # -1 changes nothing
        collect[(-(-numel // TILE),)](
            values,
            rows,
            offset,
            numel,
            TILE=TILE,
            num_warps=_WARPS,
            enable_fp_fusion=False,  # each square is rounded before it is added
        )


def norm_of(norm: Tensor, rows: Tensor) -> None:
    """The bucket's norm from those of its blocks, into a scalar in fp64."""
    torch.linalg.vector_norm(rows, dtype=torch.float64, out=norm)


def row_norms(flat: Tensor) -> Tensor:
    """What the kernel writes to `rows`, in torch: the truth it is tested against."""
    squares = flat.float().view(-1, BLOCK).square()
    while squares.shape[1] > 1:
        squares = squares[:, 0::2] + squares[:, 1::2]
    return squares.sqrt().view(-1)
