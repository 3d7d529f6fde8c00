# SPDX-License-Identifier: Apache-2.0
"""load_config: reads a DeepSpeed config from JSON, HJSON, a dict or base64, checks it and returns a `Config`.

Duplicate keys are errors. Alternative and old names of keys are converted to the current names.
"""

from __future__ import annotations

import base64
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar

import hjson  # type: ignore[import-untyped]
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from twinflow.config.fields import (
    REFUSED,
    KeyPath,
    Rule,
    Section,
    Shown,
    asks_for,
    dotted,
    is_given,
    nearest,
    section_of,
    switch_of,
    unknown,
    used_keys,
    values_in,
    wrong_values,
)
from twinflow.config.params import CLIPPING, FORMATS, arguments, optimizer_kind, schedule_kind
from twinflow.config.schema import RENAMES, ZERO, Config, Optimizer, Rename, Scheduler, keys
from twinflow.conflicts import refuse
from twinflow.errors import invalid_value
from twinflow.files import SMALL_BYTES, check_nesting, parse_json, read_text
from twinflow.rules import ALL_RULES

_SOURCES = "a dict, the path of a JSON or HJSON file, or urlsafe-base64 of JSON"
_Model = TypeVar("_Model", bound=Section)


def read_source(source: object) -> tuple[str, Mapping[Any, Any]]:
    """The path of the config file (empty if the config is not a file) and the contents of the config."""
    if isinstance(source, Mapping):
        return "", source
    if not isinstance(source, (str, os.PathLike)):
        raise invalid_value("config", Shown(source), _SOURCES)
    if os.path.exists(source):
        name = str(os.fspath(source))
        try:
            text = read_text(Path(name))
        except (OSError, ValueError) as error:
            reason = str(error).rstrip(".")
            message = f"{name}: The config file cannot be read: {reason}. Give a readable text file in UTF-8."
            raise ValueError(message) from error
        return name, parse(text, f"{name}: ")
    return "", parse(_decoded(source), f"config {Shown(source)!r} is not a file and was read as base64: ")


def _decoded(source: str | os.PathLike[str]) -> str:
    remedy = "There is no such file, and the text is not base64. Check the path and the working directory."
    if isinstance(source, str) and source.lstrip().startswith("{"):
        remedy = "The text looks like JSON. Pass json.loads(text)."
    try:
        if not isinstance(source, str) or len(source) > 2 * SMALL_BYTES:
            raise ValueError
        return base64.b64decode(source, altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        raise invalid_value("config", Shown(source), _SOURCES, remedy) from None


def parse(text: str, where: str) -> Mapping[Any, Any]:
    """Parses JSON, or else HJSON, which may have comments, missing or extra commas, and no outer braces. Error messages
    start with `where`.
    """
    if not text.strip():
        raise ValueError(f"{where}The config is empty. Write {{}} for a config without keys.")
    try:
        found = _parse_either(text)
        check_nesting(found)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}{error or type(error).__name__}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}{invalid_value('config', Shown(found), 'a JSON object: {...}')}")
    return found


