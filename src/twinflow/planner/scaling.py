# SPDX-License-Identifier: Apache-2.0
"""Predicts a step on many GPUs, with ZeRO-Offload and with ZeRO-2 without offload, from one GPU to many machines.

Both methods shard optimizer state and gradients (ZeRO stage 2), and every GPU keeps all weights. Gradients are
reduce-scattered block by block during backward. Weights are all-gathered block by block during the next forward.
Communication that compute does not hide becomes a tail after backward and a lead before forward. The step simulation
covers the update between backward and the next forward: on the host with offload, or on the GPU without it. So one step
is

    lead, forward, (more micro-batches), backward, tail, and the time that the GPU waits for weights.

Each method uses the largest micro-batch that fits beside its own state, up to a total batch. State on the GPU reduces
the batch. Rates of machines are from data sheets (`machines.py`). The rate of a network is 0.8 of its nominal rate, as
for the links in `machines.py`.

Not included: the latency of collectives, the lower efficiency of matrix products in small batches, GPU cores that
communication occupies, and PCIe switches that several GPUs share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from twinflow.errors import incompatible, invalid_value
from twinflow.planner import costs
from twinflow.planner.costs import GPU_RESERVE, Bytes, Memory, Run
from twinflow.planner.formats import WEIGHT_BYTES
from twinflow.planner.machines import Machine, link_rate, rates_of
from twinflow.planner.placement import CLOSE, at_ratio
from twinflow.planner.simulate import Item, Prediction, Timing, predict

OFFLOAD, PLAIN = "ZeRO-Offload", "ZeRO-2"
RATIOS: Final = {OFFLOAD: 1.0, PLAIN: 0.0}  # share of the state on the host
SCATTERS: Final = 2  # number of blocks with unsharded gradients on a GPU: one is computed while the other is scattered
# Network rate of a machine for each of its GPUs in bytes/s, in each direction, by PCIe generation: 0.8 of
# 8 x 100 Gb/s for 16 GPUs (DGX-2), of 8 x 200 Gb/s for 8 GPUs (DGX A100), of 8 x 400 Gb/s for 8 GPUs (DGX H100).
_NETWORK: Final = {3: 5e9, 4: 20e9, 5: 40e9}


@dataclass(frozen=True)
class Cluster:
    """Equal machines. `machine.num_gpus` is the number of GPUs in each machine."""

    machine: Machine
    network_rate: float  # bytes/s that a machine sends, and receives at the same time

    def num_nodes(self, world: int) -> int:
        """The least number of machines with `world` GPUs."""
        return -(-world // self.machine.num_gpus)

    def local(self, world: int) -> Machine:
        """One of the machines, with only the GPUs of it that are used."""
        return replace(self.machine, num_gpus=-(-world // self.num_nodes(world)))

    def memory(self, world: int) -> Memory:
        """Memory of one GPU without the reserve for gaps, and of all hosts together."""
        host_bytes = self.machine.host.ram_bytes * self.num_nodes(world)
        return Memory(int(self.machine.gpu.memory_bytes * (1.0 - GPU_RESERVE)), host_bytes)

    def ring_rate(self, world: int) -> float:
        """Bytes/s around a ring of all GPUs: the rate of its slowest link.

        There is one ring for each network card, and all rings run concurrently. So the link between two machines has
        their whole network rate.
        """
        links = link_rate(self.machine)
        return links if self.num_nodes(world) == 1 else min(links, self.network_rate)


def default_network(machine: Machine) -> float:
    """Default network rate of a machine, from the PCIe generation of its GPUs."""
    return machine.num_gpus * _NETWORK[machine.gpu.pcie]


def ring_bytes(num_bytes: float, world: int) -> float:
    """Bytes that each GPU sends in a reduce-scatter or all-gather of `num_bytes`."""
    return num_bytes * (world - 1) / world


@dataclass(frozen=True)
class Ask:
    """Settings that ZeRO-2 and ZeRO-Offload have in common when they are compared."""

    total_batch: int  # largest number of sequences in a step of all GPUs
    gathers_first: bool = False  # gather all weights before forward, as the first ZeRO-Offload did, instead of in it


@dataclass(frozen=True)
class Talk:
    """Seconds of communication in a step."""

    scatter_s: float  # reduce-scatter of all gradients of one micro-batch
    gather_s: float  # all-gather of all weights
    tail_s: float  # part of the reduce-scatter after the last backward
    lead_s: float  # part of the all-gather before the next forward

    @property
    def exposed_s(self) -> float:
        """Communication that compute does not hide."""
        return self.tail_s + self.lead_s


@dataclass(frozen=True)
class Point:
    """Prediction of one method on one number of GPUs."""

    kind: str
    run: Run
    used: Bytes  # on one GPU, and on all hosts together
    talk: Talk
    compute_s: float  # forward and backward of all micro-batches
    step_s: float
    last: Prediction  # last micro-batch of the step with the updates

    @property
    def bound_by(self) -> str:
        """The bottleneck as in `Prediction`, or "link" if compute waits mostly for communication."""
        idle_s = self.step_s - self.compute_s
        if idle_s < 0.03 * self.step_s:
            return "gpu"
        return "link" if idle_s - self.last.waited_s > 0.5 * idle_s else self.last.bound_by

    @property
    def tflops(self) -> float:
        """TFLOPS of the model on each GPU, without recomputed activations."""
        run = self.run
        return run.model.model_flops(run.tokens) * run.step_tokens / self.step_s / run.world / 1e12

    @property
    def total_tflops(self) -> float:
        """TFLOPS of the model on all GPUs."""
        return self.tflops * self.run.world


@dataclass(frozen=True)
class Row:
    """ZeRO-Offload and ZeRO-2 on one number of GPUs. None: the method does not fit."""

    world: int
    offload: Point | None
    plain: Point | None

    @property
    def gain(self) -> float | None:
        """Speed of ZeRO-Offload relative to ZeRO-2, or None if at least one of them does not fit."""
        return self.offload.tflops / self.plain.tflops if self.offload and self.plain else None

    @property
    def ahead(self) -> str:
        """The faster method, or the only one that fits. Empty if both are about equally fast or neither fits."""
        if self.gain is None:
            return OFFLOAD if self.offload else PLAIN if self.plain else ""
        return OFFLOAD if self.gain > CLOSE else PLAIN if self.gain * CLOSE < 1.0 else ""


def doubling(limit: int) -> list[int]:
    """1, 2, 4, ... and `limit` as the last number."""
    if limit < 1:
        raise invalid_value("--scaling", limit, "a whole number >= 1")
    return sorted({*(1 << i for i in range(limit.bit_length())), limit})


def scaling(run: Run, cluster: Cluster, worlds: Iterable[int], ask: Ask) -> list[Row]:
    """Predict both methods on each number of GPUs. The batch and the GPUs of `run` are ignored."""
    return [Row(world, *(point(kind, run, cluster, world, ask) for kind in RATIOS)) for world in worlds]


def point(kind: str, run: Run, cluster: Cluster, world: int, ask: Ask) -> Point | None:
    """Prediction of one method on `world` GPUs. None if not even one sequence for each GPU fits."""
    if run.delayed:
        reason = "delayed updates are simulated only on one machine"
        raise incompatible("delayed_update: true", "--scaling", reason, "Set delayed_update to false in the config.")
    if run.expert_parallel > 1:
        size, reason = run.expert_parallel, "expert ranks are planned only for one number of GPUs"
        raise incompatible(f"expert_parallel_size: {size}", "--scaling", reason, "Leave expert_parallel_size out.")
    assert run.tensor_parallel == 1, "tensor parallelism is not simulated over machines"
    run = replace(run, world=world, stage=2 if world > 1 else 0)
    fitting = largest_batch(run, cluster, RATIOS[kind], ask.total_batch)
    return play(kind, fitting, cluster, ask.gathers_first) if fitting is not None else None


def largest_batch(run: Run, cluster: Cluster, ratio: float, total_batch: int) -> Run | None:
    """The run with the largest micro-batch that fits, and as many micro-batches as the total batch allows.

    Sums of gradients over micro-batches also need memory. If no micro-batch fits beside these sums, the run has only
    one micro-batch in a step.
    """
    memory, most = cluster.memory(run.world), total_batch // run.world
    sizes = range(most, 0, -1)
    tries = [*((batch, most // batch) for batch in sizes), *((batch, 1) for batch in sizes)]
    for batch, micro_batches in tries:
        tried = replace(run, batch=batch, micro_batches=micro_batches)
        if used_bytes(tried, ratio, memory).missing(memory).is_zero:
            return tried
    return None


def used_bytes(run: Run, ratio: float, memory: Memory) -> Bytes:
    """Bytes that the runtime allocates, with the unsharded gradients of blocks that wait for their reduce-scatter."""
    used = costs.bytes_of(run, costs.placed_at(run, ratio), memory)
    if run.world == 1:
        return used
    whole = SCATTERS * WEIGHT_BYTES[run.weights] * max(run.model.blocks, default=0)
    return replace(used, gpu={**used.gpu, "gradients": used.gpu["gradients"] + whole})


def play(kind: str, run: Run, cluster: Cluster, gathers_first: bool = False) -> Point:
    """Predict a step in the steady state, with concurrent compute, communication and updates.

    Micro-batches before the last one have no updates. Their gradients are scattered too, because a GPU does not have
    enough memory for unsharded gradients. So a backward takes at least as long as the reduce-scatter.
    """
    rates, memory = rates_of(cluster.local(run.world)), cluster.memory(run.world)
    used = used_bytes(run, RATIOS[kind], memory)
    compute = costs.timing_of(run, rates)  # without communication
    items, timing, talk = with_talk(run, compute, cluster.ring_rate(run.world), gathers_first)
    last = predict(
        at_ratio(items, RATIOS[kind]),
        timing,
        rates,
        run.states,
        costs.clip_decision_of(run, used),
        costs.ways_of(run, timing),
    )
    others_s = (run.micro_batches - 1) * (compute.forward_s + max(compute.backward_s, talk.scatter_s))
    return Point(kind, run, used, talk, compute.gpu_s, others_s + last.step_s, last)


def with_talk(run: Run, compute: Timing, rate: float, gathers_first: bool) -> tuple[list[Item], Timing, Talk]:
    """The buckets of one GPU in one micro-batch with communication: gradients are complete later, weights are needed
    earlier.

    Collectives run one at a time. Gradients are scattered in the order of backward. Weights are gathered as late as
    possible. If a gather is late, all gathers after it are delayed too.
    """
    timing = replace(compute, micro_batches=1)
    items = costs.items_of(run, timing)
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
    """End times of tasks that run one at a time, each from its start time or the previous end, whichever is later."""
    done, now = [0.0] * len(starts), 0.0
    for i in sorted(range(len(starts)), key=lambda i: starts[i]):
        now = done[i] = max(now, starts[i]) + seconds[i]
    return done


def _as_late_as_may_be(ends: Sequence[float], seconds: Sequence[float], order: Sequence[int]) -> list[float]:
    """Latest start times of tasks that run one at a time in `order` and must be done by their times in `ends`."""
    starts, following = [0.0] * len(ends), float("inf")
    for i in reversed(order):
        following = starts[i] = min(following, ends[i]) - seconds[i]
    return starts


def efficiency(points: Sequence[Point | None]) -> list[float | None]:
    """Throughput of each GPU, relative to its throughput on the smallest number of GPUs on which the run fits. 1 means
    linear scaling.
    """
    first = next((p for p in points if p is not None), None)
    return [p.tflops / first.tflops if p is not None and first is not None else None for p in points]


def crossover(rows: Sequence[Row]) -> tuple[int, int] | None:
    """The last number of GPUs on which ZeRO-Offload is ahead (see `Row.ahead`), and the next number.

    None if ZeRO-Offload is never ahead, or is ahead on the last number.
    """
    ahead = [row.ahead == OFFLOAD for row in rows]
    if not any(ahead) or ahead[-1]:
        return None
    last = max(i for i, is_ahead in enumerate(ahead) if is_ahead)
    return rows[last].world, rows[last + 1].world
