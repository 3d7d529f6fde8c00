"""Scripts in processes that have torch already: importing it takes longer than most of what they do."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing as mp


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: Path, cwd: Path, logs: Path, timeout_s: float = 240.0) -> Ended:
    """Run a file as `python FILE` would, in a process of its own."""
    context = mp.get_context("forkserver")
    names = ("build", "models.gpt", "optim")
    context.set_forkserver_preload(["torch", "torch._dynamo", *(f"twinflow.{name}" for name in names)])
    out, err = logs / "stdout.txt", logs / "stderr.txt"
    process = context.Process(target=_run, args=(str(script), str(cwd), str(out), str(err)))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return Ended(process.exitcode, out.read_text() if out.exists() else "", err.read_text() if err.exists() else "")


def _run(script: str, cwd: str, out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(cwd)
    sys.argv = [script]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
