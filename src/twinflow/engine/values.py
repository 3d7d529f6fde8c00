# SPDX-License-Identifier: Apache-2.0
"""Conversion of tensors in nested tuples, lists and dicts, such as inputs of a model."""

from __future__ import annotations

from typing import Any, cast

import torch

from twinflow.state_dict import Kind, map_tensors

# Type of values that belong to the user's model or data, in signatures that return them to the user. Only the user
# knows the type, and type checkers must accept any use of it. Inside the library such a value is an `object`.
UserValue = Any


def cast_floats(value: Kind, dtype: torch.dtype) -> Kind:
    """`value` with floating-point tensors cast to `dtype`."""
    return cast("Kind", map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor))


def to_device(value: Kind, device: torch.device) -> Kind:
    """`value` with all tensors copied to `device`."""
    return cast("Kind", map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True)))
