# SPDX-License-Identifier: Apache-2.0
"""Stages for streamed state: each is a stream with one device buffer.

Streamed state is on the host and is copied to the device for each update. A bucket holds slices of parameters (ranges
of their elements) that are copied and updated together.

A bucket's state is copied into the buffer, updated, and copied back on the same stream, so no event is needed between
these three operations. There are several stages, so that one can copy to the device while another copies to the host.

If the weights of a bucket are in its streamed state, the bucket always has the same stage. The update kernel has a
table with the addresses of the weights, which then stay the same.
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
    """All stages. `next` returns them in turn, and `of` returns the stage of a bucket that always has the same."""

    def __init__(self, device: Device) -> None:
        self._stages = [Stage(device, number) for number in range(NUM_STAGES)]
        self._of: dict[int, Stage] = {}  # by index of the bucket

    def next(self) -> Stage:
        """The stage whose last use is the oldest."""
        stage = self._stages.pop(0)
        self._stages.append(stage)
        return stage

    def of(self, index: int) -> Stage:
        """The stage of the bucket with this index."""
        if index not in self._of:
            self._of[index] = self.next()
        return self._of[index]
