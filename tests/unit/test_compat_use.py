# SPDX-License-Identifier: Apache-2.0
"""Scripts and calls in DeepSpeed's idiom over twinflow.compat: the losses of the real package, and what calls give."""

from __future__ import annotations

import argparse
import base64
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compat_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch import nn

from twinflow import compat
from twinflow.compat import __main__ as command
from twinflow.engine import Engine
from twinflow.optim.twin import TwinOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")
# What deepspeed 0.19.8 printed for the same scripts on a CPU (benchmarks/compat_deepspeed.py).
TRANSFORMER = [4.311560869216919, 4.3319251537323, 4.315942049026489, 4.290348529815674, 4.24739933013916]
TRANSFORMER += [4.1833226680755615, 4.098732233047485, 4.030601143836975]
CPU_ADAM = [8.08659553527832, 7.657186985015869, 7.210124969482422, 6.734076976776123]
CPU_ADAM_LAST = 0.9862977266311646  # of 60


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in command.alone().items():
        monkeypatch.setenv(name, value)
    compat.install()
    import deepspeed

    yield deepspeed
    compat.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()


# Scripts.


def test_the_transformer_has_deepspeeds_losses() -> None:
    config = str(cases.SCRIPTS / "transformer.json")
    found = cases.printed("transformer.py", "--deepspeed_config", config, "--steps", str(len(TRANSFORMER)))
    assert found["losses"] == pytest.approx(TRANSFORMER, rel=1e-4)
    gc.collect()  # scripts do not end their engines


def test_cpu_adam_alone_has_deepspeeds_losses() -> None:
    losses = cases.printed("cpu_adam.py")["losses"]
    assert losses[: len(CPU_ADAM)] == pytest.approx(CPU_ADAM, rel=1e-4)
    assert losses[-1] == pytest.approx(CPU_ADAM_LAST, rel=1e-4)


# initialize.


def test_a_config_comes_in_all_of_deepspeeds_ways(deepspeed: Any, tmp_path: Path) -> None:
    config = cases.config(0, gradient_accumulation_steps=2)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    args = type("Args", (), {"deepspeed_config": str(file), "local_rank": 0})()
    for given in (
        {"config": config},
        {"config_params": config},
        {"config": str(file)},
        {"config": text},
        {"args": args},
    ):
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=cases.net(), **given)
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        assert (type(optimizer), loader, scheduler) == (TwinOptimizer, None, None)
        assert engine.get_batch_info() == (8, 4, 2)
        engine.destroy()
    with pytest.raises(ValueError, match=r"given by config and args\.deepspeed_config"):
        deepspeed.initialize(args, cases.net(), config=config)
    assert dist.is_initialized()  # scripts ask torch for their rank


@pytest.mark.parametrize("kind", ["DeepSpeedCPUAdam", "FusedAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"])
def test_an_optimizer_by_name_becomes_a_rule(deepspeed: Any, kind: str) -> None:
    """The same weights as with the optimizer's own steps, and a scheduler over it writes what is used."""
    rooms = {"DeepSpeedCPUAdagrad": "adagrad", "DeepSpeedCPULion": "lion"}
    build = getattr(getattr(deepspeed.ops, rooms.get(kind, "adam")), kind)
    config = {key: value for key, value in cases.config(0).items() if key != "optimizer"} | {"gradient_clipping": 0.0}
    model, alone = cases.net(), cases.net()
    groups = lambda net: [{"params": net[0].parameters(), "lr": 1e-2}, {"params": net[2].parameters()}]  # noqa: E731
    optimizer, other = (build(groups(net), lr=5e-3, weight_decay=0.1) for net in (model, alone))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, other)]
    engine, twin, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedulers[0], config=config
    )
    assert (twin.rule_name, scheduler) == (optimizer.rule_name, schedulers[0])
    for seed in range(3):
        cases.step(engine, seed)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        alone(inputs).square().mean().backward()
        other.step()
        other.zero_grad()
        schedulers[1].step()
    assert engine.get_lr() == [group["lr"] for group in other.param_groups] == pytest.approx([1e-2 / 8, 5e-3 / 8])
    for one, same in zip(engine.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-6)
    engine.destroy()


def test_l2_adam_by_name(deepspeed: Any) -> None:
    model = cases.net()
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), adamw_mode=False)
    config = {key: value for key, value in cases.config(0).items() if key != "optimizer"}
    engine, twin, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    assert twin.rule_name == "adam"
    engine.destroy()
    with pytest.raises(ValueError, match="amsgrad"):
        deepspeed.ops.adam.FusedAdam(model.parameters(), amsgrad=True)


