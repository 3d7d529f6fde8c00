"""Which rank of a pipeline failed first, and of what: told to all of them through the process group's store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from twinflow.launch.store import group_store, own_keys, wait_for

T = TypeVar("T")
HANG_UP_S: Final = 5.0  # more than threads need to come back when connections are closed
_CAUSE_CHARS: Final = 500  # of an error's text, for other ranks


class FirstCause:
    """What went wrong first, in the process group's store: every rank finds the same there.

    The store may end with the process that keeps it, and is never waited for for long.
    """

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._index, self._num_ranks = index, len(ranks)
        kind = f"pipeline/{'-'.join(map(str, ranks))}"
        self._keys = own_keys(group_store(), kind, index) if len(ranks) > 1 else None
        self._has_waited = False

    def after(self, error: BaseException) -> str:
        """The first cause, which is this error unless a rank has told of another: its rank, and its text."""
        text = f"{type(error).__name__}: {error}"[:_CAUSE_CHARS].encode(errors="replace").decode()
        own = f"pipeline rank {self._index}: {text}"
        return _soon(lambda: self._tell(own)) or own

    def wait_until_known(self) -> None:
        """Let the other ranks look: this one's process may be about to end, and the store with it. Waits once."""
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
    """What it returns; None where it fails, or does not come back in time."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    with suppress(RuntimeError):  # no more threads where the interpreter ends
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(HANG_UP_S)
    return results[0] if results else None
