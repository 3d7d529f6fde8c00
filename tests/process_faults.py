# SPDX-License-Identifier: Apache-2.0
"""Random faults of running ranks: signals, exits, exceptions, hangs, delays and numbers that are not finite.

Each fault has its own training. It ends as `named` if every rank that could say so has named the rank and the kind of
the fault, as `finished` if training went on with finite weights and the same weights on all ranks (only for numbers and
delays), else as `wrong` (another cause, or weights that are not finite) or `hang` (a rank was still running after
`LIMIT_S`). `random_faults.py` draws many.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fork_support import fork_context
from train_ranks_support import free_port, variables

LIMIT_S = 60.0
NUM_STEPS = 6
LOST = r"rank {rank} failed in step [0-9]+: (no heartbeat|the store of rank 0|.*Connection|.*ended before)"
# What the other ranks must say. An interpreter that ends by itself can report its own end.
KINDS = {
    "SIGKILL": LOST,
    "SIGSTOP": LOST,
    "SIGTERM": LOST,
    "SIGSEGV": LOST,
    "SIGABRT": LOST,
    "SIGHUP": LOST,
    "SIGINT": r"rank {rank} failed in step [0-9]+: KeyboardInterrupt",
    "exit 0": LOST,
    "exit 3": LOST,
    "exit without cleaning up": LOST,
    "exception": r"rank {rank} failed in step {step}: ValueError: injected",
    "out of memory": r"rank {rank} failed in step {step}: MemoryError: injected",
    "exception in a thread": r"rank {rank} failed in step [0-9]+: ValueError: injected",
    "hang": r"rank {rank} hung: no step for ",
    # Training goes on.
    "short stop": "",
    "slow step": "",
    "NaN loss": "",
    "inf gradient": "",
}
NUMBERS = ("NaN loss", "inf gradient")
PLACES = ("before forward", "in backward", "before backward", "before step", "after step", "while saving")
SAVE_EVERY = 2
DELAY_S = 2.0


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in one step."""

    kind: str
    rank: int
    world: int
    step: int
    place: str
    stage: int
    states: str = "fp32"
    accumulation: int = 1
    saves: str = "never"

    def __str__(self) -> str:
        how = f"ZeRO {self.stage}, {self.states}, {self.accumulation} micro-batches, saves {self.saves}"
        return f"{self.kind} of rank {self.rank} of {self.world}, {self.place} {self.step}, {how}"


