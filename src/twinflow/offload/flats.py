# SPDX-License-Identifier: Apache-2.0
"""Device buffers in which gradients are gathered before they are copied to the host or used by an update on the device.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

Several threads take and return buffers: autograd's, the user's, the reducer and `LateUpdates`. The pool has no lock of
its own, so callers of `take` and `give` hold the lock `Executor.changed`. A stream may still read a buffer that was
returned. The event of the buffer marks the end of this read. The stream that writes to the buffer next waits for the
event (`FLAT_FREE`).
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from twinflow.device import Event, Stream
from twinflow.offload.plan import BucketPlan


class FlatPool:
    """Flat device buffers for gradients, up to `max_bytes` in total (`take` has two exceptions).

    Buckets with equal `plan.layout` (dtype, offsets and sizes of slices) share buffers, so the padding stays zero.
    """

    def __init__(self, device: torch.device, max_bytes: int, idle_bytes: int = 0) -> None:
        """`idle_bytes`: `shrink` frees buffers while all of them, with those in use, take more than this."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._idle_bytes = idle_bytes
        self._device = device
        self._free: dict[object, deque[tuple[Tensor, Event | None]]] = {}

    def set_limit(self, max_bytes: int) -> None:
        """Change the limit. Call it between steps."""
        self.max_bytes = max_bytes

    def take(
        self, plan: BucketPlan, may_grow: bool = False, stream: Stream | None = None
    ) -> tuple[Tensor, Event | None] | None:
        """Return a buffer and the event at which its last use ends, or None if all are in use and the limit is reached.

        `may_grow`: allocate beyond the limit, as is done for the first buffer. `stream`: the stream that will write to
        the buffer; None means the calling thread's current stream.
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

    def shrink(self) -> None:
        """Free buffers whose last use has ended, while all buffers take more than `idle_bytes`.

        Their memory goes back to torch's allocator. If it was allocated on the model's stream, activations and the
        buffers of the next step use it without a call of the driver. With several ranks it was allocated on the stream
        "reduce", and activations get it only when an allocation fails and torch frees its cache. No stream uses a
        buffer after its event, and the copies into it came before, so the next user of the memory has to wait for
        nothing. A buffer whose event has not passed stays, because the caller would wait.
        """
        for free in self._free.values():
            while free and self.num_bytes > self._idle_bytes and ((event := free[0][1]) is None or event.done()):
                tensor, _ = free.popleft()
                self.num_bytes -= tensor.numel() * tensor.element_size()

    def _forget_free(self) -> None:
        for free in self._free.values():
            while free:
                tensor, event = free.pop()
                if event is not None:
                    event.synchronize()  # one of our streams may still read the buffer
                self.num_bytes -= tensor.numel() * tensor.element_size()

    def give(self, plan: BucketPlan, flat: Tensor, read_until: Event | None) -> None:
        """Return a buffer to the pool. The stream that writes to it next must wait for the event `read_until`."""
        self._free.setdefault(plan.layout, deque()).append((flat, read_until))
