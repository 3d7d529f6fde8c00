# SPDX-License-Identifier: Apache-2.0
"""The update rules. Each rule is declared as a `Rule` record, with two functions.

`hyper` computes the scalars of a step and rounds each of them once to fp32. `apply` makes one step with fp32 tensors
and is the reference of the kernels.

Why flushing is part of the rules: on x86, arithmetic on subnormal numbers is many times slower, and the momentum of
unused embedding rows decays into that range. With a hardware flush mode alone, results would depend on the machine.
Therefore each rule defines the flushing: states and weights below 2**-100 (8e-31) in magnitude become +0, on every
machine and in these references. The note in csrc/rules.h shows why the native kernels may then use the hardware's mode.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from twinflow.errors import invalid_value
from twinflow.rules.rule import Hyper, Option, Options, OtherKey, Rule, Values, number, numbers

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor

    Updated = tuple[Tensor, Tensor | None, Tensor | None]  # the new weight and the new states

TINY = 2.0**-100

# Options of several rules, and keys of other libraries.
BETAS = Option("betas", (0.9, 0.999), "decay of the two moments", Values.BETAS)
BIAS = Option(
    "bias_correction",
    True,
    "divide the moments by 1 - beta**step, because they start at zero; torch.optim always does",
    Values.FLAG,
)
EPS = Option("eps", 1e-8, "added to the divisor")
DECAY = Option("weight_decay", 0.0, "weight decay", in_config=0.0)  # DeepSpeed's default is 0 for every rule
FP32_STATES = OtherKey("fp32_optimizer_states", True, 'use offload_optimizer.states "bf16"', is_refused=True)


def flush(x: Tensor) -> Tensor:
    """`x` with all values below `TINY` in magnitude replaced by +0. NaN stays."""
    return x.masked_fill(x.abs() < TINY, 0.0)


def flush_positive(x: Tensor) -> Tensor:
    """`flush` for numbers that are never negative."""
    return x.masked_fill(x < TINY, 0.0)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root, as in hardware. torch's square root is not correctly rounded with MKL."""
    return x.double().sqrt().float()


def fp32(x: float) -> float:
    """`x` rounded to fp32. Kernels and references compute with these scalars."""
    return ctypes.c_float(x).value


# Adam and AdamW.
#
# The bias correction of the second moment is not part of the loop over elements: with c = sqrt(1 - b2**t), the quotient
# m / (sqrt(v)/c + eps) equals c * m / (sqrt(v) + c*eps). This form saves one division and one rounding per element.


def _common_hyper(options: Options, step: int) -> Hyper:
    (b1, b2), lr, eps = numbers(options, "betas"), number(options, "lr"), number(options, "eps")
    decay = number(options, "weight_decay")
    has_correction = bool(options.get("bias_correction", True))  # older checkpoints do not have this option
    first_correction = 1.0 - b1**step if has_correction else 1.0
    # For 1-bit Adam: the number of gradients in the second moment, and whether the second moment is frozen.
    second_step = number(options, "second_step") if "second_step" in options else step
    second_correction = math.sqrt(1.0 - b2 ** min(step, second_step)) if has_correction else 1.0
    b2 = 1.0 if options.get("is_frozen") else b2
    # After the switch of 1-bit Adam, the argument for the gradient is the exchanged momentum, and v includes eps.
    if options.get("is_exchanged"):
        return tuple(fp32(x) for x in (1.0, 1.0, 0.0, TINY, lr * second_correction / first_correction, decay))
    scaled_eps = max(eps * second_correction, TINY) if eps > 0 else 0.0  # the divisor is never subnormal
    return tuple(
        fp32(x) for x in (1.0 - b1, b2, 1.0 - b2, scaled_eps, lr * second_correction / first_correction, decay)
    )


def adamw_hyper(options: Options, step: int) -> Hyper:
    """The scalars of an AdamW step: 1-b1, b2, 1-b2, scaled eps, step size, 1 - lr * weight_decay, 0."""
    *common, decay = _common_hyper(options, step)
    return (*common, fp32(1.0 - number(options, "lr") * number(options, "weight_decay")) if decay else 1.0, 0.0)


def adam_hyper(options: Options, step: int) -> Hyper:
    """The scalars of an Adam step: 1-b1, b2, 1-b2, scaled eps, step size, 1, weight_decay."""
    *common, decay = _common_hyper(options, step)
    return (*common, 1.0, decay)


