"""The loss scale of fp16 training, static or dynamic, as a value and a pure step.

fp16 gradients vanish below 6e-8 and overflow above 65504, so the loss is multiplied by a scale before backward and the
gradients are divided by it after. The dynamic scale moves as DeepSpeed's `DynamicLossScaler.update_scale` does, step
for step. An overflow uses up one unit of `hysteresis`; with one left it shrinks the scale instead, and so does every
further overflow until the hysteresis is full again. That happens when the scale grows, which is with good step number
`window` + 1, 2 `window` + 1, ... in a row; or, with `consecutive_hysteresis`, at any good step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twinflow.errors import invalid_value


@dataclass(frozen=True)
class LossScale:
    """A loss scale: how it moves, then where it stands. Make one with `static` or `dynamic`."""

    scale: float  # what the loss is multiplied by now
    dynamic: bool
    window: int = 1000
    factor: float = 2.0
    hysteresis: int = 2
    min_scale: float = 1.0
    consecutive_hysteresis: bool = False
    raise_at_min: bool = True
    iteration: int = 0  # steps so far, skipped ones included
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
            raise invalid_value(
                "last_overflow", self.last_overflow, f"an iteration before the present, {self.iteration}"
            )
        if self.dynamic and self.scale < self.min_scale:
            raise invalid_value("scale", self.scale, f"at least min_scale, which is {self.min_scale}")


def static(value: float) -> LossScale:
    """A scale that never moves; a step that overflows is still skipped by whoever looks at the gradients."""
    if value == 0:
        raise invalid_value("loss scale", value, "a finite number > 0", "DeepSpeed's 0 means dynamic: use dynamic()")
    return LossScale(value, dynamic=False)


def dynamic(
    initial_power: int = 16,
    window: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
    consecutive_hysteresis: bool = False,
    raise_at_min: bool = True,
) -> LossScale:
    """A scale that starts at 2**`initial_power` and moves; the defaults are DeepSpeed's `fp16` section."""
    _check_whole("initial_power", initial_power, 0, 127)  # fp32, in which the loss is scaled, ends at 2**128
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

    Raises FloatingPointError where the scale would have to shrink below its minimum, unless `raise_at_min` is off.
    """
    if not scale.dynamic:
        return scale
    value, left = _after_overflow(scale) if overflow else _after_good_step(scale)
    return dataclasses.replace(
        scale,
        scale=value,
        hysteresis_left=left,
        iteration=scale.iteration + 1,
        last_overflow=scale.iteration if overflow else scale.last_overflow,
    )


def _after_overflow(scale: LossScale) -> tuple[float, int]:
    """The next scale and the hysteresis left."""
    if scale.hysteresis_left > 1:
        return scale.scale, scale.hysteresis_left - 1
    if scale.scale == scale.min_scale and scale.raise_at_min:
        raise FloatingPointError(
            f"gradients are not finite at the smallest loss scale, {scale.min_scale:g} (step {scale.iteration + 1}): "
            "the loss itself has probably diverged. Lower the learning rate, clip gradients or train in bf16; "
            "a lower min_loss_scale lets the scale shrink further, raise_at_min=False skips such steps without end"
        )
    return max(scale.scale / scale.factor, scale.min_scale), scale.hysteresis_left


def _after_good_step(scale: LossScale) -> tuple[float, int]:
    """The next scale and the hysteresis left."""
    good = scale.iteration - scale.last_overflow - 1  # good steps in a row before this one
    grows = good > 0 and good % scale.window == 0
    refilled = grows or scale.consecutive_hysteresis
    grown = scale.scale * scale.factor if grows else scale.scale
    return grown if math.isfinite(grown) else scale.scale, scale.hysteresis if refilled else scale.hysteresis_left


def to_dict(scale: LossScale) -> dict[str, object]:
    """Plain numbers, for a checkpoint."""
    return dataclasses.asdict(scale)


def from_dict(saved: Mapping[str, object]) -> LossScale:
    """What `to_dict` gave; every field must be there, and nothing else."""
    names = [field.name for field in dataclasses.fields(LossScale)]
    if set(saved) != set(names):
        raise invalid_value("loss scale in the checkpoint: keys", sorted(map(str, saved)), [sorted(names)])
    made: Callable[..., LossScale] = LossScale  # which checks what it is given
    return made(**saved)


def _check_whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        allowed = f"a whole number >= {least}" + (f" and <= {most}" if most < math.inf else "")
        raise invalid_value(name, value, allowed)


def _check_above(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < math.inf:
        raise invalid_value(name, value, f"a finite number > {least:g}")
