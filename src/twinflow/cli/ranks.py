# SPDX-License-Identifier: Apache-2.0
"""`twinflow train` on several ranks: communication between the ranks. All ranks end a run together.

All ranks make the same calls in the same order, and every decision depends only on numbers that all ranks have. An
error on one rank during preparation is sent to all ranks (`Ranks.together`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group, new_group
from twinflow.engine import Engine
from twinflow.launch.environment import ALONE, RankEnvironment, init_distributed

_JOIN_S: Final = 1800.0  # timeout of torch's process group, as in `initialize`
_TALK: Final = timedelta(hours=2)  # the other ranks wait while one rank tokenizes a large text
_FIRST_LEAVES_S: Final = 3.0  # head start of the first rank when all ranks fail
ONE_SIGNAL_S: Final = 2.0  # a launcher and the terminal may both deliver the same Ctrl-C


USER_ERRORS: Final = (ValueError, OSError, MemoryError)  # errors that the user can fix: shown without a traceback


class SharedError(ValueError):
    """An error that all ranks know of. Only the first rank prints it."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run and their communication."""

    here: RankEnvironment = ALONE
    group: Group | None = None  # process group on the host for messages of this command; None for one process

    @property
    def world(self) -> int:
        return self.here.world_size

    @property
    def rank(self) -> int:
        return self.here.rank

    @property
    def is_first(self) -> bool:
        """Whether this rank prints the progress and writes the files of the run."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks. The values must be serializable as JSON."""
        return [value] if self.group is None else gather_json(self.group, value)

    def first(self, value: Any) -> Any:
        """The value of the first rank."""
        return value if self.group is None else self.gather(value if self.is_first else None)[0]

    def rows(self, numbers: Sequence[float]) -> Tensor:
        """The numbers of all ranks, with one row for each rank."""
        own = torch.tensor(numbers, dtype=torch.float64)
        return own[None] if self.group is None else self.group.gather_rows(own)

    def least(self, number: int) -> int:
        return int(min(self.gather(number)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """If an error that the user can fix occurs inside the `with` block on any rank, all ranks raise a `SharedError`
        with its message.

        The ranks must not communicate inside the `with` block.
        """
        if self.group is None:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        said = self.gather(None if error is None else _text(error))
        failed = {rank: text for rank, text in enumerate(said) if text is not None}
        if error is not None and not isinstance(error, USER_ERRORS):
            raise error  # a bug, shown with its traceback
        if failed:
            rank, text = next(iter(failed.items()))  # all ranks raise the error of the first failed rank
            raise SharedError(text if rank == 0 else f"rank {rank}: {text}") from error

    def in_turns(self, act: Callable[[], Any]) -> Any:
        """Call `act` on the first rank of each machine, then on the other ranks, which find the files that the first
        rank wrote.
        """
        made: Any = None
        for turn in (True, False):
            with self.together():
                if (self.here.local_rank == 0) is turn:
                    made = act()
        return made

    def console(self, console: Console) -> Console:
        """The given console on the first rank, and a quiet one on the others."""
        return console if self.is_first else Console(quiet=True, force_terminal=False)

    def message(self, error: Exception) -> str | None:
        """The message of this rank for an error, or None if the first rank prints it."""
        if isinstance(error, SharedError) or self.world == 1:
            return f"error: {error}" if self.is_first else None
        return f"error: rank {self.rank}: {error}"

    def leave(self, is_failure: bool) -> None:
        """Wait until all ranks arrive here, so that the first rank has written the report. A launcher ends all ranks as
        soon as one of them fails.
        """
        if self.group is None:
            return
        self.rows([0.0])
        if is_failure:
            self.after_first()
        else:
            dist.destroy_process_group()

    def after_first(self) -> None:
        """Wait, so that the first rank fails first: the launcher names the rank that fails first as the cause."""
        if not self.is_first:
            time.sleep(_FIRST_LEAVES_S)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {error}"


def join() -> Ranks:
    """Join the ranks that a launcher has started. Without a launcher this process is the only rank."""
    here = init_distributed(timeout_s=_JOIN_S)
    if here.world_size == 1:
        return Ranks(here)
    if here.rank > 0:  # messages on the config are equal on all ranks, but warnings may concern only this rank
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        logging.getLogger("twinflow").addHandler(handler)
    return Ranks(here, new_group("gloo", timeout=_TALK))


def watched(engine: Engine, doing: str = "") -> AbstractContextManager[Any]:
    """A context that reports an exception to the other ranks. With `doing`, the name of work that takes longer than a
    step: a pause, in which no rank counts as hanging.
    """
    if engine.watch is None:
        return nullcontext()
    return engine.watch.pause(doing) if doing else engine.watch.guard()
