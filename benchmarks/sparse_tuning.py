# SPDX-License-Identifier: Apache-2.0
"""The sweep of `sparse_attention.py --tune`: tiles, warps, stages and variants of our kernels, each kernel timed alone.

    python benchmarks/sparse_attention.py --tune                     # heads of 64 and 128
    python benchmarks/sparse_attention.py --tune --widths 80 96 256  # about 150 s on an H200

The kernels for Hopper choose their tiles themselves. They are one more candidate.

Each kernel of each shape is swept in a process of its own, which is given up where it breaks or stands still: what the
candidate after the last result did to the GPU does not harm the others.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any

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
from twinflow.attention.tuning import Tuning, padded_dim, tunings_for

PATTERNS = ("bigbird", "random 10%")  # short rows and long ones
KERNELS = ("forward", "queries", "keys")
KEYS = ("shape", "kernel")
BEST = 8  # of a kernel, that are printed beside the table's
PATIENCE_S = 60.0  # for one result, the process's start included

Case = tuple[str, Tuning]
Numbers = tuple[int, ...]

TMA: Row = {"tma": True}
FOR_HOPPER = Tuning(128, 64, 12, 0)  # in place of a tuning: the kernels for Hopper

# Rows, columns, warps, stages, registers; and variants.
Given = tuple[Numbers, tuple[Row, ...]]
WIDE: dict[str, tuple[Given, ...]] = {
    "forward": (
        ((64, 64, 4, 3), ({}, TMA)),
        ((64, 32, 4, 3), (TMA,)),
        ((64, 64, 4, 1), (TMA,)),
        ((64, 128, 4, 1, 168), (TMA,)),
    ),
    "queries": (
        ((64, 64, 4, 2), (TMA,)),
        ((128, 64, 8, 3), ({},)),
        ((64, 32, 4, 2), (TMA,)),
        ((64, 64, 4, 1, 168), (TMA,)),
        ((64, 128, 4, 1), (TMA,)),
    ),
    "keys": (
        ((64, 64, 4, 2), ({}, TMA)),
        ((128, 64, 8, 3), ({}, TMA)),
        ((64, 32, 4, 2), (TMA,)),
        ((64, 32, 4, 3), (TMA,)),
    ),
}
NARROW: dict[str, tuple[Given, ...]] = {
    "forward": (
        ((64, 64, 4, 3), ({},)),
        ((64, 128, 4, 2), (TMA,)),
        ((64, 128, 4, 3), (TMA,)),
        ((64, 128, 4, 1, 128), (TMA,)),
    ),
    "queries": (
        ((128, 64, 8, 3, 128), ({}, TMA)),
        ((64, 64, 4, 3), (TMA,)),
        ((64, 64, 4, 2), (TMA,)),
        ((64, 64, 4, 1), (TMA,)),
    ),
    "keys": (
        ((64, 64, 4, 3), ({},)),
        ((64, 128, 4, 2), ({}, TMA)),
        ((64, 64, 4, 2, 168), (TMA,)),
    ),
}

# For widths that fill no tile of 128 columns, which have no descriptors; and for 256. None of them spills much.
UNEVEN: dict[str, tuple[Given, ...]] = {
    "forward": (
        ((128, 64, 8, 3), ({},)),
        ((64, 64, 4, 2), ({},)),
        ((128, 128, 8, 2), ({},)),
        ((64, 32, 4, 3), ({},)),
    ),
    "queries": (
        ((64, 64, 4, 2), ({},)),
        ((64, 32, 4, 3), ({},)),
        ((128, 64, 8, 2), ({},)),
        ((64, 64, 4, 3), ({},)),
    ),
    "keys": (
        ((64, 64, 4, 2), ({},)),
        ((128, 64, 8, 2), ({},)),
        ((64, 32, 4, 3), ({},)),
        ((64, 64, 8, 2), ({},)),
    ),
}
WIDEST: dict[str, tuple[Given, ...]] = {
    "forward": (
        ((128, 32, 8, 2), (TMA,)),
        ((64, 32, 4, 2), ({}, TMA)),
        ((64, 64, 4, 1), (TMA,)),
        ((64, 64, 4, 2), (TMA,)),
        ((64, 64, 8, 2), ({}, TMA)),
        ((128, 64, 8, 2), ({}, TMA)),
    ),
    "queries": (
        ((64, 32, 8, 2), (TMA,)),
        ((64, 32, 4, 2), ({}, TMA)),
        ((64, 64, 8, 2), ({}, TMA)),
        ((128, 32, 8, 2), ({}, TMA)),
        ((128, 64, 8, 1), (TMA,)),
    ),
    "keys": (
        ((64, 32, 8, 2), (TMA,)),
        ((64, 64, 8, 2), ({}, TMA)),
        ((32, 32, 4, 2), ({}, TMA)),
        ((64, 16, 8, 3), ({}, TMA)),
    ),
}
INTERPRETED: tuple[Given, ...] = (((32, 32, 4, 1), ({}, TMA)),)


def candidates(scale: Scale, shape: Shape, kernel: str) -> list[Tuning]:
    """The table's first, then the others."""
    tunings = tunings_for(shape.head_dim, scale.dtype)
    known = replace(getattr(tunings, kernel), otherwise=None)
    given = INTERPRETED
    if scale.device == "cuda":
        width = padded_dim(shape.head_dim)
        wide = WIDEST if width == 256 else WIDE if shape.head_dim == 128 else UNEVEN if width == 128 else NARROW
        given = wide[kernel]
    found = [Tuning(*numbers, **more) for numbers, variants in given for more in variants]
    found += [FOR_HOPPER] if tunings.hopper and scale.device == "cuda" else []
    return [known, *(tuning for tuning in found if tuning != known)]


