"""Where every task of every job stands, and how it moves on. No thread of its own: one lock, and two threads that act.

    waiting   gradients on the device
    flying    on their way to a slot, or there            (mover: starts the copy)
    ahead     updated into a shadow, before the gate      (worker: the update)
    outbox    updated, weights to go back                 (worker, or the gate's decision)
    sent      weights on their way                        (mover: starts the copy)

A task whose update is on the device is `resident` instead of waiting and flying, until the mover starts the update.
The gate's decision keeps or drops what is ahead; a dropped task is waiting (or flying) again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from twinflow.device import Device, Event
from twinflow.offload.bucket import Bucket, Job, Task, Updater
from twinflow.offload.gate import History
from twinflow.offload.shadow import ShadowPool
from twinflow.offload.slots import FlatPool, SlotPool
from twinflow.offload.stages import Stages
from twinflow.offload.sync import ARRIVED, RESIDENT_READY, WEIGHT_SENT

if TYPE_CHECKING:
    from twinflow.offload.frozen import Frozen

POLL_S = 5e-4  # how often a thread looks again that waits for an event: a small part of any copy or update


class Now:
    """An event that has come."""

    def done(self) -> bool:
        """It has."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class AllSummed(Now):
    """The event of a job's gradients being all in their totals, and measured."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def done(self) -> bool:
        """Whether every task is through; on the device, when the stream has come to it."""
        return all(task.is_summed and _is_measured(task) for task in self._job.tasks)


def _is_measured(task: Task) -> bool:
    return not task.bucket.is_on_device or task.arrived is None or task.arrived.done()


class WorkerError(RuntimeError):
    """Something failed in the background; the cause is attached."""


class Board:
    """The state of all jobs. `changed` guards everything here, and every task, bucket and pool."""

    def __init__(
        self,
        device: Device,
        updater: Updater,
        slots: SlotPool,
        weight_slots: SlotPool,
        flats: FlatPool,
        shadows: ShadowPool,
        holds_on_host: bool,
        sums_on_host: bool,
    ) -> None:
        self.changed = threading.Condition()
        self.device, self.updater = device, updater  # the host's: tasks on the device have their bucket's
        self.slots, self.weight_slots, self.flats, self.shadows = slots, weight_slots, flats, shadows
        self.holds_on_host = holds_on_host  # gradients wait for the gate in their slots, not on the device
        self.sums_on_host = sums_on_host  # several backwards make a step, and their gradients are summed as tasks
        self.history = History()
        self.stages = Stages(device)
        self.jobs: list[Job] = []  # with something to come
        self.waiting: list[Task] = []  # in the order their gradients are made
        self.flying: list[Task] = []
        self.resident: list[Task] = []  # gradients on the device, where they will be used
        self.ahead: list[Task] = []
        self.outbox: list[Task] = []
        self.current: Task | None = None  # what the worker updates now, ahead of the gate
        self.frozen: Frozen | None = None  # what somebody still reads of the state as it was
        self.error: BaseException | None = None
        self.is_closing = False

    # Called by the runtime.

    @property
    def unmade_bytes(self) -> int:
        """Page-locked memory that slots may still ask for."""
        return self.slots.unmade_bytes + self.weight_slots.unmade_bytes

    def shadow_bytes(self, bucket: Bucket) -> int:
        """Host memory that an update of this bucket ahead of the gate takes: a spare store, and a slot that waits."""
        slot_bytes = self.weight_slots.slot_bytes if self.updater.needs_weight_slot(bucket.plan) else 0
        return bucket.nbytes + slot_bytes

    def submit(self, task: Task) -> None:
        """A task whose gradients are complete on the device once `task.ready` is done."""
        with self.changed:
            self._know(task.job)
            task.job.num_left += 1
            (self.resident if task.bucket.is_on_device else self.waiting).append(task)
            if self.sums_on_host:
                task.bucket.parts.append(task)
            if self.sums_on_host or task.job.gate.is_open or not task.bucket.is_on_device:
                # else nothing happens before `launch`: each thread that wakes costs backward time
                self.changed.notify_all()

    def submit_sums(self, job: Job, buckets: Iterable[Bucket]) -> None:
        """Tasks for buckets that got gradients in earlier backwards of this step, but none in the last."""
        with self.changed:
            has_task = {task.bucket.plan.index for task in job.tasks}
            for bucket in buckets:
                is_new = bool(bucket.added) and not bucket.is_full  # a full total is an earlier step's
                if bucket.plan.index not in has_task and (bucket.parts or is_new):
                    task = Task(bucket, job, [], arrived=Now())
                    self._know(job)
                    job.num_left += 1
                    job.tasks.append(task)
                    bucket.parts.append(task)
                    (self.resident if bucket.is_on_device else self.flying).append(task)
            self.changed.notify_all()

    def forget_sums(self, buckets: Iterable[Bucket]) -> None:
        """Drop what earlier backwards of this step have given."""
        buckets = list(buckets)
        self.wait_for(lambda: not any(bucket.parts for bucket in buckets))
        with self.changed:
            for bucket in buckets:
                bucket.added.clear()

    def agree(self, job: Job, present: set[int]) -> None:
        """All ranks have said which parameters got a gradient in this job."""
        with self.changed:
            for task in job.tasks:
                if task.is_held:
                    task.agreed = [i for i, piece in enumerate(task.bucket.slices) if piece.param in present]
                    task.is_held = False
                    if not self.sums_on_host or task.is_summed:
                        task.present = task.agreed
            self.changed.notify_all()

    def launch(self, job: Job, decision: Tensor, event: Event) -> None:
        """Queue the updates whose state is on the device, by deadline. They read the decision there: no thread has to
        wait for it, and the next forward waits for them by the order of streams alone."""
        stream = self.device.stream("update")
        with self.changed:
            ready = [t for t in self.resident if t.job is job and t.bucket.updater.reads_decision(t.bucket.plan)]
            if self.frozen is not None:
                ready = []  # somebody still reads the state: the mover waits for that
            ready.sort(key=lambda task: task.deadline)
            for task in ready:
                self.resident.remove(task)
        if ready:
            stream.wait(event, RESIDENT_READY)
        for task in ready:
            bucket = task.bucket
            if bucket.sent_event is not None and WEIGHT_SENT not in self.device.disabled:
                bucket.sent_event.synchronize()  # the last update has read its numbers, which are written anew
            task.grads = task.flat
            update = bucket.updater.prepare(task, 1.0, decision)
            stream.run(update, span="resident", bucket=bucket.plan.index)
            task.arrived = bucket.sent_event = stream.record()
        with self.changed:
            for task in ready:
                job.launched.append(task)
                self._free_gradients(task)
                task.bucket.updated = task.bucket.sent = job.number

    def close_job(self, job: Job, norms: Tensor, event: Event, are_squares: bool = False) -> None:
        """All tasks of the job are submitted; `norms` holds its gradients' norms, or their squares, once `event` is
        done."""
        with self.changed:
            self._know(job)
            job.gate.arm(norms, event, are_squares)
            self.changed.notify_all()

    def release(self, job: Job, after: Event) -> None:
        """The weights of a delayed job may go back, after the event."""
        with self.changed:
            job.after, job.is_released = after, True
            self.changed.notify_all()

    def hold_back(self, tasks: list[Task]) -> None:
        """Weights that are in the state already and wait for their job's release."""
        with self.changed:
            for task in tasks:
                updater = task.bucket.updater
                if task.present and updater.needs_weight_slot(task.bucket.plan):
                    task.weight_slot = self.weight_slots.take()
                    assert task.weight_slot is not None
                if task.present:
                    updater.publish(task)
                task.bucket.updated = task.job.number
                task.bucket.sent = task.bucket.published = task.bucket.due = task.job.number - 1
                self.outbox.append(task)

    def publish_again(self, bucket: Bucket) -> None:
        """Its state has moved: weights of a delayed update that are still to be sent come from the new place."""
        with self.changed:
            for task in (task for task in self.outbox if task.bucket is bucket and task.present):
                self.free_shadow(task)
                if bucket.updater.needs_weight_slot(bucket.plan):
                    task.weight_slot = self.weight_slots.take(may_grow=True)
                bucket.updater.publish(task)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Block until the condition holds; raise at once if a thread has failed."""
        with self.changed:
            while not condition():
                self.check()
                self.changed.wait(1.0)

    def check(self) -> None:
        """Raise if a thread or a stream has failed, or there is none any more."""
        error = self.error or self.device.error
        if error is not None:
            raise WorkerError(f"the offload worker failed: {error!r}") from error
        if self.is_closing:
            raise RuntimeError("the optimizer is closed: build a new one to go on training")

    def hold(self, event: Event, point: str) -> None:
        """Let the model wait for an event."""
        try:
            self.device.hold_compute(event, point)
        except Exception:
            self.check()
            raise

    def gives_flats(self) -> bool:
        """Whether a flat buffer will come back whatever the runtime does."""
        # The others wait for the rest of the gradients, or for a step that sends what was updated before.
        begun = (t for t in self.resident if t.job.gate.is_open and t.bucket.sent >= t.bucket.updated)
        tasks = (*self.waiting, *self.flying, *self.ahead, *begun)
        return any(task.flat is not None and not self._is_stuck(task) for task in tasks)

    def _is_stuck(self, task: Task) -> bool:
        """Whether it waits for the ranks to agree, which they do when all buckets of the step have come."""
        return task.is_held and not self.sums_on_host

    def _know(self, job: Job) -> None:
        if job not in self.jobs:
            self.jobs.append(job)

    # What a task may do. Called with the lock held, as is all that follows.

    def is_there(self, event: Event | None, point: str) -> bool:
        """Whether an event has come, as far as the sync point is not switched off."""
        return event is not None and (point in self.device.disabled or event.done())

    def is_allowed(self, task: Task) -> bool:
        """Whether it may be updated (or first summed) once its gradients are there."""
        is_to_sum = self.sums_on_host and not task.is_summed
        return is_to_sum or (not task.is_held and (task.job.gate.is_open or task.shadow is not None))

    def may_update(self, task: Task) -> bool:
        """Whether it can be updated now."""
        bucket = task.bucket
        if not self.is_allowed(task) or not self.is_there(task.arrived, ARRIVED):
            return False
        if self.sums_on_host and not task.is_summed:  # one after the other, so that the sum is always the same
            return bucket.parts[0] is task and not bucket.is_full
        return self._may_change(bucket)

    def _may_change(self, bucket: Bucket) -> bool:
        """Weights may be sent from the state itself: it must not change before they are, nor before somebody has read
        it who was promised that it would not."""
        is_there = bucket.sent_event is None or self.is_there(bucket.sent_event, WEIGHT_SENT)
        return bucket.sent >= bucket.updated and is_there and (self.frozen is None or self.frozen.allows(bucket))

    def may_update_there(self, task: Task) -> bool:
        """The same for a task whose update is on the device, where the stream waits for the gradients."""
        bucket = task.bucket
        if self.sums_on_host and not task.is_summed:
            return bucket.parts[0] is task and not bucket.is_full
        return task.job.gate.is_open and not task.is_held and self._may_change(bucket)

    def reserve(self, task: Task) -> bool:
        """Find a shadow for an update ahead of the gate."""
        bucket = task.bucket
        is_whole = 0 < len(task.present) == len(bucket.slices)  # a swap of stores would lose the slices left alone
        may_run_ahead = task.job.may_run_ahead and not task.is_held
        if not (may_run_ahead and self.updater.can_shadow and is_whole and self.history.speculates):
            return False
        task.shadow = self.shadows.take(bucket.plan, self.shadow_bytes(bucket))
        return task.shadow is not None

    # How it moves on.

    def summed(self, task: Task) -> None:
        """The bucket's total has taken a task's gradients in; the last of a step goes on to the update."""
        bucket = task.bucket
        bucket.parts.remove(task)
        bucket.added.update(task.present)
        self._free_gradients(task)
        if task.job.is_part:
            self._finish(task)
            return
        task.is_summed = bucket.is_full = True
        task.present = sorted(bucket.added) if task.agreed is None else task.agreed
        task.grads = bucket.total
        (self.resident if bucket.is_on_device else self.flying).append(task)

    def updated(self, task: Task, was_ahead: bool) -> None:
        """The worker is done with a task."""
        gate = task.job.gate
        if not was_ahead:
            self._keep(task)
            return
        if not self.holds_on_host:
            self._free_slot(task)
        if gate.decision is None:
            self.ahead.append(task)
        else:  # the gate has decided meanwhile
            self._settle(task)

    def decide(self, job: Job) -> None:
        """The norms are there: keep or drop what ran ahead."""
        gate, ahead = job.gate, sorted((t for t in self.ahead if t.job is job), key=lambda t: t.deadline)
        decision = gate.resolve()
        self.ahead = [task for task in self.ahead if task.job is not job]
        if gate.limits.any:
            self.history.note(decision)
            num_ahead = len(ahead) + (self.current is not None and self.current.job is job)
            is_kept = decision.factor == 1.0 / gate.scale and not decision.skip
            gate.counts = {
                "speculated": num_ahead,
                "dropped": 0 if is_kept else num_ahead,
                "held": job.num_left - num_ahead,
            }
        if decision.skip:
            ahead += [t for t in (*self.waiting, *self.flying, *self.resident) if t.job is job]
            for tasks in (self.waiting, self.flying, self.resident):
                tasks[:] = [t for t in tasks if t.job is not job]
        for task in ahead:
            self._settle(task)
        for task in job.launched:
            for i in task.present if not decision.skip else ():
                task.bucket.steps[i] += 1
            job.num_left -= 1
        job.launched.clear()
        self._forget_done(job)

    def _settle(self, task: Task) -> None:
        """Keep, redo or drop a task after the decision."""
        decision, gate = task.job.gate.decision, task.job.gate
        assert decision is not None
        if decision.skip:
            self._drop(task)
        elif decision.factor == 1.0 / gate.scale:
            self._swap(task)
            self._keep(task)
        else:
            self.free_shadow(task)
            (self.flying if task.slot is not None else self.waiting).append(task)  # the gradients are still there

    def _swap(self, task: Task) -> None:
        """The shadow becomes the state, the old state the next shadow."""
        assert task.shadow is not None
        self.shadows.give(task.bucket.plan, task.bucket.store)
        task.bucket.store, task.shadow = task.shadow, None

    def _keep(self, task: Task) -> None:
        """The update is final: count it, free what it used, send the weights."""
        bucket = task.bucket
        self._free_gradients(task)
        for i in task.present:
            bucket.steps[i] += 1
        bucket.updated = task.job.number
        self.outbox.append(task)
        self._finish(task)

    def _drop(self, task: Task) -> None:
        """Nothing of this task happens: state and weights stay as they are, bit for bit."""
        self.free_shadow(task)
        self._free_gradients(task)
        if not task.job.gate.is_dropped:  # else it was no step, and nobody waits for it
            task.bucket.updated = task.job.number
            self.outbox.append(task)  # with no weights: whoever waits for this job goes on
        self._finish(task)

    def _finish(self, task: Task) -> None:
        task.job.num_left -= 1
        self._forget_done(task.job)

    def _forget_done(self, job: Job) -> None:
        if job.gate.norms is None and job.is_done and job in self.jobs:
            self.jobs.remove(job)

    def free_shadow(self, task: Task) -> None:
        """Give a shadow back, and the slot for the weights that would come with it."""
        if task.shadow is not None:
            self.shadows.give(task.bucket.plan, task.shadow)
            task.shadow = None
        if task.weight_slot is not None:
            self.weight_slots.give(task.weight_slot)
        task.weight_slot, task.weights = None, ()

    def _free_gradients(self, task: Task) -> None:
        self._free_slot(task)
        if task.flat is not None:
            self.flats.give(task.bucket.plan, task.flat, task.arrived)
            task.flat = None
        task.sources.clear()
        task.grads = None
        if task.is_summed:
            task.bucket.is_full = False
            task.bucket.added.clear()

    def _free_slot(self, task: Task) -> None:
        if task.slot is not None:
            self.slots.give(task.slot, task.arrived)
            task.slot = task.grads = None
