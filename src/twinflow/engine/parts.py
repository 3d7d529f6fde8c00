"""Protocol of the engine for the modules that save, load and report it.

The engine imports these modules. They use this Protocol instead of `Engine`, so that imports make no cycle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn

from twinflow.engine.settings import EngineSettings
from twinflow.launch.watch import Watch
from twinflow.optim.twin import TwinOptimizer
from twinflow.state_dict import StateDict


class Scheduler(Protocol):
    """A learning-rate scheduler of torch, of twinflow or of the user."""

    @property
    def step(self) -> Callable[..., object]: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


class EngineParts(Protocol):
    @property
    def module(self) -> nn.Module: ...

    @property
    def optimizer(self) -> TwinOptimizer | None: ...

    @property
    def lr_scheduler(self) -> Scheduler | None: ...

    @property
    def training_dataloader(self) -> object: ...

    @property
    def settings(self) -> EngineSettings: ...

    @property
    def watch(self) -> Watch | None: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def global_steps(self) -> int: ...

    @property
    def global_samples(self) -> int: ...

    @property
    def part(self) -> int:
        """Number of micro-batches of the present step so far."""
        ...

    @property
    def skipped_steps(self) -> int: ...

    def gradient_accumulation_steps(self) -> int: ...

    def get_lr(self) -> list[float]: ...

    def get_global_grad_norm(self) -> float | None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...
