"""Adam and AdamW.

The bias correction of the second moment is not part of the loop over elements: with c = sqrt(1 - b2**t), the quotient m
/ (sqrt(v)/c + eps) equals c * m / (sqrt(v) + c*eps). This form saves one division and one rounding per element.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from twinflow.rules.numerics import TINY, flush, flush_positive, fp32, sqrt
from twinflow.rules.rule import BETAS, EPS, Hyper, Options, Rule, learning_rate, number, numbers, weight_decay

if TYPE_CHECKING:  # reading a config imports the rules, and must not import torch, which takes seconds
    from torch import Tensor


def _hyper(options: Options, step: int) -> Hyper:
    (b1, b2), lr, eps = numbers(options, "betas"), number(options, "lr"), number(options, "eps")
    decay = number(options, "weight_decay")
    first_correction = 1.0 - b1**step
    # For 1-bit Adam: the number of gradients in the second moment, and whether the second moment is frozen.
    second_step = number(options, "second_step") if "second_step" in options else step
    second_correction = math.sqrt(1.0 - b2 ** min(step, second_step))
    b2 = 1.0 if options.get("is_frozen") else b2
    # After the switch of 1-bit Adam, the argument for the gradient is the exchanged momentum, and v includes eps.
    if options.get("is_exchanged"):
        return tuple(fp32(x) for x in (1.0, 1.0, 0.0, TINY, lr * second_correction / first_correction, decay))
    scaled_eps = max(eps * second_correction, TINY) if eps > 0 else 0.0  # the divisor is never subnormal
    return tuple(
        fp32(x) for x in (1.0 - b1, b2, 1.0 - b2, scaled_eps, lr * second_correction / first_correction, decay)
    )


def adamw_hyper(options: Options, step: int) -> Hyper:
    """The scalars of an AdamW step: 1-b1, b2, 1-b2, eps, step size, 1 - lr * weight_decay, 0."""
    *common, decay = _hyper(options, step)
    return (*common, fp32(1.0 - number(options, "lr") * number(options, "weight_decay")) if decay else 1.0, 0.0)


def adam_hyper(options: Options, step: int) -> Hyper:
    """The scalars of an Adam step: 1-b1, b2, 1-b2, eps, step size, 1, weight_decay."""
    *common, decay = _hyper(options, step)
    return (*common, 1.0, decay)


def _moments(m: Tensor, v: Tensor, g: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor]:
    """The new moments, and the step to subtract from the weight."""
    one_minus_b1, b2, one_minus_b2, eps, step = hyper[:5]
    m = flush(m + (g - m) * one_minus_b1)
    v = flush_positive(b2 * v + (one_minus_b2 * g) * g)
    return m, v, step * (m / (sqrt(v) + eps))


def adamw_apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One step of AdamW. Weight decay multiplies the weight."""
    assert m is not None and v is not None
    m, v, move = _moments(m, v, g, hyper)
    return flush(p * hyper[5] - move), m, v


def adam_apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One step of Adam. Weight decay is added to the gradient (L2). Without it the result is that of AdamW."""
    assert m is not None and v is not None
    m, v, move = _moments(m, v, flush(g + hyper[6] * p) if hyper[6] else g, hyper)
    return flush(p - move), m, v


ADAMW = Rule(
    name="adamw",
    title="AdamW",
    code=0,
    states=("exp_avg", "exp_avg_sq"),
    formats=("fp32", "bf16", "int8"),
    options=(learning_rate(1e-3), BETAS, EPS, weight_decay(1e-2)),
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
    options=(learning_rate(1e-3), BETAS, EPS, weight_decay()),
    hyper=adam_hyper,
    apply=adam_apply,
    torch_class="Adam",
    torch_modes={"amsgrad": False, "decoupled_weight_decay": False},
    train={"lr": 2e-3, "betas": (0.9, 0.95)},
)
