"""State dicts and param groups: mappings whose keys tell what their values are, with checked access to the values.

The checks are asserts, because what comes from a user or from a file has been checked before (optim/saved.py,
optim/twin_state_checks.py): a wrong type here is a mistake of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

StateDict = dict[str, object]
ParamEntry = Tensor | tuple[str, Tensor] | Mapping[str, object]  # one item of what torch.optim takes as parameters
Kind = TypeVar("Kind")


def value_of(values: Mapping[str, object], name: str, kind: type[Kind]) -> Kind:
    value = values[name]
    assert isinstance(value, kind), f"{name} is a {type(value).__name__}, expected a {kind.__name__}"
    return value


def tensor_of(values: Mapping[str, object], name: str) -> Tensor:
    return value_of(values, name, Tensor)


def dict_of(values: Mapping[str, object], name: str) -> StateDict:
    """The dict under `name`; an empty one where there is none."""
    return value_of(values, name, dict) if name in values else {}


def params_of(group: Mapping[str, object]) -> list[Tensor]:
    """The parameters of a param group, which is what torch.optim has made of the user's."""
    found: list[Tensor] = value_of(group, "params", list)
    return found


def map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """The same with changed tensors, which may be nested in dicts, lists and tuples. Other containers stay as they
    are, with what they hold."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) is list:
        return [map_tensors(item, change) for item in value]
    if type(value) is tuple:
        return tuple(map_tensors(item, change) for item in value)
    return value
