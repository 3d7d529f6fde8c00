# SPDX-License-Identifier: Apache-2.0
"""Copies weights from the host to the device ("fetches"), for `offload_param`. Fetches use one queue and one stream.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. The thread that
runs the model asks for fetches, in the order of the blocks. There are two implementations:

- `NativeFetcher` is used if ranks do not share the weights. The executor's native thread copies the weights of a block
  as soon as the update of the block has changed them.
- `SharedFetcher` is used if ranks share the weights. The thread "twinflow-fetcher" waits for the update, queues the
  copy of this rank's part and the all-gather, and then sets `SharedFetch.event` under the lock `Executor.changed`.

In both cases the model's stream waits for the event of the fetch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from twinflow.device import Device, Event
from twinflow.offload.executor import Executor
from twinflow.offload.sync import FETCH_ROOM, FETCH_STORED
from twinflow.offload.weight_buffers import WeightBuffer


class Gather(Protocol):
    """The group of ranks that share the weights."""

    world: int
    rank: int

    def all_gather(self, whole: Tensor) -> None:
        """Gathers the parts of all ranks in place. `whole` contains this rank's part already."""
        ...


class Fetch(Protocol):
    """A fetch of one block's weights that `ask` of a fetcher has queued."""

    def wait(self) -> Event:
        """Blocks until the copy is queued. Returns the event that is recorded after the copy."""
        ...


class NativeFetch:
    """A fetch by the native executor."""

    def __init__(self, executor: Executor, handle: int, buffers: Sequence[WeightBuffer]) -> None:
        self._executor = executor
        self._handle = handle
        self._buffers = buffers  # holds references until the copy is queued
        self._event: Event | None = None

    def wait(self) -> Event:
        if self._event is None:
            self._event = self._executor.wait_for_fetch(self._handle)
        return self._event


class NativeFetcher:
    """Fetches by the native executor, if ranks do not share the weights."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def fetched_bytes(self) -> int:
        """Bytes that were fetched so far."""
        return int(self._executor.counters.bytes_fetched)

    def ask(self, buffers: Sequence[WeightBuffer], after: Event) -> NativeFetch:
        """Queues a fetch. The copy starts after the event `after`, from which on the device buffers are free."""
        items = [(buffer.bucket, buffer.host, buffer.flat) for buffer in buffers]
        return NativeFetch(self._executor, self._executor.fetch(items, after), buffers)


@dataclass(eq=False)
class SharedFetch:
    """Weights that the thread of `SharedFetcher` gathers from all ranks. `event` is set when that is queued."""

    buffers: Sequence[WeightBuffer]
    after: Event
    executor: Executor
    event: Event | None = None

    def wait(self) -> Event:
        with self.executor.changed:
            while self.event is None:
                self.executor.check()
                self.executor.changed.wait(1.0)
            return self.event


class SharedFetcher:
    """Fetches of weights that ranks share. It has a Python thread, because the native executor cannot call collectives.

    All ranks ask for the same blocks in the same order.
    """

    def __init__(self, executor: Executor, device: Device, gather: Gather) -> None:
        self.fetched_bytes = 0
        self._executor = executor
        self._device = device
        self._gather = gather
        self._queue: queue.SimpleQueue[SharedFetch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="twinflow-fetcher", daemon=True)
        self._thread.start()

    def ask(self, buffers: Sequence[WeightBuffer], after: Event) -> SharedFetch:
        fetch = SharedFetch(buffers, after, self._executor)
        self._queue.put(fetch)
        return fetch

    def join(self) -> None:
        """Ends the thread. The executor must be closed."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        executor = self._executor
        try:
            while (fetch := self._queue.get()) is not None and not executor.is_closing:
                buckets = [buffer.bucket for buffer in fetch.buffers if buffer.bucket is not None]
                executor.wait_until_shown(buckets)
                event = self._copy(fetch)
                for bucket in buckets:
                    executor.note_sent(bucket, 0, event)  # so that no update changes the state before it is copied
                with executor.changed:
                    fetch.event = event
                    executor.changed.notify_all()
                del fetch
        except BaseException as error:
            if not executor.is_closing:
                executor.fail(error)

    def _copy(self, fetch: SharedFetch) -> Event:
        stream = self._device.stream("fetch")
        stream.wait(fetch.after, FETCH_ROOM)
        for buffer in fetch.buffers:
            index = buffer.bucket.plan.index if buffer.bucket is not None else -1
            part = self._part(buffer)
            if buffer.bucket is not None and buffer.bucket.is_on_device:
                stored = self._executor.weights_copied_event(buffer.bucket)
                if stored is not None:
                    stream.wait(stored, FETCH_STORED)
            with buffer.host.hold() as host:
                stream.run(partial(part.copy_, host, non_blocking=True), span="fetch", bucket=index)
                if buffer.is_on_disk:
                    stream.record().synchronize()  # another record will be read into this memory
            stream.run(partial(self._gather.all_gather, buffer.flat), span="fetch", bucket=index)
            self.fetched_bytes += part.numel() * part.element_size()
        return stream.record()

    def _part(self, buffer: WeightBuffer) -> Tensor:
        start = buffer.host.numel * self._gather.rank
        return buffer.flat[start : start + buffer.host.numel]
