# SPDX-License-Identifier: Apache-2.0
"""Gathers gradients in the flat buffers of their buckets, computes the norms of complete buckets, and submits these
buckets as tasks.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step, and a task is the work for one bucket in a job. A flat buffer is a device buffer with the gradients of
one bucket.

Threads: autograd's thread calls the collector during backward, and the user's thread calls it in `step`. They never run
at the same time, because backward() blocks its caller, so there is no lock.

Order: all work is queued on the current stream, which made the gradients. The event `Task.ready` is recorded on that
stream after the last copy and the norm. Copies to the host and updates on the device wait for this event. The collector
blocks the calling thread in two cases only: in `read_back`, and to wait for a flat buffer if all of them are in use.

Ownership: an open task and its flat buffer belong to the collector until `_submit`. Then they belong to the executor,
to `DeviceWork` or to `Sharing` (which sums over ranks). Sums of several backwards (`_sums`) and the norms on
the device always belong to the collector. There are two sets of decisions and of norms on the host, because other
threads may still read those of the last job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from twinflow.device import Device, Event
from twinflow.offload import pack_gradients
from twinflow.offload.bucket import Bucket, Param, local_of
from twinflow.offload.clipping import decide_there
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.job import Job, Task
from twinflow.offload.sharing import Sharing
from twinflow.offload.taken_gradient import TakenGradient


class Collector:
    """Turns the gradients of a step into tasks."""

    def __init__(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        num_parts: int,
        tensor_device: torch.device,
        sharing: Sharing | None,
        agrees: bool,
    ) -> None:
        """`agrees`: ranks that have rows of all parameters agree in each step which parameters have a gradient."""
        self._device = device
        self._executor = executor
        self._device_work = device_work
        self._buckets = buckets
        self._sharing = sharing
        self._agrees = agrees
        self.num_parts = num_parts  # number of gradients of a parameter in one step; several are summed in fp32 here
        self._tensor_device = tensor_device
        self._open: dict[Bucket, Task] = {}  # tasks of this step that are not complete
        self._sums: dict[int, Tensor] = {}  # by index of the bucket
        self._wholes: dict[Bucket, pack_gradients.Whole] = {}
        self._views = pack_gradients.Views()
        self._norms = torch.zeros(len(buckets), dtype=torch.float64, device=tensor_device)  # of each bucket
        self._norm_of = list(self._norms.unbind())
        self._unmeasured: list[Task] = []  # tasks of this step whose norm is not computed yet
        self._decisions = [torch.zeros(3, dtype=torch.float64, device=tensor_device) for _ in range(2)]
        self._host_decisions = [device.pinned(3, torch.float64) for _ in range(2)]
        self._host_norms = [device.pinned(len(buckets), torch.float64) for _ in range(2)]  # of this job and the last

    def set_num_parts(self, num_parts: int) -> None:
        """Change the number of gradients that a parameter gets in one step, from the next step on."""
        self.num_parts = num_parts

    # During backward.

    def add(self, job: Job | None, found: Sequence[tuple[Param, Tensor]]) -> None:
        """Add gradients to the flat buffers of their buckets, or to the fp32 sums if a step sums several gradients."""
        is_sum = self.num_parts > 1
        for bucket, pieces in _by_bucket(found).items():
            into = self._sum(bucket) if is_sum else self._task(job, bucket).flat
            assert into is not None
            self._gather(bucket, partial(pack_gradients.add, into, pieces))

    def add_last(self, job: Job, found: Sequence[tuple[Param, Tensor]]) -> None:
        """Add the last gradients that their parameters get in this step. Submit buckets that are now complete."""
        if self.num_parts == 1:
            self.add(job, found)
        else:
            for bucket, pieces in _by_bucket(found).items():
                flat, total = self._task(job, bucket).flat, self._sum(bucket)
                assert flat is not None
                self._gather(bucket, partial(pack_gradients.add_last, flat, total, pieces))
        for param, _ in found:
            self._finish(job, param)

    def put_wholes(self, job: Job, grads: Mapping[int, Tensor], buckets: Sequence[Bucket]) -> None:
        """Copy all gradients of some buckets at once, and submit these buckets. `grads`: by index of the parameter.

        Most gradients are copied by this method. It is fast, because it queues one operation for each bucket.
        """
        for bucket in buckets:
            task = self._new_task(job, bucket)
            assert task.flat is not None
            whole = self._wholes.get(bucket) or self._new_whole(bucket)
            self._gather(bucket, partial(torch._foreach_copy_, whole.targets(task.flat), whole.parts(grads)))
            task.present = list(range(len(bucket.slices)))
            self._submit(task)

    def _new_whole(self, bucket: Bucket) -> pack_gradients.Whole:
        shapes = {param.index: param.local.shape for param in bucket.members}
        self._wholes[bucket] = whole = pack_gradients.Whole(bucket.gathered.slices, shapes, self._views)
        return whole

    def _gather(self, bucket: Bucket, what: Callable[[], None]) -> None:
        self._device.compute().run(what, "grad", bucket=bucket.plan.index)

    def _finish(self, job: Job, param: Param) -> None:
        """Note that a parameter gets no more gradients in this step, and submit the buckets that are complete now."""
        for bucket, _, own in param.places:
            task = self._task(job, bucket)
            task.missing.discard(param.index)
            task.present += own
            if not task.missing:
                self._submit(task)

    # In `step`.

    def complete(self, job: Job, params: Sequence[Param]) -> None:
        """Submit the rest of a step: parameters that are complete only now, and buckets with missing gradients."""
        for param in params:
            if param.hits and (param.is_late or param.hits < self.num_parts):
                self._round(job, param)
                self._finish(job, param)
        begun = {task.bucket.plan.index for task in job.tasks}
        for bucket in self._buckets:
            if self._sharing is not None and bucket.plan.index not in begun:  # other ranks may have gradients for it
                self._submit(self._task(job, bucket))
            elif (task := self._open.pop(bucket, None)) is not None and task.present:
                self._submit(task)

    def _round(self, job: Job, param: Param) -> None:
        """Round the fp32 sum of a parameter's gradients into the flat buffers, because no more gradients will come."""
        if self.num_parts == 1:
            return  # the gradient is already in the flat buffers
        for bucket in param.buckets:
            flat, slices = self._task(job, bucket).flat, [s for s in bucket.gathered.slices if s.param == param.index]
            assert flat is not None
            self._gather(bucket, partial(pack_gradients.cast, flat, self._sum(bucket), slices))

    def take_all(self, job: Job, params: Sequence[Param], stand_in: Callable[[Param], TakenGradient]) -> None:
        """Make and submit tasks from the gradients in `.grad`.

        Copies still read the gradients after this method returns. A stand-in (TakenGradient), or None for a
        sharded parameter, therefore replaces a gradient in `.grad`. A write to the stand-in goes to a copy. A gradient
        whose memory the user may also write to in other ways stays in `.grad`, and is copied now.
        """
        flat: dict[Param, Tensor] = {}
        for param in params:
            grad = param.tensor.grad
            if grad is None:
                continue
            if isinstance(grad, TakenGradient) and param.watched is not None:
                param.put_back(param.watched)  # if the user holds this tensor too, it stays in `.grad`
                param.watched = None
                grad = param.tensor.grad
                assert grad is not None
            is_free = isinstance(grad, TakenGradient) or param.is_sharded or not _is_shared(grad)
            held = grad.held if isinstance(grad, TakenGradient) else grad
            assert held is not None
            if is_free:
                if not param.is_sharded:
                    param.tensor.grad = taken = stand_in(param)
                    taken.held = held
                    taken.is_lent = True
                    taken.is_used = True
                else:
                    param.tensor.grad = None
            else:
                held = held.clone()
            flat[param] = local_of(held).detach().reshape(-1)
        if self._sharing is not None:
            for bucket, pieces in _by_bucket(list(flat.items())).items():
                into = self._task(job, bucket).flat
                assert into is not None
                self._gather(bucket, partial(pack_gradients.put, into, pieces))
            for param in flat:
                self._finish(job, param)
            self.complete(job, ())
            return
        for bucket in self._buckets:
            task = Task(bucket, job, [i for i, param in enumerate(bucket.params) if param in flat])
            for i in task.present:
                piece = bucket.slices[i]
                task.sources.append((piece.offset, flat[bucket.params[i]][piece.start : piece.start + piece.numel]))
            if task.present and bucket.is_on_device:  # an update on the device needs the gradients in one buffer
                task.flat = self._executor.take_flat(bucket.plan, self._device.compute())
                own = zip(task.present, task.sources, strict=True)
                placed: list[pack_gradients.Piece] = [(bucket.slices[i], source, True) for i, (_, source) in own]
                self._gather(bucket, partial(pack_gradients.put, task.flat, placed))
                task.sources = [(0, task.flat)]
            if task.present:
                self._submit(task)

    # Putting the gradients of a step back into `.grad`.

    def read_back(self, job: Job | None, params: Sequence[Param]) -> dict[Param, Tensor]:
        """Return the gradients that were taken from `.grad` of these parameters, as torch would have left them."""
        tasks = self._settled_tasks(job)
        found: dict[Param, Tensor] = {}
        for param in params:
            grad = torch.zeros(param.tensor.numel(), dtype=param.tensor.dtype, device=self._tensor_device)
            for start, values in self._slices(tasks, param, is_whole=False):
                grad[start : start + values.numel()] = values.to(grad.device)
            found[param] = grad.view(param.tensor.shape)
        return found

    def read_slices(self, job: Job | None, param: Param, is_whole: bool) -> list[tuple[int, Tensor]]:
        """Return the slices of a parameter's gradient that this rank has, each with its start, as flat tensors.

        `is_whole`: the gradients of this rank alone, before they are summed over the ranks, which are of whole
        parameters.
        """
        slices = self._slices(self._settled_tasks(job), param, is_whole)
        return [(start, values.detach().clone()) for start, values in slices]

    def _settled_tasks(self, job: Job | None) -> dict[Bucket, Task]:
        """The tasks of a job by bucket, when the gradients that they have taken can be read."""
        self._device.compute().synchronize()
        if self._executor.sums_on_host:
            self._executor.wait_for_sums()
            self._device.stream("update").synchronize()
        return {task.bucket: task for task in (job.tasks if job is not None else ())}

    def _slices(self, tasks: Mapping[Bucket, Task], param: Param, is_whole: bool) -> Iterator[tuple[int, Tensor]]:
        """The slices of `read_slices`, as views."""
        for bucket in param.buckets:
            task = tasks.get(bucket) or self.task_of(bucket)
            for i, piece in enumerate(bucket.gathered.slices if is_whole else bucket.slices):
                if piece.param != param.index:
                    continue
                source = self._sums.get(bucket.plan.index) if is_whole else self._taken(bucket, i, task)
                if source is not None:
                    yield piece.start, source[piece.offset : piece.offset + piece.numel]

    def _taken(self, bucket: Bucket, index: int, task: Task | None) -> Tensor | None:
        """Return the buffer of a bucket that holds the gradient of a slice; None if there is none."""
        if self._executor.sums_on_host:
            return self._summed(bucket, index, task)
        if task is not None and index in task.present:
            return self._executor.read_grads(task)
        if self.num_parts > 1:
            return self._sums.get(bucket.plan.index)
        return task.flat if task is not None else None

    def _summed(self, bucket: Bucket, index: int, task: Task | None) -> Tensor | None:
        """Return the total of a bucket, if it contains the gradient of a slice, with gradients of an open task."""
        param = bucket.params[index]
        is_submitted = task is not None and any(one is task for one in task.job.tasks)
        if is_submitted and not bucket.is_on_device:
            # The total contains the last backward. The executor keeps it for the update, and `added` is empty.
            return bucket.total if self._sharing is not None or param.was_hit else None
        added = bucket.added if bucket.is_on_device else self._executor.added(bucket)
        total = bucket.total if index in added else None
        if task is None or is_submitted or task.flat is None or not param.hits:
            return total
        open_part = task.flat.float()  # of a late parameter, or of one that shares a bucket with a late one
        return open_part if total is None else total + open_part.to(total.device)

    def task_of(self, bucket: Bucket) -> Task | None:
        """Return the incomplete task of a bucket in this step, or None."""
        return self._open.get(bucket)

    # Norms and the clipping decision.

    def zero_norms(self) -> None:
        """Set all norms on the device to zero at the start of a job, for buckets that get no gradients."""
        self._device.compute().run(self._norms.zero_)

    def new_norms(self, job: Job) -> Tensor:
        """Return zeros on the host, into which the norms of a job are written one by one."""
        return self._host_norms[job.number % 2].zero_()

    def fetch_norms(self, job: Job) -> tuple[Tensor, Event]:
        """Queue a copy of all norms to the host, for the clipping decision. Returns the copy and its event."""
        self._measure_rest()
        compute, norms = self._device.compute(), self._host_norms[job.number % 2]
        compute.run(lambda: norms.copy_(self._norms, non_blocking=True))
        return norms, compute.record()

    def fetch_decision(self, job: Job) -> tuple[Tensor, Tensor, Event]:
        """Queue the clipping decision on the device, and a copy of it to the host.

        Returns the decision on the device, the copy on the host, and the event at which both are valid.
        """
        self._measure_rest()
        compute = self._device.compute()
        there = self._decisions[job.number % 2]
        here = self._host_decisions[job.number % 2]

        def decide() -> None:
            decide_there(there, self._norms, job.scale, job.limits)
            here.copy_(there, non_blocking=True)

        compute.run(decide)
        return there, here, compute.record()

    def _measures_later(self, task: Task) -> bool:
        """Whether the norm of a task is computed in `step`, together with the norms of other such tasks.

        This takes a few kernel launches for all buckets instead of a few for each bucket. It is possible if the
        gradients stay on the device until the clipping decision.
        """
        is_whole = task.flat is not None and len(task.present) == len(task.bucket.slices)
        return is_whole and task.job.limits.any and not self._executor.holds_on_host

    def _measure_rest(self) -> None:
        flats = [(task.bucket.plan.index, task.flat) for task in self._unmeasured if task.flat is not None]
        assert len(flats) == len(self._unmeasured)
        self._unmeasured = []
        if flats:
            self._device.compute().run(partial(pack_gradients.measure_many, self._norms, flats))

    # Sums and tasks.

    def _sum(self, bucket: Bucket) -> Tensor:
        index = bucket.plan.index
        if index not in self._sums:
            self._sums[index] = torch.zeros(bucket.gathered.numel, dtype=torch.float32, device=self._tensor_device)
        return self._sums[index]

    def _task(self, job: Job | None, bucket: Bucket) -> Task:
        """Return the open task of a bucket in this step. The first call makes it, with a flat buffer."""
        task = self._open.get(bucket)
        if task is None:
            assert job is not None
            task = self._open[bucket] = self._new_task(job, bucket)
            task.missing = {param.index for param in bucket.members}
        return task

    def _new_task(self, job: Job, bucket: Bucket) -> Task:
        if self._sharing is None:
            flat = self._executor.take_flat(bucket.plan, self._device.compute())
        else:
            flat = self._sharing.take_flat(bucket)
        return Task(bucket, job, [], [(0, flat)], flat)

    def _submit(self, task: Task) -> None:
        """Submit a task whose gradients are all queued. Queue its norm first, unless the norm is computed elsewhere."""
        if self._sharing is not None:
            return self._share(task, self._sharing)
        task.present.sort()
        bucket, compute, flat = task.bucket, self._device.compute(), task.flat
        norm = self._norm_of[bucket.plan.index]
        if self._executor.sums_on_host:
            pass  # the norm of the total is computed after the sum
        elif self._measures_later(task):
            self._unmeasured.append(task)
        elif flat is not None and len(task.present) == len(bucket.slices):
            compute.run(partial(pack_gradients.measure, norm, flat))
        else:
            cuts = [bucket.slices[i] for i in task.present]
            parts = task.sources if flat is None else [(c.offset, flat[c.offset : c.offset + c.numel]) for c in cuts]
            compute.run(partial(pack_gradients.measure_parts, norm, list(parts), bucket.plan.numel))
        # Matrices are exchanged in the order of their updates, which must be the same on all ranks.
        task.is_held = self._agrees and (bucket.plan.is_matrix or any(param.is_filled for param in bucket.members))
        task.is_held |= task.job.is_dropped  # without limits it would be updated before the job is closed
        task.ready = compute.record()
        self._open.pop(bucket, None)
        task.job.tasks.append(task)
        if bucket.is_on_device:
            self._device_work.submit(task)
        else:
            self._executor.submit(task)

    def _share(self, task: Task, sharing: Sharing) -> None:
        """Give a task to `Sharing`, with zeros for parameters that have no gradient on this rank."""
        bucket, compute, flat = task.bucket, self._device.compute(), task.flat
        assert flat is not None
        empty = [piece for piece in bucket.gathered.slices if piece.param in task.missing]
        if empty:
            self._gather(bucket, partial(pack_gradients.clear, flat, empty))
        task.is_held = not all(param.was_hit for param in bucket.members)
        task.ready = compute.record()
        self._open.pop(bucket, None)
        task.job.tasks.append(task)
        sharing.submit(task)


