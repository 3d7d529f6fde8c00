# SPDX-License-Identifier: Apache-2.0
"""Frozen state: a background checkpoint saves the state of one moment while training continues.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state.

While the checkpoint has not written the state of a bucket, an update on the host reads the old store and writes a
speculative store (speculative_stores.py). The old store then belongs to the checkpoint until its values are written, or
copied to a block of the writer. No state is copied. There are three cases in which such an update waits: no speculative
store is free, not all slices have a gradient, or the optimizer is the user's own. Updates on the device always wait,
and so does the copy of new weights into parameters that the checkpoint has not read. Whatever waits asks for copies of
the state or the parameters. Copies use at most `max_bytes` of host memory. If the limit is reached, it waits until the
checkpoint has written the values. Training is then as slow as the disk, but does not run out of memory.

There are two threads: the reader, which reads the tensors of the checkpoint, and the copier ("twinflow-copier"). Each
tensor that the checkpoint reads (`_Reading`) is read or copied by one of the two threads, which marks it under the lock
`Executor.changed`. The reader gets values on the host without a copy. They must not change until a thread "block" of
the writer (checkpoint/threads.py) calls `done`. When all readings of a bucket's state, or of its parameters, are
written or copied, this part is released (`_make_safe`). Updates on the device, and writes to the state that the user
has caused, call `wait_until_read`. Guarded weights (weight_guard.py) call `wait_until_weights_read`. The copier learns
from the native executor what waits on the host (`wanted`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.plan import HOST
from twinflow.offload.weight_guard import plain
from twinflow.rules.segment import Store
from twinflow.state_dict import Halves, Parts

_LOOK_S = 0.01  # interval in which the copier checks whether an update waits


class FrozenState:
    """The `Frozen` that a background checkpoint reads now, if there is one."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.current: Frozen | None = None

    def wait_until_read(self, bucket: Bucket) -> None:
        """Blocks until a bucket may be changed."""
        current = self.current
        if current is not None:
            current.wait_until_read(bucket)

    def wait_until_weights_read(self, buckets: Iterable[Bucket]) -> None:
        """Blocks until the parameters of these buckets may be changed. State on the host is in other memory."""
        current = self.current
        if current is not None:
            for bucket in buckets:
                if bucket.plan.place != HOST or current.reads_params(bucket):
                    current.wait_until_read(bucket)

    def wait_until_over(self) -> None:
        """Blocks until no background checkpoint reads the state any more."""
        with self.executor.changed:
            while self.current is not None:
                self.executor.check()
                self.executor.changed.wait(1.0)


@dataclass(eq=False)
class _Reading:
    """A tensor that the checkpoint reads once."""

    read: Callable[[], Tensor | Parts]
    buckets: frozenset[int]  # indices of the buckets that it depends on
    nbytes: int
    is_state: bool  # it is read from the stores of the buckets; otherwise from the parameters
    is_taken: bool = False  # a thread reads or copies the tensor now, or has done so
    copy: Tensor | Parts | None = None
    is_safe: bool = False  # it has been written or copied, so its source may change


class Costs(NamedTuple):
    """What a background checkpoint has cost until now."""

    num_aside: int  # updates that have left the old store to the checkpoint
    num_copies: int  # tensors that were copied for updates
    copied_bytes: int  # their bytes
    peak_bytes: int  # the largest number of bytes of copies at one time
    waited_s: float  # seconds in which something waited for the checkpoint and the limit of memory prevented copies


