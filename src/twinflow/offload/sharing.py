# SPDX-License-Identifier: Apache-2.0
"""The interfaces through which the runtime works with other ranks. The package `zero` implements them.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step, and a task is the work for one bucket in a job.

The runtime calls `take_flat` and `submit` in autograd's thread or in `step`, and the other methods in the user's
thread. The implementations run collectives in threads of their own. `take_flat` may wait for a free buffer.
`wait_for_sums` and `wait_until_reduced` wait for the other ranks. No other method blocks. After `submit` the task
belongs to the implementation, which gives this rank's part to the executor or to `DeviceWork`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """A Python thread that ends when the executor is closed."""

    def join(self) -> None:
        """Wait for the end of the thread."""
        ...


class NormReducer(Protocol):
    """Makes the clipping decision together with other ranks if each rank has its own rows of all parameters (stage 3).

    In this case torch sums the gradients over the ranks.
    """

    divisor: float  # gradients in tasks are this number times the mean or sum that `Zero.op` asks for

    @property
    def threads(self) -> Sequence[PythonThread]:
        """The threads that end when the executor is closed."""
        ...

    def close(self, job: Job, hits: Sequence[bool], norms: Tensor, event: Event) -> None:
        """Close a job whose tasks are all submitted. `hits`: which parameters got a gradient from this rank's backward.
        `norms` holds the norms of this rank once `event` is done.
        """
        ...


class Sharing(Protocol):
    """Sums the gradients of whole buckets over the ranks, and makes a task of this rank's part of each sum.

    After the update it gathers the new weights of all ranks, which is called publishing.
    """

    divisor: float  # gradients in tasks are this number times the mean or sum that `Zero.op` asks for

    @property
    def threads(self) -> Sequence[PythonThread]:
        """The threads that end when the executor is closed."""
        ...

    def take_flat(self, bucket: Bucket) -> Tensor:
        """Return a device buffer for the gradients of a whole bucket. The current stream may write to it."""
        ...

    def submit(self, task: Task) -> None:
        """Take over a task. Its gradients are complete on this rank once the event `task.ready` is done.

        In each backward the runtime submits all buckets or none.
        """
        ...

    def close(self, job: Job, hits: Sequence[bool]) -> None:
        """Close a job whose tasks are all submitted. `hits`: which parameters got a gradient on this rank."""
        ...

    def wait_for_sums(self) -> None:
        """Block until everything that was submitted is summed over the ranks and given to the executor."""
        ...

    def wait_until_reduced(self, job: Job) -> None:
        """Block until all buckets of an open job are summed over the ranks and given to the executor. All of them must
        be submitted, on all ranks.
        """
        ...

    def hold_back(self, job: Job) -> None:
        """Note that the state of every rank contains a delayed update. The next step publishes its weights."""
        ...

    def forget(self) -> None:
        """Forget weights that are not published yet. Call it only while no update is under way."""
        ...


class MatrixExchange(Protocol):
    """Orthogonalises matrices of which each rank has some rows (stage 3): one rank gathers all rows of a matrix.

    All ranks must orthogonalise the same matrices in the same order. Updates run on several streams, which are threads
    on a CPU. An update therefore takes a turn when it is queued, and runs the exchange when its turn comes.
    """

    def take_turn(self) -> int:
        """Return the number of the next exchange."""
        ...

    def orthogonalise(
        self,
        turn: int,
        rows: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        work: Callable[[Mapping[int, Tensor]], None],
    ) -> None:
        """Replace this rank's rows of matrices with the given whole shapes. `work` orthogonalises, in place, the whole
        matrices that this rank gets, by their index.
        """
        ...


Work = TypeVar("Work", covariant=True)


class Start(Protocol[Work]):
    """Makes a `Sharing` or a `NormReducer` and starts its threads."""

    def __call__(
        self,
        device: Device,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        settings: Settings,
        where: torch.device,
    ) -> Work:
        """`buckets`: all buckets of this rank. `where`: the device of the parameters."""
        ...


@dataclass(frozen=True)
class SharedBuckets:
    """Buckets that ranks share: each rank has the state of a part of each. `wholes`: plans of undivided buckets."""

    wholes: Sequence[BucketPlan]
    start: Start[Sharing]


@dataclass(frozen=True)
class OwnBuckets:
    """Each rank has buckets of its own. Ranks only make the clipping decision together."""

    start: Start[NormReducer]


Shards = SharedBuckets | OwnBuckets
