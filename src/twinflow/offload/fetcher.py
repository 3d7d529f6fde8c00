"""The thread that brings parked weights to the device: one queue, one stream, one order, that of the blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from twinflow.device import Device, Event
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket
from twinflow.offload.sync import FETCH_ROOM
from twinflow.offload.threads import BoardThread


class Gather(Protocol):
    """Ranks that have parts of the same weights."""

    world: int
    rank: int

    def all_gather(self, whole: Tensor) -> None:
        """Every rank's part, in place: this rank's is there."""
        ...


@dataclass(eq=False)
class Parcel:
    """Weights that travel together."""

    host: Callable[[], Tensor]  # where they live: all of them, or this rank's part
    flat: Tensor  # their memory on the device, while they have any
    views: list[tuple[nn.Parameter, Tensor]]  # each parameter in it
    bucket: Bucket | None  # whose state they are; None where nothing updates them


@dataclass(eq=False)
class Fetch:
    """One block's weights on their way."""

    parcels: Sequence[Parcel]
    after: Event  # the memory they go to is free
    event: Event | None = None  # when they are there, once that is queued


class Fetcher(BoardThread):
    """Copies a block's weights as soon as its update is in the state. All ranks ask in the same order."""

    def __init__(self, board: Board, device: Device, gather: Gather | None) -> None:
        self._device, self._gather = device, gather
        self._queue: deque[Fetch] = deque()
        self.fetched_bytes = 0
        super().__init__(board, "fetcher")

    def ask(self, parcels: Sequence[Parcel], after: Event) -> Fetch:
        """A fetch that will begin by itself."""
        fetch = Fetch(parcels, after)
        with self.board.changed:
            self._queue.append(fetch)
            self.board.changed.notify_all()
        return fetch

    def _turn(self) -> None:
        board = self.board
        with board.changed:
            fetch = self._queue[0] if self._queue else None
            buckets = [p.bucket for p in fetch.parcels if p.bucket is not None] if fetch is not None else []
            if fetch is None or any(bucket.shown < bucket.due for bucket in buckets):
                self._sleep(has_events=False)
                return
        event = self._copy(fetch)
        with board.changed:
            for bucket in buckets:
                bucket.sent_event = event  # the state must not change before it has been read
            fetch.event = event
            self._queue.popleft()
            board.changed.notify_all()

    def _copy(self, fetch: Fetch) -> Event:
        stream = self._device.stream("fetch")
        stream.wait(fetch.after, FETCH_ROOM)
        for parcel in fetch.parcels:
            index = parcel.bucket.plan.index if parcel.bucket is not None else -1
            stream.run(self._work(parcel), span="fetch", bucket=index)
            host = parcel.host()
            self.fetched_bytes += host.numel() * host.element_size()
        return stream.record()

    def _work(self, parcel: Parcel) -> Callable[[], None]:
        host, gather = parcel.host(), self._gather
        start = host.numel() * (gather.rank if gather is not None else 0)
        part = parcel.flat[start : start + host.numel()]

        def work() -> None:
            part.copy_(host, non_blocking=True)
            if gather is not None:
                gather.all_gather(parcel.flat)

        return work
