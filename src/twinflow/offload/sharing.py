"""What the runtime needs from whoever shares the buckets with other ranks (room `zero`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from twinflow.device import Device
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket, Job, Task
from twinflow.offload.plan import BucketPlan
from twinflow.offload.settings import Settings

if TYPE_CHECKING:
    from twinflow.offload.threads import BoardThread


class Sharing(Protocol):
    """Gradients of a whole bucket go in; this rank's part of the sum goes to the board as a task. New weights of this
    rank's part are in its parameters; the others' come."""

    reduces: bool  # whether gradients come here to be summed; else only `close_job` is called, in place of the board's
    divisor: float  # gradients as they come to the board are so many times what was asked for: the mean, or the sum
    threads: Sequence[BoardThread]

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
        """Until all that was submitted has been summed over the ranks, and is on the board."""
        ...

    def hold_back(self, job: Job) -> None:
        """A delayed update is in the state of every rank, to be sent with the next step."""
        ...

    def forget(self) -> None:
        """Nothing is under way, and what was still to be published will not come."""
        ...


@dataclass(frozen=True)
class Shards:
    """The buckets as all ranks together have them (None: each rank has its own), and what works between ranks."""

    wholes: Sequence[BucketPlan] | None
    start: Callable[[Device, Board, Sequence[Bucket], Settings, torch.device], Any]