class Frozen:
    """The state of one moment. Create it after `Runtime.wait` and `wait_for_copies`. `begin` freezes the buckets."""

    def __init__(self, state: FrozenState, device: Device, stores: Mapping[int, Store], max_bytes: int) -> None:
        """`stores`: the present store of each bucket, by index of the bucket."""
        self.max_bytes = max_bytes
        self.num_bytes = 0  # bytes of copies that exist now
        self.peak_bytes = 0
        self._num_copies = 0
        self._copied_bytes = 0
        self._waited_s = 0.0
        self._state = state
        self._executor = state.executor
        self._num_aside = state.executor.counters.num_aside  # before this checkpoint
        self._changed = state.executor.changed
        self._device = device
        self._stores = stores
        self._unread: dict[int, list[_Reading]] = {}  # by bucket: readings that are neither written nor copied yet
        self._wanted: list[int] = []  # buckets whose updates on the device wait
        self._is_over = False
        self._copier = threading.Thread(target=self._copy_wanted, name="twinflow-copier", daemon=True)

    def add(
        self, read: Callable[[], Tensor | Parts], buckets: Iterable[int], nbytes: int, is_state: bool
    ) -> tuple[Callable[[], Tensor | Parts], Callable[[], None]]:
        """Registers `read`, which returns a tensor of the state of these buckets (`is_state`) or of their parameters.

        `read` must return the same tensor also after a bucket has got another store. Returns two functions for the
        reader. The first one may be called once, later: it returns the value that the tensor has now. The second one
        must be called, by any thread, when the value is not needed any more.
        """
        reading = _Reading(read, frozenset(buckets), nbytes, is_state)
        for index in reading.buckets:
            self._unread.setdefault(index, []).append(reading)
        return partial(self._read, reading), partial(self._make_safe, reading)

    def begin(self) -> None:
        """Freezes the buckets and starts the copier."""
        with self._changed:
            assert self._state.current is None
            self._state.current = self
            for index in self._unread:
                self._executor.freeze(index, *self._parts(index))
        self._copier.start()

    def end(self) -> None:
        """Releases all buckets and ends the copier. The functions that `add` has returned must not be called later."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        # If the checkpoint has failed, the copier may still read a store, which must not be used or unlocked before.
        self._copier.join()
        with self._changed:
            for index in self._unread:
                self._executor.freeze(index, False, False)
            self._unread.clear()
            self._state.current = None
            self._changed.notify_all()

    def wait_until_read(self, bucket: Bucket) -> None:
        """Asks for copies of the unread state of a bucket and blocks until this state is written or copied.

        Returns at once if the bucket has another store now.
        """
        index = bucket.plan.index
        with self._changed:
            while self._unread.get(index) and bucket.store is self._stores[index]:
                if index not in self._wanted:
                    self._wanted.append(index)
                self._executor.check()
                self._changed.wait(1.0)

    def reads_params(self, bucket: Bucket) -> bool:
        """Whether readings of a bucket's parameters are left."""
        with self._changed:
            return self._parts(bucket.plan.index)[1]

    def costs(self) -> Costs:
        num_aside = self._executor.counters.num_aside - self._num_aside
        return Costs(num_aside, self._num_copies, self._copied_bytes, self.peak_bytes, self._waited_s)

    def _parts(self, index: int) -> tuple[bool, bool]:
        """Whether readings of a bucket's state, and of its parameters, are left."""
        kinds = {reading.is_state for reading in self._unread.get(index, ())}
        return True in kinds, False in kinds

    # The reader's thread.

    def _read(self, reading: _Reading) -> Tensor | Parts:
        with self._changed:
            while reading.is_taken and not reading.is_safe:  # the copier copies it now
                self._changed.wait(1.0)
            if reading.copy is not None:
                copy, reading.copy = reading.copy, None
                self.num_bytes -= reading.nbytes
                self._changed.notify_all()
                return copy
            reading.is_taken = True
        value, is_copy = self._value(reading)
        if is_copy:
            self._make_safe(reading)
        return value

    # The copier's thread.

    def _copy_wanted(self) -> None:
        reading: _Reading | None = None
        try:
            while (reading := self._next()) is not None:
                value, is_copy = self._value(reading)
                if not is_copy:
                    value = _copied(value)
                reading.copy = value
                self._make_safe(reading)
        except BaseException as error:
            with self._changed:
                if reading is not None:
                    reading.is_taken = False  # if the reader waits for this copy, it now reads the value itself
                self._changed.notify_all()
            self._executor.fail(error)

    def _next(self) -> _Reading | None:
        """The next reading to copy, for a bucket that something waits for; None after `end`."""
        while not self._is_over:
            wanted = self._executor.wanted(_LOOK_S)
            with self._changed:
                left: list[_Reading] = []
                for index in (*wanted, *self._wanted):
                    readings = self._unread.get(index, [])
                    # Parameters first. Then an update may need no copy of the state.
                    left += [reading for reading in readings if not reading.is_state] or readings
                for reading in left:
                    if not reading.is_taken and self.num_bytes + reading.nbytes <= self.max_bytes:
                        reading.is_taken = True
                        self.num_bytes += reading.nbytes
                        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
                        self._num_copies += 1
                        self._copied_bytes += reading.nbytes
                        return reading
                if left:
                    self._waited_s += _LOOK_S
                    self._changed.wait(_LOOK_S)  # until the reader has freed copies
        return None

    def _value(self, reading: _Reading) -> tuple[Tensor | Parts, bool]:
        """The values on the host, and whether they are a copy of values on the device."""
        # With `plain`, reading a weight does not wait for its update. That update waits for this reading.
        with self._device.beside("save"), torch.no_grad(), plain():
            value = reading.read()
            if isinstance(value, Parts):
                tensors = [part for part in value.parts if isinstance(part, Tensor)]
                is_copy = len(tensors) == len(value.parts) and all(one.device.type != "cpu" for one in tensors)
                parts = tuple(part.cpu() if isinstance(part, Tensor) else part for part in value.parts)
                return Parts(parts), is_copy
            return value.cpu(), value.device.type != "cpu"

    def _make_safe(self, reading: _Reading) -> None:
        with self._changed:
            if reading.is_safe or self._is_over:
                return
            reading.is_safe = True
            for index in reading.buckets:
                before = self._parts(index)
                self._unread[index].remove(reading)
                if self._parts(index) != before:
                    self._executor.freeze(index, *self._parts(index))
                if not self._unread[index] and index in self._wanted:
                    self._wanted.remove(index)
            self._changed.notify_all()


def _copied(value: Tensor | Parts) -> Tensor | Parts:
    if isinstance(value, Parts):
        parts = (Halves(*map(_copy, part)) if isinstance(part, Halves) else _copy(part) for part in value.parts)
        return Parts(tuple(parts))
    return _copy(value)


def _copy(tensor: Tensor) -> Tensor:
    """A copy on huge pages. An update waits for it, and most of the time of a copy to new small pages is spent in page
    faults.
    """
    return native.advise_huge(torch.empty(tensor.shape, dtype=tensor.dtype)).copy_(tensor)
