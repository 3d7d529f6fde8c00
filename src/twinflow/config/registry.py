"""All keys of the config with their rules, from the declarations, and the JSON Schema, for docs, editors and tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from twinflow.config.fields import KeyPath, Rule, Section, dotted, in_words, rule_of, section_of
from twinflow.config.load import RENAMES
from twinflow.config.params import OPTIMIZERS, SCHEDULES
from twinflow.config.schema import Config

_AUTO = ({"const": "auto"},)


@dataclass(frozen=True)
class Key:
    """A key of the config with its declaration."""

    path: KeyPath
    rule: Rule
    default: Any
    allowed: str  # in words


def keys(model: type[Section] = Config, at: KeyPath = ()) -> Iterator[Key]:
    """All keys below a section, in the order of declaration."""
    for name, info in model.model_fields.items():
        inner, rule = section_of(info.annotation), rule_of(info)
        if inner is not None:
            yield from keys(inner, (*at, name))
        elif rule is not None:
            yield Key((*at, name), rule, _default(info), in_words(info.annotation, info.metadata))


def _default(info: FieldInfo) -> Any:
    return "must be given" if info.is_required() else info.get_default(call_default_factory=False)


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the config for editors, with types, defaults and the treatment of each key."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "twinflow config"
    sections: dict[KeyPath, dict[str, Any]] = {
        (): schema,
        ("zero_optimization",): schema["$defs"]["ZeroOptimization"],
        ("tensor_parallel",): schema["$defs"]["TensorParallel"],
    }
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {name: _or_auto(key) for name, key in section["properties"].items()}
    for rename in RENAMES:
        text = f"Alternative name of {dotted(rename.new)}"
        sections[rename.old[:-1]]["properties"][rename.old[-1]] = {"description": text, "deprecated": True}
    for name, options in (("Optimizer", OPTIMIZERS), ("Scheduler", SCHEDULES)):
        schema["$defs"][name]["properties"]["params"]["properties"] = _options(options)
    return schema


def _or_auto(key: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key, extended by the value "auto"."""
    about = {name: value for name, value in key.items() if name in ("title", "description", "default", "x-twinflow")}
    values = {name: value for name, value in key.items() if name not in about}
    if not values:  # The key allows any value.
        return key
    return {**about, "anyOf": [*values["anyOf"], *_AUTO] if list(values) == ["anyOf"] else [values, *_AUTO]}


def _options(sections: Mapping[str, type[Section]]) -> dict[str, Any]:
    """The options of all types together. Only the loader checks which options belong to which type."""
    found: dict[str, Any] = {}
    for section in sections.values():
        for name, info in section.model_fields.items():
            found.setdefault(name, {"description": info.description})
    return found
