"""`twinflow train` on several ranks: who speaks, what all know, which sequences are whose, and when all of them stop.

Ranks do the same things in the same order, so every decision comes from numbers that all of them have. What goes wrong
on one rank while a run is prepared is told to all (`Ranks.together`). In each step they exchange one row of numbers:
the loss, the load, and whether a signal has come. A launcher signals its processes at slightly different moments; all
stop after the step in which the first of them said so.
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
from twinflow.monitor.load import LoadMeter
from twinflow.monitor.metrics import StepRecord

_JOIN_S: Final = 1800.0  # for one rank to wait for another in torch's own group, as `initialize` has it
_TALK: Final = timedelta(hours=2)  # a rank may tokenize a large text while the others wait
_FIRST_LEAVES_S: Final = 3.0
ONE_SIGNAL_S: Final = 2.0  # a launcher and the terminal may both hand on one Ctrl-C


class SharedError(ValueError):
    """What all ranks know of; the first says it."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run."""

    here: RankEnvironment = ALONE
    group: Group | None = None  # on the host, for this command's own words; None for one process

    @property
    def world(self) -> int:
        """How many there are."""
        return self.here.world_size

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.here.rank

    @property
    def is_first(self) -> bool:
        """Whether this one shows the run and writes its files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which JSON can hold."""
        return [value] if self.group is None else gather_json(self.group, value)

    def first(self, value: Any) -> Any:
        """The first rank's value."""
        return value if self.group is None else self.gather(value if self.is_first else None)[0]

    def rows(self, numbers: Sequence[float]) -> Tensor:
        """Every rank's numbers, a row each."""
        own = torch.tensor(numbers, dtype=torch.float64)
        return own[None] if self.group is None else self.group.gather_rows(own)

    def least(self, number: int) -> int:
        """The least of all."""
        return int(min(self.gather(number)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong inside on any rank ends it on all, in the same words. Inside, ranks do not talk."""
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
        if error is not None and not isinstance(error, (ValueError, OSError)):
            raise error  # ours, with its traceback
        if failed:
            rank, text = next(iter(failed.items()))
            raise SharedError(text if rank == 0 else f"rank {rank}: {text}") from error  # the first speaks for all

    def in_turns(self, act: Callable[[], Any]) -> Any:
        """`act` on the first rank of each machine, then on its others: they find what that one has put there."""
        made: Any = None
        for turn in (True, False):
            with self.together():
                if (self.here.local_rank == 0) is turn:
                    made = act()
        return made

    def console(self, console: Console) -> Console:
        """Where this rank shows what it does: the first rank's for all to see."""
        return console if self.is_first else Console(quiet=True, force_terminal=False)

    def message(self, error: Exception) -> str | None:
        """How this rank tells of an error; None where the first rank does."""
        if isinstance(error, SharedError) or self.world == 1:
            return f"error: {error}" if self.is_first else None
        return f"error: rank {self.rank}: {error}"

    def leave(self, is_failure: bool) -> None:
        """The end. The first rank has a report to write, and a launcher ends all ranks with the first that fails."""
        if self.group is None:
            return
        self.rows([0.0])
        if is_failure:
            self.after_first()
        else:
            dist.destroy_process_group()

    def after_first(self) -> None:
        """Fail later than the first rank: the launcher names the one that fails first, and that one has said why."""
        if not self.is_first:
            time.sleep(_FIRST_LEAVES_S)

    def rows_of_report(self, stage: int, layout: str = "") -> list[tuple[str, str]]:
        """For the header and the page; nothing for one process."""
        spread = f": {layout}" if layout else ""
        return [("ranks", f"{self.world}{spread}, ZeRO stage {stage}")] if self.world > 1 else []


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"


def join() -> Ranks:
    """Join the ranks that a launcher has started; without one this process is alone."""
    here = init_distributed(timeout_s=_JOIN_S)
    if here.world_size == 1:
        return Ranks(here)
    if here.rank > 0:  # what the config says is the same on all; warnings may be of this rank alone
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        logging.getLogger("twinflow").addHandler(handler)
    return Ranks(here, new_group("gloo", timeout=_TALK))


def watched(engine: Engine, doing: str = "") -> AbstractContextManager[Any]:
    """The other ranks learn of an exception inside; with `doing`, that this takes longer than a step."""
    if engine.watch is None:
        return nullcontext()
    return engine.watch.pause(doing) if doing else engine.watch.guard()


class Talk:
    """What ranks tell each other while they train. `asked`: whether this one got a signal to stop."""

    def __init__(self, ranks: Ranks, asked: Callable[[], bool], device: torch.device) -> None:
        self.ranks, self.asked = ranks, asked
        self._device = device if device.type == "cuda" else None
        self._meter = LoadMeter()  # without the GPU, whose peak the loop reads and starts anew
        self._stops = False
        self._totals: dict[str, Any] = {}

    def should_stop(self) -> bool:
        """Whether any rank was asked to, as far as all know."""
        return self.asked() if self.ranks.group is None else self._stops

    def any_asked(self) -> bool:
        """Whether any rank has been asked to stop by now; all of them have to ask."""
        return bool(self.ranks.rows([self.asked()]).any())

    def after_step(self, loss: float) -> None:
        """Tell of a step: its loss and load here."""
        load = self._meter.look()
        peak = torch.cuda.max_memory_allocated(self._device) if self._device is not None else 0
        rows = self.ranks.rows([self.asked(), loss, load.host_bytes, load.cores_busy, peak])
        stops, losses, host_bytes, cores_busy, gpu_bytes = rows.unbind(dim=1)
        self._stops = bool(stops.any())
        self._totals = {
            "loss": float(losses.mean()),  # the same bits on every rank: a loss that is not finite stops all
            "host_bytes": int(host_bytes.sum()),
            "cores_busy": float(cores_busy.sum()),
            "gpu_bytes": int(gpu_bytes.max()),
        }

    def of_all(self, record: StepRecord) -> StepRecord:
        """This rank's record of a step with what is known of all."""
        return replace(record, **self._totals) if self.ranks.group is not None else record

    def mean(self, total: float, count: int, wanted: int) -> float | None:
        """The mean of what all ranks have counted; None where one has stopped before all were."""
        totals = self.ranks.rows([total, count, self.asked()])
        self._stops = bool(totals[:, 2].any())
        return float(totals[:, 0].sum()) / wanted if int(totals[:, 1].sum()) == wanted else None


class RankLoop(Loop):
    """The loop of one rank: its replica's part of every batch, and records of all ranks.

    Where a run stands in its data is counted in sequences, so that another number of ranks finds the place. Ranks that
    share a replica see the same tokens.
    """

    def __init__(self, settings: TrainSettings, engine: Engine, data: TokenData, talk: Talk, num_valid: int) -> None:
        super().__init__(settings, engine, data)
        self._talk, self._num_valid = talk, num_valid
        self._tell = talk.after_step if talk.ranks.group is not None else None

    def step(self) -> StepRecord:
        """A step of all ranks."""
        return self._talk.of_all(super().step())

    def train_batches(self) -> Iterator[Batch]:
        """This replica's next micro-batches, whatever their number: other ranks may have begun."""
        engine, size = self._engine, self._settings.batch_size
        assert engine.global_samples % size == 0
        first = engine.global_samples // size + engine.dp_rank
        for part in range(self._settings.accumulation):
            yield self.batch("train", first + part * engine.dp_world_size)

    def valid_loss(self, should_stop: Callable[[], bool] = lambda: False) -> float | None:
        """Mean loss over the same sequences each time, of which every replica takes its share."""
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
        """Whether to leave a validation; ranks of one replica compute together, and leave together."""
        is_alone = self._engine.settings.grid is None
        return self._talk.asked() if is_alone else self._talk.any_asked()

    def _valid_batch(self, index: int, num: int) -> Batch:
        tokens, targets = self.batch("valid", index)
        return tokens[:num], targets[:num]
