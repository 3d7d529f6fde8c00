"""Where an engine is: among the ranks, and on which device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from twinflow.engine.settings import EngineSettings


class Place:
    """What follows from the settings and the module alone."""

    settings: EngineSettings
    module: nn.Module

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.settings.ranks.rank

    @property
    def local_rank(self) -> int:
        """This process among those on its machine."""
        return self.settings.ranks.local_rank

    @property
    def world_size(self) -> int:
        """Processes that train the model together."""
        return self.settings.ranks.world_size

    @property
    def dp_world_size(self) -> int:
        """Replicas of the model, each of which takes a part of a batch."""
        return self.settings.grid.num_data if self.settings.grid is not None else self.world_size

    @property
    def dp_rank(self) -> int:
        """Which of them this process is in."""
        return self.settings.grid.data if self.settings.grid is not None else self.global_rank

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def config(self) -> Mapping[str, object]:
        """The config as it was given."""
        return self.settings.config
