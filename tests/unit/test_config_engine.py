# SPDX-License-Identifier: Apache-2.0
"""A config that loads also trains, and one that cannot work is a ValueError naming its key: never something else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_support import mutated, names_one_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from twin_support import quick_torch

import twinflow
from twinflow.build_optimizer import make_zero
from twinflow.config import load_config

# Each of these works alone. `mutated` spoils them; together some do not fit, and then one of them is named.
GOOD: dict[str, tuple[Any, ...]] = {
    "gradient_accumulation_steps": (1, 2, 3),
    "gradient_clipping": (0, 1e-30, 0.5, 1e30),
    "steps_per_print": (1, 2, None),
    "wall_clock_breakdown": (True,),
    "dataloader_drop_last": (True,),
    "fp16": (
        {"enabled": True},
        {"enabled": True, "auto_cast": True, "loss_scale": 3.0},
        {"enabled": True, "initial_scale_power": 127, "hysteresis": 1, "min_loss_scale": 0.5},
        {"enabled": True, "consecutive_hysteresis": True, "loss_scale_window": 1},
    ),
    "bf16": ({"enabled": True}, {"enabled": True, "check_grad_overflow": False}, {"enabled": False}),
    "torch_autocast": ({"enabled": True, "dtype": "bfloat16"}, {"enabled": True, "dtype": "fp16"}),
    "optimizer": (
        {"type": "Adam"},
        {"type": "adam", "params": {"adam_w_mode": False, "eps": 0}},
        {"type": "Adagrad", "params": {"initial_accumulator_value": 0.1, "lr_decay": 0.1}},
        {"type": "Lion", "params": {"lr": 1e-4, "betas": (0.9, 0.99)}},
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        {"type": "SGD", "params": {"maximize": True}},
        {"type": "RMSprop", "params": {"momentum": 0.1}},
        {"type": "NAdam", "params": {"lr": 1e-3}},
        {"type": "Adafactor", "params": {}},
        None,
    ),
    "scheduler": (
        {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 1}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 2}},
        {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 5, "warmup_num_steps": 2}},
        {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
        {"type": "CosineAnnealingLR", "params": {"T_max": 4}},
        {"type": "MultiStepLR", "params": {"milestones": [1, 2]}},
    ),
    "zero_optimization": tuple(
        {"stage": 2, "offload_optimizer": {"device": "cpu", **more}}
        for more in (
            {"states": "bf16"},
            {"states": "int8", "bucket_numel": 128},
            {"delayed_update": True, "delayed_update_start": 1},
            {"hold": "host", "sums": "host", "shadow_bytes": 0},
            {"hold": "device", "sums": "device", "host_threads": 2},
            {"ratio": 0.3, "pin_memory": True},
        )
    ),
    "csv_monitor": ({"enabled": True, "output_path": "metrics"}, {"enabled": True, "output_path": "", "job_name": "j"}),
    "wandb": ({"enabled": False, "project": "p"},),
    "flops_profiler": ({"enabled": True}, {"enabled": True, "output_file": "flops.txt", "module_depth": 1}),
    "checkpoint": ({"keep_last": 1},),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Monitors and profiles write into the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with quick_torch():
        yield


@st.composite
def combined(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """Some sections that work alone, mostly with one mistake in them; and the keys that may be to blame."""
    keys = draw(st.lists(st.sampled_from(sorted(GOOD)), min_size=1, max_size=4, unique=True))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    config |= {key: copy.deepcopy(draw(st.sampled_from(GOOD[key]))) for key in keys}
    touched: list[str] = []
    if draw(st.integers(0, 2)):
        config, touched = draw(mutated(config, most=1))
    return config, [*touched, *keys]


def train(config: Any, steps: int = 2) -> Any:
    """An engine over a tiny model, some steps; a step of very many micro-batches is only begun. The engine, closed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    engine, optimizer, _, _ = twinflow.initialize(model=model, config=config)
    try:
        if optimizer is None:
            return engine
        for _ in range(min(steps * engine.gradient_accumulation_steps(), 16)):
            x = torch.ones(2, 8, dtype=model[0].weight.dtype)
            engine.backward(engine(x).float().mean())
            engine.step()
    finally:
        engine.destroy()
    return engine


def error_of(config: Any) -> str:
    """What is wrong with it; nothing if it trains. Any other exception is the test's failure."""
    try:
        train(config)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("num_examples", [100, pytest.param(300, marks=pytest.mark.matrix)])
