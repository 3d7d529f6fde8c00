"""Clipping that a loop asks for, where the optimizer does it.

With `early=True` gradients have left for the host when a loop wants them clipped; TwinOptimizer clips them itself, by
the same global norm. The loop's call therefore only checks that both mean the same thing, and answers with the norm,
which is known once `step()` has been called and backward has ended: reading it before is an error, and nobody waits
for a norm that is not read.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from twinflow.errors import invalid_value
from twinflow.offload.job import Job
from twinflow.optim.twin import TwinOptimizer


class PendingNorm(Tensor):
    """A gradient norm that becomes known: a number in fp32 for whoever reads it after the step."""

    _read: Callable[[], float]

    @staticmethod
    def __new__(cls, read: Callable[[], float]) -> PendingNorm:
        """`read` gives the norm, or raises where the step has not been made yet."""
        made: PendingNorm = torch.Tensor._make_subclass(cls, torch.zeros(()))
        made._read = read
        return made

    def known(self) -> Tensor:
        """The same as a plain tensor."""
        return torch.tensor(self._read(), dtype=torch.float32)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        try:
            return f"PendingNorm({self._read():.4f})"
        except RuntimeError:
            return "PendingNorm(not known before step())"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever is done with it is done with its value."""
        known = [arg.known() if isinstance(arg, PendingNorm) else arg for arg in args]
        named = {key: arg.known() if isinstance(arg, PendingNorm) else arg for key, arg in (kwargs or {}).items()}
        return func(*known, **named)


class _Step:
    """A step whose norm was asked for."""

    def __init__(self) -> None:
        self._job: Job | None = None  # until the norm is read, or the next step is made: it holds on to the optimizer
        self._norm: float | None = None

    def made(self, job: Job) -> None:
        """The step was made by this job."""
        self._job = job

    def norm(self) -> float:
        """The norm of all gradients, as soon as backward has ended."""
        if self._norm is None:
            if self._job is None:
                raise RuntimeError(
                    "the gradient norm is read before optimizer.step(), while gradients are on their way to the host. "
                    "Read it after step()"
                )
            self._norm = self._job.wait_for_decision().norm
            self._job = None
        return self._norm


class Clipping:
    """Stands for `clip_grad_norm_` of a loop whose optimizer clips by itself."""

    def __init__(self, optimizer: TwinOptimizer, name: str) -> None:
        self._optimizer = weakref.ref(optimizer)  # a loop may outlive it
        self._name = name  # of the loop's own option
        self._waiting: list[_Step] = []  # norms that the next step makes known
        self._made: list[_Step] = []  # of the last step
        optimizer.register_step_post_hook(self._after_step)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> PendingNorm:
        """Check what is asked for; the norm of the step under way."""
        optimizer = self._optimizer()
        assert optimizer is not None
        own = optimizer.max_grad_norm
        if float(norm_type) != 2.0:
            raise invalid_value("norm_type", norm_type, [2.0], "Gradients are clipped by their Euclidean norm.")
        wanted = None if math.isinf(max_norm) else float(max_norm)  # inf: the norm alone is wanted
        if wanted is not None and wanted != own:
            remedy = "TwinOptimizer clips while gradients are on their way; it was built with this max_grad_norm."
            raise invalid_value(self._name, max_norm, [own], remedy)
        step = _Step()
        self._waiting.append(step)
        return PendingNorm(step.norm)

    def covers(self, params: Iterable[Tensor]) -> bool:
        """Whether these parameters are the optimizer's: all of them, or none; frozen ones do not count."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        given = {id(param) for param in params if param.requires_grad}
        if own == given:
            return True
        if not own & given:
            return False
        allowed = f"the {len(own)} that TwinOptimizer trains: it clips by the norm of all of them"
        raise invalid_value("parameters to clip", f"{len(given & own)} of them and {len(given - own)} others", allowed)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        last = optimizer.runtime.last
        for step in self._made:
            step.norm()
        self._made = self._waiting if last is not None else []
        self._waiting = []
        for step in self._made:
            step.made(last)