def _parse_either(text: str) -> Any:
    try:
        return parse_json(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        as_json = error
    try:
        return hjson.loads(text, object_pairs_hook=_once)
    except Exception as error:  # The library raises IndexError, for example for a comment without an end.
        if isinstance(error, ValueError) and not isinstance(error, hjson.HjsonDecodeError):
            raise  # a duplicate key
        # Most texts are meant as JSON, so the message has the errors of both parsers.
        message = (
            f"The text is not valid JSON or HJSON. As JSON: {as_json}. As HJSON: {error}. Correct it at this place."
        )
        raise ValueError(message) from error


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of key-value pairs. ValueError for a duplicate key, whose first value would be lost."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            values = f"{Shown(found[key])!r} and {Shown(value)!r}"
            raise ValueError(
                f"The key {key} is given twice in one object, with the values {values}. Remove one of them."
            )
        found[key] = value
    return found


# Keys for which "auto" is a value. For all other keys, "auto" means "not given".
_OWN_AUTO: Final = {("zero_optimization", "offload_optimizer", "ratio")}


def plain(given: Mapping[Any, Any], at: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy in nested dicts, without keys whose value is "auto", unless they are in `_OWN_AUTO`."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise invalid_value(f"A key of {dotted(at) or 'the config'}", Shown(key), "a string")
        if isinstance(value, str) and value == "auto" and (*at, key) not in _OWN_AUTO:
            continue
        found[key] = plain(value, (*at, key)) if isinstance(value, Mapping) else value
    return found


@dataclass(frozen=True)
class Renamed:
    """The renamings that were applied to a config."""

    notes: list[str] = field(default_factory=list)
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)  # current path -> path in the user's config

    def shown(self, path: KeyPath) -> str:
        """The path of a key as the user wrote it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return dotted(self.origins[path[:length]] + path[length:])
        return dotted(path)


def other_names(section: KeyPath) -> list[str]:
    """Names that a section accepts besides its own keys."""
    return [rename.old[-1] for rename in RENAMES if rename.old[:-1] == section]


def modernised(given: dict[str, Any]) -> Renamed:
    """Converts old names in `given` to current ones, in place."""
    done = Renamed()
    if isinstance(given.get(ZERO), bool):
        stage = int(given[ZERO])
        given[ZERO] = {"stage": stage}
        done.notes.append(f"{ZERO}: a boolean is an old spelling and means stage {stage}")
        done.origins[(ZERO, "stage")] = (ZERO,)
    for rename in RENAMES:
        _apply(rename, given, done)
    return done


def _apply(rename: Rename, given: dict[str, Any], done: Renamed) -> None:
    source = given if len(rename.old) == 1 else given.get(rename.old[0])
    if not isinstance(source, dict) or rename.old[-1] not in source:
        return
    target = given if len(rename.new) == 1 else given.setdefault(rename.new[0], {})
    if not isinstance(target, dict):
        return  # The target is not a section, and validation reports that error.
    if rename.new[-1] in target:
        old, new = dotted(rename.old), dotted(rename.new)
        raise ValueError(f"{old} and {new} are two names of one key, and both are given. Remove {old}.")
    value = source.pop(rename.old[-1])
    if rename.convert is not None:
        value = rename.convert(rename.old, value)
    if value is not None or rename.convert is None:
        target[rename.new[-1]] = value
        done.origins[rename.new] = rename.old
    if rename.note:
        done.notes.append(f"{dotted(rename.old)}: an old name of {dotted(rename.new)}")


def load_config(source: Config | Mapping[str, Any] | str | PathLike[str]) -> Config:
    """Reads a config from a dict, from a JSON or HJSON file, or from urlsafe-base64 of JSON text.

    Raises ValueError for an unknown key of a section (with the nearest known key), for a value that is not allowed and
    for a feature that twinflow does not have. Unknown keys at the top are ignored with a warning, as DeepSpeed does.
    """
    if isinstance(source, Config):
        return source
    where, given = read_source(source)
    try:
        return _checked(plain(given))
    except RecursionError:
        message = f"{where or 'config'}: The config is nested too deeply, or contains itself. Remove the nesting."
        raise ValueError(message) from None
    except ValueError as error:
        if not where:
            raise
        raise ValueError(f"{where}: {error}") from None


def _checked(given: dict[str, Any]) -> Config:
    renamed = modernised(given)
    for name in ("optimizer", "scheduler"):
        if not _names_one(given.get(name)):
            given.pop(name, None)
    _drop_unknown(given)
    config = _validated(Config, given, (), renamed)
    for name, kind_of in (("optimizer", optimizer_kind), ("scheduler", schedule_kind)):
        chosen = getattr(config, name)
        if chosen is not None:
            params = _checked_params(kind_of(chosen.type), chosen, name)
            config = config.model_copy(update={name: chosen.model_copy(update={"params": params})})
    _check_together(config)
    config._renamed = tuple(renamed.notes)
    return config


def _drop_unknown(given: dict[str, Any]) -> None:
    """Removes unknown keys at the top of a config, which DeepSpeed ignores, with one warning for all of them."""
    unknown_ones = {key: given.pop(key) for key in list(given) if key not in Config.model_fields}
    if unknown_ones:
        names = [*Config.model_fields, *other_names(())]
        told = [unknown("", key, value, names, _elsewhere(key)) for key, value in unknown_ones.items()]
        warnings.warn(f"These keys of the config are ignored, as DeepSpeed does. {' '.join(told)}", stacklevel=4)


def _names_one(section: object) -> bool:
    """Whether the section `optimizer` or `scheduler` has a value. Keys with the value "auto" are removed before."""
    return section is not None and not (isinstance(section, dict) and not any(map(is_given, section.values())))


def _validated(model: type[_Model], given: dict[str, Any], at: KeyPath, renamed: Renamed) -> _Model:
    """Validates the section `given` at the path `at`. One ValueError lists all unknown keys, or all wrong values."""

    def name_of(path: KeyPath) -> str:
        return renamed.shown((*at, *path))

    _raise(_unknown_keys(model, given, at, renamed))
    try:
        found = model.model_validate(given)
    except ValidationError as error:
        mistakes = list(wrong_values(error, model, given, name_of))
    else:
        mistakes = [
            str(invalid_value(name_of(path), Shown(value), allowed, rule.text[0].upper() + rule.text[1:]))
            for path, value, allowed, rule in _refusals(found)
        ]
    _raise(mistakes)
    return found


def _raise(mistakes: Iterable[str]) -> None:
    found = list(mistakes)
    if found:
        head = [f"The config has {len(found)} mistakes:"] if len(found) > 1 else []
        raise ValueError("\n- ".join([*head, *found]))


def _unknown_keys(model: type[Section], given: Mapping[str, Any], at: KeyPath, renamed: Renamed) -> Iterator[str]:
    for key, value in given.items():
        if key not in model.model_fields:
            names, remedy = [*model.model_fields, *other_names(at)], _elsewhere(key)
            if at[-1:] == ("params",) and not nearest(key, names):
                remedy = remedy or f"Use one of these keys: {', '.join(used_keys(model))}."
            yield unknown(renamed.shown(at), key, value, names, remedy)
            continue
        inner = section_of(model.model_fields[key].annotation)
        if inner is not None and isinstance(value, dict):
            yield from _unknown_keys(inner, value, (*at, key), renamed)


def _elsewhere(key: str) -> str:
    """A question with the paths of keys of this name in other sections."""
    places = dict.fromkeys(dotted(one.path[: one.path.index(key) + 1]) for one in keys() if key in one.path)
    return f"Did you mean {' or '.join(places)}?" if places else ""


def _refusals(found: Section) -> Iterator[tuple[KeyPath, object, str | list[object], Rule]]:
    """The refused keys of a section that are not off, with the values that are allowed."""
    for path, _, info, value, rule in values_in(found):
        if rule.kind == REFUSED and asks_for(rule, info, value):
            below = switch_of(value) or ()
            for part in below:
                value = value[part]
            allowed = [info.default, *rule.off] if rule.switch is None else "False" if below else "null"
            yield (*path, *below), value, allowed, rule


def _checked_params(kind: type[Any], chosen: Optimizer | Scheduler, name: str) -> dict[str, Any]:
    """Checks the options of an optimizer or schedule. For torch's classes, only the names are checked."""
    at, params = (name, "params"), dict(chosen.params)
    try:
        if issubclass(kind, Section):
            found = _validated(kind, params, at, Renamed())
            return {key: getattr(found, key) for key in params}
        if name == "optimizer" and "max_grad_norm" in params:
            remedy = CLIPPING[0].upper() + CLIPPING[1:]
            raise invalid_value("optimizer.params.max_grad_norm", Shown(params["max_grad_norm"]), "null", remedy)
        allowed = list(arguments(kind))
        every = f"The arguments of {chosen.type} are: {', '.join(allowed)}."
        for key, value in params.items():
            if key not in allowed:
                raise ValueError(unknown(dotted(at), key, value, allowed, nearest(key, allowed) or every))
            if not _is_json(value):  # Ranks compare their configs, and checkpoints contain them.
                expected = "a JSON value (number, string, list or object)"
                raise invalid_value(f"{name}.params.{key}", Shown(value), expected)
    except ValueError as error:
        raise ValueError(f"{error} The value of {name}.type is {chosen.type!r}.") from None
    return params


def _is_json(value: Any) -> bool:
    try:
        to_json(value)
    except PydanticSerializationError:
        return False
    return True


def _check_together(config: Config) -> None:
    """Checks for conflicts between keys."""
    power, least = config.fp16.initial_scale_power, config.fp16.min_loss_scale
    found = {"precision": config.fp16.enabled and config.bf16.enabled, "loss scale": 2.0**power < least}
    refuse("Other keys of the config", found, power=power, least=least)
    if config.torch_autocast.enabled and config.torch_autocast.dtype is None:
        expected = '"bfloat16" or "float16" if torch_autocast.enabled is true'
        raise invalid_value("torch_autocast.dtype", None, expected, "Set it, or set torch_autocast.enabled to false.")
    zero = config.zero_optimization
    for name, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload is not None and offload.device == "nvme" and not offload.nvme_path:
            expected = 'a folder on a local disk if device is "nvme"'
            raise invalid_value(f"zero_optimization.{name}.nvme_path", offload.nvme_path, expected)
    if config.optimizer is not None:
        _check_optimizer(config)


def _check_optimizer(config: Config) -> None:
    """Checks the format of the optimizer state and the options of the update rule."""
    assert config.optimizer is not None
    kind, params = config.optimizer.type.lower(), config.optimizer.params
    states = config.states
    allowed = FORMATS.get(kind, ("fp32",))
    if states not in allowed:
        remedy = f"optimizer.type is {config.optimizer.type!r}, which supports no other state format."
        raise invalid_value("zero_optimization.offload_optimizer.states", states, allowed, remedy)
    if kind in ALL_RULES:
        try:
            ALL_RULES[kind].check({**ALL_RULES[kind].defaults, **params})
        except ValueError as error:
            raise ValueError(f"optimizer.params.{error}") from None
