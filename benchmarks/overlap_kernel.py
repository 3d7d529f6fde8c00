# SPDX-License-Identifier: Apache-2.0
"""How much of an update on the GPU hides behind a forward, and what gathering and measuring gradients costs there.

First a stream of bf16 matrix products as a 7B Llama's forward has them and an AdamW update of as many parameters, each
alone and both at once on two streams: for each number of programs, size of a tile and priority of the update's stream,
what the update adds to the products. Then a bucket's gradients in six slices: copied and measured, or in one pass.
Everything is checked first: no speed is printed where bits differ. `--tiny` shows on the CPU, in Triton's interpreter,
that the script works. Needs Triton, and CUDA but for `--tiny`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
PROGRAMS = (None, 33, 66, 132, 264)
TILES = (1024, 2048, 4096)
PRIORITIES = (-1, 0)  # -1 goes first
UPDATE_BYTES = 26  # of a parameter: gradient, both halves of the master and two fp32 states, read and written


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str
    tokens: int
    shapes: tuple[tuple[int, int], ...]  # of a layer's products: inputs, outputs
    layers: int
    slices: tuple[int, ...]  # of a bucket
    repeats: int


LLAMA = ((4096, 4096),) * 4 + ((4096, 11008), (4096, 11008), (11008, 4096))
FULL = Scale("cuda", 8192, LLAMA, 4, (16_777_216,) * 3 + (8_388_608, 8_384_512, 4096), 3)
TINY = Scale("cpu", 8, ((128, 100), (128, 9)), 1, (2048, 1500, 128, 127, 4096, 1), 1)


class Forward:
    """The matrix products of some layers, one after the other."""

    def __init__(self, scale: Scale) -> None:
        self._weights = [
            [torch.randn(n, k, dtype=BF16, device=scale.device) for k, n in scale.shapes] for _ in range(scale.layers)
        ]
        self._inputs = {
            k: torch.randn(scale.tokens, k, dtype=BF16, device=scale.device) for k in {k for k, _ in scale.shapes}
        }
        self._outputs = {
            n: torch.empty(scale.tokens, n, dtype=BF16, device=scale.device) for n in {n for _, n in scale.shapes}
        }

    def __call__(self) -> None:
        """Queue them."""
        for layer in self._weights:
            for weight in layer:
                torch.mm(self._inputs[weight.shape[1]], weight.t(), out=self._outputs[weight.shape[0]])


class Updates:
    """AdamW on as many parameters as the products have: a bucket for each layer, a launch each."""

    def __init__(self, scale: Scale) -> None:
        from twinflow.bench.check import OPTIONS
        from twinflow.gpu import Numbers
        from twinflow.rules import RULES
        from twinflow.rules.segment import Store

        self._rule, self._scale = RULES["adamw"], scale
        self._numbers = {i: Numbers(self._rule.hyper(OPTIONS, 1), 0.5, (1, i)) for i in range(len(scale.shapes))}
        self.numel = sum(k * n for k, n in scale.shapes)
        self._offsets = [0]
        for k, n in scale.shapes:
            self._offsets.append(self._offsets[-1] + -(-k * n // 128) * 128)
        end, device = self._offsets[-1], scale.device
        self.stores, self._grads, self._weights = [], [], []
        for layer in range(scale.layers):
            generator = torch.Generator(device).manual_seed(layer)
            self._weights.append(torch.randn(end, device=device, generator=generator).to(BF16))
            self._grads.append(torch.randn(end, device=device, generator=generator).to(BF16))
            states = (torch.zeros(end, device=device), torch.zeros(end, device=device))
            self.stores.append(Store("fp32", torch.zeros(end, dtype=torch.int16, device=device), None, states))
        self._built: list[Any] = []
        self._start = self._weights[0].clone()

    def build(self, max_programs: int | None, tile: int) -> None:
        """From now on so many programs of this size."""
        from twinflow.gpu import FusedUpdate, Piece

        self._built = []
        for weights in self._weights:
            pieces = [
                Piece(weights[at : at + k * n], at, k * n, 0)
                for at, (k, n) in zip(self._offsets, self._scale.shapes, strict=False)
            ]
            self._built.append(FusedUpdate(self._rule, pieces, max_programs, tile))

    def __call__(self) -> None:
        """Queue them; the last ones must have ended."""
        for update, store, grads in zip(self._built, self.stores, self._grads, strict=True):
            update(store, grads, self._numbers)

    def snapshot(self) -> list[Tensor]:
        """All bits of the first layer after one step from where it began."""
        store, weights = self.stores[0], self._weights[0].copy_(self._start)
        for tensor in (store.master, *store.states):
            assert tensor is not None
            tensor.zero_()
        self()
        return [weights.clone(), store.master.clone(), *(t.clone() for t in store.states if t is not None)]


class Clock:
    """Times of work on one or two streams."""

    def __init__(self, scale: Scale) -> None:
        self._is_cuda, self._repeats = scale.device == "cuda", scale.repeats
        self.streams: dict[int, Any] = {}
        if self._is_cuda:
            self.streams = {priority: torch.cuda.Stream(priority=priority) for priority in PRIORITIES}

    def ms(self, work: Callable[[], object], beside: Callable[[], object] | None = None, priority: int = 0) -> float:
        """Of `work` on the current stream and, with it, of `beside` on another one, until both have ended: the median.

        The GPU spins first, so that all is queued when it begins.
        """
        if not self._is_cuda:
            start = time.perf_counter()
            work()
            if beside is not None:
                beside()
            return (time.perf_counter() - start) * 1e3
        times = []
        for _ in range(self._repeats + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(8_000_000)
            start.record()
            if beside is not None:
                other = self.streams[priority]
                other.wait_event(start)
                with torch.cuda.stream(other):
                    beside()
            work()
            if beside is not None:
                torch.cuda.current_stream().wait_stream(self.streams[priority])
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times[1:])


def overlap(scale: Scale, clock: Clock) -> dict[str, Any]:
    """The table's rows: an update alone, and what it adds to the products."""
    forward, updates = Forward(scale), Updates(scale)
    forward()
    forward_ms, rows, truth = clock.ms(forward), [], None
    for programs in PROGRAMS if scale.device == "cuda" else (None, 2):
        for tile in TILES:
            updates.build(programs, tile)
            found = updates.snapshot()
            truth = truth or found
            if not all(
                torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, truth, strict=True)
            ):
                sys.exit(f"no speed is reported: {programs} programs of {tile} change bits")
            row: dict[str, Any] = {"programs": programs, "tile": tile, "alone_ms": clock.ms(updates)}
            for priority in PRIORITIES:
                row[f"both_ms_{priority}"] = clock.ms(forward, updates, priority)
            rows.append(row)
    return {"forward_ms": forward_ms, "params": updates.numel * scale.layers, "rows": rows}


