# SPDX-License-Identifier: Apache-2.0
"""Training with weights on the host and with weights on the device, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow.device import Device
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload import reconfigure
from twinflow.offload.plan import HOST, RESIDENT, ROOT
from twinflow.optim import twin as twin_module
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.planner.machines import Rates

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=4, hidden=32, num_heads=2)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AWAY, HERE = {(HOST, True)}, {(RESIDENT, False)}  # of `places`
SMALL = Tuning(bucket_numel=4096)  # a block has several buckets
_SLOW = dict.fromkeys(("fp32", "bf16", "int8"), 1e3)
SLOW_HOST = Rates(1e4, 1e4, 1e4, _SLOW, _SLOW, device_bytes=4e12, flops=0.0)


def tokens(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 64, (4, 17), generator=generator).to(DEVICE)


def gpt(dtype: torch.dtype = torch.float32, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(GPTConfig(**{**vars(SHAPE), **changes})).to(dtype)

    return make


def loss_of(model: Any, step: int) -> Tensor:
    found: Tensor = model(tokens(step)[:, :-1], tokens(step)[:, 1:]).loss
    return found


def logits_loss(model: Any, step: int) -> Tensor:
    """A loss of all logits: autograd saves the weight of the output layer."""
    logits = model(tokens(step)[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens(step)[:, 1:].flatten())


def train(
    make: Callable[[], nn.Module],
    offloads_params: bool,
    steps: int = 5,
    loss: Callable[[Any, int], Tensor] = loss_of,
    watch: Callable[[TwinOptimizer], None] = lambda _: None,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps, one without gradients among them, and the weights after that."""
    model = make() if offloads_params else make().to(DEVICE)
    given = {"lr": 1e-2, "early": True, "max_grad_norm": 0.5, "tuning": Tuning(bucket_numel=4096), **options}
    optimizer = TwinOptimizer(model, offload_params=offloads_params, **given)
    watch(optimizer)
    parts, losses = given.get("accumulation_steps", 1), []
    for step in range(steps * parts):
        found = loss(model, step)
        (found / parts).backward()
        losses.append(found.detach().item())
        if (step + 1) % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
        if step == 2 * parts - 1:
            with torch.no_grad():
                losses.append(loss(model, 0).item())
    optimizer.wait()
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return losses, weights


def check_same(make: Callable[[], nn.Module], **options: Any) -> None:
    """Weights on the host change no bit."""
    losses, weights = train(make, False, **options)
    found, others = train(make, True, **options)
    assert found == losses, f"once more with weights on the device: {train(make, False, **options)[0]}"
    assert len(set(losses)) > 2
    assert weights.keys() == others.keys()
    assert [name for name, value in weights.items() if not torch.equal(value, others[name])] == []


# Blocks whose weights are on the host or on the device.


def places(optimizer: TwinOptimizer) -> dict[int, set[tuple[str, bool]]]:
    """By block: the places of its state, and whether its weights are on the host."""
    found: dict[int, set[tuple[str, bool]]] = {}
    for bucket in optimizer.runtime.buckets:
        found.setdefault(bucket.plan.block, set()).add((bucket.plan.place, bucket.offloads_params))
    found.pop(ROOT, None)
    return found


def movable(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> TwinOptimizer:
    """An optimizer whose blocks can move, as with ratio "auto" on a GPU, but that moves none itself."""
    with monkeypatch.context() as patch:
        patch.setattr(Device, "free_bytes", lambda self: 10**12)
        patch.setattr(twin_module, "load_or_measure", lambda device: SLOW_HOST)
        optimizer = TwinOptimizer(model, lr=1e-2, ratio="auto", offload_params=True, **{"tuning": SMALL, **options})
    optimizer._auto = None
    return optimizer


def move(optimizer: TwinOptimizer, *blocks: int) -> None:
    """Moves blocks to where they are not."""
    runtime = optimizer.runtime
    runtime.wait()
    runtime.wait_for_copies()
    for block in blocks:
        is_away = places(optimizer)[block] == AWAY
        reconfigure.move_block(runtime, block, RESIDENT if is_away else HOST)
        assert places(optimizer)[block] == (HERE if is_away else AWAY)


def steps_of(engine: Any, first: int, num: int) -> list[float]:
    """Losses of `num` steps of an engine, on the batches from `first` on."""
    losses = []
    for step in range(first, first + num):
        loss = engine(tokens(step)[:, :-1], tokens(step)[:, 1:]).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
