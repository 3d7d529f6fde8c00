# SPDX-License-Identifier: Apache-2.0
"""A replacement for the clipping function of a training loop, for an optimizer that clips itself.

With `early=True`, gradients have been moved to the host before the loop clips them. TwinOptimizer clips them itself, by
the global norm, as that function would. The call of the loop therefore only checks that its limit equals that of the
optimizer, and returns the norm. The norm is known after `step()` was called and backward has ended. Reading it before
`step()` raises RuntimeError. If the loop does not read the norm, it does not wait for it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.job import Job
from twinflow.optim.twin import TwinOptimizer


class PendingNorm(Tensor):
    """The gradient norm of a step. After `step()` it behaves like an fp32 scalar tensor."""

    _job: Job | None  # set only until the norm is read or the next step is made, because a job refers to the optimizer
    _norm: float | None

    @staticmethod
    def __new__(cls) -> PendingNorm:
        made: PendingNorm = torch.Tensor._make_subclass(cls, torch.zeros(()))
        made._job = None
        made._norm = None
        return made

    def known(self) -> float:
        """The norm. Waits until backward has ended. Raises RuntimeError before the step."""
        if self._norm is None:
            if self._job is None:
                raise wrong_state(
                    "The gradient norm cannot be read before optimizer.step()",
                    "gradients are still being moved to the host",
                    "Read it after step().",
                )
            self._norm = self._job.wait_for_decision().norm
            self._job = None
        return self._norm

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        try:
            return f"PendingNorm({self.known():.4f})"
        except RuntimeError:
            return "PendingNorm(not known before step())"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(_value, args), **{key: _value(arg) for key, arg in (kwargs or {}).items()})


def _value(argument: Any) -> Any:
    return torch.tensor(argument.known(), dtype=torch.float32) if isinstance(argument, PendingNorm) else argument


class Clipping:
    """Replaces `clip_grad_norm_` of a loop whose optimizer clips gradients itself."""

    def __init__(self, optimizer: TwinOptimizer, name: str) -> None:
        self._optimizer = weakref.ref(optimizer)  # the loop may live longer than the optimizer
        self._name = name  # name of the loop's option, for error messages
        self._waiting: list[PendingNorm] = []  # norms that the next step() computes
        self._made: list[PendingNorm] = []  # norms that the last step() has computed
        optimizer.register_step_post_hook(self._after_step)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> PendingNorm:
        """Check the arguments and return the norm of the current step. Raises ValueError if a finite limit differs from
        that of the optimizer.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        own = optimizer.max_grad_norm
        if float(norm_type) != 2.0:
            raise invalid_value("norm_type", norm_type, [2.0], "Gradients are clipped by their Euclidean norm.")
        wanted = None if math.isinf(max_norm) else float(max_norm)  # inf: the loop only reads the norm
        if wanted is not None and wanted != own:
            remedy = f"TwinOptimizer clips gradients with max_grad_norm={own}. Use the same value in both places."
            raise invalid_value(self._name, max_norm, [own], remedy)
        norm = PendingNorm()
        self._waiting.append(norm)
        return norm

    def covers(self, params: Iterable[Tensor]) -> bool:
        """True if the trainable tensors in `params` are exactly the parameters of the optimizer, False if none of them
        is one. Raises ValueError in all other cases.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        given = {id(param) for param in params if param.requires_grad}
        if own == given:
            return True
        if not own & given:
            return False
        raise ValueError(
            f"{len(given & own)} of the {len(own)} parameters of TwinOptimizer and {len(given - own)} other parameters "
            "were passed for clipping, but TwinOptimizer clips by the norm of all its parameters. Pass all parameters "
            "of TwinOptimizer, and no others."
        )

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        last = optimizer.runtime.steps.last
        for norm in self._made:
            norm.known()
        self._made = self._waiting if last is not None else []
        self._waiting = []
        for norm in self._made:
            norm._job = last
