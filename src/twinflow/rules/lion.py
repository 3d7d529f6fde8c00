"""Lion: the sign of an interpolated momentum, with decoupled weight decay."""

from __future__ import annotations

import torch
from torch import Tensor

from twinflow.rules.adam import check
from twinflow.rules.numerics import flush, fp32
from twinflow.rules.rule import Hyper, Options, Rule


def hyper(options: Options, step: int) -> Hyper:
    """1-b1, 1-b2, lr, 1 - lr * weight_decay."""
    (b1, b2), lr = options["betas"], float(options["lr"])
    return (fp32(1.0 - b1), fp32(1.0 - b2), fp32(lr), fp32(1.0 - lr * float(options["weight_decay"])))


def apply(
    p: Tensor, m: Tensor | None, v: Tensor | None, g: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One step of Lion. A NaN direction moves the weight to NaN: it is never silently dropped."""
    assert m is not None
    one_minus_b1, one_minus_b2, lr, decay = hyper
    difference = g - m
    direction = flush(m + difference * one_minus_b1)
    move = torch.where(direction > 0, lr, torch.where(direction < 0, -lr, direction))
    return flush(p * decay - move), flush(m + difference * one_minus_b2), v


LION = Rule("lion", 3, ("exp_avg", None), ("fp32", "bf16"), 4, hyper, check, apply)
