"""`twinflow train` on several ranks: communication between the ranks, distribution of sequences, and a common end.

All ranks make the same calls in the same order, and every decision depends only on numbers that all ranks have. An
error on one rank during preparation is sent to all ranks (`Ranks.together`). After each step the ranks exchange one row
of numbers: the loss, the load, and whether a signal has arrived. A launcher signals its processes at slightly different
times. All ranks stop after the step in which the first rank has reported a signal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from twinflow.cli.settings import TrainSettings
from twinflow.cli.steps import Batch, batches_at_once, measure
from twinflow.cli.training import Loop
from twinflow.data.tokens import TokenData
from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group, new_group
from twinflow.engine import Engine
from twinflow.launch.environment import ALONE, RankEnvironment, init_distributed
from twinflow.monitor.metrics import LoadMeter, StepRecord

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
        """The smallest number of all ranks."""
        return int(min(self.gather(number)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error that occurs inside on any rank on all ranks, as a `SharedError` with the same message.

        The ranks must not communicate inside.
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
        one wrote."""
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
        """Leave the run together.

        A launcher ends all ranks as soon as one has failed, and the first rank still has to write the report.
        """
        if self.group is None:
            return
        self.rows([0.0])
        if is_failure:
            self.after_first()
        else:
            dist.destroy_process_group()

    def after_first(self) -> None:
        """Wait, so that this rank fails later than the first rank. The launcher names the rank that fails first as the
        cause."""
        if not self.is_first:
            time.sleep(_FIRST_LEAVES_S)

    def rows_of_report(self, stage: int, layout: str = "") -> list[tuple[str, str]]:
        """Rows for the header and the report. Empty for one process."""
        spread = f": {layout}" if layout else ""
        return [("ranks", f"{self.world}{spread}, ZeRO stage {stage}")] if self.world > 1 else []


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
    """Report an exception inside to the other ranks. `doing`: name of an activity that takes longer than a step."""
    if engine.watch is None:
        return nullcontext()
    return engine.watch.pause(doing) if doing else engine.watch.guard()


class Talk:
    """Communication of the ranks during training. `asked`: whether this rank has got a signal to stop."""

    def __init__(self, ranks: Ranks, asked: Callable[[], bool], device: torch.device) -> None:
        self.ranks, self.asked = ranks, asked
        self._device = device if device.type == "cuda" else None
        self._meter = LoadMeter()  # host only: the loop reads and resets the peak of the GPU memory
        self._stops = False
        self._totals: dict[str, Any] = {}

    def should_stop(self) -> bool:
        """Whether a rank has reported a signal in the last exchange."""
        return self.asked() if self.ranks.group is None else self._stops

    def any_asked(self) -> bool:
        """Whether any rank has got a signal by now. All ranks have to call this."""
        return bool(self.ranks.rows([self.asked()]).any())

    def after_step(self, loss: float) -> None:
        """Exchange the loss, the load and the stop flag of a step."""
        load = self._meter.look()
        peak = torch.cuda.max_memory_allocated(self._device) if self._device is not None else 0
        rows = self.ranks.rows([self.asked(), loss, load.host_bytes, load.cores_busy, peak])
        stops, losses, host_bytes, cores_busy, gpu_bytes = rows.unbind(dim=1)
        self._stops = bool(stops.any())
        self._totals = {
            "loss": float(losses.mean()),  # equal bits on every rank, so that a loss that is not finite stops all ranks
            "host_bytes": int(host_bytes.sum()),
            "cores_busy": float(cores_busy.sum()),
            "gpu_bytes": int(gpu_bytes.max()),
        }

    def of_all(self, record: StepRecord) -> StepRecord:
        """The record of this rank with the numbers of all ranks."""
        return replace(record, **self._totals) if self.ranks.group is not None else record

    def mean(self, total: float, count: int, wanted: int) -> float | None:
        """Sum of `total` over all ranks, divided by `wanted`. None if the ranks have counted fewer than `wanted`
        sequences."""
        totals = self.ranks.rows([total, count, self.asked()])
        self._stops = bool(totals[:, 2].any())
        return float(totals[:, 0].sum()) / wanted if int(totals[:, 1].sum()) == wanted else None


class RankLoop(Loop):
    """The training loop of one rank. It trains on its replica's part of every batch and records the numbers of all
    ranks.

    The position in the data is counted in sequences, so that a resumed run with another number of ranks continues at
    the same position. All ranks of a replica get the same tokens.
    """

    def __init__(self, settings: TrainSettings, engine: Engine, data: TokenData, talk: Talk, num_valid: int) -> None:
        super().__init__(settings, engine, data)
        self._talk, self._num_valid = talk, num_valid
        self._tell = talk.after_step if talk.ranks.group is not None else None

    def step(self) -> StepRecord:
        return self._talk.of_all(super().step())

    def train_batches(self) -> Iterator[Batch]:
        """The next micro-batches of this replica. Their position does not depend on the number of ranks of the earlier
        run."""
        engine, size = self._engine, self._settings.batch_size
        assert engine.global_samples % size == 0
        first = engine.global_samples // size + engine.dp_rank
        for part in range(self._settings.accumulation):
            yield self.batch("train", first + part * engine.dp_world_size)

    def valid_loss(self, should_stop: Callable[[], bool] = lambda: False) -> float | None:
        """Mean loss over the same sequences each time. The replicas share the sequences."""
        engine, size, total, count = self._engine, self._settings.batch_size, 0.0, 0
        num_batches, at_once = -(-self._num_valid // size), batches_at_once(engine)
        own = range(engine.dp_rank, num_batches, engine.dp_world_size)
        with watched(engine, "validation"):
            for first in range(0, -(-num_batches // engine.dp_world_size), at_once):
                if self._stops_now():
                    break
                indices = own[first : first + at_once]
                sizes = [min(size, self._num_valid - index * size) for index in indices]
                losses = measure(engine, [self._valid_batch(*each) for each in zip(indices, sizes, strict=True)])
                if losses:
                    total += sum(num * loss for num, loss in zip(sizes, losses, strict=True))
                    count += sum(sizes)
            return self._talk.mean(total, count, self._num_valid)

    def _stops_now(self) -> bool:
        """Whether to stop a validation. The ranks of one replica compute together, so they stop together."""
        is_alone = self._engine.settings.grid is None
        return self._talk.asked() if is_alone else self._talk.any_asked()

    def _valid_batch(self, index: int, num: int) -> Batch:
        tokens, targets = self.batch("valid", index)
        return tokens[:num], targets[:num]
