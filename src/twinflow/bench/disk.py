# SPDX-License-Identifier: Apache-2.0
"""Measures a disk as state on the disk uses it: blocks of a file, around the page cache, by several threads."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from twinflow.errors import unusable_path
from twinflow.native.library import load
from twinflow.offload.state_file import IO_URING, THREADS, new_file, num_rings, ring_refusal

NUM_BYTES: Final = 1 << 30
NUM_REQUESTS: Final = 8  # the defaults of `aio` in the config
BLOCK_BYTES: Final = 1 << 20

Move = Callable[[int, mmap.mmap, int], int]  # file descriptor, buffer, offset


@dataclass(frozen=True)
class DiskRates:
    """What `measure_disk` has found: `read`, `write` and `update` in bytes per second."""

    folder: str
    free_bytes: int
    is_direct: bool  # around the page cache
    read: float
    write: float
    update: float  # each block is read and written, as by an update; the bytes of both count
    io: str = ""  # how state on this disk is read and written, and why; empty: not known without the native library


def measure_disk(
    folder: Path,
    num_bytes: int = NUM_BYTES,
    num_requests: int = NUM_REQUESTS,
    block_bytes: int = BLOCK_BYTES,
    option: str = "--disk",
) -> DiskRates:
    """Writes a file of `num_bytes` without a name in `folder`, reads it, and reads and writes it block by block.

    Raises OSError if the folder cannot be used or has too little space. `option`: the option with the folder.
    """
    fd, _, is_direct = new_file(folder, option)
    try:
        found = os.fstatvfs(fd)
        free_bytes = found.f_bavail * found.f_frsize
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            raise unusable_path(option, folder, f"a folder with {num_bytes} free bytes", error) from error
        # First, because blocks that were never written are read without the disk.
        write = num_bytes / write_blocks(fd, num_bytes, num_requests, block_bytes)
        read = num_bytes / _move_blocks(fd, num_bytes, num_requests, block_bytes, (_read,))
        update = 2 * num_bytes / copy_in_place(fd, num_bytes, num_requests, block_bytes)
    finally:
        os.close(fd)
    return DiskRates(str(folder), free_bytes, is_direct, read, write, update, _io(num_requests, is_direct))


def _io(num_requests: int, is_direct: bool) -> str:
    if load().library is None:
        return ""
    refusal = ring_refusal()
    ring = f"{IO_URING} can be chosen with disk_io" if refusal is None else f"the kernel refuses {IO_URING}: {refusal}"
    return IO_URING if num_rings("auto", num_requests, is_direct) else f"{THREADS}; {ring}"


def write_blocks(fd: int, num_bytes: int, num_requests: int, block_bytes: int) -> float:
    """Writes each block of a file. Returns the seconds."""
    return _move_blocks(fd, num_bytes, num_requests, block_bytes, (_write,))


def copy_in_place(fd: int, num_bytes: int, num_requests: int, block_bytes: int) -> float:
    """Reads each block of a file and writes it back. All blocks must have been written. Returns the seconds."""
    return _move_blocks(fd, num_bytes, num_requests, block_bytes, (_read, _write))


def _move_blocks(fd: int, num_bytes: int, num_requests: int, block_bytes: int, moves: tuple[Move, ...]) -> float:
    """Calls `moves` for each block of a file, `num_requests` blocks at a time. Returns the seconds."""
    numbers = itertools.count()
    with ThreadPoolExecutor(num_requests) as pool:
        start_s = time.perf_counter()
        work = partial(_move, fd, num_bytes // block_bytes, block_bytes, numbers, moves)
        for thread in [pool.submit(work) for _ in range(num_requests)]:
            thread.result()
        return time.perf_counter() - start_s


def _move(fd: int, num_blocks: int, block_bytes: int, numbers: itertools.count[int], moves: tuple[Move, ...]) -> None:
    with mmap.mmap(-1, block_bytes) as buffer:
        buffer[:] = os.urandom(block_bytes)  # a disk may store zeros faster
        while (number := next(numbers)) < num_blocks:
            for move in moves:
                if move(fd, buffer, number * block_bytes) != block_bytes:
                    raise OSError(f"The disk has moved only a part of {block_bytes} bytes.")


def _read(fd: int, buffer: mmap.mmap, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


def _write(fd: int, buffer: mmap.mmap, offset: int) -> int:
    return os.pwrite(fd, buffer, offset)
