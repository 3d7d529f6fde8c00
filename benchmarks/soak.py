"""Trains for hours while disks fill up, losses become NaN and ranks are killed, and measures what processes hold.

Two jobs run side by side. "steady" is one process that nothing ends: it saves in the background, validates, and meets
full disks and NaN losses. "killed" is two gloo ranks (ZeRO stage 2) under `twinflow launch --max_restarts`: the same,
and a random rank gets SIGKILL, SIGTERM or SIGSTOP every few minutes; the ranks start again from their last checkpoint.
Memory, threads and descriptors of every process are read from /proc. Every step writes its loss, so that a step that is
repeated after a restart can be compared with the first time, bit for bit.

    python benchmarks/soak.py --minutes 120 --save     # writes a dated file and a picture to benchmarks/results
    python benchmarks/soak.py --report FOLDER --save   # the same from the files of an earlier run

Needs Linux, and the right to mount a tmpfs, which is the disk that fills up. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

TESTS = Path(__file__).parents[1] / "tests"
WIDTH, BATCH = 64, 8
SAVE_EVERY, VALID_EVERY, NAN_EVERY = 100, 250, 200
PAUSE_S = 0.02  # after each step: two jobs must not take all cores of a machine that others use
SAMPLE_S = 5.0
DISK_MB = 96
VALID_SEED = 999_999_937  # no step has this number
KILL_AFTER_S = (60.0, 180.0)
FULL_AFTER_S, FULL_FOR_S = (180.0, 420.0), (30.0, 90.0)
SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP")


def train(disk: Path, log_path: Path, stop: Path, is_killed: bool) -> None:
    """One rank of a job: trains until the file `stop` is there."""
    import torch

    import twinflow

    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = torch.randn(WIDTH, 1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 1))
    config = {
        "train_batch_size": BATCH,
        "steps_per_print": None,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2 if is_killed else 0, "offload_optimizer": {"device": "cpu"}},
        "checkpoint": {"keep_last": 2, "background": True},
        "csv_monitor": {"enabled": True, "output_path": str(disk), "job_name": "csv"},
    }
    engine, *_ = twinflow.initialize(model=model, config=config)
    size = engine.train_micro_batch_size_per_gpu()
    first = engine.dp_rank * size

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))[first : first + size]
        return x, torch.tanh(x @ teacher / 8)

    with log_path.open("a", buffering=1) if engine.dp_rank == 0 else open(os.devnull, "w") as log:
        engine.load_checkpoint(disk / "checkpoints")  # finds nothing at the first start
        log.write(f"start {engine.global_steps} {time.time():.1f}\n")
        while not stop.exists():
            step = engine.global_steps + 1
            x, y = batch(step)
            loss = torch.nn.functional.mse_loss(engine(x), y)
            is_nan = step % NAN_EVERY == NAN_EVERY // 2 and engine.dp_rank == step // NAN_EVERY % engine.dp_world_size
            engine.backward(loss * float("nan") if is_nan else loss)
            engine.step()
            log.write(f"loss {step} {loss.item():.9g}\n")
            if step % NAN_EVERY == NAN_EVERY // 2:
                log.write(f"nan {step} {'skipped' if not engine.was_step_applied() else 'applied'}\n")
            if step % SAVE_EVERY == 0:
                save(engine, disk, step, log)
            if step % VALID_EVERY == 0:
                engine.eval()
                with torch.no_grad():
                    x, y = batch(VALID_SEED)
                    log.write(f"valid {step} {torch.nn.functional.mse_loss(engine(x), y).item():.9g}\n")
                engine.train()
            time.sleep(PAUSE_S)
        log.write(f"end {engine.global_steps} {engine.skipped_steps}\n")
        with suppress(OSError):
            engine.destroy()


def save(engine: Any, disk: Path, step: int, log: TextIO) -> None:
    """A save in the background raises what became of the one before it."""
    try:
        engine.save_checkpoint(disk / "checkpoints")
        log.write(f"save {step} 0\n")
    except OSError as error:
        log.write(f"full {step} {error.errno}\n")


class Soak:
    """The two jobs, the disks, and what is done to them."""

    def __init__(self, folder: Path, minutes: float, seed: int) -> None:
        self.folder = folder
        self.generator = random.Random(seed)
        self.stop = folder / "stop"
        self.events = (folder / "events.jsonl").open("w", buffering=1)
        self.samples = (folder / "samples.jsonl").open("w", buffering=1)
        self.begin_s = time.monotonic()
        self.end_s = self.begin_s + 60.0 * minutes
        self.disks = {name: folder / name / "disk" for name in ("steady", "killed")}
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        for disk in self.disks.values():
            disk.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)], check=True)
        try:
            for name in self.disks:
                self.start(name)
            kill_s, full_s, room_s = self.soon(KILL_AFTER_S), self.soon(FULL_AFTER_S), 0.0
            while time.monotonic() < self.end_s:
                time.sleep(SAMPLE_S)
                self.measure()
                now_s = time.monotonic()
                if now_s > kill_s:
                    self.kill()
                    kill_s = self.soon(KILL_AFTER_S)
                if room_s and now_s > room_s:
                    self.make_room()
                    full_s, room_s = self.soon(FULL_AFTER_S), 0.0
                elif not room_s and now_s > full_s:
                    self.fill()
                    room_s = self.soon(FULL_FOR_S)
                dead = [name for name, job in self.jobs.items() if job.poll() is not None]
                assert not dead, f"the job {dead} has ended: see the logs in {self.folder}"
            self.make_room()
            self.stop.touch()
            for name, job in self.jobs.items():
                self.say("end", job=name, code=job.wait(120))
        finally:
            for job in self.jobs.values():
                job.terminate()
                job.wait(60)
            for disk in self.disks.values():
                left = sorted(path.name for path in disk.rglob("*") if path.is_dir())
                self.say("left", disk=str(disk.relative_to(self.folder)), folders=left)
                subprocess.run(["umount", str(disk)], check=False)

    def start(self, name: str) -> None:
        script = [__file__, "--rank", name, "--folder", str(self.folder)]
        launch = ["-m", "twinflow", "launch", "--num_procs", "2", "--max_restarts", "100000"]
        argv = [sys.executable, *(launch if name == "killed" else ()), *script]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TWINFLOW_THREADS": "1"}
        with (self.folder / f"{name}.txt").open("wb") as file:
            self.jobs[name] = subprocess.Popen(argv, stdout=file, stderr=file, env=env)

    def soon(self, bounds: tuple[float, float]) -> float:
        return time.monotonic() + self.generator.uniform(*bounds)

    def say(self, kind: str, **facts: Any) -> None:
        self.events.write(json.dumps({"s": round(time.monotonic() - self.begin_s, 1), "kind": kind, **facts}) + "\n")

    def ranks(self) -> list[int]:
        sys.path.insert(0, str(TESTS))
        from elastic_support import scripts

        return scripts(self.jobs["killed"].pid)

    def measure(self) -> None:
        steady, launcher = self.jobs["steady"].pid, self.jobs["killed"].pid
        pids = {"steady": [steady], "launcher": [launcher], "killed": self.ranks()}
        for name, pid in [(name, pid) for name, those in pids.items() for pid in those]:
            with suppress(OSError, KeyError):
                held = held_by(pid)
                self.samples.write(
                    json.dumps({"s": round(time.monotonic() - self.begin_s, 1), "of": name, **held}) + "\n"
                )

    def kill(self) -> None:
        pids, name = self.ranks(), self.generator.choice(SIGNALS)
        if pids:
            pid = self.generator.choice(pids)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[name])
                self.say("kill", signal=name, pid=pid)

    def fill(self) -> None:
        for disk in self.disks.values():
            with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(1 << 12)):
                    pass
        self.say("full")

    def make_room(self) -> None:
        for disk in self.disks.values():
            (disk / "ballast").unlink(missing_ok=True)
        self.say("room")


def held_by(pid: int) -> dict[str, float]:
    """Resident memory, threads and open descriptors of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    num_files = len(os.listdir(f"/proc/{pid}/fd"))
    mb = int(status["VmRSS"].split()[0]) / 1024
    return {"pid": pid, "mb": round(mb, 2), "threads": int(status["Threads"]), "files": num_files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the files of the run are written; default: a new one")
    parser.add_argument("--rank", choices=("steady", "killed"), help="used by the script itself")
    given = parser.parse_args()
    if given.rank:
        disk = given.folder / given.rank / "disk"
        return train(disk, given.folder / f"{given.rank}.log", given.folder / "stop", given.rank == "killed")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    Soak(folder, given.minutes, given.seed).run()


if __name__ == "__main__":
    main()
