"""The gradient norm with ZeRO stage 3, where every rank has a part of the gradients.

torch's `fully_shard` has summed and partitioned the gradients, so ranks agree only on the norm. The thread
"twinflow-norm-reducer" takes jobs (each is the update of one step) from a queue, waits for this rank's norms, gathers
the norms of all ranks and gives the clipping decision to the executor. All ranks close their jobs in the same order,
which orders the collectives.
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
    """Decides on clipping and skipping when the norms of all ranks are known.

    An exception in the thread is raised by the next call of the optimizer.
    """

    def __init__(
        self,
        executor: Executor,
        device_work: DeviceWork,
        buckets: Sequence[Bucket],
        group: Group,
        replica: Group | None,
        divisor: float,
    ) -> None:
        self.divisor = divisor  # gradients are divided by it: `fully_shard` computes the mean
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
        """Queues a job whose tasks are all submitted. `norms` has this rank's norms after `event`."""
        self._queue.put((job, norms, event))

    def join(self) -> None:
        """Ends the thread. The executor must be closed."""
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
