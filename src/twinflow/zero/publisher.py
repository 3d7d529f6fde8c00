# SPDX-License-Identifier: Apache-2.0
"""The publisher sends new weights to all ranks.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step. The executor (offload/executor.py) runs the copies and updates of jobs.

Threads: the thread "twinflow-publisher" calls all all-gathers, on the stream "publish". If two ranks called them in
different orders, buckets would be mixed up without an error. The thread therefore calls them step by step, in the order
in which the next forward needs the weights, for the buckets that all ranks agree to have changed (`expect`).

Order for one bucket: the executor reports that the copy of this rank's part into the parameters is queued
(`wait_until_sent`). The stream waits for the event of that copy, packs the part into a flat buffer, gathers, and copies
the other ranks' parts into the parameters. `note_published` gives the event of the last copy to the executor, and the
next forward waits for it. `executor.changed` protects the list of `Edition`s, one for each step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twinflow.device import Device, Event
from twinflow.dist.group import Group
from twinflow.offload.bucket import Bucket, target
from twinflow.offload.executor import Executor
from twinflow.offload.job import Job
from twinflow.offload.sync import PUBLISH_READY
from twinflow.offload.weight_guard import plain
from twinflow.zero.compression import Exchanges

_LOOK_S = 0.2  # how long the thread waits for weights before it checks whether they are still expected


class RankThread:
    """A thread that calls collectives until the executor is closed or has failed.

    An exception in the thread is raised by the next call of the optimizer. A subclass starts `_thread` at the end of
    its constructor.
    """

    def __init__(self, executor: Executor, name: str) -> None:
        self._executor = executor
        self._changed = executor.changed
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def join(self) -> None:
        """Waits for the end of the thread. The executor must be closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        try:
            while not self._executor.is_closing and self._executor.error is None:
                self._turn()
        except BaseException as error:
            if not self._executor.is_closing:
                self._executor.fail(error)

    def _turn(self) -> None:
        """Does the next piece of work, or waits for it."""
        raise NotImplementedError


@dataclass(eq=False)
class Edition:
    """The publication of one step: the buckets that the step changes, and the buckets that it does not change."""

    job: Job
    changed: deque[Bucket]  # changed buckets that are not yet published
    same: list[Bucket]  # buckets without a change


@dataclass(frozen=True)
class Copies:
    """Views of a bucket's slices in the parameters and in `flat` (fields `..._flat`): this rank's and other ranks'."""

    addresses: list[int]  # addresses of the parameters when the views were made
    flat: Tensor  # the buffer for all ranks' parts
    own: list[Tensor]
    own_flat: list[Tensor]
    others: list[Tensor]
    others_flat: list[Tensor]


class Publisher(RankThread):
    """Gathers the weights that other ranks have updated. Without a group there is nothing to gather, because every rank
    has updated all weights.
    """

    def __init__(
        self,
        device: Device,
        executor: Executor,
        buckets: Sequence[Bucket],
        group: Group | None,
        where: torch.device,
        exchanges: Callable[[], Exchanges | None],
        experts: Group | None = None,
    ) -> None:
        """`experts`: the ranks with the same experts as this one, which exchange the buckets of these experts."""
        super().__init__(executor, "twinflow-publisher")
        self._exchanges = exchanges  # returns the compressed exchanges, or None before the switch
        self._device = device
        self._group = group
        self._experts = experts
        self._buckets = {bucket.plan.index: bucket for bucket in buckets}
        self._editions: deque[Edition] = deque()
        self._kept: dict[int, Copies] = {}
        nbytes = max((b.gathered.numel * b.plan.dtype.itemsize for b in buckets if not b.offloads_params), default=0)
        # One buffer for all buckets, because the stream publishes one bucket at a time.
        self._raw = torch.empty(nbytes if group is not None else 0, dtype=torch.uint8, device=where)
        self._thread.start()

    def expect(self, job: Job, changed: Sequence[int]) -> None:
        """Announces the buckets that this job changes, in the order of publication. All ranks pass the same list."""
        same = [bucket for index, bucket in self._buckets.items() if index not in set(changed)]
        with self._changed:
            self._editions.append(Edition(job, deque(self._buckets[index] for index in changed), same))
            self._changed.notify_all()

    def forget(self) -> None:
        """Drops all announced buckets, because their weights will not be updated."""
        with self._changed:
            self._editions.clear()

    # The thread.

    def _turn(self) -> None:
        executor = self._executor
        with self._changed:
            edition = self._editions[0] if self._editions else None
            if edition is None:
                self._changed.wait(1.0)
                return
        number = edition.job.number
        if executor.wait_for_decision(edition.job).skip:
            edition.same += edition.changed
            edition.changed.clear()
        for bucket in edition.same:
            executor.note_published(bucket, number, None)
        edition.same.clear()
        if edition.changed:
            bucket = edition.changed[0]
            if not executor.wait_until_sent(bucket, number, _LOOK_S):
                return  # `forget` may have dropped this edition
            executor.note_published(bucket, number, self._publish(bucket, edition.job))
            edition.changed.popleft()
        with self._changed:
            if not edition.changed and self._editions and self._editions[0] is edition:
                self._editions.popleft()
            self._changed.notify_all()

    def _publish(self, bucket: Bucket, job: Job) -> Event | None:
        """Queues the exchange of a bucket. Returns the event of the last copy into its parameters, if there is one."""
        group = self._experts if bucket.plan.is_divided else self._group
        sent = self._executor.weights_copied_event(bucket)
        if bucket.offloads_params:  # blocks gather its weights when they run
            return sent if bucket.is_on_device else None
        if group is None:
            return sent
        with plain():  # a guarded read would wait for this exchange
            copies = self._copies(bucket, group)
        stream, exchanges = self._device.stream("publish"), self._exchanges()
        if sent is not None:
            stream.wait(sent, PUBLISH_READY)

        def exchange() -> None:
            if bucket.landing is not None:
                self._executor.land(bucket)
            _copy_all(copies.own, copies.own_flat)
            if exchanges is None:
                group.all_gather(copies.flat)
            else:
                _copy_all(copies.others, copies.others_flat)
                exchanges.publish(group, bucket, copies.flat, job)
                _copy_all(copies.own_flat, copies.own)
            _copy_all(copies.others_flat, copies.others)
            for param in bucket.members:
                param.note_write()

        stream.run(exchange, span="publish", bucket=bucket.plan.index)
        return stream.record()

    def _copies(self, bucket: Bucket, group: Group) -> Copies:
        """Views of a bucket's parameters and of the flat buffer. They are made again if a parameter has moved."""
        addresses = [param.tensor.data_ptr() for param in bucket.members]
        found = self._kept.get(bucket.plan.index)
        if found is not None and found.addresses == addresses:
            return found
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
        self._kept[bucket.plan.index] = copies
        return copies


def _copy_all(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources:  # torch does not accept empty lists
        torch._foreach_copy_(targets, sources)


def _cuts(start: int, stop: int, low: int, high: int) -> list[tuple[int, int]]:
    """Splits a range into up to three: before, inside and after [low, high)."""
    parts = [(start, min(stop, low)), (max(start, low), min(stop, high)), (max(start, high), stop)]
    return [(first, last) for first, last in parts if first < last]
