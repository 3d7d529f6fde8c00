# SPDX-License-Identifier: Apache-2.0
"""Steps with all AdamW state on a disk: the bytes per second that they move, against a plain copy of as many bytes.

The model has almost no forward and backward, so the disk limits a step. The plain copy reads each block of a file of
the same size and writes it back, around the page cache, with as many threads and the same block size, without updates
and without checksums. Windows of both alternate in one run, because the speed of a disk changes with time. Each window
of steps ends when all state is in the file. `--save` writes a dated file in benchmarks/results.

python benchmarks/disk_tier.py --path /local_nvme --params 200e6 --save
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from twinflow.bench.disk import copy_in_place
from twinflow.bench.machine import describe, read_machine
from twinflow.offload.state_file import StateFile, new_file
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


def step_window(optimizer: TwinOptimizer, model: nn.Module, file: StateFile, num_steps: int) -> tuple[float, float]:
    """Seconds and moved bytes."""
    before = file.counters
    start_s = time.perf_counter()
    for _ in range(num_steps):
        optimizer.backward(model())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    file.flush()
    seconds, after = time.perf_counter() - start_s, file.counters
    return seconds, float(after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--params", type=float, default=200e6)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--states", default="fp32")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--steps", type=int, default=4, help="steps of a window")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--note", default="", help="a sentence about the machine for the saved file")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    model = Weights(int(args.params), args.blocks, getattr(torch, args.dtype))
    tuning = Tuning(
        nvme_path=str(args.path),
        buffer_count=args.buffers,
        disk_requests=args.requests,
        disk_block_bytes=args.block_bytes,
    )
    optimizer = TwinOptimizer(model, lr=1e-4, ratio=1.0, states=args.states, early=True, tuning=tuning)
    file = optimizer.runtime.executor.file
    assert file is not None
    sizes = file.sizes
    copied = sizes.total_bytes // args.block_bytes * args.block_bytes
    fd, _, is_direct = new_file(args.path)
    os.posix_fallocate(fd, 0, copied)
    step_window(optimizer, model, file, 2)  # the first step also takes the weights into the state
    copy_in_place(fd, copied, args.requests, args.block_bytes)
    rates, plain, seconds = [], [], []
    for _ in range(args.windows):
        copies = [copy_in_place(fd, copied, args.requests, args.block_bytes) for _ in range(args.steps)]
        plain.append(2 * copied * len(copies) / sum(copies))
        took_s, moved = step_window(optimizer, model, file, args.steps)
        rates.append(moved / took_s)
        seconds.append(took_s / args.steps)
        print(f"steps {rates[-1] / 1e9:.2f} GB/s, plain copy {plain[-1] / 1e9:.2f} GB/s", flush=True)
    share = statistics.median(rates) / statistics.median(plain)
    optimizer.close()
    os.close(fd)
    low, high = min(rates) / 1e9, max(rates) / 1e9
    plain_low, plain_high = min(plain) / 1e9, max(plain) / 1e9
    options = f"{args.buffers} buffers of {sizes.buffer_bytes / 1e6:.0f} MB, {args.requests} requests"
    lines = [
        f"# State on a disk, {datetime.date.today()}",
        "",
        f"`python benchmarks/disk_tier.py --path PATH --params {args.params:g} --blocks {args.blocks} --states "
        f"{args.states} --dtype {args.dtype} --steps {args.steps} --windows {args.windows}` on "
        f"{describe(read_machine())}",
        "",
        f"{args.params / 1e6:.0f} M parameters, AdamW, {args.states} state: {sizes.total_bytes / 1e9:.2f} GB in a file "
        f"({'around' if is_direct else 'through'} the page cache), {options} of {args.block_bytes / 1e6:.2f} MB. "
        f"{args.dtype} weights. {args.note}".rstrip(),
        "",
        "| | |",
        "|---|---:|",
        f"| GB/s of steps, read and written, median of {args.windows} windows | {statistics.median(rates) / 1e9:.2f} "
        f"({low:.2f} to {high:.2f}) |",
        f"| GB/s of a plain copy, read and written | {statistics.median(plain) / 1e9:.2f} ({plain_low:.2f} to "
        f"{plain_high:.2f}) |",
        f"| steps beside the plain copy (wanted: at least {WANTED:.0%}) | {share:.0%} |",
        f"| s/step | {statistics.median(seconds):.2f} |",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if args.save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-disk-tier.md"
        path.write_text(text)


if __name__ == "__main__":
    main()
