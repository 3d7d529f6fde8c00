# SPDX-License-Identifier: Apache-2.0
"""Declarations of the config's keys: type, default and treatment by twinflow.

Every key is declared once, as a field of a `Section`, with one of four functions. An `honoured` key has the documented
effect. So has a key of `ours`, which DeepSpeed does not have. An `unused` key is accepted and has no effect, for a
stated reason. A `refused` key must be off, because ignoring other values would change results or memory use. The
loader, the notes, the JSON Schema and the docs are made from these declarations.

The last part of this module makes error messages from the declarations: paths of keys, allowed values in words, and the
nearest known key.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo

from twinflow.errors import invalid_value
from twinflow.files import parse_json

HONOURED: Final = "honoured"
UNUSED: Final = "no effect"
REFUSED: Final = "refused"
_MISSING = object()
KeyPath = tuple[str, ...]
_LONGEST = 120  # number of characters of a value that messages show


@dataclass(frozen=True)
class Rule:
    """How twinflow treats a key."""

    kind: str  # HONOURED, UNUSED or REFUSED
    text: str  # HONOURED: the effect; UNUSED: why there is none; REFUSED: a sentence with a remedy
    off: tuple[object, ...] = ()  # REFUSED: values that are allowed besides the default; UNUSED: values without a note
    switch: Callable[[Any], bool] | None = None  # REFUSED: whether the value requests the feature; replaces `off`
    hints: Mapping[str, str] | None = None  # values that are not allowed, each with a remedy
    ours: bool = False  # DeepSpeed does not have the key.
    for_host: bool = False  # The key has no effect if no optimizer state is on the host.

    def __call__(self, schema: dict[str, Any]) -> None:
        """Adds the treatment to the JSON Schema of the key. Pydantic calls this method."""
        schema["x-twinflow"] = self.kind


class Section(BaseModel):
    """An object of the config. It is frozen and strictly typed and accepts no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def honoured(default: Any, text: str, *, hints: Mapping[str, str] | None = None, for_host: bool = False) -> Any:
    """Declares a key with the effect `text`. Default `...`: the key must be given. `Rule` explains other arguments."""
    return Field(default, description=text, json_schema_extra=Rule(HONOURED, text, hints=hints, for_host=for_host))


def ours(default: Any, text: str, *, for_host: bool = False) -> Any:
    """Declares a key that has the effect `text` and that DeepSpeed does not have."""
    return Field(default, description=text, json_schema_extra=Rule(HONOURED, text, ours=True, for_host=for_host))


def unused(default: Any, because: str, *, quiet: tuple[object, ...] = ()) -> Any:
    """Declares a key that is accepted and has no effect. `because`: the reason. `quiet`: values that cause no note."""
    rule = Rule(UNUSED, because, quiet)
    return Field(default, description=f"No effect here: {because}", json_schema_extra=rule)


def refused(
    default: Any, instead: str, *, off: tuple[object, ...] = (), switch: Callable[[Any], bool] | None = None
) -> Any:
    """Declares a key that must be off. `instead`: a sentence with the alternative. `off` and `switch`: as in `Rule`."""
    rule = Rule(REFUSED, instead, off, switch)
    return Field(default, description=f"Must be off: {instead}", json_schema_extra=rule)


def section(kind: type[Section] | None, text: str) -> Any:
    """Declares a section. In a config without it, its value is `kind` with all defaults, or None if `kind` is None."""
    return Field(None, description=text) if kind is None else Field(default_factory=kind, description=text)


def rule_of(info: FieldInfo) -> Rule | None:
    """The rule of a key. None for a section."""
    return info.json_schema_extra if isinstance(info.json_schema_extra, Rule) else None


def values_in(section: Section, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Section, FieldInfo, Any, Rule]]:
    """All keys below a section that are not sections: path, section of the key, declaration, value and rule."""
    for name, info in type(section).model_fields.items():
        value, rule = getattr(section, name), rule_of(info)
        if isinstance(value, Section):
            yield from values_in(value, (*at, name))
        elif rule is not None:
            yield (*at, name), section, info, value, rule


