"""Gradients into buckets: gathered as they come, measured when a bucket is complete, handed to the board as tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from twinflow.device import Device, Event
from twinflow.offload import gather
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket, Job, Param, Task, local_of
from twinflow.offload.gate import decide_there
from twinflow.offload.plan import BucketPlan
from twinflow.offload.sharing import Sharing
from twinflow.offload.sync import FLAT_FREE
from twinflow.offload.taken_gradient import TakenGradient


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
        self._norms = torch.zeros(len(buckets), dtype=torch.float64, device=tensor_device)  # of each bucket
        self._decisions = [torch.zeros(3, dtype=torch.float64, device=tensor_device) for _ in range(2)]
        self._host_decisions = [device.pinned(3, torch.float64) for _ in range(2)]
        self._host_norms = [device.pinned(len(buckets), torch.float64) for _ in range(2)]  # this job's and the last's

    # While backward runs.

    def add(self, job: Job | None, found: Sequence[tuple[Param, Tensor]]) -> None:
        """Add gradients to what their buckets hold, on the stream that made them."""
        is_sum = self.num_parts > 1
        for bucket, pieces in _by_bucket(found).items():
            into = self._sum(bucket) if is_sum else self._task(job, bucket).flat
            assert into is not None
            self._gather(bucket, partial(gather.add, into, pieces))

    def add_last(self, job: Job, found: Sequence[tuple[Param, Tensor]]) -> None:
        """The same for gradients with which their parameters are complete."""
        if self.num_parts == 1:
            self.add(job, found)
        else:
            for bucket, pieces in _by_bucket(found).items():
                flat, total = self._task(job, bucket).flat, self._sum(bucket)
                assert flat is not None
                self._gather(bucket, partial(gather.add_last, flat, total, pieces))
        for param, _ in found:
            self._finish(job, param)

    def _gather(self, bucket: Bucket, what: Callable[[], None]) -> None:
        self._device.compute().run(what, "grad", bucket=bucket.plan.index)

    def _finish(self, job: Job, param: Param) -> None:
        """Nothing more will come for this parameter, and its gradient is in the flat buffers."""
        for bucket, _, own in param.places:
            task = self._task(job, bucket)
            task.missing.discard(param.index)
            task.present += own
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
            self._gather(bucket, partial(gather.cast, flat, self._sum(bucket), slices))

    def take_all(self, job: Job, params: Sequence[Param], stand_in: Callable[[Param], TakenGradient]) -> None:
        """Tasks from the gradients in `.grad`. Copies read these after this returns, so a stand-in takes their place:
        whoever changes a gradient then gets a copy of it. Gradients in memory of the user's are copied now."""
        flat: dict[Param, Tensor] = {}
        for param in params:
            grad = param.tensor.grad
            if grad is None:
                continue
            held = grad.held if isinstance(grad, TakenGradient) else grad
            held = param.watched if held is None else held
            assert held is not None
            if isinstance(grad, TakenGradient) or param.is_sharded or not _is_shared(grad):
                if not param.is_sharded:
                    param.tensor.grad = taken = stand_in(param)
                    taken.held, taken.is_lent, taken.is_used = held, True, True
                else:
                    param.tensor.grad = None
            else:
                held = held.clone()
            flat[param] = local_of(held).detach().reshape(-1)
        if self._sharing is not None:
            for bucket, pieces in _by_bucket(list(flat.items())).items():
                into = self._task(job, bucket).flat
                assert into is not None
                self._gather(bucket, partial(gather.put, into, pieces))
            for param in flat:
                self._finish(job, param)
            self.complete(job, ())
            return
        for bucket in self._buckets:
            task = Task(bucket, job, [i for i, param in enumerate(bucket.params) if param in flat])
            for i in task.present:
                piece = bucket.slices[i]
                task.sources.append((piece.offset, flat[bucket.params[i]][piece.start : piece.start + piece.numel]))
            if task.present and bucket.is_on_device:  # the update there wants them side by side
                task.flat = self._flat(bucket.plan)
                own = zip(task.present, task.sources, strict=True)
                placed: list[gather.Piece] = [(bucket.slices[i], source, True) for i, (_, source) in own]
                self._gather(bucket, partial(gather.put, task.flat, placed))
                task.sources = [(0, task.flat)]
            if task.present:
                self._submit(task)

    # When a step is given up.

    def read_back(self, job: Job | None, params: Sequence[Param]) -> dict[Param, Tensor]:
        """The gradients that were taken of these parameters, as torch would have left them in `.grad`. Blocks."""
        self._device.compute().synchronize()
        if self._board.sums_on_host:
            self._board.wait_for(lambda: not any(bucket.parts for bucket in self._buckets if not bucket.is_full))
        tasks = {task.bucket: task for task in (job.tasks if job is not None else ())}
        found: dict[Param, Tensor] = {}
        for param in params:
            grad = torch.zeros(param.tensor.numel(), dtype=param.tensor.dtype, device=self._tensor_device)
            for bucket in param.buckets:
                for i, piece in enumerate(bucket.slices):
                    if piece.param == param.index:
                        source = self._taken(bucket, i, tasks.get(bucket) or bucket.task)
                        if source is not None:
                            grad[piece.start : piece.start + piece.numel] = source[
                                piece.offset : piece.offset + piece.numel
                            ].to(grad.device)
            found[param] = grad.view(param.tensor.shape)
        return found

    def _taken(self, bucket: Bucket, index: int, task: Task | None) -> Tensor | None:
        """Where a slice's gradient lies, in a buffer of its bucket; None where there is none."""
        if self._board.sums_on_host:
            return bucket.total if index in bucket.added else None
        if task is not None and index in task.present:
            with self._board.changed:  # from the device to the host; one of them stays as it is until `step`
                held = task.flat if task.flat is not None else task.grads
            for event in (task.ready, task.arrived):
                if event is not None:
                    event.synchronize()
            return held
        if self.num_parts > 1:
            return self._sums.get(bucket.plan.index)
        return task.flat if task is not None else None

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

    def fetch_decision(self, job: Job) -> tuple[Tensor, Tensor, Event]:
        """The clipping decision of the job, made on the device: there, on its way to the host, and when it is there."""
        compute = self._device.compute()
        there = self._decisions[job.number % 2]
        here = self._host_decisions[job.number % 2]
        gate = job.gate

        def decide() -> None:
            decide_there(there, self._norms, gate.scale, gate.limits)
            here.copy_(there, non_blocking=True)

        compute.run(decide)
        return there, here, compute.record()

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

    def _submit(self, task: Task) -> None:
        """All gradients of a task are queued: measure them, and hand the task on."""
        if self._sharing is not None:
            return self._share(task, self._sharing)
        task.present.sort()
        bucket, compute, flat = task.bucket, self._device.compute(), task.flat
        norm = self._norms[bucket.plan.index]
        if self._board.sums_on_host:
            pass  # the host measures the sum
        elif flat is not None and len(task.present) == len(bucket.slices):
            compute.run(partial(gather.measure, norm, flat))
        else:
            cuts = [bucket.slices[i] for i in task.present]
            parts = task.sources if flat is None else [(c.offset, flat[c.offset : c.offset + c.numel]) for c in cuts]
            compute.run(partial(gather.measure_parts, norm, list(parts), bucket.plan.numel))
        task.ready = compute.record()
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


def _by_bucket(found: Sequence[tuple[Param, Tensor]]) -> dict[Bucket, list[gather.Piece]]:
    """The parts of gradients that lie in each bucket."""
    pieces: dict[Bucket, list[gather.Piece]] = {}
    for param, grad in found:
        flat = grad.detach().reshape(-1) if grad.requires_grad else grad.reshape(-1)
        for bucket, cuts, _ in param.places:
            into = pieces.setdefault(bucket, [])
            for cut in cuts:
                values = flat if cut.numel == flat.numel() else flat[cut.start : cut.start + cut.numel]
                into.append((cut, values, param.hits == 1))
    return pieces


def _is_shared(grad: Tensor) -> bool:
    """Whether somebody else may write to the memory of a gradient: he has the tensor, or a view of its storage."""
    storage = grad.untyped_storage()
    users = int(torch._C._storage_Use_Count(storage._cdata))
    return users > 2 or storage.nbytes() != grad.numel() * grad.element_size() or sys.getrefcount(grad) > 3
