"""load_config: DeepSpeed's JSON, HJSON, dict or base64 in; a checked `Config` out, or a ValueError saying why not."""

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
from twinflow.errors import invalid_value
from twinflow.rules import RULES

_Model = TypeVar("_Model", bound=Section)


def load_config(source: Config | Mapping[str, Any] | str | PathLike[str]) -> Config:
    """The config in a dict, in a JSON or HJSON file, or in urlsafe-base64 of JSON text.

    Raises ValueError for anything wrong: a key that does not exist (with the nearest that does), a value that is not
    allowed, a feature that twinflow does not have.
    """
    if isinstance(source, Config):
        return source
    where, given = read_source(source)
    try:
        return _checked(plain(given))
    except RecursionError:
        raise ValueError(f"{where or 'config'}: nested too deeply, or within itself") from None
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
    """Ranks compare their configs, and checkpoints keep them: options must be what JSON can hold."""
    for key, value in params.items():
        if not _is_json(value):
            raise invalid_value(
                f"{name}.params.{key}", Shown(value), "what JSON has: numbers, words, lists and objects"
            )


def _is_json(value: Any) -> bool:
    try:
        to_json(value)
    except PydanticSerializationError:
        return False
    return True


def _names_one(section: object) -> bool:
    """Whether `optimizer` or `scheduler` asks for anything once every "auto" is gone."""
    return section is not None and not (isinstance(section, dict) and not any(map(is_given, section.values())))


def _validated(model: type[_Model], given: dict[str, Any], at: Path, renamed: Renamed) -> _Model:
    """`given`, which stands at `at`, as a model; all mistakes of one kind in one error."""

    def name_of(path: Path) -> str:
        return renamed.shown((*at, *path))

    _raise(_unknown_keys(model, given, at, renamed))
    try:
        found = model.model_validate(given)
    except ValidationError as error:
        mistakes = list(wrong_values(error, model, given, name_of))
    else:
        mistakes = [
            str(invalid_value(name_of(path), Shown(value), "only off here", f"Instead: {rule.text}"))
            for path, value, rule in _refusals(found, ())
        ]
    _raise(mistakes)
    return found


def _raise(mistakes: Iterable[str]) -> None:
    found = list(mistakes)
    if found:
        raise ValueError(found[0] if len(found) == 1 else "\n- ".join([f"{len(found)} mistakes:", *found]))


def _unknown_keys(model: type[Section], given: Mapping[str, Any], at: Path, renamed: Renamed) -> Iterator[str]:
    for key, value in given.items():
        if key not in model.model_fields:
            yield unknown(renamed.shown(at), key, value, [*model.model_fields, *other_names(at)], _elsewhere(key))
            continue
        inner = section_of(model.model_fields[key].annotation)
        if inner is not None and isinstance(value, dict):
            yield from _unknown_keys(inner, value, (*at, key), renamed)


def _elsewhere(key: str) -> str:
    """Where else in the config a key of this name is, as a sentence."""
    places = [dotted(path) for path in _paths(Config, ()) if path[-1] == key]
    return f"It belongs elsewhere: {', '.join(places)}" if places else ""


def _paths(model: type[Section], at: Path) -> Iterator[Path]:
    for name, info in model.model_fields.items():
        yield (*at, name)
        inner = section_of(info.annotation)
        if inner is not None:
            yield from _paths(inner, (*at, name))


def _refusals(section: Section, at: Path) -> Iterator[tuple[Path, object, Rule]]:
    """Refused keys that are on."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        rule = rule_of(info)
        if isinstance(value, Section):
            yield from _refusals(value, (*at, name))
        elif rule is not None and rule.kind == REFUSED and asks_for(rule, info, value):
            below = switch_of(value) or ()
            for part in below:
                value = value[part]
            yield (*at, name, *below), value, rule


def _checked_params(kind: type[Any], chosen: Optimizer | Scheduler, name: str) -> dict[str, Any]:
    """The options of an optimizer or schedule, of the right types; those of torch's classes by name only."""
    at, params = (name, "params"), dict(chosen.params)
    try:
        if issubclass(kind, Section):
            found = _validated(kind, params, at, Renamed())
            return {key: getattr(found, key) for key in params}
        if name == "optimizer" and "max_grad_norm" in params:
            raise invalid_value("optimizer.params.max_grad_norm", Shown(params["max_grad_norm"]), "null", CLIPPING)
        allowed = list(arguments(kind))
        _raise(unknown(dotted(at), key, value, allowed) for key, value in params.items() if key not in allowed)
    except ValueError as error:
        raise ValueError(f"{error} ({name}.type is {chosen.type!r})") from None
    return params


def _check_together(config: Config) -> None:
    """Keys that are right alone and wrong together."""
    if config.fp16.enabled and config.bf16.enabled:
        raise invalid_value("fp16.enabled", True, "false where bf16.enabled is true", "Turn one of the two off.")
    fp16 = config.fp16
    if 2.0**fp16.initial_scale_power < fp16.min_loss_scale:
        allowed = f"at least min_loss_scale, which is {fp16.min_loss_scale:g}, as a power of 2"
        raise invalid_value("fp16.initial_scale_power", fp16.initial_scale_power, allowed)
    autocast = type(config.torch_autocast).model_fields["dtype"]
    if config.torch_autocast.enabled and config.torch_autocast.dtype is None:
        raise invalid_value(
            "torch_autocast.dtype", None, in_words(autocast.annotation), "It must be given where enabled."
        )
    if config.optimizer is not None:
        _check_optimizer(config)


def _check_optimizer(config: Config) -> None:
    """The format of its state, and options that exclude each other."""
    assert config.optimizer is not None
    kind, params = config.optimizer.type.lower(), config.optimizer.params
    offload = config.zero_optimization.offload_optimizer
    states = offload.states if offload is not None else "fp32"
    allowed = FORMATS.get(kind, ("fp32",))
    if states not in allowed:
        remedy = f"These are the formats for optimizer.type {config.optimizer.type!r}."
        raise invalid_value("zero_optimization.offload_optimizer.states", states, allowed, remedy)
    if kind in RULES:
        try:
            RULES[kind].check({**RULES[kind].defaults, **params})
        except ValueError as error:
            raise ValueError(f"optimizer.params.{error}") from None
