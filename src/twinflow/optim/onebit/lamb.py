"""1-bit LAMB: LAMB until the switch, then ranks exchange one bit for each element of the momentum.

LAMB multiplies each parameter's step by a trust ratio: the norm of the weights divided by the norm of the step, within
`min_coeff` and `max_coeff`. After the switch the second moment is frozen, so the norm of a step has little meaning. The
ratio is then the mean of the ratios before the switch, times a factor that says how much smaller the second moment
would be now. That second moment is computed from the gradients that follow from the exchanged momenta. The factor is
within `factor_min` and `factor_max`, and changes in a step by a ratio of at most `factor_threshold`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from twinflow.errors import invalid_value
from twinflow.optim.onebit.base import Shared
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.optim.onebit.freezing import FreezingOptimizer
from twinflow.rules.rule import numbers
from twinflow.state_dict import float_of, value_of
from twinflow.zero.compression import THRESHOLD, Compression

_FRESH = "exp_avg_sq_fresh"


class OneBitLamb(FreezingOptimizer):
    """LAMB over all ranks, with 1/16 of the communication of bf16 gradients after the switch.

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
        freeze_step: int | None = None,
        freeze_threshold: float = THRESHOLD,
        freeze_window: int | None = None,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        code: str = "1bit",
        **shared: Unpack[Shared],
    ) -> None:
        for names, low, high in (("coeff", min_coeff, max_coeff), ("factor", factor_min, factor_max)):
            if not 0.0 < low <= high < math.inf:
                raise invalid_value(f"min and max of {names}", (low, high), "two numbers > 0, the smaller one first")
        if not 0.0 <= coeff_beta < 1.0:
            raise invalid_value("coeff_beta", coeff_beta, "a number in [0, 1)")
        if not 0.0 < factor_threshold < 1.0:
            raise invalid_value("factor_threshold", factor_threshold, "a number above 0 and below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, Compression(code, freeze_step, freeze_threshold, freeze_window), **shared)
        self.coeffs = (min_coeff, max_coeff)
        self.factors = (factor_min, factor_max)
        self.coeff_beta = coeff_beta
        self.factor_threshold = factor_threshold
        sizes = [len(bucket.params) for bucket in self._buckets]
        self._mean_coeffs = [[0.0] * size for size in sizes]  # by bucket and parameter
        self._last_factors = [[1.0] * size for size in sizes]

    def _update(self, present: list[list[bool]], norms: Sequence[float]) -> None:
        if self.is_compressed:
            factor = self._bounded_norm(norms)
            for i in range(len(self._buckets)):
                self._compressed_step(i, present[i], factor)
            return
        factor = self._mean_gradients()
        for i in range(len(self._buckets)):
            self._plain_step(i, present[i], factor)
        self._maybe_freeze()

    def _plain_step(self, number: int, hits: Sequence[bool], factor: float) -> None:
        bucket = self._buckets[number]
        (b1, b2), eps = numbers(self._options(bucket), "betas"), float_of(self._options(bucket), "eps")
        for i, where in enumerate(bucket.ranges()):
            if not hits[i]:
                continue
            bucket.steps[i] += 1
            grad = bucket.grads[where].float() * factor
            m, v = bucket.exp_avg[where], bucket.exp_avg_sq[where]
            m.lerp_(grad, 1.0 - b1)
            v.mul_(b2).addcmul_(grad, grad, value=1.0 - b2)
            first, second = 1.0 - b1 ** bucket.steps[i], 1.0 - b2 ** bucket.steps[i]
            move = (m / first) / ((v / second).sqrt() + eps)
            coeff = self._step(bucket, i, where, move, None)
            mean = self._mean_coeffs[number]
            mean[i] = coeff if bucket.steps[i] == 1 else self.coeff_beta * mean[i] + (1.0 - self.coeff_beta) * coeff
        bucket.write_params()

    def _step(self, bucket: FlatBucket, i: int, where: slice, move: Tensor, coeff: float | None) -> float:
        """Updates one parameter with factor `coeff`, or with its trust ratio (None). Returns the factor."""
        options, weights = self._options(bucket), bucket.weights[where]
        move = move.add(weights, alpha=float_of(options, "weight_decay"))
        if coeff is None:
            of_weights, of_move = float(weights.norm()), float(move.norm())
            low, high = self.coeffs
            coeff = min(max(of_weights / of_move, low), high) if of_weights > 0.0 and of_move > 0.0 else 1.0
        weights.sub_(move, alpha=float_of(options, "lr") * coeff)
        return coeff

    def _compressed_step(self, number: int, hits: Sequence[bool], factor: float) -> None:
        bucket, fresh = self._buckets[number], self._buckets[number].extra[_FRESH]
        (b1, b2), eps = numbers(self._options(bucket), "betas"), float_of(self._options(bucket), "eps")
        self._warn_of_late(bucket, hits)
        before = bucket.exp_avg.clone()
        self._exchange(bucket, bucket.exp_avg, bucket.grads, (1.0 - b1) * factor, bucket.exp_avg, b1)
        implied = (bucket.exp_avg - before * b1).mul_(1.0 / (1.0 - b1))
        fresh.mul_(b2).addcmul_(implied, implied, value=1.0 - b2)
        assert bucket.frozen_at is not None
        for i, where in enumerate(bucket.ranges()):
            if not hits[i]:
                continue
            bucket.steps[i] += 1
            m, v = bucket.exp_avg[where], bucket.exp_avg_sq[where]
            first, second = 1.0 - b1 ** bucket.steps[i], 1.0 - b2 ** bucket.frozen_at[i]
            divisor = (v / second).sqrt() + eps
            move = torch.where(v != 0, (m / first) / divisor, 0.0)
            coeff = self._mean_coeffs[number][i] * self._factor(
                number, i, divisor, (fresh[where] / second).sqrt() + eps
            )
            self._step(bucket, i, where, move, coeff)
        bucket.write_params()

    def _factor(self, number: int, i: int, frozen: Tensor, fresh: Tensor) -> float:
        """The factor by which steps would be larger now if the second moment were not frozen."""
        low, high = self.factors
        found = min(max(float((frozen / fresh).max()), low), high)
        last, most = self._last_factors[number][i], self.factor_threshold
        found = min(max(found, last * (1.0 - most)), last * (1.0 + most))
        self._last_factors[number][i] = found
        return found

    @torch.no_grad()
    def freeze(self) -> None:
        """Makes the switch, and starts the second moment of the gradients that follow from the exchanged momenta."""
        super().freeze()
        for bucket in self._buckets:
            bucket.extra.setdefault(_FRESH, bucket.exp_avg_sq.clone())

    def _head(self) -> dict[str, object]:
        mean_coeffs, last_factors = ([list(row) for row in rows] for rows in (self._mean_coeffs, self._last_factors))
        return {**super()._head(), "mean_coeffs": mean_coeffs, "last_factors": last_factors}

    def _load_head(self, head: Mapping[str, object]) -> None:
        super()._load_head(head)
        self._mean_coeffs = self._by_bucket(value_of(head, "mean_coeffs", list))
        self._last_factors = self._by_bucket(value_of(head, "last_factors", list))

    def _by_bucket(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Distributes the numbers of all parameters over buckets, which may have been other ones in the saved state."""
        numbers = iter([float(number) for row in rows for number in row])
        return [[next(numbers) for _ in bucket.params] for bucket in self._buckets]
