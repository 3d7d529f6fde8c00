"""The two threads that act on the board: the worker updates, the mover copies and decides.

The worker's Python between two kernels is lost time, so it only picks and updates; the mover does the rest while a
kernel runs, which holds no interpreter lock. The worker takes, of the gradients that have *arrived*, the one whose
weight the next forward needs first. Python runs far ahead of a GPU: that a hook has run says nothing about a gradient
being there. The mover keeps its queues of copies short, so that an urgent one never stands behind a hundred others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from twinflow.device import Event, Stream
from twinflow.offload import gather
from twinflow.offload.board import POLL_S, Board
from twinflow.offload.bucket import Task
from twinflow.offload.plan import STREAMED
from twinflow.offload.slots import Slot
from twinflow.offload.stages import Stage
from twinflow.offload.streamed import StreamedUpdater
from twinflow.offload.sync import GRAD_READY, NORMS, OLD_WEIGHTS, RESIDENT_READY, STORED
from twinflow.offload.torch_streamed import StreamedTorchUpdater

_SENDS_AT_ONCE = 3  # copies back that are queued: one runs, two are next


class BoardThread:
    """Calls `_turn` until the board closes; an exception goes to whoever calls the runtime next."""

    def __init__(self, board: Board, name: str) -> None:
        self.board = board
        self._thread = threading.Thread(target=self._loop, name=f"twinflow-{name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for its end, after the board was closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        try:
            while not self.board.is_closing and self.board.error is None:
                self._turn()
        except BaseException as error:
            with self.board.changed:
                self.board.error = self.board.error or error
                self.board.changed.notify_all()

    def _turn(self) -> None:
        raise NotImplementedError

    def _sleep(self, has_events: bool) -> None:
        """Until something changes, or for a moment where an event, which tells nobody, may come."""
        if not self.board.is_closing and self.board.error is None:
            self.board.changed.wait(POLL_S if has_events else None)


class Worker(BoardThread):
    """Updates, one bucket at a time with all cores."""

    busy_s = 0.0  # so far

    def _turn(self) -> None:
        board = self.board
        with board.changed:
            task = self._pick()
            if task is None:
                self._sleep(has_events=bool(board.flying))
                return
            is_to_sum = board.sums_on_host and not task.is_summed
            is_ahead, factor = not task.job.gate.is_open, task.job.gate.factor
            if not is_to_sum and not task.present:  # nobody has a gradient for this rank's part
                board.updated(task, is_ahead)
                board.changed.notify_all()
                return
            if not is_to_sum and not self._prepare(task, is_ahead):
                board.flying.append(task)
                self._sleep(has_events=True)
                return
            board.current = task if is_ahead and not is_to_sum else None
        name = "sum" if is_to_sum else "ahead" if is_ahead else "update"
        start = time.perf_counter()
        with board.device.trace.span(name, track="host", bucket=task.bucket.plan.index):
            gather.add_on_host(task) if is_to_sum else board.updater.prepare(task, factor)()
        self.busy_s += time.perf_counter() - start
        with board.changed:
            board.current = None
            board.summed(task) if is_to_sum else board.updated(task, is_ahead)
            board.changed.notify_all()

    def _prepare(self, task: Task, is_ahead: bool) -> bool:
        """Whether the task has what its update needs: no shadow in the open, a slot where weights go to one."""
        board = self.board
        if not is_ahead and task.shadow is not None:
            board.free_shadow(task)
        if task.weight_slot is None and board.updater.needs_weight_slot(task.bucket.plan):
            task.weight_slot = board.weight_slots.take(may_grow=is_ahead)  # ahead of the gate one stays in use
            return task.weight_slot is not None
        return True

    def _pick(self) -> Task | None:
        """The earliest deadline of what can be updated now."""
        board = self.board
        task = min((t for t in board.flying if board.may_update(t)), key=lambda t: t.deadline, default=None)
        if task is not None:
            board.flying.remove(task)
        return task


class Mover(BoardThread):
    """Copies out and back, the gate's decision, and the start of updates on the device."""

    def __init__(self, board: Board) -> None:
        self.bytes_out = self.bytes_back = 0
        self._sends: list[Event] = []
        super().__init__(board, "mover")

    def _turn(self) -> None:
        board = self.board
        with board.changed:
            did = self._decide() + self._start_resident() + self._send() + self._fill_slots()
            alone = None if did else self._only_norms()
            if did:
                board.changed.notify_all()
            elif alone is None:
                is_armed = any(job.gate.norms is not None for job in board.jobs)
                has_begun = any(task.job.gate.is_open for task in board.resident)
                self._sleep(is_armed or has_begun or any(task.job.is_released for task in board.outbox))

        if alone is not None:
            alone.synchronize()  # sleeps until the device has come there; looking again and again would cost more

    def _only_norms(self) -> Event | None:
        """The event of norms, where nothing else can happen before it."""
        board = self.board
        if board.waiting or board.flying or board.ahead or board.outbox or NORMS in board.device.disabled:
            return None
        armed = [job.gate.norms[1] for job in board.jobs if job.gate.norms is not None]
        if len(armed) != 1 or any(task.job.gate.is_open for task in board.resident):
            return None
        return armed[0]

    def _decide(self) -> int:
        """Open the gates whose norms have come; how many."""
        board = self.board
        ready = [j for j in board.jobs if j.gate.norms is not None and board.is_there(j.gate.norms[1], NORMS)]
        for job in ready:
            start = time.perf_counter()
            board.decide(job)
            board.device.trace.add("gate", "mover", start, time.perf_counter(), job=job.number)
        return len(ready)

    # On the device.

    def _start_resident(self) -> int:
        """Queue the updates whose state is on the device, by deadline: nothing there is worth waiting for."""
        board = self.board
        ready = sorted((t for t in board.resident if board.may_update_there(t)), key=lambda t: t.deadline)
        num_started = 0
        for task in ready:
            if not board.may_update_there(task):  # an earlier step's task of the same bucket has just begun
                continue
            is_to_sum = board.sums_on_host and not task.is_summed
            if not is_to_sum and not task.present:
                board.resident.remove(task)
                task.arrived = task.ready
                board.updated(task, was_ahead=False)
                num_started += 1
                continue
            stage = None
            if task.bucket.plan.place == STREAMED and not is_to_sum and (stage := board.stages.take()) is None:
                continue
            board.resident.remove(task)
            self._start(task) if stage is None else self._pass_through(task, stage)
            num_started += 1
        return num_started

    def _pass_through(self, task: Task, stage: Stage) -> None:
        """Queue the way of a streamed bucket's state: to the device, updated, and back."""
        bucket, stream, index = task.bucket, stage.stream, task.bucket.plan.index
        assert isinstance(bucket.updater, (StreamedUpdater, StreamedTorchUpdater))
        task.grads = bucket.total if task.is_summed else task.flat
        passage = bucket.updater.passage(task, task.job.gate.factor, stage)
        if bucket.stored is not None:
            stream.wait(bucket.stored, STORED)
        stream.run(passage.load, span="state in", bucket=index)
        if task.is_summed:
            stream.wait(self.board.device.stream("update").record(), RESIDENT_READY)  # where the sum was made
        elif task.ready is not None:
            stream.wait(task.ready, RESIDENT_READY)
        stream.run(passage.update, span="streamed", bucket=index)
        task.arrived = bucket.sent_event = stream.record()
        stream.run(passage.store, span="state out", bucket=index)
        bucket.stored = stage.stored = stream.record()
        self.board.updated(task, was_ahead=False)

    def _start(self, task: Task) -> None:
        board, bucket, stream = self.board, task.bucket, self.board.device.stream("update")
        if task.ready is not None:
            stream.wait(task.ready, RESIDENT_READY)
        if board.sums_on_host and not task.is_summed:
            stream.run(_sum_there(task, stream), span="sum", bucket=bucket.plan.index)
            task.arrived = stream.record()
            board.summed(task)
            return
        task.grads = bucket.total if task.is_summed else task.flat
        update = bucket.updater.prepare(task, task.job.gate.factor)
        stream.run(update, span="resident", bucket=bucket.plan.index)
        task.arrived = stream.record()
        if not task.weights:  # they are in the parameters
            bucket.sent_event = task.arrived
        board.updated(task, was_ahead=False)

    # Out: device to slot.

    def _fill_slots(self) -> int:
        """Start copies while there are slots: complete gradients by deadline, then the next to be complete."""
        num_started = 0
        for flying in self.board.flying:  # gradients in tensors of their own are given back when they have arrived
            is_final = flying.job.gate.is_open or self.board.holds_on_host
            if flying.sources and is_final and flying.arrived is not None and flying.arrived.done():
                flying.sources.clear()
        while self.board.waiting and (slot := self.board.slots.take()) is not None:
            task = self._next_out()
            if task is None:
                self.board.slots.give(slot)
                break
            self.board.waiting.remove(task)
            self._copy_out(task, slot)
            num_started += 1
        return num_started

    def _next_out(self) -> Task | None:
        board = self.board
        complete = []
        for task in board.waiting:
            if not task.is_complete and task.ready is not None and not task.ready.done():
                break  # gradients are made in this order: none behind it is complete
            task.is_complete = True  # asked once: with a hundred tasks, asking would cost more than starting a copy
            complete.append(task)
        by_need = [*sorted(complete, key=lambda t: t.deadline), *board.waiting[len(complete) :]]
        fits: Callable[[Task], bool] = lambda t: board.is_allowed(t) or board.reserve(t) or board.holds_on_host  # noqa: E731
        return next((task for task in by_need if fits(task)), None)

    def _copy_out(self, task: Task, slot: Slot) -> None:
        board, sources = self.board, list(task.sources)
        task.slot = slot
        task.grads = grads = slot.view(sources[0][1].dtype, task.bucket.plan.numel)
        stream = board.device.stream("out")

        def copy() -> None:
            for offset, source in sources:
                into = grads if source.numel() == grads.numel() else grads[offset : offset + source.numel()]
                into.copy_(source, non_blocking=True)

        assert task.ready is not None
        stream.wait(task.ready, GRAD_READY)
        stream.run(copy, span="out", bucket=task.bucket.plan.index)
        task.arrived = stream.record()
        self.bytes_out += sum(source.numel() * source.element_size() for _, source in sources)
        board.flying.append(task)
        if task.flat is not None and (task.job.gate.is_open or board.holds_on_host):
            board.flats.give(task.bucket.plan, task.flat, task.arrived)  # nobody will need it again
            task.flat = None

    # Back: host to parameter.

    def _send(self) -> int:
        """Queue the most urgent weights, as many as keep the copies going."""
        self._sends = [event for event in self._sends if not event.done()]
        num_sent = 0
        ready = sorted((t for t in self.board.outbox if t.job.is_released), key=lambda t: t.deadline)
        for task in ready:
            if task.bucket.is_parked:
                task.weights = ()  # blocks fetch them from the state
            has_weights = bool(task.weights and task.present)  # a dropped task has none
            if has_weights and len(self._sends) >= _SENDS_AT_ONCE:
                break
            writes = has_weights or (task.bucket.is_shared and task.job.is_delayed)  # here, or then what others send
            if writes and self.board.frozen is not None and not self.board.frozen.allows(task.bucket):
                continue  # a delayed update's: its parameters are still to be read as they are
            self.board.outbox.remove(task)
            if has_weights:
                self._sends.append(self._copy_back(task))
            task.bucket.sent = max(task.bucket.sent, task.job.number)
            num_sent += 1
        return num_sent

    def _copy_back(self, task: Task) -> Event:
        bucket = task.bucket
        stream = self.board.device.stream("update" if bucket.is_on_device else "in")
        targets = [bucket.targets[i] for i in task.present]
        weights = [task.weights[i] for i in task.present]
        weights = [w if t.dim() == 1 else w.view(t.shape) for t, w in zip(targets, weights, strict=True)]
        params = [bucket.params[i] for i in task.present]

        def copy() -> None:
            torch._foreach_copy_(targets, weights, non_blocking=True)
            for param in params:
                param.note_write()

        if task.job.after is not None:
            stream.wait(task.job.after, OLD_WEIGHTS)
        stream.run(copy, span="in", bucket=bucket.plan.index)
        event = bucket.sent_event = stream.record()
        if not bucket.is_on_device:
            self.bytes_back += sum(bucket.slices[i].numel for i in task.present) * bucket.plan.dtype.itemsize
        if task.weight_slot is not None:
            self.board.weight_slots.give(task.weight_slot, event)
        task.weight_slot, task.weights = None, ()
        return event


