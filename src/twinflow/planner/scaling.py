"""A step over many GPUs: ZeRO-Offload beside ZeRO-2 without offload, from one card to many machines.

Both share state and gradients (stage 2) and keep whole weights. Gradients are reduce-scattered block by block beside
backward, weights all-gathered block by block beside the next forward; what of it no compute hides is a tail behind
backward and a lead before forward. Between the two lies what the step simulation plays: with offload the way over the
host, without it the update on the GPU. So one step is

    lead, forward, (more micro-batches), backward, tail, and what the GPU waits for weights in between.

Each way runs the largest micro-batch that its own memory leaves room for, up to a total batch: state on the GPU costs
batch. Rates of machines are data sheets' (machines.py); a network counts 0.8 of its sheet's, as links do there.

Not counted: latency of a collective, matrix products that are slower in small batches, cores of the GPU that
communication takes, and PCIe switches that several cards share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from twinflow.errors import invalid_value
from twinflow.planner.costs import (
    GPU_RESERVE,
    Bytes,
    Memory,
    Run,
    bytes_of,
    clip_decision_of,
    items_of,
    placed_at,
    timing_of,
    ways_of,
)
from twinflow.planner.formats import WEIGHT_BYTES
from twinflow.planner.machines import Machine, link_rate, rates_of
from twinflow.planner.placement import CLOSE, at_ratio
from twinflow.planner.simulate import Item, Prediction, Timing, predict

OFFLOAD, PLAIN = "ZeRO-Offload", "ZeRO-2"
RATIOS: Final = {OFFLOAD: 1.0, PLAIN: 0.0}  # share of the state on the host
SCATTERS: Final = 2  # blocks whose whole gradients are on a GPU: one is being made, one is being scattered
# A GPU's share of its machine's network, bytes a second each way, by PCIe generation: 0.8 of 8 x 100 Gb/s for 16 cards
# (DGX-2), of 8 x 200 Gb/s for 8 (DGX A100), of 8 x 400 Gb/s for 8 (DGX H100).
_NETWORK: Final = {3: 5e9, 4: 20e9, 5: 40e9}


@dataclass(frozen=True)
class Cluster:
    """Equal machines. `machine.num_gpus` is how many cards one of them has."""

    machine: Machine
    network_rate: float  # bytes a second that a machine sends to others, and receives from them at the same time

    def num_nodes(self, world: int) -> int:
        """Machines that so many GPUs take, as few as can be."""
        return -(-world // self.machine.num_gpus)

    def local(self, world: int) -> Machine:
        """One of those machines: its host serves only the cards in use."""
        return replace(self.machine, num_gpus=-(-world // self.num_nodes(world)))

    def memory(self, world: int) -> Memory:
        """Of a card, less what stays free for gaps; and of all hosts together."""
        host_bytes = self.machine.host.ram_bytes * self.num_nodes(world)
        return Memory(int(self.machine.gpu.memory_bytes * (1.0 - GPU_RESERVE)), host_bytes)

    def ring_rate(self, world: int) -> float:
        """Bytes a second round a ring of all GPUs: its slowest edge.

        Rings run side by side, one a network card, so that the edge between two machines has all of their network.
        """
        links = link_rate(self.machine)
        return links if self.num_nodes(world) == 1 else min(links, self.network_rate)


def default_network(machine: Machine) -> float:
    """What a machine of these cards sends to others, where nobody says."""
    return machine.num_gpus * _NETWORK[machine.gpu.pcie]


def ring_bytes(num_bytes: float, world: int) -> float:
    """What each GPU sends in a reduce-scatter or all-gather of so many bytes: all of it but its own part."""
    return num_bytes * (world - 1) / world


@dataclass(frozen=True)
class Ask:
    """What both ways are asked to do."""

    total_batch: int  # sequences of a step on all GPUs, at most
    gathers_first: bool = False  # all weights before forward begins, as the first ZeRO-Offload; else beside it


@dataclass(frozen=True)
class Talk:
    """Communication of a step, in seconds."""

    scatter_s: float  # all gradients of one micro-batch
    gather_s: float  # all weights
    tail_s: float  # of scattering, after the last backward
    lead_s: float  # of gathering, before the next forward

    @property
    def exposed_s(self) -> float:
        """What compute does not hide."""
        return self.tail_s + self.lead_s


@dataclass(frozen=True)
class Point:
    """One way to run on so many GPUs."""

    kind: str
    run: Run
    used: Bytes  # of one card, and of all hosts together
    talk: Talk
    compute_s: float  # forward and backward of all micro-batches
    step_s: float
    last: Prediction  # of the step's last micro-batch, and its updates

    @property
    def bound_by(self) -> str:
        """As the simulation has it, or "link": compute waits for communication more than for anything else."""
        idle_s = self.step_s - self.compute_s
        if idle_s < 0.03 * self.step_s:
            return "gpu"
        return "link" if idle_s - self.last.waited_s > 0.5 * idle_s else self.last.bound_by

    @property
    def tflops(self) -> float:
        """The model's on each GPU; what checkpointing computes again does not count."""
        run = self.run
        return run.model.model_flops(run.tokens) * run.step_tokens / self.step_s / run.world / 1e12

    @property
    def total_tflops(self) -> float:
        """Of all GPUs."""
        return self.tflops * self.run.world


