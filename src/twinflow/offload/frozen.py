"""Frozen state: a background checkpoint saves the state of one moment while training continues.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

A frozen bucket is not updated until the checkpoint has read all of its state, or until the state was copied. An update
that finds its bucket frozen asks for such a copy. Copies use at most `max_bytes` of host memory. If the limit is
reached, the update waits until the checkpoint has read the state. Training is then as slow as the disk, but does not
run out of memory.

There are two threads: the reader, which writes the checkpoint, and the copier ("twinflow-copier"). Each tensor that the
checkpoint reads (`_Reading`) is read or copied by one of the two threads, which marks it under the lock
`Executor.changed`. A bucket is released when all of its readings are read or copied (`_make_safe`). Updates on the
device call `wait_until_read`. The copier learns from the native executor which updates on the host wait
(`next_wanted`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import Device
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.weight_guard import plain

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

    def wait_until_over(self) -> None:
        """Blocks until no background checkpoint reads the state any more."""
        with self.executor.changed:
            while self.current is not None:
                self.executor.check()
                self.executor.changed.wait(1.0)


@dataclass(eq=False)
class _Reading:
    """A tensor that the checkpoint reads once."""

    read: Callable[[], Tensor]
    buckets: frozenset[int]  # indices of the buckets that it depends on
    nbytes: int
    is_taken: bool = False  # a thread reads or copies the tensor now, or has done so
    copy: Tensor | None = None
    is_safe: bool = False  # it has been read or copied, so updates may change the state


class Frozen:
    """The state of one moment. Create it after `Runtime.wait` and `wait_for_copies`. `begin` freezes the buckets."""

    def __init__(self, state: FrozenState, device: Device, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # bytes of copies that exist now
        self.peak_bytes = 0
        self._state = state
        self._executor = state.executor
        self._changed = state.executor.changed
        self._device = device
        self._unread: dict[int, list[_Reading]] = {}  # by bucket: readings that are neither read nor copied yet
        self._wanted: list[int] = []  # buckets whose updates wait for copies
        self._is_over = False
        self._copier = threading.Thread(target=self._copy_wanted, name="twinflow-copier", daemon=True)

    def add(self, read: Callable[[], Tensor], buckets: Iterable[int], nbytes: int) -> Callable[[], Tensor]:
        """Registers `read`, which returns a tensor of the state.

        Returns a function that may be called once, later. It returns the value that the tensor has now.
        """
        reading = _Reading(read, frozenset(buckets), nbytes)
        for index in reading.buckets:
            self._unread.setdefault(index, []).append(reading)
        return lambda: self._read(reading)

    def begin(self) -> None:
        """Freezes the buckets and starts the copier."""
        with self._changed:
            assert self._state.current is None
            self._state.current = self
            for index in self._unread:
                self._executor.freeze(index, True)
        self._copier.start()

    def end(self) -> None:
        """Releases all buckets and ends the copier. The functions that `add` has returned must not be called later."""
        with self._changed:
            self._is_over = True
            for index in self._unread:
                self._executor.freeze(index, False)
            self._unread.clear()
            self._state.current = None
            self._changed.notify_all()
        self._copier.join()

    def wait_until_read(self, bucket: Bucket) -> None:
        """Asks for copies of the unread state of a bucket and blocks until this state is read or copied."""
        index = bucket.plan.index
        with self._changed:
            while self._unread.get(index):
                if index not in self._wanted:
                    self._wanted.append(index)
                self._executor.check()
                self._changed.wait(1.0)

    # The reader's thread.

    def _read(self, reading: _Reading) -> Tensor:
        with self._changed:
            while reading.is_taken and not reading.is_safe:  # the copier copies it now
                self._changed.wait(1.0)
            if reading.copy is not None:
                copy, reading.copy = reading.copy, None
                self.num_bytes -= reading.nbytes
                self._changed.notify_all()
                return copy
            reading.is_taken = True
        value = self._value(reading)
        self._make_safe(reading)
        return value

    # The copier's thread.

    def _copy_wanted(self) -> None:
        reading: _Reading | None = None
        try:
            while (reading := self._next()) is not None:
                reading.copy = self._value(reading)
                self._make_safe(reading)
        except BaseException as error:
            with self._changed:
                if reading is not None:
                    reading.is_taken = False  # if the reader waits for this copy, it now reads the value itself
                self._changed.notify_all()
            self._executor.fail(error)

    def _next(self) -> _Reading | None:
        """The next reading to copy, for a bucket whose update waits; None after `end`."""
        while not self._is_over:
            index = self._executor.next_wanted(_LOOK_S)
            with self._changed:
                if index >= 0 and index not in self._wanted:
                    self._wanted.append(index)
                for wanted in self._wanted:
                    for reading in self._unread.get(wanted, ()):
                        if not reading.is_taken and self.num_bytes + reading.nbytes <= self.max_bytes:
                            reading.is_taken = True
                            self.num_bytes += reading.nbytes
                            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
                            return reading
                if self._wanted:
                    self._changed.wait(_LOOK_S)  # until the reader has freed copies
        return None

    def _value(self, reading: _Reading) -> Tensor:
        # With `plain`, reading a weight does not wait for its update. That update waits for this reading.
        with self._device.beside("save"), torch.no_grad(), plain():
            value = reading.read()
            if value.device.type != "cpu":
                return value.cpu()
            # On huge pages, because an update waits for this copy, and most of the time of a copy to new small pages is
            # spent in page faults.
            return native.advise_huge(torch.empty(value.shape, dtype=value.dtype)).copy_(value)

    def _make_safe(self, reading: _Reading) -> None:
        with self._changed:
            reading.is_safe = True
            for index in reading.buckets:
                if reading in self._unread.get(index, ()):
                    self._unread[index].remove(reading)
                if not self._unread.get(index):
                    self._executor.freeze(index, False)
                    if index in self._wanted:
                        self._wanted.remove(index)
            self._changed.notify_all()
