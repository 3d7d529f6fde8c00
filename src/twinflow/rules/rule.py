"""What an update rule is. A rule is declared once, as a `Rule`, and everything else reads that record: the config and
its documentation, the command line, optimizers, checkpoints, and the tests.

Nothing here imports torch when it is imported, because reading a config must not: a rule works on tensors with their
own methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, SupportsFloat

from twinflow.errors import invalid_value

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor

OptionValue = float | bool | tuple[float, float]
Options = Mapping[str, object]  # of a param group, which holds more than options: parameters, what schedulers add
Hyper = tuple[float, ...]


class Values(Enum):
    """The values that an option takes."""

    AMOUNT = "a finite number >= 0"
    NUMBER = "a finite number"
    START = "a number >= 0 that fits fp32"
    BETAS = "two numbers in [0, 1)"
    FLAG = "True, False"


@dataclass(frozen=True)
class Option:
    """An option of a rule, with torch.optim's name and default."""

    name: str
    default: OptionValue
    text: str  # what it does
    values: Values = Values.AMOUNT
    in_config: OptionValue | None = None  # DeepSpeed's default, where it is another one

    def check(self, value: object) -> None:
        """Raise ValueError for a value out of range. What counts as a flag, the caller decides."""
        if self.values is Values.BETAS:
            check_betas(value)
        elif self.values is not Values.FLAG:
            least = -math.inf if self.values is Values.NUMBER else 0.0
            number = _number(value)
            if not (least <= number and math.isfinite(number)):
                raise invalid_value(self.name, value, "a finite number" if least < 0 else "a finite number >= 0")


def check_betas(betas: object) -> None:
    """Both betas lie in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise invalid_value("betas", betas, Values.BETAS.value)
    for i, beta in enumerate(betas):
        if not 0.0 <= _number(beta) < 1.0:
            raise invalid_value(f"betas[{i}]", beta, "a number in [0, 1)")


def _number(value: object) -> float:
    """`value` as a float; NaN, which fails every comparison, where it is none."""
    try:
        return float(value)  # type: ignore[arg-type]  # whatever else it is raises
    except (TypeError, ValueError):
        return math.nan


def number(options: Options, name: str) -> float:
    """The value of an option that is a number: of Python, numpy or torch."""
    value = options[name]
    if type(value) is float:  # nearly always; the check of a protocol takes several microseconds
        return value
    assert isinstance(value, SupportsFloat), f"{name} has been checked to be a number"
    return float(value)


def numbers(options: Options, name: str) -> tuple[float, ...]:
    """The same for an option that is several."""
    values = options[name]
    assert isinstance(values, Sequence), f"{name} has been checked to be a sequence"
    return tuple(float(value) for value in values)


# What most rules have.
BETAS = Option("betas", (0.9, 0.999), "decay of the two moments", Values.BETAS)
EPS = Option("eps", 1e-8, "added to the divisor")
MAXIMIZE = Option("maximize", False, "climb instead of descend", Values.FLAG)


def learning_rate(default: float, in_config: float | None = None) -> Option:
    """`lr`, whose default differs between rules."""
    return Option("lr", default, "learning rate", in_config=in_config)


def weight_decay(default: float = 0.0) -> Option:
    """`weight_decay`; DeepSpeed's default is 0 for every rule."""
    return Option("weight_decay", default, "weight decay", in_config=0.0)


@dataclass(frozen=True)
class OtherKey:
    """An option that optimizers of this name have elsewhere and that a config may name: at its default, it changes
    nothing here; any other value is refused if `is_refused`, else it is taken and has no effect."""

    name: str
    default: bool
    text: str  # why it has no effect, or what to use instead
    is_refused: bool = False


SET_GRAD_NONE = OtherKey("set_grad_none", True, "gradients are always dropped")
DIFFERENTIABLE = OtherKey("differentiable", False, "an update cannot be differentiated", is_refused=True)


class Apply(Protocol):
    """One step for fp32 tensors: the new weight, first state and second state."""

    def __call__(
        self, p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper, /
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...


@dataclass(frozen=True, eq=False)  # there is one record for each rule
class Rule:
    """One update rule. `apply` is the truth; the kernels (csrc/rules.h, gpu/rules.py) reproduce it bit for bit."""

    name: str
    title: str  # in names of classes: "AdamW" of HostAdamW
    code: int  # of its kernel in csrc/rules.h; loading the library compares names and codes
    states: tuple[str | None, str | None]  # torch's names of the first (momentum-like) and second (variance-like) state
    formats: tuple[str, ...]  # state formats the rule comes in
    options: tuple[Option, ...]  # in the order of torch's arguments; `maximize`, which every rule has, is not named
    num_scalars: int  # how many numbers `hyper` gives
    hyper: Callable[[Options, int], Hyper]  # a param group's options and the step (from 1) -> scalars, rounded to fp32
    apply: Apply
    check_together: Callable[[Options], None] | None = None  # raises ValueError for options that exclude each other
    torch_class: str | None = None  # the class of torch.optim that does the same
    torch_modes: Mapping[str, bool] = field(default_factory=dict)  # options of that class, each with our only value
    other_keys: tuple[OtherKey, ...] = ()
    start_option: str | None = None  # the option that holds what fresh states are filled with; without it, zeros
    state_option: str | None = None  # the option without which no state is kept: SGD's momentum
    train: Mapping[str, OptionValue] = field(default_factory=dict)  # what `twinflow train` takes instead of defaults
    is_normalized: bool = False  # a step is as long as lr, whatever the gradient: wide models need a smaller lr

    @property
    def all_options(self) -> tuple[Option, ...]:
        """With `maximize`."""
        return (*self.options, MAXIMIZE)

    @property
    def defaults(self) -> dict[str, OptionValue]:
        """Of every option, `maximize` too."""
        return {option.name: option.default for option in self.all_options}

    def with_defaults(self, given: Options) -> dict[str, object]:
        """The given options and defaults of the others; an option that the rule does not have is an error."""
        for name in given:
            if name not in self.defaults:
                raise invalid_value(f"option of {self.name!r}", name, self.defaults)
        return {**self.defaults, **given}

    def check(self, options: Options) -> None:
        """Raise ValueError for options out of range, or that exclude each other."""
        for option in self.options:
            if option.name in options:
                option.check(options[option.name])
        if self.check_together is not None:
            self.check_together(options)

    def start_value(self, options: Options) -> float:
        """What fresh states are filled with."""
        return number(options, self.start_option) if self.start_option is not None else 0.0

    def keeps_states(self, options: Options) -> bool:
        """Whether states are kept with these options."""
        return self.state_option is None or number(options, self.state_option) != 0.0
