# SPDX-License-Identifier: Apache-2.0
"""The reducer sums gradients over all ranks and gives each rank its part of the sum, or all of it with ZeRO stage 0.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step, and a task is the work for one bucket in a job. The executor runs the copies and updates.

Threads: autograd's thread, or the user's in `step`, submits complete buckets. The thread "twinflow-reducer" calls all
collectives, on the stream "reduce". `executor.changed` protects the `Round`s, one for each job.

Order: all ranks must call collectives in the same order, but gradients may be complete in any order. In the first
step buckets are reduced from the last block to the first, and afterwards in the order in which rank 0 submitted them in
that step's last backward. A bucket that is complete before its turn waits with its buffer. Every bucket is reduced in
every backward that sends gradients. A rank sends zeros for parameters without a gradient.

When a step is closed, all ranks gather the sums of squares of their parts and which parameters have a gradient. A
parameter that has a gradient on at least one rank is updated on all ranks, as in one process.

With expert parallelism, the gradients of a rank's experts are summed over the ranks that have the same experts. They
contain the tokens of all ranks already, because ranks exchange tokens. The divisor is the same for all parameters: the
number of all ranks.

With ZeRO stage 3, torch's `fully_shard` sums and partitions the gradients, with zeros for missing ones
(partitioned.py). Ranks agree only on the norm and on which parameters have a gradient. The thread
"twinflow-norm-reducer" does this. All ranks close their jobs in the same order, which orders its collectives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from twinflow.device import Device, Event
from twinflow.dist.group import Group
from twinflow.offload import pack_gradients
from twinflow.offload.bucket import Bucket
from twinflow.offload.clipping import clip_values, decide
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.flats import FlatPool
from twinflow.offload.job import Job, Task
from twinflow.offload.plan import ROOT
from twinflow.offload.sync import FLAT_FREE, REDUCE_READY
from twinflow.zero.compression import Exchanges
from twinflow.zero.publisher import Publisher, RankThread


@dataclass(eq=False)
class Round:
    """The reductions of one job, which may be only a part of a step (`Job.is_part`)."""

    job: Job
    tasks: dict[int, Task] = field(default_factory=dict)  # by bucket: submitted and not yet reduced
    came: list[int] = field(default_factory=list)  # buckets in the order of submission
    num_done: int = 0
    hits: Sequence[bool] | None = None  # which parameters have a gradient on this rank; None until the step is closed


@dataclass(frozen=True)
class Wire:
    """Groups and options of the reduction."""

    group: Group
    agree: Group  # group on the host for small values
    dtype: torch.dtype | None  # dtype of the communication; None: that of the gradients
    is_partitioned: bool  # each rank gets its part of the sum; otherwise each gets all of it
    predivide: float  # gradients are divided by it before the sum
    exchanges: Callable[[], Exchanges | None]  # returns the compressed exchanges after the switch
    replica: Group | None  # group on the host: ranks with other parts of the model
    divisor: float  # gradients in tasks, divided by this number, are the requested mean or sum
    experts: Group  # for buckets of this rank's experts: the ranks that have the same experts; else unused
    num_counted: int = 1  # without partition: the first ranks, which together count each parameter once in the norm

    def group_of(self, bucket: Bucket) -> Group:
        """The ranks that sum the gradients of this bucket."""
        return self.experts if bucket.plan.is_divided else self.group


class Reducer(RankThread):
    """Takes gradients of buckets and gives this rank's part of their sum over ranks to the executor or `DeviceWork`.

    It implements the runtime's interface `Sharing`. The publisher handles the new weights.
    """

    def __init__(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        wire: Wire,
        flats: FlatPool,
        where: torch.device,
        publisher: Publisher,
    ) -> None:
        super().__init__(executor, "twinflow-reducer")
        self.divisor = wire.divisor
        self._device = device
        self._device_work = device_work
        self._buckets = buckets
        self._wire = wire
        self._flats = flats
        self._publisher = publisher
        self._rounds: deque[Round] = deque()
        self._is_busy = False
        self._order = [b.plan.index for b in sorted(buckets, key=_last_block_first)]
        self._forward = [b.plan.index for b in sorted(buckets, key=lambda b: (b.plan.block, b.plan.index))]
        self._is_ordered = False  # the orders are those of rank 0's first step
        self._norms = torch.zeros(len(buckets), dtype=torch.float64, device=where)
        self._host_norms = device.pinned(len(buckets), torch.float64)
        self._thread.start()

    @property
    def threads(self) -> Sequence[RankThread]:
        return (self, self._publisher)

    # Called by the runtime.

    def take_flat(self, bucket: Bucket) -> Tensor:
        """A device buffer for the gradients of a whole bucket. Blocks until one is free."""
        with self._changed:
            # Each reduction frees a buffer. If no reduction can run, buckets whose turn has not come hold all buffers,
            # and the calling thread must submit the bucket whose turn it is. Then one more buffer is allocated.
            while True:
                may_grow = not self._is_busy and self._next() is None
                taken = self._flats.take(bucket.gathered, may_grow)
                if taken is not None:
                    break
                self._executor.check()
                self._changed.wait(1.0)
        flat, read_until = taken
        if read_until is not None:
            self._device.compute().wait(read_until, FLAT_FREE)
        return flat

    def submit(self, task: Task) -> None:
        """Takes the gradients of a whole bucket. They are complete on this rank after `task.ready`."""
        with self._changed:
            found = self._round(task.job)
            found.tasks[task.bucket.plan.index] = task
            found.came.append(task.bucket.plan.index)
            self._changed.notify_all()

    def close(self, job: Job, hits: Sequence[bool]) -> None:
        """Closes a step after its last task. `hits`: which parameters have a gradient on this rank."""
        with self._changed:
            self._round(job).hits = hits
            self._changed.notify_all()

    def wait_for_sums(self) -> None:
        """Waits until all submitted tasks are given to the executor and all closed steps are decided."""
        with self._changed:
            while self._rounds:
                self._executor.check()
                self._changed.wait(1.0)

    def wait_until_reduced(self, job: Job) -> None:
        """Waits until all buckets of a job that is not closed are given to the executor."""
        with self._changed:
            while any(one.job is job and one.num_done < len(self._order) for one in self._rounds):
                self._executor.check()
                self._changed.wait(1.0)

    def forget(self) -> None:
        """Drops the buckets that were announced to the publisher and are not published yet."""
        self._publisher.forget()

    def hold_back(self, job: Job) -> None:
        """Announces that all buckets have a delayed update, whose weights the next step publishes."""
        self._publisher.expect(job, [bucket.plan.index for bucket in self._buckets])

    def _round(self, job: Job) -> Round:
        found = next((one for one in self._rounds if one.job is job), None)
        if found is None:
            found = Round(job)
            self._rounds.append(found)
        return found

    # The thread.

    def _turn(self) -> None:
        with self._changed:
            task = self._next()
            if task is None and not self._is_over():
                self._changed.wait(1.0)
                return
            self._is_busy, now = True, self._rounds[0]
            if task is not None:
                del now.tasks[task.bucket.plan.index]
        try:
            if task is not None:
                self._reduce(task)
                now.num_done += 1
            elif not now.job.is_part:
                self._agree(now)
        finally:
            with self._changed:
                self._is_busy = False
                if task is None:
                    self._rounds.popleft()
                self._changed.notify_all()

    def _next(self) -> Task | None:
        """The task whose turn it is; None if it is not submitted yet, or if all buckets are reduced."""
        if not self._rounds or self._rounds[0].num_done == len(self._order):
            return None
        now = self._rounds[0]
        return now.tasks.get(self._order[now.num_done])

    def _is_over(self) -> bool:
        if not self._rounds or self._rounds[0].num_done < len(self._order):
            return False
        return self._rounds[0].job.is_part or self._rounds[0].hits is not None

    def _reduce(self, task: Task) -> None:
        """Queues the reduction and gives the task with this rank's part of the sum to the executor."""
        executor, bucket, stream = self._executor, task.bucket, self._device.stream("reduce")
        whole = task.flat
        assert whole is not None and task.ready is not None
        part = executor.take_flat(bucket.plan, stream, is_own=True)
        stream.wait(task.ready, REDUCE_READY)
        norm = None if executor.sums_on_host else self._norms[bucket.plan.index]
        wire, job, exchanges = self._wire, task.job, self._wire.exchanges()
        group = wire.group_of(bucket)

        def reduce() -> None:
            if exchanges is not None:
                exchanges.reduce(group, bucket, part, whole, job)
            else:
                if wire.predivide != 1.0:
                    whole.mul_(1.0 / wire.predivide)
                sum_parts = group.reduce_scatter if wire.is_partitioned else group.all_reduce
                sum_parts(part, whole, wire.dtype or whole.dtype)
            if norm is not None:
                pack_gradients.measure(norm, part)
            if job.limits.max_value is not None:  # after the norm, which tells whether all gradients are finite
                clip_values(part, job.limits.max_value * job.scale)

        stream.run(reduce, span="reduce", bucket=bucket.plan.index)
        task.ready = stream.record()
        task.flat, task.sources = part, [(0, part)]
        task.present = list(range(len(bucket.slices)))
        with self._changed:
            self._flats.give(bucket.gathered, whole, task.ready)
        if bucket.is_on_device:
            self._device_work.submit(task)
        else:
            executor.submit(task)

    def _agree(self, closed: Round) -> None:
        """Gathers norms and hits of all ranks, makes the clipping decision, and releases the waiting updates."""
        job, hits = closed.job, closed.hits
        assert hits is not None
        if not self._is_ordered:
            self._agree_on_orders(closed.came)
        found = zip(self._own_norms(job), self._buckets, strict=True)
        norms = [norm for norm, bucket in found if bucket.plan.is_counted]
        rows, present = _gather(self._wire.agree, norms, hits)
        rows = rows if self._wire.is_partitioned else rows[: self._wire.num_counted]
        sums = of_all_axes(rows, self._wire.replica)
        members = {b.plan.index: b.members for b in self._buckets}
        self._take_back(job, present, sums)
        self._publisher.expect(job, [b for b in self._forward if any(p.index in present for p in members[b])])
        self._executor.agree(job, present, len(hits))
        self._device_work.agree(job, present)
        self._executor.decide(job, decide(sums.tolist(), job.scale, job.limits))
        self._device_work.close_job(job, None, None)

    def _take_back(self, job: Job, present: Container[int], sums: Tensor) -> None:
        """Adds compressed momenta that were sent, but will not be used, to the errors again."""
        exchanges, stream = self._wire.exchanges(), self._device.stream("reduce")
        if exchanges is None:
            return
        is_skipped = decide(sums.tolist(), job.scale, job.limits).skip
        for bucket in self._buckets:
            unused = {param.index for param in bucket.members if is_skipped or param.index not in present}
            if unused:
                stream.run(partial(exchanges.take_back, bucket, unused))
                stream.record().synchronize()  # publishing changes the same errors on another stream

    def _own_norms(self, job: Job) -> list[float]:
        """Waits for the norms of this rank's parts and returns them."""
        if self._executor.sums_on_host:
            self._executor.wait_until_summed(job)
            self._device.stream("update").synchronize()
            return job.norms.tolist() if job.norms is not None else [math.nan]
        stream = self._device.stream("reduce")
        stream.run(lambda: self._host_norms.copy_(self._norms, non_blocking=True))
        stream.record().synchronize()
        norms: list[float] = self._host_norms.tolist()
        return norms

    def _agree_on_orders(self, came: Sequence[int]) -> None:
        """Sets the orders of reducing and publishing on all ranks to those of rank 0's first step."""
        forward = sorted(self._buckets, key=lambda b: (b.deadline, b.plan.index))
        row = torch.tensor([*came, *(b.plan.index for b in forward)], dtype=torch.int64)
        first = self._wire.agree.gather_rows(row)[0].tolist()
        with self._changed:
            self._order, self._forward = first[: len(self._buckets)], first[len(self._buckets) :]
            self._is_ordered = True


