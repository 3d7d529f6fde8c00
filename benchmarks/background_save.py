# SPDX-License-Identifier: Apache-2.0
"""What checkpoints in the background cost: the time of steps while one is written, and its GB/s beside the disk's own.

    python benchmarks/background_save.py --save    # 3.43 B parameters on a GPU; at most 150 s and 60 GB of disk
    python benchmarks/background_save.py --tiny    # shows on any machine that the script works, nothing more

The model and tokens of benchmarks/offload.py. The rate of the disk is that of one file that is written and synced in
the same folder, before the model is built: once through the page cache, and once around it. A checkpoint is due every
20 steps. If the one before is still being written, the next one is due 20 steps later. The script deletes the one
before, so that the disk has to hold one. Updates while a checkpoint is written either leave the old state to the
checkpoint, or need a copy of it, or wait for the disk. The table counts all three. It also has the time of the stages
of the writer, as sums over its threads: wall time, and CPU time, which updates lose if all processors are in use.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from offload import CUDA, build, synchronize, tokens

import twinflow
from twinflow import native
from twinflow.bench.machine import describe, read_machine
from twinflow.checkpoint.disk import DurableFile
from twinflow.checkpoint.tensors import BLOCK_BYTES, NUM_BUFFERS
from twinflow.checkpoint.threads import Threads
from twinflow.native.cgroup import free_host_bytes
from twinflow.offload.frozen import Costs

NUM_FIRST = 6  # steps of each checkpoint whose seconds are printed
HEAD = """# Checkpoints in the background, {size}, {date}

`python benchmarks/background_save.py{arguments}` on {gpu};
{machine}; torch {torch}

{states} state, ratio {ratio}, {batch} sequences a step, a checkpoint every {every} steps.

| | |
|---|---:|
"""


class Report:
    """A table. Each row is printed, and written to the file if there is one, as soon as it is known."""

    def __init__(self, head: str, path: Path | None) -> None:
        self._text = ""
        self._path = path
        self._write(head)

    def add(self, label: str, value: str) -> None:
        self._write(f"| {label} | {value} |\n")

    def _write(self, text: str) -> None:
        self._text += text
        print(text, end="", flush=True)
        if self._path is not None:
            self._path.write_text(self._text)


@dataclass
class Stage:
    """Calls of one function by the threads that write a checkpoint."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    num_bytes: int = 0
    num_calls: int = 0

    def __str__(self) -> str:
        rate = (
            f", {self.num_bytes / 1e9:.2f} GB, {self.num_bytes / self.seconds / 1e9:.2f} GB/s" if self.seconds else ""
        )
        return f"{self.seconds:.2f} s, {self.cpu_s:.2f} s of CPU, {self.num_calls} calls{rate}"


@dataclass
class Stages:
    """Replaces functions of the writer by functions that count their time, until `end`."""

    stages: dict[str, Stage] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _before: list[tuple[Any, str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        def gather(into: Any, parts: Any) -> tuple[str, int]:
            num_bytes = sum(4 * one[0].numel() if isinstance(one, tuple) else one.numel() for one in parts)
            return ("checksum" if into is None else "copy and checksum"), num_bytes

        def pwrite(fd: int, data: Any, at: int) -> tuple[str, int]:
            is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0)
            return ("write around the page cache" if is_direct else "write through the page cache"), len(data)

        self._time(native, "gather", gather)
        self._time(os, "pwrite", pwrite)
        self._time(os, "fsync", lambda fd: ("fsync", 0))

    def _time(self, module: Any, name: str, describe: Callable[..., tuple[str, int]]) -> None:
        real = getattr(module, name)

        def timed(*args: Any) -> Any:
            stage, num_bytes = describe(*args)
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return real(*args)
            finally:
                seconds, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
                with self._lock:
                    one = self.stages.setdefault(stage, Stage())
                    one.seconds += seconds
                    one.cpu_s += cpu_s
                    one.num_bytes += num_bytes
                    one.num_calls += 1

        self._before.append((module, name, real))
        setattr(module, name, timed)

    def end(self) -> None:
        for module, name, real in self._before:
            setattr(module, name, real)


@dataclass(frozen=True)
class Save:
    """One checkpoint: seconds of the call, seconds until it was complete, steps in that time, and their costs."""

    call_s: float
    complete_s: float
    steps_s: float
    num_steps: int
    first_s: tuple[float, ...]  # seconds of its first steps
    costs: Costs
    least_free: int  # bytes of host memory
    cpu_s: float  # of the process, for each of these steps
    stages: dict[str, Stage]


def disk_rate(folder: Path, num_bytes: int, is_direct: bool) -> float:
    """Bytes a second of one file, synced, through the page cache or around it (as checkpoints are written)."""
    block = mmap.mmap(-1, BLOCK_BYTES)  # begins at a page
    block.write(os.urandom(BLOCK_BYTES))
    path = folder / "rate"
    threads = Threads("rate", NUM_BUFFERS if is_direct else 1)
    begin_s = time.perf_counter()
    with DurableFile(path, is_direct) as file:
        for start in range(0, max(num_bytes, 1), BLOCK_BYTES):
            threads.put(partial(file.write, memoryview(block), start))
        threads.wait()
    seconds = time.perf_counter() - begin_s
    threads.close()
    num_written = path.stat().st_size
    path.unlink()
    return num_written / seconds


def time_steps(step: Callable[[], object], num: int) -> tuple[float, float]:
    """Seconds of a step, and CPU seconds of the process."""
    synchronize()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num):
        step()
    synchronize()
    return (time.perf_counter() - begin_s) / num, (time.process_time() - begin_cpu_s) / num


