"""Bytes and seconds of a layout on machines described by data sheets. A simulation: nothing here was measured at scale.

Memory of the fullest rank is memory.py's.

Seconds: matrix products at the rate large ones reach, memory traffic beside them, all-reduces between tensor ranks in
series with them, stages by playing the schedule, gradients and weights between data ranks hidden behind the last
backward and the first forward, a tied embedding's gradient between the first and the last stage behind the last
backward, the optimizer's update. Not counted: slower small products, dropped packets, stragglers,
reading data, saving checkpoints, and links that two axes use at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from twinflow.parallel.layout import Layout, check_layout, rank_layers, stage_layers
from twinflow.parallel.memory import GRADIENT, WEIGHT, RankBytes, fullest_rank
from twinflow.parallel.schedules import rank_of
from twinflow.parallel.shapes import Shape
from twinflow.parallel.simulate import Pipeline, StageTime, rank_seconds, step_seconds
from twinflow.parallel.topology import DATA, MODEL, PIPE
from twinflow.parallel.traffic import (
    Amplified,
    Volume,
    activation_bytes,
    amplified,
    link_of,
    tied_seconds,
    volume_of,
)
from twinflow.planner.machines import rates_of
from twinflow.planner.models import GPT_LAUNCH_S, GPT_TRAFFIC
from twinflow.planner.rates import Rates
from twinflow.planner.scaling import Cluster, ring_bytes

UPDATE_BYTES: Final = 30.0  # a parameter, that an update on the GPU reads and writes
DAY_S: Final = 86_400.0


@dataclass(frozen=True)
class Seconds:
    """A step, part by part."""

    pipeline_s: float  # all micro-batches through all stages, with tensor ranks' talk and bubble
    work_s: float  # what a rank computes and talks of it, on average
    tensor_s: float  # of the work: talk between tensor ranks
    data_s: float  # talk between data ranks that nothing hides
    update_s: float  # of the optimizer, not hidden
    tied_s: float = 0.0  # talk between the first and the last stage about the embedding that both have

    @property
    def step_s(self) -> float:
        """All in all."""
        return self.pipeline_s + self.tied_s + self.data_s + self.update_s

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time in which a rank waits, on average."""
        return 1.0 - self.work_s / self.pipeline_s


@dataclass(frozen=True)
class Estimate:
    """A layout with all that is known of it."""

    shape: Shape
    layout: Layout
    fullest: RankBytes
    gpu_limit: int
    host_bytes: float  # of one machine
    host_limit: int
    volume: Volume
    data_groups: Amplified
    crosses: tuple[str, ...]  # axes that leave a machine
    seconds: Seconds
    simulated: bool  # the schedule was played; else a formula stands in

    @property
    def missing_bytes(self) -> float:
        """GPU memory that is missing; 0 where it fits."""
        return max(0.0, self.fullest.gpu_bytes - self.gpu_limit)

    @property
    def fits(self) -> bool:
        """On the GPUs and in the hosts."""
        return self.missing_bytes == 0.0 and self.host_bytes <= self.host_limit

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.layout.batch * self.shape.sequence

    @property
    def tflops(self) -> float:
        """The model's, on each GPU."""
        return self.shape.model_flops(self.step_tokens) / self.seconds.step_s / self.layout.world / 1e12

    def days(self, num_tokens: float) -> float:
        """To train on so many tokens."""
        return num_tokens / self.step_tokens * self.seconds.step_s / DAY_S


def host_bytes(fullest: RankBytes, layout: Layout, cluster: Cluster) -> float:
    """Of a machine whose GPUs are all as full as the fullest."""
    return fullest.state.host_states * min(cluster.machine.num_gpus, layout.world)


