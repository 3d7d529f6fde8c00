# SPDX-License-Identifier: Apache-2.0
"""Inputs of checkpointed layers in a file on a disk, between forward and backward.

An input leaves the device as it does without a disk (offload.py): its copy to a page-locked buffer is queued on a
stream. A thread waits for this copy, writes the buffer to the file, and returns the buffer to the pool. Before
backward needs the input, a thread reads it into a buffer of the pool, and the copy to the device is queued.

Threads: the user's thread and autograd's thread call `write`, `make_room` and `read`, never at the same time. The
threads of `_workers` own the buffer of a transfer until its futures are done. The garbage collector may call `free` in
any thread, so `free` only appends to a deque.

The file has no name, so nothing is left of it when the process ends, whatever ends it. Its space is reserved before it
is written. A transfer is divided into parts, because one thread does not reach the rate of a fast disk.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from twinflow.device import Event
from twinflow.errors import not_enough, unusable_path

NUM_THREADS: Final = 4
PART_BYTES: Final = 64 << 20
NUM_WAITING: Final = 2  # inputs whose buffers wait for the disk at a time; more would take host memory


@dataclass(eq=False)
class Record:
    """One input in the file."""

    offset: int
    num_bytes: int
    parts: list[Future[None]] = field(default_factory=list)  # of the last transfer

    def wait(self) -> None:
        """Block until the last transfer is complete. Raises its error."""
        for part in self.parts:
            part.result()


class InputFile:
    """A file for the inputs of layers, in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="twinflow-inputs-", buffering=0)  # noqa: SIM115
        except OSError as error:
            expected = "a folder in which a file can be created"
            raise unusable_path("The disk for inputs of checkpointed layers", folder, expected, error) from error
        self.num_bytes = 0  # size of the file
        self._end = 0  # behind the last record
        self._num_live = 0  # records whose space is in use
        self._holes: dict[int, list[int]] = {}  # by size: offsets of space that can be used again
        self._freed: deque[tuple[Record, Callable[[], None]]] = deque()
        self._waiting: deque[Record] = deque()  # records that are written now
        self._workers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="twinflow-inputs")

    def write(self, buffer: Tensor, after: Event, done: Callable[[], None]) -> Record:
        """Starts to write the bytes of a flat buffer, after an event. A thread calls `done` when they are written."""
        record = self._place(buffer.numel())
        record.parts = self._transfer(record, buffer, after, os.pwrite, done)
        self._waiting.append(record)
        return record

    def make_room(self) -> None:
        """Blocks while too many buffers wait for the disk. Raises the error of a write that has failed."""
        self._collect()
        while len(self._waiting) > NUM_WAITING:
            self._waiting.popleft().wait()

    def read(self, record: Record, buffer: Tensor, after: Event) -> None:
        """Starts to read a record into a buffer, after an event. `Record.wait` waits for the end."""
        record.wait()  # it may still be written
        record.parts = self._transfer(record, buffer, after, _pread, lambda: None)

    def free(self, record: Record, done: Callable[[], None]) -> None:
        """The record is not needed any more. Its space can be used again when its last transfer has ended. A later call
        of this object then calls `done`.
        """
        self._freed.append((record, done))

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def _place(self, num_bytes: int) -> Record:
        """Space for a record: that of one that was freed, or at the end of the file."""
        self._collect()
        holes = self._holes.get(num_bytes)
        if holes:
            offset = holes.pop()
        else:
            offset, end = self._end, self._end + num_bytes
            if end > self.num_bytes:
                self._reserve(end)
            self._end = end
        self._num_live += 1
        return Record(offset, num_bytes)

    def _reserve(self, num_bytes: int) -> None:
        """Reserves space on the disk, so that no write fails for lack of it."""
        try:
            os.posix_fallocate(self._file.fileno(), self.num_bytes, num_bytes - self.num_bytes)
        except OSError as error:
            raise not_enough(
                f"space in {self.folder}",
                "the inputs of checkpointed layers",
                f"{num_bytes / 1e9:.1f} GB",
                f"{self.num_bytes / 1e9:.1f} GB ({error.strerror})",
                "Keep the inputs of more layers on the device or on the host, or use another disk.",
            ) from error
        self.num_bytes = num_bytes

    def _collect(self) -> None:
        """Takes back the space of records that were freed and whose transfers have ended."""
        for _ in range(len(self._freed)):
            record, done = self._freed.popleft()
            if all(part.done() for part in record.parts):
                self._holes.setdefault(record.num_bytes, []).append(record.offset)
                self._num_live -= 1
                done()
            else:
                self._freed.append((record, done))
        if not self._num_live:  # as between two steps: space of inputs of other sizes can be used too
            self._holes.clear()
            self._end = 0

    def _transfer(
        self,
        record: Record,
        buffer: Tensor,
        after: Event,
        move: Callable[[int, memoryview, int], int],
        done: Callable[[], None],
    ) -> list[Future[None]]:
        starts = range(0, record.num_bytes, PART_BYTES)
        num_left, lock = len(starts), threading.Lock()

        def run(start: int) -> None:
            nonlocal num_left
            try:
                after.synchronize()
                self._move(move, memoryview(buffer.numpy().data)[start : start + PART_BYTES], record.offset + start)
            finally:
                with lock:
                    num_left -= 1
                    is_last = num_left == 0
                if is_last:
                    done()

        return [self._workers.submit(run, start) for start in starts]

    def _move(self, move: Callable[[int, memoryview, int], int], memory: memoryview, offset: int) -> None:
        while memory:
            try:
                count = move(self._file.fileno(), memory, offset)
            except OSError as error:
                text = f"The inputs of checkpointed layers cannot be kept in {self.folder}: {error.strerror}."
                raise OSError(error.errno, f"{text} Use another disk.") from error
            if not count:
                raise OSError(f"The file for inputs of checkpointed layers in {self.folder} has lost its end.")
            memory = memory[count:]
            offset += count


def _pread(file: int, memory: memoryview, offset: int) -> int:
    return os.preadv(file, [memory], offset)
