"""The step timer: records when forwards and backwards begin and end, for the trace and for the option ratio="auto"."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinflow.device import Device, Mark


@dataclass(frozen=True)
class StepMarks:
    """Points of one step on the device. The forward and the backward are those of the last micro-batch."""

    start: Mark  # begin of the first forward
    forward: Mark
    backward: Mark  # begin of the backward, which is the end of the forward
    after_backward: Mark
    end: Mark  # end of `step()`; later than the backward if the GPU waits for Python


class StepTimer:
    """Records times while a trace is on, or between `start` and `stop`. Hooks of the model call it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_running = False  # record even if no trace is on
        self._part: list[Mark] = []  # of the last micro-batch: begin of forward, begin of backward, end of backward
        self._step: tuple[Mark, Mark, Mark, Mark] | None = None  # of the last step: `StepMarks` without the end
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
        self._part = [self._device.mark()] if is_marked else []
        if self._part and self._start is None:
            self._start = self._part[0]

    def after_model(self) -> None:
        """Marks the end of a forward. All work until `after_backward` counts as backward."""
        if len(self._part) == 1:
            self._part.append(self._device.mark())
            self._device.add_span("forward", *self._part)

    def after_backward(self) -> None:
        """Marks the end of the last backward of a step."""
        if len(self._part) == 2:
            self._part.append(self._device.mark())
            self._device.add_span("backward", *self._part[1:])
            assert self._start is not None
            forward, backward, end = self._part
            self._step = (self._start, forward, backward, end)
            self._start = None

    def take(self) -> StepMarks | None:
        """The marks of the step that ends now, once; None if its forward and backward were not recorded."""
        step, self._step = self._step, None
        return None if step is None else StepMarks(*step, end=self._device.mark())
