"""The check for every tensor that is given to a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow.errors import invalid_value

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(label: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None) -> None:
    """Raise ValueError unless the tensor is dense, contiguous, on the CPU, of one of `dtypes` and of length `numel`."""
    if tensor.layout != torch.strided:
        raise invalid_value(f"{label} layout", tensor.layout, [torch.strided], "Convert it with .to_dense().")
    if tensor.device.type != "cpu":
        raise invalid_value(f"{label} device", str(tensor.device), "cpu", "Move the tensor with .cpu().")
    if tensor.dtype not in dtypes:
        raise invalid_value(f"{label} dtype", tensor.dtype, dtypes)
    if numel is not None and tensor.numel() != numel:
        raise invalid_value(f"{label} length", tensor.numel(), [numel])
    if not tensor.is_contiguous():
        raise invalid_value(
            f"{label} strides", tensor.stride(), "those of a contiguous tensor", "Call .contiguous() first."
        )
