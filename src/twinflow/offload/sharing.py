"""What the runtime needs from whoever shares the buckets with other ranks (room `zero`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from twinflow.device import Device, Event
from twinflow.offload.bucket import Bucket
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.job import Job, Task
from twinflow.offload.plan import BucketPlan
from twinflow.offload.settings import Settings


class PythonThread(Protocol):
    """A thread that ends by itself when the executor is closed."""

    def join(self) -> None:
        """Wait for its end."""
        ...


class NormReducer(Protocol):
    """Decides with other ranks, where each has its own rows of all parameters and somebody else sums gradients."""

    divisor: float

    @property
    def threads(self) -> Sequence[PythonThread]:
        """That end with the executor."""
        ...

    def close(self, job: Job, norms: Tensor, event: Event) -> None:
        """All tasks of the job are submitted; `norms` holds this rank's norms once `event` is done."""
        ...


class Sharing(Protocol):
    """Gradients of a whole bucket go in, and this rank's part of the sum becomes a task. New weights of this rank's
    part are in its parameters; those of the others come."""

    divisor: float  # gradients as they are submitted are so many times what was asked for: the mean, or the sum

    @property
    def threads(self) -> Sequence[PythonThread]:
        """That end with the executor."""
        ...

    def take_flat(self, bucket: Bucket) -> Tensor:
        """A device buffer to gather a whole bucket's gradients in, ready to be written on the calling stream."""
        ...

    def submit(self, task: Task) -> None:
        """A task whose gradients are complete on this rank once `task.ready` is done: every bucket, every time."""
        ...

    def close(self, job: Job, hits: Sequence[bool]) -> None:
        """All tasks of the job are submitted; `hits` says which parameters got a gradient on this rank."""
        ...

    def wait_for_sums(self) -> None:
        """Until all that was submitted has been summed over the ranks, and is with the executor."""
        ...

    def hold_back(self, job: Job) -> None:
        """A delayed update is in the state of every rank, to be sent with the next step."""
        ...

    def forget(self) -> None:
        """Nothing is under way, and what was still to be published will not come."""
        ...


Work = TypeVar("Work", covariant=True)


class Start(Protocol[Work]):
    """Starts what works between ranks."""

    def __call__(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        settings: Settings,
        where: torch.device,
    ) -> Work:
        """With all buckets of this rank."""
        ...


@dataclass(frozen=True)
class SharedBuckets:
    """Buckets that all ranks together have: this rank answers for a part of each."""

    wholes: Sequence[BucketPlan]
    start: Start[Sharing]


@dataclass(frozen=True)
class OwnBuckets:
    """Buckets of which each rank has its own; ranks only decide together."""

    start: Start[NormReducer]


Shards = SharedBuckets | OwnBuckets
