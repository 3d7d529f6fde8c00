"""Bytes and seconds of a run, from numbers alone: by kind on the GPU and on the host, and the items of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from twinflow.planner.formats import WEIGHT_BYTES, StateBytes, state_bytes
from twinflow.planner.models import ModelCost, activation_bytes
from twinflow.planner.placement import Room, at_ratio
from twinflow.planner.rates import Rates
from twinflow.planner.simulate import NUM_STAGES, PLACES, ClipDecision, Item, Timing, Ways

BUCKET_NUMEL: Final = 1 << 26  # as the runtime's
FLAT_BYTES: Final = 3 << 29
NUM_SLOTS: Final = 4
PROCESS_BYTES: Final = 3 * 10**9  # interpreter, torch, CUDA's host side: measured 2 to 5 GB
_LOOSE_BYTES: Final = 6 * 10**8  # small things that grow with training: measured -0.7 to 2 GB
GPU_RESERVE: Final = 0.02  # share that placing state leaves free: gaps between tensors
HOST_RESERVE: Final = 0.03  # the rest of the machine lives too
_FLATS_OUT: Final = 6  # device buffers in use where each gradient leaves at once
BACKWARD: Final = 1.83  # backward takes so many forwards, measured 1.77 to 1.86; one more where all is computed again
GPU_KINDS: Final = ("weights", "gradients", "state", "activations", "staging")
HOST_KINDS: Final = ("state", "gradients", "shadows", "rings", "process")


@dataclass(frozen=True)
class Memory:
    """What there is: on a card, and on the host that all cards of the machine share."""

    gpu_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Run:
    """What is to be trained, and how."""

    model: ModelCost
    batch: int  # sequences of a micro-batch, on each GPU
    tokens: int  # of a sequence
    micro_batches: int = 1
    states: str = "fp32"
    clips: bool = True  # a norm, or a loss scale, decides whether a step counts
    delayed: bool = False
    checkpointing: bool = True
    weights: str = "bf16"
    world: int = 1  # GPUs that share the optimizer state, all in one machine
    stage: int = 0  # of ZeRO: 1 and 2 share state, 3 the weights as well
    tensor_parallel: int = 1  # GPUs that share every weight
    num_moments: int = 2  # of the update rule: AdamW's

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all GPUs."""
        return self.batch * self.tokens * self.micro_batches * (self.world // self.tensor_parallel)

    @property
    def size(self) -> StateBytes:
        """Bytes a parameter of state."""
        return state_bytes(self.states, self.weights, self.delayed, self.num_moments)

    @property
    def numel(self) -> int:
        """Elements whose weights a GPU works with."""
        return -(-self.model.numel // self.tensor_parallel)

    @property
    def own_numel(self) -> int:
        """Elements whose state one GPU answers for."""
        return -(-self.model.numel // self.world)


@dataclass(frozen=True)
class Placed:
    """Elements of state of one GPU by place."""

    host: int
    resident: int = 0
    streamed: int = 0


@dataclass(frozen=True)
class Bytes:
    """On one GPU, and on the host for all of them, by kind."""

    gpu: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def gpu_total(self) -> int:
        """All kinds."""
        return sum(self.gpu.values())

    @property
    def host_total(self) -> int:
        """All kinds."""
        return sum(self.host.values())

    def missing(self, memory: Memory) -> Memory:
        """What there is too little of; zeros where the run fits."""
        return Memory(max(0, self.gpu_total - memory.gpu_bytes), max(0, self.host_total - memory.host_bytes))


def bytes_of(run: Run, placed: Placed, memory: Memory) -> Bytes:
    """What the runtime allocates, with the choices it makes where memory is short."""
    width, size = WEIGHT_BYTES[run.weights], run.size
    weights = _weight_bytes(run)
    resident = int(placed.resident * size.resident)
    staging = int(min(placed.streamed, NUM_STAGES * bucket_numel(run)) * size.streamed)
    grads = gradient_plan(run, placed, max(0, memory.gpu_bytes - weights))
    gpu = {
        "weights": weights,
        "gradients": grads.gpu_bytes,
        "state": resident,
        "activations": activation_bytes(run.model, run.batch * run.tokens, run.checkpointing) // run.tensor_parallel,
        "staging": staging,
    }
    slot = bucket_numel(run) * width
    slots = NUM_SLOTS * slot * (1 + (run.weights == "fp16"))  # bf16 and fp32 weights go back from the state itself
    host = {
        "state": int(placed.host * size.host + placed.streamed * size.streamed),
        "gradients": grads.host_bytes,
        "shadows": 0,
        "rings": min(slots, 2 * placed.host * width) if not (grads.holds_on_host or run.delayed) else 0,
        "process": PROCESS_BYTES + _LOOSE_BYTES,
    }
    host = {kind: count * run.world for kind, count in host.items()}
    if run.clips and not run.delayed and not grads.sums_on_host:
        spare = max(0, memory.host_bytes - sum(host.values())) // 2
        host["shadows"] = min(spare, int(placed.host * size.host) * run.world)
    return Bytes(gpu, host)


@dataclass(frozen=True)
class GradientPlan:
    """Where gradients wait."""

    gpu_bytes: int
    host_bytes: int
    holds_on_host: bool
    sums_on_host: bool


def gradient_plan(run: Run, placed: Placed, free_bytes: int) -> GradientPlan:
    """Gradients on the GPU and on the host: on the GPU where they take at most half of what is free."""
    width, own = WEIGHT_BYTES[run.weights], run.own_numel
    all_bytes, off = width * own, placed.host
    flat = min(FLAT_BYTES, free_bytes // 8, all_bytes)
    waits = run.clips or run.delayed
    sums = 4 * own if run.micro_batches > 1 else 0
    if sums > free_bytes // 2:
        return GradientPlan(flat + 4 * placed.resident, 4 * off, False, True)
    if not waits:
        return GradientPlan(sums + flat, 0, False, False)
    if all_bytes > free_bytes // 2 or run.delayed:
        few = min(flat, _FLATS_OUT * bucket_numel(run) * width)
        return GradientPlan(sums + few + width * placed.resident, width * off, True, False)
    return GradientPlan(sums + all_bytes, 0, False, False)


def _weight_bytes(run: Run) -> int:
    """On one GPU; with stage 3 its share, and the blocks that are gathered at a time: this one and the next."""
    width = WEIGHT_BYTES[run.weights]
    if run.stage < 3 or run.world == 1:
        return width * run.numel
    largest = max(run.model.blocks, default=0) // run.tensor_parallel
    return width * (run.own_numel + 2 * largest)


def bucket_numel(run: Run) -> int:
    """Elements of the largest bucket."""
    sizes = [*run.model.blocks[:1], run.model.embedding_numel + run.model.head_numel]
    return max((_even(-(-size // run.world)) for size in sizes if size), default=0)


def _even(numel: int) -> int:
    """Elements of a bucket where `numel` are cut into as few equal ones as there must be."""
    return -(-numel // max(1, -(-numel // BUCKET_NUMEL)))


def room_of(run: Run, memory: Memory) -> Room:
    """What weights, activations, gradients, rings and the process leave to state; below zero where they do not fit.

    Gradients are counted as if all state were on the host: with more of it on the GPU there are no more of them.
    """
    base = bytes_of(run, Placed(run.own_numel), memory)
    gpu = int(memory.gpu_bytes * (1.0 - GPU_RESERVE)) - base.gpu_total
    host = int(memory.host_bytes * (1.0 - HOST_RESERVE)) - (base.host_total - base.host["state"] - base.host["shadows"])
    return Room(gpu, host // run.world)


def placing_size(run: Run, memory: Memory) -> StateBytes:
    """Bytes a parameter that a place costs, against `room_of`.

    Resident state keeps its gradients on the GPU, also where those of the host's state wait in host memory.
    """
    grads = gradient_plan(run, Placed(run.own_numel), max(0, memory.gpu_bytes - _weight_bytes(run)))
    beside = 4 if grads.sums_on_host else WEIGHT_BYTES[run.weights] if grads.holds_on_host else 0
    return replace(run.size, resident=run.size.resident + beside)


def fits(run: Run, memory: Memory) -> bool:
    """Whether there is any share on the host with which the run fits."""
    room, size = room_of(run, memory), placing_size(run, memory)
    resident = min(run.own_numel, room.gpu_bytes / size.resident)
    return room.gpu_bytes >= 0 and (run.own_numel - resident) * size.host <= room.host_bytes


def clip_decision_of(run: Run, used: Bytes) -> ClipDecision:
    """What may run ahead of the norm: as much as the speculative stores hold."""
    ahead = int(used.host["shadows"] / run.world / run.size.host) if used.host["shadows"] else 0
    return ClipDecision(run.clips, ahead)


def ways_of(run: Run) -> Ways:
    """What travels."""
    width = float(WEIGHT_BYTES[run.weights])
    return Ways(grad_bytes=width, weight_bytes=width, num_slots=NUM_SLOTS, delayed=run.delayed)


def timing_of(run: Run, rates: Rates, link_rate: float = 0.0) -> Timing:
    """Forward and backward of a micro-batch: matrix products, memory traffic beside them, and talk between GPUs."""
    model, num_tokens, parts = run.model, run.batch * run.tokens, run.tensor_parallel
    products = num_tokens * model.forward_flops(run.tokens) / rates.flops
    traffic = num_tokens * model.traffic_bytes * len(model.blocks) / rates.device_bytes
    forward = max((products + traffic) / parts, len(model.blocks) * model.launch_s)
    backward = forward * (BACKWARD + (1.0 if run.checkpointing else 0.0))
    if run.world > 1 and link_rate:
        # Weights are gathered in forward (stage 3: in backward too), gradients scattered in backward, beside compute.
        share = WEIGHT_BYTES[run.weights] * run.numel * (run.world - 1) / run.world / link_rate
        forward = max(forward, share)
        backward = max(backward, share * (2 if run.stage == 3 else 1))
    return Timing(forward, backward, run.micro_batches)


def items_of(run: Run, timing: Timing) -> list[Item]:
    """The buckets of one GPU, all on the host: when gradients are complete and when weights are needed.

    Within a block the parameters that come last have their gradients first; its weights are needed when it starts.
    """
    model, flops = run.model, run.model.block_flops(run.tokens)
    head = 2.0 * model.head_products
    total = sum(flops) + head
    items = _root_items(run, timing, head / total)
    before = 0.0
    for numel, cost in zip(model.blocks, flops, strict=True):
        need = timing.forward_s * before / total
        end = timing.backward_s * (1.0 - before / total)
        length = timing.backward_s * cost / total
        own = -(-numel // run.world)
        count = max(1, -(-own // BUCKET_NUMEL))
        # With checkpointing the first third of a block's backward computes it again and makes no gradient.
        span = length * (0.65 if run.checkpointing else 1.0)
        items += [Item(_even(own), "host", end - span * k / count, need) for k in range(count)]
        before += cost
    return items


def _root_items(run: Run, timing: Timing, head_share: float) -> list[Item]:
    """Buckets of what is in no block: complete with the last of their parameters, needed before anything runs."""
    model = run.model
    own = -(-(model.embedding_numel + model.head_numel) // run.world)
    if not own:
        return []
    count, size = max(1, -(-own // BUCKET_NUMEL)), _even(own)
    first = -(-model.embedding_numel // run.world)  # embeddings are registered before the head
    early = timing.backward_s * head_share
    return [Item(size, "host", timing.backward_s if k * size < first else early, 0.0) for k in range(count)]


def placed_at(run: Run, ratio: float) -> Placed:
    """A share of `ratio` on the host."""
    host = round(run.own_numel * ratio)
    return Placed(host, run.own_numel - host)


def placed_of(items: Sequence[Item], places: Sequence[str]) -> Placed:
    """Elements by place."""
    numel = dict.fromkeys(PLACES, 0)
    for item, place in zip(items, places, strict=True):
        numel[place] += item.numel
    return Placed(**numel)


def items_at(run: Run, timing: Timing, ratio: float) -> list[Item]:
    """The buckets with a share of `ratio` on the host."""
    return at_ratio(items_of(run, timing), ratio)


def with_states(run: Run, states: str) -> Run:
    """The same run in another format."""
    return replace(run, states=states)
