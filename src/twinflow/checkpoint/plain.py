"""JSON that decodes to the encoded values, and errors for values that JSON cannot represent.

JSON has no NaN and no infinities, but metrics such as a best loss can have these values. In `meta` such a float is
written as `{"__nonfinite__": "inf"}`, and a key of that name is an error. Tuples become lists. Other values raise a
ValueError with their path in `meta`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from twinflow.errors import invalid_value

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

FLOAT_KEY: Final = "__nonfinite__"
SPECIAL_FLOATS: Final = ("nan", "inf", "-inf")
MAX_DEPTH: Final = 64
MAX_INT_BITS: Final = 4096  # Python does not parse integers of more than about 14,000 bits.


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
            raise ValueError(
                f"{where} is an integer of {value.bit_length()} bits, but must have at most {MAX_INT_BITS}. "
                "Save it as a string."
            )
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
    raise ValueError(
        f"{where} is of type {type(value).__name__}, but must be None, bool, int, float, str, or a list or dict of "
        "them. Convert it, or save it as a tensor."
    )


def decode_meta(raw: bytes, path: Path) -> dict[str, Any]:
    """The `meta` that `encode_meta` encoded, from the bytes of the file at `path`."""
    meta = parse_json(raw, path, _restore_float)
    if not isinstance(meta, dict):
        raise ValueError(f"{path} contains a {type(meta).__name__}, but must contain an object. The file is damaged.")
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
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_hook=object_hook)
    except (ValueError, RecursionError) as error:
        message = f"{path} does not contain valid JSON: {error}. The file is damaged, or twinflow did not write it."
        raise ValueError(message) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
