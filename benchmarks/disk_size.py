# SPDX-License-Identifier: Apache-2.0
"""Plain copies in place of files of several sizes: whether a disk is slower when a file is larger.

State on a disk has one file that is read and written in every step. Its space is reserved before it is written, so the
first write of a block also changes the metadata of the file. This script reserves one file, writes it twice, and then
reads and writes back its first bytes, of every size in turn, around the page cache. A copy of a small part again and
again shows the same blocks to the disk, which may keep them in a cache; a copy of the whole file does not. `--save`
writes a dated file in benchmarks/results.

python benchmarks/disk_size.py --path /local_nvme --sizes 3e9 20e9 --save
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
from pathlib import Path

from twinflow.bench.disk import BLOCK_BYTES, NUM_REQUESTS, copy_in_place, write_blocks
from twinflow.bench.machine import describe, read_machine
from twinflow.offload.state_file import new_file


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates) / 1e9:.2f} ({min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--sizes", type=float, nargs="+", default=[3e9, 20e9], help="bytes; the file has the largest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    sizes = sorted(int(size) // BLOCK_BYTES * BLOCK_BYTES for size in args.sizes)
    given = args.requests, BLOCK_BYTES
    fd, _, is_direct = new_file(args.path)
    os.posix_fallocate(fd, 0, sizes[-1])
    writes = [sizes[-1] / write_blocks(fd, sizes[-1], *given) for _ in range(2)]
    print(f"first write {writes[0] / 1e9:.2f} GB/s, second {writes[1] / 1e9:.2f} GB/s", flush=True)
    # Small sizes are copied as often as the largest takes, so that every window is as long.
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(args.rounds):
        for size in sizes:
            times = max(1, sizes[-1] // size)
            rates[size].append(2 * size * times / sum(copy_in_place(fd, size, *given) for _ in range(times)))
            load = os.getloadavg()[0]
            print(f"{size / 1e9:.1f} GB: {rates[size][-1] / 1e9:.2f} GB/s, load {load:.1f}", flush=True)
    os.close(fd)
    rows = [f"| copy of {size / 1e9:.1f} GB in place, read and written | {spread(rates[size])} |" for size in sizes]
    lines = [
        f"# Copies of files of several sizes, {datetime.date.today()}",
        "",
        f"`python benchmarks/disk_size.py --path PATH --sizes {' '.join(f'{size:g}' for size in args.sizes)} "
        f"--rounds {args.rounds}` on {describe(read_machine())}",
        "",
        f"{args.requests} requests of {BLOCK_BYTES / 1e6:.2f} MB, {'around' if is_direct else 'through'} the page "
        f"cache. At the end the load of the machine was {os.getloadavg()[0]:.1f}. A small copy is repeated until it "
        "has moved the bytes of the largest.",
        "",
        f"| | GB/s, median of {args.rounds} windows |",
        "|---|---:|",
        f"| first write of {sizes[-1] / 1e9:.1f} GB of reserved space | {writes[0] / 1e9:.2f} |",
        f"| second write | {writes[1] / 1e9:.2f} |",
        *rows,
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if args.save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-disk-size.md"
        path.write_text(text)


if __name__ == "__main__":
    main()
