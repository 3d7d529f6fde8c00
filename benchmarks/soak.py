# SPDX-License-Identifier: Apache-2.0
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
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
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
            rows = (self.disks["steady"] / "csv" / "Train_Samples_train_loss.csv").read_text().splitlines()[1:]
            self.say("rows", num=len(rows), num_different=len(set(rows)))
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


# The report.

TEXT = """# Soak of {minutes:.0f} minutes, {date}

`python benchmarks/soak.py --minutes {minutes:.0f}` on
{machine}

Two jobs side by side: `steady`, one process that nothing ended, and `killed`, two gloo ranks (ZeRO stage 2) under
`twinflow launch --max_restarts`. Both saved in the background every {save_every} steps, validated every {valid_every}
steps, wrote CSV metrics, and got a NaN loss every {nan_every} steps. All files of a job were on a disk of its own,
which was full now and then.

| | steady | killed |
|---|---:|---:|
{facts}

{num_kills} kills: {kills}. The disks were full {num_full} times, for {full_s:.0f} s in all. {rows}
Folders that were left in the end: {left}.

Memory (resident), threads and descriptors over the time, smallest to largest of the samples of that time. Of the killed
ranks only samples that are {warm_s:.0f} s after their start.

{table}

- `steady`: {steady}.
- launcher of `killed`: {launcher}.
- {num_lives} killed ranks that lived longer grew by {growth} from {warm_s:.0f} s after their start to their end.

![memory, threads and descriptors over the time]({picture})
"""
WARM_S = 60.0  # a start takes half a minute on a busy machine
NUM_ROWS = 12


def report(folder: Path) -> tuple[str, str]:
    """The text, with {picture} for the name of the picture, and the picture."""
    from curves_plot import Curve, Panel, picture

    from twinflow.bench.machine import describe, read_machine

    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    born: dict[int, float] = {}
    for one in samples:
        born.setdefault(one["pid"], one["s"])
    end_s = max(one["s"] for one in samples)
    settled = [one for one in samples if one["of"] != "killed" or one["s"] - born[one["pid"]] >= WARM_S]
    rows = []
    for number in range(NUM_ROWS):
        first_s, last_s = (end_s * (number + one) / NUM_ROWS for one in (0, 1))
        here = [one for one in settled if first_s <= one["s"] <= last_s]
        cells = [
            _range(here, name, key) for name in ("steady", "launcher", "killed") for key in ("mb", "threads", "files")
        ]
        rows.append(f"| {first_s / 60:.0f} to {last_s / 60:.0f} min | {' | '.join(cells)} |")
    kinds = ("MB", "threads", "files")
    head = " | ".join(f"{name} {kind}" for name in ("steady", "launcher", "killed") for kind in kinds)
    table = "\n".join([f"| | {head} |", f"|---|{'---:|' * 9}", *rows])
    kills = [one["signal"] for one in events if one["kind"] == "kill"]
    full_s, since_s = 0.0, None
    for one in events:
        if one["kind"] == "full":
            since_s = one["s"]
        elif one["kind"] == "room" and since_s is not None:
            full_s, since_s = full_s + one["s"] - since_s, None
    lives = [
        [one for one in settled if one["pid"] == pid]
        for pid in born
        if any(one["pid"] == pid and one["of"] == "killed" and one["s"] - born[pid] > 1.5 * WARM_S for one in samples)
    ]
    grown = [life[-1]["mb"] - life[0]["mb"] for life in lives] or [0.0]
    csv = next((one for one in events if one["kind"] == "rows"), None)
    steps = _facts(folder / "steady.log")["steps"]
    text = TEXT.format(
        minutes=end_s / 60,
        date=datetime.date.today().isoformat(),
        machine=describe(read_machine()),
        save_every=SAVE_EVERY,
        valid_every=VALID_EVERY,
        nan_every=NAN_EVERY,
        facts="\n".join(
            f"| {name} | {one} | {two} |"
            for (name, one), two in zip(
                _facts(folder / "steady.log").items(), _facts(folder / "killed.log").values(), strict=True
            )
        ),
        num_kills=len(kills),
        kills=", ".join(f"{kills.count(name)} {name}" for name in sorted(set(kills))),
        num_full=sum(one["kind"] == "full" for one in events),
        full_s=full_s,
        rows=f"The CSV file of `steady` has {csv['num_different']:,} rows for {steps} steps." if csv else "",
        left="; ".join(", ".join(one["folders"]) for one in events if one["kind"] == "left"),
        warm_s=WARM_S,
        table=table,
        steady=_trend([one for one in samples if one["of"] == "steady"], end_s),
        launcher=_trend([one for one in samples if one["of"] == "launcher"], end_s),
        num_lives=len(lives),
        growth=f"{min(grown):+.1f} to {max(grown):+.1f} MB",
        picture="{picture}",
    )
    panels = [
        Panel(title, [_curve(Curve, settled, name, key, i) for i, name in enumerate(("steady", "launcher"))], "minute")
        for title, key in (("resident memory, MB", "mb"), ("threads", "threads"), ("descriptors", "files"))
    ]
    return text, picture(panels)


