# SPDX-License-Identifier: Apache-2.0
"""Jobs and tasks, and the interfaces of optimizers that process tasks. A job is one optimizer step. A task is the work
for one bucket in a job.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together.

Ownership of a task: the thread that takes gradients from `.grad` makes the task, fills it and submits it. This is
autograd's thread, or the user's thread in `step`. After `submit` a task whose state is on the host belongs to the
executor (csrc/executor.h lists the phases of such a task). A task whose state is on the device belongs to `DeviceWork`,
whose lock guards it (device_work.py). If ranks share the bucket, the task first belongs to the thread of the reducer
(zero/reducer.py).

Ownership of a job: the thread that calls the runtime makes the job, and closes it when all tasks are submitted. The
lock of `DeviceWork` guards `on_device` and `unsent`. The executor owns the clipping decision, and any thread may ask
for it. The executor keeps its record of a job until the Python object is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from twinflow.device import Event
from twinflow.offload.bucket import Bucket, Updater
from twinflow.offload.clipping import Decision, Limits
from twinflow.offload.staging import Stage
from twinflow.rules.rule import Options


class JobKeeper(Protocol):
    """The methods of `Executor` that a job calls. executor.py describes them."""

    def new_job(self, job: Job) -> int: ...
    def free_job(self, handle: int) -> None: ...
    def decision_of(self, job: Job) -> Decision | None: ...
    def wait_for_decision(self, job: Job) -> Decision: ...
    def drop(self, job: Job) -> None: ...


@dataclass(eq=False)
class Job:
    """One optimizer step, or a backward of it (`is_part`), with the options and limits at its first gradients."""

    number: int
    options: Sequence[Options]  # of each param group
    limits: Limits
    scale: float  # the gradients are the true gradients times this: the loss scale times `divisor` (sharing.py)
    executor: JobKeeper
    is_delayed: bool = False  # the new weights are copied into the parameters one step later
    is_part: bool = False  # the job of one of several backwards, whose gradients are only added to a sum
    runs_ahead: bool = False  # updates may start before the clipping decision
    is_submitted: bool = False  # all of its tasks are submitted, before `step`
    is_dropped: bool = False  # all updates of this job are discarded
    tasks: list[Task] = field(default_factory=list)
    norms: Tensor | None = None  # norm of each bucket, if tasks are summed over several backwards

    def __post_init__(self) -> None:
        self.is_released = not self.is_delayed  # whether new weights may be copied into the parameters
        self.after: Event | None = None  # the copy waits for this event: the end of the work that uses the old weights
        self.on_device: list[Task] = []  # tasks whose update on the device is not queued yet
        self.unsent: list[Task] = []  # tasks on the device whose new weights are not copied into the parameters yet
        self.handle = self.executor.new_job(self)
        self._decision: Decision | None = None

    def __del__(self) -> None:
        if hasattr(self, "handle"):  # the constructor may have failed before it
            self.executor.free_job(self.handle)

    @property
    def decision(self) -> Decision | None:
        """The clipping decision, or None if it is not known yet."""
        if self._decision is None:
            self._decision = self.executor.decision_of(self)
        return self._decision

    def wait_for_decision(self) -> Decision:
        """Block until the clipping decision is known, and return it."""
        return self.executor.wait_for_decision(self)

    @property
    def is_open(self) -> bool:
        """Whether an update may write to the state: gradients have no limits, or the clipping decision is known."""
        return not self.limits.any or self.decision is not None

    @property
    def factor(self) -> float:
        """The factor for the gradients. Before the decision it is the factor of a step that is not clipped."""
        decision = self.decision
        return decision.factor if decision is not None else 1.0 / self.scale

    def drop(self) -> None:
        """Discard all updates of this job. Call it only before the job is closed."""
        self.is_dropped = True
        self.executor.drop(self)


@dataclass(eq=False, slots=True)
class Task:
    """The work for one bucket in a job."""

    bucket: Bucket
    job: Job
    present: list[int]  # the slices that have a gradient
    sources: list[tuple[int, Tensor]] = field(default_factory=list)  # offset in the bucket, and the gradient to copy
    flat: Tensor | None = None  # the device buffer in which the gradients are gathered
    missing: set[int] = field(default_factory=set)  # parameters whose gradient has not come yet
    ready: Event | None = None  # the gradients are complete on the device
    is_held: bool = False  # waits until all ranks have exchanged which slices have a gradient
    handle: int = -1  # number of the task in the executor
    grads: Tensor | None = None  # gradients for an optimizer in Python or on the device
    is_summed: bool = False  # on the device: the gradients are in the bucket's total
    weights: Sequence[Tensor] = ()  # on the device: new weights of each slice, to be copied into the parameters

    @property
    def deadline(self) -> tuple[int, int]:
        """Sort key: earlier jobs first, then the buckets that the next forward needs first."""
        return self.job.number, self.bucket.deadline


class HostOptimizer(Updater, Protocol):
    """An optimizer in Python that updates buckets on the host. `TorchWorker` calls it in a thread of its own."""

    def update(self, task: Task, factor: float, weight_slot: Tensor | None) -> Sequence[Tensor]:
        """Update a bucket with factor * `task.grads`. Returns the slices' new weights, in `weight_slot` if given."""
        ...


class Passage(NamedTuple):
    """One update on the device: functions that are queued on a stream in this order.

    `load` and `store` copy state from the host and back. They are None if the state is on the device.
    """

    load: Callable[[], None] | None
    update: Callable[[], None]
    store: Callable[[], None] | None
    weights: Sequence[Tensor] = ()  # new weights that are still to be copied into the parameters


class DeviceOptimizer(Updater, Protocol):
    """An optimizer that updates buckets on the device."""

    reads_decision: bool  # whether an update reads the clipping decision from device memory

    def passage(self, task: Task, factor: float, decision: Tensor | None, stage: Stage | None) -> Passage:
        """Return the update of a task's bucket. Values that may change before the update runs are read now.

        `decision`: a tensor that contains the clipping decision by the time the update runs (`decide_there`). Its
        factor multiplies `factor`. `stage`: the stream, and the device buffer for state that is on the host.
        """
        ...

    def publish(self, bucket: Bucket) -> Sequence[Tensor]:
        """Return the weights in the state, if the state has weights that are separate from the parameters."""
        ...