def _moments(m: Tensor, v: Tensor, g: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
    """The new moments, and the step to subtract from the weight."""
    one_minus_b1, b2, one_minus_b2, eps, step = hyper[:5]
    m = flush(m + (g - m) * one_minus_b1)
    v = flush_positive(b2 * v + (one_minus_b2 * g) * g)
    return m, v, step * (m / (sqrt(v) + eps))


def adamw_apply(p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper) -> Updated:
    """One step of AdamW. Weight decay multiplies the weight by 1 - lr * weight_decay."""
    assert m is not None and v is not None
    m, v, move = _moments(m, v, g, hyper)
    return flush(p * hyper[5] - move), m, v


def adam_apply(p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper) -> Updated:
    """One step of Adam. Weight decay is added to the gradient (L2). With weight decay 0, Adam equals AdamW."""
    assert m is not None and v is not None
    m, v, move = _moments(m, v, flush(g + hyper[6] * p) if hyper[6] else g, hyper)
    return flush(p - move), m, v


ADAMW = Rule(
    name="adamw",
    title="AdamW",
    code=0,
    states=("exp_avg", "exp_avg_sq"),
    formats=("fp32", "bf16", "int8", "4bit"),
    options=(Option("lr", 1e-3, "learning rate"), BETAS, EPS, replace(DECAY, default=1e-2), BIAS),
    num_scalars=7,
    hyper=adamw_hyper,
    apply=adamw_apply,
    torch_class="AdamW",
    torch_modes={"amsgrad": False, "decoupled_weight_decay": True},
    train={"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    is_normalized=True,
)
ADAM = replace(
    ADAMW,
    name="adam",
    title="Adam",
    code=1,
    options=(Option("lr", 1e-3, "learning rate"), BETAS, EPS, DECAY, BIAS),
    hyper=adam_hyper,
    apply=adam_apply,
    torch_class="Adam",
    torch_modes={"amsgrad": False, "decoupled_weight_decay": False},
    train={"lr": 2e-3, "betas": (0.9, 0.95)},
)


# Adagrad, with L2 weight decay and learning-rate decay as in torch.optim.


def adagrad_hyper(options: Options, step: int) -> Hyper:
    """The scalars of a step: eps, step size, weight_decay."""
    eps = number(options, "eps")
    step_size = number(options, "lr") / (1.0 + (step - 1) * number(options, "lr_decay"))
    return (fp32(max(eps, TINY) if eps > 0 else 0.0), fp32(step_size), fp32(number(options, "weight_decay")))


def adagrad_apply(p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper) -> Updated:
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
        Option("lr", 1e-2, "learning rate"),
        Option("lr_decay", 0.0, "decay of the learning rate"),
        DECAY,
        Option("initial_accumulator_value", 0.0, "initial value of the sum of squares", Values.START),
        Option("eps", 1e-10, "added to the divisor"),
    ),
    num_scalars=3,
    hyper=adagrad_hyper,
    apply=adagrad_apply,
    torch_class="Adagrad",
    other_keys=(
        OtherKey("amsgrad", False, "Adagrad has no such mode: leave it out", is_refused=True),
        FP32_STATES,
    ),
    start_option="initial_accumulator_value",
)


# Lion: the sign of an interpolated momentum, with decoupled weight decay.


def lion_hyper(options: Options, step: int) -> Hyper:
    """The scalars of a step: 1-b1, 1-b2, lr, 1 - lr * weight_decay."""
    (b1, b2), lr = numbers(options, "betas"), number(options, "lr")
    return (fp32(1.0 - b1), fp32(1.0 - b2), fp32(lr), fp32(1.0 - lr * number(options, "weight_decay")))


def lion_apply(p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper) -> Updated:
    """One step of Lion. Where the interpolated momentum, which gives the sign, is NaN, the weight becomes NaN."""
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
        Option("lr", 1e-4, "learning rate", in_config=1e-3),
        Option("betas", (0.9, 0.99), "decay of the direction and of the momentum", Values.BETAS, (0.9, 0.999)),
        DECAY,
    ),
    num_scalars=4,
    hyper=lion_hyper,
    apply=lion_apply,
    other_keys=(OtherKey("set_grad_none", True, "gradients are always set to None"), FP32_STATES),
    train={"lr": 3e-4, "weight_decay": 0.3, "betas": (0.9, 0.99)},
    is_normalized=True,
)


# SGD with momentum, dampening, Nesterov and L2 weight decay as in torch.optim.
#
# Why double precision: torch's SGD uses fused multiply-adds. In fp32, with each operation rounded, the error of the
# weights is up to 7% larger (Nesterov, lr 0.1). A product of two fp32 numbers is exact in double, on every machine.


def check_nesterov(options: Options) -> None:
    """Raise ValueError for Nesterov momentum without momentum or with dampening."""
    if options["nesterov"] and (number(options, "momentum") == 0.0 or number(options, "dampening") != 0.0):
        remedy = "Nesterov momentum needs momentum > 0 and dampening = 0. Set both, or nesterov=False."
        raise invalid_value("nesterov", True, "False with these options", remedy)


def sgd_hyper(options: Options, step: int) -> Hyper:
    """The scalars of a step: momentum, share of the gradient that is added to the momentum (1 - dampening, but 1 in the
    first step, as in torch), lr, weight_decay, nesterov (1 or 0).
    """
    keep = 1.0 if step == 1 else 1.0 - number(options, "dampening")
    if number(options, "momentum") == 0.0:
        keep = 1.0
    scalars = (number(options, "momentum"), keep, number(options, "lr"), number(options, "weight_decay"))
    return (*(fp32(x) for x in scalars), 1.0 if options["nesterov"] else 0.0)


def sgd_apply(p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper) -> Updated:
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
        Option("lr", 1e-3, "learning rate"),
        Option("momentum", 0.0, "decay of the momentum"),
        Option("dampening", 0.0, "the momentum takes (1 - dampening) of the gradient", Values.NUMBER),
        DECAY,
        Option("nesterov", False, "Nesterov momentum: needs momentum > 0 and dampening 0", Values.FLAG),
    ),
    num_scalars=5,
    hyper=sgd_hyper,
    apply=sgd_apply,
    check_together=check_nesterov,
    torch_class="SGD",
    other_keys=(
        OtherKey("differentiable", False, "leave it false: an update cannot be differentiated", is_refused=True),
    ),
    state_option="momentum",
    train={"lr": 0.1, "momentum": 0.9},
)

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADAMW, ADAM, ADAGRAD, LION, SGD)}
