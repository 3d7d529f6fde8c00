"""0/1 Adam: the second moment is refreshed ever less often, and later steps are local, exchanged ever less often.

Until `var_freeze_step`, a step either refreshes both moments from gradients in full precision, at first every step,
then every second, fourth and so on, twice as rarely after each `var_update_scaler` refreshes; or it exchanges the
momentum in one bit and leaves the second moment as it is. After it, ranks step on their own with the momentum that they
have, and exchange what they have added up, in one bit, every step at first, and twice as rarely after each
`local_step_scaler` steps, at most every `local_step_clipper` steps. Between two exchanges weights differ from rank to
rank; after each they are the same to the last bit.
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
from twinflow.errors import invalid_value
from twinflow.optim.onebit.base import CompressedOptimizer, Shared
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.rules.adam import adamw_hyper
from twinflow.rules.rule import Hyper, number, numbers
from twinflow.state_dict import value_of

_REFRESH, _ONE_BIT, _LOCAL = "refresh", "one bit", "local"


@dataclass(frozen=True)
class Rhythm:
    """Every how many steps something is done; twice as rarely each time it has been counted often enough."""

    interval: int = 1
    count: int = 0

    def counted(self, scaler: int, most: int | None = None) -> Rhythm:
        """One more."""
        if self.count + 1 < scaler:
            return Rhythm(self.interval, self.count + 1)
        return Rhythm(min(2 * self.interval, most or 2 * self.interval), 0)


class Moved(NamedTuple):
    """What local steps since the last exchange have done to a parameter."""

    rate: float = 0.0  # their sizes, summed
    kept: float = 1.0  # of a weight, by weight decay
    eps: float = 0.0  # of the last one


class ZeroOneAdam(CompressedOptimizer):
    """AdamW over all ranks with less than one bit for each element and step."""

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
        code: str = "1bit",
        **shared: Unpack[Shared],
    ) -> None:
        counts = {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        counts |= {"local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        for name, count in counts.items():
            if count < 1:
                raise invalid_value(name, count, "a whole number >= 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, code, **shared)
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self._variance = Rhythm()
        self._local = Rhythm()
        self._since = 0  # local steps since the last exchange
        self._moved: dict[int, list[Moved]] = {}  # by them, each parameter of each bucket
        self._added: dict[int, Tensor] = {}  # what this rank has added up since, of each bucket
        self._shared: dict[int, Tensor] = {}  # weights at the last exchange, the same on all ranks

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
            b1, eps = numbers(self._options(bucket), "betas")[0], number(self._options(bucket), "eps")
            if kind == _REFRESH:
                bucket.update(self._hypers(bucket, hits, refreshes=True), factor)
                bucket.set_exponents(exponents_of(bucket.exp_avg_sq, eps))
            else:
                self._exchange(bucket, bucket.exp_avg, bucket.grads, (1.0 - b1) * factor, bucket.exp_avg, b1)
                hypers = self._hypers(bucket, hits, refreshes=False)
                bucket.update([hyper and (0.0, *hyper[1:]) for hyper in hypers])
        if kind == _REFRESH:
            self._variance = self._variance.counted(self.var_update_scaler)

    def _hypers(self, bucket: FlatBucket, hits: Sequence[bool], refreshes: bool) -> list[Hyper | None]:
        """Numbers of each parameter's step; steps are counted, and the gradients that second moments have seen."""
        seen = bucket.frozen_at = bucket.frozen_at or [0] * len(bucket.params)
        found: list[Hyper | None] = []
        for i, hit in enumerate(hits):
            bucket.steps[i] += hit
            seen[i] += hit and refreshes
            options = {**self._options(bucket), "second_step": max(1, seen[i]), "is_frozen": not refreshes}
            found.append(adamw_hyper(options, bucket.steps[i]) if hit else None)
        return found

    def _local_step(self, present: list[list[bool]], factor: float) -> None:
        """A step of this rank's own, with an exchange where it is time for one."""
        self._since += 1
        is_due = self._since >= self._local.interval
        for i, (bucket, hits) in enumerate(zip(self._buckets, present, strict=True)):
            b1 = numbers(self._options(bucket), "betas")[0]
            if i not in self._added:
                self._added[i], self._shared[i] = torch.zeros_like(bucket.weights), bucket.weights.clone()
                self._moved[i] = [Moved()] * len(bucket.params)
            bucket.exp_avg.mul_(b1).add_(bucket.grads, alpha=(1.0 - b1) * factor)
            bucket.exp_avg.mul_(bucket.exp_avg_sq != 0)  # elements that never saw a gradient are left alone
            hypers = self._hypers(bucket, hits, refreshes=False)
            self._add(i, bucket, hypers)
            if is_due:
                self._take_over(i, bucket)
            else:
                bucket.update([hyper and (0.0, *hyper[1:]) for hyper in hypers])
        if is_due:
            self._since = 0
        self._local = self._local.counted(self.local_step_scaler, self.local_step_clipper)

    def _add(self, i: int, bucket: FlatBucket, hypers: Sequence[Hyper | None]) -> None:
        """What this step would have subtracted, but for the second moment. A parameter without a gradient stays."""
        for j, (where, hyper) in enumerate(zip(bucket.ranges(), hypers, strict=True)):
            if hyper is not None:
                self._added[i][where].add_(bucket.exp_avg[where], alpha=hyper[4])
                rate, kept, _ = self._moved[i][j]
                self._moved[i][j] = Moved(rate + hyper[4], kept * hyper[5], hyper[3])

    def _take_over(self, i: int, bucket: FlatBucket) -> None:
        """From the weights that all share, with the mean momentum of all ranks and steps, which is exchanged."""
        added, shared = self._added[i], self._shared[i]
        for where, moved in zip(bucket.ranges(), self._moved[i], strict=True):
            if moved.rate:
                added[where].mul_(1.0 / moved.rate)  # so errors are those of momenta
            else:
                added[where].copy_(bucket.exp_avg[where])
        self._exchange(bucket, bucket.exp_avg, added, 1.0, None, 0.0)
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
            raise RuntimeError("ranks have different weights between two exchanges. Save when `is_in_step`")
        return {"variance": asdict(self._variance), "local": asdict(self._local)}

    def _load_head(self, head: Mapping[str, object]) -> None:
        self._variance, self._local = (
            Rhythm(**value_of(head, "variance", dict)),
            Rhythm(**value_of(head, "local", dict)),
        )
        self._since = 0
        self._moved.clear()
        self._added.clear()
        self._shared.clear()
