# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of ZeRO."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import twinflow
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload.bucket import local_of
from twinflow.optim.twin_build import first_of

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=3, hidden=32, num_heads=2)
GLOBAL_BATCH = 16
NUM_STEPS = 6


def tokens(step: int) -> torch.Tensor:
    """One batch of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, SHAPE.vocab_size, (GLOBAL_BATCH, SHAPE.context + 1), generator=generator)


def digest(model: torch.nn.Module, param_offload: Any = None) -> str:
    """Of all weights' bits."""
    is_offloaded = param_offload.params.holds if param_offload is not None else lambda _: False
    flat = torch.cat(
        [_gathered(p, param_offload) if is_offloaded(p) else full(p).reshape(-1).cpu() for p in model.parameters()]
    )
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def _gathered(param: Any, param_offload: Any) -> torch.Tensor:
    """Weights that live on the hosts, put together from what the ranks have."""
    whole = torch.zeros(param.numel(), dtype=param.dtype)
    for piece in param_offload.params.pieces(param):
        whole[piece.start : piece.start + piece.numel] = piece.read()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(whole)
    return whole


def full(param: torch.Tensor) -> torch.Tensor:
    """All of it, where ranks have rows."""
    if not isinstance(param, DTensor):
        return param.detach()
    local, whole, first = local_of(param.detach()), torch.zeros(param.numel(), dtype=param.dtype), first_of(param)
    whole[first : first + local.numel()] = local.reshape(-1).cpu()
    dist.all_reduce(whole)
    return whole.view(param.shape)


def config_of(stage: int, offload: dict[str, Any] | None, accumulation: int, world: int) -> dict[str, Any]:
    """As a user would write it; `offload` with "params" for weights on the host too."""
    zero: dict[str, Any] = {"stage": stage}
    if offload is not None:
        others = {key: value for key, value in offload.items() if key != "params"}
        zero["offload_optimizer"] = {"device": "cpu", "bucket_numel": 8192, **others}
        if offload.get("params"):
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // accumulation // world,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }


