"""The sweep of `sparse_attention.py --tune`: tiles, warps and stages of our kernels, each kernel timed alone."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import lru_cache, partial

import torch
from sparse_common import (
    TOLERANCE,
    Clock,
    Row,
    Scale,
    Shape,
    header,
    inputs,
    layout_of,
    relative,
    shown,
    table,
    to_json,
)
from torch import Tensor

from twinflow.attention import triton_attention as pieces
from twinflow.attention.extras import Extras, Sizes
from twinflow.attention.launch import Call
from twinflow.attention.tuning import Tuning, tunings_for

PATTERNS = ("bigbird", "random 10%")
KERNELS = ("forward", "queries", "keys")
KEYS = ("shape", "pattern", "kernel")
NUMBERS = ("tile_rows", "tile_cols", "num_warps", "num_stages", "max_registers")
BEST = 5  # of a kernel, that are printed

# Rows, columns, warps, stages, registers.
FORWARD = (
    (128, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 3, 128), (128, 64, 8, 2), (128, 64, 8, 4),
    (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (128, 32, 4, 4),
)  # fmt: skip
BACKWARD = (
    (128, 64, 8, 3), (128, 64, 8, 3, 128), (128, 64, 8, 2), (128, 64, 4, 2), (128, 128, 8, 2), (64, 64, 4, 3),
    (64, 64, 4, 2), (64, 64, 8, 3), (64, 128, 8, 2), (64, 128, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3),
)  # fmt: skip
INTERPRETED = ((32, 32, 4, 1),)


def candidates(scale: Scale, shape: Shape, kernel: str) -> list[Tuning]:
    """The table's first, then the others."""
    known: Tuning = getattr(tunings_for(shape.head_dim, scale.dtype), kernel)
    given: tuple[tuple[int, ...], ...] = FORWARD if kernel == "forward" else BACKWARD
    given = given if scale.device == "cuda" else INTERPRETED
    return [known, *(tuning for tuning in (Tuning(*numbers) for numbers in given) if tuning != known)]


class Tuner:
    """Our three kernels, each alone, on one structure."""

    def __init__(self, scale: Scale, shape: Shape, pattern: str, is_warming: bool = False) -> None:
        length = scale.tune_length
        q, k, v, grad = (tensor.detach() for tensor in inputs(scale, shape, length))
        layout = layout_of(pattern, shape.num_heads, scale.base, length, scale.base)
        sizes = Sizes(1, shape.num_heads, shape.num_heads, length, length, shape.head_dim)
        self._call = Call(layout, Extras(), sizes, q.dtype, q.device, tunings_for(shape.head_dim, q.dtype))
        out, lse = q, torch.zeros(q.shape[:3], device=q.device)
        delta = lse  # good enough to compile with
        if not is_warming:
            out, lse = pieces.forward(q, k, v, self._call)
            _, delta = pieces.query_gradients(q, k, v, out, lse, grad, self._call)
        self._kernels: dict[str, Callable[[Call], tuple[Tensor, Tensor]]] = {
            "forward": lambda call: pieces.forward(q, k, v, call),
            "queries": lambda call: pieces.query_gradients(q, k, v, out, lse, grad, call),
            "keys": lambda call: pieces.key_gradients(q, k, v, lse, grad, delta, call),
        }

    def work(self, kernel: str, tuning: Tuning) -> Callable[[], list[Tensor]]:
        """A launch of one kernel."""
        call = replace(self._call, tunings=replace(self._call.tunings, **{kernel: tuning}))
        return lambda: list(self._kernels[kernel](call))


def jobs(scale: Scale) -> list[Callable[[], object]]:
    """All that must be compiled, each to be run once."""
    cases = itertools.product(KERNELS, scale.shapes, PATTERNS)
    triples = [(case, tuning) for case in cases for tuning in candidates(scale, case[1], case[0])]

    @lru_cache(maxsize=4)
    def tuner(shape: Shape, pattern: str) -> Tuner:
        return Tuner(scale, shape, pattern, is_warming=True)

    def one(kernel: str, shape: Shape, pattern: str, tuning: Tuning) -> None:
        tuner(shape, pattern).work(kernel, tuning)()

    return [partial(one, *case, tuning) for case, tuning in triples]


def sweep(scale: Scale, clock: Clock) -> Iterator[Row]:
    """Every candidate of every kernel; one that does not fit or is wrong takes infinitely long."""
    for shape, pattern in itertools.product(scale.shapes, PATTERNS):
        tuner = Tuner(scale, shape, pattern)
        for kernel in KERNELS:
            truth: list[Tensor] = []
            for tuning in candidates(scale, shape, kernel):
                row: Row = {"shape": str(shape), "pattern": pattern, "kernel": kernel, **asdict(tuning)}
                row |= {"is_table": not truth, "ms": math.inf}
                try:
                    found = tuner.work(kernel, tuning)()
                    truth = truth or found
                    if relative(found, truth) < TOLERANCE:
                        row["ms"] = clock.ms(tuner.work(kernel, tuning))
                except Exception as error:  # too much shared memory, or too few registers
                    print(f"{tuning}: {type(error).__name__} {str(error)[:100]}", file=sys.stderr)
                yield row


def report(scale: Scale) -> None:
    """Sweep, and print the best few of each kernel and what the table has."""
    start = time.perf_counter()
    rows, body = list(sweep(scale, Clock(scale.device))), []
    for (shape, pattern, kernel), group in itertools.groupby(rows, lambda row: [row[key] for key in KEYS]):
        ordered = sorted(group, key=lambda row: float(row["ms"]))
        for place, row in enumerate(ordered):
            if place < BEST or row["is_table"]:
                cells = [shape, pattern, kernel, "in the table" if row["is_table"] else str(place + 1)]
                body.append([*cells, *(str(row[key]) for key in NUMBERS), shown(row["ms"], 3)])
    lines = ["# Tunings of sparse attention", "", *header(), f"- {time.perf_counter() - start:.0f} s"]
    lines += table("Best of each kernel", [*KEYS, "place", *NUMBERS, "ms"], body)
    print("\n".join([*lines, "", *to_json({"rows": rows})]))
