# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank with given numbers of pipeline, tensor and data ranks (a layout): as twinflow's engine allocates
it, and as published tables compute it.

Bytes of the engine for each parameter, with bf16 weights and Adam:

    weights     2
    sums        4   fp32 sums over micro-batches, on every data rank of a pipeline; with ZeRO-3 its own part
    gradients   2   gradients that wait for the global norm; from ZeRO-1 on only the rank's own part
    state      10   without the bf16 weight, which is the upper half of its master; from ZeRO-1 on the rank's own part

With offload the state is on the host and has 12 bytes there. Published tables count 2 + 2 + 12 bytes and shard the
gradients from ZeRO-2 on. `Layout.published` selects this arithmetic.

A rank also needs memory for the activations of micro-batches in flight, and for the largest of four temporary peaks:
the backward of a layer (with checkpointing after its recomputation), the loss, the gradient of the embedding, and the
sum of a tied embedding's gradients over the two stages that have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from twinflow.loss import LOSS_CHUNK, PRODUCT_ROWS
from twinflow.parallel.layout import Layout, rank_layers, stage_layers, stream_bytes
from twinflow.parallel.schedules import Schedule, make_schedule, peak_in_flight, stages_of
from twinflow.parallel.shapes import Shape
from twinflow.planner.costs import BUCKET_NUMEL, FLAT_BYTES
from twinflow.planner.formats import WEIGHT_BYTES, block_bytes, state_bytes
from twinflow.planner.scaling import SCATTERS

HALF, WIDE = 2.0, 4.0  # bytes of a number in half precision and in fp32
WEIGHT = GRADIENT = float(WEIGHT_BYTES["bf16"])  # bytes for each parameter
STATE: Final = state_bytes("fp32").host  # bytes of Adam's state for each parameter, on the host and in published tables
OWN_STATE: Final = state_bytes("fp32").resident  # bytes for each parameter on the GPU, without the weight
LOGIT_BYTES: Final = 6  # half precision, and fp32 for the loss
WORKSPACE: Final = float(64 << 20)  # memory that libraries allocate for matrix products


@dataclass(frozen=True)
class RankState:
    weights: float
    gradients: float  # including sums over micro-batches
    states: float  # optimizer state on the GPU
    host_states: float = 0.0  # optimizer state on the host

    @property
    def gpu_bytes(self) -> float:
        return self.weights + self.gradients + self.states


@dataclass(frozen=True)
class RankBytes:
    """GPU memory of one rank by kind."""

    rank: int
    state: RankState
    activations: float  # activations kept for backward
    working: float  # largest temporary peak: a layer's backward, the loss, or gradients of the embedding
    staging: float  # unsharded gradients and weights
    workspace: float = 0.0

    @property
    def gpu_bytes(self) -> float:
        return self.state.gpu_bytes + self.activations + self.working + self.staging + self.workspace


def published_bytes(numel: float, zero: int, num_dp: int, offload: bool = False) -> RankState:
    """Bytes of `numel` parameters as published tables count them: stage 1 shards the state, 2 also gradients, 3 also
    weights."""
    weights = WEIGHT * numel / (num_dp if zero >= 3 else 1)
    gradients = GRADIENT * numel / (num_dp if zero >= 2 else 1)
    states = STATE * numel / (num_dp if zero >= 1 else 1)
    return RankState(weights, gradients, 0.0, states) if offload else RankState(weights, gradients, states)


def held_bytes(numel: float, layout: Layout) -> RankState:
    """Bytes of `numel` parameters as twinflow's engine allocates them."""
    part = numel / (layout.num_dp if layout.zero >= 1 else 1)
    whole = part if layout.zero == 3 else numel
    sums = host = 0.0
    if layout.num_micro_batches > 1:
        # Without a pipeline one micro-batch is in flight: its gradients can go to their owner or to the host.
        sums = WIDE * (part if layout.num_pp == 1 and layout.zero == 2 else whole)
        if layout.num_pp == 1 and layout.offload:
            sums, host = 0.0, WIDE * part
    gradients = sums + GRADIENT * part
    if layout.offload:
        return RankState(WEIGHT * whole, gradients, 0.0, STATE * part + host)
    return RankState(WEIGHT * whole, gradients, OWN_STATE * part)


