"""twinflow.compat: engines, optimizers and configs of scripts, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compat_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch import nn

from twinflow import compat


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    compat.install()
    import deepspeed

    yield deepspeed
    compat.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()


def plain(steps: int, optimizer: Any = torch.optim.AdamW, **options: Any) -> nn.Module:
    """The model of the cases after some steps of a torch loop without clipping."""
    model = cases.net()
    adam = optimizer(model.parameters(), **{"lr": 1e-2, **options})
    for seed in range(steps):
        adam.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().mean().backward()
        adam.step()
    return model


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def test_a_model_gets_another_engine(deepspeed: Any) -> None:
    model = cases.net()
    first, *_ = deepspeed.initialize(model=model, config=cases.config(0, gradient_clipping=1e9))
    evaluated, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 4})
    cases.step(first, 0)  # an engine without an optimizer ends no other engine
    assert torch.equal(evaluated(torch.ones(4, 6)), first(torch.ones(4, 6)))
    second, *_ = deepspeed.initialize(model=model, config=cases.config(2, gradient_clipping=1e9))
    with pytest.raises(RuntimeError, match=r"initialize\(\) was called again with the same model"):
        first.backward(first(torch.ones(4, 6)).sum())
    state = deepspeed.utils.safe_get_full_optimizer_state(model[0].weight, "exp_avg")
    assert state is None  # the new optimizer has no step yet
    cases.step(second, 1)
    second.destroy()
    with pytest.raises(ValueError, match=r"Pass engine\.module"):
        deepspeed.initialize(model=second, config=cases.config(0))


def test_the_scripts_own_optimizer_stays_usable(deepspeed: Any) -> None:
    """In fp32 without ZeRO it is returned itself; its methods are those of the engine's optimizer."""
    model = cases.net()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    given = {"train_batch_size": 4, "gradient_clipping": 0}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=own, config=given)
    assert optimizer is own is engine.client_optimizer is engine.basic_optimizer
    for seed in range(3):
        engine.backward(engine(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, plain(3, torch.optim.SGD, lr=0.1, momentum=0.9))
    schedule.step()
    assert engine.get_lr() == [pytest.approx(0.01)]
    assert own.state_dict().keys() == engine.optimizer.state_dict().keys()
    engine.destroy()
    model = cases.net()
    own = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.1)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=own, config=cases.config(2))
    assert optimizer is engine.optimizer
    engine.destroy()


class Net(nn.Module):
    """A model with blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


ON_HOST = {"stage": 3, "offload_param": {"device": "cpu"}}


def test_weights_on_the_host_without_an_optimizer(deepspeed: Any) -> None:
    """ZeRO-Inference: blocks are fetched; weights can be read and written, and come back when the engine ends."""
    model, inputs = Net(), torch.ones(4, 6)
    want, weights = model(inputs), {name: value.clone() for name, value in model.state_dict().items()}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, config={"train_batch_size": 4, "zero_optimization": ON_HOST}
    )
    assert optimizer is None
    assert not any(param.requires_grad for param in engine.module.parameters())
    for _ in range(2):
        assert torch.equal(engine(inputs), want)
    block_bytes = sum(p.numel() for p in model.layers.parameters()) * 4
    assert engine.host_weights.runtime.fetched_bytes >= 2 * block_bytes
    assert all(torch.equal(value, weights[name]) for name, value in engine.module_state_dict().items())
    with deepspeed.zero.GatheredParameters(model.layers[0].weight, modifier_rank=0):
        model.layers[0].weight.zero_()
    changed = engine(inputs)
    assert not torch.equal(changed, want)
    with pytest.raises(RuntimeError, match="it has no optimizer"):
        engine.backward(changed.sum())
    engine.destroy()
    assert torch.equal(model(inputs), changed)
    assert all(param.requires_grad for param in model.parameters())


def test_weights_on_the_host_take_the_optimizer_along(deepspeed: Any) -> None:
    found = []
    for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
        config = cases.config(3, zero_optimization={**ON_HOST, **offload})
        engine, *_ = deepspeed.initialize(model=Net(), config=config)
        for seed in range(2):
            cases.step(engine, seed)
        assert engine.optimizer.host_share == 1.0
        found.append(engine.module_state_dict())
        engine.destroy()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
