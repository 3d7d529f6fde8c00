# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of 0/1 Adam and 1-bit LAMB in an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zero_cases import digest

import twinflow

ZERO_ONE = {"var_freeze_step": 10, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 2}
LAMB = {"freeze_step": 4, "max_coeff": 0.3, "weight_decay": 0.01}
SHAPE = (24, 40)


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    params = {"lr": 5e-3, "betas": [0.9, 0.99], **(ZERO_ONE if kind == "ZeroOneAdam" else LAMB)}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": kind, "params": {**params, **more.pop("params", {})}},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 3}},
        **more,
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SHAPE[0], SHAPE[1]), nn.Tanh(), nn.Linear(SHAPE[1], 1))


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, SHAPE[0], generator=draw)
    return x.to(dtype), x.sin().sum(1, keepdim=True).to(dtype)


def engine_of(config: dict[str, Any]) -> Any:
    module = model()
    return twinflow.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[str]:
    """Digests of the weights after each step."""
    found = []
    dtype = next(engine.module.parameters()).dtype
    for step in range(first, last):
        x, y = batch(step, engine.global_rank, dtype)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        found.append(digest(engine.module))
    return found


def by_class(kind: str, config: dict[str, Any], rank: int, last: int) -> list[str]:
    """The same steps with the optimizer's class in a plain loop, without an engine."""
    module, params = model(), config["optimizer"]["params"]
    optimizer = getattr(twinflow.optim.onebit, kind)(module.parameters(), **params, max_grad_norm=1.0)
    schedule = twinflow.optim.schedules.SCHEDULES["WarmupLR"](optimizer, **config["scheduler"]["params"])
    found = []
    for step in range(last):
        x, y = batch(step, rank)
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(digest(module))
    return found


def train(rank: int, world: int, kinds: list[str], folder: str) -> dict[str, Any]:
    """With the engine, with the class, and with an engine that has loaded a checkpoint in the middle."""
    found = {}
    for kind in kinds:
        config = config_of(kind)
        engine = engine_of(config)
        before = steps(engine, 0, 16)
        sync = engine.optimizer.is_in_step
        engine.save_checkpoint(f"{folder}/{kind}")
        sent = engine.optimizer.team.groups["reduce"].sent_bytes if world > 1 else 0
        after = steps(engine, 16, 22)
        state = {"lr": engine.get_lr(), "skipped": engine.skipped_steps, "norm": engine.get_global_grad_norm()}
        engine.destroy()
        again = engine_of(config)
        steps(again, 0, 1)
        again.load_checkpoint(f"{folder}/{kind}")
        resumed = steps(again, 16, 22)
        again.destroy()
        alone = by_class(kind, config, rank, 22)
        own = {"engine": [*before, *after], "class": alone, "resumed": resumed, "sync": sync, "sent": sent, **state}
        found[kind] = own
    return found


def lose(rank: int, world: int) -> dict[str, Any]:
    """fp16 with a loss scale that overflows, and one gradient that is not finite on one rank only."""
    fp16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 100, "hysteresis": 1}
    engine = engine_of(config_of("ZeroOneAdam", fp16=fp16))
    digests = steps(engine, 0, 12)
    kept = engine.skipped_steps
    x, y = batch(12, rank, torch.float16)
    engine.backward(nn.functional.mse_loss(engine(x * (float("inf") if rank == 0 else 1.0)), y))
    engine.step()
    same = digest(engine.module) == digests[-1]
    found = {"digest": digests[-1], "skipped": [kept, engine.skipped_steps], "same": same, "scale": engine.loss_scale()}
    engine.destroy()
    return found


def go_on(rank: int, world: int, kind: str, folder: str) -> dict[str, Any]:
    """Loads a checkpoint of two ranks and makes some steps."""
    engine = engine_of(config_of(kind))
    with torch.no_grad():
        untrained = float(nn.functional.mse_loss(engine(batch(99, 0)[0]), batch(99, 0)[1]))
    engine.load_checkpoint(f"{folder}/{kind}")
    losses = []
    for step in range(16, 22):
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            losses.append(float(nn.functional.mse_loss(engine(batch(99, 0)[0]), batch(99, 0)[1])))
    found = {"losses": losses, "digest": digest(engine.module), "untrained": untrained}
    engine.destroy()
    return found
