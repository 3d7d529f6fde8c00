"""Settings of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from twinflow.launch.environment import ALONE, RankEnvironment
from twinflow.parallel.grid import Grid


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine, with all defaults filled in."""

    micro_batch_size: int
    ranks: RankEnvironment = ALONE
    grid: Grid | None = None  # layout of ranks with pipeline or tensor parallelism
    stage: int = 0  # ZeRO stage
    autocast: torch.dtype | None = None  # dtype of torch.autocast in forwards
    input_dtype: torch.dtype | None = None  # dtype to which floating-point inputs are cast
    keep_last: int | None = None  # number of checkpoints that are kept; None: all
    background_bytes: int | None = None  # host memory for checkpoints in the background; None: save() blocks
    drop_last: bool = False  # drop the last batch of an epoch if it is not full
    config: Mapping[str, object] = field(default_factory=dict)  # as the user gave it
