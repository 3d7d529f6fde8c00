"""Bytes of one rank of a layout: what our engine holds on a GPU, and the arithmetic of published tables beside it.

The engine, for half precision weights (bf16) and Adam, a parameter:

    weights     2
    sums        4   of several micro-batches in fp32, on every data rank of a pipeline; with ZeRO-3 of a rank's rows
    gradients   2   that wait for the norm of all, of a rank's own part from ZeRO-1 on
    state      10   beside the weight, which is the upper half of its master; of a rank's own part from ZeRO-1 on

With offload the state is on the host (12 bytes there). Published tables have 2 + 2 + 12 and share gradients from ZeRO-2
on: `Layout.published` counts so.

Beside that at once: activations of micro-batches under way, and the largest of four moments: the backward of a layer
(which runs again before, with checkpointing), the loss, the embedding's gradient, and the sum of a tied embedding's
gradients over the two stages that have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from twinflow.loss import LOSS_CHUNK, PRODUCT_ROWS
from twinflow.offload.plan import BUCKET_NUMEL
from twinflow.offload.settings import FLAT_BYTES
from twinflow.parallel.layout import Layout, rank_layers, stage_layers
from twinflow.parallel.schedules import Schedule, make_schedule, peak_in_flight, stages_of
from twinflow.parallel.shapes import Shape
from twinflow.parallel.traffic import activation_bytes
from twinflow.planner.scaling import SCATTERS

HALF, WIDE = 2.0, 4.0  # bytes of a number
WEIGHT, GRADIENT, STATE = 2.0, 2.0, 12.0  # bytes a parameter, mixed precision and Adam, as published
OWN_STATE: Final = 10.0  # ... that our engine keeps beside the weight; on the host 12
LOGIT_BYTES: Final = 6  # half precision, and fp32 for the loss
WORKSPACE: Final = float(64 << 20)  # that libraries take for matrix products


@dataclass(frozen=True)
class StateBytes:
    """A rank's share of weights, gradients and optimizer state."""

    weights: float
    gradients: float  # sums too
    states: float
    host_states: float = 0.0

    @property
    def gpu_bytes(self) -> float:
        """On the GPU."""
        return self.weights + self.gradients + self.states


@dataclass(frozen=True)
class RankBytes:
    """What one rank has."""

    rank: int
    state: StateBytes
    activations: float  # kept for backward
    working: float  # at the largest moment: a layer at work, the loss, or gradients of the embedding
    staging: float  # gradients and weights that are whole for a moment
    workspace: float = 0.0

    @property
    def gpu_bytes(self) -> float:
        """All of it."""
        return self.state.gpu_bytes + self.activations + self.working + self.staging + self.workspace


def state_bytes(numel: float, zero: int, num_dp: int, offload: bool = False) -> StateBytes:
    """As published, of `numel` parameters that a data group has: 1 shares state, 2 gradients too, 3 weights too."""
    weights = WEIGHT * numel / (num_dp if zero >= 3 else 1)
    gradients = GRADIENT * numel / (num_dp if zero >= 2 else 1)
    states = STATE * numel / (num_dp if zero >= 1 else 1)
    return StateBytes(weights, gradients, 0.0, states) if offload else StateBytes(weights, gradients, states)


def held_bytes(numel: float, layout: Layout) -> StateBytes:
    """As our engine has them."""
    part = numel / (layout.num_dp if layout.zero >= 1 else 1)
    whole = part if layout.zero == 3 else numel
    sums = host = 0.0
    if layout.num_micro_batches > 1:
        # Without stages only one micro-batch is under way: its gradients can go to their owner, or to the host.
        sums = WIDE * (part if layout.num_pp == 1 and layout.zero == 2 else whole)
        if layout.num_pp == 1 and layout.offload:
            sums, host = 0.0, WIDE * part
    gradients = sums + GRADIENT * part
    if layout.offload:
        return StateBytes(WEIGHT * whole, gradients, 0.0, STATE * part + host)
    return StateBytes(WEIGHT * whole, gradients, OWN_STATE * part)


