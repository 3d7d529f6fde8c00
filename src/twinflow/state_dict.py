# SPDX-License-Identifier: Apache-2.0
"""State dicts and param groups: mappings with values of several types, checked access to the values, and entries of
state that are read when they are saved.

Values from users and files are checked before use, with errors that contain a remedy (optim/host.py,
optim/twin_state.py). The functions here raise TypeError for a value of the wrong type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsFloat, SupportsInt, TypeVar

import torch
from torch import Tensor

from twinflow import native

StateDict = dict[str, object]
ParamEntry = Tensor | tuple[str, Tensor] | Mapping[str, object]  # one item of the argument `params` of torch.optim
Kind = TypeVar("Kind")


def value_of(values: Mapping[str, object], name: str, kind: type[Kind]) -> Kind:
    value = values[name]
    if not isinstance(value, kind):
        raise _wrong_type(name, value, f"of type {kind.__name__}")
    return value


def tensor_of(values: Mapping[str, object], name: str) -> Tensor:
    return value_of(values, name, Tensor)


def dict_of(values: Mapping[str, object], name: str) -> StateDict:
    """The dict under `name`, or an empty dict if there is none."""
    return value_of(values, name, dict) if name in values else {}


def mapping_of(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = values[name]
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, "a dict")
    return value


def list_of(values: Mapping[str, object], name: str) -> Sequence[object]:
    value = values[name]
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(name, value, "a list")
    return value


def int_of(values: Mapping[str, object], name: str) -> int:
    """The integer under `name`, which may be a number of Python, numpy or torch."""
    value = values[name]
    if not isinstance(value, SupportsInt):
        raise _wrong_type(name, value, "a number")
    return int(value)


def float_of(values: Mapping[str, object], name: str) -> float:
    value = values[name]
    if not isinstance(value, SupportsFloat):
        raise _wrong_type(name, value, "a number")
    return float(value)


def saved_groups(state_dict: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The param groups of an optimizer's state dict."""
    groups = list_of(state_dict, "param_groups")
    found = [group for group in groups if isinstance(group, Mapping)]
    if len(found) != len(groups):
        raise TypeError("state_dict: A param group is not a dict. Pass a dict that state_dict() has returned.")
    return found


def check_group_sizes(
    state_dict: Mapping[str, object], own: Sequence[Mapping[str, object]]
) -> list[Mapping[str, object]]:
    """The saved param groups. Raises ValueError if their numbers of parameters differ from those of `own`."""
    groups = saved_groups(state_dict)
    sizes, own_sizes = [len(list_of(group, "params")) for group in groups], [len(params_of(group)) for group in own]
    if sizes != own_sizes:
        raise ValueError(
            f"state_dict has param groups of {sizes} parameters, but the optimizer has param groups of {own_sizes} "
            "parameters. Build the optimizer with the same groups as when the state was saved."
        )
    return groups


def _wrong_type(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"{name} is of type {type(value).__name__}, but must be {wanted}.")


def params_of(group: Mapping[str, object]) -> list[Tensor]:
    """The parameters of a param group, in the format that torch.optim makes from the user's argument."""
    found: list[Tensor] = value_of(group, "params", list)
    return found


def map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """Applies `change` to the tensors in nested dicts, lists and tuples and returns the result. Named tuples and other
    containers are unchanged, including their contents.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map_tensors(item, change) for item in value)
    return value


@dataclass(frozen=True)
class PartOf:
    """The place of flat values in a whole tensor of `shape`: its flattened elements from index `start` on."""

    shape: tuple[int, ...]
    start: int

    def key(self, name: str) -> str:
        """The key of this part of the tensor `name` in a file."""
        return f"{name}@{self.start}"


class Halves(NamedTuple):
    """fp32 values as their upper halves (bf16) and lower halves (16 bits): the parts of a split master."""

    upper: Tensor
    lower: Tensor


@dataclass(frozen=True)
class Parts:
    """The values of a tensor as flat parts that follow one another, on the host or on the device."""

    parts: tuple[Tensor | Halves, ...]

    def joined(self) -> Tensor:
        """A copy of the values, flat."""
        return torch.cat([native.join(*part) if isinstance(part, Halves) else part for part in self.parts])


@dataclass(frozen=True)
class Entry:
    """A tensor to be saved, or a part of one. `read` returns its values and is called when they are written.

    The writer calls `done` when it does not need the values any more. They must not change before.
    `shape` is the shape of the values that `read` returns. A part is flat, and `part` describes the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor | Parts]
    part: PartOf | None = None
    done: Callable[[], None] | None = None

    def tensor(self) -> Tensor:
        """The values that `read` returns, as a tensor."""
        found = self.read()
        return found.joined().view(self.shape) if isinstance(found, Parts) else found

    @property
    def key(self) -> str:
        """The key of the entry in a file."""
        return self.part.key(self.name) if self.part else self.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_nothing(self) -> bool:
        """Whether this is an empty part of a tensor that is not empty. Such a part is not saved."""
        return self.part is not None and not self.numel and math.prod(self.part.shape) > 0

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize
