"""Checks of a saved state of a TwinOptimizer: missing keys, wrong types, values out of range, wrong shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from twinflow.errors import invalid_value
from twinflow.offload.bucket import Param
from twinflow.optim import loss_scale
from twinflow.optim.twin_checks import is_flag, number_of
from twinflow.parallel.shard import shard_of
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK
from twinflow.zero.compression import VarianceWatch

_UNCHANGED = "Pass a state that state_dict() has returned, without changes."
_COUNTS = ("num_steps", "num_skipped", "num_jobs")
_DICTS = ("state", "group")  # keys of an entry of a user's optimizer that are dicts
_EXPECTED = "what state_dict() returns"


class Source(Protocol):
    """Saved entries of parameters, read one at a time. A tensor rank gets the entries of its parts."""

    def names(self) -> Iterable[str]:
        """The parameters that have an entry."""
        ...

    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the tensors in one entry, without reading them."""
        ...

    def step(self, name: str) -> int:
        """The number of updates of one parameter."""
        ...

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, object]:
        """The state of `numel` elements of one parameter as flat tensors. Other values are returned whole."""
        ...


def check_head(saved: Mapping[str, object], rule_name: str) -> None:
    """Checks the state without its entries and groups."""
    for key in ("rule", *_COUNTS, "has_unsent", "loss_scale", "param_groups"):
        if key not in saved:
            raise ValueError(f"state_dict: {key} is missing. Pass a state that state_dict() has returned.")
    if saved["rule"] != rule_name:
        remedy = "Build the optimizer with the rule of the saved state."
        raise invalid_value("state_dict: rule", saved["rule"], [rule_name], remedy)
    for key in _COUNTS:
        if not (is_whole(saved[key]) and number_of(saved[key]) >= 0):
            raise invalid_value(f"state_dict: {key}", saved[key], "a whole number >= 0", _UNCHANGED)
    if not is_flag(saved["has_unsent"]):
        raise invalid_value("state_dict: has_unsent", saved["has_unsent"], [True, False], _UNCHANGED)
    if not isinstance(saved["loss_scale"], Mapping):
        raise invalid_value("state_dict: loss_scale", saved["loss_scale"], "a dict of numbers", _UNCHANGED)
    loss_scale.from_dict(saved["loss_scale"])


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number. 3.0 is one, because torch counts steps in floats."""
    return number_of(value).is_integer()


def check_watch(saved: object) -> None:
    """Checks the state of 1-bit Adam's watch over the second moment."""
    if not isinstance(saved, Mapping):
        raise invalid_value("state_dict: switch", _kind(saved), _EXPECTED)
    try:
        VarianceWatch(1, 1.0).load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_value("state_dict: switch", f"without {error}", _EXPECTED) from None


def check_members(own: Sequence[Sequence[str]], groups: object) -> None:
    """Raises ValueError unless the saved groups have the same parameters. The message names the differences."""
    allowed = "a list of dicts, each with the names of its 'params'"
    if not isinstance(groups, (list, tuple)):
        raise invalid_value("state_dict: param_groups", groups, allowed)
    for i, group in enumerate(groups):
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise invalid_value(f"state_dict: param_groups[{i}]['params']", names, "a list of names")
    then = [list(group["params"]) for group in groups]
    if then == [list(names) for names in own]:
        return
    before, now = _group_of(then), _group_of(own)
    differences = {
        "only in the model": [name for name in now if name not in before],
        "only in the state": [name for name in before if name not in now],
        "in another group": [name for name in now if before.get(name, now[name]) != now[name]],
    }
    said = "; ".join(f"{what}: {_some(names)}" for what, names in differences.items() if names)
    said = said or f"in {len(then)} groups and not {len(own)}, or in another order"
    raise ValueError(
        f"state_dict: the parameters of param_groups differ ({said}), but must have the same names in the same groups. "
        "Train the same parameters in the same groups as when the state was saved. To train other ones, do not load "
        "the optimizer state: engine.load_checkpoint(..., load_optimizer_states=False), or no load_state_dict()."
    )


def _group_of(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: i for i, names in enumerate(groups) for name in names}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_plain(state: object, rule: Rule | None) -> None:
    """Checks the types of the entries of a state dict and of their tensors."""
    if not isinstance(state, Mapping):
        raise invalid_value("state_dict: state", _kind(state), "a dict of entries by parameter name")
    tensors = {"master", *(rule.states if rule is not None else ())}
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            raise invalid_value(f"state_dict: state of {name}", _kind(entry), "a dict")
        for key, value in entry.items():
            is_tensor = isinstance(value, Tensor) and value.is_floating_point()
            if (key in tensors or str(key).endswith("_scale")) and not is_tensor:
                raise invalid_value(f"state_dict: {key} of {name}", _kind(value), "a tensor of floating-point numbers")
            if rule is None and key in _DICTS and not isinstance(value, dict):
                raise invalid_value(f"state_dict: {key} of {name}", _kind(value), "a dict")


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def check_entries(
    params: Sequence[Param], source: Source, rule: Rule | None, groups: Sequence[Mapping[str, object]]
) -> None:
    """Checks that each entry belongs to a parameter, is complete, and has tensors of the right shapes."""
    own = {param.name: param for param in params}
    for name in source.names():
        if name not in own:
            expected = "the name of a trainable parameter of this model"
            remedy = "Load the state into the model for which it was saved, with the same parameters frozen."
            raise invalid_value("state_dict: name of an entry", name, expected, remedy)
        try:
            step = source.step(name)
        except (KeyError, TypeError, ValueError):
            step = -1
        if step < 0:
            raise ValueError(
                f"state_dict: step of {name} is missing or invalid, but must be a whole number >= 0. Pass a state that "
                "state_dict() has returned."
            )
        shapes = source.shapes(name)
        for key in _needed(rule, groups[own[name].group]):
            if key not in shapes:
                raise ValueError(
                    f"state_dict: {key} of {name} is missing, but must be a tensor of the parameter's shape. Pass a "
                    "state that state_dict() has returned."
                )
        for key, shape in shapes.items():
            wanted = _shape(own[name], key)
            if key != "step" and wanted is not None and shape != wanted:
                raise invalid_value(f"state_dict: shape of {name} {key}", shape, [wanted])


def _needed(rule: Rule | None, group: Mapping[str, object]) -> list[str]:
    """The tensors that an entry must have."""
    if rule is None or not rule.keeps_states(group):
        return ["master"]
    return ["master", *(name for name in rule.states if name is not None)]


def _shape(param: Param, key: str) -> tuple[int, ...] | None:
    """The expected shape of a tensor in an entry; None for scales of a part, which may be those of the whole."""
    if not key.endswith("_scale"):
        return tuple(param.tensor.shape)
    if param.is_sharded or shard_of(param.tensor) is not None:
        return None
    return (-(-param.tensor.numel() // BLOCK),)
