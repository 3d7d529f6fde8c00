# SPDX-License-Identifier: Apache-2.0
"""A training of two ranks that is killed at some moment and started again: what its ranks do, and who kills them.

Ranks are forked from a process that has torch imported, so that a start takes a moment. What they did is in files that
outlive them: a line in a log for each thing that began or ended.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from fork_support import fork_context

WORLD = 2
NUM_STEPS = 5
LIMIT_S = 120.0


def train(rank: int, folder: str, attempt: int) -> None:
    """Steps with a checkpoint after each, from the last one on."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["TWINFLOW_THREADS"] = "1"
    out = os.open(f"{folder}/error{rank}-{attempt}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    dist.init_process_group("gloo", f"file://{folder}/meet{attempt}", rank=rank, world_size=WORLD)
    from checkpoint_cases import engine_of, weights_of
    from zero_cases import tokens

    log = os.open(f"{folder}/log{rank}-{attempt}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    engine = engine_of(WORLD, 2, {"ratio": 0.5}, rank)
    engine.load_checkpoint(f"{folder}/checkpoint")
    step = engine.global_steps

    def note(*words: object) -> None:
        os.write(log, f"{' '.join(map(str, words))} {time.monotonic()}\n".encode())

    note("began", step)
    while step < NUM_STEPS:
        micro = 12 // WORLD
        batch = torch.cat([tokens(step), tokens(step + 1000)])[rank * micro : (rank + 1) * micro]
        loss = engine(batch[:, :-1], batch[:, 1:]).loss
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        note("loss", step, float(loss).hex())
        note("saving", step)
        engine.save_checkpoint(f"{folder}/checkpoint")
        note("saved", step)
    note("weights", NUM_STEPS, weights_of(engine))
    engine.destroy()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Moment:
    """When ranks are killed: so long after a line of the first rank's log; which; and what becomes of the others."""

    after: str
    delay_s: float
    victims: tuple[int, ...]
    grace_s: float | None  # before a launcher kills the others; None: they have to end by themselves


@dataclass
class Past:
    """What the logs of an attempt tell."""

    began: int | None = None
    losses: dict[tuple[int, int], str] = field(default_factory=dict)  # by rank and step
    saving: int = 0  # the last that was begun by a rank
    saved: int = 0  # the last that a rank knows to be there
    weights: dict[int, str] = field(default_factory=dict)
    times_s: dict[str, float] = field(default_factory=dict)  # of the first rank's lines

    def save_s(self) -> float:
        """How long a checkpoint takes."""
        return (
            sum(self.times_s[f"saved {n}"] - self.times_s[f"saving {n}"] for n in range(1, NUM_STEPS + 1)) / NUM_STEPS
        )

    def step_s(self) -> float:
        """How long a step takes without it."""
        return (self.times_s[f"saved {NUM_STEPS}"] - self.times_s["began 0"]) / NUM_STEPS - self.save_s()


def draw(seed: int, save_s: float, step_s: float) -> Moment:
    """A random moment: half of them while a checkpoint is written, the others in a step, or in the start."""
    rng = random.Random(seed)
    step = rng.randint(1, NUM_STEPS)
    if seed % 2 == 0:
        after, delay_s = f"saving {step}", rng.uniform(0.0, 1.2 * save_s)
    elif rng.random() < 0.2:
        after, delay_s = "began 0", 0.0
    else:
        after, delay_s = f"saved {step}" if step < NUM_STEPS else "began 0", rng.uniform(0.0, 1.2 * step_s)
    victims = rng.choice(((0,), (1,), (0, 1)))
    return Moment(after, delay_s, victims, None if seed % 10 == 9 else rng.choice((0.0, 0.1, 1.0)))


def run(folder: Path, attempt: int, moment: Moment | None = None) -> Past:
    """An attempt, killed or not; what it left behind."""
    context = fork_context()
    folder.mkdir(parents=True, exist_ok=True)
    ranks: list[BaseProcess] = [
        context.Process(target=train, args=(rank, str(folder), attempt), daemon=True) for rank in range(WORLD)
    ]
    try:
        for process in ranks:
            process.start()
        if moment is not None:
            _kill(ranks, folder / f"log0-{attempt}", moment)
        for process in ranks:
            process.join(LIMIT_S)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    said = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob(f"error*-{attempt}")))
    if moment is None:
        assert codes == [0] * WORLD, f"{codes}\n{said}"
    elif moment.grace_s is None:  # killed, or ended by themselves: with an error, or because all was done
        others = {code for rank, code in enumerate(codes) if rank not in moment.victims}
        assert others <= {0, 1}, f"{codes}\n{said}"
    return read(folder, attempt)


def _kill(ranks: Sequence[BaseProcess], log: Path, moment: Moment) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not (log.exists() and f"{moment.after} " in log.read_text()):
        assert time.monotonic() < deadline_s, f"{moment.after!r} did not come"
        if not any(process.is_alive() for process in ranks):
            return
        time.sleep(0.001)
    time.sleep(moment.delay_s)
    _sigkill([ranks[rank] for rank in moment.victims])
    if moment.grace_s is not None:
        time.sleep(moment.grace_s)
        _sigkill(ranks)


def _sigkill(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        assert process.pid is not None
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def read(folder: Path, attempt: int) -> Past:
    """The logs of all ranks."""
    past = Past()
    for rank in range(WORLD):
        path = folder / f"log{rank}-{attempt}"
        for line in path.read_text().splitlines() if path.exists() else []:
            kind, number, *rest, time_s = line.split()
            step = int(number)
            if rank == 0:
                past.times_s[f"{kind} {step}"] = float(time_s)
            if kind == "began":
                assert past.began in (None, step)  # all ranks go on from the same checkpoint
                past.began = step
            elif kind == "loss":
                past.losses[rank, step] = rest[0]
            elif kind == "saving":
                past.saving = max(past.saving, step)
            elif kind == "saved":
                past.saved = max(past.saved, step)
            else:
                past.weights[rank] = rest[0]
    return past
