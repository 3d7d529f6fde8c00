"""Page-locked buffers that buckets pass through, and device buffers that gradients are gathered in."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from twinflow.device import Device, Event, Stream
from twinflow.offload.plan import BucketPlan


class Slot:
    """One page-locked buffer, and its views as the buckets that pass through see it.

    Views are kept: the worker makes none while it works, for each would give another thread the interpreter.
    """

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw
        self._views: dict[object, Tensor] = {}
        self._pieces: dict[object, list[Tensor]] = {}

    def view(self, dtype: torch.dtype, numel: int) -> Tensor:
        """The first `numel` elements."""
        if (dtype, numel) not in self._views:
            self._views[dtype, numel] = self.raw.view(dtype)[:numel]
        return self._views[dtype, numel]

    def pieces(self, plan: BucketPlan) -> list[Tensor]:
        """Each slice of a bucket's weights."""
        if plan.layout not in self._pieces:
            whole = self.view(plan.dtype, plan.numel)
            self._pieces[plan.layout] = [whole.narrow(0, s.offset, s.numel) for s in plan.slices]
        return self._pieces[plan.layout]


class SlotPool:
    """Up to `limit` page-locked buffers of equal size, made when first needed, given out again when free.

    A slot that a stream still reads is given back with the event that ends the reading.
    """

    def __init__(self, device: Device, limit: int, slot_bytes: int, point: str) -> None:
        self.limit = limit
        self.num_made = 0
        self._device = device
        self.slot_bytes = slot_bytes
        self._point = point  # the sync point of waiting for a reader
        self._free: list[Slot] = []
        self._read: deque[tuple[Event, Slot]] = deque()

    def take(self, may_grow: bool = False) -> Slot | None:
        """A free slot; None where all are in use and no more may be made."""
        while self._read and (self._point in self._device.disabled or self._read[0][0].done()):
            self._free.append(self._read.popleft()[1])
        if self._free:
            return self._free.pop()
        if self.num_made >= self.limit and not may_grow:
            return None
        self.num_made += 1
        return Slot(self._device.pinned(self.slot_bytes, torch.uint8))

    def prepare(self, num_more: int) -> None:
        """Make some beyond the limit now, rather than when they are needed."""
        made = [self.take(may_grow=True) for _ in range(num_more)]
        self._free += [slot for slot in made if slot is not None]

    def give(self, slot: Slot, read_until: Event | None = None) -> None:
        """Hand a slot back; `read_until` is the event after which nobody reads it any more."""
        if read_until is None:
            self._free.append(slot)
        else:
            self._read.append((read_until, slot))

    def trim(self) -> None:
        """Give back what is free beyond the limit, which has become less."""
        while self._read and self._read[0][0].done():
            self._free.append(self._read.popleft()[1])
        while self._free and self.num_made > self.limit:
            self._device.release(self._free.pop().raw)
            self.num_made -= 1

    @property
    def unmade_bytes(self) -> int:
        """Bytes that are still to be made within the limit."""
        return max(0, self.limit - self.num_made) * self.slot_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of host memory made so far."""
        return self.num_made * self.slot_bytes


class FlatPool:
    """Device buffers for gradients on their way out, up to `max_bytes`. One too large for that gets one of its own.

    A buffer serves buckets of one layout: what lies between slices is zero, and stays so.
    """

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._device = device
        self._free: dict[object, deque[tuple[Tensor, Event | None]]] = {}

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