def test_fused_lion_is_lion(deepspeed: Any) -> None:
    ours, host = (nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    pair = [
        deepspeed.ops.lion.FusedLion([ours], weight_decay=0.1),
        deepspeed.ops.lion.DeepSpeedCPULion([host], weight_decay=0.1),
    ]
    for step in range(3):
        for param, optimizer in zip((ours, host), pair, strict=True):
            param.grad = torch.sin(torch.arange(9.0) + step)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours, host, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adam.FusedAdam", "lion.FusedLion"])
def test_gradients_may_be_kept_as_zeros(deepspeed: Any, name: str) -> None:
    module, kind = name.split(".")
    param = nn.Parameter(torch.ones(3))
    for is_dropped in (False, True):
        optimizer = getattr(getattr(deepspeed.ops, module), kind)([param], set_grad_none=is_dropped)
        param.grad = torch.ones(3)
        optimizer.zero_grad()
        assert (param.grad is None) == is_dropped
        assert is_dropped or not param.grad.any()


# The engine.


def test_the_caller_may_say_which_micro_batch_is_the_last(deepspeed: Any) -> None:
    """As Accelerate does: steps are taken when it says so, also with fewer micro-batches than the config has."""
    config = cases.config(0, gradient_accumulation_steps=4)
    engine, *_ = deepspeed.initialize(model=cases.net(), config=config)
    same, *_ = deepspeed.initialize(model=cases.net(), config=cases.config(0, gradient_accumulation_steps=2))
    for engine_of, factor in ((engine, 2.0), (same, 1.0)):  # a share of the loss is a quarter, or a half
        for seed in range(2):
            is_last = seed == 1
            engine_of.set_gradient_accumulation_boundary(is_last)
            assert engine_of.is_gradient_accumulation_boundary() is is_last
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            engine_of.backward(engine_of(inputs).square().mean() * factor)
            if is_last:
                engine_of.step()
        assert engine_of.global_steps == 1
    for one, other in zip(engine.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    for one in (engine, same):
        one.destroy()


def test_what_the_engine_answers(deepspeed: Any, tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = cases.config(2, csv_monitor=monitor, gradient_clipping=0.7, steps_per_print=9)
    engine, *_ = deepspeed.initialize(model=cases.net(), config=config)
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (2, True)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False)
    assert (engine.gradient_clipping(), engine.steps_per_print(), engine.optimizer_name()) == (0.7, 9, "adamw")
    assert (engine.cur_scale, engine.get_data_parallel_rank(), engine.get_model_parallel_rank()) == (1.0, 0, 0)
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert engine.monitor.enabled
    engine.monitor.write_events([("own/number", torch.tensor(2.5), 3)])
    saved = {name: value.clone() for name, value in engine.module_state_dict().items()}
    cases.step(engine, 0)
    engine.load_module_state_dict(saved)
    assert all(torch.equal(value, saved[name]) for name, value in engine._zero3_consolidated_16bit_state_dict().items())
    with pytest.raises(AttributeError, match=r"get_type'.*optimizer_name"):
        engine.get_type()
    assert engine.save_fp16_model(tmp_path / "weights")
    engine.destroy()
    (file,) = tmp_path.rglob("*number*")
    assert file.read_text().splitlines()[-1].split(",") == ["3", "2.5"]


def test_the_state_of_a_parameter(deepspeed: Any) -> None:
    """Master, moments and gradient as a plain torch loop has them."""
    from deepspeed import utils

    engine, *_ = deepspeed.initialize(model=cases.net(), config=cases.config(0, gradient_clipping=1e9))
    plain = cases.net()
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    param, same = engine.module[2].weight, plain[2].weight
    assert utils.safe_get_full_optimizer_state(param, "exp_avg") is None
    for seed in range(2):
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(inputs).square().mean())
        adam.zero_grad()
        plain(inputs).square().mean().backward()
        torch.testing.assert_close(utils.safe_get_full_grad(param), same.grad)
        engine.step()
        assert utils.safe_get_full_grad(param) is None
        adam.step()
    torch.testing.assert_close(utils.safe_get_full_fp32_param(param), same.detach())
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(utils.safe_get_full_optimizer_state(param, key), adam.state[same][key])
        utils.safe_set_full_optimizer_state(param, torch.full_like(same, 0.5), key)
        adam.state[same][key].fill_(0.5)
    utils.safe_set_full_fp32_param(param, torch.full_like(same, 0.1))
    same.data.fill_(0.1)
    inputs = torch.ones(4, 6)
    engine.backward(engine(inputs).square().mean())
    engine.step()
    adam.zero_grad()
    plain(inputs).square().mean().backward()
    adam.step()
    torch.testing.assert_close(utils.safe_get_full_fp32_param(param), same.detach())
    with pytest.raises(ValueError, match="optim_state_key is 'momentum'"):
        utils.safe_get_full_optimizer_state(param, "momentum")
    with pytest.raises(ValueError, match="a parameter that initialize"):
        utils.safe_get_full_fp32_param(same)
    engine.destroy()


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_is_written_into_gathered_weights_is_trained_on(deepspeed: Any, is_counted: bool) -> None:
    """`.data` hides a write from autograd, but it must not be lost to the master; nor may one that nobody wrote to."""
    engine, *_ = deepspeed.initialize(model=cases.net(), config=cases.config(2, bf16={"enabled": True}))
    inputs = torch.ones(4, 6, dtype=torch.bfloat16)
    weight, other = engine.module[2].weight, engine.module[0].weight
    read, state = deepspeed.utils.safe_get_full_fp32_param, deepspeed.utils.safe_get_full_optimizer_state
    for written in (0.5, 0.25):
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
        untouched = read(other)
        with deepspeed.zero.GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
            (weight if is_counted else weight.data).fill_(written)
        deepspeed.utils.safe_set_full_optimizer_state(weight, state(weight, "exp_avg"), "exp_avg")
        assert torch.equal(read(weight), torch.full(weight.shape, written))
        assert torch.equal(read(other), untouched)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    assert (read(weight) - 0.25).abs().max() < 0.1
    engine.destroy()


def test_a_frozen_parameter_has_no_state(deepspeed: Any) -> None:
    from deepspeed import utils

    model = cases.net()
    model[0].requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=cases.config(2))
    frozen = engine.module[0].weight
    assert utils.safe_get_full_fp32_param(frozen) is None
    assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert utils.safe_get_full_grad(frozen) is None
    engine.destroy()