def test_a_config_trains_or_names_the_key(num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(combined())
    def check(case: tuple[dict[str, Any], list[str]]) -> None:
        config, touched = case
        text = error_of(config)
        assert not text or names_one_of(text, touched), text

    check()


@pytest.mark.parametrize("key", sorted(GOOD))
def test_what_is_called_good_is(key: str) -> None:
    for value in GOOD[key]:
        engine = train({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, key: value})
        assert value is None or engine.global_steps == 2


def with_optimizer(type: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": type, "params": params}}


def with_schedule(type: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": type, "params": params}}


def with_offload(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"offload_optimizer": {"device": "cpu", **keys}}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rate that is a word": (with_optimizer("RMSprop", lr="x"), "optimizer.params"),
    "rate of null": (with_optimizer("NAdam", lr=None), "optimizer.params"),
    "rate below zero": (with_optimizer("RMSprop", lr=-1.0), "optimizer.params"),
    "one beta": (with_optimizer("Adamax", betas=[0.9]), "optimizer.params"),
    "sparse": (with_optimizer("SparseAdam"), "optimizer"),
    "closure": (with_optimizer("LBFGS"), "optimizer"),
    "differentiable": (with_optimizer("RMSprop", differentiable=True), "optimizer.params"),
    "sum beyond fp32": (with_optimizer("Adagrad", initial_accumulator_value=1e300), "initial_accumulator_value"),
    "a step of none": (with_schedule("StepLR", step_size=0), "scheduler.params"),
    "a period of none": (with_schedule("CosineAnnealingLR", T_max=0), "scheduler.params"),
    "restarts of none": (with_schedule("CosineAnnealingWarmRestarts", T_0=0), "scheduler.params"),
    "factor that is a word": (with_schedule("ExponentialLR", gamma="x"), "scheduler.params"),
    "milestone without a list": (with_schedule("MultiStepLR", milestones=3), "scheduler.params"),
    "function from a file": (with_schedule("LambdaLR", lr_lambda=1), "scheduler.params"),
    "schedules in a schedule": (with_schedule("ChainedScheduler", schedulers=[]), "scheduler.params"),
    "begun before": (with_schedule("StepLR", step_size=1, last_epoch=4), "scheduler.params"),
    "not of JSON": (with_schedule("StepLR", step_size=1, gamma=object()), "scheduler.params.gamma"),
    "not of JSON, inside": (with_optimizer("AdamW", betas=[object(), 0.9]), "optimizer.params.betas"),
    "asks for a loss": (with_schedule("ReduceLROnPlateau"), "scheduler"),
    "momentum above one": (
        with_schedule("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_max_mom=5.0),
        "cycle_max_mom",
    ),
    "too many threads": (with_offload(host_threads=100_000), "host_threads"),
    "csv in a file": ({"csv_monitor": {"enabled": True, "output_path": "/dev/null"}}, "csv_monitor"),
    "csv of no name": ({"csv_monitor": {"enabled": True, "output_path": "\0"}}, "csv_monitor"),
    "csv of a long name": ({"csv_monitor": {"enabled": True, "output_path": "x" * 300}}, "csv_monitor"),
    "profile in no folder": ({"flops_profiler": {"enabled": True, "output_file": "/dev/null/x"}}, "output_file"),
    "profile as a folder": ({"flops_profiler": {"enabled": True, "output_file": "."}}, "output_file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_only_shows_when_it_is_built_names_the_key(case: str) -> None:
    config, words = BAD[case]
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        train({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, **config})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LBFGS", r"^optimizer\.type is 'LBFGS', but must be .* no argument `closure`\. .* Use \"AdamW\"\.$"),
        ("SparseAdam", r"^optimizer\.type is 'SparseAdam', but must be .* dense gradients\. Use \"Adam\"\.$"),
    ],
)
def test_an_optimizer_that_cannot_run_names_another_one(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train({"train_micro_batch_size_per_gpu": 2, **with_optimizer(name)})


def test_wandb_that_is_not_installed_is_named() -> None:
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"wandb\.enabled"):
            train({"train_micro_batch_size_per_gpu": 2, "wandb": {"enabled": True}})


def test_no_optimizer_is_said_when_it_is_needed() -> None:
    engine, *_ = twinflow.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.backward(engine(torch.ones(1, 2)).sum())
    engine.destroy()


@pytest.mark.parametrize("key", ["prescale_gradients", "gradient_predivide_factor"])
def test_what_fully_shard_does_itself_is_refused(key: str) -> None:
    value = {"prescale_gradients": True, "gradient_predivide_factor": 2.0}[key]
    config = load_config({"train_batch_size": 2, "zero_optimization": {"stage": 3}, key: value})
    with pytest.raises(ValueError, match=f"{key}={value} cannot be used with zero_optimization.stage 3"):
        make_zero(config, 2)
