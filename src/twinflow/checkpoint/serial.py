# SPDX-License-Identifier: Apache-2.0
"""A thread that calls functions one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SerialThread:
    """A thread that calls functions in the order of `put`. Its name begins with that of the thread which makes it.

    It is not a ThreadPoolExecutor, because a script may end while a checkpoint is written in the background, and at the
    end of a script the executors of Python take no more work.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._idle = threading.Condition()
        self._num_left = 0
        self._error: BaseException | None = None
        owner = threading.current_thread().name
        self._thread = threading.Thread(target=self._run, name=f"{owner} {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        with self._idle:
            self._num_left += 1
        self._queue.put(call)

    def wait(self) -> None:
        """Waits until all calls have returned. Raises the first error. The calls after an error are left out."""
        with self._idle:
            while self._num_left:
                self._idle.wait()
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Ends the thread after the current call. The other calls are left out."""
        with self._idle:
            self._error = self._error or RuntimeError("The thread is closed.")
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                if self._error is None:
                    call()
            except BaseException as error:
                with self._idle:
                    self._error = self._error or error
            del call  # so that the tensor which it writes is freed now, and not after the next call
            with self._idle:
                self._num_left -= 1
                self._idle.notify_all()
