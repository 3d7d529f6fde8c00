# SPDX-License-Identifier: Apache-2.0
"""Processes that have torch already, forked from one that does: importing it takes longer than most of what they do."""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

# All that tests fork needs. A process has one server, which the first test starts: so all of them name the same.
# pytest is there because the modules of ranks import it, which would take longer in each rank than a small test.
PRELOAD = (
    *("pytest", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("twinflow.build", "twinflow.models.gpt", "twinflow.optim", "twinflow.cli.main"),
)
_IMPORTED: list[str] = []  # modules that only a process of `process_with` has


def fork_context() -> ForkServerContext | ForkContext:
    """Starts processes from the server; the server itself starts with the first of them."""
    if _IMPORTED:
        return mp.get_context("fork")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


@contextmanager
def process_with(*modules: str) -> Iterator[Callable[..., Any]]:
    """Calls functions in a process that has imported these modules, and forks all processes that the functions start.

    Not all tests can have them: transformers looks for DeepSpeed when it is imported.
    """
    ours, theirs = mp.Pipe()
    process = fork_context().Process(target=_serve, args=(theirs, modules))
    process.start()
    theirs.close()

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        ours.send((function, args, options))
        found, problem = ours.recv()
        assert not problem, problem
        return found

    try:
        yield call
    finally:
        ours.close()
        process.join(5)
        process.kill()


def _serve(connection: Connection, modules: tuple[str, ...]) -> None:
    gc.disable()  # of what is imported, nothing is garbage
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _IMPORTED.extend(modules)
    while True:
        try:
            function, args, options = connection.recv()
        except EOFError:  # the caller has left the context
            return
        try:
            connection.send((function(*args, **options), ""))
        except AssertionError as error:
            connection.send((None, str(error)))


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
    gc.freeze()  # or each process would look through all of torch's objects for garbage
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


def answer_of(child: Callable[[], object]) -> str:
    """Runs a function in a forked process. Returns its result or error as text; "timeout" if there is none in time."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(child())
        except BaseException as error:
            text = repr(error)
        os.write(writing, text.encode())
        os._exit(0)
    is_ready = select.select([reading], [], [], 20)[0]
    if not is_ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = os.read(reading, 10000).decode() if is_ready else "timeout"
    os.close(reading)
    os.close(writing)
    return found
