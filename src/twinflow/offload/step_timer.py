"""The step timer: records when forwards and backwards begin and end, for the trace and for the option ratio="auto"."""

from __future__ import annotations

import torch

from twinflow.device import Device, Mark


class StepTimer:
    """Records times while a trace is on, or between `start` and `stop`. Hooks of the model call it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_running = False  # record even if no trace is on
        self.part: list[Mark] = []  # of the last micro-batch: begin of forward, begin of backward, end of backward
        self.step: tuple[Mark, Mark] | None = None  # of the last step: begin of its first forward, end of its backward
        self._start: Mark | None = None  # begin of the first forward of this step

    def start(self) -> None:
        """Records from now on, even if no trace is on."""
        self._is_running = True

    def stop(self) -> None:
        """Records only while a trace is on."""
        self._is_running = False

    def before_model(self) -> None:
        """Marks the beginning of a forward."""
        is_marked = (self._device.trace.enabled or self._is_running) and torch.is_grad_enabled()
        self.part = [self._device.mark()] if is_marked else []
        if self.part and self._start is None:
            self._start = self.part[0]

    def after_model(self) -> None:
        """Marks the end of a forward. All work until `after_backward` counts as backward."""
        if len(self.part) == 1:
            self.part.append(self._device.mark())
            self._device.add_span("forward", *self.part)

    def after_backward(self) -> None:
        """Marks the end of the last backward of a step."""
        if len(self.part) == 2:
            self.part.append(self._device.mark())
            self._device.add_span("backward", *self.part[1:])
            assert self._start is not None
            self.step = (self._start, self.part[2])
            self._start = None
