# SPDX-License-Identifier: Apache-2.0
"""The step timer: records when forwards and backwards begin and end, for the trace and for the option ratio="auto"."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twinflow.device import Device, Mark


@dataclass(frozen=True)
class StepMarks:
    """Points of one step on the device."""

    start: Mark  # begin of the first forward; end of the step before, if no forward of the model was recorded
    parts: tuple[Mark, Mark] | None  # of the last micro-batch: begin of forward, begin of backward
    after_backward: Mark
    end: Mark  # end of `step()`; later than the backward if the GPU waits for Python, or `step` for updates


class StepTimer:
    """Records times while a trace is on, and from `start` on. Hooks of the model call it.

    No hook runs inside the graph of a compiled model, or if the loop calls only parts of the model. `StepMarks` then
    has the times of whole steps only.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_running = False  # record even if no trace is on
        self._part: list[Mark] = []  # of the last micro-batch: begin of forward, begin of backward
        self._parts: tuple[Mark, Mark] | None = None  # of the last micro-batch of the last step
        self._after_backward: Mark | None = None
        self._start: Mark | None = None  # begin of the first forward of this step
        self._last_end: Mark | None = None

    def start(self) -> None:
        """Records from now on, even if no trace is on."""
        self._is_running = True
        self.begin_step()

    def begin_step(self) -> None:
        """Marks the point from which a step counts if none of its forwards is recorded."""
        self._last_end = self._device.mark()

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
        if self._device.trace.enabled or self._is_running:
            self._after_backward = self._device.mark()
            if len(self._part) == 2:
                forward, backward = self._part
                self._device.add_span("backward", backward, self._after_backward)
                self._parts = (forward, backward)
        self._part = []

    def take(self) -> StepMarks:
        """The marks of the step that ends now. Call `start` before the first step."""
        start = self._start if self._start is not None else self._last_end
        assert start is not None and self._after_backward is not None
        found = StepMarks(start, self._parts, self._after_backward, self._device.mark())
        self._start = None
        self._parts = None
        return found
