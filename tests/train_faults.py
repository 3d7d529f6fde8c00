# SPDX-License-Identifier: Apache-2.0
"""Random signals to `twinflow train`, in processes of their own, one after another until the run has finished.

A run that was ended goes on with `--resume`. It must end with the bits of a run that nobody disturbed, every step must
be in `metrics.jsonl` exactly once and with the same loss, and no process may print a traceback or hang. A signal that
can be handled must be named in the output.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from engine_faults import Result
from run_support import TrainProcess

from twinflow.checkpoint import open_checkpoint
from twinflow.monitor.metrics import StepRecord, read_metrics

LIMIT_S = 60.0
NUM_STEPS = 24
SHAPE = ("--num-layers", 1, "--hidden-size", 16, "--num-attention-heads", 2, "--context", 16, "--vocab-size", 256)
RUN = (*SHAPE, "--batch-size", 2, "--threads", 1, "--valid-every", 8, "--save-every", 4, "--steps", NUM_STEPS)
VARIANTS: dict[str, tuple[str, ...]] = {
    "fp32": ("--states", "fp32"),
    "bf16, delayed": ("--states", "bf16", "--delayed-update"),
    "int8, verified saves": ("--states", "int8", "--verify-saves"),
    "lion, accumulation": ("--rule", "lion", "--accumulation", "2", "--states", "fp32"),
}
# How often a signal is sent, and whether the process can say what ended it.
KINDS = {
    "SIGKILL": (1, False),
    "SIGTERM": (1, True),
    "SIGINT": (1, True),
    "SIGHUP": (1, False),
    "SIGQUIT": (1, False),
    "SIGABRT": (1, False),
    "SIGTERM twice": (2, True),
    "SIGINT twice": (2, True),
    "stopped for a second": (0, False),
    "killed in a change of the folder": (0, False),
}


@cache
def text_file() -> Path:
    path = Path(tempfile.mkdtemp(prefix="faults-")) / "text.txt"
    path.write_text("".join(f"{i} is {i}\n" for i in range(300)))
    return path


def options(variant: str, out: Path) -> tuple[object, ...]:
    return (*RUN, *VARIANTS[variant], "--data", text_file(), "--out", out)


def outcome(out: Path) -> tuple[dict[str, bytes], list[tuple[int, float]]]:
    """The tensors of the last checkpoint, and the losses of all steps in the order of the file."""
    found = open_checkpoint(out / "checkpoints")
    assert found is not None
    tensors = {
        f"{file}/{name}": one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for file in ("model", "optimizer")
        for name, one in found.tensors(file)
    }
    return tensors, [(r.step, r.loss) for r in read_metrics(out / "metrics.jsonl") if isinstance(r, StepRecord)]


@cache
def undisturbed(variant: str) -> tuple[dict[str, bytes], list[tuple[int, float]], float]:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    TrainProcess(("--help",), folder / "log").wait(LIMIT_S)  # starts the server that forks, whose time must not count
    begin = time.monotonic()
    process = TrainProcess(options(variant, folder / "run"), folder / "log")
    assert process.wait(LIMIT_S) == 0, process.text()
    return *outcome(folder / "run"), time.monotonic() - begin


def run_signal(dice: random.Random) -> Result:
    variant, num_faults = dice.choice(list(VARIANTS)), dice.choice((1, 1, 2, 3))
    tensors, losses, seconds = undisturbed(variant)
    kinds, problems, texts = [dice.choice(list(KINDS)) for _ in range(num_faults)], [], []
    moments: list[str] = []
    num_ended = num_named = 0
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        for number, kind in enumerate([*kinds, ""]):
            again = ("--resume",) if (out / "settings.json").exists() else ()
            die_at = (out, dice.randint(1, 60)) if kind.startswith("killed in") else None
            log = Path(folder) / f"log{number}"
            process = TrainProcess((*options(variant, out), *again), log, die_at)
            if kind and die_at is None:
                delay_s = dice.uniform(0.0, 1.2 * seconds)
                moments.append(f"{kind} after {delay_s:.2f} s")
                time.sleep(delay_s)
                _send(process, kind, dice)
            elif die_at is not None:
                moments.append(f"{kind}, number {die_at[1]}")
            try:
                code = process.wait(LIMIT_S)
            except AssertionError:
                return Result(kinds[0], f"{'; '.join(moments)}; {variant}", "hang", process.text())
            text = process.text()
            texts.append(f"exit code {code}\n{text}")
            if "Traceback" in text and not kind.endswith(("HUP", "QUIT", "ABRT")):
                problems.append("a traceback")
            if kind and KINDS[kind][1] and code not in (0, -signal.SIGTERM, -signal.SIGINT):
                num_ended += 1
                num_named += any(word in text for word in ("SIGTERM", "SIGINT", "Ctrl-C", "interrupted", "nterrupt"))
            if not kind and code != 0:
                problems.append(f"the last run ended with exit code {code}")
        case = f"{'; '.join(moments)}; {variant}"
        if not problems:
            found, steps = outcome(out)
            if found != tensors:
                problems.append("other weights or state than without signals")
            if steps != losses:
                problems.append(f"other losses: {len(steps)} of {len(losses)} steps")
    silent = [one for one in problems if one.startswith("other")]
    if problems:
        return Result(kinds[0], case, "silent" if silent else "wrong", "\n".join([*problems, *texts]))
    if num_named < num_ended:
        return Result(kinds[0], case, "wrong", "\n".join(["the signal was not named", *texts]))
    return Result(kinds[0], case, "named" if num_named else "finished")


def _send(process: TrainProcess, kind: str, dice: random.Random) -> None:
    if kind.startswith("stopped"):
        process.send(signal.SIGSTOP)
        time.sleep(1.0)
        process.send(signal.SIGCONT)
        return
    for _ in range(KINDS[kind][0]):
        process.send(signal.Signals[kind.split()[0]])
        time.sleep(dice.uniform(0.0, 0.2))
