# SPDX-License-Identifier: Apache-2.0
"""twinflow.compat: engines, optimizers and configs of scripts, in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compat_cases as cases
import pytest
import torch
import torch.distributed as dist
from torch import nn

from twinflow import compat
from twinflow.config.schema import keys
from twinflow.engine import Engine
from twinflow.engine.deepspeed_api import ENGINE, PIPELINE, Computed, Key, NoEffect, Own, Refused
from twinflow.engine.pipeline import PipelineEngine


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


@pytest.mark.parametrize("kind", ["AdamW", "FusedAdam", "FusedLamb"])
def test_an_optimizer_that_is_passed_again_keeps_its_state(deepspeed: Any, kind: str) -> None:
    """As in DeepSpeed without ZeRO, where the engine calls the optimizer itself. A new scheduler starts anew."""
    kinds = {
        "AdamW": torch.optim.AdamW,
        "FusedAdam": deepspeed.ops.adam.FusedAdam,
        "FusedLamb": deepspeed.ops.lamb.FusedLamb,
    }
    model = cases.net()
    own = kinds[kind](model.parameters(), lr=1e-2)
    config: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 0}
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-2, "warmup_max_lr": 1e-2}}
    for index, more in enumerate(({}, {"zero_optimization": zero, "scheduler": schedule})):
        for group in own.param_groups:
            group["lr"] = 1e-2 if index == 0 else 1.0  # what the scheduler replaces
        engine, *_ = deepspeed.initialize(model=model, optimizer=own, config={**config, **more})
        assert own.param_groups is engine.optimizer.param_groups
        for seed in (2 * index, 2 * index + 1):
            cases.step(engine, seed)
    assert_same(model, plain(4, kinds[kind]))
    if kind == "FusedAdam":
        engine, *_ = deepspeed.initialize(model=model, optimizer=own, config={**config, "fp16": {"enabled": True}})
        assert engine.loss_scale() == 2**16
    engine.destroy()


def test_calls_of_the_scripts_optimizer_reach_the_engines(deepspeed: Any) -> None:
    """Hooks run, and what cannot be done is refused at once."""
    model, calls = cases.net(), []
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config={"train_batch_size": 4})
    own.register_step_pre_hook(lambda *_: calls.append("before"))
    own.register_step_post_hook(lambda *_: calls.append("after"))
    cases.step(engine, 0)
    assert calls == ["before", "after"]
    with pytest.raises(ValueError, match="takes all its parameters at the start"):
        own.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed or deleted"):
        own.step()


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
    for save in (engine.save_16bit_model, engine.save_checkpoint):
        with pytest.raises(ValueError, match="the engine has frozen all parameters"):
            save("never", exclude_frozen_parameters=True)
    engine.destroy()
    assert torch.equal(model(inputs), changed)
    assert all(param.requires_grad for param in model.parameters())
    trained, *_ = deepspeed.initialize(model=model, config=cases.config(0))
    with pytest.raises(ValueError, match="already has a TwinOptimizer"):
        deepspeed.initialize(model=model, config={"train_batch_size": 4, "zero_optimization": ON_HOST})
    cases.step(trained, 0)  # nothing has changed
    trained.destroy()


def test_a_model_with_weights_on_the_host_gets_another_engine(deepspeed: Any) -> None:
    model, inputs = Net(), torch.ones(4, 6)
    want, config = model(inputs), {"train_batch_size": 4, "zero_optimization": ON_HOST}
    first, *_ = deepspeed.initialize(model=model, config=config)
    second, *_ = deepspeed.initialize(model=model, config=config)
    assert torch.equal(second(inputs), want)
    assert first.host_weights is None
    trained, *_ = deepspeed.initialize(model=model, config=cases.config(0))
    assert all(param.requires_grad for param in model.parameters())
    assert torch.equal(trained(inputs), want)
    cases.step(trained, 0)
    trained.destroy()


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


def without_correction(decoupled: bool, steps: int) -> nn.Module:
    """The model of the cases after steps of Adam without bias correction, in plain torch."""
    model = cases.net()
    states = {param: [torch.zeros_like(param), torch.zeros_like(param)] for param in model.parameters()}
    for seed in range(steps):
        model.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        with torch.no_grad():
            for param, (first, second) in states.items():
                grad = param.grad if decoupled else param.grad + 0.1 * param
                first.lerp_(grad, 0.1)
                second.mul_(0.999).addcmul_(grad, grad, value=0.001)
                param.mul_(1.0 - 1e-2 * 0.1 if decoupled else 1.0)
                param.sub_(1e-2 * first / (second.sqrt() + 1e-8))
    return model


@pytest.mark.parametrize("by", ["config", "FusedAdam", "DeepSpeedCPUAdam"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction(deepspeed: Any, by: str, decoupled: bool) -> None:
    model, options = cases.net(), {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False}
    config, own = cases.config(0, gradient_clipping=0), None
    if by == "config":
        config["optimizer"] = {"type": "Adam", "params": {**options, "adam_w_mode": decoupled}}
    else:
        mode = {"adam_w_mode" if by == "FusedAdam" else "adamw_mode": decoupled}
        own = getattr(deepspeed.ops.adam, by)(model.parameters(), **options, **mode)
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)
    for seed in range(3):
        cases.step(engine, seed)
    assert_same(model, without_correction(decoupled, 3))
    engine.destroy()
    if by == "DeepSpeedCPUAdam":  # alone too
        model = cases.net()
        own = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), adamw_mode=decoupled, **options)
        for seed in range(3):
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            own.step()
            own.zero_grad()
        assert_same(model, without_correction(decoupled, 3))


@pytest.mark.parametrize("rule", ["AdamW", "RMSprop"])
def test_states_leave_the_device_and_come_back(deepspeed: Any, rule: str) -> None:
    """Results do not change, whether a step runs meanwhile or not."""
    config = cases.config(2, zero_optimization={"stage": 2}, optimizer={"type": rule, "params": {"lr": 1e-2}})
    config["gradient_clipping"] = 0
    engine, *_ = deepspeed.initialize(model=cases.net(), config=config)
    kinds = deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum
    for seed in range(4):
        if seed == 1:
            engine.offload_states(include=[kinds.optim_states, kinds.hp_params, kinds.lp_params])
            assert engine.optimizer.host_share == 1.0
        if seed == 3:
            engine.reload_states()
            assert engine.optimizer.host_share == 0.0
        cases.step(engine, seed)
    kind = {"AdamW": torch.optim.AdamW, "RMSprop": torch.optim.RMSprop}[rule]
    assert_same(engine.module, plain(4, kind, weight_decay=0.0))
    engine.reload_states()  # without offload_states() before, it has no effect
    with pytest.raises(ValueError, match="include is 'weights'"):
        engine.offload_states(include=["weights"])
    with pytest.raises(ValueError, match="NVMe"):
        engine.offload_states(device=deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.nvme)
    engine.backward(engine(torch.ones(4, 6)).sum())
    with pytest.raises(RuntimeError, match=r"Call it after step\(\)"):
        engine.offload_states()
    engine.destroy()


def test_state_in_bf16_by_deepspeeds_key(deepspeed: Any) -> None:
    keys = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    for zero in ({"stage": 1}, offload):
        engine, *_ = deepspeed.initialize(model=cases.net(), config=cases.config(1, bf16=keys, zero_optimization=zero))
        assert engine.optimizer.states == "bf16"
        engine.backward(engine(torch.ones(4, 6, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        engine.destroy()


def test_a_group_without_bias_correction(deepspeed: Any) -> None:
    """FusedAdam has this option in its groups, and refuses a step of its own, which torch's Adam would correct."""
    kind, model = deepspeed.ops.adam.FusedAdam, cases.net()
    own = kind([{"params": model[0].parameters(), "bias_correction": False}, {"params": model[2].parameters()}])
    assert [group["bias_correction"] for group in own.param_groups] == [False, True]
    with pytest.raises(ValueError, match="before its first step"):
        own.step()
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=cases.config(0))
    assert [group["bias_correction"] for group in engine.optimizer.param_groups] == [False, True]
    engine.destroy()


