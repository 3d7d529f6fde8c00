# SPDX-License-Identifier: Apache-2.0
"""The engine against a plain loop: the same bits, DeepSpeed's calls and counters, and nothing left behind."""

from __future__ import annotations

import csv
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from twin_support import CONFIG, batch, gpt, quick_torch
from twin_support import run_engine as run

import twinflow
from twinflow.engine import Engine, ResumableLoader
from twinflow.models.gpt import GPT
from twinflow.optim.twin import TwinOptimizer

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


def config(**changes: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "zero_optimization": OFFLOAD}
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


@pytest.fixture
def make() -> Iterator[Any]:
    """Engines that are destroyed in the end."""
    made: list[Engine] = []

    def build(model: Any = None, given: Any = None, lr_scheduler: Any = None, **changes: Any) -> Engine:
        model = gpt() if model is None else model
        options = {"optimizer": given, "lr_scheduler": lr_scheduler}
        engine, *_ = twinflow.initialize(model=model, config=config(**changes), **options)
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.destroy()


def weights(engine: Engine) -> list[torch.Tensor]:
    assert engine.optimizer is not None
    engine.optimizer.wait()
    return [p.detach().clone() for p in engine.module.parameters()]


def same(a: Engine, b: Engine) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


@pytest.mark.parametrize("parts", [1, 3])
def test_it_is_a_plain_loop_with_the_optimizer(make: Any, parts: int) -> None:
    engine = make(gradient_accumulation_steps=parts, gradient_clipping=0.5)
    losses = run(engine, range(6))
    model = gpt()
    options = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "skip_nonfinite": True}
    optimizer = TwinOptimizer(model, early=True, accumulation_steps=parts, **options)
    plain = []
    for step in range(6):
        loss = model(*batch(step)).loss
        (loss / parts if parts > 1 else loss).backward()
        if (step + 1) % parts == 0:
            optimizer.step()
            optimizer.zero_grad()
        plain.append(loss.item())
    optimizer.wait()
    assert losses == plain
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), model.parameters(), strict=True))
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (6 // parts, 6, 12)
    assert engine.get_global_grad_norm() == optimizer.grad_norm
    assert engine.was_step_applied()
    assert engine.get_batch_info() == (2 * parts, 2, parts)
    optimizer.close()


def test_boundaries_are_counted_as_deepspeed_counts_them(make: Any) -> None:
    engine = make(gradient_accumulation_steps=2)
    seen = []
    for step in range(4):
        engine.backward(engine(*batch(step)).loss)
        seen.append((engine.is_gradient_accumulation_boundary(), engine.global_steps))
        engine.step()
        seen.append((engine.was_step_applied(), engine.global_steps))
    assert seen == [(False, 0), (False, 0), (True, 0), (True, 1), (False, 1), (False, 1), (True, 1), (True, 2)]


@pytest.mark.parametrize("early", ["auto", True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_step_without_gradients_changes_nothing(make: Any, parts: int, early: bool | str) -> None:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu", "early": early}}
    changes = {"gradient_accumulation_steps": parts, "gradient_clipping": 0.5, "zero_optimization": offload}
    one, two = (make(lr_scheduler=lambda optimizer: StepLR(optimizer, 1, 0.5), **changes) for _ in range(2))
    for step in range(4 * parts):
        if step % parts == 0:
            before = [value.clone() for value in weights(two)]
            seen = (two.global_steps, two.micro_steps, two.global_samples, two.skipped_steps, two.get_lr())
            two.step()
            two.step()
            assert not two.was_step_applied()
            assert (two.global_steps, two.micro_steps, two.global_samples, two.skipped_steps, two.get_lr()) == seen
            assert all(torch.equal(a, b) for a, b in zip(weights(two), before, strict=True))
        assert run(one, [step]) == run(two, [step])
    assert same(one, two)
    assert (two.global_steps, two.micro_steps, two.global_samples) == (4, 4 * parts, 8 * parts)
    assert two.get_lr() == one.get_lr() == [1e-2 * 0.5**4]


def test_a_gradient_that_the_user_has_set_makes_a_step(make: Any) -> None:
    engine = make(gradient_accumulation_steps=2)
    for param in engine.module.parameters():
        param.grad = torch.ones_like(param)
    before = weights(engine)
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (0, 1)
    engine.step()
    assert engine.was_step_applied()
    assert (engine.global_steps, engine.micro_steps) == (1, 2)
    assert not any(torch.equal(a, b) for a, b in zip(weights(engine), before, strict=True))


def test_the_returned_loss_is_the_share_of_the_step(make: Any) -> None:
    engine = make(gradient_accumulation_steps=4)
    loss = engine(*batch(0)).loss
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 4)
    engine.step()
    loss = engine(*batch(1)).loss
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()


def test_a_loss_scaled_by_hand_is_the_same(make: Any) -> None:
    one, two = make(gradient_accumulation_steps=2), make(gradient_accumulation_steps=2)
    run(one, range(4))
    for step in range(4):
        two.scale(two(*batch(step)).loss).backward()
        two.step()
    assert same(one, two)


@pytest.mark.parametrize("kind", ["instance", "callable", "torch name", "twin"])
def test_optimizers_from_everywhere(kind: str) -> None:
    model = gpt()
    options = {"lr": 1e-2, "momentum": 0.9}
    given: Any = {
        "instance": lambda: torch.optim.SGD(model.parameters(), **options),
        "callable": lambda: lambda params: torch.optim.SGD(params, **options),
        "torch name": lambda: None,
        "twin": lambda: TwinOptimizer(model, "sgd", early=True, max_grad_norm=1.0, skip_nonfinite=True, **options),
    }[kind]()
    section = {"type": "SGD", "params": options} if kind == "torch name" else None
    engine, *_ = twinflow.initialize(model=model, optimizer=given, config=config(optimizer=section))
    losses = run(engine, range(5))
    truth, losses_truth = gpt(), []
    sgd = torch.optim.SGD(truth.parameters(), **options)
    for step in range(5):
        loss = truth(*batch(step)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(truth.parameters(), 1.0)
        sgd.step()
        sgd.zero_grad()
        losses_truth.append(loss.item())
    assert losses == pytest.approx(losses_truth, abs=1e-5)
    engine.destroy()


def test_a_schedule_over_the_users_own_optimizer_reaches_ours(make: Any) -> None:
    model = gpt()
    sgd = torch.optim.SGD(model.parameters(), lr=0.4)
    engine = make(model=model, given=sgd, lr_scheduler=StepLR(sgd, 1, 0.5), optimizer=None)
    run(engine, range(2))
    assert engine.get_lr() == pytest.approx([0.1])
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_schedules_from_config_and_callable(make: Any) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1, "warmup_type": "linear"}}
    one = make(scheduler=schedule)
    run(one, range(3))
    assert 0.0 < one.get_lr()[0] < 0.1
    two = make(lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    run(two, range(3))
    assert two.get_lr() == pytest.approx([1e-2 / 4])


def test_a_skipped_step_moves_no_schedule_and_no_weight(make: Any) -> None:
    engine = make(lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)))
    run(engine, range(1))
    before, lr = weights(engine), engine.get_lr()
    loss = engine(*batch(1)).loss * float("nan")
    engine.backward(loss)
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps, engine.get_lr()) == (2, 1, lr)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    run(engine, range(2, 3))
    assert engine.was_step_applied()
    assert engine.get_lr()[0] < lr[0]
    engine.destroy()
    assert engine.skipped_steps == 1  # a report at the end of a script may come after destroy()


