"""Converts nested values (options, counters, state) to JSON with their tensors separate, and back.

A tensor becomes a marker with its name, and a tuple becomes another marker, so that decoding restores the types. A
value that JSON cannot represent raises ValueError with its path. No file needs unpickling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from twinflow.errors import invalid_value
from twinflow.state_dict import Entry

_TENSOR, _TUPLE, _FLOAT, _ITEMS = "__tensor__", "__tuple__", "__float__", "__items__"
_MARKS = (_TENSOR, _TUPLE, _FLOAT, _ITEMS)


def take_apart(value: Any, path: str) -> tuple[Any, list[Entry]]:
    """`value` as JSON, and the tensors in it. An `Entry` in `value` counts as a tensor."""
    leaves: list[Entry] = []
    return _strip(value, path, leaves), leaves


def _strip(value: Any, path: str, leaves: list[Entry]) -> Any:
    if isinstance(value, Tensor):
        leaves.append(Entry(path, value.dtype, tuple(value.shape), value.detach))
        return {_TENSOR: path}
    if isinstance(value, Entry):
        leaves.append(value)
        return {_TENSOR: value.name}
    if isinstance(value, tuple):
        return {_TUPLE: [_strip(item, f"{path}/{i}", leaves) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_strip(item, f"{path}/{i}", leaves) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (str, int, float)):
                raise invalid_value(f"A key of {path}", key, "a string or a number", "Checkpoints are never pickled.")
        if any(not isinstance(key, str) or key in _MARKS for key in value):
            return {_ITEMS: [[key, _strip(item, f"{path}/{key}", leaves)] for key, item in value.items()]}
        return {key: _strip(item, f"{path}/{key}", leaves) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    allowed = "None, bool, int, float, str, list, tuple, dict or a tensor"
    remedy = "Convert the value: checkpoints are never pickled."
    raise invalid_value(path, f"a {type(value).__name__}", allowed, remedy)


def put_together(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `take_apart` converted. `tensor` returns a tensor by its name."""
    if isinstance(value, list):
        return [put_together(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensor(value[_TENSOR])
    if _TUPLE in value:
        return tuple(put_together(item, tensor) for item in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    if _ITEMS in value:
        return {key: put_together(item, tensor) for key, item in value[_ITEMS]}
    return {key: put_together(item, tensor) for key, item in value.items()}


def tensor_names(value: Any) -> dict[str, str]:
    """The names of the tensors among the direct values of a converted dict, by key."""
    return {key: item[_TENSOR] for key, item in value.items() if isinstance(item, dict) and _TENSOR in item}
