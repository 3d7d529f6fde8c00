# SPDX-License-Identifier: Apache-2.0
"""Converts nested values (options, counters, state) to JSON and a list of tensors, and back. Nothing is pickled.

`take_apart` replaces a tensor by a marker with its name, and a tuple by another marker, so that `put_together` restores
the types. `encode_meta` encodes the result, and any other JSON that a user saves. JSON has no NaN and no infinities,
but metrics such as a best loss can have these values: such a float is written as `{"__nonfinite__": "inf"}`, and a
user's key of that name is an error. `encode_meta` writes tuples as lists. Other values raise a ValueError with their
path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from torch import Tensor

from twinflow import files
from twinflow.checkpoint.disk import damaged
from twinflow.errors import invalid_value
from twinflow.state_dict import Entry

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

FLOAT_KEY: Final = "__nonfinite__"
SPECIAL_FLOATS: Final = ("nan", "inf", "-inf")
_TENSOR, _TUPLE, _FLOAT, _ITEMS = "__tensor__", "__tuple__", "__float__", "__items__"
_MARKS: Final = (_TENSOR, _TUPLE, _FLOAT, _ITEMS)
MAX_DEPTH: Final = 64
MAX_INT_BITS: Final = 4096  # Python does not parse integers of more than about 14,000 bits.


def take_apart(value: Any, path: str) -> tuple[Any, list[Entry]]:
    """`value` as JSON, and the tensors in it, named by `path` and their keys. An `Entry` counts as a tensor."""
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
                remedy = "Convert the key, because checkpoints are never pickled."
                raise invalid_value(f"A key of {path}", key, "a string or a number", remedy)
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
    remedy = "Convert the value, because checkpoints are never pickled."
    raise ValueError(f"{path} is of type {type(value).__name__}, but must be {allowed}. {remedy}")


def put_together(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `take_apart` converted. `tensor` returns a tensor by its name. ValueError if `take_apart` cannot
    have made `value`.
    """
    if isinstance(value, list):
        return [put_together(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next((mark for mark in _MARKS if mark in value), None)
    if mark is None:
        return {key: put_together(item, tensor) for key, item in value.items()}
    inner = value[mark]
    if len(value) == 1:
        if mark == _TENSOR and isinstance(inner, str):
            return tensor(inner)
        if mark == _TUPLE and isinstance(inner, list):
            return tuple(put_together(item, tensor) for item in inner)
        if mark == _FLOAT and inner in SPECIAL_FLOATS:
            return float(inner)
        if mark == _ITEMS and isinstance(inner, list) and all(map(_is_item, inner)):
            return {key: put_together(item, tensor) for key, item in inner}
    raise damaged(f"A value with the mark {mark!r} is not one that twinflow wrote")


def _is_item(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], (str, int, float))


def tensor_names(value: Any) -> dict[str, str]:
    """The names of the tensors among the direct values of a dict that `take_apart` converted, by key."""
    marked = {key: item[_TENSOR] for key, item in value.items() if isinstance(item, dict) and _TENSOR in item}
    return {key: name for key, name in marked.items() if isinstance(name, str)}


def encode_meta(meta: Mapping[str, JSON]) -> bytes:
    """`meta` as the bytes of meta.json. ValueError with the path of a value that JSON cannot represent."""
    if not isinstance(meta, Mapping):
        raise invalid_value("meta", meta, "a dict")
    return json.dumps(_to_json(meta, "meta", 0), indent=1).encode()


def _to_json(value: object, where: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep. Flatten it, or remove the cycle in it.")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            size = f"an integer of {value.bit_length()} bits, but must have at most {MAX_INT_BITS}"
            raise ValueError(f"{where} is {size}. Save it as a string.")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT_KEY: str(float(value))}
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == FLOAT_KEY:
                raise invalid_value(f"A key of {where}", key, f"a string other than {FLOAT_KEY!r}")
        return {key: _to_json(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    allowed = "None, bool, int, float, str, or a list or dict of them. Convert it, or save it as a tensor"
    raise ValueError(f"{where} is of type {type(value).__name__}, but must be {allowed}.")


def decode_meta(raw: bytes, path: Path) -> dict[str, Any]:
    """The `meta` that `encode_meta` encoded, from the bytes of the file at `path`."""
    meta = parse_json(raw, path, _restore_float)
    if not isinstance(meta, dict):
        raise damaged(f"{path} contains a {type(meta).__name__}, but must contain a JSON object")
    return meta


def _restore_float(value: dict[str, Any]) -> Any:
    if FLOAT_KEY not in value:
        return value
    if len(value) != 1 or value[FLOAT_KEY] not in SPECIAL_FLOATS:
        raise ValueError(f"{value!r} is not a float that twinflow wrote")
    return float(value[FLOAT_KEY])


def parse_json(raw: bytes, path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value in `raw`, which was read from `path`. ValueError with the path if it is not standard JSON."""
    try:
        return files.parse_json(raw, parse_constant=_refuse_constant, object_hook=object_hook)
    except ValueError as error:
        text = f"{path} does not contain valid JSON: {error}. The file is damaged, or twinflow did not write it"
        raise damaged(text) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
