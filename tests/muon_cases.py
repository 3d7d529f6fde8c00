# SPDX-License-Identifier: Apache-2.0
"""Training by Muon on several ranks, for tests/dist/test_muon.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from twin_support import CONFIG, gpt

import twinflow
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.zero import Zero, partition

NUM_STEPS = 4
BATCH = 4  # sequences of a step, which ranks divide


def tokens_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, CONFIG.vocab_size, (BATCH, CONFIG.context + 1), generator=generator)


def train(rank: int, world: int, stage: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """The weights after some steps, and which matrices this rank has orthogonalised. Without a stage: one process."""
    model, zero = gpt(), Zero(stage=stage) if stage is not None else None
    if stage == 3 and zero is not None:
        partition(model, zero)
    optimizer = TwinOptimizer(
        model,
        "muon",
        lr=0.02,
        adam_lr=1e-3,
        eps=1e-3,  # the gradient of the bias of keys is only rounding errors, of which AdamW would make whole steps
        zero=zero,
        tuning=Tuning(bucket_numel=4096),
        **{"max_grad_norm": 1.0, **options},
    )
    size = BATCH // max(1, world)
    for step in range(NUM_STEPS):
        tokens = tokens_of(step)[rank * size : (rank + 1) * size]
        (model(tokens[:, :-1], tokens[:, 1:]).loss * 4.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    own = [
        bucket.params[i].name
        for bucket in optimizer.runtime.buckets
        if bucket.plan.is_matrix
        for i in range(len(bucket.slices))
    ]
    weights = {name: _whole(p.detach()).tolist() for name, p in model.named_parameters()}
    optimizer.close()
    return {"weights": weights, "own": own}


def marked(rank: int, world: int, stage: int) -> dict[str, bool]:
    """Which parameters Muon updates, if the user has marked one as a matrix and all others as no matrices."""
    model = gpt()
    for name, param in model.named_parameters():
        param.use_muon = name == "blocks.0.mlp.up.weight"
    zero = Zero(stage=stage)
    if stage == 3:
        partition(model, zero)
    optimizer = TwinOptimizer(model, "muon", lr=0.02, zero=zero)
    names = {param: name for name, param in model.named_parameters()}
    found = {names[param]: group["use_muon"] for group in optimizer.param_groups for param in group["params"]}
    optimizer.close()
    return found


def save(rank: int, world: int, stage: int, folder: str) -> None:
    """Saves a checkpoint in the middle of a training on several ranks."""
    engine = _engine(stage)
    _run(engine, rank, world, range(2))
    engine.save_checkpoint(folder)
    engine.destroy()


def resume(rank: int, world: int, stage: int, folder: str) -> dict[str, Any]:
    """Continues from the checkpoint. Without a folder: trains from the start."""
    engine = _engine(stage)
    if folder:
        engine.load_checkpoint(folder)
    _run(engine, rank, world, range(2 if folder else 0, NUM_STEPS))
    engine.optimizer.wait()
    weights = {name: _whole(p.detach()).tolist() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return weights


def _engine(stage: int) -> Any:
    params = {"lr": 0.02, "adam_lr": 1e-3, "eps": 1e-3}
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    }
    return twinflow.initialize(model=gpt(), config=config)[0]


def _run(engine: Any, rank: int, world: int, steps: Iterable[int]) -> None:
    size = BATCH // max(1, world)
    for step in steps:
        tokens = tokens_of(step)[rank * size : (rank + 1) * size]
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]).loss * 4.0)
        engine.step()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return found
