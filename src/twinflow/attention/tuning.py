# SPDX-License-Identifier: Apache-2.0
"""Tile sizes, warps and pipeline stages of each kernel, chosen for an H200, so that compiled kernels keep tiles in
registers. Tests compile the kernels and check this. A program computes its own tile and iterates over other tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from twinflow.attention.tiles import MIN_PIECE, TileSize


@dataclass(frozen=True)
class Tuning:
    """Tuning of one kernel: tokens of its own tile and of other tiles, and options of the compiler."""

    tile_rows: int
    tile_cols: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread, so that two programs fit on a multiprocessor
    tma: bool = False  # load other tiles by TMA descriptors if the call allows it
    otherwise: Tuning | None = None  # used if the call does not allow TMA; None: this tuning without TMA

    @property
    def size(self) -> TileSize:
        return TileSize(self.tile_rows, self.tile_cols)

    @property
    def options(self) -> dict[str, int]:
        """Options of a launch in Triton."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


@dataclass(frozen=True)
class Tunings:
    """Tunings of the kernels for forward and for gradients."""

    forward: Tuning
    queries: Tuning  # gradients of queries
    keys: Tuning  # gradients of keys and values
    min_piece: int = MIN_PIECE  # smallest number of tiles of a piece if long rows are cut
    hopper: bool = False  # use the kernels for Hopper if the call allows it
    hopper_tokens: float = math.inf  # but not if an item has more other tokens than this on average


# By head dimension, padded to a power of two, and whether the dtype is fp32. Half precision uses tensor cores.
TUNING: dict[tuple[int, bool], Tunings] = {
    (16, False): Tunings(Tuning(128, 64, 4, 3), Tuning(128, 64, 8, 3), Tuning(128, 64, 8, 3)),
    (32, False): Tunings(Tuning(128, 64, 4, 3), Tuning(128, 64, 8, 3), Tuning(128, 64, 8, 3)),
    (64, False): Tunings(Tuning(64, 64, 4, 3), Tuning(128, 64, 8, 3, 128), Tuning(64, 64, 4, 3)),
    (128, False): Tunings(Tuning(64, 64, 4, 3), Tuning(128, 64, 8, 3), Tuning(128, 64, 8, 3)),
    (256, False): Tunings(Tuning(128, 32, 8, 2), Tuning(64, 32, 8, 2), Tuning(64, 32, 8, 2)),
    (16, True): Tunings(Tuning(64, 32, 4, 2), Tuning(64, 32, 4, 2), Tuning(64, 32, 4, 2)),
    (32, True): Tunings(Tuning(64, 32, 4, 2), Tuning(64, 32, 4, 2), Tuning(64, 32, 4, 2)),
    (64, True): Tunings(Tuning(64, 32, 8, 2), Tuning(64, 32, 8, 2), Tuning(64, 32, 8, 2)),
    (128, True): Tunings(Tuning(32, 16, 4, 2), Tuning(32, 16, 4, 2), Tuning(32, 32, 8, 2)),
    (256, True): Tunings(Tuning(16, 16, 4, 2), Tuning(16, 16, 4, 2), Tuning(32, 16, 8, 2)),
}

# By head dimension: tunings with TMA descriptors, for half precision.
WITH_DESCRIPTORS: dict[int, Tunings] = {
    64: Tunings(Tuning(64, 128, 4, 2, tma=True), Tuning(64, 64, 4, 2, tma=True), Tuning(64, 128, 4, 2, tma=True)),
    128: Tunings(Tuning(64, 128, 4, 1, 168, tma=True), Tuning(64, 64, 4, 2, tma=True), Tuning(64, 64, 4, 2, tma=True)),
}

# The kernels for Hopper: by the largest head dimension, the widths of the parts of a tile, which must be powers of two,
# and the largest mean number of other tokens of an item. The persistent programs of these kernels hide the latency at
# the start and at the end of short rows. For long rows of narrow heads, several programs of the other kernels on a
# multiprocessor are faster.
HOPPER: dict[int, tuple[tuple[int, ...], float]] = {
    64: ((64,), 1024),
    80: ((64, 16), math.inf),
    96: ((64, 32), math.inf),
    128: ((128,), math.inf),
    192: ((128, 64), math.inf),
    256: ((128, 128), math.inf),
}
LEAST_HOPPER = 40  # smallest head dimension of these kernels; most columns of a tile would be zeros with narrower heads


def padded_dim(head_dim: int) -> int:
    """The head dimension padded to a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tunings_for(head_dim: int, dtype: torch.dtype) -> Tunings:
    found = TUNING[padded_dim(head_dim), dtype == torch.float32]
    if dtype == torch.float32:
        return found
    fast = WITH_DESCRIPTORS.get(head_dim)
    if fast is not None:
        found = Tunings(
            replace(fast.forward, otherwise=found.forward),
            replace(fast.queries, otherwise=found.queries),
            replace(fast.keys, otherwise=found.keys),
        )
    limit = hopper_limit(head_dim)
    return found if limit is None else replace(found, hopper=True, hopper_tokens=HOPPER[limit][1])


def hopper_limit(head_dim: int) -> int | None:
    """The key of HOPPER for a head dimension, or None if the kernels for Hopper do not support it: the rows of a TMA
    descriptor are multiples of 16 bytes."""
    if head_dim % 8 or head_dim < LEAST_HOPPER:
        return None
    return next((limit for limit in HOPPER if head_dim <= limit), None)