def _curve(make: Any, samples: list[dict[str, Any]], name: str, key: str, color: int) -> Any:
    return make(name, [(one["s"] / 60, float(one[key])) for one in samples if one["of"] == name], color)


def _range(samples: list[dict[str, Any]], name: str, key: str) -> str:
    found = [one[key] for one in samples if one["of"] == name]
    low, high = (f"{value:.0f}" for value in (min(found), max(found))) if found else ("", "")
    return low if low == high else f"{low} to {high}"


def _trend(samples: list[dict[str, Any]], end_s: float) -> str:
    """Mean of the second tenth beside that of the last, and the slope of the second half."""
    early = [one["mb"] for one in samples if 0.1 <= one["s"] / end_s < 0.2]
    late = [one["mb"] for one in samples if one["s"] / end_s >= 0.9]
    half = [(one["s"] / 3600, one["mb"]) for one in samples if one["s"] / end_s >= 0.5]
    slope = statistics.linear_regression(*zip(*half, strict=True)).slope
    means = (
        f"{statistics.mean(early):.1f} MB in the second tenth of the time, {statistics.mean(late):.1f} MB in the last"
    )
    return f"{means} ({slope:+.2f} MB an hour in the second half)"


def _facts(log: Path) -> dict[str, str]:
    """What the lines of a job tell."""
    words = [line.split() for line in log.read_text().splitlines()]
    lines = [(one[0], int(one[1]), one[2]) for one in words if len(one) == 3]  # a kill may cut a line
    losses: dict[int, set[str]] = {}
    for kind, step, value in lines:
        if kind == "loss":
            losses.setdefault(step, set()).add(value)
    count = Counter(kind for kind, _, _ in lines)
    spoiled = [value for kind, _, value in lines if kind == "nan"]
    return {
        "steps": f"{len(losses):,}",
        "starts": f"{count['start']:,}",
        "steps that were repeated": f"{count['loss'] - len(losses):,}",
        "repeated steps with another loss": f"{sum(len(found) > 1 for found in losses.values()):,}",
        "steps with a NaN loss, and skipped": f"{len(spoiled):,}, {spoiled.count('skipped'):,}",
        "checkpoints that were begun": f"{count['save']:,}",
        "saves that found the disk full": f"{count['full']:,}",
        "validations": f"{count['valid']:,}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the files of the run are written; default: a new one")
    parser.add_argument("--report", type=Path, help="run nothing, and read the files in this folder")
    parser.add_argument("--save", action="store_true", help="write a dated file and a picture to benchmarks/results")
    parser.add_argument("--rank", choices=("steady", "killed"), help="used by the script itself")
    given = parser.parse_args()
    if given.rank:
        disk = given.folder / given.rank / "disk"
        return train(disk, given.folder / f"{given.rank}.log", given.folder / "stop", given.rank == "killed")
    folder = given.report or given.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    if not given.report:
        folder.mkdir(parents=True, exist_ok=True)
        Soak(folder, given.minutes, given.seed).run()
    text, drawing = report(folder)
    name = f"{datetime.date.today().isoformat()}-soak"
    print(text)
    if given.save:
        results = Path(__file__).parent / "results"
        (results / f"{name}.md").write_text(text.replace("{picture}", f"{name}.svg"))
        (results / f"{name}.svg").write_text(drawing)


if __name__ == "__main__":
    main()