def shapes_of(scale: Scale, widths: list[int] | None) -> tuple[Shape, ...]:
    """The shapes with these widths, or those of `patterns`."""
    shapes = (*scale.shapes, *scale.others)
    return scale.shapes if widths is None else tuple(shape for shape in shapes if shape.head_dim in widths)


class Tuner:
    """Our three kernels, each alone, on one structure."""

    def __init__(self, scale: Scale, shape: Shape, pattern: str, is_warming: bool = False) -> None:
        length = scale.tune_length
        q, k, v, grad = (tensor.detach() for tensor in inputs(scale, shape, length))
        layout = layout_of(pattern, shape.num_heads, scale.base, length, scale.base)
        sizes = Sizes(1, shape.num_heads, shape.num_heads, length, length, shape.head_dim)
        tunings = replace(tunings_for(shape.head_dim, q.dtype), hopper=False)
        self._call = Call(layout, Extras(), sizes, q.dtype, q.device, tunings)
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
        if tuning == FOR_HOPPER:
            tunings = replace(self._call.tunings, hopper=True, hopper_tokens=math.inf)
        else:
            tunings = replace(self._call.tunings, **{kernel: tuning})
        call = replace(self._call, tunings=tunings)
        return lambda: list(self._kernels[kernel](call))


def jobs(scale: Scale, widths: list[int] | None) -> list[Callable[[], object]]:
    """All that must be compiled, each to be run once."""
    cases = itertools.product(KERNELS, shapes_of(scale, widths), PATTERNS)
    triples = [(case, tuning) for case in cases for tuning in candidates(scale, case[1], case[0])]

    @lru_cache(maxsize=4)
    def tuner(shape: Shape, pattern: str) -> Tuner:
        return Tuner(scale, shape, pattern, is_warming=True)

    def one(kernel: str, shape: Shape, pattern: str, tuning: Tuning) -> None:
        tuner(shape, pattern).work(kernel, tuning)()

    return [partial(one, *case, tuning) for case, tuning in triples]


def measure(scale: Scale, shape: Shape, kernel: str, cases: list[Case]) -> Iterator[float]:
    """Milliseconds of each case, structure by structure; infinite where it does not fit or is wrong."""
    clock = Clock(scale.device)
    for pattern, group in itertools.groupby(cases, lambda case: case[0]):
        tuner = Tuner(scale, shape, pattern)
        truth = tuner.work(kernel, candidates(scale, shape, kernel)[0])()
        for _, tuning in group:
            ms = math.inf
            try:
                error = relative(tuner.work(kernel, tuning)(), truth)
                if error < TOLERANCE:
                    ms = clock.ms(tuner.work(kernel, tuning))
                else:
                    print(f"{kernel} {shape} {pattern} {tuning}: error {error}", file=sys.stderr, flush=True)
            except RuntimeError as error:  # of the GPU: all that follows would fail too
                if "CUDA error" in str(error) or "[CUDA]" in str(error):
                    raise
                print(f"{tuning}: {str(error)[:100]}", file=sys.stderr, flush=True)
            except Exception as error:  # too much shared memory, or too few registers
                print(f"{tuning}: {type(error).__name__} {str(error)[:100]}", file=sys.stderr, flush=True)
            yield ms


