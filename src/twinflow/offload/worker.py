"""The thread that moves gradients out, updates on the host, and sends weights back.

One thread does all three: starting a copy takes microseconds, and slots are freed by its own updates, so nothing ever
waits for a slot that another thread holds. It takes, of the gradients that have *arrived*, the one whose weight the
next forward needs first. Python runs far ahead of a GPU: that a hook has run says nothing about a gradient being there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from twinflow.device import Device, Event
from twinflow.offload.bucket import Job, Task
from twinflow.offload.gate import History
from twinflow.offload.shadow import ShadowPool
from twinflow.offload.slots import FlatPool, Slot, SlotPool
from twinflow.offload.updater import Updater

# Sync points: each is a wait whose absence gives wrong results, and a test that switches it off sees them.
GRAD_READY: Final = "out.grad_ready"  # the copy out starts when the gradients are complete
ARRIVED: Final = "update.arrived"  # the update starts when the gradients are on the host
NORMS: Final = "gate.norms"  # the decision is made when all norms are on the host
WEIGHT_SENT: Final = "update.weight_sent"  # the state that weights are sent from is written when they are sent
WEIGHT_SLOT: Final = "back.slot"  # a weight slot is used again when its weights are sent
OLD_WEIGHTS: Final = "back.old_weights"  # delayed: weights go back when nobody needs the old ones any more


class WorkerError(RuntimeError):
    """Something failed in the background; the cause is attached."""


class Worker:
    """Owns the copies and updates of all jobs.

    The lock of `changed` guards jobs, tasks, buckets and flats. Slots and shadows belong to the worker's thread alone.
    """

    def __init__(
        self,
        device: Device,
        updater: Updater,
        slots: SlotPool,
        weight_slots: SlotPool,
        flats: FlatPool,
        shadows: ShadowPool,
        holds_on_host: bool,
    ) -> None:
        self.changed = threading.Condition()
        self.history = History()
        self.bytes_out = self.bytes_back = 0
        self._device = device
        self._updater = updater
        self._slots, self._weight_slots, self.flats, self.shadows = slots, weight_slots, flats, shadows
        self._holds_on_host = holds_on_host  # gradients wait for the gate in their slots, not on the device
        self._jobs: list[Job] = []  # with updates to come
        self._waiting: list[Task] = []  # gradients on the device, in the order they are made
        self._flying: list[Task] = []  # gradients on their way to a slot, or there
        self._ahead: list[Task] = []  # updated into shadows, before the gate
        self._unsent: list[Task] = []  # updated, weights not released yet
        self._error: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="twinflow-worker", daemon=True)
        self._thread.start()

    # Called by other threads.

    def submit(self, task: Task) -> None:
        """A task whose gradients are complete on the device once `task.ready` is done."""
        with self.changed:
            if task.job not in self._jobs:
                self._jobs.append(task.job)
            task.job.num_left += 1
            self._waiting.append(task)
            self.changed.notify_all()

    def close_job(self, job: Job, norms: Tensor, event: Event) -> None:
        """All tasks of the job are submitted; `norms` holds its gradients' norms once `event` is done."""
        with self.changed:
            job.gate.arm(norms, event)
            if job not in self._jobs:
                self._jobs.append(job)
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
                plan = task.bucket.plan
                if self._updater.needs_weight_slot(plan):
                    task.weight_slot = self._weight_slots.wait()
                self._updater.publish(task)
                task.bucket.updated = task.job.number
                self._unsent.append(task)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Block until the condition holds; raise at once if the worker has failed."""
        with self.changed:
            while not condition():
                self.check()
                self.changed.wait(1.0)

    def check(self) -> None:
        """Raise if the worker has failed."""
        if self._error is not None:
            raise WorkerError(f"the offload worker failed: {self._error!r}") from self._error

    def close(self) -> None:
        """End the thread after what it does now."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The worker's own thread.

    @torch.no_grad()
    def _loop(self) -> None:
        try:
            while True:
                with self.changed:
                    action = self._next()
                    while action is None and not self._closing:
                        self.changed.wait()
                        action = self._next()
                    if self._closing:
                        return
                assert action is not None
                action()
        except BaseException as error:  # handed to whoever calls next
            with self.changed:
                self._error = error
                self.changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """What to do now; None: nothing until somebody notifies. Called with the lock held."""
        for job in list(self._jobs):
            if job.gate.norms is not None and self._is_there(job.gate.norms[1], NORMS):
                self._decide(job)
        self._send_released()
        self._fill_slots()
        task = min((t for t in self._flying if self._may_update(t)), key=lambda t: t.deadline, default=None)
        if task is not None:
            self._flying.remove(task)
            return lambda: self._update(task)
        event = self._next_event()
        return None if event is None else event.synchronize

    def _is_there(self, event: Event | None, point: str) -> bool:
        return event is not None and (point in self._device.disabled or event.done())

    def _next_event(self) -> Event | None:
        """What to sleep on: the first event that may make an update possible."""
        for task in self._flying:
            if self._is_allowed(task) and task.arrived is not None and not task.arrived.done():
                return task.arrived
            if self._is_allowed(task) and task.bucket.sent_event is not None and not task.bucket.sent_event.done():
                return task.bucket.sent_event
        gates = (job.gate.norms for job in self._jobs)
        return next((norms[1] for norms in gates if norms is not None), None)

    # Out: device to slot.

    def _fill_slots(self) -> None:
        """Start as many copies as there are slots: complete gradients by deadline, then the next to be complete."""
        while self._waiting:
            task = self._candidate()
            if task is None:
                return
            slot = self._slots.take()
            if slot is None:
                self._release(task)
                return
            self._waiting.remove(task)
            self._start_copy(task, slot)

    def _candidate(self) -> Task | None:
        complete = []
        for task in self._waiting:
            if not task.is_complete and task.ready is not None and not task.ready.done():
                break  # gradients are made in this order: none behind it is complete
            task.is_complete = True  # asked once: with a hundred tasks the asking would cost more than starting a copy
            complete.append(task)
        for task in [*sorted(complete, key=lambda t: t.deadline), *self._waiting[len(complete) :]]:
            if self._is_allowed(task) or self._holds_on_host or self._reserve(task):
                return task
        return None

    def _is_allowed(self, task: Task) -> bool:
        """Whether it may be updated once its gradients are there."""
        return task.job.gate.is_open or task.shadow is not None

    def _reserve(self, task: Task) -> bool:
        """Find a shadow for an update ahead of the gate."""
        bucket, updater = task.bucket, self._updater
        is_whole = len(task.present) == len(bucket.slices)  # a swap of stores would lose the slices left alone
        if not (task.job.may_run_ahead and updater.can_shadow and is_whole and self.history.speculates):
            return False
        task.shadow = self.shadows.take(bucket.plan.layout, bucket.nbytes, lambda: updater.new_shadow(bucket.plan))
        return task.shadow is not None

    def _release(self, task: Task) -> None:
        """Give a shadow back, and the slot for the weights that would come with it."""
        if task.shadow is not None:
            self.shadows.give(task.bucket.plan.layout, task.shadow)
            task.shadow = None
        if task.weight_slot is not None:
            self._weight_slots.give(task.weight_slot)
            task.weight_slot, task.weights = None, ()

    def _start_copy(self, task: Task, slot: Slot) -> None:
        sources = list(task.sources)
        task.slot = slot
        task.grads = grads = slot.view(sources[0][1].dtype, task.bucket.plan.numel)
        stream = self._device.stream("out")

        def copy() -> None:
            for offset, source in sources:
                into = grads if source.numel() == grads.numel() else grads[offset : offset + source.numel()]
                into.copy_(source, non_blocking=True)

        assert task.ready is not None
        stream.wait(task.ready, GRAD_READY)
        stream.run(copy, span="out", bucket=task.bucket.plan.index)
        task.arrived = stream.record()
        self.bytes_out += sum(source.numel() * source.element_size() for _, source in sources)
        self._flying.append(task)
        if task.flat is not None and (task.job.gate.is_open or self._holds_on_host):
            self.flats.give(task.flat, task.arrived)  # nobody will need it again
            task.flat = None
            self.changed.notify_all()

    # Update.

    def _may_update(self, task: Task) -> bool:
        bucket = task.bucket
        if not self._is_allowed(task) or not self._is_there(task.arrived, ARRIVED):
            return False
        # Weights may be sent from the state itself: it must not change before they are.
        is_sent = bucket.sent_event is None or self._is_there(bucket.sent_event, WEIGHT_SENT)
        return bucket.sent >= bucket.updated and is_sent

    def _update(self, task: Task) -> None:
        """One bucket: ahead of the gate into its shadow, else in place. Runs without the lock."""
        is_ahead, plan = not task.job.gate.is_open, task.bucket.plan
        if not is_ahead:
            self._release(task)
        if self._updater.needs_weight_slot(plan):
            # Ahead of the gate it stays in use until that opens: more may be made, so that others are never short.
            task.weight_slot = self._weight_slots.wait(may_grow=is_ahead)
        with self._device.trace.span("ahead" if is_ahead else "update", track="host", bucket=plan.index):
            self._updater.update(task, task.job.gate.factor)
        with self.changed:
            if is_ahead:
                self._ahead.append(task)
                task.job.gate.counts["speculated"] += 1
                if not self._holds_on_host:
                    self._free_slot(task)
            else:
                self._keep(task)
            self.changed.notify_all()

    def _free_slot(self, task: Task) -> None:
        if task.slot is not None:
            self._slots.give(task.slot)
            task.slot = task.grads = None

    def _keep(self, task: Task) -> None:
        """The update is final: count it, free what it used, send the weights."""
        bucket, job = task.bucket, task.job
        self._free_slot(task)
        if task.flat is not None:
            self.flats.give(task.flat, None)  # read to its end: its gradients have arrived
            task.flat = None
        task.sources.clear()
        for i in task.present:
            bucket.steps[i] += 1
        bucket.updated = job.number
        self._finish(task)
        if job.is_released:
            self._send(task)
        else:
            self._unsent.append(task)

    def _finish(self, task: Task) -> None:
        task.job.num_left -= 1
        if task.job.gate.norms is None and task.job.is_done and task.job in self._jobs:
            self._jobs.remove(task.job)

    # The gate.

    def _decide(self, job: Job) -> None:
        """The norms are there: keep or drop what ran ahead."""
        start = time.perf_counter()
        gate, ahead = job.gate, sorted((t for t in self._ahead if t.job is job), key=lambda t: t.deadline)
        expected = gate.factor
        decision = gate.resolve()
        self._ahead = [task for task in self._ahead if task.job is not job]
        if gate.limits.any:
            self.history.note(decision)
            gate.counts["held"] = job.num_left - len(ahead)
        if decision.skip:
            self._drop_all(job, ahead)
        elif decision.factor == expected:
            for task in ahead:
                self._swap(task)
                self._keep(task)
        else:
            gate.counts["dropped"] = len(ahead)
            for task in ahead:
                self._redo(task)
        if job.is_done and job in self._jobs:
            self._jobs.remove(job)
        self._device.trace.add("gate", "host", start, time.perf_counter(), job=job.number)
        self.changed.notify_all()

    def _swap(self, task: Task) -> None:
        """The shadow becomes the state, the old state the next shadow."""
        assert task.shadow is not None
        self.shadows.give(task.bucket.plan.layout, task.bucket.store)
        task.bucket.store, task.shadow = task.shadow, None

    def _redo(self, task: Task) -> None:
        """Throw a shadow away; the gradients are still in their slot or on the device."""
        self._release(task)
        if task.slot is not None:
            self._flying.append(task)
        else:
            self._waiting.append(task)

    def _drop_all(self, job: Job, ahead: list[Task]) -> None:
        """Nothing of this step happens: state and weights stay as they are, bit for bit."""
        mine = [t for t in (*self._waiting, *self._flying) if t.job is job]
        self._waiting = [t for t in self._waiting if t.job is not job]
        self._flying = [t for t in self._flying if t.job is not job]
        for task in (*ahead, *mine):
            self._release(task)
            if task.slot is not None:
                self._slots.give(task.slot, task.arrived)
                task.slot = task.grads = None
            if task.flat is not None:
                self.flats.give(task.flat, task.arrived)
                task.flat = None
            if job.is_released:
                task.bucket.sent = max(task.bucket.sent, job.number)
            else:
                self._unsent.append(task)
            task.bucket.updated = job.number
            job.num_left -= 1

    # Back: host to parameter.

    def _send_released(self) -> None:
        """Delayed weights whose time has come, by deadline."""
        ready = [task for task in self._unsent if task.job.is_released]
        self._unsent = [task for task in self._unsent if not task.job.is_released]
        for task in sorted(ready, key=lambda t: t.deadline):
            self._send(task)
        if ready:
            self.changed.notify_all()

    def _send(self, task: Task) -> None:
        """Copy the new weights into the parameters."""
        bucket, job = task.bucket, task.job
        if task.weights:  # a dropped task has none
            event = self._copy_back(task, job.after)
            if task.weight_slot is not None:
                self._weight_slots.give(task.weight_slot, event)
            task.weight_slot, task.weights = None, ()
        bucket.sent = max(bucket.sent, job.number)

    def _copy_back(self, task: Task, after: Event | None) -> Event:
        bucket, stream = task.bucket, self._device.stream("in")
        targets = [bucket.targets[i] for i in task.present]
        weights = [task.weights[i] for i in task.present]
        weights = [w if t.dim() == 1 else w.view(t.shape) for t, w in zip(targets, weights, strict=True)]

        def copy() -> None:
            torch._foreach_copy_(targets, weights, non_blocking=True)
            for i in task.present:
                param = bucket.params[i]
                param.version = param.tensor._version

        if after is not None:
            stream.wait(after, OLD_WEIGHTS)
        stream.run(copy, span="in", bucket=bucket.plan.index)
        bucket.sent_event = stream.record()
        self.bytes_back += sum(bucket.slices[i].numel for i in task.present) * bucket.plan.dtype.itemsize
        return bucket.sent_event
