# SPDX-License-Identifier: Apache-2.0
"""The Python side of the native executor, which copies gradients to the host, updates the state there and copies new
weights back to the device.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A store has the
buffers of one bucket's optimizer state. A job is one optimizer step, and a task is the work for one bucket in a job. A
slot is a page-locked host buffer for the gradients or the new weights of one bucket. The total of a bucket is the fp32
sum of its gradients over several backwards. To send weights is to copy them into the parameters.

The executor itself is csrc/executor.h, which has the table of phases of a task. The methods here are called by the
user's thread, by autograd's thread and by the Python threads of this project (reducer, publisher, torch-worker,
late-updates, fetcher).

There are two native threads. The mover starts copies, reads the clipping decision and notes gradients that have arrived
on the host. The worker updates one bucket at a time. If the optimizer is written in Python, a Python thread replaces
the worker (torch_worker.py). Updates on the device are queued by other threads (device_work.py).

Ownership: the native executor owns the page-locked slots, the events of copies and the order of work; `mutex_` in
csrc/executor.h guards all of it. Python owns stores, flat buffers and parameters. The lock `Executor.changed` guards
the tables that keep gradients alive until the native executor has released their task (`collect`), the flat buffers,
and the queues of the Python threads. A thread that needs both locks acquires `changed` before `mutex_`. A store is kept
alive until `drop_store`.

Order: an update starts after its gradients have arrived on the host. New weights are copied after the update. A block
runs after the copies of its weights: `hold` blocks the caller until the copies are queued, and makes the model's
streams wait for their events. An exception in a background thread goes to `fail`, and `check` raises it in the thread
that calls the optimizer next.
"""

from __future__ import annotations

import ctypes
import math
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from ctypes import c_int64, c_uint8, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from twinflow import native
from twinflow.device import CudaDevice, Device, Event, Stream, hide_from_children
from twinflow.errors import wrong_state
from twinflow.native.executor import (
    CBucket,
    CCounters,
    CDecision,
    CFetchItem,
    CHyper,
    CJob,
    CPointers,
    CSettings,
    CSlice,
    CSource,
    CSpan,
    CUpdateTask,
    executor_library,
)
from twinflow.native.kernels import DTYPE_CODES, FORMAT_CODES, MASTER_KINDS, pointers
from twinflow.offload import sync
from twinflow.offload.bucket import Bucket
from twinflow.offload.clipping import Decision
from twinflow.offload.disk_updater import BASE, addresses, weights_of
from twinflow.offload.flats import FlatPool
from twinflow.offload.job import Job, Task
from twinflow.offload.plan import BucketPlan
from twinflow.offload.state_file import StateFile
from twinflow.offload.weight_guard import plain
from twinflow.offload.weight_source import WeightSource
from twinflow.rules import Rule
from twinflow.rules.segment import Store
from twinflow.trace import Span

_STREAMS = {"out": 0, "in": 1, "fetch": 2, "orders": 3}  # "orders": the thread that calls the driver
_SPANS = (
    ("out", "out"),
    ("in", "in"),
    ("update", "host"),
    ("ahead", "host"),
    ("sum", "host"),
    ("gate", "mover"),
    ("fetch", "fetch"),
    ("long", "mover"),
    ("lock", "host"),
)
_POINTS = {
    sync.GRAD_READY: 1,
    sync.ARRIVED: 2,
    sync.NORMS: 4,
    sync.WEIGHT_SLOT: 8,
    sync.WEIGHT_SENT: 16,
    sync.OLD_WEIGHTS: 32,
    sync.SENT: 64,
    sync.FORWARD: 128,
    sync.READERS: 256,
    sync.FETCH_ROOM: 512,
    sync.STATE_READ: 1024,
    sync.PARAMS_READ: 2048,
    sync.FETCH_STORED: 4096,
}
_MAX_RELEASED = 64
_RESTART = "Remove the cause, build a new optimizer and load the last checkpoint."


class WorkerError(RuntimeError):
    """A background thread or a stream has failed. `__cause__` is its exception, if there is one."""


