"""load_config: reads a DeepSpeed config from JSON, HJSON, a dict or base64, checks it and returns a `Config`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from twinflow.config.fields import REFUSED, Rule, Section, asks_for, is_given, rule_of, switch_of
from twinflow.config.messages import Path, Shown, dotted, in_words, section_of, unknown, wrong_values
from twinflow.config.params import CLIPPING, FORMATS, arguments, optimizer_kind, schedule_kind
from twinflow.config.read import plain, read_source
from twinflow.config.renames import Renamed, modernised, other_names
from twinflow.config.schema import Config, Optimizer, Scheduler
from twinflow.conflicts import refuse
from twinflow.errors import invalid_value
from twinflow.rules import RULES

_Model = TypeVar("_Model", bound=Section)


def load_config(source: Config | Mapping[str, Any] | str | PathLike[str]) -> Config:
    """Reads a config from a dict, from a JSON or HJSON file, or from urlsafe-base64 of JSON text.

    Raises ValueError for an unknown key (with the nearest known key), for a value that is not allowed and for a feature
    that twinflow does not have.
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
    config = _validated(Config, given, (), renamed)
    for name, kind_of in (("optimizer", optimizer_kind), ("scheduler", schedule_kind)):
        chosen = getattr(config, name)
        if chosen is not None:
            params = _checked_params(kind_of(chosen.type), chosen, name)
            _check_written(params, name)
            config = config.model_copy(update={name: chosen.model_copy(update={"params": params})})
    _check_together(config)
    config._renamed = tuple(renamed.notes)
    return config


def _check_written(params: Mapping[str, Any], name: str) -> None:
    """Checks that options can be written as JSON: ranks compare their configs, and checkpoints contain them."""
    for key, value in params.items():
        if not _is_json(value):
            raise invalid_value(f"{name}.params.{key}", Shown(value), "a JSON value (number, string, list or object)")


def _is_json(value: Any) -> bool:
    try:
        to_json(value)
    except PydanticSerializationError:
        return False
    return True


def _names_one(section: object) -> bool:
    """Whether the section `optimizer` or `scheduler` has a value other than "auto"."""
    return section is not None and not (isinstance(section, dict) and not any(map(is_given, section.values())))


def _validated(model: type[_Model], given: dict[str, Any], at: Path, renamed: Renamed) -> _Model:
    """Validates the section `given` at the path `at`. One error contains all mistakes of a kind."""

    def name_of(path: Path) -> str:
        return renamed.shown((*at, *path))

    _raise(_unknown_keys(model, given, at, renamed))
    try:
        found = model.model_validate(given)
    except ValidationError as error:
        mistakes = list(wrong_values(error, model, given, name_of))
    else:
        mistakes = [
            str(invalid_value(name_of(path), Shown(value), allowed, rule.text[0].upper() + rule.text[1:]))
            for path, value, allowed, rule in _refusals(found, ())
        ]
    _raise(mistakes)
    return found


def _raise(mistakes: Iterable[str]) -> None:
    found = list(mistakes)
    if found:
        raise ValueError(
            found[0] if len(found) == 1 else "\n- ".join([f"The config has {len(found)} mistakes:", *found])
        )


def _unknown_keys(model: type[Section], given: Mapping[str, Any], at: Path, renamed: Renamed) -> Iterator[str]:
    for key, value in given.items():
        if key not in model.model_fields:
            yield unknown(renamed.shown(at), key, value, [*model.model_fields, *other_names(at)], _elsewhere(key))
            continue
        inner = section_of(model.model_fields[key].annotation)
        if inner is not None and isinstance(value, dict):
            yield from _unknown_keys(inner, value, (*at, key), renamed)


def _elsewhere(key: str) -> str:
    """A sentence with the other sections of the config that have a key of this name."""
    places = [dotted(path) for path in _paths(Config, ()) if path[-1] == key]
    return f"Keys of this name: {', '.join(places)}." if places else ""


def _paths(model: type[Section], at: Path) -> Iterator[Path]:
    for name, info in model.model_fields.items():
        yield (*at, name)
        inner = section_of(info.annotation)
        if inner is not None:
            yield from _paths(inner, (*at, name))


def _refusals(section: Section, at: Path) -> Iterator[tuple[Path, object, str | list[object], Rule]]:
    """The refused keys of a section that are not off, with the values that are allowed."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        rule = rule_of(info)
        if isinstance(value, Section):
            yield from _refusals(value, (*at, name))
        elif rule is not None and rule.kind == REFUSED and asks_for(rule, info, value):
            below = switch_of(value) or ()
            for part in below:
                value = value[part]
            allowed = [info.default, *rule.off] if rule.switch is None else "False" if below else "left out"
            yield (*at, name, *below), value, allowed, rule


def _checked_params(kind: type[Any], chosen: Optimizer | Scheduler, name: str) -> dict[str, Any]:
    """Checks the options of an optimizer or schedule. For torch's classes, only the names of the options are
    checked."""
    at, params = (name, "params"), dict(chosen.params)
    try:
        if issubclass(kind, Section):
            found = _validated(kind, params, at, Renamed())
            return {key: getattr(found, key) for key in params}
        if name == "optimizer" and "max_grad_norm" in params:
            remedy = CLIPPING[0].upper() + CLIPPING[1:]
            raise invalid_value("optimizer.params.max_grad_norm", Shown(params["max_grad_norm"]), "null", remedy)
        allowed = list(arguments(kind))
        _raise(unknown(dotted(at), key, value, allowed) for key, value in params.items() if key not in allowed)
    except ValueError as error:
        raise ValueError(f"{error} The value of {name}.type is {chosen.type!r}.") from None
    return params


def _check_together(config: Config) -> None:
    """Checks for conflicts between keys."""
    power, least = config.fp16.initial_scale_power, config.fp16.min_loss_scale
    found = {"precision": config.fp16.enabled and config.bf16.enabled, "loss scale": 2.0**power < least}
    refuse("Other keys of the config", found, power=power, least=least)
    autocast = type(config.torch_autocast).model_fields["dtype"]
    if config.torch_autocast.enabled and config.torch_autocast.dtype is None:
        remedy = "torch_autocast.enabled needs a dtype."
        raise invalid_value("torch_autocast.dtype", None, in_words(autocast.annotation), remedy)
    if config.optimizer is not None:
        _check_optimizer(config)


def _check_optimizer(config: Config) -> None:
    """Checks the format of the optimizer state and the options of the update rule."""
    assert config.optimizer is not None
    kind, params = config.optimizer.type.lower(), config.optimizer.params
    offload = config.zero_optimization.offload_optimizer
    states = offload.states if offload is not None else "fp32"
    allowed = FORMATS.get(kind, ("fp32",))
    if states not in allowed:
        remedy = f"The optimizer is optimizer.type {config.optimizer.type!r}, which has no other formats of its state."
        raise invalid_value("zero_optimization.offload_optimizer.states", states, allowed, remedy)
    if kind in RULES:
        try:
            RULES[kind].check({**RULES[kind].defaults, **params})
        except ValueError as error:
            raise ValueError(f"optimizer.params.{error}") from None
