# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam: the second moment is updated more and more rarely, and later steps are local with rare exchanges.

Until `var_freeze_step` there are two kinds of steps. A refresh updates both moments from uncompressed gradients. Other
steps exchange one bit for each element of the momentum, and the second moment does not change. The interval between
refreshes is 1 at first, and doubles after every `var_update_scaler` refreshes.

After `var_freeze_step` ranks make local steps with their own momenta. They exchange the mean momentum of these steps,
one bit for each element. The interval between exchanges is 1 at first, and doubles after every `local_step_scaler`
steps, up to `local_step_clipper`. Between two exchanges the weights of ranks differ. After one they are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from twinflow.codes.reference import exponents_of
from twinflow.errors import invalid_value, wrong_state
from twinflow.optim.onebit.base import CompressedOptimizer, Shared
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.rules.rule import Hyper, number, numbers
from twinflow.state_dict import int_of, value_of

_REFRESH, _ONE_BIT, _LOCAL = "refresh", "one bit", "local"


@dataclass(frozen=True)
class Rhythm:
    """An interval in steps that doubles after a number of counts."""

    interval: int = 1
    count: int = 0

    def counted(self, scaler: int, most: int | None = None) -> Rhythm:
        """The rhythm after one more count: the interval doubles after `scaler` counts, up to `most`."""
        if self.count + 1 < scaler:
            return Rhythm(self.interval, self.count + 1)
        return Rhythm(min(2 * self.interval, most or 2 * self.interval), 0)

    @classmethod
    def of(cls, saved: Mapping[str, object]) -> Rhythm:
        """The rhythm of which `saved` has the fields."""
        return cls(max(1, int_of(saved, "interval")), int_of(saved, "count"))


class Moved(NamedTuple):
    """The effect of local steps since the last exchange on a parameter."""

    rate: float = 0.0  # sum of the step sizes
    kept: float = 1.0  # factor by which weight decay has multiplied the weights
    eps: float = 0.0  # eps of the last step


class ZeroOneAdam(CompressedOptimizer):
    """AdamW over all ranks. After enough steps it communicates less than one bit for each element and step.

    The module's docstring explains the options.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        **shared: Unpack[Shared],
    ) -> None:
        counts = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        counts |= {"local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        for name, count in counts.items():
            if count < 1:
                raise invalid_value(name, count, "a whole number >= 1")
        super().__init__(params, lr, betas, eps, weight_decay, **shared)
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        self._variance = Rhythm()
        self._local = Rhythm()
        self._since = 0  # number of local steps since the last exchange
        self._moved: dict[int, list[Moved]] = {}  # by bucket: the effect of these steps on each parameter
        self._added: dict[int, Tensor] = {}  # by bucket: this rank's sum of momenta in these steps
        self._shared: dict[int, Tensor] = {}  # by bucket: the weights after the last exchange, equal on all ranks

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks have the same weights now."""
        return self._since == 0

    def _kind(self) -> str:
        if self.num_steps > self.var_freeze_step:
            return _LOCAL
        return _REFRESH if self.num_steps % self._variance.interval == 0 else _ONE_BIT

    def _update(self, present: list[list[bool]], norms: Sequence[float]) -> None:
        kind = self._kind()
        factor = self._mean_gradients() if kind == _REFRESH else self._bounded_norm(norms)
        if kind == _LOCAL:
            self._local_step(present, factor)
            return
        for bucket, hits in zip(self._buckets, present, strict=True):
            self._adam_step(bucket, hits, factor, is_frozen=kind == _ONE_BIT)
            if kind == _REFRESH:
                eps = number(self._options(bucket), "eps")
                bucket.set_exponents(exponents_of(bucket.exp_avg_sq, eps), self.group)
        if kind == _REFRESH:
            self._variance = self._variance.counted(self.var_update_scaler)

    def _local_step(self, present: list[list[bool]], factor: float) -> None:
        """Makes a local step, with an exchange if one is due."""
        self._since += 1
        is_due = self._since >= self._local.interval
        for i, (bucket, hits) in enumerate(zip(self._buckets, present, strict=True)):
            b1 = numbers(self._options(bucket), "betas")[0]
            if i not in self._added:
                self._added[i], self._shared[i] = torch.zeros_like(bucket.weights), bucket.weights.clone()
                self._moved[i] = [Moved()] * len(bucket.params)
            bucket.exp_avg.mul_(b1).add_(bucket.grads, alpha=(1.0 - b1) * factor)
            bucket.exp_avg.mul_(bucket.exp_avg_sq != 0)  # elements that never had a gradient are not updated
            hypers = self._hypers(bucket, hits, is_frozen=True)
            self._add(i, bucket, hypers)
            if is_due:
                self._take_over(i, bucket)
            else:
                bucket.update(hypers)
        if is_due:
            self._since = 0
        self._local = self._local.counted(self.local_step_scaler, self.local_step_clipper)

    def _add(self, i: int, bucket: FlatBucket, hypers: Sequence[Hyper | None]) -> None:
        """Adds the step size times the momentum to the sum, for parameters with a gradient."""
        for j, (where, hyper) in enumerate(zip(bucket.ranges(), hypers, strict=True)):
            if hyper is not None:
                self._added[i][where].add_(bucket.exp_avg[where], alpha=hyper[4])
                rate, kept, _ = self._moved[i][j]
                self._moved[i][j] = Moved(rate + hyper[4], kept * hyper[5], hyper[3])

    def _take_over(self, i: int, bucket: FlatBucket) -> None:
        """Exchanges the mean momentum of local steps, and computes shared weights from its mean over all ranks."""
        added, shared = self._added[i], self._shared[i]
        for where, moved in zip(bucket.ranges(), self._moved[i], strict=True):
            if moved.rate:
                added[where].mul_(1.0 / moved.rate)  # errors are then in units of momenta
            else:
                added[where].copy_(bucket.exp_avg[where])
        self._exchange(bucket, added)
        for where, moved in zip(bucket.ranges(), self._moved[i], strict=True):
            if moved != Moved():
                move = bucket.exp_avg[where] / (bucket.exp_avg_sq[where].sqrt() + moved.eps)
                shared[where].mul_(moved.kept).sub_(move, alpha=moved.rate)
        bucket.weights.copy_(shared)
        added.zero_()
        self._moved[i] = [Moved()] * len(bucket.params)
        bucket.write_params()

    def _head(self) -> dict[str, object]:
        if not self.is_in_step:
            raise wrong_state(
                "The optimizer cannot be saved now",
                "the weights of the ranks differ until the next exchange",
                "Save after a step() after which the optimizer's attribute is_in_step is True.",
            )
        return {"variance": asdict(self._variance), "local": asdict(self._local)}

    def _from_head(self, head: Mapping[str, object]) -> dict[str, object]:
        rhythms = {f"_{name}": Rhythm.of(value_of(head, name, dict)) for name in ("variance", "local")}
        return {**rhythms, "_since": 0, "_moved": {}, "_added": {}, "_shared": {}}
