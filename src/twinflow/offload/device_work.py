# SPDX-License-Identifier: Apache-2.0
"""Updates of state on the device, and sums of gradients there. Threads queue this work on streams. Streams and events
order it.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step, and a task is the work for one bucket in a job.

twinflow's kernels read the clipping decision from device memory, so nothing waits for the host. Two kinds of updates
need the decision as a number on the host: updates by a user's own optimizer, and updates whose norm the host computes
(`sums_on_host`). The thread of `LateUpdates` waits for the decision and queues these updates.

Threads: autograd's thread (or the user's thread in `step`) and the reducer submit tasks. The user's thread, the reducer
or the norm reducer calls `close_job`. `LateUpdates` has a thread of its own. The lock `DeviceWork._lock` guards
`Job.on_device`, `Job.unsent` and all fields here. A thread that needs this lock and `Executor.changed` acquires this
lock first. A thread may hold the lock while it waits for the last update of a bucket or for a background checkpoint
that reads the state (frozen.py). A sum that waits for the update of an earlier step releases the lock. Methods that run
only between steps do not acquire it (`hold_back`, `forget_sums`).

Order: an update waits for its gradients (`Task.ready`), for the decision on the device, and for its state if the state
is copied from the host. If blocks fetch the weights of streamed state, the copy back to the host waits for the last
fetch, and the next fetch waits for this copy. The flat buffer of the gradients is free after the update. With a delayed
update the new weights stay in the state until the next step releases the job. They are then copied into the parameters,
and only after that may the next update write to the state.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from twinflow.device import Device, Event, Stream
from twinflow.offload import pack_gradients
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.frozen import FrozenState
from twinflow.offload.job import DeviceOptimizer, Job, Task
from twinflow.offload.plan import STREAMED, Slice
from twinflow.offload.staging import Stages
from twinflow.offload.sync import FLAT_FREE, OLD_WEIGHTS, RESIDENT_READY, STORED, WEIGHT_SENT

_CHECK_S = 1.0  # a thread that waits for another one looks for failures this often


class DeviceWork:
    """Queues the updates and sums of one executor's buckets on the device."""

    def __init__(self, device: Device, executor: Executor, frozen: FrozenState) -> None:
        self._device = device
        self._executor = executor
        self._frozen = frozen
        self._stages = Stages(device)
        self._lock = threading.RLock()
        self._updated: dict[Bucket, Event] = {}  # the end of the last update of each bucket
        # By job whose updates read the decision in device memory: the end of its last update on each stream.
        self._readers: dict[Job, dict[Stream, Event]] = {}
        self._uncounted: list[Task] = []  # tasks that were queued before their decision was known on the host
        self._late: LateUpdates | None = None
        self._late_jobs: list[Job] = []  # closed jobs whose updates wait for the decision on the host
        self._started = threading.Condition(self._lock)  # notified when updates of a late job are queued or dropped

    def close(self) -> None:
        """End the thread of `LateUpdates`, if there is one."""
        if self._late is not None:
            self._late.close()

    def submit(self, task: Task) -> None:
        """Take over a task. Its gradients are complete on the device once the event `task.ready` is done."""
        with self._lock:
            if self._executor.sums_on_host:
                self._wait_for_total(task)
                self._add(task)
                if task.job.is_part:
                    return
            task.job.on_device.append(task)
            # The weights of a delayed job stay in the state until the next step, which releases them before it calls
            # `close_job`. An update of the next step must not be queued before that.
            if not task.job.limits.any and not task.is_held and not task.job.is_delayed:
                self._start([task], None, None)

    def agree(self, job: Job, present: set[int]) -> None:
        """Set which slices have a gradient, for tasks that waited until the gradients of other ranks were known.

        `present`: indices of the parameters with a gradient on at least one rank.
        """
        with self._lock:
            for task in job.on_device:
                if task.is_held:
                    task.present = [i for i, piece in enumerate(task.bucket.slices) if piece.param in present]
                    task.is_held = False

    def close_job(self, job: Job, decision: Tensor | None, event: Event | None) -> None:
        """Queue a job's updates by deadline. `LateUpdates` queues those that need the decision on the host.

        `decision`: the clipping decision in device memory, which is valid once `event` is done. None: the updates use
        the decision on the host, now or when it is known.
        """
        with self._lock:
            tasks = sorted(job.on_device, key=lambda task: task.deadline)
            known = job.decision if job.limits.any else None
            if job.is_dropped or (known is not None and known.skip):
                self._drop(job)
            elif job.is_open or decision is not None:
                early = [task for task in tasks if job.is_open or _optimizer(task.bucket).reads_decision]
                self._start(early, decision if not job.is_open else None, event)
            if job.on_device:
                self._late = self._late or LateUpdates(self._executor, self._start_late)
                self._late_jobs.append(job)
                self._late.put(job)

    def _start_late(self, job: Job) -> None:
        with self._lock:
            decision = job.decision
            assert decision is not None
            if decision.skip:
                self._drop(job)
            else:
                self._start(sorted(job.on_device, key=lambda task: task.deadline), None, None)
            self._late_jobs.remove(job)
            self._started.notify_all()

    def _drop(self, job: Job) -> None:
        """Discard the updates of a job that is dropped or skipped. Forwards do not wait for its weights any more."""
        for task in job.on_device:
            self._give_flat(task, None)
            self._forget_sum(task)
            if not job.is_dropped:
                self._executor.note_sent(task.bucket, job.number, None)
        job.on_device.clear()

    def release(self, job: Job) -> None:
        """Copy the weights of a delayed job into the parameters. Call `Executor.release` before."""
        with self._lock:
            for task in job.unsent:
                self._frozen.wait_until_read(task.bucket)
                self._send(task)
            job.unsent.clear()

    def hold_back(self, task: Task) -> None:
        """Note that new weights are in the state. They are copied into the parameters when the job is released."""
        bucket = task.bucket
        task.weights = _optimizer(bucket).publish(bucket)
        task.job.unsent.append(task)
        self._executor.set_unsent(bucket, task.job.number)

    def count_steps(self) -> None:
        """Count the updates whose clipping decision has become known.

        The scalars of the next update depend on the counts, and `state_dict` reads them.
        """
        with self._lock:
            left = []
            for task in self._uncounted:
                decision = task.job.decision
                if decision is None:
                    left.append(task)
                elif not decision.skip:
                    _count(task)
            self._uncounted = left

    def wait_for_readers(self, job: Job) -> None:
        """Block until the updates of a job have read its decision in device memory, which the next job overwrites."""
        with self._lock:
            events = self._readers.pop(job, {}).values()
        for event in events:
            event.synchronize()

    # Sums of several backwards.

    def _add(self, task: Task) -> None:
        stream = self._device.stream("update")
        if task.ready is not None:
            stream.wait(task.ready, RESIDENT_READY)
        bucket = task.bucket
        last = self._updated.get(bucket)
        if last is not None:  # a streamed update reads the total on another stream, and no forward may have waited
            stream.wait(last, FLAT_FREE)
        stream.run(_sum(task, stream), span="sum", bucket=bucket.plan.index)
        bucket.added.update(task.present)
        self._give_flat(task, stream.record())
        if not task.job.is_part:
            task.is_summed = True
            if not task.is_held:
                task.present = sorted(bucket.added)

    def _wait_for_total(self, task: Task) -> None:
        """Block until no earlier job needs the total of the bucket. The forward of a delayed job does not wait for the
        update of the job before, so that the total may still be the gradient of that update.
        """
        while any(one.bucket is task.bucket for job in self._late_jobs if job is not task.job for one in job.on_device):
            self._started.wait(_CHECK_S)
            self._executor.check()  # nobody notifies if a thread has failed

    def add_nothing(self, job: Job, bucket: Bucket) -> Task | None:
        """Submit a task for a bucket that got gradients in earlier backwards of this step and none in the last one.

        Returns None if the bucket got no gradients at all.
        """
        if not bucket.added:
            return None
        task = Task(bucket, job, [])
        self.submit(task)
        return task

    def forget_sums(self, buckets: Iterable[Bucket]) -> None:
        """Discard the sums of earlier backwards of this step."""
        for bucket in buckets:
            bucket.added.clear()

    # Updates.

    def _start(self, tasks: Sequence[Task], decision: Tensor | None, event: Event | None) -> None:
        self.count_steps()
        for task in tasks:
            bucket, job = task.bucket, task.job
            job.on_device.remove(task)
            if not task.present:  # no rank has a gradient for this rank's part
                self._give_flat(task, None)
                self._forget_sum(task)
                if job.is_released:
                    self._send(task)
                else:  # other ranks' parts may have gradients; those ranks send their weights after the release
                    job.unsent.append(task)
                continue
            self._frozen.wait_until_read(bucket)
            last = self._updated.get(bucket)
            if last is not None and WEIGHT_SENT not in self._device.disabled:
                last.synchronize()  # the last update reads its scalars from memory that is overwritten below
            self._queue(task, decision, event)

    def _queue(self, task: Task, decision: Tensor | None, event: Event | None) -> None:
        bucket, job = task.bucket, task.job
        index = bucket.plan.index
        stage = None
        if bucket.plan.place == STREAMED:
            stage = self._stages.of(index) if bucket.offloads_params else self._stages.next()
        stream = stage.stream if stage is not None else self._device.stream("update")
        task.grads = bucket.total if task.is_summed else task.flat
        factor = 1.0 if decision is not None else job.factor
        passage = _optimizer(bucket).passage(task, factor, decision, stage)
        if passage.load is not None:
            if bucket.stored is not None:
                stream.wait(bucket.stored, STORED)
            stream.run(passage.load, span="state in", bucket=index)
        if event is not None:
            stream.wait(event, RESIDENT_READY)
        if task.is_summed and stage is not None:
            stream.wait(self._device.stream("update").record(), RESIDENT_READY)  # the stream that made the sum
        elif task.ready is not None:
            stream.wait(task.ready, RESIDENT_READY)
        stream.run(passage.update, span="resident" if stage is None else "streamed", bucket=index)
        updated = self._updated[bucket] = stream.record()
        if decision is not None:
            self._readers.setdefault(job, {})[stream] = updated
        if passage.store is not None:
            fetched = self._executor.weights_copied_event(bucket) if bucket.offloads_params else None
            if fetched is not None:
                stream.wait(fetched, WEIGHT_SENT)
            stream.run(passage.store, span="state out", bucket=index)
            bucket.stored = stream.record()
        self._give_flat(task, updated)
        task.weights = passage.weights
        self._forget_sum(task)
        if decision is None:  # the host knows that the update is not skipped
            _count(task)
        else:
            self._uncounted.append(task)
        if not task.weights:
            self._executor.note_sent(bucket, job.number, bucket.stored if bucket.offloads_params else updated)
            return
        self._executor.note_updated(bucket, job.number)
        if job.is_released:
            self._send(task)
        else:
            job.unsent.append(task)

    def _send(self, task: Task) -> None:
        """Copy new weights into the parameters."""
        if not task.present:
            self._executor.note_sent(task.bucket, task.job.number, None)
            return
        bucket, stream = task.bucket, self._device.stream("update")
        targets = [bucket.targets[i] for i in task.present]
        weights = [task.weights[i].view(target.shape) for i, target in zip(task.present, targets, strict=True)]
        params = [bucket.params[i] for i in task.present]

        def copy() -> None:
            torch._foreach_copy_(targets, weights, non_blocking=True)
            for param in params:
                param.note_write()

        if task.job.after is not None:
            stream.wait(task.job.after, OLD_WEIGHTS)
        stream.run(copy, span="in", bucket=bucket.plan.index)
        self._executor.note_sent(bucket, task.job.number, stream.record())
        task.weights = ()

    def _give_flat(self, task: Task, read_until: Event | None) -> None:
        if task.flat is not None:
            with self._executor.changed:
                self._executor.flats.give(task.bucket.plan, task.flat, read_until or task.ready)
        task.flat = None
        task.sources.clear()
        task.grads = None

    def _forget_sum(self, task: Task) -> None:
        if task.is_summed:
            task.bucket.added.clear()