def save_once(engine: twinflow.Engine, step: Callable[[], object], folder: Path, every: int) -> tuple[Save, float, int]:
    """A checkpoint and the steps in its time. Also the seconds and the number of steps until the next one is due."""
    for old in folder.glob("global_step*"):
        shutil.rmtree(old)
    synchronize()
    stages = Stages()
    stages.begin()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    engine.save_checkpoint(folder)
    call_s = time.perf_counter() - begin_s
    running = engine.background
    assert running is not None
    ended: list[float] = []
    free: list[int] = [free_host_bytes()]

    def watch() -> None:
        while not running.is_done:
            time.sleep(0.05)  # often enough for seconds, and rarely enough not to slow down steps
            free[0] = min(free[0], free_host_bytes())
        ended.append(time.perf_counter() - begin_s)

    thread = threading.Thread(target=watch)
    thread.start()
    num_steps = num_saving = 0
    saving_s = saving_cpu_s = 0.0
    moments = [time.perf_counter()]
    while not num_saving or num_steps % every:
        step()
        num_steps += 1
        moments.append(time.perf_counter())
        if not num_saving and running.is_done:
            synchronize()
            num_saving, saving_s = num_steps, time.perf_counter() - begin_s
            saving_cpu_s = time.process_time() - begin_cpu_s
            stages.end()
    synchronize()
    whole_s = time.perf_counter() - begin_s
    thread.join()
    engine.wait_for_checkpoint()
    first_s = tuple(after - before for before, after in pairwise(moments[: NUM_FIRST + 1]))
    cpu_s = saving_cpu_s / num_saving
    one = Save(call_s, ended[0], saving_s, num_saving, first_s, running.costs, free[0], cpu_s, stages.stages)
    return one, whole_s, num_steps


def main() -> None:
    begin_s = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b", help="a size of benchmarks/offload.py")
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--states", default="fp32", choices=("fp32", "bf16", "int8"))
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--saves", type=int, default=3, help="at most so many checkpoints")
    parser.add_argument("--seconds", type=float, default=150.0, help="no checkpoint begins that would end after this")
    parser.add_argument(
        "--disk-gb", type=float, default=6.0, help="size of each of the two files that measure the disk"
    )
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; default: a new one")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true", help="write a dated file to benchmarks/results")
    given = parser.parse_args()
    if given.tiny:
        given.size, given.disk_gb, given.every, given.saves = "tiny", 0.05, 4, 2
    elif not CUDA:
        parser.error("there is no GPU; use --tiny to see that the script works")
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        measure(given, folder, begin_s)
    finally:
        shutil.rmtree(folder)