def test_weights_out_of_a_checkpoint(deepspeed: Any, tmp_path: Path) -> None:
    from deepspeed.utils import zero_to_fp32

    engine, *_ = deepspeed.initialize(model=cases.net(), config=cases.config(2, bf16={"enabled": True}))
    engine.backward(engine(torch.ones(4, 6, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    masters = [deepspeed.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    engine.save_checkpoint(tmp_path / "saved")
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    assert [value.dtype for value in found.values()] == [torch.float32] * 4
    assert engine.optimizer.cur_scale == 1.0
    assert not deepspeed.runtime.zero.utils.is_zero_param(engine.module[0].weight)
    for value, master in zip(found.values(), masters, strict=True):
        assert torch.equal(value, master)
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(cases.net(), tmp_path / "saved", "global_step1")
    assert torch.equal(loaded[2].weight, found["2.weight"])
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "out", "1MB")
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"save_checkpoint\(\.\.\., exclude_frozen_parameters=True\)"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    engine.destroy()


def test_the_order_of_training_data_is_deepspeeds(deepspeed: Any) -> None:
    """It does not depend on torch's seed: DeepSpeed uses torch's DistributedSampler, whose seed is 0."""
    torch.manual_seed(3)
    data = [torch.full((6,), float(i)) for i in range(8)]
    engine, _, loader, _ = deepspeed.initialize(model=cases.net(), training_data=data, config=cases.config(0))
    order = list(torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0))
    assert [int(row[0]) for batch in loader for row in batch] == order
    engine.destroy()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_schedule_shows_the_rate_of_the_next_step(deepspeed: Any, is_own: bool) -> None:
    """Also if the engine does not yet know whether the last step was applied."""
    model, given = cases.net(), {}
    config = cases.config(0, gradient_clipping=1.0)
    if is_own:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        given = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    else:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    engine, _, _, scheduler = deepspeed.initialize(model=model, config=config, **given)
    for number in range(1, 4):
        cases.step(engine, number)
        before = 0.01 * 0.5**number if is_own else 0.01 * (number - 1) / 4
        assert scheduler.get_last_lr() == pytest.approx([before])
    cases.step(engine, 4)
    assert scheduler.state_dict().get("last_epoch", 4) == 4
    for group in engine.optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.01 * 0.5**4 if is_own else 0.01 * 3 / 4)
    cases.step(engine, 5)
    groups = (optimizer if is_own else engine.optimizer).param_groups
    assert groups[0]["lr"] == pytest.approx(0.01 * 0.5**5 if is_own else 0.01)
    assert type(scheduler).__name__ in ("ExponentialLR", "WarmupLR")
    engine.destroy()


def test_the_optimizer_has_the_loss_scale(deepspeed: Any) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 3}
    engine, optimizer, _, _ = deepspeed.initialize(model=cases.net(), config=cases.config(2, fp16=fp16))
    assert optimizer.cur_scale == engine.cur_scale == 8.0
    engine.destroy()


