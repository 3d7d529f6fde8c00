"""Gradients of all ranks into one sum, of which each rank gets its part: a thread, one stream and one order.

Collectives must be called in the same order everywhere, whatever order gradients come in. So buckets are reduced in the
order in which the first rank's first backward completed them; before that, from the last block to the first. A bucket
that is complete too early waits, with its buffer. Every bucket is reduced in every backward that sends anything: what a
rank has no gradient for, it sends as zeros.

When a step is closed, all ranks tell each other the sum of squares of their parts and which parameters got a gradient.
A parameter that got one anywhere is updated everywhere, as it would be in one process.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from twinflow.device import Device
from twinflow.dist.group import Group
from twinflow.offload import pack_gradients
from twinflow.offload.bucket import Bucket
from twinflow.offload.clipping import decide
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.flats import FlatPool
from twinflow.offload.job import Job, Task
from twinflow.offload.plan import ROOT
from twinflow.offload.sync import FLAT_FREE, REDUCE_READY
from twinflow.zero.compression import Exchanges


@dataclass(eq=False)
class Round:
    """The reductions of one backward, or of one step."""

    job: Job
    tasks: dict[int, Task] = field(default_factory=dict)  # by bucket, as far as they have come and not been reduced
    came: list[int] = field(default_factory=list)  # in this order
    num_done: int = 0
    hits: Sequence[bool] | None = None  # of each parameter on this rank, once the step is closed


@dataclass(frozen=True)
class Wire:
    """How sums travel."""

    group: Group
    agree: Group  # on the host
    dtype: torch.dtype | None  # None: the gradients' own
    is_partitioned: bool  # each rank gets its part; else everyone gets all
    predivide: float  # gradients are divided by it before they are summed
    exchanges: Callable[[], Exchanges | None] = lambda: None  # once momenta are exchanged in few bits
    replica: Group | None = None  # on the host: ranks that have other parts of the model


class Reducer:
    """Takes complete buckets, hands this rank's part of their sum to the executor. `executor.changed` guards it."""

    def __init__(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        wire: Wire,
        flats: FlatPool,
        where: torch.device,
        on_agreed: Callable[[Job, list[int]], None],
    ) -> None:
        self._device = device
        self._executor = executor
        self._changed = executor.changed
        self._device_work = device_work
        self._buckets = buckets
        self._wire = wire
        self._flats = flats
        self._on_agreed = on_agreed  # a step is closed on all ranks: the buckets that change, in the forward's order
        self._rounds: deque[Round] = deque()
        self._is_busy = False
        self._order = [b.plan.index for b in sorted(buckets, key=_last_block_first)]
        self._forward = [b.plan.index for b in sorted(buckets, key=lambda b: (b.plan.block, b.plan.index))]
        self._is_ordered = False  # as the first step has shown
        self._norms = torch.zeros(len(buckets), dtype=torch.float64, device=where)
        self._host_norms = device.pinned(len(buckets), torch.float64)
        self._thread = threading.Thread(target=self._loop, name="twinflow-reducer", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread's end, after the executor was closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # Called by the runtime.

    def take_flat(self, bucket: Bucket) -> Tensor:
        """A buffer for a whole bucket's gradients."""
        with self._changed:
            # One comes back with each reduction. Where none can be made, all are held by buckets whose turn has not
            # come, and this very thread has to bring the one whose turn it is: then one more is made.
            while (taken := self._flats.take(bucket.gathered, may_grow=not self._gives_flats())) is None:
                self._executor.check()
                self._changed.wait(1.0)
        flat, read_until = taken
        if read_until is not None:
            self._device.compute().wait(read_until, FLAT_FREE)
        return flat

    def _gives_flats(self) -> bool:
        return self._is_busy or self._next() is not None

    def submit(self, task: Task) -> None:
        """Gradients of a whole bucket, complete on this rank once `task.ready` is done."""
        with self._changed:
            found = self._round(task.job)
            found.tasks[task.bucket.plan.index] = task
            found.came.append(task.bucket.plan.index)
            self._changed.notify_all()

    def close(self, job: Job, hits: Sequence[bool]) -> None:
        """The step's last task is submitted."""
        with self._changed:
            self._round(job).hits = hits
            self._changed.notify_all()

    def wait_for_sums(self) -> None:
        """Until every task that was submitted is with the executor."""
        with self._changed:
            while self._rounds:
                self._executor.check()
                self._changed.wait(1.0)

    def _round(self, job: Job) -> Round:
        found = next((one for one in self._rounds if one.job is job), None)
        if found is None:
            found = Round(job)
            self._rounds.append(found)
        return found

    # The thread.

    @torch.no_grad()
    def _loop(self) -> None:
        try:
            while not self._executor.is_closing and self._executor.error is None:
                self._turn()
        except BaseException as error:
            if not self._executor.is_closing:
                self._executor.fail(error)

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
        """The task whose turn it is, if it has come."""
        if not self._rounds or self._rounds[0].num_done == len(self._order):
            return None
        now = self._rounds[0]
        return now.tasks.get(self._order[now.num_done])

    def _is_over(self) -> bool:
        if not self._rounds or self._rounds[0].num_done < len(self._order):
            return False
        return self._rounds[0].job.is_part or self._rounds[0].hits is not None

    def _reduce(self, task: Task) -> None:
        """Queue the sum, and hand the task on with this rank's part of it."""
        executor, bucket, stream = self._executor, task.bucket, self._device.stream("reduce")
        whole = task.flat
        assert whole is not None and task.ready is not None
        part = executor.take_flat(bucket.plan, stream, is_own=True)
        stream.wait(task.ready, REDUCE_READY)
        norm = None if executor.sums_on_host else self._norms[bucket.plan.index]
        exchanges = self._wire.exchanges()
        work = partial(_sum, self._wire, part, whole)
        if exchanges is not None:
            work = partial(exchanges.reduce, self._wire.group, bucket, part, whole, task.job)
        stream.run(partial(_do_and_measure, work, part, norm), span="reduce", bucket=bucket.plan.index)
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
        """Tell the others what this rank has, and open the way for what waits for them."""
        job, hits = closed.job, closed.hits
        assert hits is not None
        if not self._is_ordered:
            self._agree_on_orders(closed.came)
        found = zip(self._own_norms(job), self._buckets, strict=True)
        norms = [norm for norm, bucket in found if bucket.plan.is_counted]
        row = torch.tensor([sum_of_squares(norms), *hits], dtype=torch.float64)
        rows = self._wire.agree.gather_rows(row)
        present = {i for i, anywhere in enumerate(rows[:, 1:].any(dim=0).tolist()) if anywhere}
        sums = of_all_axes(rows[:, 0] if self._wire.is_partitioned else rows[:1, 0], self._wire.replica)
        members = {b.plan.index: b.members for b in self._buckets}
        self._take_back(job, present, sums)
        self._on_agreed(job, [b for b in self._forward if any(p.index in present for p in members[b])])
        self._executor.agree(job, present, len(hits))
        self._device_work.agree(job, present)
        self._executor.decide(job, decide(sums.tolist(), job.scale, job.limits))
        self._device_work.close_job(job, None, None)

    def _take_back(self, job: Job, present: Container[int], sums: Tensor) -> None:
        """Momenta that were sent in codes, and will not be used."""
        exchanges, stream = self._wire.exchanges(), self._device.stream("reduce")
        if exchanges is None:
            return
        is_skipped = decide(sums.tolist(), job.scale, job.limits).skip
        for bucket in self._buckets:
            unused = {param.index for param in bucket.members if is_skipped or param.index not in present}
            if unused:
                stream.run(partial(exchanges.take_back, bucket, unused))
                stream.record().synchronize()  # publishing, on another stream, adds to the same errors

    def _own_norms(self, job: Job) -> list[float]:
        """Of this rank's parts, once they are known."""
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
        """From now on, as the first rank's first step went."""
        forward = sorted(self._buckets, key=lambda b: (b.deadline, b.plan.index))
        row = torch.tensor([*came, *(b.plan.index for b in forward)], dtype=torch.int64)
        first = self._wire.agree.gather_rows(row)[0].tolist()
        with self._changed:
            self._order, self._forward = first[: len(self._buckets)], first[len(self._buckets) :]
            self._is_ordered = True


def _last_block_first(bucket: Bucket) -> tuple[int, int]:
    """Backward comes from the last block; what lies outside all blocks is complete at the very end."""
    return (0 if bucket.plan.block == ROOT else -1 - bucket.plan.block), -bucket.plan.index


def _sum(wire: Wire, part: Tensor, whole: Tensor) -> None:
    if wire.predivide != 1.0:
        whole.mul_(1.0 / wire.predivide)
    dtype = wire.dtype or whole.dtype
    if wire.is_partitioned:
        wire.group.reduce_scatter(part, whole, dtype)
    else:
        wire.group.all_reduce(part, whole, dtype)


def _do_and_measure(work: Callable[[], None], part: Tensor, norm: Tensor | None) -> None:
    work()
    if norm is not None:
        pack_gradients.measure(norm, part)


def of_all_axes(sums: Tensor, replica: Group | None) -> Tensor:
    """Sums of squares of the data axis, and of the ranks that have other parts of the model where there are some: the
    same numbers in the same order on all of them."""
    if replica is None:
        return sums
    total = math.fsum(sums.tolist()) if bool(sums.isfinite().all()) else float(sums.sum())
    return replica.gather_rows(torch.tensor([total], dtype=torch.float64))[:, 0]


def sum_of_squares(norms: Sequence[float]) -> float:
    """The sum of their squares, as `decide` adds them up; not finite where one is not."""
    squares = [norm * norm for norm in norms]
    return math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)
