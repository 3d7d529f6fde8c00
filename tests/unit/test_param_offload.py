# SPDX-License-Identifier: Apache-2.0
"""Weights that live on the host (`offload_params`, `offload_param` in a config): the bits of weights on the device."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from param_offload_support import SHAPE, check_same, gpt, loss_of, steps_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twinflow
from twinflow.device import Device
from twinflow.models.gpt import GPT
from twinflow.offload.plan import ROOT
from twinflow.offload.weight_guard import plain
from twinflow.optim.twin import Tuning, TwinOptimizer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 3},
        pytest.param({"early": False}, marks=pytest.mark.matrix),
        pytest.param({"max_grad_norm": None}, marks=pytest.mark.matrix),
        {"states": "int8"},
        {"states": "bf16", "rule": "lion", "lr": 1e-3},
        pytest.param({"rule": "sgd", "momentum": 0.9}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_no_bit_changes(options: dict[str, Any]) -> None:
    check_same(gpt(), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_bit_changes_in_half_precision(dtype: torch.dtype) -> None:
    check_same(gpt(dtype), steps=3)


def test_no_bit_changes_with_checkpointed_blocks() -> None:
    check_same(gpt(recompute="full"))


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
    param_offload = optimizer.runtime.param_offload
    assert param_offload is not None
    most, blocks = 0, param_offload._blocks

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(one.is_here for one in blocks.values()))

    for block in model.blocks:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    for step in range(3):
        loss_of(model, step).backward()
        assert not any(one.is_here for one in blocks.values())
        with plain():  # else the weights would be fetched
            for block in model.blocks:
                for param in block.parameters():
                    assert param.untyped_storage().nbytes() <= 4
        optimizer.step()
        optimizer.zero_grad()
    assert most <= 3 < SHAPE.num_layers
    optimizer.close()


WAITING = Tuning(bucket_numel=4096, hold="device", flat_bytes=1 << 14)  # a bucket of fp32 gradients


def test_gradients_that_waited_on_the_device_leave_their_memory_to_the_forward() -> None:
    model: Any = gpt()()
    optimizer = TwinOptimizer(
        model, lr=1e-2, early=True, offload_params=True, ratio=1.0, max_grad_norm=0.5, tuning=WAITING
    )
    flats, seen = optimizer.runtime.executor.flats, []
    model.blocks[-1].register_forward_hook(lambda *_: seen.append(flats.num_bytes))
    for step in range(4):
        loss_of(model, step).backward()
        assert flats.num_bytes == flats.max_bytes  # those of all buckets wait for the norm
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] == 0
    assert 0 < max(seen) <= 1 << 14
    optimizer.close()


@pytest.mark.parametrize("stream", ["out", "update", "compute"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_no_bit_changes_with_memory_that_gradients_have_left(stream: str, ratio: float) -> None:
    tuning = Tuning(bucket_numel=4096, hold="device", flat_bytes=0, streamed=0.4)

    def slow(optimizer: TwinOptimizer) -> None:
        optimizer.runtime.device.delay(stream, 0.002)

    check_same(gpt(), steps=3, ratio=ratio, tuning=tuning, watch=slow)


def test_weights_outside_their_block_are_read_and_written_where_they_live() -> None:
    model, other = gpt()(), gpt()()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    weight, expected = (next(iter(it.blocks[0].parameters())) for it in (model, other))
    assert torch.equal(weight, expected)
    with torch.no_grad():
        weight.fill_(1.5)
    weight.data[0] = 2.0
    assert weight.tolist() == [2.0] + [1.5] * (weight.numel() - 1)
    loss_of(model, 0).backward()
    optimizer.step()
    assert 0 < float((weight.detach() - 1.5)[1:].abs().max()) < 2e-2
    optimizer.close()
    assert not any(param.isnan().any() for param in model.parameters())


def test_state_dicts() -> None:
    model, other = gpt()(), gpt()()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())
    loss_of(model, 0).backward()
    optimizer.step()
    assert not any(torch.equal(model.state_dict()[name], value) for name, value in other.named_parameters())
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in other.state_dict().items())
    optimizer.close()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in other.state_dict().items())


def test_page_locked_memory_does_not_start_at_its_storages_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU, where it starts at a page."""
    monkeypatch.setattr(Device, "pinned", lambda self, numel, dtype: torch.empty(numel + 100, dtype=dtype)[100:])
    check_same(gpt(), steps=3)


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
        ({"delayed_update": True, "early": True}, "delayed_update"),
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
        ({"offload_optimizer": {"device": "cpu", "delayed_update": True}}, "offload_optimizer.delayed_update"),
        ({"offload_param": {"device": "nvme"}}, r"offload_param\.nvme_path"),
    ],
    ids=str,
)
def test_configs_that_are_refused(zero: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        twinflow.initialize(model=gpt()(), config=config(**zero))


@pytest.mark.parametrize("offloads_params", [False, True])
def test_an_optimizer_that_is_given_must_be_built_as_the_config_says(offloads_params: bool) -> None:
    model = gpt()()
    optimizer = TwinOptimizer(model, lr=1e-2, max_grad_norm=0.5, offload_params=offloads_params)
    chosen = {**config(), "zero_optimization": {"stage": 0}} if offloads_params else config()
    with pytest.raises(ValueError, match=r"zero_optimization.offload_param.device"):
        twinflow.initialize(model=model, optimizer=optimizer, config=chosen)
    optimizer.close()


@pytest.mark.parametrize("to_offloaded", [True, False])
def test_a_checkpoint_goes_on_exactly_with_weights_on_either_side(tmp_path: Path, to_offloaded: bool) -> None:
    offloaded, plain = config(), config(offload_param=None)
    engine, *_ = twinflow.initialize(model=gpt()(), config=plain if to_offloaded else offloaded)
    steps_of(engine, 0, 3)
    engine.save_checkpoint(str(tmp_path), tag="three")
    truth = steps_of(engine, 3, 3)
    engine.destroy()
    torch.manual_seed(5)
    engine, *_ = twinflow.initialize(model=lambda: GPT(SHAPE), config=offloaded if to_offloaded else plain)
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


def test_only_blocks_are_offloaded() -> None:
    optimizer = TwinOptimizer(gpt()(), lr=1e-2, offload_params=True)
    for bucket in optimizer.runtime.buckets:
        assert bucket.offloads_params == (bucket.plan.block != ROOT)
    optimizer.close()


class Stack(nn.Module):
    """Blocks of two layers, called by `run`."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([(make or _Layers)() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.first(x))
        return self.last(x).square().mean()  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.b(torch.tanh(self.a(x)))
        return found


class _InPlace(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


@dataclass
class _Output:
    hidden: Tensor


class _Wrapped(_Layers):
    def forward(self, x: Any) -> Any:
        return _Output(super().forward(x.hidden if isinstance(x, _Output) else x))


class Wrapped(Stack):
    def run(self, x: Tensor) -> Tensor:
        found: Any = super().run(x)
        return found.hidden  # type: ignore[no-any-return]


class _WithList(_Layers):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
        losses.append(self.a(x).square().mean())
        return super().forward(x)


class WithList(Stack):
    def run(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x + torch.stack(losses).sum()


class _View(_Layers):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.latents.expand(5, 8)


class Views(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, latents = block(x)
            x = x + latents
        return x


class Skips(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) + torch.sin(x)
        return x


class _Aux(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.aux = self.a(found).square().mean()
        return found


class Aux(Stack):
    def run(self, x: Tensor) -> Tensor:
        x = super().run(x)
        return x + sum(block.aux for block in self.blocks)  # type: ignore[no-any-return]


KINDS: dict[str, Any] = {
    "keeps a loss as an attribute": lambda: Aux(_Aux),
    "changes its input in place": lambda: Stack(_InPlace),
    "returns a dataclass": lambda: Wrapped(_Wrapped),
    "appends to a list it is given": lambda: WithList(_WithList),
    "returns a view of a weight": lambda: Views(_View),
    "has skips around it": Skips,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_where_a_block(kind: str) -> None:
    def slow(optimizer: TwinOptimizer) -> None:
        optimizer.runtime.device.delay("fetch", 0.002)

    check_same(KINDS[kind], loss=odd_loss, tuning=Tuning(bucket_numel=128), steps=4, watch=slow)


@pytest.mark.parametrize("change", ["step", "write", "write through data", "write elsewhere"])
def test_a_graph_of_gradients_fails_when_its_weights_change(change: str) -> None:
    """As with torch. A write through `.data` fails too: torch does not notice it, and uses the new weights."""
    model = Stack()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    x = torch.randn(5, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(model.blocks[1](model.blocks[0](x)).square().sum(), x, create_graph=True)
    if change == "step":
        odd_loss(model, 0).backward()
        optimizer.step()
    elif change == "write":
        with torch.no_grad():
            model.blocks[1].a.weight.mul_(2.0)  # type: ignore[union-attr, operator]
    elif change == "write through data":
        model.blocks[1].a.weight.data.mul_(2.0)  # type: ignore[union-attr, operator]
        model.blocks[2](x)
    else:
        with torch.no_grad():
            model.blocks[2].a.weight.mul_(2.0)  # type: ignore[union-attr, operator]
        slope.square().sum().backward()
        optimizer.close()
        return
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|modified by a step or a write"):
        slope.square().sum().backward()
    optimizer.close()


def test_a_block_that_is_called_alone_sees_what_was_written_through_data() -> None:
    model = Stack()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    x = torch.randn(5, 8)
    before = model.blocks[1](x)
    model.blocks[1].b.weight.data.zero_()  # type: ignore[union-attr, operator]
    model.blocks[1].b.bias.data.zero_()  # type: ignore[union-attr, operator]
    assert not torch.equal(before, x)
    assert torch.equal(model.blocks[1](x), x)
    optimizer.close()


def test_a_backward_through_weights_of_another_step_is_an_error() -> None:
    model = Stack()
    optimizer = TwinOptimizer(model, param_groups=model.blocks.parameters(), lr=1e-2, offload_params=True)
    old = odd_loss(model, 0)
    odd_loss(model, 1).backward()
    optimizer.step()
    odd_loss(model, 2)
    with pytest.raises(RuntimeError, match="modified by a step"):
        old.backward()
    optimizer.close()


class Inside(Stack):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.b(block.a(x))  # type: ignore[operator,union-attr]
        return x


def test_modules_inside_blocks_that_are_never_called() -> None:
    found = []
    for offload_params in (False, True):
        torch.manual_seed(0)
        model = Inside()
        optimizer = TwinOptimizer(model, lr=1e-2, offload_params=offload_params)
        for step in range(3):
            odd_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.close()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def test_a_traced_model_needs_its_weights() -> None:
    """A trace would keep parameters without values."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    with pytest.raises(RuntimeError, match="The model cannot be traced"):
        torch.jit.trace(model, x)
    with pytest.raises(RuntimeError, match="The model cannot be traced"):
        torch.export.export(model, (x,))
    torch.testing.assert_close(torch.jit.trace(copy.deepcopy(model), x)(x), model(x))
    optimizer.close()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="a member of a ModuleList or Sequential"):
        TwinOptimizer(nn.Linear(8, 8), lr=1e-2, offload_params=True)


