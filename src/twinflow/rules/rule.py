"""What an update rule is: a name, its states, its scalars for a step, and a pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Options = Mapping[str, Any]
Hyper = tuple[float, ...]
# (weight, first state, second state, gradient, hyper) -> the new (weight, first state, second state), all fp32
Apply = Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Hyper], tuple[Tensor, Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class Rule:
    """One update rule. `apply` is the truth; the native kernels reproduce it bit for bit."""

    name: str
    code: int  # tf_rule in csrc/api.h
    states: tuple[str | None, str | None]  # names of the first (momentum-like) and second (variance-like) state
    formats: tuple[str, ...]  # state formats the rule comes in
    num_scalars: int  # how many numbers `hyper` gives
    hyper: Callable[[Options, int], Hyper]  # a param group's options and the step (from 1) -> scalars, rounded to fp32
    check: Callable[[Options], None]  # raises ValueError for options out of range
    apply: Apply
