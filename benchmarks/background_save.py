# SPDX-License-Identifier: Apache-2.0
"""What checkpoints in the background cost: the time of steps while one is written, and its GB/s beside the disk's own.

    python benchmarks/background_save.py --save    # 3.43 B parameters on a GPU; at most 150 s and 60 GB of disk
    python benchmarks/background_save.py --tiny    # shows on any machine that the script works, nothing more

The model and tokens of benchmarks/offload.py. The rate of the disk is that of one file that is written and synced in
the same folder, before the model is built: once through the page cache, and once around it. A checkpoint is due every
20 steps. If the one before is still being written, the next one is due 20 steps later. The script deletes the one
before, so that the disk has to hold one. Updates while a checkpoint is written either leave the old state to the
checkpoint, or need a copy of it, or wait for the disk. The table counts all three.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from offload import CUDA, build, synchronize, tokens

import twinflow
from twinflow.bench.machine import describe, read_machine
from twinflow.checkpoint.disk import Blocks, DurableFile
from twinflow.native.cgroup import free_host_bytes
from twinflow.offload.frozen import Costs

CHUNK_BYTES = 16 << 20
NUM_FIRST = 6  # steps of each checkpoint whose seconds are printed
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
| GB/s of the disk, a file of {disk_gb:.1f} GB, synced: through the page cache, around it | {cached:.2f}, {direct:.2f} |
| checkpoints beside the faster of both | {share:.0%} |
| seconds of the first steps of each checkpoint | {first} |
| updates that left the old state to the checkpoint | {aside} |
| tensors copied for updates, their GB, GB at most at a time | {copied} |
| seconds in which something waited for the disk | {waited} |
| GB of buffers for updates before the clipping decision, and for checkpoints | {ahead_gb:.2f}, {saves_gb:.2f} |
| GB of free host memory: before the checkpoints, at least while they were written | {free_gb:.1f}, {least_gb:.1f} |
"""


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


def disk_rate(folder: Path, num_bytes: int, is_direct: bool) -> float:
    """Bytes a second of one file, synced, through the page cache or around it (as checkpoints are written)."""
    chunk = os.urandom(CHUNK_BYTES)
    blocks = Blocks() if is_direct else None
    path = folder / "rate"
    begin_s = time.perf_counter()
    try:
        with DurableFile(path, blocks) as file:
            for _ in range(max(1, num_bytes // CHUNK_BYTES)):
                file.write(chunk)
    finally:
        if blocks is not None:
            blocks.close()
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
    free: list[int] = [free_host_bytes()]

    def watch() -> None:
        while not running.is_done:
            time.sleep(0.01)
            free[0] = min(free[0], free_host_bytes())
        ended.append(time.perf_counter() - begin_s)

    thread = threading.Thread(target=watch)
    thread.start()
    num_steps = num_saving = 0
    saving_s = 0.0
    moments = [time.perf_counter()]
    while not num_saving or num_steps % every:
        step()
        num_steps += 1
        moments.append(time.perf_counter())
        if not num_saving and running.is_done:
            synchronize()
            num_saving, saving_s = num_steps, time.perf_counter() - begin_s
    synchronize()
    whole_s = time.perf_counter() - begin_s
    thread.join()
    engine.wait_for_checkpoint()
    first_s = tuple(after - before for before, after in pairwise(moments[: NUM_FIRST + 1]))
    return Save(call_s, ended[0], saving_s, num_saving, first_s, running.costs, free[0]), whole_s, num_steps


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
        text = measure(given, folder, begin_s)
    finally:
        shutil.rmtree(folder)
    print(text)
    if given.save:
        name = f"{datetime.date.today().isoformat()}-background-save-{given.size}.md"
        (Path(__file__).parent / "results" / name).write_text(text)


def measure(given: argparse.Namespace, folder: Path, begin_s: float) -> str:
    cached, direct = (disk_rate(folder, int(given.disk_gb * 1e9), is_direct) for is_direct in (False, True))
    print(
        f"disk: {cached / 1e9:.2f} GB/s through the page cache, {direct / 1e9:.2f} around it",
        file=sys.stderr,
        flush=True,
    )
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
    free_gb = free_host_bytes() / 1e9
    stores = engine.optimizer.runtime.speculative_stores
    ahead_gb, saves_gb = (stores.num_bytes - stores.bytes_for_saves) / 1e9, stores.bytes_for_saves / 1e9
    print(f"{time.perf_counter() - begin_s:.0f} s: {plain:.4f} s/step without checkpoints", file=sys.stderr, flush=True)
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
        cached=cached / 1e9,
        direct=direct / 1e9,
        share=sum(rates) / len(rates) / max(cached, direct),
        first="; ".join(" ".join(f"{seconds:.2f}" for seconds in one.first_s) for one in saves),
        aside=", ".join(str(one.costs.num_aside) for one in saves),
        copied="; ".join(
            f"{one.costs.num_copies}, {one.costs.copied_bytes / 1e9:.2f}, {one.costs.peak_bytes / 1e9:.2f}"
            for one in saves
        ),
        waited=", ".join(f"{one.costs.waited_s:.2f}" for one in saves),
        ahead_gb=ahead_gb,
        saves_gb=saves_gb,
        free_gb=free_gb,
        least_gb=min(one.least_free for one in saves) / 1e9,
    )


if __name__ == "__main__":
    main()
