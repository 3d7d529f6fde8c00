"""Device buffers that gradients are gathered in, on their way to the host or to an update on the device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from twinflow.device import Event, Stream
from twinflow.offload.plan import BucketPlan


class FlatPool:
    """Device buffers for gradients on their way out, up to `max_bytes`. One too large for that gets one of its own.

    A buffer serves buckets of one layout: what lies between slices is zero, and stays so.
    """

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._device = device
        self._free: dict[object, deque[tuple[Tensor, Event | None]]] = {}

    def set_limit(self, max_bytes: int) -> None:
        """Another limit, between steps."""
        self.max_bytes = max_bytes

    def take(
        self, plan: BucketPlan, may_grow: bool = False, stream: Stream | None = None
    ) -> tuple[Tensor, Event | None] | None:
        """A buffer and the event its last copy ends with; None where all are in use and no more may be made.

        It will be written on `stream`, or on the calling thread's current one.
        """
        free = self._free.setdefault(plan.layout, deque())
        if free:
            return free.popleft()
        nbytes = plan.numel * plan.dtype.itemsize
        if self.num_bytes + nbytes > self.max_bytes:
            self._forget_free()
            if self.num_bytes and self.num_bytes + nbytes > self.max_bytes and not may_grow:
                return None
        self.num_bytes += nbytes
        if stream is not None:
            return stream.zeros(plan.numel, plan.dtype, self._device), None
        return torch.zeros(plan.numel, dtype=plan.dtype, device=self._device), None

    def _forget_free(self) -> None:
        """Make room: drop free buffers of all layouts."""
        for free in self._free.values():
            while free:
                tensor, event = free.pop()
                if event is not None:
                    event.synchronize()  # a stream of ours may still read it
                self.num_bytes -= tensor.numel() * tensor.element_size()

    def give(self, plan: BucketPlan, flat: Tensor, read_until: Event | None) -> None:
        """Hand a buffer back; whoever takes it next has to wait for the event."""
        self._free.setdefault(plan.layout, deque()).append((flat, read_until))