def test_parameters_that_are_not_trained_keep_their_values() -> None:
    found = []
    for offloads_params in (False, True):
        model = Stack()
        chosen = [model.blocks[1].a.weight, model.first.weight]  # type: ignore[union-attr]
        optimizer = TwinOptimizer(model, param_groups=chosen, lr=1e-2, offload_params=offloads_params)
        losses = []
        for step in range(3):
            loss = odd_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        found.append(losses)
    assert found[0] == found[1]


def test_frozen_integers() -> None:
    model = Stack()
    codes = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    model.blocks[0].codes = codes
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, _: seen.append(module.codes.clone()))
    odd_loss(model, 0).backward()
    optimizer.step()
    assert torch.equal(seen[0], torch.arange(6, dtype=torch.uint8))
    optimizer.close()


@pytest.mark.parametrize("is_after_backward", [False, True])
def test_closed_in_the_middle_of_a_step_the_weights_are_there(is_after_backward: bool) -> None:
    model = Stack()
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = TwinOptimizer(model, lr=1e-2, early=True, max_grad_norm=1.0, offload_params=True)
    loss = odd_loss(model, 0)
    if is_after_backward:
        loss.backward()
    optimizer.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, truth[name]), name


def test_the_last_write_before_close_stays() -> None:
    """A copy that was written is stored with the next use of a weight, and here there is none."""
    model = Stack()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    odd_loss(model, 0).backward()
    optimizer.step()
    with torch.no_grad():
        for param in model.parameters():
            param.detach().copy_(torch.full(param.shape, 7.0))
    optimizer.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, torch.full_like(value, 7.0)), name