def _last_block_first(bucket: Bucket) -> tuple[int, int]:
    """Sort key: backward starts with the last block, and parameters outside all blocks are complete at the end."""
    return (0 if bucket.plan.block == ROOT else -1 - bucket.plan.block), -bucket.plan.index


def of_all_axes(sums: Tensor, replica: Group | None) -> Tensor:
    """Returns `sums`, the sums of squares of the ranks on the data axis. With pipeline or tensor ranks (`replica`)
    returns the total of `sums` of each of those ranks instead. All ranks get the same numbers in the same order.
    """
    if replica is None:
        return sums
    total = math.fsum(sums.tolist()) if bool(sums.isfinite().all()) else float(sums.sum())
    return replica.gather_rows(torch.tensor([total], dtype=torch.float64))[:, 0]


def sum_of_squares(norms: Sequence[float]) -> float:
    """The sum of the squares of `norms`; not finite if a norm is not finite."""
    squares = [norm * norm for norm in norms]
    return math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)


def _gather(group: Group, norms: Sequence[float], hits: Sequence[bool]) -> tuple[Tensor, set[int]]:
    """Gathers the sum of squares of each rank's norms, and which parameters have a gradient on at least one rank."""
    rows = group.gather_rows(torch.tensor([sum_of_squares(norms), *hits], dtype=torch.float64))
    present = {i for i, anywhere in enumerate(rows[:, 1:].any(dim=0).tolist()) if anywhere}
    return rows[:, 0], present


