"""The work of a step: a job is one step, a task is one bucket's part in it. And what optimizers do with a task.

Who owns a task: the thread that takes gradients makes it, fills it and submits it. From then on a task on the host
belongs to the executor (csrc/executor.h has its phases), and one on the device to `DeviceWork` (device_work.py).
Where ranks share a bucket, the thread of the reducer has the task in between (zero/reducer.py).
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
    """What a job asks of the executor, which decides on it."""

    def new_job(self, job: Job) -> int:
        """The executor's number of a job."""
        ...

    def free_job(self, handle: int) -> None:
        """Nobody asks for it any more."""
        ...

    def decision_of(self, job: Job) -> Decision | None:
        """None where there is none yet."""
        ...

    def wait_for_decision(self, job: Job) -> Decision:
        """Block until it is known."""
        ...

    def drop(self, job: Job) -> None:
        """Nothing of the job shall happen."""
        ...


@dataclass(eq=False)
class Job:
    """One optimizer step: what was asked for when its gradients became final."""

    number: int
    options: Sequence[Options]  # of each param group
    limits: Limits
    scale: float  # of the gradients: the loss scale times the number of ranks
    executor: JobKeeper
    is_delayed: bool = False  # the weights go back one step later
    is_part: bool = False  # gradients of one of several backwards: only summed
    runs_ahead: bool = False  # updates may start before the clipping decision
    is_dropped: bool = False  # nothing of it happens
    tasks: list[Task] = field(default_factory=list)
    norms: Tensor | None = None  # of each bucket, where gradients are summed as tasks

    def __post_init__(self) -> None:
        self.is_released = not self.is_delayed  # the weights may go back
        self.after: Event | None = None  # ... when the work has ended that still needs the old ones
        self.on_device: list[Task] = []  # whose update on the device is still to be queued
        self.unsent: list[Task] = []  # ... whose new weights there are still to be copied into the parameters
        self.handle = self.executor.new_job(self)
        self._decision: Decision | None = None

    def __del__(self) -> None:
        self.executor.free_job(self.handle)

    @property
    def decision(self) -> Decision | None:
        """What came out, once that is known."""
        if self._decision is None:
            self._decision = self.executor.decision_of(self)
        return self._decision

    def wait_for_decision(self) -> Decision:
        """Block until it is known what comes out."""
        return self.executor.wait_for_decision(self)

    @property
    def is_open(self) -> bool:
        """Whether an update may write to the state itself."""
        return not self.limits.any or self.decision is not None

    @property
    def factor(self) -> float:
        """The factor to update with: the decided one, before that the one of an unclipped step."""
        decision = self.decision
        return decision.factor if decision is not None else 1.0 / self.scale

    def drop(self) -> None:
        """Before it is closed: nothing of it shall happen."""
        self.is_dropped = True
        self.executor.drop(self)


@dataclass(eq=False, slots=True)
class Task:
    """One bucket's part in a job."""

    bucket: Bucket
    job: Job
    present: list[int]  # the slices that have a gradient
    sources: list[tuple[int, Tensor]] = field(default_factory=list)  # offset in the bucket, and what to copy there
    flat: Tensor | None = None  # the device buffer the gradients are gathered in
    missing: set[int] = field(default_factory=set)  # parameters whose gradient has not come yet
    ready: Event | None = None  # the gradients are complete on the device
    is_held: bool = False  # which slices have a gradient is known only when all ranks have said so
    handle: int = -1  # the executor's
    grads: Tensor | None = None  # what an optimizer in Python or on the device updates with
    is_summed: bool = False  # on the device: the bucket's total has taken them in
    weights: Sequence[Tensor] = ()  # on the device: new weights of each slice, to go into the parameters

    @property
    def deadline(self) -> tuple[int, int]:
        """Earlier jobs first, then what the next forward needs first."""
        return self.job.number, self.bucket.deadline


class HostOptimizer(Updater, Protocol):
    """An optimizer in Python that updates buckets on the host, called by a thread of its own."""

    def update(self, task: Task, factor: float, weight_slot: Tensor | None) -> Sequence[Tensor]:
        """Update the task's bucket with `task.grads`; where the new weights of each slice are."""
        ...


class Passage(NamedTuple):
    """One update on the device, to be queued on a stream in this order. State that lives there is not moved."""

    load: Callable[[], None] | None
    update: Callable[[], None]
    store: Callable[[], None] | None
    weights: Sequence[Tensor] = ()  # new weights that are still to be copied into the parameters


class DeviceOptimizer(Updater, Protocol):
    """Updates buckets on the device."""

    reads_decision: bool  # whether an update takes the clipping decision from the device's memory

    def passage(self, task: Task, factor: float, decision: Tensor | None, stage: Stage | None) -> Passage:
        """The update of a task's bucket; all that may change until it runs is read now.

        `decision`: what `decide_there` has written by the time it runs; its factor multiplies `factor`. `stage`: for
        state that passes through.
        """
        ...

    def publish(self, bucket: Bucket) -> Sequence[Tensor]:
        """The weights that follow from the state, where it keeps them apart from the parameters."""
        ...
