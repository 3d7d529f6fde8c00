"""Tensors inside nested tuples, lists and dicts: what goes into a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors, cast."""
    return _each(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def to_device(value: Any, device: torch.device) -> Any:
    """All tensors, on a device."""
    return _each(value, lambda tensor: tensor.to(device, non_blocking=True))


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_each(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    return value
