# SPDX-License-Identifier: Apache-2.0
"""Engines for tests of checkpoints, and everything that a checkpoint has of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from twin_support import gpt

import twinflow
from twinflow.engine import Engine


def build(model: Any = None, given: Any = None, scheduler: Any = None, offload: Any = None, **changes: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **(offload or {})}},
        **changes,
    }
    model = gpt() if model is None else model
    return twinflow.initialize(model=model, optimizer=given, lr_scheduler=scheduler, config=config)[0]


def everything(engine: Engine) -> dict[str, Any]:
    """Weights, state and counters, as values that can be compared."""
    assert engine.optimizer is not None
    found: dict[str, Any] = {name: value.clone() for name, value in engine.module.state_dict().items()}
    saved = engine.optimizer.state_dict()
    for name, entry in saved["state"].items():
        for key, value in entry.items():
            found |= (
                {f"{name}/{key}/{k}": v for k, v in value.items()}
                if isinstance(value, dict)
                else {f"{name}/{key}": value}
            )
    found |= {key: saved[key] for key in ("num_steps", "num_skipped", "num_jobs", "loss_scale")}
    found |= {"steps": engine.global_steps, "lr": engine.get_lr(), "skipped": engine.skipped_steps}
    return found


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        assert same, name


def halve(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: 0.5**step)