def lacking_bytes(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """What is missing on the fullest GPU and in a machine's host memory; 0 where it fits."""
    memory, fullest = cluster.memory(cluster.machine.num_gpus), fullest_rank(shape, layout)
    over_host = host_bytes(fullest, layout, cluster) - memory.host_bytes
    return max(0.0, fullest.gpu_bytes - memory.gpu_bytes) + max(0.0, over_host)


@lru_cache(maxsize=64)
def _rates(cluster: Cluster) -> Rates:
    return rates_of(cluster.machine)


@dataclass(frozen=True)
class LayerTime:
    """One layer and micro-batch on a tensor rank, and the part of a forward that is talk."""

    time: StageTime
    talk_s: float


def layer_time(shape: Shape, layout: Layout, cluster: Cluster) -> LayerTime:
    """Matrix products, memory traffic and two all-reduces each in forward, backward and what runs again."""
    rates, tokens = _rates(cluster), shape.sequence * layout.micro_batch
    products, attention = (flops / layout.num_tp / rates.flops for flops in shape.layer_flops(tokens))
    traffic = GPT_TRAFFIC * shape.hidden * tokens / rates.device_bytes / layout.num_tp
    talk = 0.0
    if layout.num_tp > 1:
        ring = 2.0 * ring_bytes(activation_bytes(shape, layout), layout.num_tp)
        talk = 2.0 * link_of(cluster, layout, MODEL).seconds(ring)
    forward = max(products + attention + traffic, GPT_LAUNCH_S) + talk
    backward = max(products + 2.0 * attention + traffic, GPT_LAUNCH_S) + talk
    weight = max(products, GPT_LAUNCH_S / 2.0)
    return LayerTime(StageTime(forward, backward, weight, forward if layout.checkpointing else 0.0), talk)


def stage_times(shape: Shape, layout: Layout, cluster: Cluster) -> tuple[StageTime, ...]:
    """Every stage: its layers, the head on the last, and ZeRO-2's and 3's talk where it is longer than compute."""
    layer, rates = layer_time(shape, layout, cluster).time, _rates(cluster)
    tokens = shape.sequence * layout.micro_batch
    head = 2.0 * shape.end_numel * tokens / layout.num_tp / rates.flops
    made: dict[tuple[int, bool], StageTime] = {}
    counts = stage_layers(shape, layout)
    for stage, count in enumerate(counts):
        key = (count, stage == len(counts) - 1)
        if key not in made:
            end = head if key[1] else 0.0
            time = StageTime(
                count * layer.forward_s + end,
                count * layer.input_s + end,
                count * layer.weight_s + end,
                count * layer.recompute_s,
            )
            made[key] = _with_zero_talk(time, count, shape, layout, cluster)
    return tuple(made[count, stage == len(counts) - 1] for stage, count in enumerate(counts))


def _with_zero_talk(time: StageTime, count: int, shape: Shape, layout: Layout, cluster: Cluster) -> StageTime:
    """Stage 2 alone scatters gradients beside every backward, stage 3 gathers weights beside everything as well."""
    if layout.num_dp == 1 or not layout.reduces_each:
        return time
    ring = ring_bytes(WEIGHT * count * shape.layer_numel / layout.num_tp, layout.num_dp)
    talk = link_of(cluster, layout, DATA).seconds(ring)
    gathers = talk if layout.zero == 3 else 0.0
    backward = time.recompute_s + time.input_s + time.weight_s
    late = max(0.0, talk + gathers - backward)
    return StageTime(max(time.forward_s, gathers), time.input_s + late, time.weight_s, time.recompute_s)


def seconds_of(shape: Shape, layout: Layout, cluster: Cluster, plays: bool = True) -> Seconds:
    """A step. `plays`: the schedule's lists are simulated; else a formula stands in, to choose what to simulate."""
    times = stage_times(shape, layout, cluster)
    kept = activation_bytes(shape, layout) / layout.kept_by
    send_s = link_of(cluster, layout, PIPE).seconds(kept) if layout.num_pp > 1 else 0.0
    pipe = Pipeline(layout.schedule, layout.num_pp, layout.num_micro_batches, layout.num_chunks, times, send_s)
    pipeline_s = step_seconds(pipe) if plays else rough_seconds(pipe)
    work_s = layout.num_micro_batches * sum(time.total_s for time in times) / layout.num_pp
    passes = 3 if layout.checkpointing else 2
    talk_s = layer_time(shape, layout, cluster).talk_s
    tensor_s = passes * talk_s * layout.num_micro_batches * shape.num_layers / layout.num_pp
    forward_s = max(time.forward_s for time in times) * layout.num_chunks
    whole_s = max(time.total_s for time in times) * layout.num_chunks
    data_s = _data_exposed(shape, layout, cluster, forward_s, whole_s - forward_s)
    tied_s = tied_seconds(shape, layout, cluster)
    return Seconds(pipeline_s, work_s, tensor_s, data_s, _update_exposed(shape, layout, cluster, whole_s), tied_s)


def rough_seconds(pipe: Pipeline) -> float:
    """The makespan by formula: the slowest rank's work, and filling and emptying the pipeline."""
    totals = rank_seconds(pipe)
    p, mean = pipe.num_ranks, sum(totals) / pipe.num_ranks
    if p == 1:
        return pipe.num_micro_batches * mean
    fill = (p - 1) * mean / (6.0 if pipe.name == "zbv" else pipe.num_chunks)
    sends = 2.0 * (p - 1) + (pipe.num_micro_batches if pipe.num_chunks == 1 else 0)
    return pipe.num_micro_batches * max(totals) + fill + sends * pipe.send_s


def largest_numel(shape: Shape, layout: Layout) -> float:
    """Parameters of the rank that has most, with the embedding or its copy."""
    layers = rank_layers(shape, layout)
    ends = (0, rank_of(layout.num_stages - 1, layout.num_pp, layout.placement))
    numels = (n * shape.layer_numel + (rank in ends) * shape.end_numel for rank, n in enumerate(layers))
    return max(numels) / layout.num_tp


def _data_exposed(shape: Shape, layout: Layout, cluster: Cluster, forward_s: float, backward_s: float) -> float:
    """Scatter beside the last backward, gather beside the first forward, where that is not in the stages' times."""
    if layout.num_dp == 1 or layout.zero == 3:
        return 0.0
    ring = ring_bytes(WEIGHT * largest_numel(shape, layout), layout.num_dp)
    talk = link_of(cluster, layout, DATA).seconds(ring)
    scatter = 0.0 if layout.reduces_each else max(0.0, talk - backward_s)
    return scatter + max(0.0, talk - forward_s)


def _update_exposed(shape: Shape, layout: Layout, cluster: Cluster, window_s: float) -> float:
    """On the GPU behind the last backward; on the host beside one micro-batch's forward and backward."""
    rates = _rates(cluster)
    own = largest_numel(shape, layout) / (layout.num_dp if layout.zero else 1)
    if not layout.offload:
        return own * UPDATE_BYTES / rates.device_bytes
    host = max(own / rates.host_params_copying["fp32"], own * GRADIENT / rates.duplex_bytes)
    return max(0.0, host - window_s)


def estimate(shape: Shape, layout: Layout, cluster: Cluster, plays: bool = True) -> Estimate:
    """All that is known of a layout."""
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
