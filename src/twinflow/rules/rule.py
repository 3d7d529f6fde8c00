# SPDX-License-Identifier: Apache-2.0
"""The definition of update rules. A rule is declared once, as a `Rule` record. The config and its documentation, the
command line, optimizers, checkpoints and tests read this record.

This module does not import torch, because reading a config must not import it. A rule uses methods of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, SupportsFloat

from twinflow.errors import invalid_value

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor

OptionValue = float | bool | str | tuple[float, ...]
Options = Mapping[str, object]  # a param group; it also holds parameters and entries of schedulers
Hyper = tuple[float, ...]


class Values(Enum):
    """The kinds of values that options have. In errors, the text of a kind follows "must be"."""

    AMOUNT = "a finite number >= 0"
    NUMBER = "a finite number"
    START = "a number >= 0 that fits in fp32"
    BETAS = "two numbers in [0, 1)"
    FLAG = "True, False"
    COUNT = "a whole number from 1 to 99"
    POLYNOMIAL = "three finite numbers"
    CHOICE = "one of its names"


@dataclass(frozen=True)
class Option:
    """An option of a rule. Name and default are those of torch.optim if it has the rule."""

    name: str
    default: OptionValue
    text: str  # description for documentation and command line
    values: Values = Values.AMOUNT
    in_config: OptionValue | None = None  # DeepSpeed's default, if it differs
    choices: tuple[str, ...] = ()  # allowed values of a CHOICE

    def check(self, value: object) -> None:
        """Raise ValueError for a value out of range. Flags are not checked here; the caller checks them."""
        if self.values is Values.BETAS:
            check_betas(value)
        elif self.values is Values.CHOICE:
            if value not in self.choices:
                raise invalid_value(self.name, value, self.choices)
        elif self.values is Values.COUNT:
            if not (_number(value).is_integer() and 1 <= _number(value) < 100):
                raise invalid_value(self.name, value, Values.COUNT.value)
        elif self.values is Values.POLYNOMIAL:
            if not isinstance(value, (tuple, list)) or len(value) != 3 or not all(map(_is_finite, value)):
                raise invalid_value(self.name, value, Values.POLYNOMIAL.value)
        elif self.values is not Values.FLAG:
            least = -math.inf if self.values is Values.NUMBER else 0.0
            number = _number(value)
            if not (least <= number and math.isfinite(number)):
                raise invalid_value(self.name, value, "a finite number" if least < 0 else "a finite number >= 0")


def check_betas(betas: object) -> None:
    """Raise ValueError unless `betas` are two numbers in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise invalid_value("betas", betas, Values.BETAS.value)
    for i, beta in enumerate(betas):
        if not 0.0 <= _number(beta) < 1.0:
            raise invalid_value(f"betas[{i}]", beta, "a number in [0, 1)")


def _number(value: object) -> float:
    """`value` as a float, or NaN if it is not a number. NaN fails every comparison."""
    try:
        return float(value)  # type: ignore[arg-type]  # other types raise
    except (TypeError, ValueError):
        return math.nan


def _is_finite(value: object) -> bool:
    return math.isfinite(_number(value))


def number(options: Options, name: str) -> float:
    """The value of an option as a float. It may be a number of Python, numpy or torch."""
    value = options[name]
    if type(value) is float:  # the usual case; the check of the protocol below takes several microseconds
        return value
    assert isinstance(value, SupportsFloat), f"{name} has been checked to be a number"
    return float(value)


def numbers(options: Options, name: str) -> tuple[float, ...]:
    """The value of an option that is a sequence of numbers."""
    values = options[name]
    assert isinstance(values, Sequence), f"{name} has been checked to be a sequence"
    return tuple(float(value) for value in values)


MAXIMIZE = Option("maximize", False, "maximize the objective instead of minimizing it", Values.FLAG)


@dataclass(frozen=True)
class OtherKey:
    """An option that a config may contain because another library's optimizer of the same name has it. Its default has
    no effect here. Any other value raises an error if `is_refused`, and is accepted without effect otherwise.
    """

    name: str
    default: bool
    text: str  # reason why it has no effect, or what to use instead
    is_refused: bool = False


@dataclass(frozen=True, eq=False)  # compared by identity: there is one record per rule
class Rule:
    """One update rule. `apply` is the reference. The kernels (csrc/rules.h, gpu/kernel.py) give the same bits."""

    name: str
    title: str  # part of class names, such as "AdamW" in HostAdamW
    code: int  # code of the kernel in csrc/rules.h; loading the library compares names and codes
    states: tuple[str | None, str | None]  # torch's names of the first (momentum-like) and second (variance-like) state
    formats: tuple[str, ...]  # supported state formats
    options: tuple[Option, ...]  # in the order of torch's arguments, without `maximize`, which every rule has
    num_scalars: int  # length of the result of `hyper`
    hyper: Callable[[Options, int], Hyper]  # a param group's options and the step (from 1) -> scalars, rounded to fp32
    # one step with fp32 tensors: weight, two states, gradient and scalars -> new weight and states
    apply: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Hyper], tuple[Tensor, Tensor | None, Tensor | None]]
    check_together: Callable[[Options], None] | None = None  # raises ValueError for conflicting options
    torch_class: str | None = None  # the equivalent class of torch.optim
    # options of that class that must have the given value here
    torch_modes: Mapping[str, bool] = field(default_factory=dict)
    other_keys: tuple[OtherKey, ...] = ()
    start_option: str | None = None  # the option with the initial value of states; None: zeros
    state_option: str | None = None  # the option that is zero if no state is kept, such as SGD's momentum
    train: Mapping[str, OptionValue] = field(default_factory=dict)  # defaults of `twinflow train`
    # whether the size of a step depends on lr and not on the gradient; wide models then need a smaller lr
    is_normalized: bool = False
    # For a rule that updates whole matrices: the rule of all other parameters, which are in param groups of their own
    # (`use_muon` is False).
    elementwise: Rule | None = None

    def of(self, group: Options) -> Rule:
        """The rule that updates the parameters of a param group."""
        return self if self.elementwise is None or group["use_muon"] else self.elementwise

    @property
    def all_options(self) -> tuple[Option, ...]:
        """The options of the rule, and `maximize`."""
        return (*self.options, MAXIMIZE)

    @property
    def defaults(self) -> dict[str, OptionValue]:
        """Default of every option, including `maximize`."""
        return {option.name: option.default for option in self.all_options}

    def with_defaults(self, given: Options) -> dict[str, object]:
        """The given options, and defaults for all others. Raises ValueError for an unknown option."""
        for name in given:
            if name not in self.defaults:
                raise ValueError(
                    f"{name!r} is not an option of {self.name!r}. Use only its options: {', '.join(self.defaults)}."
                )
        return {**self.defaults, **given}

    def check(self, options: Options) -> None:
        """Raise ValueError for options that are out of range or conflict with each other."""
        for option in self.options:
            if option.name in options:
                option.check(options[option.name])
        if self.check_together is not None:
            self.check_together(options)

    def start_value(self, options: Options) -> float:
        """The initial value of states."""
        return number(options, self.start_option) if self.start_option is not None else 0.0

    def keeps_states(self, options: Options) -> bool:
        """Whether the rule keeps states with these options. SGD without momentum does not."""
        return self.state_option is None or number(options, self.state_option) != 0.0
