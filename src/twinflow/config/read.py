"""Reads a config from a dict, a file or base64 into nested dicts. Text is JSON or HJSON. Duplicate keys are errors."""

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
    """The path of the config's file, or an empty string, and the contents."""
    if isinstance(source, Mapping):
        return "", source
    if not isinstance(source, (str, os.PathLike)):
        raise invalid_value("config", Shown(source), _SOURCES)
    if os.path.exists(source):
        name = os.fspath(source)
        try:
            text = Path(name).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: The config file must be readable and in UTF-8, but: {error}.") from error
        return str(name), parse(text, f"{name}: ")
    return "", parse(_decoded(source), f"config {Shown(source)!r} is not a file and was read as base64: ")


def _decoded(source: str | os.PathLike[str]) -> str:
    remedy = "There is no such file, and the text is not base64."
    if isinstance(source, str) and source.lstrip().startswith("{"):
        remedy = "The text looks like JSON. Pass json.loads(text)."
    try:
        if not isinstance(source, str):
            raise ValueError
        return base64.b64decode(source, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        raise invalid_value("config", Shown(source), _SOURCES, remedy) from None


def parse(text: str, where: str) -> Mapping[Any, Any]:
    """Parses JSON. Text that is not JSON is parsed as HJSON: it may have comments, missing or extra commas, and no
    outer braces.
    """
    if not text.strip():
        raise ValueError(f"{where}The config is empty. Write {{}} for a config without keys.")
    try:
        try:
            found = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError:
            found = hjson.loads(text, object_pairs_hook=_once)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}{error or type(error).__name__}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}{invalid_value('config', Shown(found), 'a JSON object: {...}')}")
    return found


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of key-value pairs. ValueError for a duplicate key, whose first value would be lost."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(
                f"The key {key} is given twice in one object, with the values {Shown(found[key])!r} and "
                f"{Shown(value)!r}. Remove one of them."
            )
        found[key] = value
    return found


# Keys for which "auto" is a value. For all other keys, "auto" means "not given".
_OWN_AUTO: Final = {("zero_optimization", "offload_optimizer", "ratio")}


def plain(given: Mapping[Any, Any], at: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy in nested dicts, without keys whose value is "auto", which means "not given"."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise invalid_value(f"A key of {dotted(at) or 'the config'}", Shown(key), "a string")
        if isinstance(value, str) and value == "auto" and (*at, key) not in _OWN_AUTO:
            continue
        found[key] = plain(value, (*at, key)) if isinstance(value, Mapping) else value
    return found
