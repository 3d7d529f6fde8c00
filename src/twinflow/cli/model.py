"""Builds the GPT of a run of `twinflow train` and its engine."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from twinflow.build import initialize
from twinflow.cli.axes import axes_of
from twinflow.cli.ranks import Ranks
from twinflow.cli.settings import TrainSettings, lr_factor
from twinflow.engine import Engine
from twinflow.models.gpt import GPT
from twinflow.offload.materialize import build as build_model

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_engine(settings: TrainSettings, config: dict[str, Any], ranks: Ranks) -> Engine:
    """Build the model and the engine on all ranks. The seed determines the initial weights.

    With pipeline or tensor parallelism the model is built on the host, because it need not fit on one GPU.
    """
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)  # checkpoints also store the states of Python's and NumPy's generators
    np.random.seed(settings.seed)  # noqa: NPY002
    axes = axes_of(config)
    on_gpu = torch.cuda.is_available() and axes.pipe * axes.model == 1
    with ranks.together():
        made = build_model(lambda: GPT(settings.model), "cuda" if on_gpu else "cpu", DTYPES[settings.precision])
    schedule = None
    if "optimizer" not in settings.file_config and "scheduler" not in config:
        schedule = partial(LambdaLR, lr_lambda=lambda step: lr_factor(step, settings.warmup, settings.steps))
    engine, *_ = initialize(model=made, model_parameters=_groups(made), lr_scheduler=schedule, config=config)
    return engine


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: weight decay applies to matrices, not to norms and biases."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def set_rates(engine: Engine) -> None:
    """Set the learning rates of the next step from this command line's schedule.

    A checkpoint stores the rates of the schedule that it was saved with, which may have had another --steps.
    """
    schedule, optimizer = engine.lr_scheduler, engine.optimizer
    if isinstance(schedule, LambdaLR) and optimizer is not None:
        for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(schedule.last_epoch)