class Executor:
    """The Python side of the native executor. There is one for each optimizer."""

    def __init__(
        self,
        device: Device,
        rule: Rule | None,
        flats: FlatPool,
        slot_bytes: int,
        num_slots: int,
        num_weight_slots: int,
        holds_on_host: bool,
        sums_on_host: bool,
        file: StateFile | None = None,
        weights: StateFile | None = None,
    ) -> None:
        """`file`: the file with the state of buckets on the disk. `weights`: the file with weights that blocks fetch.
        The executor closes both (`free_slots`).
        """
        self.device = device
        self.file = file
        self.weights = weights
        self._files = [one for one in (file, weights) if one is not None]
        self.flats = flats
        self.holds_on_host = holds_on_host  # gradients wait for the clipping decision on the host, in their slots
        self.sums_on_host = sums_on_host  # every backward of a step submits tasks, and their gradients are summed
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.num_weight_slots = num_weight_slots
        self.error: BaseException | None = None  # the first exception of a background thread
        self.is_closing = False
        self.is_forked = False  # this process was forked from the one that has built the executor
        self.changed = threading.Condition()  # guards the Python tables and wakes the Python threads
        self._rule = rule  # None: a user's own optimizer, in Python
        self._library = executor_library()
        self._tasks: dict[int, Task] = {}  # by handle: tasks whose gradients the native executor still needs
        self._stores: dict[int, Store] = {}  # by handle
        self._own: dict[int, Store] = {}  # by index of the bucket: the state of buckets on the device
        self._on_host: set[int] = set()  # indices of buckets on the host
        self._to_update: dict[int, Task] = {}  # by handle: tasks for an optimizer in Python
        self._layouts: dict[object, int] = {}
        # Page-locked decisions or norms of the last four jobs. The native executor reads them until it has decided.
        self._decisions: dict[int, Tensor] = {}
        self._buckets: list[Bucket] = []
        self._unfinished: list[int] = []  # handles of jobs that may still have updates to make
        self._is_recording = False
        self._has_warned = False
        self._ids = (c_int64 * _MAX_RELEASED)()
        self._events = (c_void_p * _MAX_RELEASED)()
        index = -1 if device.kind == "cpu" else _index_of(device)
        settings = CSettings(
            index,
            holds_on_host,
            sums_on_host,
            rule is None,
            slot_bytes,
            num_slots,
            num_weight_slots,
            file.handle if file is not None else None,
            weights.handle if weights is not None else None,
        )
        self._handle = self._library.tf_executor_new(ctypes.byref(settings))
        if not self._handle:
            raise wrong_state(
                "TwinOptimizer cannot start its threads for copies",
                "the CUDA driver (libcuda.so.1) could not be loaded, although torch uses a GPU",
                "Add the directory of libcuda.so.1 to the environment variable LD_LIBRARY_PATH.",
            )
        watch = weakref.WeakMethod(self._follow_device)
        device.watchers.append(watch)
        device.trace.add_source(weakref.WeakMethod(self._spans), None if device.kind == "cpu" else index)
        self._follow_device()

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._library.tf_executor_free(handle)

    # Errors and the end.

    def check(self) -> None:
        """Raise WorkerError if a thread or a stream has failed, RuntimeError if the executor is closed or forked."""
        if self.is_forked:  # a thread of the parent may have had a lock of the files
            raise wrong_state(
                "The optimizer cannot be used",
                "this process was forked after the optimizer was built, and has neither its threads nor its state",
                "Use the optimizer in the process that has built it, or build a new one in this process.",
            )
        failure = next((found for file in self._files if (found := file.failure()) is not None), None)
        if self.error is None and self.device.error is None and failure is None and not self.is_closing:
            if not self._library.tf_executor_state(self._handle):
                return
            if self.device.error is None:
                cause = ctypes.create_string_buffer(128)
                self._library.tf_cuda_failure(cause, len(cause))
                raise WorkerError(
                    "An update in the background failed: a copy between host and device has failed "
                    f"({cause.value.decode() or 'no call of the CUDA driver'}). {_RESTART}"
                )
        error = self.error or self.device.error or failure
        if error is not None:
            raise WorkerError(f"An update in the background failed: {error!r}. {_RESTART}") from error
        raise _closed()

    def fail(self, error: BaseException) -> None:
        """Keep the exception of a background thread, and wake all threads that wait. `check` then raises it."""
        with self.changed:
            if not isinstance(error, WorkerError):  # a WorkerError only repeats the failure of another thread
                self.error = self.error or error
            self.changed.notify_all()
        self._library.tf_executor_fail(self._handle)

    def close(self) -> None:
        """End the native threads after their current work."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()
        self._library.tf_executor_close(self._handle)

    def free_slots(self) -> None:
        """Free the slots and the file. Call it only after `close` and after the end of `TorchWorker`, which uses the
        slots.
        """
        self._library.tf_executor_free_slots(self._handle)
        for file in self._files:
            file.close()

    def _ok(self, result: float) -> float:
        """Return the result of a native call that may block. Raise if it is negative: the executor failed or closed."""
        if result < 0:
            self.check()
            raise _closed()
        return result

    # Tests and traces.

    def _follow_device(self) -> None:
        for name, stream in _STREAMS.items():
            self._library.tf_executor_delay(self._handle, stream, self.device.delay_of(name))
        points = sum(bit for point, bit in _POINTS.items() if point in self.device.disabled)
        self._library.tf_executor_disable(self._handle, points)

    def _spans(self, anchor: int, anchor_s: float) -> list[Span]:
        """Return the spans that the native threads and streams have recorded since the last call."""
        table = (CSpan * 65536)()
        count = self._library.tf_executor_spans(self._handle, anchor, anchor_s, table, len(table))
        found = []
        for entry in table[:count]:
            name, track = _SPANS[entry.kind]
            key = "job" if name == "gate" else "bucket"
            found.append(Span(name, track, entry.start_s, entry.end_s, {key: entry.bucket}))
        return found

    @property
    def can_run_ahead(self) -> bool:
        """Whether updates can be written to speculative stores, ahead of the clipping decision."""
        return self._rule is not None and self.file is None

    @property
    def counters(self) -> CCounters:
        """The counters of the native executor, since its start."""
        found = CCounters()
        self._library.tf_executor_counters(self._handle, ctypes.byref(found))
        return found

    # Memory.

    @property
    def unmade_bytes(self) -> int:
        """Bytes of page-locked memory for slots that are planned and not allocated yet."""
        made = self.counters
        left = max(0, self.num_slots - made.num_slots) + max(0, self.num_weight_slots - made.num_weight_slots)
        return int(left) * self.slot_bytes

    def set_sums_on_host(self, sums_on_host: bool) -> None:
        """Change `sums_on_host` from the next step on. The caller then calls `resize`."""
        self.sums_on_host = sums_on_host

    def resize(self, num_slots: int, num_weight_slots: int, keeps_weight_slots: bool) -> None:
        """Change the numbers of slots, between steps. `keeps_weight_slots`: do not free surplus weight slots."""
        self.num_slots = num_slots
        self.num_weight_slots = num_weight_slots
        self._library.tf_executor_resize(
            self._handle, num_slots, num_weight_slots, self.sums_on_host, keeps_weight_slots
        )

    def add_weight_slots(self, num_more: int) -> None:
        """Allocate `num_more` weight slots now. Their number may then be above `num_weight_slots`."""
        self._library.tf_executor_add_weight_slots(self._handle, num_more)

    # Stores.

    def layout_of(self, plan: BucketPlan) -> int:
        """Return a number that is equal for buckets with equal `plan.layout`, which can use each other's stores."""
        return self._layouts.setdefault(plan.layout, len(self._layouts))

    def add_store(self, plan: BucketPlan, store: Store) -> int:
        """Register the buffers of a store and return its handle. The store is kept until `drop_store`."""
        table = (CPointers * len(plan.slices))()
        record, there = -1, store
        if self.file is not None:
            record, there = self.file.record_of(plan.index), addresses(store)
        for entry, piece in zip(table, plan.slices, strict=True):
            found = pointers(there.narrow(piece.offset, piece.numel))
            entry.weight = found.weight
            entry.master = found.master
            entry.state = found.states
            entry.scale = found.scales
        keeps_weights = record >= 0 and not weights_of(store).is_meta
        handle: int = self._library.tf_store_new(self._handle, table, len(table), record, BASE, keeps_weights)
        self._stores[handle] = store
        return handle

    def drop_store(self, handle: int) -> Store:
        """Unregister a store and return it."""
        self._library.tf_store_free(self._handle, handle)
        return self._stores.pop(handle)

    def add_speculative_store(self, plan: BucketPlan, store: Store) -> None:
        """Add a store for updates ahead of the clipping decision."""
        self._library.tf_store_add_speculative(self._handle, self.layout_of(plan), self.add_store(plan, store))

    def take_speculative_store(self, plan_layout: object) -> Store | None:
        """Remove and return a free speculative store for buckets with this `plan.layout`; None if there is none."""
        handle = self._library.tf_store_take_speculative(self._handle, self._layouts.get(plan_layout, -1))
        return self.drop_store(handle) if handle >= 0 else None

    def missing_speculative_stores(self) -> list[Bucket]:
        """Return the buckets whose updates have found no free speculative store since the last call."""
        count = self._library.tf_store_missing_speculative(self._handle, self._ids, _MAX_RELEASED)
        return [self._buckets[index] for index in self._ids[:count]]

    def store_of(self, bucket: Bucket) -> Store:
        """Return the store that currently holds the state of a bucket."""
        if bucket.is_on_device:
            return self._own[bucket.plan.index]
        return self._stores[self._library.tf_bucket_store(self._handle, bucket.plan.index)]

    def replace_store(self, bucket: Bucket, store: Store) -> None:
        """Give a bucket another store, because its state moves to another place. Call it between steps."""
        index = bucket.plan.index
        if index in self._on_host:
            self._on_host.remove(index)
            self.drop_store(self._library.tf_bucket_store(self._handle, index))
        else:
            del self._own[index]
        bucket.first_store = store

    # Buckets.

    def register(self, bucket: Bucket) -> None:
        """Register a bucket, or register it again after its parameters or its state have other memory."""
        plan = bucket.plan
        index = plan.index
        if index == len(self._buckets):
            self._buckets.append(bucket)
        table = (CSlice * len(plan.slices))()
        size = plan.dtype.itemsize
        for i, (entry, piece, param) in enumerate(zip(table, plan.slices, bucket.params, strict=True)):
            entry.offset = piece.offset
            entry.numel = piece.numel
            entry.first_index = piece.start
            entry.group = param.group
            entry.param = param.index
            if bucket.landing is not None:
                entry.target = bucket.landing.data_ptr() + piece.offset * size
            elif bucket.targets:
                entry.target = bucket.targets[i].data_ptr()
        store = -1
        if bucket.is_on_device:
            self._own[index] = bucket.first_store
        elif index in self._on_host:
            store = self._library.tf_bucket_store(self._handle, index)
        else:
            store = self.add_store(plan, bucket.first_store)
            self._on_host.add(index)
        spec = CBucket(
            numel=plan.numel,
            layout=self.layout_of(plan),
            slices=table,
            steps=bucket.steps,
            num_slices=len(table),
            type=DTYPE_CODES[plan.dtype],
            rule=self._rule.code if self._rule is not None else 0,
            format=FORMAT_CODES[bucket.first_store.format],
            master_kind=MASTER_KINDS[bucket.first_store.master.dtype],
            is_shared=bucket.is_shared,
            has_weight_slots=bucket.updater.needs_weight_slot(plan),
            weight_record=self._weight_record(bucket),
        )
        self._library.tf_bucket_set(self._handle, index, ctypes.byref(spec), store)

    def _weight_record(self, bucket: Bucket) -> int:
        is_there = self.weights is not None and self.weights.has(bucket.plan.index) and not bucket.is_on_device
        return self.weights.record_of(bucket.plan.index) if is_there and self.weights is not None else -1

    def set_deadline(self, bucket: Bucket, deadline: int) -> None:
        """Set the position of a bucket in the order in which the next forward needs weights."""
        self._library.tf_bucket_set_deadline(self._handle, bucket.plan.index, deadline)

    def set_total(self, bucket: Bucket, total: Tensor) -> None:
        """Set the buffer in which the gradients of several backwards are summed."""
        bucket.total = total
        self._library.tf_bucket_set_total(self._handle, bucket.plan.index, total.data_ptr())

    def added(self, bucket: Bucket) -> set[int]:
        """Return the indices of a bucket's slices whose gradients of this step are in the total, on the host."""
        slices = (c_uint8 * len(bucket.slices))()
        self._library.tf_bucket_added(self._handle, bucket.plan.index, slices)
        return {i for i, is_added in enumerate(slices) if is_added}

    def due(self, bucket: Bucket) -> int:
        """Return the number of the last job whose weights the next forward must use."""
        found: int = self._library.tf_bucket_due(self._handle, bucket.plan.index)
        return found

    def shown(self, bucket: Bucket) -> int:
        """Return the number of the last job whose weights are queued to be copied into all parameters of the bucket."""
        found: int = self._library.tf_bucket_shown(self._handle, bucket.plan.index)
        return found

    def make_due(self, job: Job) -> None:
        """Let the next forward wait for the weights of this job."""
        indices = indices_of([task.bucket for task in job.tasks])
        self._library.tf_buckets_set_due(self._handle, indices, len(indices), job.number)

    def note_updated(self, bucket: Bucket, number: int) -> None:
        """Note that an update on the device has applied a job to the state. Its weights are not copied yet."""
        self._library.tf_bucket_note_updated(self._handle, bucket.plan.index, number)

    def set_unsent(self, bucket: Bucket, number: int) -> None:
        """Note that a job is applied to state on the device, and that its weights are copied later."""
        self._library.tf_bucket_set_unsent(self._handle, bucket.plan.index, number)

    def note_sent(self, bucket: Bucket, number: int, event: Event | None) -> None:
        """Note that queued work writes a job's weights into the parameters. `event`: its end; None: no work."""
        handle = event.handle if event is not None else None
        self._library.tf_bucket_note_sent(self._handle, bucket.plan.index, number, handle)

    def note_published(self, bucket: Bucket, number: int, event: Event | None) -> None:
        """Note that queued work writes all ranks' weights of a job into the parameters. `event`: its end, or None."""
        handle = event.handle if event is not None else None
        self._library.tf_bucket_note_published(self._handle, bucket.plan.index, number, handle)

    def weights_copied_event(self, bucket: Bucket) -> Event | None:
        """Return the event at which the last copy of the bucket's weights ends; None if no copy is under way."""
        handle = self._library.tf_bucket_weights_copied_event(self._handle, bucket.plan.index)
        return Event(handle, self.device) if handle else None

    def published_event(self, bucket: Bucket) -> Event | None:
        """Return the event at which the weights of all ranks are in the parameters; None if no copy is under way."""
        handle = self._library.tf_bucket_published_event(self._handle, bucket.plan.index)
        return Event(handle, self.device) if handle else None

    def freeze(self, index: int, state: bool, params: bool) -> None:
        """Note what a background checkpoint still reads of a bucket: its state, or its parameters (frozen.py).

        The first call with `state` leaves the present store to the checkpoint until a call without `state`.
        """
        self._library.tf_bucket_freeze(self._handle, index, state + 2 * params)

    def wanted(self, timeout_s: float) -> list[int]:
        """Wait for buckets that cannot change before the background checkpoint has read or copied them.

        Returns their indices; none after the timeout.
        """
        found = (c_int64 * max(1, len(self._buckets)))()
        return found[: self._library.tf_wanted(self._handle, timeout_s, found, len(found))]

    # Jobs.

    def new_job(self, job: Job) -> int:
        """Register a job and return its handle."""
        if self._is_recording != self.device.trace.enabled:
            self._is_recording = self.device.trace.enabled
            self._library.tf_executor_record_spans(self._handle, self._is_recording)
        limits = job.limits
        spec = CJob(
            job.number,
            job.scale,
            math.nan if limits.max_norm is None else limits.max_norm,
            limits.skip_nonfinite,
            limits.any,
            job.is_delayed,
            job.is_part,
            job.runs_ahead,
        )
        handle: int = self._library.tf_job_new(self._handle, ctypes.byref(spec))
        if not job.is_part and self._rule is not None and job.options:
            self._add_hypers(handle, job, self._rule)
        return handle

    def _add_hypers(self, handle: int, job: Job, rule: Rule) -> None:
        """Give the native executor the rule's scalars for all step counts that a slice may have at its update.

        Several counts are possible, because updates of earlier jobs may still be waiting.
        """
        self._unfinished = [one for one in self._unfinished if not self._library.tf_job_is_done(self._handle, one)]
        ahead = range(1, 2 + len(self._unfinished))
        self._unfinished.append(handle)
        wanted: set[tuple[int, int]] = set()
        for bucket in self._buckets:
            if not bucket.is_on_device:
                wanted.update(zip((param.group for param in bucket.params), bucket.steps, strict=True))
        rows = []
        for group, step in sorted({(group, step + more) for group, step in wanted for more in ahead}):
            options = job.options[group]
            row = CHyper(step, group, -1.0 if options.get("maximize") else 1.0)
            hyper = rule.hyper(options, step)
            row.hyper[: len(hyper)] = hyper
            rows.append(row)
        table = (CHyper * len(rows))(*rows)
        self._library.tf_job_add_hypers(self._handle, handle, table, len(rows))

    def free_job(self, handle: int) -> None:
        """Let the native executor free its record of a job."""
        if self._handle:  # the garbage collector may have freed the executor first
            self._library.tf_job_free(self._handle, handle)

    def submit(self, task: Task) -> None:
        """Take over a task. Its gradients are complete on the device once the event `task.ready` is done."""
        bucket = task.bucket
        if self.sums_on_host and bucket.total is None:
            self.set_total(bucket, _new_total(bucket.plan.numel))
        sources = (CSource * len(task.sources))()
        for entry, (offset, source) in zip(sources, task.sources, strict=True):
            entry.from_ = source.data_ptr()
            entry.offset = offset
            entry.numel = source.numel()
        present = None
        if len(task.present) != len(bucket.slices):
            present = (c_uint8 * len(bucket.slices))()
            for i in task.present:
                present[i] = 1
        assert task.ready is not None
        with self.changed:
            task.handle = self._library.tf_submit(
                self._handle,
                task.job.handle,
                bucket.plan.index,
                sources,
                len(sources),
                present,
                task.ready.handle,
                task.flat is not None,
                task.is_held,
            )
            self._tasks[task.handle] = task
            self._note_for_python(task)

    def _note_for_python(self, task: Task) -> None:
        """Keep a task for the optimizer in Python, and forget tasks of steps that were dropped."""
        if self._rule is None and not task.job.is_part:
            oldest = task.job.number - 2
            self._to_update = {key: one for key, one in self._to_update.items() if one.job.number >= oldest}
            self._to_update[task.handle] = task

    def submit_sum(self, job: Job, bucket: Bucket) -> Task | None:
        """Submit a task that has only the gradients of earlier backwards. Returns None if there are none."""
        with self.changed:
            handle = self._library.tf_submit_sum(self._handle, job.handle, bucket.plan.index)
            if handle < 0:
                return None
            task = Task(bucket, job, [], handle=handle)
            self._note_for_python(task)
            return task

    def agree(self, job: Job, params: Iterable[int], num_params: int) -> None:
        """Set which parameters got a gradient in this job on at least one rank. `params`: their indices."""
        table = (c_uint8 * num_params)()
        for index in params:
            table[index] = 1
        self._library.tf_agree(self._handle, job.handle, table)

    def close_job(self, job: Job, decision: Tensor, event: Event) -> None:
        """Close a job whose tasks are all submitted. `decision`: the clipping decision, once `event` is done."""
        self._decisions[job.number % 4] = decision
        self._library.tf_job_close(self._handle, job.handle, decision.data_ptr(), event.handle)

    def measure(self, job: Job, norms: Tensor) -> None:
        """Set the memory to which the native executor writes the norms of a job's totals."""
        job.norms = norms
        self._library.tf_job_set_norms(self._handle, job.handle, norms.data_ptr())

    def close_sums(self, job: Job, event: Event | None) -> None:
        """Close a job whose gradients are summed on the host, when all tasks are submitted.

        The native executor makes the clipping decision when all norms are known. `event`: after it, the norms that the
        device computes are on the host.
        """
        assert job.norms is not None
        self._decisions[job.number % 4] = job.norms
        handle = event.handle if event is not None else None
        self._library.tf_job_close_sums(self._handle, job.handle, job.norms.data_ptr(), job.norms.numel(), handle)

    def decide(self, job: Job, decision: Decision) -> None:
        """Close a job whose tasks are all submitted, with a decision that is already known."""
        self._library.tf_job_decide(
            self._handle, job.handle, decision.norm, decision.factor, decision.skip, decision.clipped
        )

    def drop(self, job: Job) -> None:
        """Discard all updates of a job."""
        self._library.tf_job_drop(self._handle, job.handle)

    def release(self, job: Job, after: Event) -> None:
        """Let the weights of a delayed job be copied into the parameters after the event."""
        job.after = after
        job.is_released = True  # set after `job.after`: updates on the device read `after` once the job is released
        self._library.tf_job_release(self._handle, job.handle, after.handle)

    def decision_of(self, job: Job) -> Decision | None:
        """Return the clipping decision, or None if it is not known yet."""
        found = self._decision(job)
        return Decision(found.norm, found.factor, bool(found.skip), bool(found.clipped)) if found is not None else None

    def counts_of(self, job: Job) -> dict[str, int]:
        """Return counts of updates: run before the clipping decision, dropped by it, or held until it was known."""
        found = self._decision(job) or CDecision()
        held = found.num_waiting + sum(task.bucket.is_on_device for task in job.tasks) * job.limits.any
        return {"speculated": found.num_ahead, "dropped": found.num_dropped, "held": held}

    def _decision(self, job: Job) -> CDecision | None:
        found = CDecision()
        return found if self._library.tf_job_decision(self._handle, job.handle, ctypes.byref(found)) else None

    def wait_for_decision(self, job: Job) -> Decision:
        """Block until the clipping decision is known, and return it."""
        found = job.decision
        if found is None:
            self._ok(self._library.tf_job_wait_decision(self._handle, job.handle))
            found = job.decision
        assert found is not None
        return found

    def is_done(self, job: Job) -> bool:
        """Whether every update of the job on the host has changed the state or was dropped."""
        return bool(self._library.tf_job_is_done(self._handle, job.handle))

    def wait_until_done(self, job: Job) -> None:
        """Block until every update of the job on the host has changed the state or was dropped."""
        self._ok(self._library.tf_job_wait_done(self._handle, job.handle))

    def wait_until_summed(self, job: Job) -> None:
        """Block until all gradients of a job are in their totals on the host."""
        self._ok(self._library.tf_job_wait_summed(self._handle, job.handle))

    def wait_for_sums(self) -> None:
        """Block until all submitted gradients are in their totals."""
        self._ok(self._library.tf_wait_sums(self._handle))

    def forget_sums(self) -> None:
        """Discard the totals of this step's earlier backwards."""
        self.wait_for_sums()
        self._library.tf_forget_sums(self._handle)

    def hold_back(self, job: Job, bucket: Bucket) -> None:
        """Note that new weights of a bucket are in the state. They are copied when the job is released."""
        self._library.tf_hold_back(self._handle, job.handle, bucket.plan.index)

    def take_unsent(self, bucket: Bucket) -> bool:
        """Discard the bucket's task that waits for the release of its job. Returns whether there was such a task."""
        return bool(self._library.tf_take_unsent(self._handle, bucket.plan.index) >= 0)

    def reset(self, number: int) -> None:
        """Set the number of the last job. Call it only while no job is under way."""
        self._library.tf_reset(self._handle, number)

    # Gradients.

    def take_flat(self, plan: BucketPlan, stream: Stream, is_own: bool = False) -> Tensor:
        """Return a device buffer for gradients, which `stream` may write to. `is_own`: allocate it on that stream.

        Blocks while all buffers are in use. Allocates one more if none of them would be returned.
        """
        own = stream if is_own else None
        self.collect()
        with self.changed:
            taken = self.flats.take(plan, False, own)
        while taken is None:
            # The end of a copy to the host returns a buffer. If no buffer will be returned, incomplete buckets use all
            # of them. Only this thread can complete these buckets, so one more buffer is allocated.
            may_grow = not self._library.tf_will_release(self._handle)
            if not may_grow:
                self._ok(self._library.tf_wait_released(self._handle, 1.0))
            self.check()
            self.collect()
            with self.changed:
                taken = self.flats.take(plan, may_grow, own)
        flat, read_until = taken
        if read_until is not None:
            stream.wait(read_until, sync.FLAT_FREE)
        return flat

    def collect(self) -> None:
        """Take back the buffers of gradients that the native executor does not need any more."""
        with self.changed:
            while count := self._library.tf_released(self._handle, self._ids, self._events, _MAX_RELEASED):
                for handle, event in zip(self._ids[:count], self._events[:count], strict=True):
                    task = self._tasks.pop(handle)
                    if task.flat is not None:
                        read_until = Event(event, self.device) if event else task.ready
                        self.flats.give(task.bucket.plan, task.flat, read_until)
                    elif event:
                        Event(event, self.device).synchronize()
                    task.flat = None
                    task.sources.clear()

    def shrink_flats(self) -> None:
        """Free the flat buffers that are not in use (`FlatPool.shrink`)."""
        self.collect()
        with self.changed:
            self.flats.shrink()

    def read_grads(self, task: Task) -> Tensor | None:
        """Return a task's gradients from the device or from the host; None if they no longer exist."""
        self.collect()
        if task.flat is not None:
            if task.ready is not None:
                task.ready.synchronize()
            return task.flat
        address = self._library.tf_task_grads(self._handle, task.handle)
        return memory(address, task.bucket.plan.dtype, task.bucket.plan.numel) if address else None

    # Weights.

    def hold(self, held: Held) -> float:
        """Block until the copies of the buckets' weights are queued, and make the model's streams wait for the copies.

        On the CPU the calling thread waits for the end of the copies too. Returns the seconds until the copies were
        queued.
        """
        streams = self.device.model_streams()
        waited_s = self._ok(self._library.tf_hold(self._handle, held.indices, len(held.buckets), streams, len(streams)))
        for bucket in held.buckets:
            if bucket.landing is not None:
                self.land(bucket)
        return waited_s

    def wait_for_weights(self, buckets: Sequence[Bucket]) -> None:
        """Block until the weights of these buckets are in their parameters, so that every stream sees them."""
        self._ok(self._library.tf_wait_weights(self._handle, indices_of(buckets), len(buckets)))
        for bucket in buckets:
            if bucket.landing is not None:
                self.land(bucket)
                self.device.compute().synchronize()

    def wait_until_shown(self, buckets: Sequence[Bucket]) -> None:
        """Block until the copies of these buckets' weights are queued."""
        self._ok(self._library.tf_wait_shown(self._handle, indices_of(buckets), len(buckets)))

    def wait_until_sent(self, bucket: Bucket, number: int, timeout_s: float) -> bool:
        """Block until the copy of this rank's weights of a job is queued. Returns False after the timeout."""
        return bool(self._ok(self._library.tf_wait_sent(self._handle, bucket.plan.index, number, timeout_s)))

    def take_sent(self, bucket: Bucket) -> list[int]:
        """Return the indices of the slices whose weights were sent since the last call."""
        sent = (c_uint8 * len(bucket.slices))()
        if not self._library.tf_bucket_take_sent(self._handle, bucket.plan.index, sent):
            return []
        return [i for i, is_sent in enumerate(sent) if is_sent]

    def land(self, bucket: Bucket) -> None:
        """Copy weights from the device buffer `bucket.landing` into parameters that are not contiguous.

        The copy runs on the calling thread's current stream. Slices without an update are not copied.
        """
        assert bucket.landing is not None
        found = self.take_sent(bucket)
        if not found:
            return
        with torch.no_grad(), plain():
            for i in found:
                piece, into = bucket.slices[i], bucket.targets[i]
                into.copy_(bucket.landing[piece.offset : piece.offset + piece.numel].view(into.shape))
        for i in found:  # not the other slices, because the user may have written to them
            bucket.params[i].note_write()

    def fetch(self, items: Sequence[tuple[Bucket | None, WeightSource, Tensor]], after: Event) -> int:
        """Request copies of weights from the host to the device, each after the update of its bucket. Returns a handle.

        `items`: bucket (None for frozen weights), weights on the host, memory on the device. `after`: the event after
        which the memory on the device may be overwritten.
        """
        table = (CFetchItem * len(items))()
        for entry, (bucket, host, into) in zip(table, items, strict=True):
            entry.bucket = bucket.plan.index if bucket is not None else -1
            entry.record = host.record
            if entry.record < 0:
                entry.from_ = host.read(0, host.numel).data_ptr()
            entry.into = into.data_ptr()
            entry.num_bytes = host.numel * into.element_size()
        found: int = self._library.tf_fetch(self._handle, table, len(items), after.handle)
        return found

    def wait_for_fetch(self, fetch: int) -> Event:
        """Block until a fetch is queued, and return the event at which it ends."""
        handle = self._library.tf_fetch_wait(self._handle, fetch)
        if not handle:
            self._ok(-1)
        return Event(handle, self.device)

    # For an optimizer in Python.

    def next_update(self, timeout_s: float) -> tuple[Task, float, Tensor | None] | None:
        """Wait for the next task to update, and return it with its gradients. Returns None after the timeout.

        The other results are the factor of the gradients and the slot for new weights. The slot is None if the weights
        are copied to the device from the state.
        """
        found = CUpdateTask()
        present = (c_uint8 * max(len(bucket.slices) for bucket in self._buckets))()
        if not self._ok(self._library.tf_next_update(self._handle, timeout_s, ctypes.byref(found), present)):
            return None
        bucket = self._buckets[found.bucket]
        plan = bucket.plan
        with self.changed:
            task = self._to_update.pop(found.task)
        task.present = [i for i in range(len(bucket.slices)) if present[i]]
        task.grads = memory(found.grads, torch.float32 if self.sums_on_host else plan.dtype, plan.numel)
        slot = memory(found.weight_slot, plan.dtype, plan.numel) if found.weight_slot else None
        return task, found.factor, slot

    def finish_update(self, task: Task, weights: Sequence[Tensor]) -> None:
        """Report that an update from `next_update` is done. `weights`: the new weights of each slice."""
        task.grads = None
        addresses = (c_void_p * len(weights))(*(weight.data_ptr() for weight in weights))
        self._library.tf_finish_update(self._handle, task.handle, addresses)

    def warn_of_unlocked(self) -> None:
        """Warn once if memory for copies could not be page-locked."""
        if not self._has_warned and self.counters.num_unlocked:
            self._has_warned = True
            warnings.warn(
                "Host memory for copies could not be page-locked, so copies will be slow. Raise the limit with "
                "`ulimit -l unlimited`.",
                stacklevel=2,
            )


class Held(NamedTuple):
    """Buckets that a forward waits for, with their indices as an argument of native calls."""

    buckets: Sequence[Bucket]
    indices: ctypes.Array[c_int64]

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Held:
        return cls(buckets, indices_of(buckets))


def indices_of(buckets: Sequence[Bucket]) -> ctypes.Array[c_int64]:
    """Return the indices of buckets as an argument of native calls."""
    return (c_int64 * len(buckets))(*(bucket.plan.index for bucket in buckets))


def _closed() -> RuntimeError:
    return wrong_state("The optimizer cannot be used", "it is closed", "Build a new one to go on training.")


def _new_total(numel: int) -> Tensor:
    return hide_from_children(native.huge_zeros(numel, dtype=torch.float32))


def _index_of(device: Device) -> int:
    assert isinstance(device, CudaDevice)
    index = device.device.index
    return torch.cuda.current_device() if index is None else int(index)


def memory(address: int, dtype: torch.dtype, numel: int) -> Tensor:
    """Return host memory of the native executor as a tensor. The tensor does not keep the memory alive."""
    raw = (c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)
