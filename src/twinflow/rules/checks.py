"""The checks that every tensor argument and every option go through."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from twinflow.errors import bad_value
from twinflow.rules.rule import Options

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(label: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None) -> None:
    """Raise ValueError unless the tensor is dense, contiguous, on the CPU, of one of `dtypes` and of length `numel`."""
    if tensor.layout != torch.strided:
        raise bad_value(f"{label} layout", tensor.layout, "a dense tensor")
    if tensor.device.type != "cpu":
        raise bad_value(f"{label} device", str(tensor.device), "cpu")
    if tensor.dtype not in dtypes:
        raise bad_value(f"{label} dtype", tensor.dtype, dtypes)
    if numel is not None and tensor.numel() != numel:
        raise bad_value(f"{label} length", tensor.numel(), [numel])
    if not tensor.is_contiguous():
        raise bad_value(f"{label} strides", tensor.stride(), "a contiguous tensor", "Call .contiguous() first")


def check_numbers(options: Options, *names: str, least: float = 0.0) -> None:
    """Raise ValueError unless each named option that is there is a finite number of at least `least`."""
    for name in names:
        if name in options and not least <= _number(options[name]) < math.inf:
            allowed = "a finite number" if least == -math.inf else f"a finite number >= {least:g}"
            raise bad_value(name, options[name], allowed)
        if name in options and least == -math.inf and not math.isfinite(_number(options[name])):
            raise bad_value(name, options[name], "a finite number")


def check_betas(options: Options) -> None:
    """Both betas lie in [0, 1)."""
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise bad_value("betas", betas, "two numbers in [0, 1)")
    for i, beta in enumerate(betas):
        if not 0.0 <= _number(beta) < 1.0:
            raise bad_value(f"betas[{i}]", beta, "a number in [0, 1)")


def _number(value: Any) -> float:
    """`value` as a float; NaN, which fails every comparison, where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
