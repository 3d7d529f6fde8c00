"""Communication of a layout along each axis, and the links that it uses.

Ranks fill machines in this order: tensor ranks are neighbours, then data ranks, then stages (`topology.py`). A group
inside a machine uses the links of the machine. Groups over several machines share the network: a group with k ranks in
a machine of n GPUs gets k/n of the network rate of the machine. Volumes are those of a ring: a rank sends all but its
own part, once for a reduce-scatter and once for an all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twinflow.parallel.layout import Layout
from twinflow.parallel.shapes import Shape
from twinflow.parallel.topology import DATA, MODEL, PIPE
from twinflow.planner.formats import WEIGHT_BYTES
from twinflow.planner.machines import link_rate
from twinflow.planner.scaling import Cluster, ring_bytes

# Latency of a collective inside a machine and between machines. Both are estimates.
LATENCY_S: Final = (1.0e-5, 2.5e-5)
HALF_BYTES: Final = WEIGHT_BYTES["bf16"]  # size of an activation, gradient or weight in a message


@dataclass(frozen=True)
class Link:
    """The link that a group uses."""

    crosses: bool  # whether the group spans several machines
    rate: float  # bytes/s of one group's ring while all groups communicate
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of a message or a ring of `num_bytes` for each GPU."""
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
    """Rate of all data groups together, compared with the network of one machine."""

    num_groups: int
    total_rate: float  # bytes/s of all groups
    times: float  # total rate relative to the network rate of one machine


def group_span(layout: Layout, axis: str) -> tuple[int, int]:
    """The distance between neighbours of a group, and the number of ranks from its first to its last rank."""
    stride, size = {
        MODEL: (1, layout.num_tp),
        DATA: (layout.num_tp, layout.num_dp),
        PIPE: (layout.num_tp * layout.num_dp, layout.num_pp),
    }[axis]
    return stride, stride * size


def link_of(cluster: Cluster, layout: Layout, axis: str) -> Link:
    """The link of an axis. `map_ranks` gives the same result rank by rank."""
    per_node, links = cluster.machine.num_gpus, link_rate(cluster.machine)
    stride, span = group_span(layout, axis)
    if stride == span or layout.world <= per_node or (span <= per_node and per_node % span == 0):
        return Link(False, links, LATENCY_S[0])
    # In a machine with several stages, only the ranks of one stage send to the next machine.
    members = max(1, min(per_node, span) // stride)
    sharing = min(per_node, stride) if axis == PIPE else per_node / members
    return Link(True, min(links, cluster.network_rate / sharing), LATENCY_S[1])


def activation_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes of a micro-batch between two layers."""
    return HALF_BYTES * shape.sequence * layout.micro_batch * shape.hidden


def reduces_a_layer(checkpointing: bool) -> int:
    """All-reduces of a layer between tensor ranks: two in forward, two in backward, and two if forward is
    recomputed."""
    return 6 if checkpointing else 4


def volume_of(shape: Shape, layout: Layout, grad_bits: float = 16.0) -> Volume:
    """Bytes that a GPU sends in a step, with layers divided evenly. `grad_bits`: less than 16 for compressed gradients
    and weights."""
    kept, m = activation_bytes(shape, layout), layout.num_micro_batches
    reduced = 2.0 * ring_bytes(kept, layout.num_tp)
    tensor = reduces_a_layer(layout.checkpointing) * reduced * m * shape.num_layers / layout.num_pp
    pipe = kept * m * layout.num_chunks / layout.kept_by if layout.num_pp > 1 else 0.0
    numel = shape.numel / (layout.num_pp * layout.num_tp)
    data = ring_count(layout) * ring_bytes(numel * grad_bits / 8.0, layout.num_dp)
    return Volume(tensor, pipe, data, tied_bytes(shape, layout))


def tied_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes that the two ranks with an embedding and its copy send to each other in a step: the share of one
    replica."""
    if not layout.ties_ranks:
        return 0.0
    return 2.0 * ring_bytes(HALF_BYTES * shape.end_numel / layout.num_tp / layout.num_dp, 2)


def tied_seconds(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """Time of the sum of a tied embedding's gradient: over the replicas, unless stage 3 has done so, then over both
    stages."""
    if not layout.ties_ranks:
        return 0.0
    near = 0.0
    if layout.num_dp > 1 and layout.zero < 3:
        whole = HALF_BYTES * shape.end_numel / layout.num_tp
        near = link_of(cluster, layout, DATA).seconds(ring_bytes(whole, layout.num_dp))
    return near + link_of(cluster, layout, PIPE).seconds(tied_bytes(shape, layout))


def ring_count(layout: Layout) -> int:
    """Rings over all gradients or weights in a step.

    One ring reduces gradients and one gathers weights. Stage 2 without a pipeline has no room for sums, so it reduces
    in every micro-batch. Stage 3 also gathers in every forward and every backward.
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
    return Amplified(num_groups, total, total / cluster.network_rate)
