"""Adamax as in torch.optim: Adam with a decaying maximum of gradients in the place of their mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinflow.rules.numerics import TINY, flush, flush_positive, fp32
from twinflow.rules.rule import BETAS, DIFFERENTIABLE, EPS, Hyper, Options, Rule, learning_rate, weight_decay

if TYPE_CHECKING:
    from torch import Tensor


def hyper(options: Options, step: int) -> Hyper:
    """1-b1, b2, eps, step size, weight_decay."""
    (b1, b2), eps = options["betas"], float(options["eps"])
    step_size = float(options["lr"]) / (1.0 - b1**step)
    numbers = (1.0 - b1, b2, max(eps, TINY) if eps > 0 else 0.0, step_size, float(options["weight_decay"]))
    return tuple(fp32(number) for number in numbers)


def apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One step of Adamax. A NaN gradient is larger than any maximum."""
    assert m is not None and v is not None
    one_minus_b1, b2, eps, step, decay = hyper
    g = flush(g + decay * p)
    m = flush(m + (g - m) * one_minus_b1)
    size, decayed = g.abs() + eps, b2 * v
    v = flush_positive(decayed.where(size < decayed, size))
    return flush(p - step * (m / v)), m, v


ADAMAX = Rule(
    name="adamax",
    title="Adamax",
    code=5,
    states=("exp_avg", "exp_inf"),
    formats=("fp32", "bf16"),
    options=(learning_rate(2e-3), BETAS, EPS, weight_decay()),
    num_scalars=5,
    hyper=hyper,
    apply=apply,
    torch_class="Adamax",
    other_keys=(DIFFERENTIABLE,),
    train={"betas": (0.9, 0.95)},
    is_normalized=True,
)
