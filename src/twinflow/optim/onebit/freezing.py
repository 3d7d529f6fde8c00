"""Base class of optimizers with one switch: uncompressed until the second moment is stable, compressed afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from twinflow.codes.reference import exponents_of
from twinflow.errors import wrong_state
from twinflow.optim.onebit.base import LOGGER, CompressedOptimizer, Shared
from twinflow.optim.onebit.bucket import FlatBucket
from twinflow.optim.onebit.freeze import VarianceWatch, default_window
from twinflow.rules.rule import check_betas, number, numbers
from twinflow.state_dict import dict_of, int_of
from twinflow.zero.compression import Compression


class FreezingOptimizer(CompressedOptimizer):
    """Freezes the second moment at one step and compresses communication from then on."""

    def __init__(
        self, params: ParamsT, defaults: dict[str, object], compression: Compression, **shared: Unpack[Shared]
    ) -> None:
        check_betas(defaults["betas"])
        window = compression.freeze_window or default_window(numbers(defaults, "betas")[1])
        self._watch = VarianceWatch(window, compression.freeze_threshold)
        self.freeze_step = compression.freeze_step
        self.frozen_step: int | None = None  # the last uncompressed step; None before the switch
        super().__init__(params, defaults, compression.code, **shared)

    @property
    def is_compressed(self) -> bool:
        """Whether the switch has been made."""
        return self.frozen_step is not None

    def _maybe_freeze(self) -> None:
        """Makes the switch after an uncompressed step if it is due."""
        if self.freeze_step is not None:
            is_settled = self.num_steps >= self.freeze_step
        else:
            # All ranks use the sum of rank 0.
            totals = self._agree.gather_rows(torch.tensor([self._total()], dtype=torch.float64))
            is_settled = self._watch.see(float(totals[0, 0]), max(float(given["lr"]) for given in self.param_groups))
        if is_settled:
            self.freeze()

    def _total(self) -> float:
        """The bias-corrected sum of the second moment."""
        total = 0.0
        for bucket in self._buckets:
            b2 = numbers(self._options(bucket), "betas")[1]
            steps = max(1, *bucket.steps)
            total += float(bucket.exp_avg_sq.sum(dtype=torch.float64)) / (1.0 - b2**steps)
        return total

    @torch.no_grad()
    def freeze(self) -> None:
        """Freezes the second moment and compresses from the next step on. All ranks must call it."""
        if not self.num_steps:
            raise wrong_state(
                "freeze() cannot run", "there is no second moment before the first step", "Call step() first."
            )
        if self.is_compressed:
            return
        self.frozen_step = self.num_steps
        for bucket in self._buckets:
            bucket.frozen_at = [max(1, step) for step in bucket.steps]
            self._before_freezing(bucket)
            exponents = exponents_of(bucket.exp_avg_sq, number(self._options(bucket), "eps"))
            self.group.broadcast(exponents)  # different machines may round a square root differently
            bucket.set_exponents(exponents)
        if self.group.rank == 0:
            LOGGER.info(
                f"{type(self).__name__}: the second moment is frozen, and communication is compressed from step "
                f"{self.frozen_step + 1} on."
            )

    def _before_freezing(self, bucket: FlatBucket) -> None:
        """Hook for a last change of a bucket's second moment, which must be equal on all ranks."""

    def _warn_of_late(self, bucket: FlatBucket, hits: Sequence[bool]) -> None:
        """Warns of parameters whose first gradient comes after the switch. They have no second moment, so they stay."""
        num_late = sum(hit and not step for hit, step in zip(hits, bucket.steps, strict=True))
        if num_late and self.group.rank == 0:
            LOGGER.warning(
                f"{type(self).__name__}: {num_late} parameters have got their first gradient after the second moment "
                "was frozen, and are not updated. Freeze later, or build a new optimizer."
            )

    def _head(self) -> dict[str, object]:
        return {"frozen_step": self.frozen_step, "watch": self._watch.state_dict()}

    def _load_head(self, head: Mapping[str, object]) -> None:
        self.frozen_step = None if head["frozen_step"] is None else int_of(head, "frozen_step")
        self._watch.load_state_dict(dict_of(head, "watch"))
