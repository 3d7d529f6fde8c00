# SPDX-License-Identifier: Apache-2.0
"""Training steps of a published shape with its optimizer state on a disk, in a limited part of GPU and host memory.

The weights are on the GPU, and gradients wait for their updates in a few slots on the host. A step cannot be shorter
than forward and backward alone, or than its state needs to be read and written: the bytes of the state over the rate of
a plain copy (each block of the file of the state is read and written back, around the page cache). It is measured after
the first step and after the last, for the whole file and for its first bytes, so that the figures show whether the size
of the file matters. Random weights, bf16, activation checkpointing for each block, the loss in chunks, AdamW, no
clipping. Each figure is printed as soon as it is known. `--save` writes a dated file in benchmarks/results.

python benchmarks/disk_training.py --path /local_nvme --shape qwen2.5-7b --gpu-memory 24 --save    # 40 GB of disk
python benchmarks/disk_training.py --path /tmp --shape tiny    # shows on any machine that it works
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from real_models import CUDA, DEVICE, bare, measure, synchronize
from weights_on_host import checkpoint_blocks, data_of, limit_memory, memory_available, prepared

from twinflow.bench.disk import copy_in_place
from twinflow.bench.machine import describe, read_machine
from twinflow.offload.materialize import build
from twinflow.offload.state_file import StateFile
from twinflow.optim.twin import Tuning, TwinOptimizer


class HostMemory:
    """The most memory of the host that was taken since the start, of which files in the cache are no part."""

    def __init__(self) -> None:
        self.before = self.least = memory_available()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.05):
            self.least = min(self.least, memory_available())

    def taken(self) -> int:
        return self.before - self.least

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


def plain_copies(file: StateFile, part_bytes: int) -> tuple[float, float]:
    """Bytes per second, read and written: of the whole file in place, and of its first bytes. No update may run."""
    sizes = file.sizes
    rates = []
    for num_bytes in (sizes.total_bytes, min(part_bytes, sizes.total_bytes)):
        block_bytes = min(sizes.block_bytes, num_bytes)
        copied = num_bytes // block_bytes * block_bytes
        rates.append(2 * copied / copy_in_place(file.fd, copied, sizes.num_threads, block_bytes))
        way = "around" if file.is_direct else "through"
        print(f"copy of {copied / 1e9:.2f} GB in place: {rates[-1] / 1e9:.2f} GB/s, {way} the page cache", flush=True)
    return rates[0], rates[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--states", default="int8")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--gpu-memory", type=float, default=24.0, metavar="GB")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--part-bytes", type=float, default=3e9, help="of the plain copy of a part of the file")
    parser.add_argument("--disk-io", default="auto", choices=["auto", "io_uring", "threads"])
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--save-to", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    args = parser.parse_args()
    tuning = Tuning(nvme_path=str(args.path), buffer_count=args.buffers, disk_io=args.disk_io)
    limit_memory(args.gpu_memory)
    data = data_of(args.shape, args.sequences)
    model: Any = prepared(build(lambda: bare(args.shape), DEVICE))
    checkpoint_blocks(model, keeps_inputs_on_host=False)

    def both() -> None:
        model(input_ids=data, labels=data).loss.backward()

    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    gpu_s = statistics.median(measure(both, 1, 3, 1))
    for hook in hooks:
        hook.remove()
    print(f"forward and backward alone: {gpu_s:.3f} s", flush=True)
    memory = HostMemory()
    start = time.perf_counter()
    optimizer = TwinOptimizer(model, lr=1e-5, ratio=1.0, states=args.states, early=True, tuning=tuning)
    print(f"optimizer built in {time.perf_counter() - start:.1f} s", flush=True)
    file = optimizer.runtime.executor.file
    assert file is not None
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds, moved = [], [], []
    copies: list[tuple[float, float]] = []
    for step in range(1 + args.steps):
        before, start = file.counters, time.perf_counter()
        loss = model(input_ids=data, labels=data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        optimizer.wait()
        file.flush()
        seconds.append(time.perf_counter() - start)
        after = file.counters
        moved.append(after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written)
        losses.append(loss.item())
        gpu_gb = torch.cuda.max_memory_allocated() / 1e9 if CUDA else 0.0
        used = f"GPU {gpu_gb:.2f} GB, host {memory.taken() / 1e9:.2f} GB"
        print(f"loss {losses[-1]:.4f}, {seconds[-1]:.2f} s, {moved[-1] / 1e9:.2f} GB moved, {used}", flush=True)
        if step in (0, args.steps):
            copies.append(plain_copies(file, int(args.part_bytes)))  # all blocks of the file have been written
    memory.stop()
    host_gb = memory.taken() / 1e9
    numel = sum(p.numel() for p in model.parameters())
    state_gb = file.sizes.total_bytes / 1e9
    io = file.io
    optimizer.close()
    step_s = statistics.median(seconds[1:])
    rate, part_rate = (statistics.mean(rates) for rates in zip(*copies, strict=True))
    disk_s = statistics.median(moved[1:]) / rate
    part_s = statistics.median(moved[1:]) / part_rate
    bound_s = max(gpu_s, disk_s)
    tokens = data.numel()
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    text = "\n".join(
        [
            f"# Training with the optimizer state on a disk, {args.shape}, {datetime.date.today()}",
            "",
            f"`python benchmarks/disk_training.py {' '.join(sys.argv[1:])}` on {gpu}; "
            f"{describe(read_machine())}; torch {torch.__version__}",
            "",
            f"{numel / 1e9:.2f} B parameters, AdamW, {args.states} state: {state_gb:.1f} GB in a file, by {io}, "
            f"{tokens:,} tokens a step, at most {args.gpu_memory:g} GB of the GPU. The first step is not counted.",
            "",
            "| | |",
            "|---|---:|",
            f"| s/step, median of {args.steps} | {step_s:.2f} ({min(seconds[1:]):.2f} to {max(seconds[1:]):.2f}) |",
            f"| tokens/s | {tokens / step_s:.0f} |",
            f"| s of forward and backward alone | {gpu_s:.3f} |",
            f"| GB that a step reads and writes | {statistics.median(moved[1:]) / 1e9:.2f} |",
            f"| GB/s of a plain copy of the whole file in place, after the first step and the last | "
            f"{', '.join(f'{whole / 1e9:.2f}' for whole, _ in copies)} |",
            f"| the same of its first {args.part_bytes / 1e9:.1f} GB | "
            f"{', '.join(f'{part / 1e9:.2f}' for _, part in copies)} |",
            f"| s of the copy of the whole file for the bytes of a step | {disk_s:.2f} |",
            f"| s of the copy of its first bytes for the bytes of a step | {part_s:.2f} |",
            f"| s/step beside the larger of both | {step_s / bound_s:.2f} |",
            f"| GB of the GPU in use at most | {gpu_gb:.2f} |",
            f"| GB of the host in use at most, beyond those in use before the optimizer was built | {host_gb:.2f} |",
            f"| losses | {', '.join(f'{loss:.4f}' for loss in losses)} |",
            "",
        ]
    )
    print(text)
    if args.save:
        args.save_to.mkdir(parents=True, exist_ok=True)
        (args.save_to / f"{datetime.date.today()}-disk-training.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
