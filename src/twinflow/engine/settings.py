"""How an engine works, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from twinflow.launch.environment import ALONE, RankEnvironment
from twinflow.parallel.grid import Grid


@dataclass(frozen=True)
class EngineSettings:
    """How the engine works, every default filled in."""

    micro_batch_size: int
    ranks: RankEnvironment = ALONE
    grid: Grid | None = None  # where there are pipeline or tensor ranks
    stage: int = 0  # of ZeRO
    autocast: torch.dtype | None = None  # forwards run under torch.autocast with it
    input_dtype: torch.dtype | None = None  # floating inputs are cast to it
    keep_last: int | None = None  # checkpoints
    background_bytes: int | None = None  # they are written beside training, with so much host memory; None: at once
    drop_last: bool = False
    config: Mapping[str, object] = field(default_factory=dict)  # as given