def layer_bytes(shape: Shape, layout: Layout) -> float:
    """Activations that one layer keeps of a micro-batch on a tensor rank, without checkpointing.

    If attention keeps its scores, each score adds 5 bytes. Published tables count 2 bytes of dropout masks for each
    token and hidden unit, but not the statistics of norms and attention.
    """
    tokens, whole, parts = shape.sequence * layout.micro_batch, layout.kept_by, layout.num_tp
    scores = 5.0 * shape.num_heads * shape.sequence / parts if shape.keeps_scores else 0.0
    if layout.published:
        return tokens * (shape.hidden * (10.0 / whole + 24.0 / parts) + scores)
    return tokens * (block_bytes(shape.hidden, shape.num_heads, kept_by=whole, num_tp=parts) + scores)


def kept_bytes(shape: Shape, layout: Layout) -> float:
    """Activations that one layer keeps of a micro-batch. With checkpointing: only its input."""
    if layout.checkpointing:
        return stream_bytes(shape, layout) / layout.kept_by
    return layer_bytes(shape, layout)


def put_off_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes that a layer keeps between the two halves of its backward, I (input gradients) and W (weight gradients):
    the inputs of its matrix products and the gradients of their outputs.
    """
    units = shape.sequence * layout.micro_batch * shape.hidden
    return units * (8.0 / layout.kept_by + 24.0 / layout.num_tp)


@lru_cache(maxsize=4096)
def most_held(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Possible memory peaks of a rank with the ZBV schedule. A peak is the number of (stage, micro-batch) pairs between
    the actions F (forward) and I (input gradients), and the number between I and W (weight gradients).
    """
    kept = deferred = 0
    most = dict[int, int]()  # largest number of pairs between I and W, by the number of pairs between F and I
    for action in _zbv(num_ranks, min(num_micro_batches, 2 * num_ranks + 1)).actions[rank]:
        kept += {"F": 1, "I": -1}.get(action.kind, 0)
        deferred += {"I": 1, "W": -1}.get(action.kind, 0)
        most[kept] = max(deferred, most.get(kept, 0))
    found: list[tuple[int, int]] = []
    for held in sorted(most, reverse=True):
        if not found or most[held] > found[-1][1]:
            found.append((held, most[held]))
    return tuple(found)


@lru_cache(maxsize=32)
def _zbv(num_ranks: int, num_micro_batches: int) -> Schedule:
    """A ZBV schedule that is long enough to contain all peaks. With more micro-batches only its middle would repeat."""
    return make_schedule("zbv", num_ranks, num_micro_batches)


def in_flight_bytes(shape: Shape, layout: Layout, rank: int, layers: int) -> float:
    """Peak of the activations of all micro-batches in flight. The chunks of a rank are assumed to be equal."""
    p, m, v = layout.num_pp, layout.num_micro_batches, layout.num_chunks
    a_chunk = layers / v
    kept = a_chunk * kept_bytes(shape, layout)
    if layout.schedule == "zbv" and not layout.published and layout.zero < 3:
        put_off = a_chunk * put_off_bytes(shape, layout)
        return max(held * kept + deferred * put_off for held, deferred in most_held(rank, p, m))
    return peak_in_flight(layout.schedule, rank, p, m, v) * kept


def rank_bytes(shape: Shape, layout: Layout, rank: int) -> RankBytes:
    """Memory of one pipeline rank: its layers, its embedding or head if any, and its micro-batches in flight."""
    p = layout.num_pp
    stages = stages_of(rank, p, layout.num_chunks, layout.placement)
    counts = stage_layers(shape, layout)
    layers = sum(counts[stage] for stage in stages)
    is_first, is_last = 0 in stages, layout.num_stages - 1 in stages
    # If the head is tied, another rank has a copy of the embedding.
    end = shape.ends_numel(is_first, is_last) / layout.num_tp
    one_end = shape.end_numel / layout.num_tp
    numel = layers * shape.layer_numel / layout.num_tp + end
    activations = in_flight_bytes(shape, layout, rank, layers)
    if layout.published:
        state = published_bytes(numel, layout.zero, layout.num_dp, layout.offload)
        return RankBytes(rank, state, activations, _published_work(shape, layout, is_last), _gathered(shape, layout))
    is_tied = layout.ties_ranks(shape) and bool(end)
    peaks = _peaks(shape, layout, layers, activations, is_first * one_end, is_last * one_end, is_tied)
    working = max(0.0, *(peak - activations for peak in peaks))
    tied = WIDE * end if is_tied else 0.0
    staging = _staging(shape, layout, end, layers if rank else layers / layout.num_chunks)
    return RankBytes(rank, held_bytes(numel, layout), activations, tied + working, staging, WORKSPACE)


