"""State as it was at one moment, while training goes on: what a checkpoint in the background reads.

A frozen bucket is not updated until everything that is to be read of it has been read, or copied aside. An update that
finds its bucket frozen asks for copies; these take host memory, of which there is a limit. Beyond it the update waits
for the reader: training is then as slow as the disk, and never out of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from twinflow.device import Device
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.weight_guard import plain

_LOOK_S = 0.01  # how often the copier looks whether an update waits


class FrozenState:
    """What somebody still reads of an executor's state as it was; nothing, most of the time."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.current: Frozen | None = None

    def wait_until_read(self, bucket: Bucket) -> None:
        """Block until a bucket may be changed."""
        current = self.current
        if current is not None:
            current.wait_until_read(bucket)

    def wait_until_over(self) -> None:
        """Block until nobody reads any more."""
        with self.executor.changed:
            while self.current is not None:
                self.executor.check()
                self.executor.changed.wait(1.0)


@dataclass(eq=False)
class _Reading:
    """Something to be read once."""

    read: Callable[[], Tensor]
    buckets: frozenset[int]  # that it depends on
    nbytes: int
    is_taken: bool = False  # a thread reads or copies it now, or has
    copy: Tensor | None = None
    is_safe: bool = False  # read, or copied: no update can change it any more


class Frozen:
    """Made when nothing is under way (`Runtime.wait`, `wait_for_copies`). `begin` makes updates keep away."""

    def __init__(self, state: FrozenState, device: Device, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of copies
        self.peak_bytes = 0
        self._state = state
        self._executor = state.executor
        self._changed = state.executor.changed
        self._device = device
        self._unread: dict[int, list[_Reading]] = {}  # by bucket
        self._wanted: list[int] = []  # buckets whose updates wait
        self._is_over = False
        self._copier = threading.Thread(target=self._copy_wanted, name="twinflow-copier", daemon=True)

    def add(self, read: Callable[[], Tensor], buckets: Iterable[int], nbytes: int) -> Callable[[], Tensor]:
        """What to call in the place of `read`, once, at any time: the value as it is now, in memory of its own."""
        reading = _Reading(read, frozenset(buckets), nbytes)
        for index in reading.buckets:
            self._unread.setdefault(index, []).append(reading)
        return lambda: self._read(reading)

    def begin(self) -> None:
        """From now on updates keep away."""
        with self._changed:
            assert self._state.current is None
            self._state.current = self
            for index in self._unread:
                self._executor.freeze(index, True)
        self._copier.start()

    def end(self) -> None:
        """Nobody will read any more."""
        with self._changed:
            self._is_over = True
            for index in self._unread:
                self._executor.freeze(index, False)
            self._unread.clear()
            self._state.current = None
            self._changed.notify_all()
        self._copier.join()

    def wait_until_read(self, bucket: Bucket) -> None:
        """Ask for copies of all that is still to be read of a bucket, and block until there are."""
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
            while reading.is_taken and not reading.is_safe:  # being copied just now
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

    # The copier's.

    def _copy_wanted(self) -> None:
        reading: _Reading | None = None
        try:
            while (reading := self._next()) is not None:
                reading.copy = self._value(reading)
                self._make_safe(reading)
        except BaseException as error:
            with self._changed:
                if reading is not None:
                    reading.is_taken = False  # the reader, which may be waiting for this copy, reads it itself
                self._changed.notify_all()
            self._executor.fail(error)

    def _next(self) -> _Reading | None:
        """What to copy next; None when all is over."""
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
                    self._changed.wait(_LOOK_S)  # for memory
        return None

    def _value(self, reading: _Reading) -> Tensor:
        # Weights are read as they are: whoever waited for their update would wait for this very reading.
        with self._device.beside("save"), torch.no_grad(), plain():
            value = reading.read()
            return value.clone() if value.device.type == "cpu" else value.cpu()

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
