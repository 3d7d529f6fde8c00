"""New weights to all ranks: a thread, one stream and one order, that of the forward.

All-gathers that two ranks call in different orders mix up layers without an error. So one thread calls them all, step
by step and in the order in which the next forward needs the weights, for the buckets that all ranks know to have
changed.
This rank's part is in its parameters by then; it is packed, gathered, and the others' parts are put into theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinflow.device import Device
from twinflow.dist.group import Group
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket, Job, target
from twinflow.offload.sync import PUBLISH_READY
from twinflow.offload.threads import BoardThread
from twinflow.offload.weight_guard import plain
from twinflow.zero.compression import Exchanges


@dataclass(eq=False)
class Edition:
    """What one step changes, and what it leaves as it is."""

    job: Job
    changed: deque[Bucket]  # still to be published
    same: list[Bucket]


@dataclass(frozen=True)
class Copies:
    """Where the pieces of a bucket are in its parameters and in the buffer; for parameters at these addresses."""

    addresses: list[int]
    flat: Tensor  # the buffer, as large as the whole
    own: list[Tensor]
    own_flat: list[Tensor]
    others: list[Tensor]
    others_flat: list[Tensor]


class Publisher(BoardThread):
    """Gathers what other ranks have updated; without a group, every rank has updated everything."""

    def __init__(
        self,
        device: Device,
        board: Board,
        buckets: Sequence[Bucket],
        group: Group | None,
        where: torch.device,
        exchanges: Callable[[], Exchanges | None] = lambda: None,
    ) -> None:
        self._exchanges = exchanges  # once weights are published in few bits
        self._device, self._group = device, group
        self._buckets = {bucket.plan.index: bucket for bucket in buckets}
        self._editions: deque[Edition] = deque()
        self._kept: dict[int, Copies] = {}
        nbytes = max((b.gathered.numel * b.plan.dtype.itemsize for b in buckets if not b.is_parked), default=0)
        # One for all: the stream takes turns.
        self._raw = torch.empty(nbytes if group is not None else 0, dtype=torch.uint8, device=where)
        super().__init__(board, "publisher")

    def expect(self, job: Job, changed: Sequence[int]) -> None:
        """These buckets, in this order, will be sent by this job on all ranks."""
        same = [bucket for index, bucket in self._buckets.items() if index not in set(changed)]
        with self.board.changed:
            self._editions.append(Edition(job, deque(self._buckets[index] for index in changed), same))
            self.board.changed.notify_all()

    def forget(self) -> None:
        """What was expected will not come."""
        with self.board.changed:
            self._editions.clear()

    # The thread.

    def _turn(self) -> None:
        board = self.board
        with board.changed:
            edition = self._editions[0] if self._editions else None
            if edition is None:
                self._sleep(has_events=False)
                return
            decision = edition.job.gate.decision
            if decision is not None and decision.skip:
                edition.same += edition.changed
                edition.changed.clear()
            for bucket in edition.same:
                bucket.published = edition.job.number
            edition.same.clear()
            if not edition.changed:
                self._editions.popleft()
                board.changed.notify_all()
                return
            bucket = edition.changed[0]
            if bucket.sent < edition.job.number:
                self._sleep(has_events=False)
                return
        self._publish(bucket, edition.job)
        with board.changed:
            bucket.published = edition.job.number
            edition.changed.popleft()
            board.changed.notify_all()

    def _publish(self, bucket: Bucket, job: Job) -> None:
        """Queue the exchange of a bucket whose own part is on its way into the parameters."""
        group = self._group
        if bucket.is_parked:
            return  # blocks gather its weights when they run
        if group is None:
            bucket.published_event = bucket.sent_event
            return
        with plain():  # weights are guarded until this very exchange is over
            copies = self._copies(bucket, group)
        stream, exchanges = self._device.stream("publish"), self._exchanges()
        if bucket.sent_event is not None:
            stream.wait(bucket.sent_event, PUBLISH_READY)

        def exchange() -> None:
            if copies.own:
                torch._foreach_copy_(copies.own_flat, copies.own)
            if exchanges is None:
                group.all_gather(copies.flat)
            else:
                if copies.others:
                    torch._foreach_copy_(copies.others_flat, copies.others)
                exchanges.publish(group, bucket, copies.flat, job)
                if copies.own:
                    torch._foreach_copy_(copies.own, copies.own_flat)
            if copies.others:
                torch._foreach_copy_(copies.others, copies.others_flat)
            for param in bucket.members:
                param.note_write()

        stream.run(exchange, span="publish", bucket=bucket.plan.index)
        bucket.published_event = stream.record()

    def _copies(self, bucket: Bucket, group: Group) -> Copies:
        """Views, made once as long as the parameters stay where they are."""
        addresses = [param.tensor.data_ptr() for param in bucket.members]
        found = self._kept.get(bucket.plan.index)
        if found is None or found.addresses != addresses:
            found = self._kept[bucket.plan.index] = self._new_copies(bucket, group, addresses)
        return found

    def _new_copies(self, bucket: Bucket, group: Group, addresses: list[int]) -> Copies:
        whole = bucket.gathered
        flat = self._raw[: whole.numel * whole.dtype.itemsize].view(whole.dtype)
        params = {param.index: param.tensor for param in bucket.members}
        size = whole.numel // group.world
        low, high = group.rank * size, (group.rank + 1) * size
        copies = Copies(addresses, flat, [], [], [], [])
        for piece in whole.slices:
            for start, stop in _cuts(piece.offset, piece.offset + piece.numel, low, high):
                cut = replace(piece, start=piece.start + start - piece.offset, numel=stop - start)
                there = target(params[piece.param], cut)
                here = flat[start:stop].view(there.shape)
                is_own = low <= start < high
                (copies.own if is_own else copies.others).append(there)
                (copies.own_flat if is_own else copies.others_flat).append(here)
        return copies


def _cuts(start: int, stop: int, low: int, high: int) -> list[tuple[int, int]]:
    """The range in up to three: before, inside and after [low, high)."""
    parts = [(start, min(stop, low)), (max(start, low), min(stop, high)), (max(start, high), stop)]
    return [(first, last) for first, last in parts if first < last]
