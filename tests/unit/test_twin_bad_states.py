# SPDX-License-Identifier: Apache-2.0
"""States that cannot be loaded: what is wrong is named, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import twinflow
from twinflow.optim.twin import TwinOptimizer

State = dict[str, Any]


def mlp(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 16), nn.GELU(), nn.Linear(16, 1))


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def trained() -> Iterator[Callable[..., tuple[TwinOptimizer, State]]]:
    """An optimizer after two steps, and what it had saved after the first; one of a kind serves many mistakes."""
    made: dict[Any, tuple[TwinOptimizer, State]] = {}

    def get(rule: Any = "adamw", **options: Any) -> tuple[TwinOptimizer, State]:
        key = (rule, *options.items())
        if key not in made:
            model = mlp()
            optimizer = TwinOptimizer(model, rule, **options)
            step(model, optimizer)
            saved = copy.deepcopy(optimizer.state_dict())
            step(model, optimizer, 1)
            made[key] = optimizer, saved
        return made[key][0], copy.deepcopy(made[key][1])

    yield get
    for optimizer, _ in made.values():
        optimizer.close()


def everything_of(optimizer: TwinOptimizer) -> tuple[State, State]:
    """All tensors, and all else."""
    assert optimizer.model is not None
    head = copy.deepcopy(optimizer.state_dict())
    return {"state": head.pop("state"), "weights": copy.deepcopy(optimizer.model.state_dict())}, head


def refused(optimizer: TwinOptimizer, saved: Any, message: str) -> None:
    tensors, others = everything_of(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    tensors_now, others_now = everything_of(optimizer)
    torch.testing.assert_close(tensors_now, tensors, rtol=0, atol=0)
    assert others_now == others


@pytest.mark.parametrize("key", ["step", "master", "exp_avg", "exp_avg_sq"])
def test_an_entry_that_is_not_complete(trained: Any, key: str) -> None:
    optimizer, saved = trained()
    del saved["state"]["4.bias"][key]
    refused(optimizer, saved, f"^state_dict: {key} of 4.bias is missing")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 1.5),
        ("step", "1"),
        ("step", -1),
        ("step", True),
        ("exp_avg", 3),
        ("exp_avg", torch.zeros(1, dtype=torch.int64)),
        ("master", [0.0]),
        ("exp_avg_scale", 1.0),
    ],
)
def test_an_entry_with_something_else(trained: Any, key: str, value: Any) -> None:
    optimizer, saved = trained()
    saved["state"]["4.bias"][key] = value
    refused(
        optimizer,
        saved,
        f"^state_dict: {key} of 4.bias is (of type |a tensor of |missing or invalid, but must be a whole number >= 0)",
    )


def test_shapes(trained: Any) -> None:
    optimizer, saved = trained(states="int8")
    saved["state"]["4.weight"]["exp_avg_scale"] = torch.ones(2)
    refused(optimizer, saved, r"^state_dict: the shape of exp_avg_scale of 4.weight is \(2,\), but must be \(1,\)")


@pytest.mark.parametrize("key", ["rule", "num_steps", "num_skipped", "num_jobs", "has_unsent", "loss_scale", "state"])
def test_a_state_without_a_part(trained: Any, key: str) -> None:
    optimizer, saved = trained()
    del saved[key]
    refused(optimizer, saved, f"^state_dict: {key} is (missing|of type NoneType, but must be )")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": "two"}, "num_steps is 'two', but must be a whole number >= 0"),
        ({"num_jobs": -1}, "num_jobs is -1"),
        ({"has_unsent": "no"}, "has_unsent is 'no', but must be one of True, False"),
        ({"loss_scale": 8.0}, "loss_scale is 8.0, but must be a dict"),
        ({"param_groups": None}, "param_groups is None, but must be a list of dicts"),
        (
            {"param_groups": [{"lr": 1.0}]},
            r"param_groups\[0\]\['params'\] is None, but must be a list of parameter names",
        ),
        ({"state": [1]}, "state is of type list, but must be a dict"),
        ({"state": {"4.bias": 3}}, "state of 4.bias is of type int, but must be a dict"),
    ],
)
def test_a_state_with_something_else(trained: Any, changes: State, message: str) -> None:
    optimizer, saved = trained()
    refused(optimizer, {**saved, **changes}, f"^state_dict: {message}")


def test_a_loss_scale_that_lacks_a_number(trained: Any) -> None:
    optimizer, saved = trained()
    del saved["loss_scale"]["window"]
    refused(optimizer, saved, "The saved loss scale has the keys .*, but must have the keys ")


@pytest.mark.parametrize(("name", "value"), [("lr", -1), ("lr", "0.1"), ("betas", (0.9, 2.0)), ("eps", None)])
def test_options_that_are_out_of_range(trained: Any, name: str, value: Any) -> None:
    optimizer, saved = trained()
    saved["param_groups"][0][name] = value
    refused(optimizer, saved, rf"^state_dict: param_groups\[0\]: {name}.* is .*, but must be ")


@pytest.mark.parametrize("saved", [{}, {"kind": "another"}, 3, None])
def test_what_is_no_state_at_all(trained: Any, saved: Any) -> None:
    refused(
        trained()[0], saved, "^state_dict (has the kind .*, but must have the kind|is of type .*, but must be a dict)"
    )


def test_an_optimizer_of_the_users(trained: Any) -> None:
    optimizer, saved = trained(torch.optim.RMSprop)
    saved["state"]["4.bias"]["state"] = 3
    refused(optimizer, saved, "^state_dict: state of 4.bias is of type int, but must be a dict")
    optimizer, saved = trained(torch.optim.RMSprop)
    del saved["state"]["4.bias"]["master"]
    refused(optimizer, saved, "^state_dict: master of 4.bias is missing, but must be a tensor")


def test_only_sgd_without_momentum_has_no_buffer(trained: Any) -> None:
    """Such a state loads where there is momentum, too: its options come with it."""
    optimizer, saved = trained("sgd", momentum=0.9)
    del saved["state"]["4.bias"]["momentum_buffer"]
    refused(optimizer, saved, "^state_dict: momentum_buffer of 4.bias is missing, but must be a tensor")
    _, plain = trained("sgd")
    assert "momentum_buffer" not in plain["state"]["4.bias"]
    model = mlp()
    other = TwinOptimizer(model, "sgd", momentum=0.9)
    other.load_state_dict(plain)
    assert other.param_groups[0]["momentum"] == 0.0
    assert other.num_steps == 1
    other.close()


def test_whole_steps_of_torch_are_whole(trained: Any) -> None:
    optimizer, saved = trained(lr=0.02)
    for entry in saved["state"].values():
        entry["step"] = torch.tensor(7.0)
    optimizer.load_state_dict(saved)
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {7}


def test_other_parameters_are_named() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[operator]
    first = TwinOptimizer(model)
    step(model, first)
    saved = copy.deepcopy(first.state_dict())
    first.close()
    model[0].requires_grad_(True)  # type: ignore[operator]
    second = TwinOptimizer(model)
    refused(
        second, saved, r"\(only in the model: 0.weight, 0.bias\), but must be the same in.*load_optimizer_states=False"
    )
    everything = copy.deepcopy(second.state_dict())
    second.close()
    model[2].requires_grad_(False)  # type: ignore[operator]
    groups = [{"params": [model[0].weight, model[4].weight]}, {"params": [model[0].bias, model[4].bias]}]  # type: ignore[union-attr]
    third = TwinOptimizer(model, param_groups=groups)
    refused(third, everything, "only in the state: 2.weight, 2.bias; in different groups: 0.bias, 4.bias\\)")
    third.close()


def test_of_many_parameters_three_are_named() -> None:
    model, longer = mlp(), nn.Sequential(*mlp(), *mlp())
    one, two = TwinOptimizer(model), TwinOptimizer(longer)
    refused(one, two.state_dict(), "only in the state: 5.weight, 5.bias, 7.weight and 3 more\\)")
    one.close()
    two.close()


def test_an_engine_goes_on_with_other_parameters_as_its_error_says(tmp_path: Any) -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}}
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[operator]
    engine, *_ = twinflow.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine, *_ = twinflow.initialize(model=mlp(), config=config)
    with pytest.raises(ValueError, match=r"only in the model: 0.weight, 0.bias.*load_optimizer_states=False"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, load_optimizer_states=False)[0] is not None
    engine.destroy()


def test_a_state_of_torchs_goes_on_as_its_error_says() -> None:
    theirs, ours = mlp(), mlp()
    adamw = torch.optim.AdamW(theirs.parameters())
    step(theirs, adamw)
    ours.load_state_dict(theirs.state_dict())
    saved = copy.deepcopy(adamw.state_dict())
    optimizer = TwinOptimizer(ours)
    refused(optimizer, saved, r"TwinOptimizer\(model, rule=optimizer\) continues from this state")
    optimizer.close()
    same = torch.optim.AdamW(ours.parameters())
    same.load_state_dict(saved)
    optimizer = TwinOptimizer(ours, rule=same)
    step(theirs, adamw, 1)
    step(ours, optimizer, 1)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    optimizer.close()
