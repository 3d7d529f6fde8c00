"""The step timer: when forwards and backwards of the model begin and end, for the trace and for ratio "auto"."""

from __future__ import annotations

import torch

from twinflow.device import Device, Mark


class StepTimer:
    """Hooks report to it. It records moments while a trace is on, or between `start` and `stop`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_running = False  # without a trace too
        self.part: list[Mark] = []  # of the last micro-batch: where its forward began, its backward began and ended
        self.step: tuple[Mark, Mark] | None = None  # of the last step: its first forward began, its backward ended
        self._start: Mark | None = None  # where the first forward of this step began

    def start(self) -> None:
        """Record from now on, without a trace too."""
        self._is_running = True

    def stop(self) -> None:
        """Record only while a trace is on."""
        self._is_running = False

    def before_model(self) -> None:
        """A forward begins."""
        is_marked = (self._device.trace.enabled or self._is_running) and torch.is_grad_enabled()
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
            assert self._start is not None
            self.step = (self._start, self.part[2])
            self._start = None
