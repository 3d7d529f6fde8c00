"""Where forwards and backwards of the model begin and end: for the trace, and for whoever times steps."""

from __future__ import annotations

from typing import Any

import torch

from twinflow.device import Device


class Marks:
    """Set by hooks, as far as a trace is on or somebody wants to know."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.is_wanted = False  # without a trace too
        self.part: list[Any] = []  # of the last micro-batch: where its forward began, its backward began and ended
        self.step: tuple[Any, Any] | None = None  # of the last step: where its first forward began, its backward ended
        self._start: Any = None  # where the first forward of this step began

    def before_model(self) -> None:
        """A forward begins."""
        is_marked = (self._device.trace.enabled or self.is_wanted) and torch.is_grad_enabled()
        self.part = [self._device.mark()] if is_marked else []
        if self.part and self._start is None:
            self._start = self.part[0]

    def after_model(self) -> None:
        """The forward is queued; what follows until `after_backward` counts as backward."""
        if len(self.part) == 1:
            self.part.append(self._device.mark())
            self._device.add_span("forward", *self.part)

    def after_backward(self) -> None:
        """The last backward of a step is queued."""
        if len(self.part) == 2:
            self.part.append(self._device.mark())
            self._device.add_span("backward", *self.part[1:])
            self.step, self._start = (self._start, self.part[2]), None