def send(pipe: Connection, *args: Any) -> None:
    """Results of `measure`, to another process."""
    for ms in measure(*args):
        pipe.send(ms)


def guarded(scale: Scale, shape: Shape, kernel: str, cases: list[Case]) -> list[float]:
    """The same, by processes: one that breaks, or is silent for too long, is replaced, from the case after its last."""
    found: list[float] = []
    context = multiprocessing.get_context("spawn")
    while len(found) < len(cases):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=send, args=(sender, scale, shape, kernel, cases[len(found) :]))
        process.start()
        sender.close()
        try:
            while len(found) < len(cases) and receiver.poll(PATIENCE_S):
                found.append(receiver.recv())
        except EOFError:
            pass
        if len(found) < len(cases):
            print(f"given up: {kernel} {shape} {cases[len(found)]}", file=sys.stderr, flush=True)
            found.append(math.inf)
            process.kill()
        process.join()
    return found


def sweep(scale: Scale, widths: list[int] | None) -> Iterator[Row]:
    """Every candidate of every kernel on every structure."""
    for shape, kernel in itertools.product(shapes_of(scale, widths), KERNELS):
        tunings = candidates(scale, shape, kernel)
        cases = [(pattern, tuning) for pattern in PATTERNS for tuning in tunings]
        times = guarded if scale.device == "cuda" else lambda *args: list(measure(*args))
        by_case = dict(zip(cases, times(scale, shape, kernel, cases), strict=True))
        for tuning in tunings:
            row: Row = {"shape": str(shape), "kernel": kernel, **asdict(tuning), "is_table": tuning is tunings[0]}
            yield row | {pattern: by_case[pattern, tuning] for pattern in PATTERNS}


def name_of(row: Row) -> str:
    """A tuning in a few words."""
    if row["num_stages"] == 0:
        return "kernel for Hopper"
    numbers = [row[key] for key in ("tile_rows", "tile_cols", "num_warps", "num_stages", "max_registers")]
    words = [" ".join(str(number) for number in numbers if number is not None)]
    return ", ".join([*words, *(["tma"] if row["tma"] else [])])


def source_of(row: Row) -> str:
    """A tuning as it is written in tuning.py."""
    numbers = [row[key] for key in ("tile_rows", "tile_cols", "num_warps", "num_stages", "max_registers")]
    words = [str(number) for number in numbers if number is not None]
    return f"Tuning({', '.join([*words, *(['tma=True'] if row['tma'] else [])])})"


def report(scale: Scale, widths: list[int] | None) -> None:
    """Sweep, and print all results, then the best few of each kernel after what the table has, and the best ones in the
    form of tuning.py.
    """
    start = time.perf_counter()
    rows, body, best = list(sweep(scale, widths)), [], []
    for (shape, kernel), group in itertools.groupby(rows, lambda row: [row[key] for key in KEYS]):
        first, *others = group
        others.sort(key=lambda row: math.prod(float(row[pattern]) / float(first[pattern]) for pattern in PATTERNS))
        for row in [first, *others[:BEST]]:
            cells = [shape, kernel, name_of(row) + " (table)" * row["is_table"]]
            body.append([*cells, *(shown(row[pattern], 3) for pattern in PATTERNS)])
        for is_tma in (False, True):  # for TUNING, and for WITH_DESCRIPTORS
            own = [row for row in others if row["num_stages"] and row["tma"] == is_tma]
            if own:
                best.append(f"{shape}, {kernel}: {source_of(own[0])}")
    print("\n".join(to_json({"rows": rows})))
    lines = ["# Tunings of sparse attention", "", *header(), f"- {time.perf_counter() - start:.0f} s"]
    lines += table("Best of each kernel, ms", [*KEYS, "tuning", *PATTERNS], body)
    print("\n".join([*lines, "", "The best ones, beside those of the table:", "", *best]))