def test_a_universal_checkpoint_is_a_copy(deepspeed: Any, tmp_path: Path) -> None:
    """The copy is for scripts: each checkpoint of twinflow loads with any number of ranks and any stage."""
    from deepspeed.checkpoint import ds_to_universal

    engine, *_ = deepspeed.initialize(model=cases.net(), config=cases.config(1))
    cases.step(engine, 0)
    engine.save_checkpoint(tmp_path, tag="one")
    folders = {"input_folder": str(tmp_path / "one"), "output_folder": str(tmp_path / "one_universal")}
    ds_to_universal.main(argparse.Namespace(**folders, num_extract_workers=4, inject_missing_state=True))
    other, *_ = deepspeed.initialize(
        model=cases.net(), config=cases.config(2, checkpoint={"load_universal": True}, bf16={"enabled": False})
    )
    assert other.load_checkpoint(tmp_path, tag="one_universal")[0] is not None
    for one, same in zip(engine.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
    with pytest.raises(ValueError, match="input_folder"):
        ds_to_universal.main(argparse.Namespace(input_folder=str(tmp_path / "two"), output_folder=str(tmp_path / "x")))
    with pytest.raises(ValueError, match="output_folder"):
        ds_to_universal.main(argparse.Namespace(**folders))
    for each in (engine, other):
        each.destroy()


# The rest.


def test_a_model_made_in_deepspeeds_contexts(deepspeed: Any) -> None:
    with deepspeed.zero.Init(config_dict_or_path=cases.config(3)):
        model = cases.net()
    with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0), torch.no_grad():
        model[0].weight.fill_(0.5)
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(2, 2)
    assert (layer.weight.dtype, layer.weight.device.type, torch.get_default_dtype()) == (
        torch.bfloat16,
        "meta",
        torch.float32,
    )
    with pytest.raises(ValueError, match="remote_device is 'nvme'"):
        deepspeed.zero.Init(remote_device="nvme")
    with deepspeed.zero.Init(dtype=torch.float16), deepspeed.zero.Init(dtype=torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ValueError, match=r"dtype is torch.int8"):
        deepspeed.zero.Init(dtype=torch.int8)
    engine, *_ = deepspeed.initialize(model=model, config=cases.config(3))
    cases.step(engine, 0)
    with deepspeed.zero.unwrap_model_for_generation(engine) as module:
        assert not torch.equal(module[0].weight, torch.full((10, 6), 0.5))
    engine.destroy()


def test_weights_on_the_host_are_gathered(deepspeed: Any) -> None:
    config = cases.config(3)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(model=nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])), config=config)
    (weight, _) = engine.module.parameters()
    with deepspeed.zero.GatheredParameters(engine.module), torch.no_grad():
        weight.fill_(0.5)
        assert engine.module[0][0](torch.ones(1, 4)).isfinite().all()
    assert torch.equal(weight.detach(), torch.full((4, 4), 0.5))
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), torch.full((4, 4), 0.5))
    engine.destroy()


def test_checkpointing_runs_a_function_again(deepspeed: Any) -> None:
    deepspeed.checkpointing.configure(None, num_checkpoints=2)
    assert deepspeed.checkpointing.is_configured()
    runs = []

    def work(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp()

    x = torch.linspace(0, 1, 5, requires_grad=True)
    deepspeed.checkpointing.checkpoint(work, x).sum().backward()
    assert len(runs) == 2
    torch.testing.assert_close(x.grad, x.sin().exp().detach() * x.cos().detach())
    with pytest.raises(ValueError, match=r"checkpoint_in_cpu .* is True"):
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)