def test_coefficients_of_lamb(deepspeed: Any) -> None:
    """The ratio of norms by which each step was scaled. The weights of a first step without decay show it."""
    model = cases.net()
    own = deepspeed.ops.lamb.FusedLamb(model.parameters(), lr=1e-2, bias_correction=False, max_coeff=0.3)
    assert own.get_lamb_coeffs() == []
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(4, 6)).square().mean().backward()
    model[0].bias.grad = None
    own.step()
    found = own.get_lamb_coeffs()
    assert len(found) == len(list(model.parameters())) - 1
    assert any(coeff < 0.3 for coeff in found)
    own_state = [(p, own.state[p]) for p in model.parameters() if p in own.state]
    olds = [old for old, p in zip(before, model.parameters(), strict=True) if p in own.state]
    for coeff, old, (param, state) in zip(found, olds, own_state, strict=True):
        move = state["exp_avg"].double() / (state["exp_avg_sq"].double().sqrt() + 1e-8)
        wanted = min(max(float(old.double().norm() / move.norm()), 0.01), 0.3)
        assert coeff == pytest.approx(wanted, rel=1e-5)
        torch.testing.assert_close(param.detach().double(), old.double() - 1e-2 * wanted * move, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_given", [False, True])
def test_coefficients_of_lamb_in_an_engine(deepspeed: Any, is_given: bool) -> None:
    """They are those of the optimizer without an engine, in the order of the parameters."""
    options = {"lr": 1e-2, "weight_decay": 0.1}
    config = cases.config(0, gradient_clipping=0)
    alone, model = cases.net(), cases.net()
    plain = deepspeed.ops.lamb.FusedLamb(alone.parameters(), **options)
    given = deepspeed.ops.lamb.FusedLamb(model.parameters(), **options) if is_given else None
    del config["optimizer"]
    if not is_given:
        config["optimizer"] = {"type": "Lamb", "params": options}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        alone(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
        assert optimizer.get_lamb_coeffs() == pytest.approx(plain.get_lamb_coeffs(), rel=1e-4)
    assert len(plain.get_lamb_coeffs()) == 4
    engine.destroy()
    with pytest.raises(RuntimeError, match="the engine was destroyed"):
        optimizer.get_lamb_coeffs()


@pytest.mark.parametrize("trains", [False, True])
def test_weights_on_the_host_are_not_converted(deepspeed: Any, trains: bool) -> None:
    config = {**cases.config(3), "zero_optimization": ON_HOST}
    if not trains:
        del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=cases.net(), config=config)
    for name in ("half", "bfloat16", "double"):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) cannot convert the weights"):
            getattr(engine, name)()
    assert engine.float() is engine
    assert engine(torch.ones(4, 6)).dtype == torch.float32
    engine.destroy()


