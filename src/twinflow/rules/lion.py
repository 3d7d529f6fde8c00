"""Lion: the sign of an interpolated momentum, with decoupled weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinflow.rules.numerics import flush, fp32
from twinflow.rules.rule import (
    SET_GRAD_NONE,
    Hyper,
    Option,
    Options,
    OtherKey,
    Rule,
    Values,
    learning_rate,
    number,
    numbers,
    weight_decay,
)

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor


def hyper(options: Options, step: int) -> Hyper:
    """The scalars of a step: 1-b1, 1-b2, lr, 1 - lr * weight_decay."""
    (b1, b2), lr = numbers(options, "betas"), number(options, "lr")
    return (fp32(1.0 - b1), fp32(1.0 - b2), fp32(lr), fp32(1.0 - lr * number(options, "weight_decay")))


def apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One step of Lion. If the direction is NaN, the weight becomes NaN."""
    assert m is not None
    one_minus_b1, one_minus_b2, lr, decay = hyper
    difference = g - m
    direction = flush(m + difference * one_minus_b1)
    move = direction.masked_fill(direction > 0, lr).masked_fill(direction < 0, -lr)
    return flush(p * decay - move), flush(m + difference * one_minus_b2), v


LION = Rule(
    name="lion",
    title="Lion",
    code=3,
    states=("exp_avg", None),
    formats=("fp32", "bf16"),
    options=(
        learning_rate(1e-4, in_config=1e-3),
        Option("betas", (0.9, 0.99), "decay of the direction and of the momentum", Values.BETAS, (0.9, 0.999)),
        weight_decay(),
    ),
    num_scalars=4,
    hyper=hyper,
    apply=apply,
    other_keys=(
        SET_GRAD_NONE,
        OtherKey("fp32_optimizer_states", True, 'use offload_optimizer.states "bf16"', is_refused=True),
    ),
    train={"lr": 3e-4, "weight_decay": 0.3, "betas": (0.9, 0.99)},
    is_normalized=True,
)
