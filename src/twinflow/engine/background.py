"""A checkpoint written beside training: what is written is frozen first, and a thread writes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from twinflow.checkpoint.tree import Leaf
from twinflow.offload.frozen import Frozen

LOGGER = logging.getLogger("twinflow")
Buckets = Callable[[Leaf], Sequence[int] | None]  # that a leaf's value depends on; None: it does not change


class BackgroundSave:
    """One checkpoint under way."""

    def __init__(self, write: Callable[[], object], frozen: Frozen | None) -> None:
        self._write, self._frozen = write, frozen
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="twinflow-save", daemon=False)

    def start(self) -> None:
        """From here on it happens beside what the caller does."""
        if self._frozen is not None:
            self._frozen.begin()
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: nobody will read, so nothing may wait for it
            if self._frozen is not None:
                self._frozen.end()
            raise

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            # A script may end without another call that would raise it.
            LOGGER.error(f"a checkpoint in the background was not written: {error!r}")
        finally:
            if self._frozen is not None:
                self._frozen.end()

    @property
    def is_done(self) -> bool:
        """Whether it is written, or has failed."""
        return not self._thread.is_alive()

    @property
    def peak_bytes(self) -> int:
        """The most host memory that copies have taken."""
        return self._frozen.peak_bytes if self._frozen is not None else 0

    def wait(self) -> None:
        """Until it is written; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def freeze(files: Mapping[str, Sequence[Leaf]], frozen: Frozen, buckets: Buckets) -> dict[str, list[Leaf]]:
    """The same leaves, with values as they are now whenever they are read. What may change, but with no bucket, is read
    at once."""
    made: dict[str, list[Leaf]] = {}
    for file, leaves in files.items():
        made[file] = []
        for leaf in leaves:
            read, depends_on = leaf.read, buckets(leaf)
            if depends_on is not None:
                read = frozen.add(leaf.read, depends_on, num_bytes(leaf))
                read = read if depends_on else _kept(read())
            made[file].append(leaf._replace(read=read))
    return made


def _kept(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


def num_bytes(leaf: Leaf) -> int:
    """Of its value."""
    numel = 1
    for size in leaf.shape:
        numel *= size
    return numel * leaf.dtype.itemsize
