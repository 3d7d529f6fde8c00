# SPDX-License-Identifier: Apache-2.0
"""The thread that updates buckets on the host with a user's own optimizer, which is written in Python.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A job is one
optimizer step, and a task is the work for one bucket in a job.

This thread replaces the native worker. It asks the executor for the next update (`next_update`). This is the update
whose weights the next forward needs first, of those whose gradients are on the host. Until `finish_update` the thread
owns the task, the gradients and the state of its bucket. An exception ends the thread and goes to the next caller of
the optimizer (`Executor.fail`). The thread ends when the executor is closed.
"""

from __future__ import annotations

import threading
import time

import torch

from twinflow.offload.executor import Executor
from twinflow.offload.job import HostOptimizer

_LOOK_S = 1.0  # longest wait for an update before the thread checks whether the executor is closing


class TorchWorker:
    """Makes the updates of one executor in a thread of its own."""

    def __init__(self, executor: Executor, optimizer: HostOptimizer) -> None:
        self.busy_s = 0.0  # seconds spent in updates so far
        self._executor = executor
        self._optimizer = optimizer
        self._thread = threading.Thread(target=self._loop, name="twinflow-torch-worker", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread. The executor must be closed."""
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
