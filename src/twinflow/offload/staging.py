"""Streams that streamed state passes through: in, updated, out, one bucket at a time on each.

A stream works in order, so that nothing has to wait inside one; of several, one loads while another stores. Each has a
buffer of its own on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow.device import Device, Stream
from twinflow.planner.simulate import NUM_STAGES


class Stage:
    """One stream and its buffer."""

    def __init__(self, device: Device, number: int) -> None:
        self._device = device
        self._name = f"streamed{number}"
        self._raw: Tensor | None = None

    @property
    def stream(self) -> Stream:
        """Where the work of this stage is queued."""
        return self._device.stream(self._name)

    def buffer(self, nbytes: int, where: torch.device) -> Tensor:
        """So many bytes on the device."""
        if self._raw is None or self._raw.numel() < nbytes:
            self._raw = self.stream.zeros(nbytes, torch.uint8, where)
        return self._raw[:nbytes]


class Stages:
    """All of them, in turn."""

    def __init__(self, device: Device) -> None:
        self._stages = [Stage(device, number) for number in range(NUM_STAGES)]

    def next(self) -> Stage:
        """The one that was used longest ago."""
        stage = self._stages.pop(0)
        self._stages.append(stage)
        return stage