def measure(given: argparse.Namespace, folder: Path, begin_s: float) -> None:
    date, batch = datetime.date.today().isoformat(), 4 if CUDA else 1
    results = Path(__file__).parent / "results"
    head = HEAD.format(
        size=given.size,
        date=date,
        arguments="".join(f" {word}" for word in sys.argv[1:] if word != "--save"),
        gpu=torch.cuda.get_device_name() if CUDA else "no GPU",
        machine=describe(read_machine()),
        torch=torch.__version__,
        states=given.states,
        ratio=given.ratio,
        batch=batch,
        every=given.every,
    )
    report = Report(head, results / f"{date}-background-save-{given.size}.md" if given.save else None)
    cached, direct = (disk_rate(folder, int(given.disk_gb * 1e9), is_direct) for is_direct in (False, True))
    report.add(
        f"GB/s of the disk, a file of {given.disk_gb:.1f} GB, synced: through the page cache, around it",
        f"{cached / 1e9:.2f}, {direct / 1e9:.2f}",
    )
    model = build(given.size)
    report.add("parameters", f"{sum(param.numel() for param in model.parameters()):.3g}")
    x = tokens(model, batch)
    offload = {"device": "cpu", "ratio": given.ratio, "states": given.states}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1e3,
        "steps_per_print": None,
        "bf16": {"enabled": CUDA},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "checkpoint": {"background": True},
    }
    engine, *_ = twinflow.initialize(model=model, config=config)

    def step() -> None:
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()

    time_steps(step, 8 if CUDA else 2)
    plain, plain_cpu_s = time_steps(step, given.every)
    report.add(
        f"s/step without a checkpoint, {given.every} steps, and its CPU seconds", f"{plain:.4f}, {plain_cpu_s:.2f}"
    )
    stores = engine.optimizer.runtime.speculative_stores
    ahead_gb, saves_gb = (stores.num_bytes - stores.bytes_for_saves) / 1e9, stores.bytes_for_saves / 1e9
    report.add(
        "GB of buffers for updates before the clipping decision, and for checkpoints", f"{ahead_gb:.2f}, {saves_gb:.2f}"
    )
    report.add("GB of free host memory before the checkpoints", f"{free_host_bytes() / 1e9:.1f}")
    saves: list[Save] = []
    rates: list[float] = []
    whole_s, num_whole = 0.0, 0
    while len(saves) < given.saves:
        if saves and time.perf_counter() - begin_s + whole_s / len(saves) > given.seconds:
            break
        one, seconds, num_steps = save_once(engine, step, folder, given.every)
        saves.append(one)
        whole_s += seconds
        num_whole += num_steps
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        rates.append(num_bytes / one.complete_s)
        add_save(report, f"checkpoint {len(saves)}", one, num_bytes, plain)
    engine.destroy()
    saving = sum(one.steps_s for one in saves) / sum(one.num_steps for one in saves)
    report.add(f"s/step while {len(saves)} checkpoints are written", f"{saving:.4f}, {saving / plain - 1.0:+.1%}")
    slow_all = f"{whole_s / num_whole / plain - 1.0:+.1%}, in {num_whole} steps with {len(saves)} checkpoints"
    report.add(f"slowdown with a checkpoint every {given.every} steps", slow_all)
    rate = sum(rates) / len(rates)
    label = "GB/s of the checkpoints, beside the faster rate of the disk"
    report.add(label, f"{rate / 1e9:.2f}, {rate / max(cached, direct):.0%}")
    report.add("seconds of the benchmark", f"{time.perf_counter() - begin_s:.0f}")


def add_save(report: Report, name: str, one: Save, num_bytes: int, plain: float) -> None:
    def add(label: str, value: str) -> None:
        report.add(f"{name}: {label}", value)

    add(
        "GB, seconds until it was complete, GB/s",
        f"{num_bytes / 1e9:.2f}, {one.complete_s:.1f}, {num_bytes / one.complete_s / 1e9:.2f}",
    )
    slow = one.steps_s / one.num_steps
    add(
        f"s/step in this time, {one.num_steps} steps, with the call of `save_checkpoint`; slowdown; CPU seconds",
        f"{slow:.4f}; {slow / plain - 1.0:+.1%}; {one.cpu_s:.2f}",
    )
    add("seconds in the call of `save_checkpoint`", f"{one.call_s:.2f}")
    for stage, found in sorted(one.stages.items()):
        add(f"{stage}, of all threads", str(found))
    add("seconds of its first steps", " ".join(f"{seconds:.2f}" for seconds in one.first_s))
    costs = one.costs
    add("updates that left the old state to the checkpoint", str(costs.num_aside))
    add(
        "tensors copied for updates, their GB, GB at most at a time",
        f"{costs.num_copies}, {costs.copied_bytes / 1e9:.2f}, {costs.peak_bytes / 1e9:.2f}",
    )
    add("seconds in which something waited for the disk", f"{costs.waited_s:.2f}")
    add("GB of free host memory at least", f"{one.least_free / 1e9:.1f}")


if __name__ == "__main__":
    main()