def layer_bytes(shape: Shape, layout: Layout) -> float:
    """What one layer keeps of a micro-batch for its backward, on a tensor rank, without checkpointing.

    32 bytes a token and unit of width: inputs of both norms and of what follows them (8), which tensor ranks may share;
    q, k, v, what attention gives, and both sides of the activation (24), which they always do. Statistics of norms and
    heads; five a score where attention keeps those. As published: two bytes of dropout masks instead of statistics.
    """
    tokens = shape.sequence * layout.micro_batch
    units = tokens * shape.hidden
    scores = 5.0 * shape.num_heads * shape.sequence / shape.hidden if shape.keeps_scores else 0.0
    if layout.published:
        return units * (10.0 / layout.kept_by + (24.0 + scores) / layout.num_tp)
    statistics = WIDE * tokens * (4.0 / layout.kept_by + shape.num_heads / layout.num_tp)
    return units * (8.0 / layout.kept_by + (24.0 + scores) / layout.num_tp) + statistics


def kept_bytes(shape: Shape, layout: Layout) -> float:
    """What one layer keeps of a micro-batch: with checkpointing its input alone."""
    if layout.checkpointing:
        return activation_bytes(shape, layout) / layout.kept_by
    return layer_bytes(shape, layout)


def put_off_bytes(shape: Shape, layout: Layout) -> float:
    """What a layer leaves between the two halves of a backward: inputs and outputs' gradients of its products."""
    units = shape.sequence * layout.micro_batch * shape.hidden
    return units * (8.0 / layout.kept_by + 24.0 / layout.num_tp)


