# SPDX-License-Identifier: Apache-2.0
"""Changes of a runtime between steps: the number of backwards in a step, the place of state and of weights, the count
of steps.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. The place of a
bucket's state is the host, the device ("resident"), or the host with updates on the device ("streamed").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from twinflow.errors import wrong_state
from twinflow.offload import changes
from twinflow.offload.bucket import Bucket
from twinflow.offload.clipping import Decision, Limits
from twinflow.offload.job import Job, Task
from twinflow.offload.plan import HOST
from twinflow.offload.pools import fit_pools
from twinflow.offload.runtime import Runtime
from twinflow.offload.settings import Settings


def change(runtime: Runtime, settings: Settings) -> None:
    """Applies settings with another number of backwards in a step, from the next step on."""
    if runtime.has_gradients:
        raise wrong_state(
            "The number of backwards in a step cannot be changed",
            "gradients of the current step have been collected already",
            "Change the number after step() and before the next backward().",
        )
    runtime.wait()
    runtime.change_settings(settings)
    fit_pools(runtime.executor, settings, runtime.buckets)


def move(runtime: Runtime, bucket: Bucket, place: str) -> None:
    """Moves the state of a bucket to another place. Call `wait` and `wait_for_copies` first.

    Raises MemoryError if the other place has too little memory. Nothing has changed then.
    """
    runtime.wait_for_readers()
    plan = bucket.plan.at(place)
    if plan.place == bucket.plan.place:
        return
    last = runtime.steps.last
    has_unsent = runtime.executor.take_unsent(bucket)  # weights of a delayed update that were not copied to the device
    if last is not None and any(task.bucket is bucket for task in last.unsent):
        last.unsent = [task for task in last.unsent if task.bucket is not bucket]
        has_unsent = True
    try:
        changes.move(bucket, plan, runtime.updaters[plan.updater], runtime.options())
    finally:  # also if there was too little memory
        if has_unsent and last is not None:
            _hold_back(runtime, last, bucket)
    fit_pools(runtime.executor, runtime.settings, runtime.buckets)


def move_block(runtime: Runtime, block: int, place: str) -> None:
    """Moves state and weights of a block, if the weights of blocks with state on the host are there too.

    Call `wait` and `wait_for_copies` first. Raises MemoryError if the other place has too little memory. The block then
    stays where it is, as far as memory allows. In any case it can be trained: state on the host can have its weights on
    the device.
    """
    buckets = [bucket for bucket in runtime.buckets if bucket.plan.block == block]
    before = [bucket.plan.place for bucket in buckets]
    was_on_host = all(bucket.offloads_params for bucket in buckets)
    try:
        _move_block(runtime, block, buckets, [place] * len(buckets), on_host=place == HOST)
    except MemoryError:
        with suppress(MemoryError):
            _move_block(runtime, block, buckets, before, was_on_host)
        raise


def _move_block(runtime: Runtime, block: int, buckets: Sequence[Bucket], places: Sequence[str], on_host: bool) -> None:
    """Moves the weights while all state of the block is on the host, because the weights are part of that state."""
    if not on_host:
        runtime.place_weights(block, on_host)
    for bucket, place in zip(buckets, places, strict=True):
        move(runtime, bucket, place)
    if on_host:
        runtime.place_weights(block, on_host)


def forget_jobs(runtime: Runtime, num_jobs: int) -> None:
    """Sets the count of steps, because a checkpoint has replaced state and weights."""
    runtime.steps.count_from(num_jobs, None)
    if runtime.param_offload is not None:
        runtime.param_offload.leave_all()
    if runtime.sharing is not None:
        runtime.sharing.forget()  # first, because `reset` marks the weights of all buckets as sent
    runtime.executor.reset(num_jobs)


def hold_back(runtime: Runtime, number: int) -> None:
    """Notes that the state contains a delayed update. The next step copies its weights to the device."""
    job = Job(number, (), Limits(), 1.0, runtime.executor, is_delayed=True)
    runtime.executor.decide(job, Decision(norm=math.nan, factor=1.0, skip=False, clipped=False))
    for bucket in runtime.buckets:
        _hold_back(runtime, job, bucket)
    if runtime.sharing is not None:
        runtime.sharing.hold_back(job)
    runtime.steps.count_from(number, job)


def _hold_back(runtime: Runtime, job: Job, bucket: Bucket) -> None:
    task = Task(bucket, job, list(range(len(bucket.slices))))
    job.tasks = [*(known for known in job.tasks if known.bucket is not bucket), task]
    if bucket.is_on_device:
        runtime.device_work.hold_back(task)
    else:
        runtime.executor.hold_back(job, bucket)