def draw(generator: random.Random) -> Fault:
    world = generator.choice((2, 3))
    kind, place = generator.choice(list(KINDS)), generator.choice(PLACES)
    step, stage = generator.randint(2, NUM_STEPS - 1), generator.choice((0, 1, 2, 3))
    states, accumulation = generator.choice(("fp32", "bf16", "int8")), generator.choice((1, 1, 2))
    saves = generator.choice(("never", "at once", "in the background"))
    if kind in NUMBERS:
        place = "before backward" if kind == "NaN loss" else "before step"
    if kind == "inf gradient":
        stage = 0  # other stages take gradients during backward
    if place == "while saving":
        step = SAVE_EVERY * generator.randint(1, NUM_STEPS // SAVE_EVERY - 1)
        saves = "at once" if saves == "never" else saves
        if not kind.startswith("SIG"):
            kind = generator.choice(("SIGKILL", "SIGTERM", "SIGSEGV"))  # other errors only cost the checkpoint
    return Fault(kind, generator.randrange(world), world, step, place, stage, states, accumulation, saves)


def run(fault: Fault, folder: Path) -> tuple[str, str]:
    """How the fault ended, and why if it did not end as it should."""
    context, port = fork_context(), free_port()
    logs = [folder / f"{rank}.log" for rank in range(fault.world)]
    ranks = [
        context.Process(target=_run_rank, args=(fault, rank, str(log), port), daemon=True)
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    end_s = time.monotonic() + LIMIT_S
    others = [rank for rank in range(fault.world) if not (fault.kind == "SIGSTOP" and rank == fault.rank)]
    while any(ranks[rank].is_alive() for rank in others) and time.monotonic() < end_s:
        time.sleep(0.02)
    hung = [rank for rank in others if ranks[rank].is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    texts = [log.read_text() if log.exists() else "" for log in logs]
    if hung:
        return "hang", f"ranks {hung} after {LIMIT_S:g} s\n" + "\n".join(texts)
    if not KINDS[fault.kind]:
        ends = [re.findall(r"^finished (.*)$", text, re.M) for text in texts]
        is_well = len({end[0] for end in ends if end}) == 1 and all(ends) and "nan" not in ends[0][0]
        says = fault.kind in NUMBERS and any(re.search(r"finite|\.grad was used between", text) for text in texts)
        return ("finished", "") if is_well else ("named", "") if says else ("wrong", "\n".join(texts))
    # A rank reports that it begins a step in the forward.
    step = f"({fault.step - 1}|{fault.step})" if fault.place == "before forward" else fault.step
    wanted = re.compile(KINDS[fault.kind].format(rank=fault.rank, step=step))
    silent = [rank for rank in others if rank != fault.rank and not wanted.search(texts[rank])]
    return ("named", "") if not silent else ("wrong", f"ranks {silent} named another cause\n" + "\n".join(texts))


def _run_rank(fault: Fault, rank: int, log: str, port: int) -> None:
    """Ends as an interpreter does: with its hook for exceptions and its functions at exit."""
    code = 0
    try:
        _train(fault, rank, log, port)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    os._exit(code)


def _train(fault: Fault, rank: int, log: str, port: int) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables(rank, fault.world, port), CUDA_VISIBLE_DEVICES="", TWINFLOW_THREADS="1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # commands under nohup ignore it
    import torch

    import twinflow
    from twinflow.launch import watch

    torch.set_num_threads(1)
    # Shorter times than those of a user, so that a fault takes seconds.
    fast = partial(watch.Timing, poll_s=0.2, dead_after_s=8.0, suspect_after_s=5.0, grace_s=0.5, hold_s=4.0)
    watch.Timing = fast  # type: ignore[misc, assignment]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "hang_timeout_s": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_accumulation_steps": fault.accumulation,
        "zero_optimization": {"stage": fault.stage, "offload_optimizer": {"device": "cpu", "states": fault.states}},
        "checkpoint": {"background": fault.saves == "in the background", "keep_last": 1},
    }
    engine, *_ = twinflow.initialize(model=model, config=config)
    act = _nothing
    if fault.place == "while saving":
        _when_writing(lambda: act("while saving"))
    for number in range(NUM_STEPS * fault.accumulation):
        step = number // fault.accumulation + 1
        act = partial(_act, fault) if (rank, step) == (fault.rank, fault.step) else _nothing
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))
        act("before forward")
        loss = engine(x).square().mean()
        if fault.place == "in backward":
            loss.register_hook(partial(_act_in_hook, act))
        if act("before backward"):
            loss = loss * float("nan")
        engine.backward(loss)
        if act("before step"):
            model[0].weight.grad.mul_(float("inf"))  # type: ignore[union-attr]
        engine.step()
        act("after step")
        if fault.saves != "never" and step % SAVE_EVERY == 0 and (number + 1) % fault.accumulation == 0:
            engine.save_checkpoint(Path(log).parent / "checkpoints")
            if fault.place == "while saving" and rank == fault.rank:
                engine.wait_for_checkpoint()  # so that the fault is of this step
    engine.wait_for_checkpoint()
    engine.optimizer.wait()
    if fault.stage < 3:
        print("finished", [round(float(p.double().sum()), 9) for p in model.parameters()], flush=True)
    else:
        print("finished", float(engine.get_global_grad_norm() or 0.0) >= 0.0, flush=True)
    engine.destroy()


def _nothing(place: str) -> bool:
    return False


def _act_in_hook(act: Callable[[str], bool], gradient: object) -> None:
    act("in backward")


def _when_writing(act: Callable[[], object]) -> None:
    """Calls `act` before each write to a file of a checkpoint."""
    from twinflow.checkpoint.disk import DurableFile

    write = DurableFile.write

    def act_and_write(self: DurableFile, data: bytes | memoryview, *start: int) -> None:
        act()
        write(self, data, *start)

    DurableFile.write = act_and_write  # type: ignore[method-assign]


def _act(fault: Fault, place: str) -> bool:
    """Does the fault if it is due here. Returns whether a number must become one that is not finite."""
    if place != fault.place:
        return False
    if fault.kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault.kind])
    elif fault.kind == "exit without cleaning up":
        os._exit(5)
    elif fault.kind.startswith("exit"):
        raise SystemExit(int(fault.kind[-1]))
    elif fault.kind == "exception":
        raise ValueError("injected")
    elif fault.kind == "out of memory":
        raise MemoryError("injected")
    elif fault.kind == "short stop":
        wake = f"import os, time; time.sleep({DELAY_S}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        subprocess.Popen([sys.executable, "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow step":
        time.sleep(DELAY_S)
    elif fault.kind == "exception in a thread":
        import threading

        threading.Thread(target=_raise).start()
        time.sleep(LIMIT_S)
    elif fault.kind == "hang":
        time.sleep(2 * LIMIT_S)
    return fault.kind in NUMBERS


def _raise() -> None:
    raise ValueError("injected")
