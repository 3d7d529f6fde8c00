# SPDX-License-Identifier: Apache-2.0
"""Threads that call functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Threads:
    """Threads that begin functions in the order of `put`. Their names begin with that of the thread which makes them.

    They are not a ThreadPoolExecutor, because a script may end while a checkpoint is written in the background, and at
    the end of a script the executors of Python take no more work.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._error: BaseException | None = None
        name = f"{threading.current_thread().name} {name}"
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def put(self, call: Callable[[], object]) -> None:
        with self._changed:
            self._num_left += 1
        self._queue.put(call)

    def wait(self, num_left: int = 0) -> None:
        """Waits until at most `num_left` calls have not returned. Raises the first error. The calls after an error are
        left out.
        """
        with self._changed:
            while self._num_left > num_left:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Ends the threads after the calls that they make now. The other calls are left out."""
        with self._changed:
            self._error = self._error or RuntimeError("The threads are closed.")
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                if self._error is None:
                    call()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            del call  # so that the tensors which it writes are freed now, and not after the next call
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