def gathering(scale: Scale, clock: Clock) -> list[dict[str, Any]]:
    """A bucket of bf16 gradients: the flat buffer and its norm, made in two ways."""
    from twinflow.offload import pack_gradients
    from twinflow.offload.plan import ParamSpec, plan_buckets

    plan = plan_buckets([ParamSpec(str(i), n, 0, BF16) for i, n in enumerate(scale.slices)])[0]
    pieces = [(s, torch.randn(s.numel, device=scale.device).to(BF16), True) for s in plan.slices]
    flat = torch.zeros(plan.numel, dtype=BF16, device=scale.device)
    norms = torch.zeros(2, dtype=torch.float64, device=scale.device)

    def plain() -> None:
        pack_gradients.put(flat, pieces)
        found = torch.linalg.vector_norm(flat.view(-1, 128), dim=1, dtype=FP32)
        norms[0].copy_(torch.linalg.vector_norm(found, dtype=torch.float64))

    def measured() -> None:
        pack_gradients.put(flat, pieces)
        pack_gradients.measure(norms[1], flat)

    ways = {"copied, then measured by torch": plain, "copied, then measured": measured}
    for work in ways.values():
        work()
    if not torch.isclose(norms[0], norms[1], rtol=1e-6):
        sys.exit(f"no speed is reported: norms differ, {norms.tolist()}")
    found = []
    for name, work in ways.items():
        ms = clock.ms(lambda work=work: [work() for _ in range(scale.repeats)]) / scale.repeats  # type: ignore[misc]
        found.append({"name": name, "ms": ms, "gb_s": 2 * flat.numel() * flat.element_size() / ms / 1e6})
    host_s = time.perf_counter()
    for piece in pieces:
        pack_gradients.put(flat, [piece])
    found.append(
        {"name": "host time of a launch", "ms": (time.perf_counter() - host_s) * 1e3 / len(pieces), "gb_s": 0.0}
    )
    return found


def page(facts: dict[str, Any]) -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU, interpreted: no speed"
    forward_ms, params = facts["forward_ms"], facts["params"]
    lines = [f"# Updates beside a forward, {facts['date']}", "", f"- {name}; torch {torch.__version__}"]
    lines += [f"- matrix products alone {forward_ms:.2f} ms; {params / 1e6:.0f} million parameters updated", ""]
    lines += ["| programs | tile | update alone, ms | GB/s | both, priority -1 | adds | both, priority 0 | adds |"]
    lines += ["|---|" + "---:|" * 7]
    for row in facts["rows"]:
        rate = params * UPDATE_BYTES / row["alone_ms"] / 1e6
        cells = [str(row["programs"] or "one a tile"), str(row["tile"]), f"{row['alone_ms']:.2f}", f"{rate:.0f}"]
        for priority in PRIORITIES:
            both = row[f"both_ms_{priority}"]
            cells += [f"{both:.2f}", f"{both - forward_ms:+.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| a bucket's gradients | ms | GB/s of a copy |", "|---|---:|---:|"]
    lines += [f"| {row['name']} | {row['ms']:.3f} | {row['gb_s']:.0f} |" for row in facts["gathering"]]
    return "\n".join([*lines, "", json.dumps(facts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in Triton's interpreter")
    scale = TINY if parser.parse_args().tiny else FULL
    if scale is TINY:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
    from twinflow.gpu import is_available

    if not is_available() or (scale is FULL and not torch.cuda.is_available()):
        sys.exit("needs Triton, and CUDA but for --tiny")
    clock = Clock(scale)
    facts = {"date": datetime.date.today().isoformat(), **overlap(scale, clock), "gathering": gathering(scale, clock)}
    print(page(facts))


if __name__ == "__main__":
    main()
