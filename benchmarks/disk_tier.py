# SPDX-License-Identifier: Apache-2.0
"""Steps with all AdamW state on a disk, by io_uring and by threads, against a plain copy of as many bytes.

The model has almost no forward and backward, so the disk limits a step. The plain copy reads each block of the file of
the state and writes it back, around the page cache, with as many threads and the same block size, without updates and
without checksums. Windows of all three alternate in one run, because the speed of a disk changes with time. Each window
of steps ends when all state is in the file. `--save` writes a dated file in benchmarks/results.

python benchmarks/disk_tier.py --path /local_nvme --params 200e6 --save
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from twinflow.bench.disk import copy_in_place
from twinflow.bench.machine import describe, read_machine
from twinflow.offload.state_file import IO_URING, THREADS, StateFile
from twinflow.optim.twin import Tuning, TwinOptimizer

WANTED = 0.85


class Weights(nn.Module):
    """Blocks whose forward costs nothing, and whose gradient costs one pass over memory."""

    def __init__(self, numel: int, num_blocks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(num_blocks))
        for block in self.blocks:
            block.weight = nn.Parameter(torch.zeros(numel // num_blocks, dtype=dtype))

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            total = total + block.weight[0].float()
        return total


@dataclass
class Steps:
    """Steps whose file `disk_io` reads and writes, and the rates that were measured."""

    disk_io: str
    model: nn.Module
    optimizer: TwinOptimizer
    file: StateFile
    rates: list[float] = field(default_factory=list)  # bytes/s, of reads and writes together
    seconds: list[float] = field(default_factory=list)  # of a step
    cpu_seconds: list[float] = field(default_factory=list)  # of a step, of all threads

    def run(self, num_steps: int) -> None:
        before, cpu_s, start_s = self.file.counters, time.process_time(), time.perf_counter()
        for _ in range(num_steps):
            self.optimizer.backward(self.model())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.optimizer.wait()
        self.file.flush()
        seconds, after = time.perf_counter() - start_s, self.file.counters
        moved = after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written
        self.rates.append(moved / seconds)
        self.seconds.append(seconds / num_steps)
        self.cpu_seconds.append((time.process_time() - cpu_s) / num_steps)

    def copy(self, num_copies: int) -> float:
        """The rate of plain copies of the file in place. No update may run."""
        sizes = self.file.sizes
        block_bytes = min(sizes.block_bytes, sizes.total_bytes)
        copied = sizes.total_bytes // block_bytes * block_bytes
        given = self.file.fd, copied, sizes.num_threads, block_bytes
        return 2 * copied * num_copies / sum(copy_in_place(*given) for _ in range(num_copies))


def spread(values: list[float], unit: float = 1e9) -> str:
    return f"{statistics.median(values) / unit:.2f} ({min(values) / unit:.2f} to {max(values) / unit:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--params", type=float, default=200e6, help="each of both ways has a file for so many")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--states", default="fp32")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--steps", type=int, default=4, help="steps of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--note", default="", help="a sentence about the machine for the saved file")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    runs = []
    for io in (IO_URING, THREADS):
        tuning = Tuning(
            nvme_path=str(args.path),
            buffer_count=args.buffers,
            disk_requests=args.requests,
            disk_block_bytes=args.block_bytes,
            disk_io=io,
        )
        model = Weights(int(args.params), args.blocks, getattr(torch, args.dtype))
        optimizer = TwinOptimizer(model, lr=1e-4, ratio=1.0, states=args.states, early=True, tuning=tuning)
        file = optimizer.runtime.executor.file
        assert file is not None
        if optimizer.disk_io != io:
            raise SystemExit("The kernel refuses io_uring, so there is nothing to compare.")
        runs.append(Steps(io, model, optimizer, file))
    plain: list[float] = []
    for run in runs:  # the first step also takes the weights into the state, and the second knows the order of reads
        run.run(2)
        run.rates.clear()
        run.seconds.clear()
        run.cpu_seconds.clear()
        run.copy(1)
    for window in range(args.windows):
        # Each way is the first in every second window.
        for run in runs if window % 2 == 0 else runs[::-1]:
            plain.append(run.copy(args.steps))
            run.run(args.steps)
            rates = f"{run.disk_io} {run.rates[-1] / 1e9:.2f} GB/s, plain copy before {plain[-1] / 1e9:.2f} GB/s"
            print(f"{rates}, load {os.getloadavg()[0]:.1f}", flush=True)
    for run in runs:
        run.optimizer.close()
    sizes, is_direct = runs[0].file.sizes, runs[0].file.is_direct
    copy_rate = statistics.median(plain)
    shares = " | ".join(f"{statistics.median(run.rates) / copy_rate:.0%}" for run in runs)
    way = "around" if is_direct else "through"
    options = f"{args.buffers} buffers of {sizes.buffer_bytes / 1e6:.0f} MB, {args.requests} requests"
    lines = [
        f"# State on a disk by io_uring and by threads, {datetime.date.today()}",
        "",
        f"`python benchmarks/disk_tier.py --path PATH --params {args.params:g} --blocks {args.blocks} --states "
        f"{args.states} --dtype {args.dtype} --steps {args.steps} --windows {args.windows}` on "
        f"{describe(read_machine())}",
        "",
        f"{args.params / 1e6:.0f} M parameters, AdamW, {args.states} state: {sizes.total_bytes / 1e9:.2f} GB in each "
        f"of two files ({way} the page cache), {options} of {args.block_bytes / 1e6:.2f} MB. "
        f"{args.dtype} weights. Medians of {args.windows} windows, and the least and the most. {args.note}".rstrip(),
        "",
        "| | io_uring | threads | plain copy |",
        "|---|---:|---:|---:|",
        f"| GB/s, read and written | {spread(runs[0].rates)} | {spread(runs[1].rates)} | {spread(plain)} |",
        f"| beside the plain copy (wanted: at least {WANTED:.0%}) | {shares} | |",
        f"| s/step | {spread(runs[0].seconds, 1)} | {spread(runs[1].seconds, 1)} | |",
        f"| CPU s/step of all threads | {spread(runs[0].cpu_seconds, 1)} | {spread(runs[1].cpu_seconds, 1)} | |",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if args.save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-disk-io.md"
        path.write_text(text)


if __name__ == "__main__":
    main()
