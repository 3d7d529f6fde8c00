"""The norm of gradients of which every rank has a part: a thread that adds up what all ranks have measured.

This is all that ranks have to agree on where somebody else has summed and partitioned the gradients (stage 3).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from twinflow.device import Event
from twinflow.dist.group import Group
from twinflow.offload.bucket import Bucket
from twinflow.offload.clipping import decide
from twinflow.offload.device_work import DeviceWork
from twinflow.offload.executor import Executor
from twinflow.offload.job import Job
from twinflow.zero.reducer import of_all_axes, sum_of_squares


class NormReducer:
    """Decides on a step when all ranks have said what their gradients come to. An exception goes to whoever calls the
    optimizer next."""

    def __init__(
        self,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        group: Group,
        replica: Group | None,
        divisor: float,
    ) -> None:
        self.divisor = divisor  # what comes, the mean, is so many times what is wanted
        self.threads = (self,)
        self._executor = executor
        self._device_work = device_work
        self._buckets = buckets
        self._group = group
        self._replica = replica
        self._queue: queue.SimpleQueue[tuple[Job, Tensor, Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="twinflow-norm-reducer", daemon=True)
        self._thread.start()

    def close(self, job: Job, norms: Tensor, event: Event) -> None:
        """All tasks of the job are submitted; `norms` holds this rank's norms once `event` is done."""
        self._queue.put((job, norms, event))

    def join(self) -> None:
        """End the thread, after the executor was closed."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._executor.is_closing:
                self._decide(*item)
                del item
        except BaseException as error:
            if not self._executor.is_closing:
                self._executor.fail(error)

    def _decide(self, job: Job, norms: Tensor, event: Event) -> None:
        event.synchronize()
        own = [norm for norm, bucket in zip(norms.tolist(), self._buckets, strict=True) if bucket.plan.is_counted]
        sums = self._group.gather_rows(torch.tensor([sum_of_squares(own)], dtype=torch.float64))[:, 0]
        decision = decide(of_all_axes(sums, self._replica).tolist(), job.scale, job.limits)
        self._executor.decide(job, decision)
        self._device_work.close_job(job, None, None)
