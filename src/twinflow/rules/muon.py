# SPDX-License-Identifier: Apache-2.0
"""The declaration of Muon: options, defaults and scalars. `newton_schulz.py` has the arithmetic.

Muon keeps a momentum of each matrix, orthogonalises it by a Newton-Schulz iteration, and subtracts the result from the
weights. It is not an element-wise rule: every element of an update depends on the whole matrix. All parameters that are
not matrices are updated by AdamW. They are in param groups of their own (optim/muon_groups.py).

A step with the options of torch.optim.Muon, for the gradient g of a matrix with the weight p and the momentum m:

    m <- m + (1 - momentum) * (g - m)
    d  = g + momentum * (m - g)  if nesterov, otherwise m
    p <- p - lr * weight_decay * p - lr * scale * orthogonalised(d)

The last line is SGD without momentum, whose gradient is scale * orthogonalised(d). The kernels of SGD therefore write
the weights, in all formats of weights and masters.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from twinflow.rules.rule import Hyper, Option, Options, Values, number
from twinflow.rules.rules import ADAMW, BETAS, BIAS, DECAY, EPS, RULES, SGD, fp32

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, which torch.optim.Muon uses too
SCALES: Final = ("original", "match_rms_adamw", "spectral", "none")


def scale(name: str, num_rows: int, num_columns: int) -> float:
    """The factor of an orthogonalised update, by its shape.

    "original" and "match_rms_adamw" are those of torch.optim.Muon. With "match_rms_adamw" the elements of an update are
    about as large as those of AdamW, so that AdamW's learning rate and weight decay can be used. With "spectral" the
    spectral norm of an update depends on the ratio of outputs and inputs, as in the maximal update parametrisation.
    """
    if name == "original":
        return math.sqrt(max(1.0, num_rows / num_columns))
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(num_rows, num_columns))
    return math.sqrt(num_rows / num_columns) if name == "spectral" else 1.0


def _weights_hyper(options: Options, step: int) -> Hyper:
    """The scalars of SGD: no momentum, the whole gradient, lr, weight_decay, no Nesterov momentum."""
    return (0.0, 1.0, fp32(number(options, "lr")), fp32(number(options, "weight_decay")), 0.0)


MUON: Final = replace(
    SGD,
    name="muon",
    title="Muon",
    code=-1,  # no kernel of its own
    states=("momentum_buffer", None),
    formats=("fp32", "bf16", "int8"),
    options=(
        Option("lr", 1e-3, "learning rate"),
        Option("momentum", 0.95, "decay of the momentum of matrices"),
        Option("nesterov", True, "orthogonalise the Nesterov momentum", Values.FLAG),
        replace(DECAY, default=0.1),
        Option(
            "adjust_lr_fn", "original", "factor of the update of a matrix, by its shape", Values.CHOICE, choices=SCALES
        ),
        Option("ns_steps", 5, "number of Newton-Schulz iterations", Values.COUNT),
        Option(
            "ns_coefficients",
            COEFFICIENTS,
            "coefficients of the polynomial of a Newton-Schulz iteration",
            Values.POLYNOMIAL,
        ),
        Option("ns_eps", 1e-7, "least norm by which a matrix is divided before the iterations"),
        replace(BETAS, in_config=(0.9, 0.95)),
        replace(EPS, in_config=1e-10),
        BIAS,
    ),
    hyper=_weights_hyper,
    check_together=None,
    torch_class=None,
    other_keys=(),
    state_option=None,
    train={"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "adjust_lr_fn": "match_rms_adamw"},
    is_normalized=True,
    elementwise=ADAMW,
)
# The rule by which kernels write the weights of matrices: SGD with Muon's scalars.
MUON_WEIGHTS: Final = replace(SGD, hyper=_weights_hyper)
ALL_RULES: Final = {**RULES, MUON.name: MUON}
