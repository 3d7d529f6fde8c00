"""Parts of error messages: paths of keys, allowed values in words, the nearest known key."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from twinflow.config.fields import Allowed, Section, rule_of
from twinflow.errors import invalid_value

_MISSING = object()
Path = tuple[str, ...]
_LONGEST = 120  # Longer values are cut in messages.


def dotted(path: Sequence[str]) -> str:
    """The path of a key, such as "zero_optimization.stage"."""
    return ".".join(path)


class Shown:
    """A value whose repr is cut to one line, for error messages."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        try:
            text = repr(self.value)
        except (ValueError, RecursionError):  # Python has no repr for an int of thousands of digits.
            text = f"<{type(self.value).__name__}>"
        return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in an annotation `Section` or `Section | None`. None for other annotations."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def in_words(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """The values that an annotation allows, in words."""
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return in_words(parts[0], parts[1:])
    if origin in (Union, types.UnionType):
        return ", or ".join(in_words(part) for part in parts)
    if origin is Literal:
        return ", ".join(repr(part) for part in parts)
    section = section_of(annotation)
    if section is not None:
        return f"an object with any of the keys {', '.join(section.model_fields)}"
    plain = {bool: "true, false", str: "a string", int: "a whole number", type(None): "null", Any: "anything"}
    return plain.get(annotation, "an object")


def nearest(name: str, names: Sequence[str]) -> str:
    """A sentence with the name that was probably meant. Empty if no name is near."""
    near = get_close_matches(name, names, 1)
    return f"Did you mean {near[0]!r}?" if near else ""


def unknown(place: str, key: str, value: object, names: Sequence[str], remedy: str = "") -> str:
    """The error message for an unknown key. `place` is the section, and empty for the top of the config."""
    remedy = remedy or nearest(key, names) or f"The keys are: {', '.join(sorted(names))}."
    name = f"{place}.{key}" if place else key
    return f"{name} is not a key of {place or 'the config'} (its value is {Shown(value)!r}). {remedy}"


def wrong_values(
    error: ValidationError, model: type[Section], given: Mapping[str, Any], name_of: Callable[[Path], str]
) -> Iterator[str]:
    """Converts pydantic's errors about `given` to messages, one for each key."""
    seen: set[Path] = set()
    for complaint in error.errors(include_url=False, include_context=False, include_input=False):
        path, info = _field_at(model, complaint["loc"])
        if path in seen:
            continue
        seen.add(path)
        value: Any = given
        for key in path:
            value = value.get(key, _MISSING)
        rule = rule_of(info)
        hint = rule.hints.get(value, "") if rule and rule.hints and isinstance(value, str) else ""
        allowed = in_words(info.annotation, info.metadata)
        if value is _MISSING:
            yield f"{name_of(path)} is missing, but must be {allowed}."
        else:
            yield str(invalid_value(name_of(path), Shown(value), allowed, hint))


def _field_at(model: type[Section], loc: Sequence[str | int]) -> tuple[Path, FieldInfo]:
    """The field of a pydantic error. The error may concern a part of the field's value."""
    path: list[str] = []
    section: type[Section] | None = model
    info: FieldInfo | None = None
    for key in loc:
        if section is None or not isinstance(key, str) or key not in section.model_fields:
            break
        path.append(key)
        info = section.model_fields[key]
        section = section_of(info.annotation)
    assert info is not None, loc
    return tuple(path), info