# The methods of DeepSpeed's engines.


@pytest.fixture
def engine(deepspeed: Any) -> Iterator[Any]:
    config = cases.config(2, prescale_gradients=True, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    made, *_ = deepspeed.initialize(model=cases.net(), config=config)
    yield made
    made.destroy()


def test_every_method_is_what_the_table_says(engine: Any) -> None:
    """As many methods as DeepSpeed 0.19.8 has; those that the classes have are `Own`, the others are answered."""
    assert (len(ENGINE), len(PIPELINE)) == (180, 20)
    properties = {"communication_data_type", "is_compiled"}
    for name, method in ENGINE.items():
        assert (hasattr(Engine, name) or name == "is_compiled") == isinstance(method, Own), name
        assert hasattr(engine, name) != isinstance(method, Refused), name
        if isinstance(method, Refused):
            with pytest.raises(AttributeError, match=re.escape(method.remedy)):
                getattr(engine, name)
        elif name in properties:
            assert not callable(getattr(engine, name))
        elif isinstance(method, Key | Computed | NoEffect):
            getattr(engine, name)(*([[1]] if name.endswith("_dataset") else []))
    for name, method in PIPELINE.items():
        assert hasattr(PipelineEngine, name) == isinstance(method, Own), name
    known = {".".join(key.path) for key in keys()}
    sections = {".".join(key.path[:i]) for key in keys() for i in range(len(key.path))}
    for path in (method.path for method in ENGINE.values() if isinstance(method, Key)):
        assert path in known | sections, path


def test_what_getters_return(engine: Any) -> None:
    assert (engine.zero_reduce_bucket_size(), engine.zero_offload_optimizer().device) == (500_000_000, "cpu")
    assert (engine.zero_cpu_offload(), engine.zero_partial_offload(), engine.zero_overlap_comm()) == (True, 1.0, False)
    assert (engine.optimizer_params(), engine.scheduler_name(), engine.scheduler_params()) == ({"lr": 1e-2}, None, None)
    assert (engine.postscale_gradients(), engine.dynamic_loss_scale(), engine.initial_dynamic_scale()) == (
        False,
        True,
        2**16,
    )
    assert (engine.get_data_types(), engine.torch_autocast_dtype()) == ((torch.float32, torch.float32), torch.bfloat16)
    assert (engine.checkpoint_tag_validation_enabled(), engine.checkpoint_tag_validation_fail()) == (True, False)
    assert (engine.zero_prefetch_bucket_size(), engine.dynamic_loss_scale_args()["min_scale"]) == (50_000_000, 1.0)
    assert (engine.is_map_style_dataset([1]), engine.is_iterable_style_dataset([1])) == (True, False)
    assert (engine.curriculum_learning_enabled(), engine.get_sequence_parallel_group()) == (False, None)
    assert (engine.communication_data_type, engine.optimizer_name()) == (torch.float32, "adamw")
    assert engine.to("cpu").float().requires_grad_(True) is engine
    with engine.coalesce_grad_reduction():
        engine.backward(engine(torch.ones(4, 6)).square().mean())
    engine.allreduce_gradients()
    engine.step()
    engine.empty_partition_cache()
    with pytest.raises(AttributeError, match=r"Did you mean 'zero_reduce_scatter'\?"):
        engine.zero_reduce_scater()


def test_what_getters_return_of_other_engines(deepspeed: Any) -> None:
    model = cases.net()
    own = deepspeed.ops.adam.FusedAdam(model.parameters())
    half = cases.config(3, bf16={"enabled": True})
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=half)
    assert engine.client_optimizer is own is engine.basic_optimizer
    assert (engine.optimizer_name(), engine.communication_data_type) == ("FusedAdam", torch.bfloat16)
    assert (engine.zero_overlap_comm(), engine.torch_autocast_dtype()) == (True, None)
    engine.destroy()
    for kind in ("RMSprop", "Lamb"):
        config = cases.config(0, optimizer={"type": kind}, communication_data_type="fp16")
        engine, *_ = deepspeed.initialize(model=model, config=config)
        assert engine.optimizer_name() == {"RMSprop": "RMSprop", "Lamb": "lamb"}[kind]
        assert engine.communication_data_type == torch.float16
        engine.destroy()


