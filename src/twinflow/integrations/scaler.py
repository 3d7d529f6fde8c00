# SPDX-License-Identifier: Apache-2.0
"""The gradient scaler of fp16 for loops that call torch's GradScaler: it uses the loss scale of a TwinOptimizer.

GradScaler reads all gradients before a step, to divide them by the scale and to look for values that are not finite.
TwinOptimizer does both in its update, and skips the step itself. `TwinScaler` has the methods that loops call.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from twinflow.errors import invalid_value, wrong_state
from twinflow.optim.loss_scale import LossScale
from twinflow.optim.twin import TwinOptimizer

_LEAST = 2.0**-100  # GradScaler has no lower limit


def loss_scale_for(scaler: Any) -> LossScale:
    """The loss scale that starts and changes as that of a GradScaler, except that it grows one step later. Raises
    ValueError for factors that differ.
    """
    growth, backoff = float(scaler.get_growth_factor()), float(scaler.get_backoff_factor())
    if growth * backoff != 1.0:
        remedy = "The loss scale is multiplied and divided by the same factor."
        raise invalid_value("backoff_factor of the gradient scaler", backoff, [1.0 / growth], remedy)
    return LossScale(
        scale=float(scaler.get_scale()),
        dynamic=True,
        window=int(scaler.get_growth_interval()),
        factor=growth,
        hysteresis=1,
        hysteresis_left=1,
        min_scale=_LEAST,
        raise_at_min=False,
    )


class TwinScaler:
    """Replaces the GradScaler of an accelerator."""

    def __init__(self, twin: TwinOptimizer, original: Any) -> None:
        self.original = getattr(original, "original", original)  # the GradScaler with the options of the user
        self._twin = weakref.ref(twin)
        self._wrapper: Any = None

    def attach(self, wrapper: Any) -> None:
        """`wrapper`: Accelerate's wrapper of the optimizer, which tells the loop whether a step was skipped."""
        self._wrapper = weakref.ref(wrapper)

    def _own(self, optimizer: Any = None) -> TwinOptimizer:
        twin = self._twin()
        if twin is None or (optimizer is not None and optimizer is not twin):
            raise wrong_state(
                "The gradient scaler cannot be used with another optimizer",
                "its loss scale is that of one TwinOptimizer",
                "Train all parameters with this TwinOptimizer, or use bf16.",
            )
        return twin

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs * self._own().loss_scale

    def unscale_(self, optimizer: Any) -> None:
        """Does nothing, because the update divides the gradients."""
        self._own(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the step, which skips itself if gradients are not finite. Waits until this is known, because the loop
        then does not advance its schedule.
        """
        twin = self._own(optimizer)
        result = optimizer.step(*args, **kwargs)
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is not None:
            wrapper._accelerate_step_called = not twin.overflow
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Does nothing: the optimizer changes the scale after a step. Raises ValueError for a scale of the caller."""
        if new_scale is not None:
            raise invalid_value("new_scale", new_scale, [None], "The optimizer changes the loss scale itself.")

    def get_scale(self) -> float:
        return self._own().loss_scale

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, float]:
        """The scale, for information: the state of the optimizer has it too."""
        return {"scale": self._own().loss_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does nothing: the scale is loaded with the state of the optimizer."""