def test_fp16_finds_its_loss_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fp16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1, "auto_cast": True}
    engine, *_ = twinflow.initialize(model=model, config=config(fp16=fp16))
    scales, skips = [], []
    for _ in range(8):
        engine.backward(engine(torch.ones(4, 8) * 8).float().mean())
        engine.step()
        scales.append(engine.loss_scale())
        skips.append(engine.skipped_steps)
    assert next(model.parameters()).dtype == torch.float16
    assert scales[0] < 2**20
    assert skips[0] == 1
    assert skips[-1] < 8
    engine.destroy()


def test_the_batch_can_grow_between_steps(make: Any) -> None:
    engine = make()
    run(engine, range(2))
    engine.set_train_batch_size(6)
    assert engine.gradient_accumulation_steps() == 3
    run(engine, range(2, 5))
    assert engine.global_steps == 3
    with pytest.raises(ValueError, match="train_batch_size is 5"):
        engine.set_train_batch_size(5)
    engine.backward(engine(*batch(0)).loss)
    engine.step()
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        engine.set_train_batch_size(2)


def test_repr_shows_batch_stage_and_optimizer(make: Any) -> None:
    engine = make()
    lines = [line.strip() for line in repr(engine).splitlines()]
    assert lines[0] == "Engine("
    assert lines[1].startswith("module: GPT on cpu, ")
    assert "rank: 0 of 1" in lines
    assert f"zero_optimization.stage: {engine.zero_optimization_stage()}" in lines
    assert any(line.startswith(f"batch: {engine.train_batch_size()} samples ") for line in lines)
    assert "optimizer: TwinOptimizer(" in lines
    for start in ("rule: ", "states: ", "ratio: ", "placement: ", "memory of the state: "):
        assert any(line.startswith(start) for line in lines), start
    assert lines[-1] == ")"