def test_weights_that_are_not_kept_are_not_used() -> None:
    model = Stack()
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    odd_loss(model, 0).backward()
    optimizer.step()
    optimizer.close(keep_weights=False)
    with pytest.raises(RuntimeError, match=r"it has no values.*close\(keep_weights=False\)"):
        odd_loss(model, 1)


def test_frozen_weights_are_never_all_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing copies the frozen weights of a block into the model and then releases its memory on the host."""
    model = Stack()
    for block in model.blocks:
        block.requires_grad_(False)
        next(block.parameters()).requires_grad_(True)
    optimizer = TwinOptimizer(model, lr=1e-2, offload_params=True)
    offload = optimizer.runtime.param_offload
    assert offload is not None
    frozen = [b for weights in offload._blocks.values() for b in weights.buffers if b.bucket is None]
    alive = [weakref.ref(buffer.host.read(0, buffer.host.numel).untyped_storage()) for buffer in frozen]
    assert alive
    counts: list[int] = []

    def released(_: Tensor) -> None:
        counts.append(sum(reference() is not None for reference in alive))

    monkeypatch.setattr(offload._device, "release", released)
    optimizer.close()
    assert counts[: len(alive)] == list(range(len(alive), 0, -1))
    assert not any(reference() is not None for reference in alive)
