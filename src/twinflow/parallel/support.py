"""What goes with pipeline and tensor ranks and what does not: one list, for refusals and for the docs' table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from twinflow.errors import invalid_value


@dataclass(frozen=True)
class Combination:
    """What a run asks for together."""

    pipe: int = 1  # ranks
    model: int = 1
    stage: int = 0  # of ZeRO
    offload_param: bool = False
    delayed_update: bool = False
    ratio: float | str = 1.0
    sums: str = "auto"
    cpu_checkpointing: bool = False
    own_optimizer: bool = False  # a TwinOptimizer that was given
    head_patterns: bool = False  # of sparse attention
    sequence: bool = False  # tensor ranks share the sequence
    foreign: bool = False  # a model of Hugging Face's
    partition_activations: bool = False
    has_optimizer: bool = True


@dataclass(frozen=True)
class Limit:
    """One thing that some axes do not go with."""

    key: str  # of the config
    axes: frozenset[str]  # pipe, model
    asked: Callable[[Combination], Any]
    allowed: tuple[Any, ...]
    reason: str


PIPE, MODEL = "pipeline", "tensor"
_BOTH = frozenset({PIPE, MODEL})
_ZERO, _OFFLOAD = "zero_optimization", "zero_optimization.offload_optimizer"
LIMITS: tuple[Limit, ...] = (
    Limit(
        f"{_ZERO}.stage",
        frozenset({MODEL}),
        lambda c: c.stage,
        (0, 1, 2),
        "fully_shard would cut parts of tensors once more. Stage 2 partitions the optimizer's state as well.",
    ),
    Limit(
        f"{_ZERO}.offload_param.device cpu",
        _BOTH,
        lambda c: c.offload_param,
        (False,),
        "Weights are fetched in the order of one forward, and a pipeline runs several at once.",
    ),
    Limit(
        f"{_OFFLOAD}.delayed_update",
        frozenset({PIPE}),
        lambda c: c.delayed_update,
        (False,),
        "Stages would be late by different numbers of steps.",
    ),
    Limit(
        f"{_OFFLOAD}.ratio auto",
        frozenset({PIPE}),
        lambda c: c.ratio == "auto",
        (False,),
        "It is chosen from the times of one forward and one backward. Give a number.",
    ),
    Limit(
        f"{_OFFLOAD}.sums",
        frozenset({PIPE}),
        lambda c: c.sums,
        ("auto", "device"),
        "Several micro-batches are under way at once, and their gradients are summed where they are made.",
    ),
    Limit(
        "activation_checkpointing.cpu_checkpointing",
        frozenset({PIPE}),
        lambda c: c.cpu_checkpointing,
        (False,),
        "Inputs come back from the host in the order of one backward. Checkpointing itself works.",
    ),
    Limit(
        "sparse_attention.different_layout_per_head",
        frozenset({MODEL}),
        lambda c: c.head_patterns,
        (False,),
        "Ranks have different heads, and attend with one pattern.",
    ),
    Limit(
        "tensor_parallel.sequence, with a Hugging Face model",
        frozenset({PIPE}),
        lambda c: c.sequence and c.foreign and c.model > 1,
        (False,),
        "Its layers take positions from the length of what they get, which is a part of the sequence there.",
    ),
    Limit(
        "activation_checkpointing.partition_activations, with tensor_parallel.sequence",
        frozenset({MODEL}),
        lambda c: c.partition_activations and c.sequence,
        (False,),
        "Tensor ranks share the sequence: what layers keep is a part of it already.",
    ),
    Limit(
        "an optimizer",
        _BOTH,
        lambda c: c.has_optimizer,
        (True,),
        "Checkpoints and mean losses go through its ranks: name one in the config, or give one.",
    ),
    Limit(
        "optimizer (a TwinOptimizer that was built before)",
        _BOTH,
        lambda c: c.own_optimizer,
        (False,),
        "It does not know the axes: name the optimizer in the config, or give a torch.optim class.",
    ),
)


def check(asked: Combination) -> None:
    """Refuse, with the reason, what does not go with the axes that are asked for."""
    for limit in broken(asked):
        axes = " and ".join(sorted(limit.axes & _axes(asked)))
        raise invalid_value(f"{limit.key} with {axes} ranks", limit.asked(asked), limit.allowed, limit.reason)


def broken(asked: Combination) -> Iterator[Limit]:
    """The limits that a combination does not keep to."""
    axes = _axes(asked)
    return (limit for limit in LIMITS if limit.axes & axes and limit.asked(asked) not in limit.allowed)


def _axes(asked: Combination) -> frozenset[str]:
    return frozenset(name for name, size in ((PIPE, asked.pipe), (MODEL, asked.model)) if size > 1)


def table() -> str:
    """As Markdown: features by axes."""
    features: list[tuple[str, Combination]] = [
        *((f"ZeRO stage {stage}", Combination(stage=stage)) for stage in range(4)),
        ("`offload_optimizer`, with any number as `ratio`", Combination(ratio=0.5)),
        ("`offload_optimizer`, ratio `auto`", Combination(ratio="auto")),
        ("`delayed_update`", Combination(delayed_update=True)),
        ("`offload_param`", Combination(stage=3, offload_param=True)),
        ("1-bit Adam", Combination(stage=1)),
        ("activation checkpointing", Combination()),
        ("... with inputs on the host (`cpu_checkpointing`)", Combination(cpu_checkpointing=True)),
        ("... with inputs in parts (`partition_activations`)", Combination(partition_activations=True)),
        ("`tensor_parallel.sequence`", Combination(sequence=True)),
        ("... with a Hugging Face model", Combination(sequence=True, foreign=True)),
        ("sparse attention", Combination()),
        ("... with a pattern for each head", Combination(head_patterns=True)),
    ]
    layouts = {"pipeline": (2, 1), "tensor": (1, 2), "pipeline x tensor": (2, 2)}
    rows = [f"| | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
    for name, asked in features:
        found = [next(broken(replace(asked, pipe=p, model=m)), None) for p, m in layouts.values()]
        cells = ["yes" if limit is None else f"no: {limit.reason}" for limit in found]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)
