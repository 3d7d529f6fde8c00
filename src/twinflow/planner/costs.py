# SPDX-License-Identifier: Apache-2.0
"""Memory and time of a run, computed from numbers: bytes by kind on GPU and host, and the buckets of a step.

A bucket is a group of parameters that are copied and updated together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Final

from twinflow.planner import long
from twinflow.planner.formats import WEIGHT_BYTES, Activations, StateBytes, reserved_bytes, state_bytes
from twinflow.planner.long import Kept
from twinflow.planner.machines import Rates
from twinflow.planner.models import ModelCost
from twinflow.planner.simulate import NUM_STAGES, ClipDecision, Fetch, Item, Timing, Ways

KEPT: Final = Kept()  # each checkpointed block keeps its input on the GPU
# Defaults of the runtime.
BUCKET_NUMEL: Final = 1 << 26  # 128 MiB in bf16; a copy over PCIe and an update on the host take some ms each
FLAT_BYTES: Final = 3 << 29  # device memory for gradients before their copy
NUM_SLOTS: Final = 4  # page-locked slots of one bucket each
NUM_BUFFERS: Final = 4  # with state on a disk: host buffers for the state of one bucket each
NUM_WEIGHT_BUFFERS: Final = 5  # with weights on a disk: host buffers for the weights of one bucket each
PROCESS_BYTES: Final = 17 * 10**8  # interpreter, torch and CUDA on the host: 2.0 to 2.7 GB with the next one
CPU_PROCESS_BYTES: Final = 10**9  # interpreter and torch without CUDA, measured as 0.4 GB
_LOOSE_BYTES: Final = 6 * 10**8  # small allocations that grow during training, measured as -0.7 to 2 GB
_MOST_TRIES: Final = 8
_MOST_ITEMS: Final = 2048  # simulated buckets; a model of more than 137 B parameters is simulated with larger ones
GPU_RESERVE: Final = 0.04  # share of the GPU memory that is left free: for gaps, and for plans that are too low
HOST_RESERVE: Final = 0.05  # share of the host memory that is left to other processes
FLATS_OUT: Final = 6  # device buffers in use if each gradient is copied to the host as soon as it is complete
# Time of backward relative to forward, measured as 1.77 to 1.86. Activation checkpointing adds one more forward.
BACKWARD: Final = 1.83
# The same if the weights of matrix products are frozen: only the gradients of activations are computed. An estimate.
FROZEN_BACKWARD: Final = 1.0
# Bytes of a frozen weight in 4 bits, with a scale of one byte for 64 weights.
FOUR_BIT_BYTES: Final = 0.5 + 1.0 / 64.0
# Memory traffic of LoRA adapters in a forward: bytes for each token, and for each input and output of a linear layer.
# Fitted on an H200.
ADAPTER_TRAFFIC: Final = 9.0
# Blocks whose weights are on the GPU at a time, if weights are on the host: the running one, two that are fetched, and
# one whose memory is not free again yet (`offload/param_offload.py`).
BLOCKS_HERE: Final = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU and of the host (for all GPUs; in `room_of` for one), available, left for state or missing."""

    gpu_bytes: int
    host_bytes: int

    @property
    def is_zero(self) -> bool:
        return not (self.gpu_bytes or self.host_bytes)


