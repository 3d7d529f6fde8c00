"""Finds the pipeline rank that failed first and its error, through the store of the process group.

`_soon` runs each access to the store on a daemon thread with a time limit, because the process that hosts the store may
already have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from twinflow.launch.store import group_store, own_keys, wait_for

T = TypeVar("T")
HANG_UP_S: Final = 5.0  # longer than threads need to return after connections are closed
_CAUSE_CHARS: Final = 500  # limit of an error's text for other ranks


class FirstCause:
    """The first error of a pipeline, in the store of the process group. Every rank reads the same error.

    The store ends with the process that hosts it, so every access has a short time limit.
    """

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._index, self._num_ranks = index, len(ranks)
        kind = f"pipeline/{'-'.join(map(str, ranks))}"
        self._keys = own_keys(group_store(), kind, index) if len(ranks) > 1 else None
        self._has_waited = False

    def after(self, error: BaseException) -> str:
        """Report an error. Returns the rank and the text of the first reported error, which may be this one."""
        text = f"{type(error).__name__}: {error}"[:_CAUSE_CHARS].encode(errors="replace").decode()
        own = f"pipeline rank {self._index}: {text}"
        return _soon(lambda: self._tell(own)) or own

    def wait_until_known(self) -> None:
        """Wait until the other ranks have read the error, because the store may end with this process. Waits only
        once."""
        keys, has_waited, self._has_waited = self._keys, self._has_waited, True
        if keys is not None and not has_waited:
            names = [f"known/{i}" for i in range(self._num_ranks)]
            _soon(lambda: wait_for(keys, names, HANG_UP_S))

    def _tell(self, own: str) -> str:
        if self._keys is None:
            return own
        first = self._keys.compare_set("first", "", own)
        self._keys.set(f"known/{self._index}", "1")
        return first.decode(errors="replace")


def _soon(work: Callable[[], T]) -> T | None:
    """The result of `work`. None if it fails or does not return in time."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    with suppress(RuntimeError):  # a thread cannot be started while the interpreter shuts down
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(HANG_UP_S)
    return results[0] if results else None