def test_weights_in_and_out(engine: Any, tmp_path: Path) -> None:
    """With DeepSpeed's arguments and defaults."""
    engine.module[0].requires_grad_(False)
    found = engine.module_state_dict(prefix="net.", exclude_frozen_parameters=True)
    assert list(found) == ["net.2.weight", "net.2.bias"]
    with pytest.raises(ValueError, match="keep_vars"):
        engine.module_state_dict(keep_vars=True)
    zeros = {name: torch.zeros_like(value) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": zeros}, strict=True)
    engine.save_16bit_model(tmp_path)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert saved.keys() == zeros.keys()
    assert not any(value.any() for value in saved.values())
    with pytest.raises(ValueError, match="data_sampler"):
        engine.deepspeed_io([1], data_sampler=object())


def test_ranks_of_the_last_engine_and_groups_without_experts(deepspeed: Any, engine: Any) -> None:
    from deepspeed.moe import utils
    from deepspeed.utils import groups, instrument_w_nvtx
    from deepspeed.utils.z3_leaf_module import z3_leaf_module

    assert (groups.get_data_parallel_world_size(), groups._get_data_parallel_rank()) == (1, 0)
    assert groups.get_data_parallel_group() is dist.group.WORLD
    assert groups._get_data_parallel_group_ranks() == deepspeed.comm.get_all_ranks_from_group(dist.group.WORLD) == [0]
    assert (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()) == (1, 0)
    assert (groups.get_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()) == (1, 0)
    params = list(engine.parameters())
    made = utils.split_params_into_different_moe_groups_for_optimizer({"params": params, "lr": 1.0})
    assert made == [{"params": params, "lr": 1.0}]
    assert utils.split_params_into_shared_and_expert_params(params) == (params, [])
    params[0].allreduce = False
    assert utils.is_moe_param(params[0])
    with pytest.raises(ValueError, match="finds experts by their class"):
        utils.configure_moe_param_groups(params)
    assert instrument_w_nvtx(lambda x: x + 1)(2) == 3
    assert deepspeed.utils.set_z3_leaf_modules_by_suffix(engine.module, ["2"]) == [engine.module[2]]
    assert not z3_leaf_module(engine.module)


def test_collectives_with_deepspeeds_names(deepspeed: Any) -> None:
    deepspeed.init_distributed()
    found, ones = torch.zeros(2), torch.ones(2)
    deepspeed.comm.inference_all_reduce(ones)
    deepspeed.comm.allgather_fn(found, ones)
    assert torch.equal(found, torch.ones(2))
    assert deepspeed.comm.has_all_gather_into_tensor()
    with pytest.raises(NotImplementedError, match="Use experts of transformers"):
        deepspeed.utils.groups._get_expert_parallel_world_size("ep_size_1")


def test_a_constant_without_a_value_is_not_used_in_silence(deepspeed: Any) -> None:
    from deepspeed.runtime.lr_schedules import WARMUP_LR
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    for use in (
        lambda: {"zero_optimization": {}}.get(ZERO_OPTIMIZATION),
        lambda: WARMUP_LR == "WarmupLR",
        lambda: f"{WARMUP_LR}",
    ):
        with pytest.raises(NotImplementedError, match="internal part of DeepSpeed"):
            use()


class Mpu:
    """What Megatron passes as `mpu`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_model_parallel_world_size(self) -> int:
        return self.size


def test_groups_of_data_parallel_ranks_are_accepted(deepspeed: Any) -> None:
    deepspeed.init_distributed()
    config = cases.config(0)
    engine, *_ = deepspeed.initialize(model=cases.net(), config=config, mpu=Mpu(1), mesh_param=(1, 1))
    engine.destroy()
    deepspeed.zero.Init(data_parallel_group=dist.group.WORLD, mpu=Mpu(1))
    for given, words in (
        ({"mpu": Mpu(2)}, "2 tensor ranks"),
        ({"mesh_param": (1, 2)}, "mesh_param"),
        ({"mpu": 3}, "int"),
    ):
        with pytest.raises(ValueError, match=words):
            deepspeed.initialize(model=cases.net(), config=config, **given)


def lamb_step(weight: torch.Tensor, grad: torch.Tensor, state: list[torch.Tensor], step: int) -> torch.Tensor:
    """One step of LAMB with lr 1e-2 and weight decay 0.1, in float64."""
    state[0] = 0.9 * state[0] + 0.1 * grad
    state[1] = 0.999 * state[1] + 0.001 * grad**2
    move = state[0] / (state[1].sqrt() + 1e-8) + 0.1 * weight
    size = 1e-2 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
    ratio = min(max(float(weight.norm() / move.norm()), 0.01), 10.0) if weight.norm() > 0 else 1.0
    return weight - size * ratio * move


@pytest.mark.parametrize("by", ["config", "FusedLamb"])
@pytest.mark.parametrize("offload", [True, False])
def test_lamb(deepspeed: Any, by: str, offload: bool) -> None:
    model, same = cases.net(), cases.net().double()
    options = {"lr": 1e-2, "weight_decay": 0.1}
    config = cases.config(2, gradient_clipping=0, optimizer={"type": "Lamb", "params": options})
    if not offload:
        config["zero_optimization"] = {"stage": 0}
    own = deepspeed.ops.lamb.FusedLamb(model.parameters(), **options) if by == "FusedLamb" else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)
    states = {param: [torch.zeros_like(param), torch.zeros_like(param)] for param in same.parameters()}
    for seed in range(3):
        cases.step(engine, seed)
        same.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).double()
        same(inputs).square().mean().backward()
        for param, state in states.items():
            param.data = lamb_step(param.data, param.grad, state, seed + 1)
    assert_same(model, same.float())
    engine.destroy()
