"""What is wrong with a saved optimizer state, found before anything changes: missing, of another kind, out of range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from twinflow.errors import invalid_value
from twinflow.offload.bucket import Param
from twinflow.optim import loss_scale
from twinflow.optim.onebit.freeze import VarianceWatch
from twinflow.optim.twin_checks import is_flag, number_of
from twinflow.parallel.shard import shard_of
from twinflow.rules import Rule
from twinflow.rules.formats import BLOCK

_COUNTS = ("num_steps", "num_skipped", "num_jobs")
_DICTS = ("state", "group")  # of an entry, where the rule is an optimizer of the user's


class Source(Protocol):
    """Saved entries of parameters, read one at a time; of a parameter that is a tensor rank's part, that part's."""

    def names(self) -> Iterable[str]:
        """The parameters that have one."""
        ...

    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors of one entry, without reading them."""
        ...

    def step(self, name: str) -> int:
        """Updates so far of one parameter."""
        ...

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, object]:
        """What was kept for some elements of one parameter, flat; what has no elements, whole."""
        ...


def check_head(saved: Mapping[str, object], rule_name: str) -> None:
    """All but what is kept for each parameter, and the groups."""
    for key in ("rule", *_COUNTS, "has_unsent", "loss_scale", "param_groups"):
        if key not in saved:
            raise invalid_value(f"state_dict: {key}", "missing", "what state_dict() gives")
    if saved["rule"] != rule_name:
        raise invalid_value("state_dict: rule", saved["rule"], [rule_name])
    for key in _COUNTS:
        if not (is_whole(saved[key]) and number_of(saved[key]) >= 0):
            raise invalid_value(f"state_dict: {key}", saved[key], "a whole number >= 0")
    if not is_flag(saved["has_unsent"]):
        raise invalid_value("state_dict: has_unsent", saved["has_unsent"], [True, False])
    if not isinstance(saved["loss_scale"], Mapping):
        raise invalid_value("state_dict: loss_scale", saved["loss_scale"], "a dict of numbers")
    loss_scale.from_dict(saved["loss_scale"])


def is_whole(value: object) -> bool:
    """Whether it is a whole number; torch counts steps as 3.0."""
    return number_of(value).is_integer()


def check_watch(saved: object) -> None:
    """What 1-bit Adam remembers of the second moment."""
    if not isinstance(saved, Mapping):
        raise invalid_value("state_dict: switch", _kind(saved), "what state_dict() gives")
    try:
        VarianceWatch(1, 1.0).load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise invalid_value("state_dict: switch", f"without {error}", "what state_dict() gives") from None


def check_members(own: Sequence[Sequence[str]], groups: object) -> None:
    """The same parameters in the same groups; of others, which they are."""
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
    remedy = (
        "Train the same parameters in the same groups as when it was saved. To go on with others, leave the "
        "optimizer's state out: engine.load_checkpoint(..., load_optimizer_states=False), or no load_state_dict()."
    )
    said = said or f"in {len(then)} groups and not {len(own)}, or in another order"
    raise invalid_value("state_dict: parameters of param_groups", said, "the same names in the same groups", remedy)


def _group_of(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: i for i, names in enumerate(groups) for name in names}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_plain(state: object, rule: Rule | None) -> None:
    """Entries of a state dict are dicts, and what is read of them as tensors are tensors."""
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
    """Each entry is of a parameter that is here, complete, and of its shape."""
    own = {param.name: param for param in params}
    for name in source.names():
        if name not in own:
            raise invalid_value("state_dict: parameter", name, "the names of this model's trainable parameters")
        try:
            step = source.step(name)
        except (KeyError, TypeError, ValueError):
            step = -1
        if step < 0:
            raise invalid_value(f"state_dict: step of {name}", "missing, or no such number", "a whole number >= 0")
        shapes = source.shapes(name)
        for key in _needed(rule, groups[own[name].group]):
            if key not in shapes:
                raise invalid_value(f"state_dict: {key} of {name}", "missing", "a tensor of the parameter's shape")
        for key, shape in shapes.items():
            wanted = _shape(own[name], key)
            if key != "step" and wanted is not None and shape != wanted:
                raise invalid_value(f"state_dict: shape of {name} {key}", shape, [wanted])


def _needed(rule: Rule | None, group: Mapping[str, object]) -> list[str]:
    """Tensors without which an entry is not complete."""
    if rule is None or not rule.keeps_states(group):
        return ["master"]
    return ["master", *(name for name in rule.states if name is not None)]


def _shape(param: Param, key: str) -> tuple[int, ...] | None:
    """Of a tensor in a parameter's entry; None for scales of a part of it, which may be those of the whole."""
    if not key.endswith("_scale"):
        return tuple(param.tensor.shape)
    if param.is_sharded or shard_of(param.tensor) is not None:
        return None
    return (-(-param.tensor.numel() // BLOCK),)
