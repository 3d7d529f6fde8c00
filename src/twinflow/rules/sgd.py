"""SGD with momentum, dampening, Nesterov and L2 weight decay as in torch.optim.

Why double precision: torch's SGD uses fused multiply-adds. In fp32, with each operation rounded, the error of the
weights is up to 7% larger (Nesterov, lr 0.1). A product of two fp32 numbers is exact in double, on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinflow.errors import invalid_value
from twinflow.rules.numerics import flush, fp32
from twinflow.rules.rule import (
    DIFFERENTIABLE,
    Hyper,
    Option,
    Options,
    Rule,
    Values,
    learning_rate,
    number,
    weight_decay,
)

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor


def check_nesterov(options: Options) -> None:
    """Raise ValueError for Nesterov momentum without momentum or with dampening."""
    if options["nesterov"] and (number(options, "momentum") == 0.0 or number(options, "dampening") != 0.0):
        raise invalid_value("nesterov", True, "False, or True with momentum > 0 and dampening = 0")


def hyper(options: Options, step: int) -> Hyper:
    """The scalars of a step: momentum, share of the gradient in the momentum (1 in the first step, as in torch), lr,
    weight_decay, nesterov.
    """
    keep = 1.0 if step == 1 else 1.0 - number(options, "dampening")
    if number(options, "momentum") == 0.0:
        keep = 1.0
    numbers = (number(options, "momentum"), keep, number(options, "lr"), number(options, "weight_decay"))
    return (*(fp32(x) for x in numbers), 1.0 if options["nesterov"] else 0.0)


def apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One step of SGD. If there is no momentum buffer, zeros are used, and the new buffer is dropped."""
    momentum, keep, lr, decay, nesterov = hyper
    old = m if m is not None else g.new_zeros(g.shape)
    weight = p.double()
    if keep == 1.0 and decay == 0.0 and not nesterov:  # fp32 is as accurate as torch here, and faster than double
        buffer = flush(momentum * old + g)
        direction = buffer.double()
    else:
        grad = g.double() + decay * weight
        exact = momentum * old.double() + keep * grad
        buffer = flush(exact.float())
        direction = grad + momentum * exact if nesterov else exact
    return flush((weight - lr * direction).float()), (buffer if m is not None else None), v


SGD = Rule(
    name="sgd",
    title="SGD",
    code=4,
    states=("momentum_buffer", None),
    formats=("fp32", "bf16"),
    options=(
        learning_rate(1e-3),
        Option("momentum", 0.0, "decay of the momentum"),
        Option("dampening", 0.0, "the momentum takes (1 - dampening) of the gradient", Values.NUMBER),
        weight_decay(),
        Option("nesterov", False, "Nesterov momentum: needs momentum > 0 and dampening 0", Values.FLAG),
    ),
    num_scalars=5,
    hyper=hyper,
    apply=apply,
    check_together=check_nesterov,
    torch_class="SGD",
    other_keys=(DIFFERENTIABLE,),
    state_option="momentum",
    train={"lr": 0.1, "momentum": 0.9},
)
