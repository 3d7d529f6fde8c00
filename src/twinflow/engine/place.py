"""Rank and device of an engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from twinflow.engine.settings import EngineSettings


class Place:
    """Properties of an engine that depend only on its settings and its module."""

    settings: EngineSettings
    module: nn.Module

    @property
    def global_rank(self) -> int:
        """Index of this process among all processes."""
        return self.settings.ranks.rank

    @property
    def local_rank(self) -> int:
        """Index of this process among those on its machine."""
        return self.settings.ranks.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes that train the model."""
        return self.settings.ranks.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of model replicas (data parallelism)."""
        return self.settings.grid.num_data if self.settings.grid is not None else self.world_size

    @property
    def dp_rank(self) -> int:
        """Index of the model replica that contains this process."""
        return self.settings.grid.data if self.settings.grid is not None else self.global_rank

    @property
    def device(self) -> torch.device:
        """Device of the module's first parameter; the CPU if it has none."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def config(self) -> Mapping[str, object]:
        """The config as the user gave it."""
        return self.settings.config
