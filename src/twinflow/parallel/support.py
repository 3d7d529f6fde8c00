# SPDX-License-Identifier: Apache-2.0
"""Features that conflict with pipeline or tensor parallelism: one list for errors and for the tables in the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from twinflow.errors import incompatible


@dataclass(frozen=True)
class Combination:
    """The features of a run that may conflict."""

    pipe: int = 1  # pipeline ranks
    model: int = 1  # tensor ranks
    stage: int = 0  # ZeRO stage
    offload_param: bool = False
    delayed_update: bool = False
    ratio: float | str = 1.0
    sums: str = "auto"
    cpu_checkpointing: bool = False
    own_optimizer: bool = False  # a TwinOptimizer was passed to initialize
    head_patterns: bool = False  # sparse attention with a pattern for each head
    sequence: bool = False  # tensor ranks split the sequence
    foreign: bool = False  # the model is from Hugging Face
    partition_activations: bool = False
    has_optimizer: bool = True
    compiles: bool = False  # compile.blocks
    float8: bool = False
    selective: bool = False  # activation_checkpointing.selective
    num_sequence: int = 1  # ranks that share a sequence
    num_expert: int = 1  # ranks that have all experts together

    @property
    def axes(self) -> list[str]:
        return [name for name, size in (("pipeline", self.pipe), ("tensor", self.model)) if size > 1]


@dataclass(frozen=True)
class Limit:
    """A feature that conflicts with pipeline ranks, tensor ranks or both."""

    key: str  # the option with its value
    axes: tuple[str, ...]
    is_asked: Callable[[Combination], bool]
    reason: str  # continues "because"
    remedy: str


_PIPE, _TENSOR, _BOTH = ("pipeline",), ("tensor",), ("pipeline", "tensor")
LIMITS: Final = (
    Limit(
        "zero_optimization.stage=3",
        _TENSOR,
        lambda c: c.stage == 3,
        "fully_shard would split tensors that are already split",
        "Set zero_optimization.stage to 2, which also partitions the optimizer state.",
    ),
    Limit(
        "zero_optimization.offload_param",
        _BOTH,
        lambda c: c.offload_param,
        "weights are fetched whole and in the order of one forward, but tensor ranks split them, and a pipeline runs "
        "several forwards at a time",
        "Leave offload_param out.",
    ),
    Limit(
        "zero_optimization.offload_optimizer.delayed_update=True",
        _PIPE,
        lambda c: c.delayed_update,
        "the updates of different stages would be delayed by different numbers of steps",
        "Set delayed_update to false.",
    ),
    Limit(
        "zero_optimization.offload_optimizer.ratio='auto'",
        _PIPE,
        lambda c: c.ratio == "auto",
        "the ratio is chosen from the times of one forward and one backward, and a pipeline runs several of each",
        "Set ratio to a number.",
    ),
    Limit(
        "zero_optimization.offload_optimizer.sums='host'",
        _PIPE,
        lambda c: c.sums == "host",
        "several micro-batches run at a time, and their gradients are summed on the GPU",
        "Set sums to 'auto' or 'device'.",
    ),
    Limit(
        "activation_checkpointing.cpu_checkpointing=True",
        _PIPE,
        lambda c: c.cpu_checkpointing,
        "inputs are fetched from the host in the order of one backward, and a pipeline runs several backwards",
        "Set cpu_checkpointing to false, and leave nvme_path out. Activation checkpointing without them works.",
    ),
    Limit(
        "sparse_attention.different_layout_per_head=True",
        _TENSOR,
        lambda c: c.head_patterns,
        "tensor ranks have different heads, but use the same pattern",
        "Set different_layout_per_head to false.",
    ),
    Limit(
        "tensor_parallel.sequence=True with a Hugging Face model",
        _PIPE,
        lambda c: c.sequence and c.foreign and c.model > 1,
        "Hugging Face layers compute positions from the length of their input, which is only a part of the sequence",
        "Set tensor_parallel.sequence to false.",
    ),
    Limit(
        "activation_checkpointing.partition_activations=True with tensor_parallel.sequence=True",
        _TENSOR,
        lambda c: c.partition_activations and c.sequence,
        "tensor ranks split the sequence, so the activations are already partitioned",
        "Set partition_activations to false.",
    ),
    Limit(
        "activation_checkpointing.selective=True",
        _BOTH,
        lambda c: c.selective,
        "the part of a rank is recomputed as a whole or not at all",
        "Set selective to false, and layers or partition_activations.",
    ),
    Limit(
        "compile.blocks=True",
        _BOTH,
        lambda c: c.compiles,
        "a pipeline postpones parts of a block's backward, and tensor ranks communicate inside of a block",
        "Set compile.blocks to false.",
    ),
    Limit(
        "float8.enabled=True",
        _BOTH,
        lambda c: c.float8,
        "the plans that divide a model know torch's linear layers only",
        "Set float8.enabled to false.",
    ),
    Limit(
        "sequence_parallel_size above 1",
        _BOTH,
        lambda c: c.num_sequence > 1,
        "sequence ranks have all layers, with whole weights or those that ZeRO stage 3 gathers",
        "Use sequence ranks with ZeRO stage 3 instead of pipeline and tensor ranks.",
    ),
    Limit(
        "expert_parallel_size above 1",
        _BOTH,
        lambda c: c.num_expert > 1,
        "this combination was not tested",
        "Leave one of them out. Tensor ranks can divide experts too.",
    ),
    Limit(
        "An engine without an optimizer",
        _BOTH,
        lambda c: not c.has_optimizer,
        "checkpoints and mean losses use the rank groups of the optimizer",
        'Add a section "optimizer" to the config, or pass `optimizer` to initialize().',
    ),
    Limit(
        "A TwinOptimizer that was built before initialize",
        _BOTH,
        lambda c: c.own_optimizer,
        "this optimizer was built without the pipeline and tensor ranks of the config",
        "Name the optimizer in the config, or pass a torch.optim class.",
    ),
)


def check(asked: Combination) -> None:
    """Raise a ValueError if a feature conflicts with the axes of the run."""
    for limit in broken(asked):
        axes = " and ".join(axis for axis in asked.axes if axis in limit.axes)
        raise incompatible(limit.key, f"{axes} ranks", limit.reason, limit.remedy)


def broken(asked: Combination) -> Iterator[Limit]:
    """The limits that a combination violates."""
    return (limit for limit in LIMITS if set(limit.axes) & set(asked.axes) and limit.is_asked(asked))
