# SPDX-License-Identifier: Apache-2.0
"""What a TwinOptimizer, an engine and the integrations are given by mistake: each is refused by name, at once."""

from __future__ import annotations

import importlib
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from integrations_support import llama, samples
from torch import Tensor, nn

import twinflow
from twinflow.optim.loss_scale import static
from twinflow.optim.twin import Tuning, TwinOptimizer

NONE_TO_TRAIN = "There is no parameter to train: none requires a gradient"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 8)).square().mean()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("loss_scale", 1024.0, r"None, static\(...\) or dynamic\(...\).*static\(1024\)"),
        ("tuning", {"hold": "host"}, "None, or a twinflow.optim.twin.Tuning"),
        ("zero", 2, "None, or a twinflow.zero.Zero"),
        ("max_grad_norm", "1", "a number > 0, or None"),
        ("max_grad_norm", True, "a number > 0, or None"),
        ("accumulation_steps", "2", "a whole number >= 1"),
        ("accumulation_steps", 1.5, "a whole number >= 1"),
        ("accumulation_steps", True, "a whole number >= 1"),
        ("early", "no", "one of True, False"),
        ("skip_nonfinite", "x", "one of True, False"),
        ("delayed_update", 1, "one of True, False"),
        ("offload_params", "no", "one of True, False"),
        ("delayed_update_start", -1, "a whole number >= 0"),
        ("delayed_update_start", "x", "a whole number >= 0"),
        ("host_threads", 0, "a whole number from 1 to 1024"),
        ("lr", "1e-3", "a number"),
        ("lr", True, "a number"),
        ("lr", float("nan"), "a finite number >= 0"),
        ("maximize", "no", "one of True, False"),
    ],
)
def test_an_argument_is_refused_by_name(name: str, value: Any, allowed: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=rf"^{name} is .*, but must be {allowed}"):
        TwinOptimizer(model, **{name: value})
    TwinOptimizer(model).close()  # nothing is left on the model


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bucket_numel", "128"),
        ("bucket_numel", 200),
        ("num_slots", 1.0),
        ("num_slots", None),
        ("flat_bytes", -1),
        ("hold", "gpu"),
        ("shadow_bytes", "1"),
    ],
)
def test_a_field_of_tuning_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^tuning.{field} is .*, but must be "):
        TwinOptimizer(mlp(), tuning=Tuning(**{field: value}))


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    runs = []
    for number, whole in ((float, int), (np.float32, np.int64), (torch.tensor, torch.tensor)):
        model = mlp()
        given: dict[str, Any] = {"lr": number(0.125), "max_grad_norm": number(0.25), "accumulation_steps": whole(1)}
        with closing(TwinOptimizer(model, early=True, **given)) as optimizer:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            runs.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
            assert type(optimizer.max_grad_norm) is float
            assert type(optimizer.accumulation_steps) is int
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -3.0}, "lr is -3.0, but must be a finite number >= 0"),
        ({"lr": "1e-3"}, "lr is '1e-3', but must be a number"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\] is 1.5, but must be a number in \[0, 1\)"),
        ({"betas": (True, 0.9)}, r"betas\[0\] is True, but must be a number"),
    ],
)
def test_options_of_groups_are_checked_at_the_start(options: dict[str, Any], message: str) -> None:
    model = mlp()
    first, *others = model.parameters()
    with pytest.raises(ValueError, match=rf"^param_groups\[1\]: {message}"):
        TwinOptimizer(model, param_groups=[{"params": others}, {"params": [first], **options}])
    TwinOptimizer(model).close()


@pytest.mark.parametrize("rule", ["adamw", torch.optim.NAdam])
@pytest.mark.parametrize("what", ["model", "groups", "parameters", "groups alone"])
def test_a_model_without_a_parameter_to_train(what: str, rule: Any) -> None:
    model = mlp().requires_grad_(False)
    groups = [{"params": list(model.parameters())}]
    given: dict[str, tuple[Any, Any]] = {
        "model": (model, None),
        "groups": (model, groups),
        "parameters": (model.parameters(), None),
        "groups alone": (groups, None),
    }
    with pytest.raises(ValueError, match=NONE_TO_TRAIN):
        TwinOptimizer(given[what][0], rule, param_groups=given[what][1])