def end(board: Board, threads: Sequence[BoardThread]) -> None:
    """End the threads after what they do now, and give page-locked memory back."""
    with board.changed:
        board.is_closing = True
        board.changed.notify_all()
    if threading.current_thread().name.startswith("twinflow-"):
        # A forgotten runtime, found by the garbage collector in a thread of ours, which must not wait for itself.
        threading.Thread(target=_give_back, args=(board, threads), name="cleaner", daemon=True).start()
    else:
        _give_back(board, threads)


def _give_back(board: Board, threads: Sequence[BoardThread]) -> None:
    """Page-locked memory must be unregistered before anybody else gets it."""
    for thread in threads:
        thread.join()
    board.shadows.close()
    board.device.close()


def _sum_there(task: Task, stream: Stream) -> Callable[[], None]:
    """Add a task's gradients to its bucket's total on the device; measure the total of a step."""
    bucket, flat, norms = task.bucket, task.flat, task.job.norms
    in_total = bucket.added.union(task.present)
    new = [bucket.slices[i] for i in task.present if i not in bucket.added]
    known = [bucket.slices[i] for i in task.present if i in bucket.added]
    cuts, is_whole = [bucket.slices[i] for i in sorted(in_total)], len(in_total) == len(bucket.slices)
    if bucket.total is None:
        assert flat is not None
        bucket.total = stream.zeros(bucket.plan.numel, torch.float32, flat.device)
    total, index = bucket.total, bucket.plan.index

    def work() -> None:
        if flat is not None:
            gather.add_on_device(total, flat, new, known)
        if norms is not None:
            gather.measure_total(norms[index], total, cuts, is_whole)

    return work
