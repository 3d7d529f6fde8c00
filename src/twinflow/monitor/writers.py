# SPDX-License-Identifier: Apache-2.0
"""Writers of scalar metrics for CSV files, TensorBoard and Weights & Biases. DeepSpeed's config sections `csv_monitor`,
`tensorboard` and `wandb` select them.

An event is a tag, a value and the number of samples so far. As in DeepSpeed, the number of samples is the x axis.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from twinflow.errors import invalid_value
from twinflow.files import LineFile, keep_lines

Event = tuple[str, float, int]


class ScalarWriter(Protocol):
    target: str  # the folder or service, for warnings

    def write(self, events: Sequence[Event]) -> None:
        """Record events. They may be buffered until `flush`."""

    def flush(self) -> None:
        """Make all events that were written visible to other programs."""

    def close(self) -> None:
        """Flush and close. No event may be written afterwards."""


class CsvWriter:
    """Writes one CSV file per tag, with a header, in `output_path/job_name`. Existing files are extended. If the
    disk is full, a warning names the file, and its rows are written when there is space again.

    `resume_after`: the number of samples at which the run resumes. Later rows are removed, because these samples will
    be seen again.
    """

    def __init__(self, output_path: str | Path, job_name: str, resume_after: int | None = None) -> None:
        self.folder = Path(output_path) / job_name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.target = str(self.folder)
        self._resume_after = resume_after
        self._files: dict[str, LineFile] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Append one row per event to the file of its tag."""
        for tag, value, samples in events:
            file = self._files.get(tag) or self._open(tag)
            file.add(_row(samples, value))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, tag: str) -> LineFile:
        path = self.folder / f"{re.sub(r'[^0-9A-Za-z_.-]', '_', tag)}.csv"
        last = self._resume_after
        keep_lines(path, None if last is None else lambda line: not is_later(line, last))
        file = self._files[tag] = LineFile(path)
        if file.is_new:
            file.add(_row("step", tag.rsplit("/", 1)[-1]))
        return file


def _row(*values: object) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def is_later(row: str, samples: int) -> bool:
    """Whether a row of a CSV file was written after that many samples. False for the header."""
    first = row.split(",", 1)[0]
    return first.isdecimal() and int(first) > samples


class TensorBoardWriter:
    """Writes an event file in `output_path/job_name`. TensorBoard hides old events after `resume_after` samples."""

    def __init__(self, output_path: str | Path, job_name: str, resume_after: int | None = None) -> None:
        try:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise not_installed("tensorboard") from error
        purge_step = None if resume_after is None else resume_after + 1
        self.target = str(Path(output_path) / job_name)
        self._writer: Any = tensorboard.SummaryWriter(self.target, purge_step=purge_step)

    def write(self, events: Sequence[Event]) -> None:
        """Queue the events. TensorBoard's thread writes them."""
        for tag, value, samples in events:
            self._writer.add_scalar(tag, value, samples)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Logs to a new run of Weights & Biases."""

    target = "Weights & Biases"

    def __init__(self, project: str | None = None, group: str | None = None, team: str | None = None) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
            init = wandb.init  # a folder named `wandb`, left by an earlier run, can be imported as an empty package
        except (ImportError, AttributeError) as error:
            raise not_installed("wandb") from error
        self._run: Any = init(project=project, group=group, entity=team)

    def write(self, events: Sequence[Event]) -> None:
        """Log the events. One call logs all events with the same number of samples, because each call advances wandb's
        step.
        """
        rows: dict[int, dict[str, float]] = {}
        for tag, value, samples in events:
            rows.setdefault(samples, {})[tag] = value
        for samples, row in sorted(rows.items()):
            self._run.log(row, step=samples)

    def flush(self) -> None:
        """Does nothing, because wandb sends in the background."""

    def close(self) -> None:
        """End the run. Waits until all events are sent."""
        self._run.finish()


class Fanout:
    """Passes events to several writers. Without writers it does nothing.

    A writer that raises an OSError, for example because the disk is full, gets no more events. A warning names it.
    """

    def __init__(self, writers: Sequence[ScalarWriter] = ()) -> None:
        self.writers = tuple(writers)

    def write(self, events: Sequence[Event]) -> None:
        self._each(lambda writer: writer.write(events))

    def flush(self) -> None:
        self._each(lambda writer: writer.flush())

    def close(self) -> None:
        self._each(lambda writer: writer.close())

    def _each(self, act: Callable[[ScalarWriter], None]) -> None:
        self.writers = tuple(writer for writer in self.writers if _is_done(writer, act))

    def __enter__(self) -> Fanout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_done(writer: ScalarWriter, act: Callable[[ScalarWriter], None]) -> bool:
    """Calls `act`. False, with a warning, if it fails."""
    try:
        act(writer)
    except OSError as error:
        text = f"{writer.target} could not be written: {error}. Training continues without these metrics."
        warnings.warn(text, stacklevel=4)
        return False
    return True


def not_installed(package: str) -> ValueError:
    """The error for a section of the config that needs a package of the same name, which is not installed."""
    allowed = f"false while the package {package} is not installed"
    return invalid_value(f"{package}.enabled", True, allowed, f"Install it with: pip install {package}")