class NormReducer(RankThread):
    """Decides on clipping and skipping when the norms of all ranks are known, with ZeRO stage 3."""

    def __init__(
        self,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        group: Group,
        replica: Group | None,
        divisor: float,
    ) -> None:
        super().__init__(executor, "twinflow-norm-reducer")
        self.divisor = divisor  # gradients are divided by it: `fully_shard` computes the mean
        self._device_work = device_work
        self._buckets = buckets
        self._group = group
        self._replica = replica
        self._closed: deque[tuple[Job, Sequence[bool], Tensor, Event]] = deque()
        self._thread.start()

    @property
    def threads(self) -> Sequence[RankThread]:
        return (self,)

    def close(self, job: Job, hits: Sequence[bool], norms: Tensor, event: Event) -> None:
        """Queues a job whose tasks are all submitted. `hits`: which parameters have a gradient on this rank. `norms`
        has this rank's norms after `event`.
        """
        with self._changed:
            self._closed.append((job, hits, norms, event))
            self._changed.notify_all()

    def _turn(self) -> None:
        with self._changed:
            if not self._closed:
                self._changed.wait(1.0)
                return
            job, hits, norms, event = self._closed.popleft()
        event.synchronize()
        own = [norm for norm, bucket in zip(norms.tolist(), self._buckets, strict=True) if bucket.plan.is_counted]
        sums, present = _gather(self._group, own, hits)
        self._executor.agree(job, present, len(hits))
        self._device_work.agree(job, present)
        decision = decide(of_all_axes(sums, self._replica).tolist(), job.scale, job.limits)
        self._executor.decide(job, decision)
        self._device_work.close_job(job, None, None)