def test_a_config_as_an_object(deepspeed: Any) -> None:
    config = deepspeed.runtime.config.DeepSpeedConfig(cases.config(2, train_batch_size=8))
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 2)
    stages = deepspeed.runtime.zero.config.ZeroStageEnum
    assert (config.zero_optimization_stage, config.zero_enabled) == (stages.gradients, True)
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 1e-2})
    assert (config.gradient_clipping, config.float16_config.enabled, config.scheduler_name) == (1.0, False, None)
    with (
        pytest.warns(UserWarning, match=r"train_batch_sise .* Did you mean 'train_batch_size'"),
        pytest.raises(deepspeed.DeepSpeedConfigError, match="no batch size"),
    ):
        deepspeed.DeepSpeedConfig({"train_batch_sise": 8})


@pytest.mark.parametrize("stage", range(3))
def test_a_schedule_to_look_at(deepspeed: Any, stage: int) -> None:
    """Every micro-batch once forward and once backward; what one stage sends, its neighbour receives."""
    from deepspeed.runtime.pipe import schedule

    def names(stage: int) -> list[str]:
        made = schedule.TrainSchedule(micro_batches=5, stages=3, stage_id=stage)
        return [instruction.name for step in made for instruction in step]

    own = names(stage)
    assert own.count("ForwardPass") == own.count("BackwardPass") == 5
    assert own[-1] == "OptimizerStep"
    if stage < 2:
        assert own.count("SendActivation") == names(stage + 1).count("RecvActivation") == 5
        assert own.count("RecvGrad") == names(stage + 1).count("SendGrad") == 5


def test_estimates_are_twinflows(deepspeed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(1000, additional_buffer_factor=1.0) == (12000, 4000)
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(1000, 2, cpu_offload=False) == (0, 2000 + 1000 + 5000)
    assert stage3.estimate_zero3_model_states_mem_needs(1000, 10, 2, 2, additional_buffer_factor=1.0) == (6000, 40, 40)
    stage3.estimate_zero3_model_states_mem_needs_all_live(cases.net())
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(cases.net())
    assert capsys.readouterr().out.count("offload_optimizer=cpu") == 3


def test_small_things(deepspeed: Any, caplog: pytest.LogCaptureFixture) -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert deepspeed.runtime.utils.partition_balanced([1, 1, 1, 5], 2) == [0, 3, 4]
    assert deepspeed.runtime.utils.partition_uniform(5, 2) == [0, 3, 5]
    with caplog.at_level(logging.INFO, logger="twinflow"):
        deepspeed.log_dist("seen", ranks=[0])
        deepspeed.log_dist("unseen", ranks=[1])
    assert [record.message for record in caplog.records] == ["[rank 0] seen"]
    accelerator = deepspeed.get_accelerator()
    assert accelerator.on_accelerator(torch.ones(1)) is (accelerator.device_name() == "cpu")
    assert accelerator.memory_allocated() <= accelerator.max_memory_allocated() < accelerator.total_memory()
    state = accelerator.get_rng_state()
    accelerator.set_rng_state(state)
    assert accelerator.default_generator(0).initial_seed() == accelerator.initial_seed()
    assert 0 < accelerator.available_memory() <= accelerator.total_memory()
    assert accelerator.FloatTensor([1.0]).dtype == torch.float32
    assert accelerator.use_host_timers() is (accelerator.device_name() == "cpu")
    with pytest.raises(AttributeError, match="no_such_thing"):
        accelerator.no_such_thing()
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (0, 1)
    value = {"a": [torch.ones(4)[:2]]}
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(value)
    assert copied["a"][0].untyped_storage().nbytes() == 8


def test_a_group_of_one_without_a_launcher(deepspeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in command.alone():
        monkeypatch.delenv(name)
    deepspeed.init_distributed()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert "RANK" not in os.environ


def test_tensor_ranks_are_for_initialize_to_make(deepspeed: Any) -> None:
    model = cases.net()
    config = cases.config(0, tensor_parallel={"autotp_size": 2})
    assert deepspeed.tp_model_init(model, 2, torch.float32, config=config) is model
    with pytest.raises(ValueError, match=r"tensor_parallel\.autotp_size is 2"):
        deepspeed.tp_model_init(model, 4, torch.float32, config=config)


def test_the_engine_is_twinflows(deepspeed: Any) -> None:
    assert deepspeed.DeepSpeedEngine is Engine
