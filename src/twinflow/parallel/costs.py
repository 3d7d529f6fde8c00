# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a layout (numbers of pipeline, tensor and data ranks) on machines described by data sheets.

This is a simulation. No number was measured at this scale. `memory.py` computes the memory of the fullest rank.

The time of a step includes: matrix products, at the rate that large products reach; memory traffic; all-reduces between
tensor ranks, during which computation waits; the pipeline, by simulating the schedule; communication between data
ranks, unless the last backward and the first forward hide it; the all-reduce of a tied embedding's gradient between the
first and the last stage after the last backward; the update of the optimizer.

Ranks fill machines in this order: tensor ranks are neighbours, then data ranks, then stages (`topology.py`). A group
inside a machine uses the links of the machine. Groups over several machines share the network: a group with k ranks in
a machine of n GPUs gets k/n of the network rate of the machine. Volumes are those of a ring: a rank sends all but its
own part, once for a reduce-scatter and once for an all-gather.

Not included: the lower rate of small products, dropped packets, stragglers, reading data, saving checkpoints, and links
that two axes use at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from twinflow.parallel.layout import HALF_BYTES, Layout, check_layout, rank_layers, stage_layers, stream_bytes
from twinflow.parallel.memory import GRADIENT, WEIGHT, RankBytes, fullest_rank
from twinflow.parallel.schedules import rank_of
from twinflow.parallel.shapes import Shape
from twinflow.parallel.simulate import Pipeline, StageTime, rank_seconds, step_seconds
from twinflow.parallel.topology import DATA, MODEL, PIPE
from twinflow.planner.formats import UPDATE_BYTES
from twinflow.planner.machines import link_rate, rates_of
from twinflow.planner.models import GPT_LAUNCH_S, GPT_TRAFFIC
from twinflow.planner.scaling import Cluster, ring_bytes

DAY_S: Final = 86_400.0
# Latency of a collective inside a machine and between machines. Both are estimates.
LATENCY_S: Final = (1.0e-5, 2.5e-5)


@dataclass(frozen=True)
class Link:
    crosses: bool  # whether the group spans several machines
    rate: float  # bytes/s of one group's ring while all groups communicate
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of a message, or of a ring collective, in which each GPU sends `num_bytes`."""
        return num_bytes / self.rate + self.latency_s if num_bytes else 0.0


@dataclass(frozen=True)
class Volume:
    """Bytes that a GPU of an inner stage sends in a step."""

    tensor_bytes: float
    pipe_bytes: float  # in each direction
    data_bytes: float
    tied_bytes: float = 0.0  # gradient of the tied embedding, only on the first and the last stage


@dataclass(frozen=True)
class Amplified:
    """The number of data groups (a group: ranks that sum their gradients), and the rate of all groups together."""

    num_groups: int
    times: float  # total rate relative to the network rate of one machine


def link_of(cluster: Cluster, layout: Layout, axis: str) -> Link:
    """The link that the groups of ranks along an axis use."""
    per_node, links = cluster.machine.num_gpus, link_rate(cluster.machine)
    # The distance between neighbours of a group, and the number of ranks from its first to its last rank.
    stride = {MODEL: 1, DATA: layout.num_tp, PIPE: layout.num_tp * layout.num_dp}[axis]
    span = stride * {MODEL: layout.num_tp, DATA: layout.num_dp, PIPE: layout.num_pp}[axis]
    if stride == span or layout.world <= per_node or (span <= per_node and per_node % span == 0):
        return Link(False, links, LATENCY_S[0])
    # In a machine with several stages, only the ranks of one stage send to the next machine.
    members = max(1, min(per_node, span) // stride)
    sharing = min(per_node, stride) if axis == PIPE else per_node / members
    return Link(True, min(links, cluster.network_rate / sharing), LATENCY_S[1])


def volume_of(shape: Shape, layout: Layout, grad_bits: float = 16.0) -> Volume:
    """Bytes that a GPU sends in a step, with layers divided evenly. `grad_bits`: less than 16 for compressed gradients
    and weights."""
    kept, m = stream_bytes(shape, layout), layout.num_micro_batches
    reduced = 2.0 * ring_bytes(kept, layout.num_tp)
    # All-reduces of a layer between tensor ranks: two in forward, two in backward, and two if forward is recomputed.
    tensor = (6 if layout.checkpointing else 4) * reduced * m * shape.num_layers / layout.num_pp
    pipe = kept * m * layout.num_chunks / layout.kept_by if layout.num_pp > 1 else 0.0
    numel = shape.numel / (layout.num_pp * layout.num_tp)
    data = ring_count(layout) * ring_bytes(numel * grad_bits / 8.0, layout.num_dp)
    return Volume(tensor, pipe, data, tied_bytes(shape, layout))


def tied_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes that a rank with the embedding and the rank with its copy send to each other in a step. Each replica sends
    only its share of the gradient.
    """
    if not layout.ties_ranks(shape):
        return 0.0
    return 2.0 * ring_bytes(HALF_BYTES * shape.end_numel / layout.num_tp / layout.num_dp, 2)


