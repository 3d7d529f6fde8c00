"""Processes that have torch already, forked from one that does: importing it takes longer than most of what they do."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch.multiprocessing as mp

# All that tests fork needs. A process has one server, which the first test starts: so all of them name the same.
PRELOAD = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("twinflow.build", "twinflow.models.gpt", "twinflow.optim", "twinflow.cli.main"),
)


def fork_context() -> ForkServerContext:
    """Starts processes from the server; the server itself starts with the first of them."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


def run_script(
    script: Path, cwd: Path, logs: Path, *arguments: str, timeout_s: float = 240.0, **environment: str
) -> Ended:
    """Run a file as `python FILE` would, in a process of its own, with these variables set after torch was imported."""
    logs.mkdir(parents=True, exist_ok=True)
    out, err = logs / "stdout.txt", logs / "stderr.txt"
    process = fork_context().Process(
        target=_run, args=([str(script), *arguments], str(cwd), (str(out), str(err)), environment)
    )
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return Ended(process.exitcode, out.read_text() if out.exists() else "", err.read_text() if err.exists() else "")


def _run(argv: list[str], cwd: str, logs: tuple[str, str], environment: dict[str, str]) -> None:
    for number, path in enumerate(logs, 1):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
