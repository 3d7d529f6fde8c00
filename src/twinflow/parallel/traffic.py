"""What a layout sends along each axis, and over which links.

Ranks fill machines with tensor ranks nearest to each other, data ranks next, stages furthest (`topology.py`). A group
inside a machine talks over its links. Groups that leave it share its network: a group with k ranks in a machine of n
has k/n of what the machine sends. Volumes are of a ring: all but a rank's own part, for each of scatter and gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twinflow.parallel.layout import Layout
from twinflow.parallel.shapes import Shape
from twinflow.parallel.topology import DATA, MODEL, PIPE
from twinflow.planner.machines import link_rate
from twinflow.planner.scaling import Cluster, ring_bytes

# Before the first byte of a collective arrives, inside a machine and between two: estimates.
LATENCY_S: Final = (1.0e-5, 2.5e-5)
HALF_BYTES: Final = 2  # of an activation, gradient or weight that is sent


@dataclass(frozen=True)
class Link:
    """What a group talks over."""

    crosses: bool  # machines
    rate: float  # bytes a second of one group's ring, all groups at once
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """One message or ring of so many bytes a GPU."""
        return num_bytes / self.rate + self.latency_s if num_bytes else 0.0


@dataclass(frozen=True)
class Volume:
    """Bytes that a GPU of an inner stage sends in a step."""

    tensor_bytes: float
    pipe_bytes: float  # each way
    data_bytes: float
    tied_bytes: float = 0.0  # of the first and the last stage alone: the gradient of the embedding that both have


@dataclass(frozen=True)
class Amplified:
    """Data groups reduce side by side: what they reach together, beside one machine's network."""

    num_groups: int
    total_rate: float  # bytes a second of all groups
    times: float  # what one machine sends


def group_span(layout: Layout, axis: str) -> tuple[int, int]:
    """Distance between neighbours of a group, and ranks from its first to behind its last."""
    stride, size = {
        MODEL: (1, layout.num_tp),
        DATA: (layout.num_tp, layout.num_dp),
        PIPE: (layout.num_tp * layout.num_dp, layout.num_pp),
    }[axis]
    return stride, stride * size


def link_of(cluster: Cluster, layout: Layout, axis: str) -> Link:
    """The link of an axis; `map_ranks` says the same rank by rank."""
    per_node, links = cluster.machine.num_gpus, link_rate(cluster.machine)
    stride, span = group_span(layout, axis)
    if stride == span or layout.world <= per_node or (span <= per_node and per_node % span == 0):
        return Link(False, links, LATENCY_S[0])
    # Of a machine that holds several stages only the ranks of one send to the next machine.
    members = max(1, min(per_node, span) // stride)
    sharing = min(per_node, stride) if axis == PIPE else per_node / members
    return Link(True, min(links, cluster.network_rate / sharing), LATENCY_S[1])


def activation_bytes(shape: Shape, layout: Layout) -> int:
    """Of a micro-batch between two layers."""
    return HALF_BYTES * shape.sequence * layout.micro_batch * shape.hidden


def reduces_a_layer(checkpointing: bool) -> int:
    """All-reduces of a layer between tensor ranks: two in forward, two in backward, two where forward runs again."""
    return 6 if checkpointing else 4


def volume_of(shape: Shape, layout: Layout, grad_bits: float = 16.0) -> Volume:
    """Bytes a GPU sends in a step, layers divided evenly. `grad_bits`: fewer with compressed gradients and weights."""
    kept, m = activation_bytes(shape, layout), layout.num_micro_batches
    reduced = 2.0 * ring_bytes(kept, layout.num_tp)
    tensor = reduces_a_layer(layout.checkpointing) * reduced * m * shape.num_layers / layout.num_pp
    pipe = kept * m * layout.num_chunks / layout.kept_by if layout.num_pp > 1 else 0.0
    numel = shape.numel / (layout.num_pp * layout.num_tp)
    data = ring_count(layout) * ring_bytes(numel * grad_bits / 8.0, layout.num_dp)
    return Volume(tensor, pipe, data, tied_bytes(shape, layout))


def tied_bytes(shape: Shape, layout: Layout) -> float:
    """What the two ranks that have an embedding and its copy send each other in a step: the share of a replica."""
    if not layout.ties_ranks:
        return 0.0
    return 2.0 * ring_bytes(HALF_BYTES * shape.end_numel / layout.num_tp / layout.num_dp, 2)


def tied_seconds(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """Replicas sum that gradient first, but where stage 3 has done so; then the two stages do."""
    if not layout.ties_ranks:
        return 0.0
    near = 0.0
    if layout.num_dp > 1 and layout.zero < 3:
        whole = HALF_BYTES * shape.end_numel / layout.num_tp
        near = link_of(cluster, layout, DATA).seconds(ring_bytes(whole, layout.num_dp))
    return near + link_of(cluster, layout, PIPE).seconds(tied_bytes(shape, layout))


def ring_count(layout: Layout) -> int:
    """Rings over all gradients or weights in a step.

    One reduces gradients and one gathers weights. Stage 2 without a pipeline has no room for sums, so it reduces in
    every micro-batch; stage 3 gathers for every forward and every backward too.
    """
    if layout.num_dp == 1:
        return 0
    m = layout.num_micro_batches
    if layout.zero == 3:
        return 3 * m
    return m + 1 if layout.reduces_each else 2


def amplified(cluster: Cluster, layout: Layout) -> Amplified:
    """All data groups at once: as many as there are stages times tensor ranks."""
    num_groups = layout.num_pp * layout.num_tp
    total = num_groups * link_of(cluster, layout, DATA).rate
    return Amplified(num_groups, total, total / cluster.network_rate)
