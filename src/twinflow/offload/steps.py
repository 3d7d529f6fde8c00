# SPDX-License-Identifier: Apache-2.0
"""Opens a job for the gradients of a step, sums the gradients of several backwards, closes the job, and waits for its
updates.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

`GradientTaker` decides when gradients are taken and when a step is dropped, and `Runtime` when a step is closed.
`Steps` carries out these decisions.

A step is one job. If the host sums the gradients of several backwards (`Settings.sums_on_host`), each backward except
the last is a separate job, which is called a part. The gradients of a part are only added to the sums.

Threads: only the thread that calls the runtime uses `Steps` and the open job (runtime.py). A closed job belongs to the
executor and to `DeviceWork`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinflow.device import Device
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.clipping import Limits
from twinflow.offload.collector import Collector
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.job import Job
from twinflow.offload.settings import Settings
from twinflow.offload.sharing import NormReducer, Sharing
from twinflow.offload.speculative_stores import SpeculativeStores
from twinflow.offload.sync import READERS
from twinflow.offload.taken_gradient import TakenGradient
from twinflow.rules.rule import Options


class Steps:
    """The open step, the previous one, and the operations on them."""

    def __init__(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        collector: Collector,
        speculative_stores: SpeculativeStores,
        params: Sequence[Param],
        buckets: Sequence[Bucket],
        settings: Settings,
        sharing: Sharing | None,
        norm_reducer: NormReducer | None,
    ) -> None:
        self._device = device
        self._executor = executor
        self._device_work = device_work
        self._collector = collector
        self._speculative_stores = speculative_stores
        self._params = params
        self._buckets = buckets
        self._settings = settings
        self._sharing = sharing
        self._norm_reducer = norm_reducer
        self.job: Job | None = None  # the open job: the step, or the part of a step, that gets gradients now
        self.last: Job | None = None  # the previous step
        # The last jobs with even and odd numbers. Each job uses the memory for norms and decision of the job before the
        # last one.
        self._users: dict[int, Job] = {}
        self.num_jobs = 0  # number of steps so far, including the open one
        self.num_parts = 0  # backwards of this step whose gradients were submitted to be summed

    def change_settings(self, settings: Settings) -> None:
        """Use other settings from the next step on."""
        self._settings = settings
        self._collector.set_num_parts(settings.num_gathered)

    def count_from(self, num_jobs: int, last: Job | None) -> None:
        """Set the number of steps so far. Call it only while no step is open.

        `last`: the delayed job whose weights are still to be copied into the parameters, if there is one.
        """
        self.num_jobs = num_jobs
        self.last = last

    @property
    def is_part_open(self) -> bool:
        """Whether the open job is a part: one of several backwards whose gradients are summed."""
        return self.job is not None and self.job.is_part

    @property
    def has_unsent(self) -> bool:
        """Whether the state contains a delayed update whose weights are not yet in the parameters."""
        return self.last is not None and not self.last.is_released

    # The open job.

    def open(self, options: Sequence[Options], scale: float) -> None:
        """Open the job of a step. If a step has parts, this is the job of its last backward.

        `scale`: the gradients are the true gradients times this number.
        """
        self.num_jobs += 1
        before = self._users.get(self.num_jobs % 2)
        if before is not None:  # it is over if forwards since then have waited for all weights
            self._executor.wait_for_decision(before)
            self._device_work.wait_for_readers(before)
        settings = self._settings
        is_delayed = settings.delayed_update and self.num_jobs > settings.delayed_update_start
        self.job = Job(
            self.num_jobs,
            options,
            settings.limits,
            scale,
            self._executor,
            is_delayed=is_delayed,
            runs_ahead=settings.may_run_ahead and not is_delayed,
        )
        if settings.sums_on_host:
            self._executor.measure(self.job, self._collector.new_norms(self.job))
        self._collector.zero_norms()

    def open_part(self) -> None:
        """Open a job for one backward whose gradients are only added to the sums."""
        self.job = Job(self.num_jobs + 1, (), Limits(), 1.0, self._executor, is_part=True)

    def close_part(self) -> None:
        """Close the open job if it is a part."""
        if self.job is not None and self.job.is_part:
            self._collector.complete(self.job, self._params)
            for param in self._params:
                param.hits = 0
            self.num_parts += 1
            self.job = None

    def fill_parts(self) -> None:
        """Submit zeros for backwards that this rank did not have, because other ranks may have had them."""
        if self._sharing is not None and self._settings.sums_on_host and self.job is None:
            while self.num_parts + 1 < self._settings.accumulation_steps:
                self.open_part()
                self.close_part()

    def submit_rest(self) -> None:
        """Submit the rest of the open job, if there is one, and wait until all gradients are summed over the ranks."""
        assert self._sharing is not None
        job = self.job
        if job is None:
            self._sharing.wait_for_sums()
        else:
            if not job.is_submitted:
                self._collector.complete(job, self._params)
                job.is_submitted = True
            self._sharing.wait_until_reduced(job)
        if self._settings.sums_on_host:
            self._executor.wait_for_sums()
            self._device.stream("update").synchronize()

    def close(self, job: Job, is_taking: bool, stand_in: Callable[[Param], TakenGradient]) -> None:
        """Submit the rest of the open job and close it, without waiting for its updates.

        `is_taking`: gradients were taken during backward. Otherwise they are taken from `.grad` now, where `stand_in`
        replaces them.
        """
        if is_taking:
            if not job.is_submitted:
                self._collector.complete(job, self._params)
        else:
            self._collector.take_all(job, self._params, stand_in)
        if not job.is_dropped:
            self.release()  # the last job's weights are copied from the state before this job's updates change it
        if self._sharing is None:
            self._users[job.number % 2] = job
        if self._sharing is not None:
            self._sharing.close(job, [param.was_hit for param in self._params])
        elif self._norm_reducer is not None:
            hits = [param.was_hit and not param.is_filled for param in self._params]
            self._norm_reducer.close(job, hits, *self._collector.fetch_norms(job))
        elif self._settings.sums_on_host:
            self._close_sums(job)
        else:
            there, here, event = self._collector.fetch_decision(job)
            if self.last is not None and job.on_device:
                self._executor.wait_for_decision(self.last)  # the count of updates depends on this decision
            self._executor.close_job(job, here, event)
            self._device_work.close_job(job, there, event)
        self.job = None
        self.num_parts = 0
        if job.is_dropped:  # the weights do not change
            return
        if job.is_released:
            self._executor.make_due(job)
        self._executor.collect()
        self._speculative_stores.after_step()
        self._executor.warn_of_unlocked()
        self.last = job

    def _close_sums(self, job: Job) -> None:
        """Close a job whose gradients are summed. Buckets without a gradient in the last backward get a task too."""
        known = {task.bucket for task in job.tasks}
        for bucket in self._buckets:
            if bucket in known:
                continue
            owner = self._device_work.add_nothing if bucket.is_on_device else self._executor.submit_sum
            task = owner(job, bucket)
            if task is not None:
                job.tasks.append(task)
        measures_there = any(task.bucket.is_on_device for task in job.tasks)
        self._executor.close_sums(job, self._device.stream("update").record() if measures_there else None)
        self._device_work.close_job(job, None, None)

    def forget_sums(self) -> None:
        """Discard the sums of a step that has parts and no open job."""
        if self._sharing is not None:
            self._sharing.wait_for_sums()
        self._executor.forget_sums()
        self._device_work.forget_sums(self._buckets)
        self.num_parts = 0

    # The last job.

    def release(self) -> None:
        """Allow the weights of a delayed job to be copied into the parameters. The next forward waits for them."""
        job = self.last
        if job is not None and not job.is_released:
            self._executor.release(job, self._device.compute().record())
            self._device_work.release(job)
            self._executor.make_due(job)

    def wait(self) -> None:
        """Block until all updates that have begun are done, and all weights that the next forward uses are copied."""
        self._executor.wait_until_shown(self._buckets)
        if self.last is not None:
            self._executor.wait_for_decision(self.last)
            self._executor.wait_until_done(self.last)
        self._executor.wait_for_weights([bucket for bucket in self._buckets if not bucket.offloads_params])
        for bucket in self._buckets:
            if bucket.stored is not None and READERS not in self._device.disabled:
                bucket.stored.synchronize()
        if any(bucket.is_on_device for bucket in self._buckets):  # updates whose weights are not sent yet
            self._device.hold_compute(self._device.stream("update").record(), READERS)
        self._device_work.count_steps()

    def wait_for_copies(self) -> None:
        """Block until no stream reads the state, so that this thread may write to it. Call `wait` first."""
        for bucket in self._buckets:
            for event in (self._executor.weights_copied_event(bucket), self._executor.published_event(bucket)):
                if event is not None:
                    event.synchronize()
        if any(bucket.is_on_device for bucket in self._buckets):
            self._device.stream("update").synchronize()