@dataclass(frozen=True)
class Run:
    """A training run: the model, the batch and the settings."""

    model: ModelCost
    batch: int  # sequences in a micro-batch of each GPU
    tokens: int  # tokens in a sequence
    micro_batches: int = 1
    states: str = "fp32"
    master: str = "fp32"  # "none": bf16 weights have no fp32 master
    clips: bool = True  # updates wait for the gradient norm (clipping, or a loss scale)
    delayed: bool = False  # each update is applied one step later
    checkpointing: bool = True  # activation checkpointing: blocks keep only their inputs, and are recomputed
    checkpointed: int | None = None  # with checkpointing: only so many blocks are recomputed. None: all
    selective: bool = False  # of blocks that are not recomputed as a whole, the cheap operations are recomputed
    weights: str = "bf16"
    world: int = 1  # number of GPUs that share the optimizer state; all are in one machine
    stage: int = 0  # ZeRO stage: 1 and 2 shard the state, 3 also the weights
    tensor_parallel: int = 1  # GPUs that each weight is split across
    num_moments: int = 2  # moments of the update rule, 2 for AdamW
    # Muon: Newton-Schulz iterations of an update of blocks, which then have one moment. 0: an element-wise rule
    matrix_steps: int = 0
    offload_params: bool = False  # the weights of blocks are on the host, and are fetched when a block runs
    offload_embeddings: bool = False  # with offload_params: the embedding and output layers are blocks too
    streamed: float = 0.0  # share of the state on the host that the GPU updates (`Tuning(streamed=)`)
    placement: str = "auto"  # with offload_params, "spread": blocks on the host are evenly distributed
    on_disk: bool = False  # the state that would be in host memory is in files on a disk
    weights_on_disk: bool = False  # with offload_params: weights that are not a part of state in memory are on the disk
    max_in_cpu: int = 0  # with weights_on_disk: weights for which there are buffers, if these are more than a few
    adapter_rank: int = 0  # rank of LoRA adapters on all linear layers of the blocks; 0: all parameters are trained
    four_bits: bool = False  # with adapters: the frozen matrices of the blocks have 4 bits for each weight
    is_tiled: bool = False  # MLPs, norms and loss run over tiles of the sequence
    kept: Kept = KEPT  # how the inputs of blocks are kept; without tiles, only `on_host` counts
    num_sequence: int = 1  # GPUs that share each sequence
    expert_parallel: int = 1  # GPUs that have all experts together; the experts of each are on world / size GPUs

    @property
    def step_tokens(self) -> int:
        """Tokens in a step, on all GPUs."""
        return self.num_tokens * self.micro_batches * (self.world // self.tensor_parallel)

    @property
    def num_tokens(self) -> int:
        """Tokens in a micro-batch of one GPU."""
        return -(-self.batch * self.tokens // self.num_sequence)

    @property
    def size(self) -> StateBytes:
        """Bytes of optimizer state for each parameter, by the place of the state."""
        num_moments: float = self.num_moments
        if self.matrix_steps:
            num_moments = 1.0 + sum(self.trained_root) / max(1, sum(self.trained_blocks) + sum(self.trained_root))
        return state_bytes(self.states, self.weights, self.delayed, num_moments, self.master)

    def update_flops(self, numel: int) -> float:
        """FLOPs of the Newton-Schulz iterations for `numel` elements of blocks.

        For a matrix of m x n elements with m <= n these are 4 m + 2 m^2 / n for each element in an iteration. With the
        matrices of transformers this is about 5 m, and m is mostly the hidden size.
        """
        return 5.0 * self.matrix_steps * self.model.hidden * numel

    @property
    def numel(self) -> int:
        """Elements of the weights that one GPU computes with."""
        return -(-self.model.numel // self.tensor_parallel)

    @property
    def num_recomputed(self) -> int:
        """Number of blocks that backward computes again as a whole."""
        num_blocks = len(self.model.blocks)
        wanted = num_blocks if self.checkpointed is None else self.checkpointed
        return min(wanted, num_blocks) if self.checkpointing else 0

    @property
    def inputs(self) -> Kept:
        """How the inputs of blocks are kept. Groups of blocks run again together, which they cannot if the weights of
        each block are on the GPU only while it runs.
        """
        if not self.offload_params or self.kept.every == 1:
            return self.kept
        return replace(self.kept, every=1, on_host=min(len(self.model.blocks), self.kept.on_host * self.kept.every))

    @property
    def activation_bytes(self) -> int:
        """Peak memory of a micro-batch on the GPU beside weights, gradients and state."""
        return self.activations_beside(0)

    def activations_beside(self, num_away: int) -> int:
        """The same, if the weights of `num_away` blocks are on the host. During the loss, only two of these blocks are
        on the GPU: the last one, and the one that is fetched next. An output layer that is a block is there too.
        """
        if self.is_tiled:
            return long.peak_bytes(self.model, WEIGHT_BYTES[self.weights], self.num_tokens, self.inputs)
        found = self._activations
        num_in_loss = 2 + any(self.ends)
        free = max(0, min(BLOCKS_HERE, num_away) - num_in_loss) * max(self.layer_bytes, default=0)
        peak = found.peak_bytes(len(self.model.blocks), self.num_tokens, self.num_recomputed, self.selective, free)
        num_inputs = min(self.inputs.on_host, self.num_recomputed)  # only these blocks keep nothing but their inputs
        return peak - long.away_bytes(num_inputs, self.num_tokens * found.stream_bytes)

    @property
    def first_block_bytes(self) -> int:
        """The same in the backward of the first block, when the others have freed theirs."""
        if self.is_tiled:
            return self.activation_bytes - self.inputs.gpu_bytes(
                self.model, WEIGHT_BYTES[self.weights], self.num_tokens
            )
        found = self._activations
        return int(self.num_tokens * (found.end_bytes + found.backward_bytes(self.num_recomputed > 0)))

    @property
    def _activations(self) -> Activations:
        found = self.model.activations
        if self.expert_parallel > 1:  # rows that arrived for the experts, and results that came back. An estimate
            rows = 2 * WEIGHT_BYTES[self.weights] * self.model.num_chosen * self.model.hidden
            found = replace(found, block_bytes=found.block_bytes + rows)
        return found.with_frozen_weights() if self.adapter_rank else found

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Elements of the embedding and output layers that are blocks too."""
        return self.model.ends if self.offload_params and self.offload_embeddings else (0, 0)

    def _with_ends(self, layers: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
        """The values of all blocks, from those of the model's blocks and of `ends`, in the order in which their state
        becomes resident. Frozen layers have no state. They are always on the host, and come last.
        """
        before, after = (((value,) if end else ()) for value, end in zip((first, last), self.ends, strict=True))
        return (*layers, *before, *after) if self.adapter_rank else (*before, *layers, *after)

    @cached_property
    def trained_layers(self) -> tuple[int, ...]:
        """Trained elements of each of the model's blocks."""
        if self.adapter_rank:
            return (self.adapter_rank * self.model.adapter_unit,) * len(self.model.blocks)
        return self.model.blocks

    @cached_property
    def trained_blocks(self) -> tuple[int, ...]:
        """Trained elements of each block, with those of `ends`."""
        return self._with_ends(self.trained_layers, *((0, 0) if self.adapter_rank else self.ends))

    @property
    def trained_root(self) -> tuple[int, int]:
        """Trained elements outside of the blocks: embeddings, head. With adapters both are frozen."""
        if self.adapter_rank:
            return 0, 0
        return self.model.embedding_numel - self.ends[0], self.model.head_numel - self.ends[1]

    @property
    def own_numel(self) -> int:
        """Elements whose optimizer state belongs to one GPU."""
        return -(-(sum(self.trained_blocks) + sum(self.trained_root)) // self.world)

    @cached_property
    def _frozen_layers(self) -> tuple[int, ...]:
        """Bytes of the frozen weights of each of the model's blocks. Zeros without adapters."""
        if not self.adapter_rank:
            return (0,) * len(self.model.blocks)
        width, model = WEIGHT_BYTES[self.weights], self.model
        packed = FOUR_BIT_BYTES if self.four_bits else width
        return tuple(
            int(packed * min(products, numel) + width * max(0, numel - products))
            for numel, products in zip(model.blocks, model.block_products, strict=True)
        )

    @cached_property
    def frozen_bytes(self) -> tuple[int, ...]:
        """Bytes of the frozen weights of each block, with those of `ends`. Zeros without adapters."""
        width = WEIGHT_BYTES[self.weights] if self.adapter_rank else 0
        return self._with_ends(self._frozen_layers, width * self.ends[0], width * self.ends[1])

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights of each of the model's blocks on one GPU: all of them, except for the experts of other
        GPUs.
        """
        width = WEIGHT_BYTES[self.weights]
        if self.expert_parallel > 1:  # without adapters and tensor ranks
            return tuple(width * numel for numel in self.model.experts_here(self.expert_parallel))
        pairs = zip(self.trained_layers, self._frozen_layers, strict=True)
        return tuple((width * trained + frozen) // self.tensor_parallel for trained, frozen in pairs)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """The same of each block, with those of `ends`."""
        width = WEIGHT_BYTES[self.weights]
        return self._with_ends(self.layer_bytes, width * self.ends[0], width * self.ends[1])

    @cached_property
    def end_bytes(self) -> tuple[int, ...]:
        """Bytes of the trained weights of each block that is one of `ends`. Zeros for other blocks."""
        width = 0 if self.adapter_rank else WEIGHT_BYTES[self.weights]
        return self._with_ends((0,) * len(self.trained_layers), width * self.ends[0], width * self.ends[1])

    @cached_property
    def own_root(self) -> int:
        """Elements outside of the blocks whose optimizer state belongs to one GPU."""
        return -(-sum(self.trained_root) // self.world)

    def num_blocks_here(self, resident: int) -> int:
        """Blocks whose weights stay on the GPU, if weights are on the host and `resident` elements of one GPU's state
        are on the GPU: those whose state is there. Elements outside of the blocks are the first on the GPU. A block has
        one place, that of its larger part, as in `offload/placement.py`.
        """
        left, count = float(resident - self.own_root), 0
        for numel in self.trained_blocks:
            own = numel / self.world
            if 2 * left <= own or not numel:
                break
            left, count = left - own, count + 1
        return count


@dataclass(frozen=True)
class Placed:
    """Numbers of the parameters whose optimizer state belongs to one GPU, by the place of the state."""

    host: int  # in host memory, updated by the CPU
    resident: int = 0  # in GPU memory
    streamed: int = 0  # in host memory, copied to the GPU for the update


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind: on one GPU, and on the host for all GPUs."""

    gpu: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def gpu_total(self) -> int:
        return sum(self.gpu.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    def missing(self, memory: Memory) -> Memory:
        """Bytes that the run needs beyond `memory`. Zeros if the run fits. Speculative stores ("shadows") do not count,
        because they use only memory that is free.
        """
        host = self.host_total - self.host.get("shadows", 0)
        return Memory(max(0, self.gpu_total - memory.gpu_bytes), max(0, host - memory.host_bytes))


def usable(memory: Memory) -> Memory:
    """The memory that a run may use, which is all of it except for the reserves."""
    return Memory(int(memory.gpu_bytes * (1.0 - GPU_RESERVE)), int(memory.host_bytes * (1.0 - HOST_RESERVE)))


def without_gpu(used: Bytes, num_ranks: int = 1) -> Bytes:
    """The same bytes on a machine without a GPU, where the host has everything. `num_ranks`: ranks on the host."""
    kinds = dict.fromkeys((*used.host, *used.gpu))
    host = {kind: used.gpu.get(kind, 0) * num_ranks + used.host.get(kind, 0) for kind in kinds}
    return Bytes({}, host | {"process": CPU_PROCESS_BYTES * num_ranks})


def bytes_of(run: Run, placed: Placed, memory: Memory) -> Bytes:
    """Bytes that the runtime allocates for a run. If `memory` is short, it chooses smaller buffers."""
    width, size = WEIGHT_BYTES[run.weights], run.size
    num_here = run.num_blocks_here(placed.resident) if run.offload_params else 0
    num_away = len(run.block_bytes) - num_here if run.offload_params else 0
    weights = _weight_bytes(run, num_here)
    resident = int(placed.resident * size.resident)
    copied = _copied_size(run)
    each = copied.host if run.offload_params else copied.streamed
    staging = int(min(placed.streamed, NUM_STAGES * bucket_numel(run)) * each)
    # The runtime chooses the place of gradients by the memory that is left beside weights and resident state.
    grads = gradient_plan(run, placed, max(0, _free_at_start(run, memory, num_here) - resident))
    activations = run.activations_beside(num_away)
    gpu = {
        "weights": weights,
        "gradients": _gradients_at_peak(run, placed, grads, activations),
        "state": resident,
        "activations": activations // run.tensor_parallel,
        "staging": staging + _muon_bytes(run) + _unpacked_bytes(run),
    }
    slot = bucket_numel(run) * width
    # fp16 weights, and those whose state is on a disk, need extra slots for their copies to the GPU. Others are copied
    # directly from the state.
    slots = NUM_SLOTS * slot * (1 + (run.weights == "fp16" or run.on_disk))
    # Trained weights on the host are the upper halves of their masters. Only fp16 weights have separate masters.
    is_separate = run.weights == "fp16" or run.on_disk
    fetched = sum(run.frozen_bytes[num_here:]) + width * sum(run.trained_blocks[num_here:]) * is_separate
    if run.weights_on_disk:
        is_in_memory = run.weights == "fp16" and not run.on_disk
        buffers = width * max(NUM_WEIGHT_BUFFERS * bucket_numel(run), run.max_in_cpu) * run.world
        fetched = min(buffers, weights_file_bytes(run, placed))
        fetched += width * sum(run.trained_blocks[num_here:]) * is_in_memory
    state = int(placed.host * size.host + placed.streamed * (size.host if run.offload_params else size.streamed))
    if run.on_disk:  # buffers for the state of some buckets
        state = min(int(NUM_BUFFERS * bucket_numel(run) * size.host), state_file_bytes(run, placed) // run.world)
    host = {
        "weights": fetched // run.world if run.offload_params else 0,
        "state": state,
        "gradients": grads.host_bytes,
        "shadows": 0,
        "rings": min(slots, 2 * placed.host * width) if not (grads.holds_on_host or run.delayed) else 0,
        "process": PROCESS_BYTES + _LOOSE_BYTES,
        "activations": run.inputs.host_bytes(run.model, width, run.num_tokens),
    }
    host = {kind: count * run.world for kind, count in host.items()}
    if run.clips and not run.delayed and not grads.sums_on_host and not run.on_disk:
        left = max(0, memory.host_bytes - sum(host.values()))
        host["shadows"] = min(left - reserved_bytes(left), int(placed.host * size.host) * run.world)
    return Bytes(gpu, host)


def _copied_size(run: Run) -> StateBytes:
    """Bytes of streamed state that are copied to the GPU and back for each parameter. `host`: with the weights, because
    blocks fetch them from this state. Those in fp16 are not a part of the master.
    """
    return replace(run.size, host=run.size.host + (WEIGHT_BYTES["fp16"] if run.weights == "fp16" else 0))


def input_file_bytes(run: Run) -> int:
    """Bytes of the files of all GPUs for inputs of blocks, which a micro-batch writes and reads once."""
    return run.world * run.inputs.disk_bytes(run.model, WEIGHT_BYTES[run.weights], run.num_tokens)


def file_bytes(run: Run, placed: Placed) -> int:
    """Bytes of the files of all GPUs: of state, with `Run.on_disk`, and of weights, with `Run.weights_on_disk`."""
    return state_file_bytes(run, placed) + weights_file_bytes(run, placed)


def step_bytes(run: Run, placed: Placed) -> int:
    """Bytes of the files that a step reads and writes. Weights are read in each forward and backward."""
    weights = weights_file_bytes(run, placed)
    num_here = run.num_blocks_here(placed.resident) if run.offload_params else 0
    written = weights - sum(run.frozen_bytes[num_here:]) * run.weights_on_disk
    return 2 * state_file_bytes(run, placed) + 2 * run.micro_batches * weights + written


def weights_file_bytes(run: Run, placed: Placed) -> int:
    """Bytes of the files with weights that blocks fetch, of all GPUs. State in memory contains the trained ones."""
    if not (run.offload_params and run.weights_on_disk):
        return 0
    num_here = run.num_blocks_here(placed.resident)
    trained = WEIGHT_BYTES[run.weights] * sum(run.trained_blocks[num_here:]) * run.on_disk
    return sum(run.frozen_bytes[num_here:]) + trained


def state_file_bytes(run: Run, placed: Placed) -> int:
    """Bytes of the files with state, of all GPUs. Weights that blocks fetch from memory are not in them."""
    if not run.on_disk:
        return 0
    found = placed.host * run.size.host
    # An fp16 weight is not a part of its master. Weights on the disk are in the state too.
    if run.offload_params and run.weights != "fp16" and not run.weights_on_disk:
        num_here = run.num_blocks_here(placed.resident)
        found -= WEIGHT_BYTES[run.weights] * sum(run.trained_blocks[num_here:]) / run.world
    return int(found) * run.world


@dataclass(frozen=True)
class GradientPlan:
    """Memory of gradients that wait for their update. `holds_on_host`: they wait on the host. `sums_on_host`: they are
    summed over micro-batches on the host.
    """

    gpu_bytes: int
    host_bytes: int
    holds_on_host: bool
    sums_on_host: bool


def gradient_plan(run: Run, placed: Placed, free_bytes: int) -> GradientPlan:
    """Where gradients wait for their update: on the host if updates are delayed, or if the gradients or their sums over
    micro-batches need more than half of `free_bytes`, else on the GPU. Those of resident state never leave the GPU."""
    width, own = WEIGHT_BYTES[run.weights], run.own_numel
    all_bytes, off, there = width * own, placed.host, placed.resident + placed.streamed
    flat = min(FLAT_BYTES, free_bytes // 8, all_bytes)
    waits = run.clips or run.delayed
    sums = 4 * own if run.micro_batches > 1 else 0
    if sums > free_bytes // 2:
        return GradientPlan(flat + 4 * there, 4 * off, False, True)
    if not waits:
        return GradientPlan(sums + flat, 0, False, False)
    if all_bytes > free_bytes // 2 or run.delayed:
        few = min(flat, FLATS_OUT * bucket_numel(run) * width)
        return GradientPlan(sums + few + width * there, width * off, True, False)
    return GradientPlan(sums + all_bytes, 0, False, False)


def _gradients_at_peak(run: Run, placed: Placed, grads: GradientPlan, activation_bytes: int) -> int:
    """GPU memory of gradients when activations and gradients together have their peak.

    With weights on the host, this is mostly at the beginning of backward. There are then the sums over micro-batches,
    the gradients of the last block in few buffers, and those of the head, if its state is on the GPU. The others come
    when blocks have freed their activations. If all wait on the GPU for the norm, they may need more memory than the
    activations that were freed. Before the next forward has its peak, they have left the GPU (`FlatPool.shrink`).
    """
    if not run.offload_params:
        return grads.gpu_bytes
    width = WEIGHT_BYTES[run.weights]
    few = min(FLAT_BYTES, FLATS_OUT * bucket_numel(run) * width)
    head = max(0, min(-(-run.trained_root[1] // run.world), placed.resident - run.trained_root[0] // run.world))
    if run.num_blocks_here(placed.resident) == len(run.trained_blocks):
        head += -(-run.ends[1] // run.world)  # the last block
    summed = placed.resident + placed.streamed if grads.sums_on_host else run.own_numel
    sums = 4 * summed if run.micro_batches > 1 else 0
    freed = max(0, activation_bytes - run.first_block_bytes)
    at_start = min(grads.gpu_bytes, sums + few + width * head)
    if grads.holds_on_host or grads.sums_on_host or not run.clips:
        return max(at_start, grads.gpu_bytes - freed)
    # In the backward of the third block, three blocks have no gradients yet, and two keep their inputs. Before it, as
    # many more gradients as fewer fetched weights are there. The embedding has no gradient yet, unless it is the output
    # layer too. At the end, that gradient is there twice: as torch computes it, and in buffers. Most fetched blocks and
    # all activations are then freed.
    num_blocks, layer = len(run.trained_layers), width * max(run.trained_layers) // run.world
    embedding = width * (run.trained_root[0] + run.ends[0])
    third = grads.gpu_bytes - min(3, num_blocks) * layer - freed + 2 * width * run.model.hidden * run.num_tokens
    third -= embedding // run.world if run.model.head_numel else 0
    fetched = max(0, min(BLOCKS_HERE, num_blocks - run.num_blocks_here(placed.resident)) - 2) * max(run.layer_bytes)
    end = grads.gpu_bytes + embedding - fetched - activation_bytes
    return max(at_start, third, end)


def _weight_bytes(run: Run, num_here: int = 0) -> int:
    """Bytes of weights on one GPU. Weights on the host: those outside of the blocks, those of the first `num_here`
    blocks, and the other blocks that are there at a time. With ZeRO-3: the shard of this GPU, and two gathered blocks.
    """
    width, blocks = WEIGHT_BYTES[run.weights], run.block_bytes
    root = width * -(-(run.model.embedding_numel + run.model.head_numel - sum(run.ends)) // run.tensor_parallel)
    largest = max(blocks, default=0)
    if run.offload_params:
        return root + sum(blocks[:num_here]) + _fetched_bytes(run, num_here)
    if run.stage < 3 or run.world == 1:
        return root + sum(blocks)
    return -(-(root + sum(blocks)) * run.tensor_parallel // run.world) + 2 * largest


def _fetched_bytes(run: Run, num_here: int) -> int:
    """Bytes of the blocks that are on the GPU at a time, of those on the host. An embedding or output layer, which may
    be larger than the others, is one of them.
    """
    away = run.block_bytes[num_here:]
    others = max(0, min(BLOCKS_HERE, len(away)) - 1)
    return max(away, default=0) + others * max(run.layer_bytes, default=0)


def _free_at_start(run: Run, memory: Memory, num_here: int = 0) -> int:
    """GPU memory by which the runtime chooses its buffers: free before the first block is fetched, less that of trained
    embedding and output layers on the host, which count as on the GPU.
    """
    fetched = _fetched_bytes(run, num_here) if run.offload_params else 0
    return max(0, memory.gpu_bytes - _weight_bytes(run, num_here) + fetched - sum(run.end_bytes[num_here:]))


def _muon_bytes(run: Run) -> int:
    """GPU memory of an update by Muon: fp32 directions of a bucket, and temporary tensors for the largest matrix."""
    if not run.matrix_steps:
        return 0
    matrix = run.model.hidden * max(run.model.hidden, run.model.inner)
    return 4 * max(matrix, bucket_numel(run)) + 9 * matrix


def _unpacked_bytes(run: Run) -> int:
    """GPU memory of matrices that are unpacked from 4 bits: the one of the running product, and the one before it."""
    return 2 * WEIGHT_BYTES[run.weights] * run.model.hidden * max(run.model.hidden, run.model.inner) * run.four_bits


def bucket_numel(run: Run) -> int:
    """Number of elements in the largest bucket. If weights are on the host, the tensors of blocks are not split."""
    sizes = [*run.trained_layers[:1], sum(run.trained_root), *(() if run.adapter_rank else run.ends)]
    most = max((_even(-(-size // run.world)) for size in sizes if size), default=0)
    if not run.offload_params or run.adapter_rank:
        return most
    tensor = min(run.model.largest_tensor, *run.trained_layers[:1])
    return max(most, -(-tensor // run.world))


def _even(numel: int) -> int:
    """Elements of a bucket if `numel` elements are split evenly into the fewest buckets of at most BUCKET_NUMEL."""
    return -(-numel // max(1, -(-numel // BUCKET_NUMEL)))


def room_of(run: Run, memory: Memory) -> Memory:
    """Memory that is left for one GPU's optimizer state beside weights, activations, gradients, page-locked buffers,
    the process and a reserve.

    The numbers are negative if these do not fit. Gradients are counted as if all state were on the host. `placing_size`
    adds the GPU memory that the gradients of resident state then need.
    """
    base, limit = bytes_of(run, Placed(run.own_numel), memory), usable(memory)
    host = limit.host_bytes - (base.host_total - base.host["state"] - base.host["shadows"])
    return Memory(limit.gpu_bytes - base.gpu_total, host // run.world)


def placing_size(run: Run, memory: Memory) -> StateBytes:
    """Bytes that state in each place needs for each parameter, to compare with `room_of`.

    The gradients of resident state stay on the GPU, even if the gradients of host state wait in host memory. If weights
    are on the host, those of a block stay on the GPU with its state. All parameters then count as those of blocks.
    """
    grads = gradient_plan(run, Placed(run.own_numel), _free_at_start(run, memory))
    beside: float = 4 if grads.sums_on_host else WEIGHT_BYTES[run.weights] if grads.holds_on_host else 0
    if run.offload_params:
        beside += _block_weight(run)
    return replace(run.size, resident=run.size.resident + beside)


def _block_weight(run: Run) -> float:
    """Bytes of all weights of the blocks for each trained element of the blocks that belongs to one GPU."""
    return run.world * sum(run.block_bytes) / max(1, sum(run.trained_blocks))


def least_ratio(run: Run, memory: Memory) -> float:
    """The least share of the state on the host with which the GPU has room."""
    numel, limit, width = run.own_numel, usable(memory).gpu_bytes, placing_size(run, memory).resident
    room = max(0, room_of(run, memory).gpu_bytes)
    if run.offload_params:  # the first elements are outside of the blocks, and their weights are counted already
        weight = _block_weight(run)
        room += int(weight * min(run.own_root, room / (width - weight)))
    resident = min(numel, int(room / width))
    for _ in range(_MOST_TRIES):
        placed = _placed(run, resident)
        over = bytes_of(run, placed, memory).gpu_total - limit
        if over <= 0 or not resident:
            break
        # Beside much resident state, gradients that wait on the host take more GPU memory than without it.
        least = max(run.trained_layers) // run.world if run.offload_params else int(over / width) + numel // 1000
        resident = max(0, placed.resident - max(int(over / width), least))
    return 1.0 - resident / numel


def fits(run: Run, memory: Memory) -> bool:
    """Whether there is a share of the state on the host (0 to 1) with which the run fits."""
    used = bytes_of(run, placed_at(run, least_ratio(run, memory)), memory)
    return used.missing(usable(memory)).is_zero


def clip_decision_of(run: Run, used: Bytes) -> ClipDecision:
    """Whether updates wait for the norm, and how many elements may be updated before it is known."""
    ahead = int(used.host["shadows"] / run.world / run.size.host) if used.host["shadows"] else 0
    return ClipDecision(run.clips, ahead)


def ways_of(run: Run, timing: Timing) -> Ways:
    """Bytes and limits of the copies between GPU and host."""
    width = float(WEIGHT_BYTES[run.weights])
    return Ways(
        grad_bytes=width,
        weight_bytes=width,
        num_slots=NUM_SLOTS,
        # Gradients that wait for their norm have a buffer each.
        flat_bytes=inf if run.clips or run.delayed else FLAT_BYTES,
        delayed=run.delayed,
        fetches=fetches_of(run, timing) if run.offload_params else (),
        copied=_copied_size(run),
    )


def fetches_of(run: Run, timing: Timing) -> tuple[Fetch, ...]:
    """The copies of the weights of each block to the GPU, if weights are on the host. The embedding and output layers
    are copied before a forward only: the output layer stays until its backward, or computes the loss in chunks.
    """
    flops, width = run.model.block_flops(run.tokens), WEIGHT_BYTES[run.weights]
    total = sum(flops) + 2.0 * run.model.head_products
    first, last = run.ends
    fetches = [Fetch(width * first // run.world, 0.0, None)] if first else []
    before = 0.0
    for nbytes, cost in zip(run.layer_bytes, flops, strict=True):
        forward_s = timing.forward_s * before / total
        before += cost
        fetches.append(Fetch(nbytes // run.world, forward_s, timing.backward_s * (1.0 - before / total)))
    if last or (first and run.model.head_products):
        owner = None if last else 0  # tied weights are those of the embedding
        fetches.append(Fetch(width * (last or first) // run.world, timing.forward_s * before / total, None, owner))
    return tuple(fetches)


def timing_of(run: Run, rates: Rates, link_rate: float = 0.0) -> Timing:
    """Times of a forward and a backward, from matrix products, memory traffic and communication between GPUs."""
    model, num_tokens, parts = run.model, run.num_tokens, run.tensor_parallel
    if run.is_tiled:
        forward, backward = long.times(
            model, num_tokens, run.tokens, run.inputs, rates.flops, rates.device_bytes, BACKWARD
        )
        return Timing(forward, backward, run.micro_batches)
    products = num_tokens * model.forward_flops(run.tokens) / rates.flops
    more = ADAPTER_TRAFFIC * model.adapter_unit if run.adapter_rank else 0.0
    traffic = num_tokens * (model.traffic_bytes + more) * len(model.blocks) / rates.device_bytes
    forward = max((products + traffic) / parts, len(model.blocks) * model.launch_s)
    backward = forward * (FROZEN_BACKWARD if run.adapter_rank else BACKWARD)
    again = run.num_recomputed / len(model.blocks) if model.blocks else 0.0
    backward += forward * again
    if run.selective:
        backward += (1.0 - again) * traffic / parts
    if run.four_bits:
        # Each use of a matrix first writes it in 16 bits, which the product then reads.
        unpack = (FOUR_BIT_BYTES + WEIGHT_BYTES[run.weights]) * sum(model.block_products) / rates.device_bytes
        forward += unpack
        backward += unpack * (1.0 + again)
    if run.world > 1 and link_rate:
        # During compute, weights are gathered in forward (with ZeRO-3 also in backward). Gradients are scattered in
        # backward.
        share = shared_bytes(run) / link_rate
        forward = max(forward, share)
        backward = max(backward, share * (2 if run.stage == 3 else 1))
        tokens_s = token_bytes(run) / link_rate  # compute waits for the tokens
        forward += tokens_s
        backward += tokens_s * (1.0 + again)
    return Timing(forward, backward, run.micro_batches)


def shared_bytes(run: Run) -> float:
    """Bytes that a GPU sends to scatter all gradients, or to gather all weights. Those of experts go to the GPUs with
    the same experts.
    """
    width, size, world = WEIGHT_BYTES[run.weights], run.expert_parallel, run.world
    experts = sum(run.model.experts) if size > 1 else 0
    others = (run.numel - experts) * (world - 1) / world
    return width * (others + experts / size * (world // size - 1) / (world // size))


def token_bytes(run: Run) -> float:
    """Bytes that a GPU sends in a forward for experts on other GPUs: each token to each of its experts, and the results
    back. A backward sends as many gradients. All experts get equally many tokens.
    """
    size, model = run.expert_parallel, run.model
    num_layers = sum(numel > 0 for numel in model.experts)
    rows = run.num_tokens * model.num_chosen * (size - 1) / size
    return 2.0 * WEIGHT_BYTES[run.weights] * model.hidden * rows * num_layers


def items_of(run: Run, timing: Timing) -> list[Item]:
    """The buckets of one GPU, all on the host, with the times when gradients are complete and weights are needed.

    Within a block, the last parameters have their gradients first. All weights of a block are needed when the block
    starts.
    """
    model, flops = run.model, run.model.block_flops(run.tokens)
    head = 2.0 * model.head_products
    total = sum(flops) + head
    items = _root_items(run, timing, head / total)
    first, last = (0, 0) if run.adapter_rank else run.ends
    items += _even_items(run, first, timing.backward_s, 0.0, 0)
    num_before = int(run.ends[0] > 0)  # the embedding is the first block
    before = 0.0
    for block, (numel, cost) in enumerate(zip(run.trained_layers, flops, strict=True), num_before):
        need = timing.forward_s * before / total
        end = timing.backward_s * (1.0 - before / total)
        length = timing.backward_s * cost / total
        own = -(-numel // run.world)
        count = max(1, min(-(-own // BUCKET_NUMEL), _MOST_ITEMS // len(model.blocks)))
        # With checkpointing, the first third of a block's backward recomputes the forward and produces no gradient.
        span = length * (1.0 - 0.35 * run.num_recomputed / len(model.blocks))
        size = -(-own // count)
        products = run.update_flops(size)
        found = (Item(size, "host", end - span * k / count, need, block, products) for k in range(count))
        items += [item.at("host") for item in found]
        before += cost
    need, end = timing.forward_s * before / total, timing.backward_s * head / total
    return items + _even_items(run, last, end, need, num_before + len(flops))


def _even_items(run: Run, numel: int, ready: float, need: float, block: int) -> list[Item]:
    """Buckets of an embedding or output layer that is a block."""
    own = -(-numel // run.world)
    return [Item(_even(own), "host", ready, need, block) for _ in range(-(-own // BUCKET_NUMEL))]


def _root_items(run: Run, timing: Timing, head_share: float) -> list[Item]:
    """Buckets of the parameters outside of blocks. The gradients of a bucket are complete when its last parameter has
    its gradient. All these weights are needed at the start of the forward.
    """
    embedding_numel, head_numel = run.trained_root
    own = -(-(embedding_numel + head_numel) // run.world)
    if not own:
        return []
    count, size = max(1, -(-own // BUCKET_NUMEL)), _even(own)
    first = -(-embedding_numel // run.world)  # embeddings are registered before the head
    early = timing.backward_s * head_share
    return [Item(size, "host", timing.backward_s if k * size < first else early, 0.0) for k in range(count)]


def placed_at(run: Run, ratio: float) -> Placed:
    """The placement with a share `ratio` of the optimizer state on the host. If weights are on the host, the blocks are
    not split, so the share may differ from `ratio`.
    """
    return _placed(run, run.own_numel - round(run.own_numel * ratio))


def _placed(run: Run, resident: int) -> Placed:
    if run.offload_params and resident > run.own_root:
        blocks = sum(run.trained_blocks[: run.num_blocks_here(resident)])
        resident = min(run.own_numel, run.own_root + -(-blocks // run.world))
    left = run.own_numel - resident
    streamed = min(left, run.own_numel - run.own_root) if run.matrix_steps else round(left * run.streamed)
    return Placed(left - streamed, resident, streamed)
