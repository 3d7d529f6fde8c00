# SPDX-License-Identifier: Apache-2.0
"""Searches the best layouts (numbers of pipeline, tensor and data ranks, schedule, ZeRO stage) of a model on many GPUs:
all layouts by a formula, the best ones by simulating their schedules.

GPipe is not tried, because 1F1B takes equally long and needs less memory. Tensor groups over more than two machines and
micro-batches of more than 8 sequences are not tried either. Of about equally fast layouts the simplest is chosen: no
offload, a lower ZeRO stage, fewer chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from twinflow.errors import invalid_value
from twinflow.parallel.costs import Estimate, estimate, lacking_bytes
from twinflow.parallel.layout import Layout
from twinflow.parallel.shapes import Shape
from twinflow.parallel.support import Combination, broken
from twinflow.parallel.topology import DATA, MODEL
from twinflow.planner.placement import CLOSE
from twinflow.planner.scaling import Cluster

MICRO_BATCHES: Final = (1, 2, 4, 8)
CHUNKS: Final = (2, 4)
PLAYED: Final = 3  # layouts to simulate for each layout in the result


@dataclass(frozen=True)
class LayoutAsk:
    shape: Shape
    cluster: Cluster
    num_gpus: int
    batch: int  # sequences in a step of all GPUs
    micro_batches: tuple[int, ...] = MICRO_BATCHES  # sizes to try, like the values of the next fields
    zeros: tuple[int, ...] = (0, 1, 2, 3)  # ZeRO stages
    checkpointing: tuple[bool, ...] = (False, True)
    offload: tuple[bool, ...] = (False, True)


@dataclass(frozen=True)
class Found:
    """The best layouts, and how many were tried."""

    best: tuple[Estimate, ...]  # one for each (pp, tp, dp), fastest first
    num_tried: int
    num_fitting: int
    nearest: Estimate | None  # the layout that lacks the least memory if none fits, otherwise None


def search(ask: LayoutAsk, count: int = 5) -> Found:
    """At most `count` layouts, the best ones with different axis sizes. Raises a ValueError for invalid numbers."""
    for name, value in (("--gpus", ask.num_gpus), ("--batch", ask.batch), ("--layouts", count)):
        if value < 1:
            raise invalid_value(name, value, "a whole number >= 1")
    per_node = ask.cluster.machine.num_gpus
    if ask.num_gpus > per_node and ask.num_gpus % per_node:
        num_nodes = ask.num_gpus // per_node
        remedy = (
            f"Use --gpus {num_nodes * per_node} for {num_nodes} machines, or set the GPUs of a machine with --per-node."
        )
        allowed = f"a multiple of {per_node}, because a machine has {per_node} GPUs"
        raise invalid_value("--gpus", ask.num_gpus, allowed, remedy)
    tried = [(lacking_bytes(ask.shape, layout, ask.cluster), layout) for layout in layouts(ask)]
    fitting = [estimate(ask.shape, layout, ask.cluster, plays=False) for lacks, layout in tried if not lacks]
    if not tried:
        allowed = (
            f"a multiple of a micro-batch ({', '.join(map(str, ask.micro_batches))}) "
            "times a possible number of data ranks"
        )
        remedy = f"Use --batch {ask.num_gpus * max(ask.micro_batches)}, which allows all layouts."
        raise invalid_value("--batch", ask.batch, allowed, remedy)
    if not fitting:
        nearest = min(tried, key=lambda pair: pair[0])[1]
        return Found((), len(tried), 0, estimate(ask.shape, nearest, ask.cluster))
    rough = _best_of_each(fitting, lambda e: (*_axes(e.layout), e.layout.schedule))[: PLAYED * count]
    played = [estimate(ask.shape, e.layout, ask.cluster) for e in rough]
    best = _best_of_each(played, lambda e: _axes(e.layout))[:count]
    return Found(tuple(best), len(tried), len(fitting), None)


def layouts(ask: LayoutAsk) -> Iterator[Layout]:
    """The layouts to try. The engine accepts them: tensor ranks divide heads, MLP and vocabulary, and there are no more
    stages than layers.
    """
    shape, per_node = ask.shape, ask.cluster.machine.num_gpus
    for tp in _divisors(math.gcd(ask.num_gpus, *shape.tensor_sizes.values())):
        if tp > 2 * per_node or (tp < per_node and per_node % tp):
            continue
        for pp in _divisors(ask.num_gpus // tp):
            dp = ask.num_gpus // tp // pp
            if pp > shape.num_layers or ask.batch % dp:
                continue
            for size in ask.micro_batches:
                if ask.batch // dp % size == 0:
                    yield from _ways(ask, Layout(pp, tp, dp, ask.batch // dp // size, size))


def _ways(ask: LayoutAsk, layout: Layout) -> Iterator[Layout]:
    """The layout with every schedule, and with the ZeRO stages (with one data rank: only the first), checkpointing and
    offload of `ask` that the engine supports."""
    zeros = [zero for zero in ask.zeros if not any(broken(Combination(layout.num_pp, layout.num_tp, zero)))]
    zeros = zeros if layout.num_dp > 1 else zeros[:1]
    schedules = _schedules(layout, ask.shape.num_layers)
    for (schedule, chunks), zero, again, offload in product(schedules, zeros, ask.checkpointing, ask.offload):
        yield replace(layout, schedule=schedule, num_chunks=chunks, zero=zero, checkpointing=again, offload=offload)


def _schedules(layout: Layout, num_layers: int) -> Iterator[tuple[str, int]]:
    pp, m = layout.num_pp, layout.num_micro_batches
    yield "1f1b", 1
    if pp == 1:
        return
    for chunks in CHUNKS:
        if pp * chunks <= num_layers and m % max(1, m // pp) == 0:
            yield "interleaved", chunks
    if 2 * pp <= num_layers:
        yield "zbv", 2


def reasons(found: Estimate) -> list[str]:
    """Short phrases on the memory, the bubble and the communication of a layout."""
    layout, seconds, volume = found.layout, found.seconds, found.volume
    parts = [f"{found.fullest.gpu_bytes / 1e9:.1f} of {found.gpu_limit / 1e9:.1f} GB on the fullest GPU"]
    if layout.num_pp > 1:
        parts.append(f"pipeline bubble {100 * seconds.bubble:.1f}% of the time")
    if seconds.tied_s > 0.01 * seconds.step_s:
        parts.append(f"all-reduce of the tied embedding between the first and the last stage: {seconds.tied_s:.2g} s")
    if layout.num_tp > 1:
        where = "between machines" if MODEL in found.crosses else "inside a machine"
        share = 100 * seconds.tensor_s / seconds.step_s
        parts.append(f"tensor ranks {where}: {volume.tensor_bytes / 1e9:,.0f} GB, {share:.0f}% of the step")
    if layout.num_dp > 1:
        num = found.data_groups.num_groups
        groups = f"{num} data groups at once" if num > 1 else "one data group"
        if DATA in found.crosses:
            groups += f" at {found.data_groups.times:.0f} x the network rate of a machine"
        else:
            groups += " inside machines"
        hidden = (
            "hidden by compute"
            if seconds.data_s < 0.001 * seconds.step_s
            else f"{seconds.data_s:.2g} s not hidden by compute"
        )
        parts.append(f"{groups}: {volume.data_bytes / 1e9:,.1f} GB, {hidden}")
    return parts


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def _axes(layout: Layout) -> tuple[int, int, int]:
    return layout.num_pp, layout.num_tp, layout.num_dp


def _simplicity(layout: Layout) -> tuple[bool, int, int, bool, int]:
    return layout.offload, layout.zero, layout.num_chunks, layout.checkpointing, layout.micro_batch


def _best_of_each(found: Sequence[Estimate], key: Callable[[Estimate], tuple[object, ...]]) -> list[Estimate]:
    """The best layout for each value of `key`, the fastest first. Of nearly equally fast layouts, the simplest one."""
    kinds: dict[tuple[object, ...], list[Estimate]] = {}
    for one in found:
        kinds.setdefault(key(one), []).append(one)
    best = []
    for kind in kinds.values():
        limit = CLOSE * min(one.seconds.step_s for one in kind)
        best.append(min((one for one in kind if one.seconds.step_s <= limit), key=lambda one: _simplicity(one.layout)))
    return sorted(best, key=lambda one: one.seconds.step_s)
