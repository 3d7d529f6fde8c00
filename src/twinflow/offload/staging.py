# SPDX-License-Identifier: Apache-2.0
"""Stages for streamed state: each is a stream with one device buffer.

Streamed state is on the host and is copied to the device for each update. A bucket holds slices of parameters (ranges
of their elements) that are copied and updated together.

A bucket's state is copied into the buffer, updated, and copied back on the same stream, so no event is needed between
these three operations. There are several stages, so that one can copy to the device while another copies to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow.device import Device, Stream
from twinflow.planner.simulate import NUM_STAGES


class Stage:
    """A stream and its device buffer."""

    def __init__(self, device: Device, number: int) -> None:
        self._device = device
        self._name = f"streamed{number}"
        self._raw: Tensor | None = None

    @property
    def stream(self) -> Stream:
        return self._device.stream(self._name)

    def buffer(self, nbytes: int, where: torch.device) -> Tensor:
        """The first `nbytes` of the buffer, which grows if necessary."""
        if self._raw is None or self._raw.numel() < nbytes:
            self._raw = self.stream.zeros(nbytes, torch.uint8, where)
        return self._raw[:nbytes]


class Stages:
    """All stages. `next` returns them in turn."""

    def __init__(self, device: Device) -> None:
        self._stages = [Stage(device, number) for number in range(NUM_STAGES)]

    def next(self) -> Stage:
        """The stage whose last use is the oldest."""
        stage = self._stages.pop(0)
        self._stages.append(stage)
        return stage
