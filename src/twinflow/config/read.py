"""From a dict, a file or base64 to plain nested dicts: JSON or HJSON by content, no key twice."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import hjson  # type: ignore[import-untyped]

from twinflow.config.messages import Shown, dotted
from twinflow.errors import invalid_value

_SOURCES = "a dict, the path of a JSON or HJSON file, or urlsafe-base64 of JSON"


def read_source(source: object) -> tuple[str, Mapping[Any, Any]]:
    """The file it came from, or nothing, and what is in it."""
    if isinstance(source, Mapping):
        return "", source
    if not isinstance(source, (str, os.PathLike)):
        raise invalid_value("config", Shown(source), _SOURCES)
    if os.path.exists(source):
        name = os.fspath(source)
        try:
            text = Path(name).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: not a text file in UTF-8 that can be read ({error})") from error
        return str(name), parse(text, f"{name}: ")
    return "", parse(_decoded(source), f"config {Shown(source)!r} is not a file; read as base64: ")


def _decoded(source: str | os.PathLike[str]) -> str:
    """The text behind base64."""
    remedy = "There is no such file."
    if isinstance(source, str) and source.lstrip().startswith("{"):
        remedy = "This looks like JSON itself: pass json.loads(text)."
    try:
        if not isinstance(source, str):
            raise ValueError
        return base64.b64decode(source, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        raise invalid_value("config", Shown(source), _SOURCES, remedy) from None


def parse(text: str, where: str) -> Mapping[Any, Any]:
    """JSON, and HJSON where it is not JSON: comments, commas too many or too few, no outer braces."""
    if not text.strip():
        raise ValueError(f"{where}it is empty. A config without any key is {{}}")
    try:
        try:
            found = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError:
            found = hjson.loads(text, object_pairs_hook=_once)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}{error or type(error).__name__}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}{invalid_value('config', Shown(found), 'an object: {...}')}")
    return found


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless it has a key twice: one of the two would be lost."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(
                f"{key} is given twice in one object, as {Shown(found[key])!r} and as {Shown(value)!r}. Remove one."
            )
        found[key] = value
    return found


# Keys whose "auto" is a value of its own.
_OWN_AUTO: Final = {("zero_optimization", "offload_optimizer", "ratio")}


def plain(given: Mapping[Any, Any], at: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy in plain dicts, without the keys whose value is "auto": that means "not given"."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise invalid_value(f"a key of {dotted(at) or 'the config'}", Shown(key), "a string")
        if isinstance(value, str) and value == "auto" and (*at, key) not in _OWN_AUTO:
            continue
        found[key] = plain(value, (*at, key)) if isinstance(value, Mapping) else value
    return found
