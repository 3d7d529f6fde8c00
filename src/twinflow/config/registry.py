"""All keys of the config with their rules, from the declarations, for docs, editors and tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from twinflow.config.fields import HONOURED, REFUSED, UNUSED, Rule, Section, is_on, rule_of
from twinflow.config.messages import Path, dotted, in_words, section_of
from twinflow.config.params import OPTIMIZERS, SCHEDULES
from twinflow.config.renames import RENAMES
from twinflow.config.schema import Config
from twinflow.rules import RULES

_AUTO = ({"const": "auto"},)


@dataclass(frozen=True)
class Key:
    """A key of the config with its declaration."""

    path: Path
    rule: Rule
    default: Any
    allowed: str  # in words


def keys(model: type[Section] = Config, at: Path = ()) -> Iterator[Key]:
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
    sections: dict[Path, dict[str, Any]] = {
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
    """The options of all types together. The schema does not say which options belong to which type, but the loader
    checks it.
    """
    found: dict[str, Any] = {}
    for section in sections.values():
        for name, info in section.model_fields.items():
            found.setdefault(name, {"description": info.description})
    return found


def key_tables() -> str:
    """The tables of docs/config.md, one for each kind of rule."""
    found = list(keys())
    lines = ["### Honoured", "", "| key | default | values | effect |", "|---|---|---|---|"]
    lines += [
        f"| `{dotted(key.path)}`{' (ours)' if key.rule.ours else ''} | {_shown(key)} | {_cell(key.allowed)} "
        f"| {_cell(key.rule.text)} |"
        for key in found
        if key.rule.kind == HONOURED
    ]
    lines += ["", "### Accepted, without effect", "", "| keys | reason |", "|---|---|"]
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in found:
        if key.rule.kind == UNUSED:
            groups.setdefault((dotted(key.path[:-1]), key.rule.text), []).append(key)
    lines += [
        f"| {', '.join(f'`{dotted(key.path)}`' for key in group)} | {_cell(text)} |"
        for (_, text), group in groups.items()
    ]
    lines += ["", "### Refused unless off", "", "| key | allowed values | alternative |", "|---|---|---|"]
    lines += [
        f"| `{dotted(key.path)}` | {_off(key)} | {_cell(key.rule.text)} |" for key in found if key.rule.kind == REFUSED
    ]
    return "\n".join(lines) + "\n"


def option_tables() -> str:
    """The table of docs/config.md with `optimizer.params` and `scheduler.params`, except those of update rules."""
    lines = ["| type | params (defaults) |", "|---|---|"]
    others = {name: section for name, section in OPTIMIZERS.items() if name not in RULES}
    for name, section in (*others.items(), *SCHEDULES.items()):
        found = [key for key in keys(section) if key.rule.kind == HONOURED]
        lines.append(f"| `{name}` | {', '.join(f'`{dotted(key.path)}` {_shown(key)}' for key in found)} |")
    return "\n".join(lines) + "\n"


def rule_table() -> str:
    """The table of docs/rules.md with each update rule, its options and its defaults in a config and in `twinflow
    train`.
    """
    lines = ["| rule | on CPU tensors | options (defaults) | in a config | `twinflow train` | states |"]
    lines.append("|---|---|---|---|---|---|")
    for name, rule in RULES.items():
        in_config = {key.path[-1]: key.default for key in keys(OPTIMIZERS[name]) if key.rule.kind == HONOURED}
        others = {key: value for key, value in in_config.items() if value != rule.defaults.get(key)}
        cells = [f"`{name}`", f"`Host{rule.title}`", _listed(rule.defaults), _listed(others), _listed(rule.train)]
        lines.append(f"| {' | '.join([*cells, ', '.join(rule.formats)])} |")
    return "\n".join(lines) + "\n"


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}` {json.dumps(value)}" for name, value in options.items()) or "the same"


def spelling_table() -> str:
    """The table of docs/config.md with alternative names of keys."""
    lines = [
        "| spelling | taken as |",
        "|---|---|",
        "| `zero_optimization`: true, false | `zero_optimization.stage` 1, 0 |",
    ]
    lines += [f"| `{dotted(rename.old)}` | `{dotted(rename.new)}` |" for rename in RENAMES]
    return "\n".join(lines) + "\n"


def _shown(key: Key) -> str:
    """The default of a key, as JSON."""
    return key.default if key.default == "must be given" else json.dumps(key.default)


def _off(key: Key) -> str:
    if key.rule.switch is None:
        return ", ".join(json.dumps(value) for value in (key.default, *key.rule.off))
    return "`enabled` false" if key.rule.switch is is_on else "left out"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