class LateUpdates:
    """A thread that waits until the clipping decision is known on the host, and then queues updates on the device."""

    def __init__(self, executor: Executor, start: Callable[[Job], None]) -> None:
        self._executor = executor
        self._start = start
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="twinflow-late-updates", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Give a job with updates to the thread, which queues them."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after it has processed the jobs that it has got."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._executor.wait_for_decision(job)
                self._start(job)
                del job
        except BaseException as error:
            if not self._executor.is_closing:
                self._executor.fail(error)


def _optimizer(bucket: Bucket) -> DeviceOptimizer:
    updater = bucket.updater
    assert updater.is_on_device
    return updater  # type: ignore[return-value]  # an updater with `is_on_device` is a DeviceOptimizer


def _count(task: Task) -> None:
    for i in task.present:
        task.bucket.steps[i] += 1


def _sum(task: Task, stream: Stream) -> Callable[[], None]:
    """Return a function that adds a task's gradients to the total of its bucket.

    At the last backward of a step the function also computes the norm of the total.
    """
    bucket, flat, norms = task.bucket, task.flat, task.job.norms
    in_total = bucket.added.union(task.present)
    new = [bucket.slices[i] for i in task.present if i not in bucket.added]
    known = [bucket.slices[i] for i in task.present if i in bucket.added]
    cuts = [bucket.slices[i] for i in sorted(in_total)]
    is_whole = len(in_total) == len(bucket.slices)
    if bucket.total is None:
        assert flat is not None
        bucket.total = stream.zeros(bucket.plan.numel, torch.float32, flat.device)
    measured = norms[bucket.plan.index] if norms is not None and not task.job.is_part else None
    return partial(_add_and_measure, bucket.total, flat, new, known, measured, cuts, is_whole)


def _add_and_measure(
    total: Tensor,
    flat: Tensor | None,
    new: Sequence[Slice],
    known: Sequence[Slice],
    norm: Tensor | None,
    cuts: Sequence[Slice],
    is_whole: bool,
) -> None:
    if flat is not None:
        pack_gradients.add_on_device(total, flat, new, known)
    if norm is not None:
        pack_gradients.measure_total(norm, total, cuts, is_whole)