def _by_bucket(found: Sequence[tuple[Param, Tensor]]) -> dict[Bucket, list[pack_gradients.Piece]]:
    """Return the parts of gradients that belong to each bucket."""
    pieces: dict[Bucket, list[pack_gradients.Piece]] = {}
    for param, grad in found:
        flat = grad.detach().reshape(-1) if grad.requires_grad else grad.reshape(-1)
        for bucket, cuts, _ in param.places:
            into = pieces.setdefault(bucket, [])
            for cut in cuts:
                values = flat if cut.numel == flat.numel() else flat[cut.start : cut.start + cut.numel]
                into.append((cut, values, param.hits == 1))
    return pieces


def _is_shared(grad: Tensor) -> bool:
    """Whether the user may write to the memory of a gradient, because the user holds the tensor or a view of it."""
    storage = grad.untyped_storage()
    users = int(torch._C._storage_Use_Count(storage._cdata))
    return users > 2 or storage.nbytes() != grad.numel() * grad.element_size() or sys.getrefcount(grad) > _FEWEST


def _fewest_references() -> int:
    """Return the reference count that `_is_shared` sees for a gradient to which only its parameter refers.

    The count differs between torch releases.
    """

    def count(grad: Tensor) -> int:
        return sys.getrefcount(grad)

    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    grad = param.grad
    return count(grad)


_FEWEST = _fewest_references()