def tied_seconds(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """Time to sum the gradient of a tied embedding: first over the replicas (with ZeRO-3 this is already done), then
    over the first and the last stage.
    """
    if not layout.ties_ranks(shape):
        return 0.0
    near = 0.0
    if layout.num_dp > 1 and layout.zero < 3:
        whole = HALF_BYTES * shape.end_numel / layout.num_tp
        near = link_of(cluster, layout, DATA).seconds(ring_bytes(whole, layout.num_dp))
    return near + link_of(cluster, layout, PIPE).seconds(tied_bytes(shape, layout))


def ring_count(layout: Layout) -> int:
    """Number of ring collectives over all gradients or all weights in a step.

    One ring reduces gradients and one gathers weights. ZeRO-2 without a pipeline keeps no unsharded sums, so it reduces
    gradients in every micro-batch. ZeRO-3 does so too, and gathers weights in every forward and every backward.
    """
    if layout.num_dp == 1:
        return 0
    m = layout.num_micro_batches
    if layout.zero == 3:
        return 3 * m
    return m + 1 if layout.reduces_each else 2


def amplified(cluster: Cluster, layout: Layout) -> Amplified:
    """The rate of all data groups together. There are as many groups as stages times tensor ranks."""
    num_groups = layout.num_pp * layout.num_tp
    total = num_groups * link_of(cluster, layout, DATA).rate
    return Amplified(num_groups, total / cluster.network_rate)


@dataclass(frozen=True)
class Seconds:
    """Time of a step by part."""

    pipeline_s: float  # all micro-batches through all stages, with tensor-parallel communication and bubble
    work_s: float  # mean of the ranks' compute and tensor-parallel communication
    tensor_s: float  # tensor-parallel communication, part of work_s
    data_s: float  # communication between data ranks that compute does not hide
    update_s: float  # part of the optimizer's update that compute does not hide
    tied_s: float = 0.0  # all-reduce of the tied embedding's gradient between the first and the last stage

    @property
    def step_s(self) -> float:
        return self.pipeline_s + self.tied_s + self.data_s + self.update_s

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time in which a rank waits, on average."""
        return 1.0 - self.work_s / self.pipeline_s


@dataclass(frozen=True)
class Estimate:
    """Memory, communication and time of a layout."""

    shape: Shape
    layout: Layout
    fullest: RankBytes  # memory of the fullest rank
    gpu_limit: int  # usable bytes of a GPU
    host_bytes: float  # host memory that one machine needs
    host_limit: int  # usable host memory of one machine
    volume: Volume
    data_groups: Amplified
    crosses: tuple[str, ...]  # axes whose groups span several machines
    seconds: Seconds
    simulated: bool  # the schedule was simulated; otherwise a formula was used

    @property
    def missing_bytes(self) -> float:
        """Bytes that the fullest GPU lacks. 0 if the layout fits."""
        return max(0.0, self.fullest.gpu_bytes - self.gpu_limit)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0.0 and self.host_bytes <= self.host_limit

    @property
    def step_tokens(self) -> int:
        return self.layout.batch * self.shape.sequence

    @property
    def tflops(self) -> float:
        """TFLOPS of the model on each GPU."""
        return self.shape.model_flops(self.step_tokens) / self.seconds.step_s / self.layout.world / 1e12

    def days(self, num_tokens: float) -> float:
        """Days to train on `num_tokens` tokens."""
        return num_tokens / self.step_tokens * self.seconds.step_s / DAY_S


def host_bytes(fullest: RankBytes, layout: Layout, cluster: Cluster) -> float:
    """Host memory for the optimizer state of a machine, if all its GPUs need as much as the fullest one."""
    return fullest.state.host_states * min(cluster.machine.num_gpus, layout.world)


def lacking_bytes(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """Bytes that the fullest GPU lacks plus those that the host memory of a machine lacks. 0 if the layout fits."""
    memory, fullest = cluster.memory(cluster.machine.num_gpus), fullest_rank(shape, layout)
    over_host = host_bytes(fullest, layout, cluster) - memory.host_bytes
    return max(0.0, fullest.gpu_bytes - memory.gpu_bytes) + max(0.0, over_host)


def layer_time(shape: Shape, layout: Layout, cluster: Cluster) -> tuple[StageTime, float]:
    """Time of one layer and micro-batch on a tensor rank, and the time of communication in its forward.

    The time includes matrix products, memory traffic, and two all-reduces each in forward, backward and recomputation.
    """
    rates, tokens = rates_of(cluster.machine), shape.sequence * layout.micro_batch
    products, attention = (flops / layout.num_tp / rates.flops for flops in shape.layer_flops(tokens))
    traffic = GPT_TRAFFIC * shape.hidden * tokens / rates.device_bytes / layout.num_tp
    talk = 0.0
    if layout.num_tp > 1:
        ring = 2.0 * ring_bytes(stream_bytes(shape, layout), layout.num_tp)
        talk = 2.0 * link_of(cluster, layout, MODEL).seconds(ring)
    forward = max(products + attention + traffic, GPT_LAUNCH_S) + talk
    backward = max(products + 2.0 * attention + traffic, GPT_LAUNCH_S) + talk
    weight = max(products, GPT_LAUNCH_S / 2.0)
    return StageTime(forward, backward, weight, forward if layout.checkpointing else 0.0), talk


def stage_times(shape: Shape, layout: Layout, cluster: Cluster) -> tuple[StageTime, ...]:
    """Time of every stage for a micro-batch: its layers, the head, and the communication that compute does not hide.

    ZeRO-2 without a pipeline reduce-scatters gradients during every backward. ZeRO-3 also gathers weights during
    forward and backward.
    """
    layer, _ = layer_time(shape, layout, cluster)
    tokens = shape.sequence * layout.micro_batch
    head = 2.0 * shape.end_numel * tokens / layout.num_tp / rates_of(cluster.machine).flops

    @cache
    def stage_time(count: int, end: float) -> StageTime:
        forward, backward, weight = (count * s + end for s in (layer.forward_s, layer.input_s, layer.weight_s))
        again = count * layer.recompute_s
        if layout.num_dp > 1 and layout.reduces_each:
            ring = ring_bytes(WEIGHT * count * shape.layer_numel / layout.num_tp, layout.num_dp)
            talk = link_of(cluster, layout, DATA).seconds(ring)
            gathers = talk if layout.zero == 3 else 0.0
            forward = max(forward, gathers)
            backward += max(0.0, talk + gathers - (again + backward + weight))
        return StageTime(forward, backward, weight, again)

    *others, last = stage_layers(shape, layout)
    return (*(stage_time(count, 0.0) for count in others), stage_time(last, head))


def seconds_of(shape: Shape, layout: Layout, cluster: Cluster, plays: bool = True) -> Seconds:
    """Time of a step. `plays`: whether to simulate the schedule. Otherwise a faster formula is used."""
    times = stage_times(shape, layout, cluster)
    kept = stream_bytes(shape, layout) / layout.kept_by
    send_s = link_of(cluster, layout, PIPE).seconds(kept) if layout.num_pp > 1 else 0.0
    pipe = Pipeline(layout.schedule, layout.num_pp, layout.num_micro_batches, layout.num_chunks, times, send_s)
    pipeline_s = step_seconds(pipe) if plays else rough_seconds(pipe)
    work_s = layout.num_micro_batches * sum(time.total_s for time in times) / layout.num_pp
    passes = 3 if layout.checkpointing else 2
    _, talk_s = layer_time(shape, layout, cluster)
    tensor_s = passes * talk_s * layout.num_micro_batches * shape.num_layers / layout.num_pp
    forward_s = max(time.forward_s for time in times) * layout.num_chunks
    whole_s = max(time.total_s for time in times) * layout.num_chunks
    data_s = _data_exposed(shape, layout, cluster, forward_s, whole_s - forward_s)
    tied_s = tied_seconds(shape, layout, cluster)
    return Seconds(pipeline_s, work_s, tensor_s, data_s, _update_exposed(shape, layout, cluster, whole_s), tied_s)


def rough_seconds(pipe: Pipeline) -> float:
    """The time of all micro-batches by a formula: work of the slowest rank, fill and drain of the pipeline, sends."""
    totals = rank_seconds(pipe)
    p, mean = pipe.num_ranks, sum(totals) / pipe.num_ranks
    if p == 1:
        return pipe.num_micro_batches * mean
    fill = (p - 1) * mean / (6.0 if pipe.name == "zbv" else pipe.num_chunks)
    sends = 2.0 * (p - 1) + (pipe.num_micro_batches if pipe.num_chunks == 1 else 0)
    return pipe.num_micro_batches * max(totals) + fill + sends * pipe.send_s


def largest_numel(shape: Shape, layout: Layout) -> float:
    """The largest number of parameters of a rank, with the embedding, its copy or the head if the rank has them."""
    layers = rank_layers(shape, layout)
    ends = (0, rank_of(layout.num_stages - 1, layout.num_pp, layout.placement))
    numels = (
        n * shape.layer_numel + shape.ends_numel(rank == ends[0], rank == ends[1]) for rank, n in enumerate(layers)
    )
    return max(numels) / layout.num_tp


def _data_exposed(shape: Shape, layout: Layout, cluster: Cluster, forward_s: float, backward_s: float) -> float:
    """Time of communication between data ranks that computation does not hide and that is not part of the stage times.

    The reduce-scatter runs during the last backward, and the all-gather during the first forward.
    """
    if layout.num_dp == 1 or layout.zero == 3:
        return 0.0
    ring = ring_bytes(WEIGHT * largest_numel(shape, layout), layout.num_dp)
    talk = link_of(cluster, layout, DATA).seconds(ring)
    scatter = 0.0 if layout.reduces_each else max(0.0, talk - backward_s)
    return scatter + max(0.0, talk - forward_s)


def _update_exposed(shape: Shape, layout: Layout, cluster: Cluster, window_s: float) -> float:
    """Time of the update that computation does not hide: on the GPU all of it, on the host what exceeds `window_s`."""
    rates = rates_of(cluster.machine)
    own = largest_numel(shape, layout) / (layout.num_dp if layout.zero else 1)
    if not layout.offload:
        return own * UPDATE_BYTES["fp32"] / rates.device_bytes
    host = max(own / rates.host_params_copying["fp32"], own * GRADIENT / rates.duplex_bytes)
    return max(0.0, host - window_s)


def estimate(shape: Shape, layout: Layout, cluster: Cluster, plays: bool = True) -> Estimate:
    check_layout(layout, shape)
    memory = cluster.memory(cluster.machine.num_gpus)
    fullest = fullest_rank(shape, layout)
    return Estimate(
        shape=shape,
        layout=layout,
        fullest=fullest,
        gpu_limit=memory.gpu_bytes,
        host_bytes=host_bytes(fullest, layout, cluster),
        host_limit=memory.host_bytes,
        volume=volume_of(shape, layout),
        data_groups=amplified(cluster, layout),
        crosses=tuple(axis for axis in (MODEL, DATA, PIPE) if link_of(cluster, layout, axis).crosses),
        seconds=seconds_of(shape, layout, cluster, plays),
        simulated=plays,
    )
