# SPDX-License-Identifier: Apache-2.0
"""Runs of `twinflow train` and of other commands in processes of their own, which a test may kill: forked from one that
has torch loaded.

The fork server costs one start of the interpreter for all runs. Each run is a process like any other: its death by
SIGKILL is real, and it has been reaped when `wait` returns, as a shell would have done.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fork_support import fork_context

from twinflow.monitor.metrics import StepRecord, read_metrics

_DISK_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")  # as Python's audit events name them


def write_text(folder: Path, num_lines: int) -> Path:
    """A file to train on, in this folder."""
    path = folder / "text.txt"
    path.write_text("".join(f"{i} and {i} is {2 * i}\n" for i in range(num_lines)))
    return path


def steps_of(out: Path) -> list[StepRecord]:
    """The records of a run's steps."""
    return [record for record in read_metrics(out / "metrics.jsonl") if isinstance(record, StepRecord)]


class TrainProcess:
    """`twinflow train`, or another command, with these options, started. `log` takes what it prints.

    `die_at`: a folder and a number; the process kills itself as it is about to do the n-th thing to that folder.
    `file_bytes`: no file may grow beyond this, as on a full disk. `stdout`: a file other than the log.
    """

    def __init__(
        self,
        options: Sequence[Any],
        log: Path,
        die_at: tuple[Path, int] | None = None,
        *,
        command: str = "train",
        file_bytes: int | None = None,
        stdout: str | None = None,
    ) -> None:
        self.log = log
        args = [command, *(str(option) for option in options)]
        given = (args, str(log), die_at, file_bytes, stdout)
        self._process = fork_context().Process(target=_run, args=given, daemon=True)
        self._process.start()

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """A signal, unless it has ended."""
        if self.is_alive() and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Its exit code; minus the signal that ended it."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"still running after {timeout_s} s: {self.text()}")
        return self._process.exitcode

    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text() if self.log.exists() else ""


def _run(
    args: list[str], log: str, die_at: tuple[Path, int] | None, file_bytes: int | None, stdout: str | None
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file if stdout is None else os.open(stdout, os.O_WRONLY), 1)
    os.dup2(file, 2)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from twinflow.cli import run
    from twinflow.cli.main import main

    torch.backends.mkldnn.enabled = False  # for tiny tensors it prepares longer than it computes
    run.VALID_BATCHES = 2  # type: ignore[misc]  # or validations would take more time than these short trainings
    if die_at is not None:
        _die_at(*die_at)
    sys.argv = ["twinflow", *args]
    main()


def _die_at(folder: Path, number: int) -> None:
    seen, start = 0, str(folder)

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in _DISK_EVENTS and isinstance(args[0], (str, Path)) and str(args[0]).startswith(start):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
