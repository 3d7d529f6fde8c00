"""Adagrad, with L2 weight decay and learning-rate decay as in torch.optim."""

from __future__ import annotations

from torch import Tensor

from twinflow.rules.checks import check_numbers
from twinflow.rules.numerics import TINY, flush, flush_positive, fp32, sqrt
from twinflow.rules.rule import Hyper, Options, Rule


def check(options: Options) -> None:
    """Raise ValueError if an option is out of range."""
    check_numbers(options, "lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value")


def hyper(options: Options, step: int) -> Hyper:
    """Eps, step size, weight_decay."""
    eps = float(options["eps"])
    step_size = float(options["lr"]) / (1.0 + (step - 1) * float(options["lr_decay"]))
    return (fp32(max(eps, TINY) if eps > 0 else 0.0), fp32(step_size), fp32(float(options["weight_decay"])))


def apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One step of Adagrad."""
    assert v is not None
    eps, step, decay = hyper
    g = flush(g + decay * p)
    v = flush_positive(v + g * g)
    return flush(p - step * (g / (sqrt(v) + eps))), m, v


ADAGRAD = Rule("adagrad", 2, (None, "sum"), ("fp32", "bf16"), 3, hyper, check, apply)
