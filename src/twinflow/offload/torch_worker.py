"""The thread that runs a user's optimizer on the host.

The native worker cannot call Python, so this thread takes its place. It asks the executor for the next update
(`next_update`) and reports the result (`finish_update`). It owns the bucket's state between these two calls. The
executor orders updates by deadline, and copies weights to the device after `finish_update`.
"""

from __future__ import annotations

import threading
import time

import torch

from twinflow.offload.executor import Executor
from twinflow.offload.job import HostOptimizer

_LOOK_S = 1.0  # how long the thread waits for an update before it checks whether the executor is closing


class TorchWorker:
    """Starts and joins the thread."""

    def __init__(self, executor: Executor, optimizer: HostOptimizer) -> None:
        self.busy_s = 0.0  # total time of updates
        self._executor = executor
        self._optimizer = optimizer
        self._thread = threading.Thread(target=self._loop, name="twinflow-torch-worker", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread. The executor must be closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        executor = self._executor
        try:
            while True:
                found = executor.next_update(_LOOK_S)
                if found is None:
                    continue
                task, factor, weight_slot = found
                start = time.perf_counter()
                with executor.device.trace.span("update", track="host", bucket=task.bucket.plan.index):
                    weights = self._optimizer.update(task, factor, weight_slot)
                self.busy_s += time.perf_counter() - start
                executor.finish_update(task, weights)
                del found, task
        except BaseException as error:
            if not executor.is_closing:
                executor.fail(error)
