# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of checkpoints over many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from zero_cases import SHAPE, config_of, digest, tokens

import twinflow
from twinflow.models.gpt import GPT


def engine_of(world: int, stage: int, offload: dict[str, Any] | None, seed: int, is_background: bool = False) -> Any:
    """An engine whose ranks draw the same samples as one process would."""
    torch.manual_seed(seed)
    config = {
        **config_of(stage, offload, 1, world),
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 12 // world,
        "checkpoint": {"background": is_background},
    }
    engine, *_ = twinflow.initialize(model=GPT(SHAPE), config=config)
    return engine


def steps(engine: Any, first: int, last: int, num_samples: int = 12) -> None:
    """Steps whose gradients are the same for any number of ranks that divides 12."""
    rank, world = engine.global_rank, engine.world_size
    micro = num_samples // world
    for step in range(first, last):
        batch = torch.cat([tokens(step), tokens(step + 1000)])[:num_samples][rank * micro : (rank + 1) * micro]
        engine.backward(engine(batch[:, :-1], batch[:, 1:]).loss)
        engine.step()


def state_of(engine: Any) -> dict[str, Any]:
    """Digests of this rank's parts of the state, by parameter, key and where they start."""
    engine.optimizer.wait()
    found: dict[str, Any] = {}
    for param in engine.optimizer.runtime.params:
        for bucket, i in param.own_slices():
            piece = bucket.slices[i]
            name = f"{param.name} {param.first + piece.start}"
            found[name] = [piece.numel, bucket.steps[i]]
            for key, value in bucket.updater.read(bucket, i).items():
                if not key.endswith("_scale"):
                    found[name].append([key, value.float().tolist()])
    return found


def save(
    rank: int, world: int, folder: str, stage: int, offload: dict[str, Any] | None, is_background: bool = False
) -> dict[str, Any]:
    """Three steps, a checkpoint, and the state in it."""
    engine = engine_of(world, stage, offload, rank, is_background)
    steps(engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"note": "saved", "rank": rank})
    if is_background:
        assert engine.background is not None
        steps(engine, 3, 5)
        engine.wait_for_checkpoint()
    found = {"state": state_of(engine), "weights": weights_of(engine), "steps": engine.global_steps}
    engine.destroy()
    return found


def load(
    rank: int, world: int, folder: str, stage: int, offload: dict[str, Any] | None, again: str | None = None
) -> dict[str, Any]:
    """The state that comes back; saved again where asked for."""
    engine = engine_of(world, stage, offload, 100 + rank)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert client == {"note": "saved", "rank": 0}
    found = {"state": state_of(engine), "weights": weights_of(engine), "steps": engine.global_steps}
    if again is not None:
        engine.save_checkpoint(again, client_state={"note": "saved", "rank": rank})
    engine.destroy()
    return found


def weights_of(engine: Any) -> str:
    engine.optimizer.wait()
    return digest(engine.module, engine.optimizer.runtime.param_offload)


def resume(rank: int, world: int, folder: str, stage: int, offload: dict[str, Any] | None, num_steps: int) -> Any:
    """Train up to `num_steps`, going on from the last checkpoint, with one after every step; losses are drawn too."""
    engine = engine_of(world, stage, offload, rank)
    engine.load_checkpoint(folder)
    while engine.global_steps < num_steps:
        torch.rand(())  # each rank's random numbers go on as well
        steps(engine, engine.global_steps, engine.global_steps + 1)
        engine.save_checkpoint(folder)
    found = {"weights": weights_of(engine), "random": float(torch.rand(())), "folder": str(Path(folder).name)}
    engine.destroy()
    return found