@pytest.mark.parametrize(
    ("given", "groups", "words"),
    [
        ([], None, r"iterable of parameters is empty\. Pass the model"),
        ("gpt2", None, "is 'gpt2', but must be a module"),
        (None, None, "is None, but must be a module"),
        (mlp(), [{"lr": 1e-3}], "must have the key 'params'"),
        (mlp(), [{"params": list(mlp().parameters())}], "none of them is a parameter of the model"),
    ],
)
def test_what_is_no_model_is_named(given: Any, groups: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TwinOptimizer(given, param_groups=groups)


def test_groups_may_have_names_and_parameters_of_a_loss() -> None:
    model, loss = mlp(), nn.Linear(2, 2)
    for groups in (
        list(model.named_parameters()),
        [{"params": list(model.named_parameters())}],
        [{"params": model.parameters()}, {"params": loss.parameters()}],
    ):
        optimizer = TwinOptimizer(model, param_groups=groups)
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        optimizer.close()


@pytest.mark.parametrize(("options", "name"), [({"rule": "AdmW"}, "adamw"), ({"states": "int-8"}, "int8")])
def test_the_nearest_name_is_suggested(options: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=rf"Did you mean '{name}'\?"):
        TwinOptimizer(mlp(), **options)


def test_an_engine_without_a_parameter_to_train() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    with pytest.raises(ValueError, match=NONE_TO_TRAIN):
        twinflow.initialize(model=mlp().requires_grad_(False), config=config)


def test_frozen_ones_among_parameters_are_left_out() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    names, params = zip(*model.named_parameters(), strict=True)
    frozen = model[0].weight.detach().clone()  # type: ignore[operator]
    for given in (params, [{"params": params, "param_names": names}], list(zip(names, params, strict=True))):
        with closing(TwinOptimizer(given)) as optimizer:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            found = list(optimizer.state_dict()["state"])
            assert found == [f"params[0][{i}]" for i in range(3)] or found == [n for n in names if n != "0.weight"]
    assert torch.equal(model[0].weight, frozen)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["adamw", torch.optim.NAdam])
def test_parameters_without_memory_and_without_their_model(rule: Any) -> None:
    params = nn.Linear(2, 2, device="meta").parameters()
    with pytest.raises(
        ValueError, match=r"device of params\[0\]\[0\] is 'meta'.*Pass the module as the first argument"
    ):
        TwinOptimizer(params, rule)


@pytest.mark.parametrize("loss", [1.0, None])
def test_the_loss_of_an_engine_is_a_tensor(loss: Any) -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = twinflow.initialize(model=mlp(), config=config)
    with pytest.raises(ValueError, match=rf"^loss is {loss}, but must be a tensor"):
        engine.backward(loss)
    engine.backward(loss_of(engine))  # and nothing was begun
    engine.step()
    engine.destroy()


# Integrations.


@pytest.fixture(scope="module")
def huggingface() -> Any:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    return importlib.import_module("twinflow.integrations.huggingface")


def arguments(folder: Any, **options: Any) -> Any:
    kind = importlib.import_module("transformers").TrainingArguments
    return kind(str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", **options)


@pytest.mark.parametrize("options", [{"lr": 3.0}, {"param_groups": []}, {"stats": "bf16"}, {"loss_scale": static(8.0)}])
def test_what_is_no_option_beside_a_trainers_arguments(huggingface: Any, options: Any, tmp_path: Any) -> None:
    (name,) = options
    with pytest.raises(
        ValueError, match=rf"option in twin is '{name}', but must be one of 'states', 'master', 'ratio'"
    ):
        huggingface.TwinTrainer(llama(), arguments(tmp_path), train_dataset=samples(2), twin=options)


def test_fp16_of_a_trainer_is_refused_without_a_gpu_too(huggingface: Any, tmp_path: Any) -> None:
    state = importlib.import_module("accelerate").state.AcceleratorState
    try:
        with pytest.raises(ValueError, match="mixed_precision is 'fp16', but must be one of 'no', 'bf16'"):
            huggingface.TwinTrainer(llama(), arguments(tmp_path, fp16=True), train_dataset=samples(2))
    finally:
        state._reset_state(reset_partial_state=True)  # it is the process's, and would stay


def test_options_beside_an_optimizer_that_has_its_own(huggingface: Any) -> None:
    model = mlp()
    taken = importlib.import_module("twinflow.integrations.given").take_over
    with pytest.raises(
        ValueError, match=r"option is 'lr', but must be one of .*Pass options of the update, such as lr, to AdamW"
    ):
        taken(torch.optim.AdamW(model.parameters()), model, lr=3.0)
