"""Gradients into buckets: gathered as they come, measured when a bucket is complete, handed to the board as tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from twinflow.device import Device, Event
from twinflow.gpu import collect
from twinflow.offload import gather
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket, Job, Param, Task, local_of
from twinflow.offload.plan import BucketPlan, Slice
from twinflow.offload.sharing import Sharing
from twinflow.offload.slots import RowPool
from twinflow.offload.sync import FLAT_FREE


class Collector:
    """Everything here is queued on the stream that makes the gradients; nothing waits for the device."""

    def __init__(
        self,
        device: Device,
        board: Board,
        buckets: Sequence[Bucket],
        num_parts: int,
        tensor_device: torch.device,
        sharing: Sharing | None,
    ) -> None:
        self._device, self._board, self._buckets, self._sharing = device, board, buckets, sharing
        self.num_parts = num_parts  # gradients that make up one: with several, they are summed in fp32
        self._tensor_device = tensor_device
        self._sums: dict[int, Tensor] = {}  # of each bucket
        self._rows: dict[int, Tensor] = {}  # norms of blocks, of buckets whose gradients come in
        self._free_rows = RowPool(tensor_device)
        self._measures_at_once = sharing is None and collect.is_usable(tensor_device)  # as they come in
        self._norms = torch.zeros(len(buckets), dtype=torch.float64, device=tensor_device)  # of each bucket
        self._host_norms = [device.pinned(len(buckets), torch.float64) for _ in range(2)]  # this job's and the last's

    # While backward runs.

    def add(self, job: Job | None, param: Param, grad: Tensor) -> None:
        """Add a gradient to what its buckets hold, on the stream that made it."""
        for bucket in param.buckets:
            is_sum = self.num_parts > 1
            into = self._sum(bucket) if is_sum else self._task(job, bucket).flat
            rows = None if is_sum else self._rows_of(bucket)
            assert into is not None
            self._gather(bucket, partial(gather.add, into, _pieces(bucket, param, grad), param.hits == 1, rows))

    def add_last(self, job: Job, param: Param, grad: Tensor) -> None:
        """The same for the last gradient of a parameter: with it, the parameter is complete."""
        if self.num_parts == 1:
            self.add(job, param, grad)
        else:
            for bucket in param.buckets:
                flat, total, rows = self._task(job, bucket).flat, self._sum(bucket), self._rows_of(bucket)
                assert flat is not None
                self._gather(bucket, partial(gather.add_last, flat, total, _pieces(bucket, param, grad), rows))
        self._finish(job, param)

    def _gather(self, bucket: Bucket, what: Callable[[], None]) -> None:
        self._device.compute().run(what, "grad", bucket=bucket.plan.index)

    def _finish(self, job: Job, param: Param) -> None:
        """Nothing more will come for this parameter, and its gradient is in the flat buffers."""
        for bucket in param.buckets:
            task = self._task(job, bucket)
            task.missing.discard(param.index)
            task.present += [i for i, piece in enumerate(bucket.slices) if piece.param == param.index]
            if not task.missing:
                self._submit(task)

    # In `step`.

    def complete(self, job: Job, params: Sequence[Param]) -> None:
        """Parameters that are complete only now, and tasks that some parameters have nothing for."""
        for param in params:
            if param.hits and (param.is_late or param.hits < self.num_parts):
                self._round(job, param)
                self._finish(job, param)
        begun = {task.bucket.plan.index for task in job.tasks}
        for bucket in self._buckets:
            if self._sharing is not None and bucket.plan.index not in begun:  # others may have gradients for it
                self._submit(self._task(job, bucket))
            elif bucket.task is not None:
                if bucket.task.present:
                    self._submit(bucket.task)
                bucket.task = None

    def _round(self, job: Job, param: Param) -> None:
        """A sum that turned out to be complete, into the flat buffers."""
        if self.num_parts == 1:
            return  # it is there
        for bucket in param.buckets:
            flat, slices = self._task(job, bucket).flat, [s for s in bucket.gathered.slices if s.param == param.index]
            assert flat is not None
            self._gather(bucket, partial(gather.cast, flat, self._sum(bucket), slices, self._rows_of(bucket)))

    def take_all(self, job: Job, params: Sequence[Param]) -> None:
        """Tasks from the gradients in `.grad`, which are taken away: copies read them after this returns."""
        flat = {p: local_of(p.tensor.grad).detach().reshape(-1) for p in params if p.tensor.grad is not None}
        if self._sharing is not None:
            for param, grad in flat.items():
                for bucket in param.buckets:
                    into = self._task(job, bucket).flat
                    assert into is not None
                    self._gather(bucket, partial(gather.add, into, _pieces(bucket, param, grad), True))
                self._finish(job, param)
            self.complete(job, ())
        for bucket in self._buckets if self._sharing is None else ():
            task = Task(bucket, job, [i for i, param in enumerate(bucket.params) if param in flat])
            for i in task.present:
                piece = bucket.slices[i]
                task.sources.append((piece.offset, flat[bucket.params[i]][piece.start : piece.start + piece.numel]))
            if task.present and bucket.is_on_device:  # the update there wants them side by side
                task.flat = self._flat(bucket.plan)
                pieces = [(bucket.slices[i], source) for i, (_, source) in zip(task.present, task.sources, strict=True)]
                self._gather(bucket, partial(gather.add, task.flat, pieces, True, self._rows_of(bucket)))
                task.sources = [(0, task.flat)]
            if task.present:
                self._submit(task)
        for param in flat:
            param.tensor.grad = None

    def zero_norms(self) -> None:
        """A new job begins: a bucket without gradients has none."""
        self._device.compute().run(self._norms.zero_)

    def new_norms(self, job: Job) -> Tensor:
        """Zeros on the host, for norms that come one by one."""
        return self._host_norms[job.number % 2].zero_()

    def fetch_norms(self, job: Job) -> tuple[Tensor, Event]:
        """All norms of the job on their way to the host: the one small read that the gate needs."""
        compute, norms = self._device.compute(), self._host_norms[job.number % 2]
        compute.run(lambda: norms.copy_(self._norms, non_blocking=True))
        return norms, compute.record()

    # Parts.

    def _sum(self, bucket: Bucket) -> Tensor:
        index = bucket.plan.index
        if index not in self._sums:
            self._sums[index] = torch.zeros(bucket.gathered.numel, dtype=torch.float32, device=self._tensor_device)
        return self._sums[index]

    def _task(self, job: Job | None, bucket: Bucket) -> Task:
        """This step's task of a bucket, with a flat buffer to gather gradients in."""
        if bucket.task is None:
            assert job is not None
            bucket.task = task = Task(bucket, job, [])
            task.missing = {param.index for param in bucket.members}
            task.flat = self._flat(bucket.plan) if self._sharing is None else self._sharing.take_flat(bucket)
            task.sources = [(0, task.flat)]
        return bucket.task

    def _flat(self, plan: BucketPlan) -> Tensor:
        board, flats = self._board, self._board.flats
        with board.changed:
            # The mover hands one back with each copy it starts. Where there is none to start, all are held by buckets
            # that this very thread has to complete: then one more is made.
            while (taken := flats.take(plan, may_grow=not board.gives_flats())) is None:
                board.check()
                board.changed.wait(1.0)
        flat, read_until = taken
        if read_until is not None:
            self._device.compute().wait(read_until, FLAT_FREE)
        return flat

    def _rows_of(self, bucket: Bucket) -> Tensor | None:
        """Where norms of blocks go as gradients are gathered in a flat buffer; None where they are measured later."""
        if not self._measures_at_once or self._board.sums_on_host:
            return None
        index = bucket.plan.index
        if index not in self._rows:
            self._rows[index], read_until = self._free_rows.take(bucket.plan)
            if read_until is not None:
                self._device.compute().wait(read_until, FLAT_FREE)
        return self._rows[index]

    def _submit(self, task: Task) -> None:
        """All gradients of a task are queued: measure them, and hand the task on."""
        if self._sharing is not None:
            return self._share(task, self._sharing)
        task.present.sort()
        bucket, compute, flat = task.bucket, self._device.compute(), task.flat
        norm = self._norms[bucket.plan.index]
        rows = self._rows.pop(bucket.plan.index, None) if flat is not None else None
        if self._board.sums_on_host:
            pass  # the host measures the sum
        elif rows is not None:
            empty = [piece for i, piece in enumerate(bucket.slices) if i not in task.present]
            compute.run(partial(gather.measure_rows, norm, rows, empty))
        elif flat is not None and len(task.present) == len(bucket.slices):
            compute.run(partial(gather.measure, norm, flat))
        else:
            cuts = [bucket.slices[i] for i in task.present]
            parts = task.sources if flat is None else [(c.offset, flat[c.offset : c.offset + c.numel]) for c in cuts]
            compute.run(partial(gather.measure_parts, norm, list(parts), bucket.plan.numel))
        task.ready = compute.record()
        if rows is not None:
            self._free_rows.give(bucket.plan, rows, task.ready)
        bucket.task = None
        task.job.tasks.append(task)
        self._board.submit(task)

    def _share(self, task: Task, sharing: Sharing) -> None:
        """The same where ranks share the bucket: zeros for what this one has nothing for."""
        bucket, compute, flat = task.bucket, self._device.compute(), task.flat
        assert flat is not None
        empty = [piece for piece in bucket.gathered.slices if piece.param in task.missing]
        if empty:
            self._gather(bucket, partial(gather.clear, flat, empty))
        task.is_held = not all(param.was_hit for param in bucket.members)
        task.ready = compute.record()
        bucket.task = None
        task.job.tasks.append(task)
        sharing.submit(task)


def _pieces(bucket: Bucket, param: Param, grad: Tensor) -> list[tuple[Slice, Tensor]]:
    """The parts of a parameter's gradient that lie in this bucket."""
    return [(s, grad[s.start : s.start + s.numel]) for s in bucket.gathered.slices if s.param == param.index]
