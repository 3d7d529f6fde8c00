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
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket
from twinflow.offload.weight_guard import plain


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
    """Made when nothing is under way (`Runtime.wait`, `wait_for_copies`). `begin` puts it on the board."""

    def __init__(self, board: Board, device: Device, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.peak_bytes = 0  # of copies
        self._board, self._device = board, device
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
        with self._board.changed:
            assert self._board.frozen is None
            self._board.frozen = self
        self._copier.start()

    def end(self) -> None:
        """Nobody will read any more."""
        with self._board.changed:
            self._is_over = True
            self._unread.clear()
            self._board.frozen = None
            self._board.changed.notify_all()
        self._copier.join()

    def allows(self, bucket: Bucket) -> bool:
        """Whether a bucket may be updated; if not, that is asked for. Called with the board's lock held."""
        index = bucket.plan.index
        if not self._unread.get(index):
            return True
        if index not in self._wanted:
            self._wanted.append(index)
            self._board.changed.notify_all()
        return False

    # The reader's thread.

    def _read(self, reading: _Reading) -> Tensor:
        with self._board.changed:
            while reading.is_taken and not reading.is_safe:  # being copied just now
                self._board.changed.wait(1.0)
            if reading.copy is not None:
                copy, reading.copy = reading.copy, None
                self.num_bytes -= reading.nbytes
                self._board.changed.notify_all()
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
            with self._board.changed:
                if reading is not None:
                    reading.is_taken = False  # the reader, which may be waiting for this copy, reads it itself
                self._board.error = self._board.error or error
                self._board.changed.notify_all()

    def _next(self) -> _Reading | None:
        """What to copy next; None when all is over."""
        with self._board.changed:
            while not self._is_over:
                for index in self._wanted:
                    for reading in self._unread.get(index, ()):
                        if not reading.is_taken and self.num_bytes + reading.nbytes <= self.max_bytes:
                            reading.is_taken = True
                            self.num_bytes += reading.nbytes
                            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
                            return reading
                self._board.changed.wait(1.0)
        return None

    def _value(self, reading: _Reading) -> Tensor:
        # Weights are read as they are: whoever waited for their update would wait for this very reading.
        with self._device.beside("save"), torch.no_grad(), plain():
            value = reading.read()
            return value.clone() if value.device.type == "cpu" else value.cpu()

    def _make_safe(self, reading: _Reading) -> None:
        with self._board.changed:
            reading.is_safe = True
            for index in reading.buckets:
                if reading in self._unread.get(index, ()):
                    self._unread[index].remove(reading)
                if not self._unread.get(index) and index in self._wanted:
                    self._wanted.remove(index)
            self._board.changed.notify_all()
