"""Adagrad, with L2 weight decay and learning-rate decay as in torch.optim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinflow.rules.numerics import TINY, flush, flush_positive, fp32, sqrt
from twinflow.rules.rule import Hyper, Option, Options, OtherKey, Rule, Values, learning_rate, number, weight_decay

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor


def hyper(options: Options, step: int) -> Hyper:
    """The scalars of a step: eps, step size, weight_decay."""
    eps = number(options, "eps")
    step_size = number(options, "lr") / (1.0 + (step - 1) * number(options, "lr_decay"))
    return (fp32(max(eps, TINY) if eps > 0 else 0.0), fp32(step_size), fp32(number(options, "weight_decay")))


def apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    assert v is not None
    eps, step, decay = hyper
    g = flush(g + decay * p)
    v = flush_positive(v + g * g)
    return flush(p - step * (g / (sqrt(v) + eps))), m, v


ADAGRAD = Rule(
    name="adagrad",
    title="Adagrad",
    code=2,
    states=(None, "sum"),
    formats=("fp32", "bf16"),
    options=(
        learning_rate(1e-2),
        Option("lr_decay", 0.0, "decay of the learning rate"),
        weight_decay(),
        Option("initial_accumulator_value", 0.0, "initial value of the sum of squares", Values.START),
        Option("eps", 1e-10, "added to the divisor"),
    ),
    num_scalars=3,
    hyper=hyper,
    apply=apply,
    torch_class="Adagrad",
    other_keys=(
        OtherKey("amsgrad", False, "Adagrad has no such mode: leave it out", is_refused=True),
        OtherKey("fp32_optimizer_states", True, 'use offload_optimizer.states "bf16"', is_refused=True),
    ),
    start_option="initial_accumulator_value",
)
