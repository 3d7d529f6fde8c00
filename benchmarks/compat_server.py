# SPDX-License-Identifier: Apache-2.0
"""Runs scripts with one package in forked processes, so that torch and the package are imported only once.

`python compat_server.py deepspeed|twinflow|torch` reads lines of JSON: the script, its arguments, the number of ranks,
a time limit and a folder for logs. It answers each line with a line of JSON: the exit codes of the ranks. It imports
nothing of twinflow unless that is the package, because another environment may have no twinflow.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

PACKAGES = ("deepspeed", "twinflow", "torch")


def preload(package: str) -> None:
    """Imports what scripts need, and loads the real package's compiled operations, which it compiles at first use."""
    import torch

    for name in ("torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.pipelining"):
        importlib.import_module(name)
    if package == "twinflow":
        import twinflow.build
        import twinflow.compat

        twinflow.compat.install()
    if package == "deepspeed":
        from deepspeed.comm.torch import build_shm_op
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.ops.lion import DeepSpeedCPULion

        for kind in (DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPULion):
            kind([torch.nn.Parameter(torch.ones(1))])
        build_shm_op()


def run_rank(job: dict, rank: int, port: int) -> None:
    """The child process of a rank: becomes `python SCRIPT ARGUMENTS` with its output in files."""
    world = job["ranks"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(Path(job["logs"]) / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path[0] = str(Path(job["script"]).parent)
    runpy.run_path(job["script"], run_name="__main__")


def fork_rank(job: dict, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)  # a rank may start processes, which end with it
        run_rank(job, rank, port)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the destructors of process groups are not what is compared here


def run(job: dict) -> list[int]:
    """The exit codes of the ranks. If one fails or the time is over, the others are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = {fork_rank(job, rank, port): rank for rank in range(job["ranks"])}
    codes: dict[int, int] = {}
    end = time.monotonic() + job["limit_s"]
    while len(codes) < len(children):
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in children:
            codes[children[ended]] = os.waitstatus_to_exitcode(status)
            if codes[children[ended]]:
                end = min(end, time.monotonic() + 5)  # the others may have something to say
        elif time.monotonic() > end:
            for child, rank in children.items():
                if rank not in codes:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
            end = float("inf")
        else:
            time.sleep(0.02)
    return [codes[rank] for rank in range(job["ranks"])]


def main() -> None:
    package = sys.argv[1]
    if package not in PACKAGES:
        sys.exit(f"usage: compat_server.py {'|'.join(PACKAGES)}")
    answers = os.fdopen(os.dup(1), "w")  # what packages print at import is not an answer
    os.dup2(2, 1)
    preload(package)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
