# SPDX-License-Identifier: Apache-2.0
"""`twinflow train` as ranks that a test may signal: processes forked from one that has torch loaded, as in run_support,
with the variables that a launcher would set."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fork_support import fork_context

from twinflow.checkpoint import open_checkpoint


def saved_steps(out: Path) -> int:
    """The number of steps before the newest checkpoint of a run, after a check of its files."""
    found = open_checkpoint(out / "checkpoints")
    assert found is not None
    found.verify()
    return int(found.meta["global_steps"])


class TrainRanks:
    """`twinflow train` with these options on `world` ranks, started; one process for 1. `fault`: one of FAULTS."""

    def __init__(self, options: Sequence[Any], logs: Path, world: int = 2, fault: str = "") -> None:
        logs.mkdir(parents=True, exist_ok=True)
        args = ["train", *(str(option) for option in options)]
        port, context = free_port(), fork_context()
        self.logs = [logs / f"rank{rank}.log" for rank in range(world)]
        self.processes = [
            context.Process(target=_run, args=(args, str(log), variables(rank, world, port), fault), daemon=True)
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    def send(self, number: int, rank: int) -> None:
        """A signal to one of them, unless it has ended."""
        process = self.processes[rank]
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def wait(self, timeout_s: float = 120.0) -> list[int | None]:
        """Their exit codes; minus the signal that ended one."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        assert None not in codes, f"still running after {timeout_s} s: {self.texts()}"
        return codes

    def is_alive(self) -> bool:
        """Whether all of them run."""
        return all(process.is_alive() for process in self.processes)

    def texts(self) -> list[str]:
        """What each has printed."""
        return [log.read_text() if log.exists() else "" for log in self.logs]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def variables(rank: int, world: int, port: int) -> dict[str, str]:
    """torchrun's; none for one process."""
    if world == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _run(args: list[str], log: str, env: dict[str, str], fault: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env, CUDA_VISIBLE_DEVICES="", TWINFLOW_THREADS="1")
    import torch

    from twinflow.cli.main import main

    torch.backends.mkldnn.enabled = False  # for tiny tensors it prepares longer than it computes
    if fault:
        FAULTS[fault](int(env.get("RANK", 0)))
    sys.argv = ["twinflow", *args]
    main()


def _full_disk(rank: int) -> None:
    """The second rank has no room for any checkpoint but the first."""
    from twinflow.checkpoint import disk
    from twinflow.engine import Engine

    write, save, num_saved = disk.DurableFile.write, Engine.save_checkpoint, 0

    def write_or_not(self: Any, data: Any, *start: int) -> None:
        if rank == 1 and num_saved > 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        write(self, data, *start)

    def count(self: Any, *args: Any, **kwargs: Any) -> bool:
        nonlocal num_saved
        num_saved += 1
        return save(self, *args, **kwargs)

    disk.DurableFile.write = write_or_not  # type: ignore[method-assign]
    Engine.save_checkpoint = count  # type: ignore[method-assign]


def _bad_batch(rank: int) -> None:
    """A token outside the vocabulary, in the data of the second rank alone."""
    from twinflow.data.tokens import TokenData

    batch = TokenData.batch

    def batch_or_not(self: TokenData, split: Any, index: int, batch_size: int, context: int) -> Any:
        if rank == 1 and split == "train" and index > 8:
            raise ValueError("a token of this file is 999")
        return batch(self, split, index, batch_size, context)

    TokenData.batch = batch_or_not  # type: ignore[method-assign]


def _other_data(rank: int) -> None:
    """The second rank reads other tokens."""
    from dataclasses import replace

    import twinflow.cli.run as run

    load = run.load_data
    if rank == 1:
        run.load_data = lambda *args, **kwargs: replace(load(*args, **kwargs), fingerprint="another")


def _late_signal(rank: int) -> None:
    """The second rank alone gets a SIGTERM, in its sixth step."""
    from twinflow.engine import Engine

    count = Engine._count_step  # of a pipeline's steps too

    def count_and_signal(self: Engine, *args: Any) -> float:
        lr = count(self, *args)
        if rank == 1 and self.global_steps == 6 and self.part == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return lr

    Engine._count_step = count_and_signal  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int], None]] = {
    "full disk": _full_disk,
    "bad batch": _bad_batch,
    "other data": _other_data,
    "late signal": _late_signal,
}