@dataclass(frozen=True)
class Row:
    """Both ways on so many GPUs; None where one does not fit."""

    world: int
    offload: Point | None
    plain: Point | None

    @property
    def gain(self) -> float | None:
        """How many times as fast as ZeRO-2 offload is."""
        return self.offload.tflops / self.plain.tflops if self.offload and self.plain else None

    @property
    def ahead(self) -> str:
        """Which of the two; "" where neither is by more than what counts as equal, or neither fits."""
        if self.gain is None:
            return OFFLOAD if self.offload else PLAIN if self.plain else ""
        return OFFLOAD if self.gain > CLOSE else PLAIN if self.gain * CLOSE < 1.0 else ""


def doubling(limit: int) -> list[int]:
    """1, 2, 4 and so on up to `limit`, which comes last whatever it is."""
    if limit < 1:
        raise invalid_value("--scaling", limit, "a whole number >= 1")
    return sorted({*(1 << i for i in range(limit.bit_length())), limit})


def scaling(run: Run, cluster: Cluster, worlds: Iterable[int], ask: Ask) -> list[Row]:
    """Both ways on each number of GPUs; sequences and GPUs of `run` itself are not looked at."""
    return [Row(world, *(point(kind, run, cluster, world, ask) for kind in RATIOS)) for world in worlds]


def point(kind: str, run: Run, cluster: Cluster, world: int, ask: Ask) -> Point | None:
    """One way on `world` GPUs; None where not even one sequence fits, or the total batch has none for each GPU."""
    if run.delayed:
        raise invalid_value(
            "delayed_update", True, "false where scaling is asked for", "Delay is planned on one machine."
        )
    assert run.tensor_parallel == 1, "weights that several GPUs share are not simulated over machines"
    run = replace(run, world=world, stage=2 if world > 1 else 0)
    fitting = largest_batch(run, cluster, RATIOS[kind], ask.total_batch)
    return play(kind, fitting, cluster, ask.gathers_first) if fitting is not None else None


