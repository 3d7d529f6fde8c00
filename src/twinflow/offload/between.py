"""What is done to a runtime between steps: another number of backwards, state that moves, a checkpoint's counters."""

from __future__ import annotations

import math

from twinflow.offload import changes
from twinflow.offload.bucket import Bucket, Job, Task
from twinflow.offload.gate import Decision, Gate
from twinflow.offload.pools import fit_slots, flat_bytes
from twinflow.offload.runtime import Runtime
from twinflow.offload.settings import Settings


def change(runtime: Runtime, settings: Settings) -> None:
    """Another number of backwards from the next step on."""
    if runtime.has_gradients:
        raise RuntimeError("the number of backwards of a step is changed while gradients of one are there")
    runtime.wait()
    runtime.settings = settings
    runtime.board.sums_on_host = settings.sums_on_host
    _fit_pools(runtime)
    runtime.collector.num_parts = settings.num_gathered


def move(runtime: Runtime, bucket: Bucket, place: str) -> None:
    """Let a bucket's state live in another place from now on. MemoryError, and nothing has changed, where that is full.
    Only after `wait` and `wait_for_copies`, when nothing of it is under way."""
    runtime.wait_for_readers()
    if place != bucket.plan.place:
        changes.move(bucket, place, runtime.updaters[place], runtime.options())
        runtime.board.publish_again(bucket)
        _fit_pools(runtime)


def _fit_pools(runtime: Runtime) -> None:
    board, settings, buckets = runtime.board, runtime.settings, runtime.buckets
    fit_slots(board, settings, sum(not bucket.is_on_device for bucket in buckets))
    board.flats.max_bytes = flat_bytes(settings, [bucket.plan for bucket in buckets])


def forget_jobs(runtime: Runtime, num_jobs: int) -> None:
    """Start counting anew: the state and the weights are now somebody else's."""
    runtime.num_jobs, runtime.last = num_jobs, None
    board, sharing = runtime.board, runtime.sharing
    if runtime.parking is not None:
        runtime.parking.leave_all()
    with board.changed:
        if sharing is not None:
            sharing.forget()  # before buckets look as if they had been sent
        for task in board.outbox:  # a delayed update that was still to be sent
            board.free_shadow(task)
        board.outbox.clear()
        for bucket in runtime.buckets:
            bucket.due = bucket.sent = bucket.updated = bucket.published = num_jobs


def hold_back(runtime: Runtime, number: int) -> None:
    """The state holds a delayed update that the weights do not: send it with the next step."""
    gate = Gate(runtime.settings.limits, 1.0)
    gate.decision = Decision(norm=math.nan, factor=1.0, skip=False, clipped=False)
    job = Job(number, (), gate, is_delayed=True)
    job.tasks = [Task(bucket, job, list(range(len(bucket.slices)))) for bucket in runtime.buckets]
    runtime.board.hold_back(job.tasks)
    if runtime.sharing is not None:
        runtime.sharing.hold_back(job)
    runtime.last, runtime.num_jobs = job, number