@lru_cache(maxsize=4096)
def most_held(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[tuple[int, int], ...]:
    """Of a ZBV rank: pairs of a stage and a micro-batch between F and I, and between I and W, at the moments that can
    be the largest."""
    kept = deferred = 0
    most = dict[int, int]()  # deferred, by kept
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
    """Further micro-batches than these only repeat the middle."""
    return make_schedule("zbv", num_ranks, num_micro_batches)


def in_flight_bytes(shape: Shape, layout: Layout, rank: int, layers: int) -> float:
    """Activations of all micro-batches under way, at the most; the rank's chunks are taken as equal."""
    p, m, v = layout.num_pp, layout.num_micro_batches, layout.num_chunks
    a_chunk = layers / v
    kept = a_chunk * kept_bytes(shape, layout)
    if layout.schedule == "zbv" and not layout.published and layout.zero < 3:
        put_off = a_chunk * put_off_bytes(shape, layout)
        return max(held * kept + deferred * put_off for held, deferred in most_held(rank, p, m))
    return peak_in_flight(layout.schedule, rank, p, m, v) * kept


def rank_bytes(shape: Shape, layout: Layout, rank: int) -> RankBytes:
    """One pipeline rank: its layers, its end of the model, its micro-batches in flight."""
    p = layout.num_pp
    stages = stages_of(rank, p, layout.num_chunks, layout.placement)
    counts = stage_layers(shape, layout)
    layers = sum(counts[stage] for stage in stages)
    is_first, is_last = 0 in stages, layout.num_stages - 1 in stages
    end = (is_first or is_last) * shape.end_numel / layout.num_tp  # the head is a copy of it on another rank
    numel = layers * shape.layer_numel / layout.num_tp + end
    activations = in_flight_bytes(shape, layout, rank, layers)
    if layout.published:
        state = state_bytes(numel, layout.zero, layout.num_dp, layout.offload)
        return RankBytes(rank, state, activations, _published_work(shape, layout, is_last), _gathered(shape, layout))
    ends = Ends(is_first, is_last, end, layout.ties_ranks and bool(end))
    working = max(0.0, *(bytes - activations for bytes in moments(shape, layout, layers, ends, activations)))
    tied = WIDE * end if ends.is_tied else 0.0
    staging = _staging(shape, layout, end, layers if rank else layers / layout.num_chunks)
    return RankBytes(rank, held_bytes(numel, layout), activations, tied + working, staging, WORKSPACE)


@dataclass(frozen=True)
class Ends:
    """What a rank has of the model's ends."""

    is_first: bool
    is_last: bool
    numel: float  # of the embedding, or of its copy
    is_tied: bool  # another rank has the copy


def moments(shape: Shape, layout: Layout, layers: int, ends: Ends, activations: float) -> list[float]:
    """Activations and what comes to them, at each moment that can be the largest. See the module's text.

    In the backward of a layer: the gradient that comes, that of the wide side of the activation, and a weight's. The
    loss keeps the gradients of its input and of the head, the latter in fp32 and in backward in half precision beside
    that; and some rows of logits and of the head's gradient. Of the embedding's gradient micro-batches are through that
    have made it. The sum over stages has what this rank gives in half precision beside the sum over micro-batches, and
    then without that its share, the sum of shares, and that to travel.
    """
    tokens = shape.sequence * layout.micro_batch
    stream, tp = HALF * tokens * shape.hidden, layout.num_tp
    again = layer_bytes(shape, layout) - kept_bytes(shape, layout) if layout.checkpointing else 0.0
    weight = HALF * 4.0 * shape.hidden**2 / tp
    found = [activations + again + stream + 4.0 * stream / tp + weight]
    if ends.is_last:
        at_once = min(tokens, LOSS_CHUNK)
        logits = (1 if tokens <= LOSS_CHUNK else 2) * LOGIT_BYTES * at_once * shape.vocab_size / tp
        rows = WIDE * min(PRODUCT_ROWS, shape.vocab_size / tp) * shape.hidden
        kept = 2.0 * stream + WIDE * ends.numel  # the norm's output and its gradient
        others = (layout.num_micro_batches - 1) * (kept + stream) if layout.schedule == "gpipe" else 0.0
        found += [activations + stream + others + kept + max(logits + rows, 3.0 * stream + HALF * ends.numel)]
    if ends.is_first:
        one = layers / layout.num_chunks * kept_bytes(shape, layout)
        found += [activations - one + stream + HALF * ends.numel]
    if ends.is_tied:
        found += [HALF * ends.numel, HALF * ends.numel * (1.0 + 3.0 / layout.num_dp) - WIDE * ends.numel]
    return found


def _staging(shape: Shape, layout: Layout, end: float, open_layers: float) -> float:
    """Whole buckets of a layer and of the embedding on their way to other data ranks, and one that comes back.

    With ZBV those of `open_layers` at once: they are begun in I, with the gradients of biases, and complete in W.
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
    """Whole layers that ZeRO-2 and 3 have for a moment."""
    layer = shape.layer_numel / layout.num_tp
    staging = SCATTERS * layer * ((GRADIENT if layout.zero >= 2 else 0.0) + (WEIGHT if layout.zero >= 3 else 0.0))
    return staging if layout.num_dp > 1 else 0.0


def _published_work(shape: Shape, layout: Layout, is_last: bool) -> float:
    """One layer at work, or all logits."""
    working = layer_bytes(shape, layout) * (2.0 if layout.checkpointing else 1.0)
    logits = LOGIT_BYTES * shape.sequence * layout.micro_batch * shape.vocab_size / layout.num_tp
    return max(working, logits) if is_last else working


def fullest_rank(shape: Shape, layout: Layout) -> RankBytes:
    """The first rank, the last, or one between: of those with as many layers the first has most in flight, and the last
    has most of what ZBV puts off."""
    inner = list(enumerate(rank_layers(shape, layout)))[1:-1]
    last = {count: rank for rank, count in inner}
    first = {count: rank for rank, count in reversed(inner)}
    ranks = {0, layout.num_pp - 1, *first.values(), *last.values()}
    return max((rank_bytes(shape, layout, rank) for rank in sorted(ranks)), key=lambda found: found.gpu_bytes)
