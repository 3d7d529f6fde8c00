# SPDX-License-Identifier: Apache-2.0
"""What all integrations share: optimizers that are taken over, norms that become known, state in a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations_support import assert_same_weights
from torch import nn

from twinflow.integrations import need
from twinflow.integrations.files import StreamedState
from twinflow.integrations.given import take_over
from twinflow.integrations.norms import Clipping, PendingNorm
from twinflow.optim.equivalent import rule_for, section_for
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.rules import RULES


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(ImportError, match=r"TwinTrainer needs no_such_package .*pip install that one"):
        need("no_such_package.part", "that one", "TwinTrainer")


OF_TORCH = {name: getattr(torch.optim, rule.torch_class) for name, rule in RULES.items() if rule.torch_class}
MAKERS: dict[str | None, Callable[..., torch.optim.Optimizer]] = {
    **{name: partial(kind, lr=1e-2, weight_decay=0.1) for name, kind in OF_TORCH.items()},
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    None: partial(torch.optim.NAdam, lr=1e-2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_that_is_taken_over_trains_as_it_would_have(name: str | None) -> None:
    plain, model = net(), net()
    wanted = MAKERS[name](plain.parameters())
    train(plain, wanted, range(6), torch.optim.lr_scheduler.ExponentialLR(wanted, 0.5))
    given = MAKERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)  # knows the old one only
    twin = take_over(given, model, early=True)
    assert twin.rule_name == (name or "torch.optim.nadam.NAdam")
    train(model, twin, range(6), scheduler)
    twin.close()
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6)


def test_only_what_a_rule_can_do_becomes_one() -> None:
    params = [nn.Parameter(torch.zeros(4))]
    assert rule_for(torch.optim.AdamW(params, fused=True)) == "adamw"
    assert rule_for(torch.optim.AdamW(params, amsgrad=True)) is None
    assert rule_for(torch.optim.Adam(params, decoupled_weight_decay=True)) is None
    assert rule_for(torch.optim.AdamW(params, lr=torch.tensor(1e-3))) is None
    used = torch.optim.AdamW(params)
    params[0].grad = torch.ones(4)
    used.step()
    assert rule_for(used) is None  # its state goes on as it is
    assert section_for(torch.optim.Adam(params, lr=0.5), "adam")["params"]["adam_w_mode"] is False


def test_optimizers_with_kernels_of_the_gpu_are_refused() -> None:
    kind = type("Adam8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim"})
    model = net()
    with pytest.raises(ValueError, match=r"Adam8bit.*states=\"int8\""):
        take_over(kind(model.parameters()), model)


def test_a_norm_is_known_after_its_step_and_stays_that_steps() -> None:
    model = net()
    twin = TwinOptimizer(model, lr=1e-2, max_grad_norm=0.5, early=True)
    clipping, found, wanted = Clipping(twin, "max_norm"), [], []
    for step in range(3):
        model(torch.full((2, 8), 1.0 + step)).square().mean().backward()
        found.append(clipping.clip(0.5))
        with pytest.raises(RuntimeError, match=r"before optimizer.step\(\)"):
            found[-1].item()
        assert repr(found[-1]) == "PendingNorm(not known before step())"
        twin.step()
        twin.zero_grad()
        wanted.append(twin.grad_norm)
    assert [norm.item() for norm in found] == pytest.approx(wanted)
    assert len(set(wanted)) == 3
    assert type(found[0] * 2) is torch.Tensor
    assert float(found[0]) > 0.0
    assert isinstance(found[0], PendingNorm)
    assert f"{found[0].item():.4f}" in repr(found[0])
    twin.close()


def test_a_loop_that_clips_otherwise_is_refused() -> None:
    model, other = net(), net()
    twin = TwinOptimizer(model, lr=1e-2, max_grad_norm=0.5, early=True)
    clipping = Clipping(twin, "max_norm")
    with pytest.raises(ValueError, match=r"max_norm is 1.0, but must be 0.5"):
        clipping.clip(1.0)
    with pytest.raises(ValueError, match=r"norm_type is 1.0"):
        clipping.clip(0.5, 1.0)
    with pytest.raises(ValueError, match=r"2 of the \d+ parameters of TwinOptimizer and 0 other parameters were"):
        clipping.covers(list(model.parameters())[:2])
    assert clipping.covers(model.parameters())
    assert not clipping.covers(other.parameters())
    twin.close()


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(("rule", "states"), [("adamw", "fp32"), ("adamw", "int8"), (torch.optim.NAdam, "fp32")])
def test_state_in_a_folder_goes_on_with_the_same_bits(rule: Any, states: str, is_whole: bool, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, TwinOptimizer]:
        model = net().bfloat16()
        return model, TwinOptimizer(model, rule, lr=1e-2, states=states, tuning=Tuning(bucket_numel=128))

    model, twin = build()
    train(model, twin, range(3))
    streamed = StreamedState(twin, tmp_path)
    torch.save(twin.state_dict() if is_whole else streamed.write(), tmp_path / "optimizer.pt")
    assert (tmp_path / "twinflow").exists() != is_whole
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, twin, range(3, 6))
    again, resumed = build()
    again.load_state_dict(weights)
    StreamedState(resumed, tmp_path).load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(again, resumed, range(3, 6))
    assert_same_weights(again, model)
    twin.close()
    resumed.close()


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    model = net()
    twin = TwinOptimizer(model, lr=1e-2)
    said = StreamedState(twin, tmp_path / "one").write()
    with pytest.raises(ValueError, match="other"):
        StreamedState(twin, tmp_path / "other").load_state_dict(said)
    twin.close()