def train(rank: int, world: int, config: dict[str, Any], num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Losses of the global batch, and what this rank has."""
    torch.manual_seed(rank)  # every rank has weights of its own, until the engine is built
    engine, *_ = twinflow.initialize(model=GPT(SHAPE), config=config)
    micro, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    losses, digests = [], []
    for step in range(num_steps):
        total = torch.zeros(())
        for part in range(parts):
            start = (part * world + rank) * micro
            batch = tokens(step)[start : start + micro].to(engine.device)
            loss = engine(batch[:, :-1], batch[:, 1:]).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu() / parts
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world)
        assert engine.optimizer is not None
        engine.optimizer.wait()
        digests.append(digest(engine.module, engine.optimizer.runtime.param_offload))
    optimizer = engine.optimizer
    assert optimizer is not None
    found = {
        "losses": losses,
        "digests": digests,
        "norm": engine.get_global_grad_norm(),
        "state_bytes": sum(bucket.nbytes for bucket in optimizer.runtime.buckets),
        "numel": sum(p.numel() for p in engine.module.parameters()),
        "whole_numel": sum(bucket.gathered.numel for bucket in optimizer.runtime.buckets),
        "offloaded_numel": sum(b.gathered.numel for b in optimizer.runtime.buckets if b.offloads_params),
        "last_numel": sum(b.gathered.numel for b in optimizer.runtime.buckets if b.plan.block == SHAPE.num_layers - 1),
        "sent": {name: group.sent_bytes for name, group in optimizer.team.groups.items()} if optimizer.team else {},
    }
    engine.destroy()
    return found


def train_all(rank: int, world: int, configs: dict[str, dict[str, Any]], num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Several configs, one after the other."""
    return {name: train(rank, world, config, num_steps) for name, config in configs.items()}


def digest_alone(rank: int, world: int, stage: int | None) -> str:
    """Weights after some steps of one process; with a stage, by way of the ranks' threads and collectives."""
    from twinflow.optim.twin import Tuning, TwinOptimizer
    from twinflow.zero import Zero

    torch.manual_seed(0)
    model = GPT(SHAPE).to("cuda" if torch.cuda.is_available() else "cpu")
    zero = Zero(stage) if stage is not None else None
    options: dict[str, Any] = {"accumulation_steps": 2, "max_grad_norm": 0.5, "ratio": 0.5}
    optimizer = TwinOptimizer(model, lr=1e-2, early=True, zero=zero, tuning=Tuning(bucket_numel=8192), **options)
    for step in range(2 * NUM_STEPS):
        batch = tokens(step).to(next(model.parameters()).device)
        (model(batch[:, :-1], batch[:, 1:]).loss / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.wait()
    found = digest(model)
    optimizer.close()
    return found


def auto_on_ranks(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Weights and places with ratio 1 and with "auto", for ranks that measure different times and rates."""
    import pytest
    from auto_support import GB, Clock, rates

    from twinflow.device import Device
    from twinflow.optim import twin as twin_module
    from twinflow.optim.auto import AutoPlacement
    from twinflow.optim.twin import Tuning, TwinOptimizer
    from twinflow.planner.simulate import Timing
    from twinflow.zero import Zero, partition

    host, found = rates(1e3 * 10**rank, link_bytes=1e5), dict[str, Any]()

    def train(ratio: float | None) -> dict[str, Any]:
        torch.manual_seed(0)
        model, options = GPT(SHAPE), {"early": True, "max_grad_norm": 1e-3, "zero": Zero(stage)}
        if stage == 3:
            partition(model, Zero(stage))
        optimizer = TwinOptimizer(model, lr=1e-2, ratio=ratio, tuning=Tuning(bucket_numel=8192), **options)
        places = []
        for step in range(14):
            batch = tokens(step)[rank : rank + 1]
            model(batch[:, :-1], batch[:, 1:]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            places.append([bucket.plan.place for bucket in optimizer.runtime.buckets])
        optimizer.wait()
        result = {"digest": digest(model), "places": places, "is_placed": optimizer.is_placed, "ratio": optimizer.ratio}
        optimizer.close()
        return result

    found["host"] = train(1.0)
    with pytest.MonkeyPatch.context() as patch:  # a CPU that plays a GPU

        def placement(runtime: Any, *args: Any) -> AutoPlacement:
            clock = Clock(runtime, host, Timing(0.1, 0.2)).attach(patch)
            clock.disturbed = lambda step: 1.0 + rank * 0.3 * (step % 2)
            return AutoPlacement(runtime, *args)

        patch.setattr(Device, "free_bytes", lambda self: 90 * GB)
        patch.setattr(Device, "capacity_bytes", lambda self: 100 * GB)
        patch.setattr(Device, "peak_bytes", lambda self: 10 * GB)
        patch.setattr(twin_module, "load_or_measure", lambda device: host)
        patch.setattr(twin_module, "AutoPlacement", placement)
        found["auto"] = train(None)
    return found


def train_without_a_branch(rank: int, world: int) -> list[float]:
    """Weights on the hosts; the last rank's loss leaves out the blocks before the last."""
    torch.manual_seed(0)
    config = {**config_of(3, {"params": True}, 1, world), "gradient_clipping": 0.0}
    engine, *_ = twinflow.initialize(model=GPT(SHAPE), config=config)
    if rank == world - 1:
        last: Any = engine.module.blocks[-1]
        last.register_forward_pre_hook(lambda module, args: tuple(arg.detach() for arg in args))
    micro, losses = engine.train_micro_batch_size_per_gpu(), []
    for step in range(3):
        batch = tokens(step)[rank * micro : (rank + 1) * micro]
        loss = engine(batch[:, :-1], batch[:, 1:]).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses
