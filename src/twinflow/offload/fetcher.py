"""Weights that live on the host, on their way to the device: one queue, one stream, one order, that of the blocks.

Alone, a process asks the executor, whose native thread copies a block's weights as soon as its update is in the state.
Where ranks share the weights, a thread copies this rank's part and the ranks gather the rest.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from twinflow.device import Device, Event
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.sync import FETCH_ROOM


class Gather(Protocol):
    """Ranks that have parts of the same weights."""

    world: int
    rank: int

    def all_gather(self, whole: Tensor) -> None:
        """Every rank's part, in place: this rank's is there."""
        ...


@dataclass(eq=False)
class WeightBuffer:
    """Weights that travel together."""

    host: Callable[[], Tensor]  # where they live: all of them, or this rank's part
    flat: Tensor  # their memory on the device, while they have any
    views: list[tuple[nn.Parameter, Tensor]]  # each parameter in it
    bucket: Bucket | None  # whose state they are; None where nothing updates them


class Fetch(Protocol):
    """One block's weights on their way."""

    def wait(self) -> Event:
        """Block until the copy is queued; when it will be there."""
        ...


class Fetcher(Protocol):
    """Brings blocks' weights to the device, in the order in which they are asked for."""

    def ask(self, buffers: Sequence[WeightBuffer], after: Event) -> Fetch:
        """A fetch that will begin by itself, when the memory that it goes to is free."""
        ...


class NativeFetch:
    """A fetch of the executor's."""

    def __init__(self, executor: Executor, handle: int, buffers: Sequence[WeightBuffer]) -> None:
        self._executor = executor
        self._handle = handle
        self._buffers = buffers  # kept until the copy is queued
        self._event: Event | None = None

    def wait(self) -> Event:
        """The executor copies in the order of the fetches."""
        if self._event is None:
            self._event = self._executor.wait_for_fetch(self._handle)
        return self._event


class NativeFetcher:
    """For one process alone."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def fetched_bytes(self) -> int:
        """So far."""
        return int(self._executor.counters.bytes_fetched)

    def ask(self, buffers: Sequence[WeightBuffer], after: Event) -> NativeFetch:
        """One call for all buffers."""
        items = [(buffer.bucket, buffer.host(), buffer.flat) for buffer in buffers]
        return NativeFetch(self._executor, self._executor.fetch(items, after), buffers)


@dataclass(eq=False)
class SharedFetch:
    """One block's weights, of all ranks."""

    buffers: Sequence[WeightBuffer]
    after: Event
    executor: Executor
    event: Event | None = None

    def wait(self) -> Event:
        """The thread below sets the event."""
        with self.executor.changed:
            while self.event is None:
                self.executor.check()
                self.executor.changed.wait(1.0)
            return self.event


class SharedFetcher:
    """For ranks that have parts: a thread, since Python calls collectives. All ranks ask in the same order."""

    def __init__(self, executor: Executor, device: Device, gather: Gather) -> None:
        self.fetched_bytes = 0
        self._executor = executor
        self._device = device
        self._gather = gather
        self._queue: queue.SimpleQueue[SharedFetch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="twinflow-fetcher", daemon=True)
        self._thread.start()

    def ask(self, buffers: Sequence[WeightBuffer], after: Event) -> SharedFetch:
        """In the order of the blocks."""
        fetch = SharedFetch(buffers, after, self._executor)
        self._queue.put(fetch)
        return fetch

    def join(self) -> None:
        """End the thread, after the executor was closed."""
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
                    executor.note_sent(bucket, 0, event)  # the state must not change before it has been read
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
            stream.run(self._work(buffer), span="fetch", bucket=index)
            host = buffer.host()
            self.fetched_bytes += host.numel() * host.element_size()
        return stream.record()

    def _work(self, buffer: WeightBuffer) -> Callable[[], None]:
        host, gather = buffer.host(), self._gather
        start = host.numel() * gather.rank
        part = buffer.flat[start : start + host.numel()]

        def work() -> None:
            part.copy_(host, non_blocking=True)
            gather.all_gather(buffer.flat)

        return work
