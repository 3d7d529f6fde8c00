"""The options each rule takes, with torch.optim's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from twinflow.errors import bad_value

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
        "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        "adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
        "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    }
)


def with_defaults(rule: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A rule's options with the given ones filled in; an option it does not have is an error."""
    defaults = {**DEFAULTS[rule], "maximize": False}
    for name in given:
        if name not in defaults:
            raise bad_value(f"option of {rule!r}", name, defaults)
    return {**defaults, **given}