def test_unknown_attributes_are_the_modules(make: Any) -> None:
    engine = make()
    assert engine.config["train_micro_batch_size_per_gpu"] == 2
    assert engine.token_embedding is engine.module.token_embedding
    assert len(list(engine.parameters())) == len(list(engine.module.parameters()))
    with pytest.raises(AttributeError, match="Neither the engine nor its module has an attribute 'nothing'"):
        _ = engine.nothing
    assert not engine.eval().module.training
    assert engine.train().module.training


def test_it_trains_a_model_that_is_built_where_it_runs(make: Any) -> None:
    engine = make(model=lambda: GPT(CONFIG))
    losses = run(engine, range(3))
    assert all(4.0 < loss < 4.5 for loss in losses)


def test_an_engine_without_an_optimizer_only_evaluates(make: Any) -> None:
    engine, optimizer, *_ = twinflow.initialize(model=gpt(), config={"train_batch_size": 2})
    assert optimizer is None
    loss = engine(*batch(0)).loss
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.backward(loss)


def test_blocks_can_be_compiled(make: Any) -> None:
    one, two = make(), make()
    two.compile(backend="eager")
    assert run(one, range(3)) == run(two, range(3))
    assert same(one, two)


def test_the_log_and_the_csv_files(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    with caplog.at_level(logging.INFO, logger="twinflow"):
        logging.getLogger("twinflow").propagate = True
        engine = make(steps_per_print=2, csv_monitor=monitor, wall_clock_breakdown=True)
        run(engine, range(4))
        engine.destroy()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 2", "step 4"]
    assert any("forward" in record.getMessage() for record in caplog.records)
    found = {path.name: list(csv.reader(path.open())) for path in (tmp_path / "job").glob("*.csv")}
    assert set(found) == {f"Train_Samples_{tag}.csv" for tag in ("train_loss", "lr", "loss_scale")}  # as in DeepSpeed
    for rows in found.values():
        assert [int(row[0]) for row in rows[1:]] == [2, 4, 6, 8]


def test_the_profile_of_a_step(make: Any, tmp_path: Path) -> None:
    options = {"enabled": True, "profile_step": 2, "output_file": str(tmp_path / "profile.txt")}
    one, two = make(flops_profiler=options), make()
    assert run(one, range(3)) == run(two, range(3))
    text = (tmp_path / "profile.txt").read_text()
    assert "blocks" in text
    assert "GPT" in text


def test_the_loader_goes_through_all_data_and_knows_where_it_is() -> None:
    data = list(range(10))
    loader = ResumableLoader(data, 3, seed=1)  # type: ignore[arg-type]
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert len(loader) == 4
    assert all(sorted(i for batch in epoch for i in batch) == data for epoch in epochs)
    assert epochs[0] != epochs[1]
    first = ResumableLoader(data, 3, seed=1)  # type: ignore[arg-type]
    iterator = iter(first)
    taken = [next(iterator).tolist() for _ in range(2)]
    second = ResumableLoader(data, 3, seed=7)  # type: ignore[arg-type]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert taken + [batch.tolist() for batch in second] == epochs[0]
    assert [batch.tolist() for batch in second] == epochs[1]


def test_training_data_comes_back_as_a_loader(make: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0)[:, None].repeat(1, 8))
    model = nn.Sequential(nn.Linear(8, 1))
    engine, _, loader, _ = twinflow.initialize(model=model, training_data=data, config=config())
    assert loader is engine.training_dataloader
    for (x,) in loader:
        assert x.shape == (2, 8)
        engine.backward(engine(x).mean())
        engine.step()
    assert engine.global_steps == 4
    engine.destroy()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": None}, ["config"]),
        ({"config": {}, "config_params": {}}, ["config", "config_params"]),
        ({"config": config(train_batch_size=5)}, ["5", "2"]),
        ({"model": None, "config": config()}, ["model"]),
        ({"mpu": object(), "config": config()}, ["mpu"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        twinflow.initialize(**{"model": gpt(), **changes})
    for word in words:
        assert word in str(caught.value)


def test_frozen_parameters_among_those_that_are_given(make: Any) -> None:
    model = gpt()
    model.blocks[0].requires_grad_(False)
    before = [p.detach().clone() for p in model.blocks[0].parameters()]
    groups = [{"params": list(model.blocks[0].parameters())}, {"params": list(model.blocks[1].parameters())}]
    engine, *_ = twinflow.initialize(model=model, model_parameters=groups, config=config())
    run(engine, range(2))
    assert len(engine.optimizer.param_groups) == 1  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(before, model.blocks[0].parameters(), strict=True))
    engine.destroy()
    engine, *_ = twinflow.initialize(model=model, model_parameters=model.parameters(), config=config())
    run(engine, range(2))
    engine.destroy()


def test_an_engine_that_could_not_be_built_leaves_the_model_alone() -> None:
    model = gpt()

    def broken(optimizer: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        twinflow.initialize(model=model, lr_scheduler=broken, config=config())
    engine, *_ = twinflow.initialize(model=model, config=config())
    run(engine, range(1))
    engine.destroy()


def test_destroy_ends_the_threads_whatever_happens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1))
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1, "auto_cast": True}
    engine, *_ = twinflow.initialize(model=model, config=config(fp16=fp16))
    engine.backward(engine(torch.ones(4, 8)).float().mean() * float("inf"))
    engine.step()
    with pytest.raises(FloatingPointError, match="smallest loss scale"):
        engine.destroy()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("twinflow-")]


