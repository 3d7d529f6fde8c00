"""Checkpoints that a thread writes while training continues.

The thread "twinflow-save" writes the files. Before it starts, `Frozen.begin` freezes the state (offload/frozen.py):
updates of a bucket then wait until its state has been read or copied. `Frozen.end` releases all buckets when the thread
has written the files or has failed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from twinflow.checkpoint import Entry
from twinflow.offload.frozen import Frozen

LOGGER = logging.getLogger("twinflow")
Buckets = Callable[[Entry], Sequence[int] | None]  # the buckets whose updates change an entry; None: it never changes


class BackgroundSave:
    """A checkpoint that is being written."""

    def __init__(self, write: Callable[[], object], frozen: Frozen | None) -> None:
        self._write = write
        self._frozen = frozen
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="twinflow-save", daemon=False)

    def start(self) -> None:
        """Freezes the state and starts the thread."""
        if self._frozen is not None:
            self._frozen.begin()
        try:
            self._thread.start()
        except RuntimeError:  # no thread will read the state, so updates must not wait for it
            if self._frozen is not None:
                self._frozen.end()
            raise

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            # `wait` raises the error too, but a script may end without calling it.
            LOGGER.error(f"The checkpoint in the background was not written: {error!r}")
        finally:
            if self._frozen is not None:
                self._frozen.end()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is written or has failed."""
        return not self._thread.is_alive()

    @property
    def peak_bytes(self) -> int:
        """The largest amount of host memory that copies of the state have used."""
        return self._frozen.peak_bytes if self._frozen is not None else 0

    def wait(self) -> None:
        """Waits until the checkpoint is written. Raises the exception of the thread if it has failed."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def freeze(files: Mapping[str, Sequence[Entry]], frozen: Frozen, buckets: Buckets) -> dict[str, list[Entry]]:
    """Replaces the `read` of each entry by a function that returns the present value of the entry at any later time.

    An entry that may change, but not by the update of a bucket, is read at once.
    """
    made: dict[str, list[Entry]] = {}
    for file, leaves in files.items():
        made[file] = []
        for leaf in leaves:
            read, depends_on = leaf.read, buckets(leaf)
            if depends_on is not None:
                read = frozen.add(leaf.read, depends_on, leaf.num_bytes)
                read = read if depends_on else _kept(read())
            made[file].append(replace(leaf, read=read))
    return made


def _kept(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value