def _peaks(
    shape: Shape, layout: Layout, layers: int, activations: float, first_numel: float, last_numel: float, is_tied: bool
) -> list[float]:
    """Activations plus temporary memory at each possible peak (see the module's docstring).

    `first_numel`, `last_numel`: parameters of the embedding and of the head, if the rank has them. `is_tied`: another
    rank has a copy.

    At the backward of a layer, the memory holds the gradient of its output, the gradient of the inner MLP activations,
    and the gradient of a weight. At its end, it holds the gradients of all weights of the layer, of queries, keys and
    values, and of the input of the layer.

    The loss keeps the gradients of its input and of the head. The head's gradient is in fp32, and in backward also in
    half precision. The loss also needs memory for some rows of logits and of the head's gradient.

    At the gradient of the embedding, the activations of its micro-batch are already freed.

    At the sum of a tied gradient over stages, the memory holds this rank's gradient in half precision beside its sum
    over micro-batches. Later that sum is freed, and the memory holds this rank's share, the sum of the shares, and a
    send buffer.
    """
    tokens = shape.sequence * layout.micro_batch
    stream, tp = HALF * tokens * shape.hidden, layout.num_tp
    again = layer_bytes(shape, layout) - kept_bytes(shape, layout) if layout.checkpointing else 0.0
    weight = HALF * 4.0 * shape.hidden**2 / tp
    gradients = HALF * shape.layer_numel / tp
    found = [activations + again + stream + 4.0 * stream / tp + weight, activations + stream + 4.0 * stream + gradients]
    if last_numel:
        at_once = min(tokens, LOSS_CHUNK)
        logits = (1 if tokens <= LOSS_CHUNK else 2) * LOGIT_BYTES * at_once * shape.vocab_size / tp
        rows = WIDE * min(PRODUCT_ROWS, shape.vocab_size / tp) * shape.hidden
        kept = 2.0 * stream + WIDE * last_numel  # output of the norm and its gradient
        others = (layout.num_micro_batches - 1) * (kept + stream) if layout.schedule == "gpipe" else 0.0
        found += [activations + stream + others + kept + max(logits + rows, 3.0 * stream + HALF * last_numel)]
    if first_numel:
        one = layers / layout.num_chunks * kept_bytes(shape, layout)
        found += [activations - one + stream + HALF * first_numel]
    if is_tied:
        end = first_numel or last_numel
        found += [HALF * end, HALF * end * (1.0 + 3.0 / layout.num_dp) - WIDE * end]
    return found


def _staging(shape: Shape, layout: Layout, end: float, open_layers: float) -> float:
    """Unsharded buckets of a layer and of the embedding during their reduction, and one bucket of gathered weights.

    With ZBV the buckets of `open_layers` layers exist at once. They are allocated in the input half I of backward,
    which computes the gradients of biases. They are complete after the weight half W.
    """
    if layout.num_dp == 1:
        return 0.0
    if layout.zero == 3:
        return _gathered(shape, layout)
    layer = shape.layer_numel / layout.num_tp
    bucket = HALF * min(layer, BUCKET_NUMEL)
    if layout.schedule == "zbv":
        return HALF * (open_layers * layer + end) + bucket
    return min(float(FLAT_BYTES), HALF * (layer + end)) + bucket


def _gathered(shape: Shape, layout: Layout) -> float:
    """Bytes of unsharded gradients (ZeRO-2 and 3) and weights (ZeRO-3) that exist temporarily."""
    layer = shape.layer_numel / layout.num_tp
    staging = SCATTERS * layer * ((GRADIENT if layout.zero >= 2 else 0.0) + (WEIGHT if layout.zero >= 3 else 0.0))
    return staging if layout.num_dp > 1 else 0.0


def _published_work(shape: Shape, layout: Layout, is_last: bool) -> float:
    """The activations of one layer, twice with checkpointing. `is_last`: all logits instead if they are larger."""
    working = layer_bytes(shape, layout) * (2.0 if layout.checkpointing else 1.0)
    logits = LOGIT_BYTES * shape.sequence * layout.micro_batch * shape.vocab_size / layout.num_tp
    return max(working, logits) if is_last else working


def fullest_rank(shape: Shape, layout: Layout) -> RankBytes:
    """The rank that needs the most GPU memory.

    The candidates are the first and the last rank. Of the other ranks with the same number of layers, the first one has
    the most micro-batches in flight, and the last one has the most deferred gradients with ZBV. Both are candidates.
    """
    inner = list(enumerate(rank_layers(shape, layout)))[1:-1]
    last = {count: rank for rank, count in inner}
    first = {count: rank for rank, count in reversed(inner)}
    ranks = {0, layout.num_pp - 1, *first.values(), *last.values()}
    return max((rank_bytes(shape, layout, rank) for rank in sorted(ranks)), key=lambda found: found.gpu_bytes)
