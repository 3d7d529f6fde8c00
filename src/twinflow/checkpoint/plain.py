"""JSON that comes back as it went in, and the errors for JSON that does not.

JSON has no NaN and no infinities, but a best loss starts as `inf` and a bad one is `nan`, and neither should cost a
checkpoint. In `meta` such a float is written as `{"__nonfinite__": "inf"}`; so a key of that name is refused. Tuples
come back as lists. All else that JSON does not have is refused, by its path in `meta`.
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
MAX_INT_BITS: Final = 4096  # Python refuses to read back integers of some 14,000 bits


def encode_meta(meta: Mapping[str, JSON]) -> bytes:
    """`meta` as the bytes of meta.json; a ValueError names the path of what is not JSON."""
    if not isinstance(meta, Mapping):
        raise invalid_value("meta", meta, "a dict")
    return json.dumps(_to_json(meta, "meta", 0), indent=1).encode()


def _to_json(value: object, where: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} deep; flatten it, or break the cycle in it")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise ValueError(
                f"{where} is an integer of {value.bit_length()} bits, but must have at most {MAX_INT_BITS}."
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT_KEY: str(float(value))}
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == FLOAT_KEY:
                raise invalid_value(f"a key of {where}", key, f"strings other than {FLOAT_KEY!r}")
        return {key: _to_json(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    raise ValueError(
        f"{where} is a {type(value).__name__}, but must be None, bool, int, float, str, lists and dicts of them. "
        "Convert it, or save it as a tensor"
    )


def decode_meta(raw: bytes, path: Path) -> dict[str, Any]:
    """What `encode_meta` was given, from the bytes of the file at `path`."""
    meta = parse_json(raw, path, _restore_float)
    if not isinstance(meta, dict):
        raise ValueError(f"{path} holds a {type(meta).__name__}, not an object; the file is damaged")
    return meta


def _restore_float(value: dict[str, Any]) -> Any:
    if FLOAT_KEY not in value:
        return value
    if len(value) != 1 or value[FLOAT_KEY] not in SPECIAL_FLOATS:
        raise ValueError(f"{value!r} is not a float that twinflow wrote")
    return float(value[FLOAT_KEY])


def parse_json(raw: bytes, path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value in `raw`, read from `path`; a ValueError names the file where it is not plain JSON."""
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_hook=object_hook)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not hold valid JSON ({error}); the file is damaged or foreign") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
