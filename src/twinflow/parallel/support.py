"""Features that conflict with pipeline or tensor parallelism: one list for errors and for the table in the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class Limit:
    """A feature that conflicts with pipeline ranks, tensor ranks or both."""

    key: str  # name of the option, with its value if `asked` returns a bool
    axes: frozenset[str]  # PIPE, MODEL or both
    asked: Callable[[Combination], Any]
    allowed: tuple[Any, ...]
    reason: str  # continues "because"
    remedy: str = ""


PIPE, MODEL = "pipeline", "tensor"
_BOTH = frozenset({PIPE, MODEL})
_ZERO, _OFFLOAD = "zero_optimization", "zero_optimization.offload_optimizer"
LIMITS: tuple[Limit, ...] = (
    Limit(
        f"{_ZERO}.stage",
        frozenset({MODEL}),
        lambda c: c.stage,
        (0, 1, 2),
        "fully_shard would split tensors that are already split",
        "Set zero_optimization.stage to 2, which also partitions the optimizer state.",
    ),
    Limit(
        f"{_ZERO}.offload_param.device='cpu'",
        _BOTH,
        lambda c: c.offload_param,
        (False,),
        "weights are fetched in the order of one forward, and a pipeline runs several forwards at a time",
        "Leave offload_param out.",
    ),
    Limit(
        f"{_OFFLOAD}.delayed_update=True",
        frozenset({PIPE}),
        lambda c: c.delayed_update,
        (False,),
        "the updates of different stages would be delayed by different numbers of steps",
        "Set delayed_update to false.",
    ),
    Limit(
        f"{_OFFLOAD}.ratio='auto'",
        frozenset({PIPE}),
        lambda c: c.ratio == "auto",
        (False,),
        "the ratio is chosen from the times of one forward and one backward",
        "Set ratio to a number.",
    ),
    Limit(
        f"{_OFFLOAD}.sums",
        frozenset({PIPE}),
        lambda c: c.sums,
        ("auto", "device"),
        "several micro-batches run at a time, and their gradients are summed on the GPU",
        "Set sums to 'auto' or 'device'.",
    ),
    Limit(
        "activation_checkpointing.cpu_checkpointing=True",
        frozenset({PIPE}),
        lambda c: c.cpu_checkpointing,
        (False,),
        "inputs are fetched from the host in the order of one backward",
        "Set cpu_checkpointing to false. Activation checkpointing without it works.",
    ),
    Limit(
        "sparse_attention.different_layout_per_head=True",
        frozenset({MODEL}),
        lambda c: c.head_patterns,
        (False,),
        "tensor ranks have different heads, but use the same pattern",
        "Set different_layout_per_head to false.",
    ),
    Limit(
        "tensor_parallel.sequence=True with a Hugging Face model",
        frozenset({PIPE}),
        lambda c: c.sequence and c.foreign and c.model > 1,
        (False,),
        "Hugging Face layers compute positions from the length of their input, which is only a part of the sequence",
        "Set tensor_parallel.sequence to false.",
    ),
    Limit(
        "activation_checkpointing.partition_activations=True with tensor_parallel.sequence=True",
        frozenset({MODEL}),
        lambda c: c.partition_activations and c.sequence,
        (False,),
        "tensor ranks split the sequence, so the activations are already partitioned",
        "Set partition_activations to false.",
    ),
    Limit(
        "an engine without an optimizer",
        _BOTH,
        lambda c: c.has_optimizer,
        (True,),
        "checkpoints and mean losses use the rank groups of the optimizer",
        'Add a section "optimizer" to the config, or pass `optimizer` to initialize().',
    ),
    Limit(
        "a TwinOptimizer that was built before initialize",
        _BOTH,
        lambda c: c.own_optimizer,
        (False,),
        "this optimizer was built without the pipeline and tensor ranks of the config",
        "Name the optimizer in the config, or pass a torch.optim class.",
    ),
)


def check(asked: Combination) -> None:
    """Raise a ValueError if a feature conflicts with the axes of the run."""
    for limit in broken(asked):
        axes = " and ".join(sorted(limit.axes & _axes(asked)))
        value = limit.asked(asked)
        option = limit.key if isinstance(value, bool) else f"{limit.key}={value!r}"
        raise incompatible(option, f"{axes} ranks", limit.reason, limit.remedy)


def broken(asked: Combination) -> Iterator[Limit]:
    """The limits that a combination violates."""
    axes = _axes(asked)
    return (limit for limit in LIMITS if limit.axes & axes and limit.asked(asked) not in limit.allowed)


def _axes(asked: Combination) -> frozenset[str]:
    return frozenset(name for name, size in ((PIPE, asked.pipe), (MODEL, asked.model)) if size > 1)


def table() -> str:
    """The table of the docs in Markdown: features by axes."""
    features: list[tuple[str, Combination]] = [
        *((f"ZeRO stage {stage}", Combination(stage=stage)) for stage in range(4)),
        ("`offload_optimizer`, with any number as `ratio`", Combination(ratio=0.5)),
        ("`offload_optimizer`, ratio `auto`", Combination(ratio="auto")),
        ("`delayed_update`", Combination(delayed_update=True)),
        ("`offload_param`", Combination(stage=3, offload_param=True)),
        ("1-bit Adam", Combination(stage=1)),
        ("activation checkpointing", Combination()),
        ("checkpointing with inputs on the host (`cpu_checkpointing`)", Combination(cpu_checkpointing=True)),
        ("checkpointing with partitioned inputs (`partition_activations`)", Combination(partition_activations=True)),
        ("`tensor_parallel.sequence`", Combination(sequence=True)),
        ("`tensor_parallel.sequence` with a Hugging Face model", Combination(sequence=True, foreign=True)),
        ("sparse attention", Combination()),
        ("sparse attention with a pattern for each head", Combination(head_patterns=True)),
    ]
    layouts = {"pipeline": (2, 1), "tensor": (1, 2), "pipeline x tensor": (2, 2)}
    rows = [f"| | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
    for name, asked in features:
        found = [next(broken(replace(asked, pipe=p, model=m)), None) for p, m in layouts.values()]
        cells = ["yes" if limit is None else f"no, because {limit.reason}" for limit in found]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)
