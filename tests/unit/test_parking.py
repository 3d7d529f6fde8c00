"""Weights that live on the host (`offload_params`, `offload_param` in a config): the bits of weights on the device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from parking_support import SHAPE, check_same, gpt, loss_of, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twinflow
from twinflow.models.gpt import GPT
from twinflow.offload.plan import ROOT
from twinflow.optim.twin import Tuning, TwinOptimizer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 3},
        {"early": False},
        {"max_grad_norm": None},
        {"states": "int8"},
        {"states": "bf16", "rule": "lion", "lr": 1e-3},
        {"rule": "sgd", "momentum": 0.9},
    ],
    ids=str,
)
def test_no_bit_changes(options: dict[str, Any]) -> None:
    check_same(gpt(), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_bit_changes_in_half_precision(dtype: torch.dtype) -> None:
    check_same(gpt(dtype), steps=3)


def test_no_bit_changes_with_checkpointed_blocks() -> None:
    check_same(gpt(checkpoint_activations=True))


def test_no_bit_changes_with_slow_copies() -> None:
    def slow(optimizer: TwinOptimizer) -> None:
        optimizer.runtime.device.delay("fetch", 0.01)

    check_same(gpt(), steps=3, watch=slow)


class Odd(nn.Module):
    """Blocks that share a weight, a block that runs twice, one with a frozen part, several outputs and keywords."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([_Pair() for _ in range(4)])
        self.blocks[3].b.weight = self.blocks[2].b.weight  # in two blocks: it stays with the root
        self.blocks[1].a.weight.requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, self.blocks[0]]:
            if self.reentrant is None:
                x, extra = block(x, scale=2.0)
            else:
                x, extra = checkpoint(block, x, 2.0, use_reentrant=self.reentrant)
            x = x + extra
        return x.square().mean()


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.a(x)) * scale, torch.sin(self.b(x))


def odd_loss(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    found: Tensor = model(torch.randn(5, 8, generator=generator))
    return found


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_odd_models(reentrant: bool | None) -> None:
    check_same(lambda: Odd(reentrant), loss=odd_loss, tuning=Tuning(bucket_numel=128))


def test_two_forwards_before_their_backwards() -> None:
    check_same(gpt(), steps=3, loss=lambda model, step: loss_of(model, step) + loss_of(model, step + 1))


def test_blocks_have_memory_only_while_they_run() -> None:
    model = gpt()()
    optimizer = TwinOptimizer(model, lr=1e-2, early=True, offload_params=True)
    parking = optimizer.runtime.parking
    assert parking is not None
    most, lots = 0, parking._lots

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(lot.is_here for lot in lots.values()))

    for block in model.blocks:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    for step in range(3):
        loss_of(model, step).backward()
        assert not any(lot.is_here for lot in lots.values())
        for block in model.blocks:
            for param in block.parameters():
                assert param.untyped_storage().nbytes() <= 4
        optimizer.step()
    assert most <= 3 < SHAPE.num_layers
    optimizer.close()


def test_weights_outside_their_block_are_not_numbers() -> None:
    model = gpt()()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    weight = next(iter(model.blocks[0].parameters()))
    assert weight.isnan().all()
    with torch.no_grad():
        weight.fill_(1.0)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"blocks.0.* was written to"):
        optimizer.step()
    optimizer.close()
    assert not any(param.isnan().any() for param in model.parameters())


def test_state_dicts() -> None:
    model, other = gpt()(), gpt()()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())
    with pytest.raises(RuntimeError, match="before the optimizer is built"):
        model.load_state_dict(other.state_dict())
    optimizer.close()
    model.load_state_dict(other.state_dict())


def test_a_forgotten_optimizer_is_collected() -> None:
    model = gpt()()
    optimizer: Any = TwinOptimizer(model, lr=1e-2, offload_params=True)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.close()
    del optimizer
    gc.collect()
    TwinOptimizer(model, lr=1e-2).close()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ratio": 0.5}, "ratio"),
        ({"ratio": "auto"}, "ratio"),
        ({"delayed_update": True, "early": True}, "delayed_update"),
        ({"tuning": Tuning(streamed=0.5)}, "streamed"),
        ({"rule": torch.optim.SGD}, "rule"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TwinOptimizer(gpt()(), lr=1e-2, offload_params=True, **options)


def test_parameters_without_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="model"):
        TwinOptimizer(gpt()().parameters(), lr=1e-2, offload_params=True)


def config(**zero: Any) -> dict[str, Any]:
    section = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {**section, **zero},
    }


@pytest.mark.parametrize(
    ("zero", "name"),
    [
        ({"stage": 2}, "zero_optimization.stage"),
        ({"offload_optimizer": None}, "offload_optimizer.device"),
        ({"offload_optimizer": {"device": "none"}}, "offload_optimizer.device"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio"),
        ({"offload_optimizer": {"device": "cpu", "delayed_update": True}}, "offload_optimizer.delayed_update"),
        ({"offload_param": {"device": "nvme"}}, "offload_param.device"),
    ],
    ids=str,
)
def test_configs_that_are_refused(zero: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        twinflow.initialize(model=gpt()(), config=config(**zero))


def steps_of(engine: Any, first: int, num: int) -> list[float]:
    losses = []
    for step in range(first, first + num):
        loss = engine(tokens(step)[:, :-1], tokens(step)[:, 1:]).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("to_parked", [True, False])
def test_a_checkpoint_goes_on_exactly_with_weights_on_either_side(tmp_path: Path, to_parked: bool) -> None:
    parked, plain = config(), config(offload_param=None)
    engine, *_ = twinflow.initialize(model=gpt()(), config=plain if to_parked else parked)
    steps_of(engine, 0, 3)
    engine.save_checkpoint(str(tmp_path), tag="three")
    truth = steps_of(engine, 3, 3)
    engine.destroy()
    torch.manual_seed(5)
    engine, *_ = twinflow.initialize(model=lambda: GPT(SHAPE), config=parked if to_parked else plain)
    engine.load_checkpoint(str(tmp_path))
    assert steps_of(engine, 3, 3) == truth
    engine.destroy()


def test_weights_alone_are_loaded_too(tmp_path: Path) -> None:
    engine, *_ = twinflow.initialize(model=gpt()(), config=config())
    steps_of(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path))
    truth = {name: value.clone() for name, value in engine.module.state_dict().items()}
    steps_of(engine, 2, 2)
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, truth[name]), name
    engine.destroy()


def test_a_checkpoint_in_the_background_has_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    chosen = {**config(), "checkpoint": {"background": True}}
    engine, *_ = twinflow.initialize(model=gpt()(), config=chosen)
    steps_of(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path))
    truth = steps_of(engine, 2, 3)
    engine.destroy()
    engine, *_ = twinflow.initialize(model=gpt()(), config=chosen)
    engine.load_checkpoint(str(tmp_path))
    assert steps_of(engine, 2, 3) == truth
    engine.destroy()


def test_only_blocks_are_parked() -> None:
    optimizer = TwinOptimizer(gpt()(), lr=1e-2, offload_params=True)
    for bucket in optimizer.runtime.buckets:
        assert bucket.is_parked == (bucket.plan.block != ROOT)
    optimizer.close()