def largest_batch(run: Run, cluster: Cluster, ratio: float, total_batch: int) -> Run | None:
    """The largest micro-batch that fits, as many times as make up the total or a bit less.

    Sums over micro-batches take memory as well: where no micro-batch fits beside them, the largest one alone.
    """
    memory, most = cluster.memory(run.world), total_batch // run.world
    sizes = range(most, 0, -1)
    tries = [*((batch, most // batch) for batch in sizes), *((batch, 1) for batch in sizes)]
    for batch, micro_batches in tries:
        tried = replace(run, batch=batch, micro_batches=micro_batches)
        missing = used_bytes(tried, ratio, memory).missing(memory)
        if not (missing.gpu_bytes or missing.host_bytes):
            return tried
    return None


def used_bytes(run: Run, ratio: float, memory: Memory) -> Bytes:
    """What the runtime allocates, and whole gradients of blocks that wait to be scattered."""
    used = bytes_of(run, placed_at(run, ratio), memory)
    if run.world == 1:
        return used
    whole = SCATTERS * WEIGHT_BYTES[run.weights] * max(run.model.blocks, default=0)
    return replace(used, gpu={**used.gpu, "gradients": used.gpu["gradients"] + whole})


def play(kind: str, run: Run, cluster: Cluster, gathers_first: bool = False) -> Point:
    """The steady step: compute, communication and updates side by side.

    Micro-batches before the last one have no update in them. Their gradients are scattered as well, since no GPU has
    room for whole ones: backward is never shorter than that.
    """
    rates, memory = rates_of(cluster.local(run.world)), cluster.memory(run.world)
    used = used_bytes(run, RATIOS[kind], memory)
    compute = timing_of(run, rates)  # no link: nobody talks
    items, timing, talk = with_talk(run, compute, cluster.ring_rate(run.world), gathers_first)
    last = predict(at_ratio(items, RATIOS[kind]), timing, rates, run.states, clip_decision_of(run, used), ways_of(run))
    others_s = (run.micro_batches - 1) * (compute.forward_s + max(compute.backward_s, talk.scatter_s))
    return Point(kind, run, used, talk, compute.gpu_s, others_s + last.step_s, last)


def with_talk(run: Run, compute: Timing, rate: float, gathers_first: bool) -> tuple[list[Item], Timing, Talk]:
    """The buckets of one GPU in one micro-batch, with communication: gradients later, weights needed earlier.

    One collective runs at a time, gradients in the order they are made. Weights are gathered as late as they may be:
    whichever comes later than that holds up all that follow.
    """
    timing = replace(compute, micro_batches=1)
    items = items_of(run, timing)
    if run.world == 1:
        return items, timing, Talk(0.0, 0.0, 0.0, 0.0)
    seconds = [ring_bytes(WEIGHT_BYTES[run.weights] * item.numel * run.world, run.world) / rate for item in items]
    ready = _one_by_one([item.ready for item in items], seconds)
    ends = [0.0 if gathers_first else item.need for item in items]
    latest = _as_late_as_may_be(ends, seconds, sorted(range(len(items)), key=lambda i: items[i].need))
    tail = max(0.0, max(ready) - timing.backward_s)
    lead = max(0.0, -min(latest))
    moved = [replace(a, ready=late, need=b + lead) for a, late, b in zip(items, ready, latest, strict=True)]
    longer = replace(timing, forward_s=timing.forward_s + lead, backward_s=timing.backward_s + tail)
    return moved, longer, Talk(sum(seconds), sum(seconds), tail, lead)


def _one_by_one(starts: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """When each is done, where each starts at its time or when the one before it is done."""
    done, now = [0.0] * len(starts), 0.0
    for i in sorted(range(len(starts)), key=lambda i: starts[i]):
        now = done[i] = max(now, starts[i]) + seconds[i]
    return done


def _as_late_as_may_be(ends: Sequence[float], seconds: Sequence[float], order: Sequence[int]) -> list[float]:
    """When each must start to be done at its end, where they run one at a time, in `order`."""
    starts, following = [0.0] * len(ends), float("inf")
    for i in reversed(order):
        following = starts[i] = min(following, ends[i]) - seconds[i]
    return starts


def efficiency(points: Sequence[Point | None]) -> list[float | None]:
    """Throughput of a GPU beside that on the fewest GPUs where it fits: 1 is linear."""
    first = next((p for p in points if p is not None), None)
    return [p.tflops / first.tflops if p is not None and first is not None else None for p in points]


def crossover(rows: Sequence[Row]) -> tuple[int, int] | None:
    """The last number of GPUs where offload is ahead, and the next, from which on ZeRO-2 has caught up.

    None where it is ahead nowhere, or still is at the end.
    """
    ahead = [row.ahead == OFFLOAD for row in rows]
    if not any(ahead) or ahead[-1]:
        return None
    last = max(i for i, is_ahead in enumerate(ahead) if is_ahead)
    return rows[last].world, rows[last + 1].world
