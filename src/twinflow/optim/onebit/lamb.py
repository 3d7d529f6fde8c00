# SPDX-License-Identifier: Apache-2.0
"""1-bit LAMB: LAMB until the switch, then ranks exchange one bit for each element of the momentum.

LAMB multiplies each parameter's step by a trust ratio: the norm of the weights divided by the norm of the step, within
`min_coeff` and `max_coeff`. After the switch the second moment is frozen, so the norm of a step has little meaning. The
ratio is then the mean of the ratios before the switch, times a factor that says how much larger steps would be now with
a second moment that is not frozen. This one is computed from the gradients that follow from the exchanged momenta. The
factor is within `factor_min` and `factor_max`, and a step changes it by a share of at most `factor_threshold`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from twinflow.errors import invalid_value
from twinflow.optim.onebit.base import Freezing, FreezingOptimizer
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.rules.rule import numbers
from twinflow.state_dict import float_of, value_of

_FRESH = "exp_avg_sq_fresh"


class OneBitLamb(FreezingOptimizer):
    """LAMB over all ranks. After the switch, 1-bit codes have 1/16 of the bits of bf16 gradients.

    `freeze_step`, `freeze_threshold` and `freeze_window`: see `OneBitAdam`. `coeff_beta` is the decay of the mean of
    the trust ratios. The module's docstring explains the other options.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **freezing: Unpack[Freezing],
    ) -> None:
        for names, low, high in (
            ("(min_coeff, max_coeff)", min_coeff, max_coeff),
            ("(factor_min, factor_max)", factor_min, factor_max),
        ):
            if not 0.0 < low <= high < math.inf:
                raise invalid_value(names, (low, high), "two numbers > 0, the smaller one first")
        if not 0.0 <= coeff_beta < 1.0:
            raise invalid_value("coeff_beta", coeff_beta, "a number in [0, 1)")
        if not 0.0 < factor_threshold < 1.0:
            raise invalid_value("factor_threshold", factor_threshold, "a number above 0 and below 1")
        super().__init__(params, lr, betas, eps, weight_decay, **freezing)
        self.coeffs = (min_coeff, max_coeff)
        self.factors = (factor_min, factor_max)
        self.coeff_beta = coeff_beta
        self.factor_threshold = factor_threshold
        self._mean_coeffs = dict.fromkeys(self._params(), 0.0)
        self._last_factors = dict.fromkeys(self._params(), 1.0)

    def _update_bucket(self, bucket: FlatBucket, hits: Sequence[bool], factor: float) -> None:
        options = self._options(bucket)
        (b1, b2), eps = numbers(options, "betas"), float_of(options, "eps")
        fresh = bucket.extra.get(_FRESH)  # None before the switch
        if fresh is not None:
            before = bucket.exp_avg.clone()
            self._exchange_momenta(bucket, factor)
            implied = (bucket.exp_avg - before * b1).mul_(1.0 / (1.0 - b1))
            fresh.mul_(b2).addcmul_(implied, implied, value=1.0 - b2)
        for i, (param, where) in enumerate(zip(bucket.params, bucket.ranges(), strict=True)):
            if not hits[i]:
                continue
            bucket.steps[i] += 1
            m, v = bucket.exp_avg[where], bucket.exp_avg_sq[where]
            if fresh is None:
                bucket.second_steps[i] += 1
                grad = bucket.grads[where].float() * factor
                m.lerp_(grad, 1.0 - b1)
                v.mul_(b2).addcmul_(grad, grad, value=1.0 - b2)
            first, second = 1.0, 1.0
            if options.get("bias_correction", True):
                first, second = 1.0 - b1 ** bucket.steps[i], 1.0 - b2 ** max(1, bucket.second_steps[i])
            divisor = (v / second).sqrt() + eps
            move, weights = (m / first) / divisor, bucket.weights[where]
            if fresh is not None:
                move = torch.where(v != 0, move, 0.0)
            move = move.add(weights, alpha=float_of(options, "weight_decay"))
            if fresh is None:
                coeff = self._trust_ratio(weights, move)
                mean, beta = self._mean_coeffs[param], self.coeff_beta
                self._mean_coeffs[param] = coeff if bucket.steps[i] == 1 else beta * mean + (1.0 - beta) * coeff
            else:
                wanted = float((divisor / ((fresh[where] / second).sqrt() + eps)).max())
                coeff = self._mean_coeffs[param] * self._factor(param, wanted)
            weights.sub_(move, alpha=float_of(options, "lr") * coeff)
        bucket.write_params()

    def _trust_ratio(self, weights: Tensor, move: Tensor) -> float:
        of_weights, of_move = float(weights.norm()), float(move.norm())
        low, high = self.coeffs
        return min(max(of_weights / of_move, low), high) if of_weights > 0.0 and of_move > 0.0 else 1.0

    def _factor(self, param: nn.Parameter, wanted: float) -> float:
        """Limits the factor by which steps would be larger now if the second moment were not frozen."""
        low, high = self.factors
        last, most = self._last_factors[param], self.factor_threshold
        found = min(max(min(max(wanted, low), high), last * (1.0 - most)), last * (1.0 + most))
        self._last_factors[param] = found
        return found

    @torch.no_grad()
    def freeze(self) -> None:
        """Makes the switch, and starts the second moment of the gradients that follow from the exchanged momenta."""
        super().freeze()
        for bucket in self._buckets:
            bucket.extra.setdefault(_FRESH, bucket.exp_avg_sq.clone())

    def _head(self) -> dict[str, object]:
        mean_coeffs = [[self._mean_coeffs[param] for param in bucket.params] for bucket in self._buckets]
        last_factors = [[self._last_factors[param] for param in bucket.params] for bucket in self._buckets]
        return {**super()._head(), "mean_coeffs": mean_coeffs, "last_factors": last_factors}

    def _from_head(self, head: Mapping[str, object]) -> dict[str, object]:
        params = [param for bucket in self._buckets for param in bucket.params]
        found = super()._from_head(head)
        for name in ("mean_coeffs", "last_factors"):
            # The state may have been saved with other buckets, but the order of parameters is the same.
            saved = [float(number) for row in value_of(head, name, list) for number in row]
            found[f"_{name}"] = dict(zip(params, saved, strict=True))
        return found
