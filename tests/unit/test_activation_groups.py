# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every n-th layer change no bit of a result; those in float8 lose what float8 loses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin_support import batch, quick_torch

import twinflow
from twinflow.activations import checkpoint_layers, grouped
from twinflow.activations.float8 import decode, encode, encoded_bytes
from twinflow.activations.tiled import tile_modules
from twinflow.models.gpt import GPT, GPTConfig

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=5, hidden=32, num_heads=2, dropout=0.1)
INPUT_BYTES = 2 * 16 * 32 * 4


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def gradients(model: Any, steps: int = 2) -> list[Tensor]:
    model.zero_grad()
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        losses.append(model(*batch(step)).loss)
    for loss in reversed(losses):  # all forwards before the first backward
        loss.backward()
    return [*(loss.detach() for loss in losses), *(p.grad.clone() for p in model.parameters())]


class Counter:
    """The number of forwards of each block, and the inputs that autograd has saved."""

    def __init__(self, model: GPT) -> None:
        self.runs = [0] * len(model.blocks)
        for i, block in enumerate(model.blocks):
            norm: Any = block.attention_norm
            norm.register_forward_hook(lambda *_, i=i: self._count(i))

    def _count(self, i: int) -> None:
        self.runs[i] += 1


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"offload": True, "on_device": 2}], ids=str)
@pytest.mark.parametrize("every", [1, 2, 3, 5, 9])
def test_groups_of_layers_give_the_same_bits(every: int, options: dict[str, Any]) -> None:
    expected = gradients(gpt())
    model = gpt()
    handle = checkpoint_layers(model, ["Block"], every=every, min_bytes=1024, **options)
    found = gradients(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    handle.remove()


def test_each_layer_of_a_group_but_the_last_runs_three_times() -> None:
    model = gpt()
    counter = Counter(model)
    handle = checkpoint_layers(model, ["Block"], every=3)
    gradients(model, 1)
    assert counter.runs == [3, 3, 2, 3, 2]  # groups of three and of two layers
    handle.remove()


def test_only_the_first_input_of_a_group_leaves_the_device() -> None:
    model = gpt()
    handle = checkpoint_layers(model, ["Block"], every=2, offload=True, min_bytes=1024)
    gradients(model, 1)
    offload: Any = handle.offload
    assert offload.bytes_out == 3 * INPUT_BYTES
    handle.remove()
    handle = checkpoint_layers(model, ["Block"], offload=True, on_device=3, min_bytes=1024)
    gradients(model, 1)
    offload = handle.offload
    assert offload.bytes_out == 2 * INPUT_BYTES
    handle.remove()


def test_a_layer_with_another_input_than_the_last_output_keeps_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
    x = torch.randn(3, 8, dtype=torch.float64)

    def run() -> list[Tensor]:
        model.zero_grad()
        y = model[1](model[0](x)) * 2
        y = model[3](model[2](y))
        y.sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = run()
    handle = checkpoint_layers(model, list(model), every=3)
    found = run()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    handle.remove()


def test_all_layers_of_a_group_get_gradients_if_backward_is_under_autocast() -> None:
    """Autocast of torch 2.9 keeps casts that are made without gradients, and uses them for a part with gradients.
    A group first runs its layers without gradients.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x = torch.randn(3, 8)

    def run() -> list[Tensor | None]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        return [param.grad for param in model.parameters()]

    expected = run()
    handle = checkpoint_layers(model, list(model), every=4)
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)
    handle.remove()


def test_a_layer_runs_again_with_the_random_numbers_of_the_device_of_its_only_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[str] = []
    monkeypatch.setattr(grouped, "randoms_of", lambda device: devices.append(device.type))
    monkeypatch.setattr(grouped, "autocast_of", lambda device, has_gradients: devices.append(device))
    x = torch.ones(2, device="meta", requires_grad=True)
    group = grouped.Group()
    group.start(torch.tanh, [x])
    y = torch.tanh(x)
    group.note(y)
    assert group.link(torch.tanh, [y]) is not None
    assert devices == ["meta"] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float8_keeps_the_size_of_each_token(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 70, 32).mul(torch.logspace(-20, 20, 70)[:, None]).to(dtype)
    x[0, 0] = 0.0
    x[0, 1, 3] = torch.nan
    encoded = encode(x.transpose(0, 1).contiguous().transpose(0, 1))
    assert encoded.memory.numel() == encoded_bytes(x.shape) == 3 * 70 * (32 + 4)
    found = decode(encoded)
    assert found.dtype == dtype
    assert torch.equal(found[0, 0], x[0, 0])
    assert found[0, 1].isnan().all()
    kept = torch.ones(3, 70, dtype=torch.bool)
    kept[0, :2] = False
    # A value of e4m3 has four significant bits. Values below 2**-9 of 448 are subnormal.
    largest = x[kept].double().abs().amax(-1, keepdim=True)
    error = (found[kept].double() - x[kept].double()).abs()
    assert (error <= x[kept].double().abs() * 2**-4 + largest * 2**-17).all()
    assert error.max() > 0


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"offload": True, "every": 2}, {"every": 2}], ids=str)
def test_checkpoints_in_float8_give_nearly_the_same_gradients(options: dict[str, Any]) -> None:
    expected = gradients(gpt(), 1)
    model = gpt()
    handle = checkpoint_layers(model, ["Block"], float8=True, min_bytes=1024, **options)
    found = gradients(model, 1)
    assert torch.equal(found[0], expected[0])  # the forward is not changed
    offload: Any = handle.offload
    num_out = (3 if options.get("every") else 5) if options.get("offload") else 0
    assert offload.bytes_out == num_out * 2 * 16 * (32 + 4)
    differences = [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]
    assert 0 < max(differences) < 0.2
    handle.remove()


def test_groups_of_layers_with_tiled_mlps() -> None:
    expected = gradients(gpt())
    model = gpt()
    tiles = tile_modules({f"{i}": block.mlp for i, block in enumerate(model.blocks)}, 8)  # type: ignore[misc]
    handle = checkpoint_layers(model, ["Block"], every=2)
    torch.testing.assert_close(gradients(model), expected)
    handle.remove()
    tiles.remove()


def test_the_config_has_these_options() -> None:
    def losses(**options: Any) -> list[float]:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "activation_checkpointing": options,
        }
        engine, *_ = twinflow.initialize(model=gpt(), config=config)
        found = []
        for step in range(2):
            torch.manual_seed(step)
            loss = engine(*batch(step)).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        assert (engine.activations is not None) == bool(options)
        engine.destroy()
        return found

    expected = losses()
    assert losses(every=2) == losses(cpu_checkpointing=True, layers_on_device=1) == expected
    assert losses(float8=True) == pytest.approx(expected, rel=0.05)


def test_options_that_conflict_are_refused() -> None:
    model = gpt()
    for options, text in (
        ({"every": 0}, "every is 0, but must be a whole number >= 1"),
        ({"on_device": -1}, "on_device is -1"),
        ({"every": 2, "selective": True}, "selective cannot be used with activation_checkpointing.float8 or every"),
    ):
        with pytest.raises(ValueError, match=text):
            checkpoint_layers(model, ["Block"], **options)  # type: ignore[arg-type]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "activation_checkpointing": {"every": 2},
    }
    with pytest.raises(ValueError, match=r"activation_checkpointing.every=2 cannot be used with weights on the host"):
        twinflow.initialize(model=model, config=config)
