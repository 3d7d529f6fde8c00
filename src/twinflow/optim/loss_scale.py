# SPDX-License-Identifier: Apache-2.0
"""The loss scale of fp16 training, static or dynamic: an immutable record, and a function for the next record.

fp16 gradients vanish below 6e-8 and overflow above 65504. The loss is therefore multiplied by a scale before backward,
and the gradients are divided by it afterwards. The dynamic scale changes exactly as DeepSpeed's
`DynamicLossScaler.update_scale`:

- An overflow reduces `hysteresis_left` by one. If it is 1, the scale is divided by `factor`, but not below `min_scale`.
- Steps without overflow are counted from 1, at the start and after each overflow. Steps `window` + 1, 2 `window` + 1,
  ... multiply the scale by `factor`.
- `hysteresis_left` is reset when the scale grows, or with `consecutive_hysteresis` at every step without overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace

from twinflow.errors import invalid_value


@dataclass(frozen=True)
class LossScale:
    """A loss scale: its present state, and the rule by which it changes. Make one with `static` or `dynamic`."""

    scale: float  # present factor of the loss
    dynamic: bool
    window: int = 1000
    factor: float = 2.0
    hysteresis: int = 2
    min_scale: float = 1.0
    consecutive_hysteresis: bool = False
    raise_at_min: bool = True
    iteration: int = 0  # number of steps so far, including skipped ones
    last_overflow: int = -1  # the iteration of the last overflow
    hysteresis_left: int = 2

    def __post_init__(self) -> None:
        for name in ("dynamic", "consecutive_hysteresis", "raise_at_min"):
            if not isinstance(getattr(self, name), bool):
                raise invalid_value(name, getattr(self, name), [True, False])
        for name, least in (("window", 1), ("hysteresis", 1), ("iteration", 0), ("last_overflow", -1)):
            _check_whole(name, getattr(self, name), least)
        for name in ("scale", "min_scale"):
            _check_above(name, getattr(self, name), 0.0)
        _check_above("factor", self.factor, 1.0)
        _check_whole("hysteresis_left", self.hysteresis_left, 1, self.hysteresis)
        if self.last_overflow >= self.iteration:
            expected = f"a number less than iteration, which is {self.iteration}"
            raise invalid_value("last_overflow", self.last_overflow, expected)
        if self.dynamic and self.scale < self.min_scale:
            raise invalid_value("scale", self.scale, f"a number >= min_scale, which is {self.min_scale}")


def static(value: float) -> LossScale:
    """A scale that never changes. Steps that overflow are still skipped."""
    if value == 0:
        remedy = "Use dynamic() for a dynamic scale. In DeepSpeed, the value 0 selects it."
        raise invalid_value("The loss scale", value, "a finite number > 0", remedy)
    return LossScale(value, dynamic=False)


def dynamic(
    initial_power: int = 16,
    window: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
    consecutive_hysteresis: bool = False,
    raise_at_min: bool = True,
) -> LossScale:
    """A dynamic scale that starts at 2**`initial_power`. The defaults are those of DeepSpeed's `fp16` section."""
    _check_whole("initial_power", initial_power, 0, 127)  # the scaled loss is fp32, which is below 2**128
    return LossScale(
        scale=2.0**initial_power,
        dynamic=True,
        window=window,
        hysteresis=hysteresis,
        min_scale=min_scale,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_at_min=raise_at_min,
        hysteresis_left=hysteresis,
    )


def after_step(scale: LossScale, overflow: bool) -> LossScale:
    """The scale for the next step. `overflow`: a gradient of this step, still scaled, was not finite.

    Raises FloatingPointError if the scale must decrease and is at its minimum, unless `raise_at_min` is False.
    """
    if not scale.dynamic:
        return scale
    value, left, last_overflow = scale.scale, scale.hysteresis_left, scale.last_overflow
    if overflow:
        last_overflow = scale.iteration
        if left > 1:
            left -= 1
        elif value == scale.min_scale and scale.raise_at_min:
            raise FloatingPointError(
                f"Gradients are not finite at the smallest loss scale, {value:g} (step {scale.iteration + 1}). The "
                "loss has probably diverged. Lower the learning rate, clip gradients or train in bf16. A lower "
                "min_loss_scale allows a smaller scale, and raise_at_min=False skips such steps without an error."
            )
        else:
            value = max(value / scale.factor, scale.min_scale)
    else:
        num_good = scale.iteration - last_overflow - 1  # good steps in a row before this one
        grows = num_good > 0 and num_good % scale.window == 0
        if grows and math.isfinite(value * scale.factor):
            value *= scale.factor
        if grows or scale.consecutive_hysteresis:
            left = scale.hysteresis
    iteration = scale.iteration + 1
    return replace(scale, scale=value, hysteresis_left=left, iteration=iteration, last_overflow=last_overflow)


def to_dict(scale: LossScale) -> dict[str, object]:
    """The fields as a dict, for a checkpoint."""
    return asdict(scale)


def from_dict(saved: Mapping[str, object]) -> LossScale:
    """The loss scale from a dict of `to_dict`. Raises ValueError for missing or unknown keys and invalid values."""
    names = sorted(field.name for field in fields(LossScale))
    keys = sorted(map(str, saved))
    if keys != names:
        raise ValueError(
            f"The saved loss scale has the keys {keys}, but must have the keys {names}. Load a state that twinflow has "
            "saved, without changes."
        )
    made: Callable[..., LossScale] = LossScale  # `__post_init__` checks the values
    scale = made(**saved)
    # A JSON file may have a whole number here, and large ones do not become a tensor.
    return replace(scale, scale=float(scale.scale), factor=float(scale.factor), min_scale=float(scale.min_scale))


def _check_whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        allowed = f"a whole number >= {least}" + (f" and <= {most}" if most < math.inf else "")
        raise invalid_value(name, value, allowed)


def _check_above(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < math.inf:
        raise invalid_value(name, value, f"a finite number > {least:g}")