def asks_for(rule: Rule, info: FieldInfo, value: object) -> bool:
    """Whether the value of a refused key requests the feature."""
    if rule.switch is not None:
        return rule.switch(value)
    return value != info.default and value not in rule.off


def is_given(value: object) -> bool:
    """Whether a value is neither null nor an empty object."""
    return value is not None and value != {}


def is_on(section: object) -> bool:
    """Whether a section with unchecked keys requests its feature."""
    return switch_of(section) is not None


def switch_of(section: object) -> tuple[str, ...] | None:
    """The path of the key `enabled` that requests the feature of a section, in the section or else in one of its
    subsections. None if the feature is not requested.
    """
    if not isinstance(section, Mapping):
        return None
    if "enabled" in section:
        return None if section["enabled"] is False else ("enabled",)
    for name, part in section.items():
        below = switch_of(part)
        if below is not None:
            return (name, *below)
    return None


def _whole(value: object) -> object:
    """Converts a float with a whole value to an int: configs contain 5e8 for 500000000."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _never(value: object) -> object:
    """Converts Infinity to None: Accelerate writes `steps_per_print: Infinity` for never."""
    return None if value == math.inf else _whole(value)


def _sequence(value: object) -> object:
    """Converts a list to a tuple: JSON has only lists, and Python callers may give tuples."""
    return tuple(value) if isinstance(value, list) else value


_SHORT: Final = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def _dtype(value: object) -> object:
    """The short name of a dtype. Other values are unchanged, and the type rejects them."""
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    return _SHORT.get(name, name if name in _SHORT.values() else value)


def _torch_dtype(value: object) -> object:
    """The torch name of a half-precision dtype. Other values are unchanged."""
    short = _dtype(value)
    return "bfloat16" if short == "bf16" else "float16" if short == "fp16" else value


def _capital(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


# A string in `Annotated` describes the allowed values in error messages and in the docs.
_INTEGER: Final = BeforeValidator(_whole)
Whole = Annotated[int, _INTEGER, Field(ge=0), "a whole number >= 0"]
Positive = Annotated[int, _INTEGER, Field(ge=1, le=2**63 - 1), "a whole number >= 1"]
AnyWhole = Annotated[int, _INTEGER, "a whole number"]
Iteration = Annotated[int, _INTEGER, Field(ge=-1), "a whole number >= -1"]
Stage = Annotated[int, _INTEGER, Field(ge=0, le=3), "0, 1, 2 or 3"]
Power = Annotated[int, _INTEGER, Field(ge=0, le=127), "a whole number >= 0 and <= 127"]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), "a finite number >= 0"]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False), "a finite number > 0"]
Number = Annotated[float, Field(allow_inf_nan=False), "a finite number"]
Share = Annotated[float, Field(ge=0, le=1), "a number >= 0 and <= 1"]
Settled = Annotated[float, Field(gt=0, lt=1), "a number above 0 and below 1"]
Ratio = Annotated[Share | Literal["auto"], 'a number >= 0 and <= 1, or "auto"']
_Beta = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[_Beta, "a number >= 0 and < 1"]
Betas = Annotated[tuple[_Beta, _Beta], BeforeValidator(_sequence), "two numbers >= 0 and < 1"]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
Coefficients = Annotated[tuple[_Finite, _Finite, _Finite], BeforeValidator(_sequence), "three finite numbers"]
Threads = Annotated[int, _INTEGER, Field(ge=1, le=1024), "a whole number from 1 to 1024"]
Single = Annotated[float, Field(ge=0, le=3.4028234663852886e38), "a number >= 0 that fits in fp32"]
Buckets = Annotated[int, _INTEGER, Field(ge=128, multiple_of=128), "a multiple of 128, at least 128"]
_Rates = tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]
Rates = Annotated[Amount | _Rates, BeforeValidator(_sequence), "a finite number >= 0, or a list of such numbers"]
Names = Annotated[tuple[str, ...], BeforeValidator(_sequence), "a list of strings"]
Widths = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    Field(min_length=1),
    BeforeValidator(_sequence),
    "a list of whole numbers >= 1",
]
Indices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_sequence), "a list of whole numbers >= 0"]
Every = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_never), "a whole number >= 1, or null for never"]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"],
    BeforeValidator(_dtype),
    WithJsonSchema({"enum": ["fp32", "bf16", "fp16", "float32", "bfloat16", "float16", "float", "half"]}),
    "'fp32', 'bf16', 'fp16', or torch's names of these dtypes",
]
AutocastDtype = Annotated[
    Literal["bfloat16", "float16"],
    BeforeValidator(_torch_dtype),
    WithJsonSchema({"enum": ["bfloat16", "float16", "bf16", "fp16", "half", "torch.bfloat16", "torch.float16"]}),
    "'bfloat16', 'float16', or the short names 'bf16', 'fp16'",
]
Side = Literal["auto", "device", "host"]  # a place for tensors
DiskIo = Literal["auto", "io_uring", "threads"]  # how a disk is read and written
Tags = Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capital), "'Ignore', 'Warn' or 'Fail'"]
Free = Mapping[str, Any]  # a section whose keys are not checked


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
        if isinstance(item, str):
            return item
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return in_words(parts[0], parts[1:])
    if origin in (Union, types.UnionType):
        return ", or ".join(in_words(part) for part in parts)
    if origin is Literal:
        return _joined([repr(part) for part in parts])
    plain = {bool: "true or false", str: "a string", int: "a whole number", type(None): "null", Any: "anything"}
    return plain.get(annotation, "an object")


def _joined(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else values[0]


def nearest(name: str, names: Iterable[str]) -> str:
    """A question with those of `names` that are similar, ignoring case. Empty if no name is similar."""
    by_lower = {other.lower(): other for other in names}
    near = [repr(by_lower[found]) for found in get_close_matches(name.lower(), by_lower)]
    return f"Did you mean {' or '.join(near)}?" if near else ""


def used_keys(section: type[Section]) -> list[str]:
    """The keys of a section that have an effect."""
    rules = {name: rule_of(info) for name, info in section.model_fields.items()}
    return [name for name, rule in rules.items() if rule is None or rule.kind == HONOURED]


def unknown(place: str, key: str, value: object, names: Iterable[str], remedy: str = "") -> str:
    """The error message for an unknown key. `place` is the section, and empty for the top of the config."""
    remedy = remedy or f"{nearest(key, names) or 'Remove it.'} docs/config.md lists all keys."
    name = f"{place}.{key}" if place else key
    return f"{name} is not a key of {place or 'the config'} (its value is {Shown(value)!r}). {remedy}"


def wrong_values(
    error: ValidationError, model: type[Section], given: Mapping[str, Any], name_of: Callable[[KeyPath], str]
) -> Iterator[str]:
    """Converts pydantic's errors about `given` to messages, one for each key."""
    seen: set[KeyPath] = set()
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
            yield f"{name_of(path)} is missing. Set it to {allowed}."
        else:
            yield str(invalid_value(name_of(path), Shown(value), allowed, hint or _as_written(info, value)))


def _as_written(info: FieldInfo, value: object) -> str:
    """A remedy that says what to write: the keys of a section whose value is not an object, or an allowed number or
    boolean for a string that contains it, such as "2". Empty for other values.
    """
    section = section_of(info.annotation)
    if section is not None and not isinstance(value, Mapping):
        names = used_keys(section)
        if "enabled" in names and isinstance(value, bool):
            return f'Write {{"enabled": {json.dumps(value)}}}.'
        return f"Write {{...}} with some of its keys: {', '.join(names)}."
    if not isinstance(value, str):
        return ""
    try:
        inner = parse_json(value.lower())
        if not isinstance(inner, (bool, int, float)):
            return ""
        kind: Any = info.annotation
        for item in info.metadata:
            kind = Annotated[kind, item]
        TypeAdapter(kind).validate_python(inner, strict=True)
    except (ValueError, RecursionError):  # ValidationError is a ValueError.
        return ""
    return f"Write {value.lower() if isinstance(inner, bool) else 'the number'} without quotes."


def _field_at(model: type[Section], loc: Sequence[str | int]) -> tuple[KeyPath, FieldInfo]:
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
