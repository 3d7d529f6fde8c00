# SPDX-License-Identifier: Apache-2.0
"""Elastic runs of `twinflow train` on this machine whose ranks and nodes are killed at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import twinflow
from twinflow.monitor.metrics import StepRecord, read_metrics

SOURCE = Path(twinflow.__file__).parents[1]
SAVE_EVERY = 4
SHAPE = (
    *(
        "--preset",
        "tiny",
        "--num-layers",
        "2",
        "--hidden-size",
        "32",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "16",
    ),
    *("--global-batch-size", "10", "--batch-size", "4", "--valid-every", "0", "--threads", "1", "--lr", "1e-3"),
)


@dataclass(frozen=True)
class Kill:
    """What is killed when the run has made `num_steps` more steps than ever before: a rank, or a node with its rank."""

    target: int
    is_node: bool
    num_steps: int


def draw_kills(seed: int, num_nodes: int, num_kills: int, num_steps: int = 6, node_share: float = 0.4) -> list[Kill]:
    generator = random.Random(seed)
    return [
        Kill(generator.randrange(num_nodes), generator.random() < node_share, generator.randrange(num_steps))
        for _ in range(num_kills)
    ]


def command(
    out: Path, data: Path, steps: int, num_nodes: int, max_restarts: int, return_after_s: float = 2.0
) -> list[str]:
    launch = ["launch", "--max-nodes", str(num_nodes), "--max-restarts", str(max_restarts)]
    launch += ["--return-after", str(return_after_s), "--module", "twinflow"]
    train = ["train", *SHAPE, "--steps", str(steps), "--save-every", str(SAVE_EVERY), "--keep", "3"]
    return [sys.executable, "-m", "twinflow", *launch, *train, "--resume", "--out", str(out), "--data", str(data)]


def write_text(path: Path) -> Path:
    generator = random.Random(0)
    path.write_text(" ".join(generator.choice(["the", "cat", "sat", "on", "a", "mat", "dog"]) for _ in range(40000)))
    return path


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return sorted(found)


def scripts(pid: int) -> list[int]:
    """The processes of scripts below a launcher: launcher, agent, worker, script."""
    return [script for agent in children(pid) for worker in children(agent) for script in children(worker)]


def last_step(out: Path) -> int:
    with suppress(OSError, ValueError, KeyError):
        return max((record.step for record in read_metrics(out / "metrics.jsonl")), default=0)
    return 0


def losses(out: Path) -> dict[int, float]:
    return {r.step: r.loss for r in read_metrics(out / "metrics.jsonl") if isinstance(r, StepRecord)}


def run_with_kills(
    argv: list[str],
    out: Path,
    log: Path,
    kills: list[Kill],
    limit_s: float,
    on_poll: Callable[[int], object] = lambda num_killed: None,
) -> tuple[int, list[Kill]]:
    """Exit code of the launcher, and the kills that were done before the run ended. `on_poll` gets their number."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done: list[Kill] = []
    highest, end_s = 0, time.monotonic() + limit_s
    with log.open("w") as file:
        process = subprocess.Popen(argv, env=env, stdout=file, stderr=file)
        try:
            while process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.05)
                on_poll(len(done))
                if len(done) == len(kills) or last_step(out) < highest + max(1, kills[len(done)].num_steps):
                    continue
                kill = kills[len(done)]
                pids = children(process.pid) if kill.is_node else scripts(process.pid)
                if not pids:
                    continue
                with suppress(ProcessLookupError):
                    os.kill(pids[kill.target % len(pids)], signal.SIGKILL)
                    highest = max(highest, last_step(out))
                    done.append(kill)
            assert process.poll() is not None, f"still running after {limit_s} s:\n{log.read_text()[-4000:]}"
            return process.returncode, done
        finally:
            process.terminate()
            process.wait(60)
