"""What checkpoints in the background cost: the time of steps while one is written, and its GB/s beside the disk's own.

    python benchmarks/background_save.py --save    # 3.43 B parameters on a GPU; at most 150 s and 60 GB of disk
    python benchmarks/background_save.py --tiny    # shows on any machine that the script works, nothing more

The model and tokens of benchmarks/offload.py. The rate of the disk is that of one file that is written and synced in
the same folder, before the model is built. A checkpoint is due every 20 steps. If the one before is still being
written, the next one is due 20 steps later. The script deletes the one before, so that the disk has to hold one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from offload import CUDA, build, synchronize, tokens

import twinflow
from twinflow.bench.machine import describe, read_machine

CHUNK_BYTES = 16 << 20
TEXT = """# Checkpoints in the background, {size}, {date}

`python benchmarks/background_save.py{arguments}` on {gpu};
{machine}; torch {torch}

{params:.2f} B parameters, {states} state, ratio {ratio}, {batch} sequences a step. A checkpoint has {gb:.2f} GB.

| | |
|---|---:|
| s/step without a checkpoint, {num_plain} steps | {plain:.4f} |
| s/step while a checkpoint is written, {num_saving} steps, with the call of `save_checkpoint` | {saving:.4f} |
| slowdown of these steps | {slow_saving:+.1%} |
| slowdown with a checkpoint every {every} steps | {slow_all} |
| seconds in the call of `save_checkpoint` | {calls} |
| seconds until a checkpoint was complete | {seconds} |
| GB/s of the checkpoints | {rates} |
| GB/s of the disk, one file of {disk_gb:.1f} GB written and synced | {disk:.2f} |
| checkpoints beside the disk | {share:.0%} |
| host memory for copies of state, at most | {peak:.2f} GB |
"""


@dataclass(frozen=True)
class Save:
    """One checkpoint: seconds of the call, seconds until it was complete, steps in that time, and the memory."""

    call_s: float
    complete_s: float
    steps_s: float
    num_steps: int
    peak_bytes: int


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second of one file, synced."""
    chunk = os.urandom(CHUNK_BYTES)
    path = folder / "rate"
    begin_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for _ in range(max(1, num_bytes // CHUNK_BYTES)):
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - begin_s
    num_written = path.stat().st_size
    path.unlink()
    return num_written / seconds


def time_steps(step: Callable[[], object], num: int) -> float:
    synchronize()
    begin_s = time.perf_counter()
    for _ in range(num):
        step()
    synchronize()
    return (time.perf_counter() - begin_s) / num


def save_once(engine: twinflow.Engine, step: Callable[[], object], folder: Path, every: int) -> tuple[Save, float, int]:
    """A checkpoint and the steps in its time. Also the seconds and the number of steps until the next one is due."""
    for old in folder.glob("global_step*"):
        shutil.rmtree(old)
    synchronize()
    begin_s = time.perf_counter()
    engine.save_checkpoint(folder)
    call_s = time.perf_counter() - begin_s
    running = engine.background
    assert running is not None
    ended: list[float] = []

    def watch() -> None:
        while not running.is_done:
            time.sleep(0.005)
        ended.append(time.perf_counter() - begin_s)

    thread = threading.Thread(target=watch)
    thread.start()
    num_steps = num_saving = 0
    saving_s = 0.0
    while not num_saving or num_steps % every:
        step()
        num_steps += 1
        if not num_saving and running.is_done:
            synchronize()
            num_saving, saving_s = num_steps, time.perf_counter() - begin_s
    synchronize()
    whole_s = time.perf_counter() - begin_s
    thread.join()
    engine.wait_for_checkpoint()
    return Save(call_s, ended[0], saving_s, num_saving, running.peak_bytes), whole_s, num_steps


def main() -> None:
    begin_s = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b", help="a size of benchmarks/offload.py")
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--states", default="fp32", choices=("fp32", "bf16", "int8"))
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--saves", type=int, default=3, help="at most so many checkpoints")
    parser.add_argument("--seconds", type=float, default=150.0, help="no checkpoint begins that would end after this")
    parser.add_argument("--disk-gb", type=float, default=8.0, help="size of the file that measures the disk")
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
        text = measure(given, folder, begin_s)
    finally:
        shutil.rmtree(folder)
    print(text)
    if given.save:
        name = f"{datetime.date.today().isoformat()}-background-save-{given.size}.md"
        (Path(__file__).parent / "results" / name).write_text(text)


def measure(given: argparse.Namespace, folder: Path, begin_s: float) -> str:
    disk = disk_rate(folder, int(given.disk_gb * 1e9))
    model, batch = build(given.size), 4 if CUDA else 1
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
    plain = time_steps(step, given.every)
    saves: list[Save] = []
    whole_s, num_whole = 0.0, 0
    while len(saves) < given.saves:
        if saves and time.perf_counter() - begin_s + whole_s / len(saves) > given.seconds:
            break
        one, seconds, num_steps = save_once(engine, step, folder, given.every)
        saves.append(one)
        whole_s += seconds
        num_whole += num_steps
        print(f"{time.perf_counter() - begin_s:.0f} s: {one}", file=sys.stderr, flush=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    engine.destroy()
    rates = [size / one.complete_s for one in saves]
    saving = sum(one.steps_s for one in saves) / sum(one.num_steps for one in saves)
    return TEXT.format(
        size=given.size,
        date=datetime.date.today().isoformat(),
        arguments="".join(f" {word}" for word in sys.argv[1:] if word != "--save"),
        gpu=torch.cuda.get_device_name() if CUDA else "no GPU",
        machine=describe(read_machine()),
        torch=torch.__version__,
        params=sum(param.numel() for param in model.parameters()) / 1e9,
        states=given.states,
        ratio=given.ratio,
        batch=batch,
        gb=size / 1e9,
        num_plain=given.every,
        plain=plain,
        num_saving=sum(one.num_steps for one in saves),
        saving=saving,
        slow_saving=saving / plain - 1.0,
        every=given.every,
        slow_all=f"{whole_s / num_whole / plain - 1.0:+.1%}, in {num_whole} steps with {len(saves)} checkpoints",
        calls=", ".join(f"{one.call_s:.2f}" for one in saves),
        seconds=", ".join(f"{one.complete_s:.1f}" for one in saves),
        rates=", ".join(f"{rate / 1e9:.2f}" for rate in rates),
        disk_gb=given.disk_gb,
        disk=disk / 1e9,
        share=sum(rates) / len(rates) / disk,
        peak=max(one.peak_bytes for one in saves) / 1e9,
    )


if __name__ == "__main__":
    main()
