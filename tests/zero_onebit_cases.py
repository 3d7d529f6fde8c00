# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of 1-bit Adam with ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from zero_cases import SHAPE, config_of, digest

import twinflow
from twinflow.models.gpt import GPT

FREEZE = 8
NUM_SAMPLES = 12
LENGTH = SHAPE.context - 4  # the last positions never come


def config_for(stage: int, offload: dict[str, Any] | None, world: int, **more: Any) -> dict[str, Any]:
    """As a user would write it."""
    accumulation = more.pop("accumulation", 1)
    params = {"lr": 3e-3, "betas": [0.9, 0.95], "freeze_step": FREEZE, **more.pop("params", {})}
    return {
        **config_of(stage, offload, 1, world),
        "train_batch_size": NUM_SAMPLES,
        "train_micro_batch_size_per_gpu": NUM_SAMPLES // accumulation // world,
        "optimizer": {"type": "OneBitAdam", "params": params},
        **more,
    }


def batch_of(step: int) -> torch.Tensor:
    """Few samples, again and again, so that they are learned."""
    generator = torch.Generator().manual_seed(step % 3)
    return torch.randint(0, SHAPE.vocab_size, (NUM_SAMPLES, LENGTH + 1), generator=generator)


def engine_of(config: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    return twinflow.initialize(model=model, config=config)[0]


def steps(engine: Any, first: int, last: int) -> dict[str, list[Any]]:
    """Losses of the global batch, weights after each step, bytes sent."""
    rank, world, parts = engine.global_rank, engine.world_size, engine.gradient_accumulation_steps()
    micro = NUM_SAMPLES // world // parts
    found: dict[str, list[Any]] = {"losses": [], "digests": [], "sent": [], "compressed": []}
    for step in range(first, last):
        total = torch.zeros(())
        for part in range(parts):
            start = (part * world + rank) * micro
            batch = batch_of(step)[start : start + micro].to(engine.device)
            loss = engine(batch[:, :-1], batch[:, 1:]).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float().cpu() / parts
        if world > 1:
            dist.all_reduce(total)
        engine.optimizer.wait()
        found["losses"].append(float(total) / world)
        found["digests"].append(digest(engine.module))
        groups = engine.optimizer.team.groups if engine.optimizer.team is not None else {}
        found["sent"].append(sum(groups[name].sent_bytes for name in ("reduce", "publish") if name in groups))
        found["compressed"].append(engine.optimizer.is_compressed)
    return found


def train_all(rank: int, world: int, configs: dict[str, dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Several configs, one after the other; and whether rows of positions that never come are as they were."""
    found = {}
    for name, config in configs.items():
        engine = engine_of(config)
        before = engine.module.position_embedding.weight.detach()[LENGTH:].clone()
        first = steps(engine, 0, FREEZE - 1)
        least = [least_share(engine)]
        found[name] = {key: first[key] + more for key, more in steps(engine, FREEZE - 1, num_steps).items()}
        found[name]["least"] = [*least, least_share(engine)]
        found[name]["numel"] = sum(bucket.gathered.numel for bucket in engine.optimizer.runtime.buckets)
        found[name]["unused_same"] = bool((engine.module.position_embedding.weight.detach()[LENGTH:] == before).all())
        engine.destroy()
    return found


def least_share(engine: Any) -> float:
    """The least that a second moment is of the mean in its parameter, but for zeros."""
    optimizer = engine.optimizer
    sums, counts = (torch.zeros(len(optimizer.runtime.params), dtype=torch.float64) for _ in range(2))
    least = torch.full_like(sums, torch.inf)
    for bucket in optimizer.runtime.buckets:
        for i, piece in enumerate(bucket.slices):
            found = bucket.updater.read(bucket, i)["exp_avg_sq"].double()
            found = found[found != 0]
            sums[piece.param] += found.sum()
            counts[piece.param] += found.numel()
            least[piece.param] = min([float(least[piece.param]), *found.tolist()])
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(counts)
        dist.all_reduce(least, dist.ReduceOp.MIN)
    return float((least / (sums / counts)).min())


def errors_of(engine: Any) -> dict[str, list[float]]:
    """Sum over the ranks of their errors, by parameter."""
    sums: dict[str, list[float]] = {}
    for name, entry in engine.optimizer.exchange_errors()["params"].items():
        total = entry["error"].double().reshape(-1)
        dist.all_reduce(total)
        sums[name] = (total / dist.get_world_size()).tolist()
    return sums


def save_and_go_on(rank: int, world: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Steps, a checkpoint in the middle of the compressed ones, more steps."""
    engine = engine_of(config)
    steps(engine, 0, FREEZE + 5)
    engine.save_checkpoint(Path(folder))
    errors = errors_of(engine)
    found = steps(engine, FREEZE + 5, FREEZE + 12)
    engine.destroy()
    return {**found, "errors": errors}


def load_and_go_on(rank: int, world: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The same steps after it, from the checkpoint."""
    engine = engine_of(config, seed=1)
    engine.load_checkpoint(Path(folder))
    errors = errors_of(engine) if engine.optimizer.is_compressed and world > 1 else {}
    found = steps(engine, FREEZE + 5, FREEZE + 12)
    engine.destroy()
    return {**found, "errors": errors}


def lose_steps(rank: int, world: int, config: dict[str, Any]) -> dict[str, Any]:
    """After the switch: how much errors change in a step that is skipped, and in one that has hardly a gradient."""
    engine = engine_of(config)
    steps(engine, 0, 6)
    assert engine.optimizer.is_compressed
    params = dict(engine.module.named_parameters())
    bad, batch = params["position_embedding.weight"], batch_of(0)[:2]
    before = own_errors(engine)
    for param in params.values():  # no gradients but one that is not finite, on one rank
        value = torch.inf if param is bad and rank == 1 else 0.0
        param.register_hook(lambda grad, value=value: torch.full_like(grad, value))
    engine.backward(engine(batch[:, :-1], batch[:, 1:]).loss)
    engine.step()
    skipped = own_errors(engine)
    engine(batch[:, :-1], batch[:, 1:])
    params["position_embedding.weight"].register_hook(torch.zeros_like)
    engine.backward(bad.square().sum())
    engine.step()
    absent, beside = own_errors(engine), {"position_embedding.weight"}
    for bucket in engine.optimizer.runtime.buckets:  # neighbours still hear how far owners' weights are from theirs
        names = {param.name for param in bucket.members}
        beside |= names if "position_embedding.weight" in names else set()
    others = before.keys() - beside
    found = {
        "skipped": engine.skipped_steps,
        "in a skipped step": max(relative(before[name], skipped[name]) for name in before),
        "without gradients": max(relative(skipped[name], absent[name]) for name in others),
        "number": len(others),
    }
    engine.destroy()
    return found


def own_errors(engine: Any) -> dict[str, torch.Tensor]:
    engine.optimizer.wait()
    return {name: entry["error"].clone() for name, entry in engine.optimizer.exchange_errors()["params"].items()}


def relative(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())