def test_a_forgotten_engine_ends_by_itself() -> None:
    engine = twinflow.initialize(model=gpt(), config=config())[0]
    run(engine, range(2))
    assert [thread for thread in threading.enumerate() if thread.name.startswith("twinflow-")]
    del engine
    gc.collect()
    deadline = time.monotonic() + 10
    while [thread for thread in threading.enumerate() if thread.name.startswith("twinflow-")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("given", [None, 0.0, 2.0])
def test_clipping_that_the_config_does_not_name_is_said(given: float | None, caplog: pytest.LogCaptureFixture) -> None:
    asked = {key: value for key, value in config().items() if key != "gradient_clipping"}
    if given is not None:
        asked["gradient_clipping"] = given
    with caplog.at_level(logging.INFO, logger="twinflow"):
        logging.getLogger("twinflow").propagate = True
        engine = twinflow.initialize(model=gpt(), config=asked)[0]
    lines = [record.getMessage() for record in caplog.records if "gradient_clipping" in record.getMessage()]
    assert engine.gradient_clipping() == (1.0 if given is None else given)
    assert len(lines) == (given is None)
    assert all("not given, so gradients are clipped to the norm 1.0, as in current versions" in line for line in lines)
    engine.destroy()


def test_what_is_given_wins_over_the_config_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with caplog.at_level(logging.INFO, logger="twinflow"):
        logging.getLogger("twinflow").propagate = True
        engine, *_ = twinflow.initialize(model=model, optimizer=sgd, config=config())
    assert engine.get_lr() == [0.5]
    assert any("optimizer: no effect here" in record.getMessage() for record in caplog.records)
    engine.destroy()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping"),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "states": "bf16"}}}, "states"),
    ],
)
def test_a_given_twin_optimizer_and_a_config_that_disagree(changes: dict[str, Any], word: str) -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = TwinOptimizer(model, lr=1e-2, early=True, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=word):
        twinflow.initialize(model=model, optimizer=optimizer, config=config(optimizer=None, **changes))
    optimizer.close()


@pytest.mark.parametrize("sums", ["host", pytest.param("device", marks=pytest.mark.matrix)])
def test_another_number_of_micro_batches_with_gradients_held_on_the_host(make: Any, sums: str) -> None:
    zero = {"offload_optimizer": {"device": "cpu", "hold": "host", "sums": sums, "bucket_numel": 128}}
    one, two = make(zero_optimization=zero, gradient_accumulation_steps=2), make()
    run(one, range(4))
    one.set_train_batch_size(2)
    losses = run(one, range(4, 8))
    two.set_train_batch_size(4)
    run(two, range(4))
    two.set_train_batch_size(2)
    assert losses == run(two, range(4, 8))
    assert same(one, two)


def test_the_monitor_writes_the_rate_of_the_step(make: Any, tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    schedule = {"lr_scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step))}
    engine = make(csv_monitor=monitor, **schedule)
    run(engine, range(3))
    engine.destroy()
    rows = next(list(csv.reader(path.open())) for path in (tmp_path / "job").glob("*lr.csv"))
    assert [float(row[1]) for row in rows[1:]] == pytest.approx([1e-2, 1e-2 / 2, 1e-2 / 3])


def test_time_that_forwards_wait_for_weights_is_measured(make: Any) -> None:
    engine = make(gradient_clipping=0.0)
    engine.optimizer.runtime.device.delay("out", 0.02)
    run(engine, range(3))
    metrics = engine.optimizer.metrics()
    assert metrics["waited_s"] > 0.0


def test_after_destroy_nothing_is_saved_or_trained(tmp_path: Path) -> None:
    """A checkpoint without optimizer state would be loaded later without an error."""
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    engine, *_ = twinflow.initialize(model=torch.nn.Linear(4, 4), config=config)
    engine.destroy()
    calls: list[Callable[[], object]] = [
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
        lambda: engine.backward(torch.zeros(1, requires_grad=True).sum()),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"because destroy\(\) was called\. Do this before destroy"):
            call()
    assert not list(tmp_path.iterdir())


def test_what_is_no_scheduler_is_named() -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    with pytest.raises(ValueError, match=r"lr_scheduler is 'cosine', but must be a scheduler"):
        twinflow.initialize(model=torch.nn.Linear(4, 4), config=config, lr_scheduler="cosine")
