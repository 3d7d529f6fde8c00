# SPDX-License-Identifier: Apache-2.0
"""What ranks and forked processes run for the tests of twinflow.compat."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twinflow import compat
from twinflow.compat.__main__ import main

SCRIPTS = Path(__file__).parents[1] / "examples" / "compat"


def printed(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a script prints as its last line, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([str(SCRIPTS / script), *arguments])
    lines = [line for line in out.getvalue().splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def alexnet(rank: int, world: int, steps: int) -> dict[str, Any]:
    return printed("alexnet_pipeline.py", "-p", str(world), "-s", str(steps))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {"train_micro_batch_size_per_gpu": 4, "optimizer": optimizer, "zero_optimization": zero, **more}


def step(engine: Any, seed: int) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(inputs).square().mean())
    engine.step()


def whole_states(rank: int, world: int, stage: int) -> list[list[float]]:
    """What the safe_ functions say of the last weight after two steps, and after other values were set."""
    compat.install()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

    engine, *_ = deepspeed.initialize(model=net(), config=config(stage))
    for seed in range(2):
        step(engine, seed)  # the same on all ranks: the mean is what one rank has alone
    weight = list(engine.module.parameters())[2]
    found = [safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")]
    safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
    found.append(safe_get_full_fp32_param(weight))
    step(engine, 2)
    found.append(safe_get_full_fp32_param(weight))
    engine.destroy()
    return [value.flatten().tolist() for value in found if value is not None]


def gathered(rank: int, world: int) -> list[list[float]]:
    """What the second rank writes in a GatheredParameters: to a parameter, and to one whose state ranks share, before
    and after a step."""
    compat.install()
    import deepspeed

    param = nn.Parameter(torch.zeros(3))
    engine, *_ = deepspeed.initialize(model=net(), config=config(2))
    step(engine, 0)
    weight = engine.module[2].weight
    with torch.no_grad(), deepspeed.zero.GatheredParameters([param, weight], modifier_rank=1):
        if deepspeed.comm.get_rank() == 1:
            param.fill_(7.0)
            weight.fill_(7.0)
    found = [param.tolist(), weight.flatten().tolist()]
    step(engine, 1)
    found.append(deepspeed.utils.safe_get_full_fp32_param(weight).flatten().tolist())
    engine.destroy()
    return found


def hf_trainer(options: dict[str, Any], folder: str, resume: str | None = None) -> dict[str, Any]:
    """Losses, norms and the loss of an evaluation of Hugging Face's Trainer with a DeepSpeed config."""
    import sys

    sys.path.insert(0, str(SCRIPTS))
    from hf_causal_lm import Characters
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    common = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "max_grad_norm": 1.0, "warmup_steps": 2}
    quiet = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    args = TrainingArguments(output_dir=folder, seed=0, **common, **quiet, **options)
    torch.manual_seed(0)
    data = Characters()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(data.known), max_position_embeddings=64, **sizes))
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    log = trainer.state.log_history
    found = {key: [entry[key] for entry in log if key in entry] for key in ("loss", "grad_norm", "learning_rate")}
    return {**found, "eval": trainer.evaluate()["eval_loss"]}


def hf(folder: str) -> dict[str, Any]:
    """The Trainer with torch's AdamW and no DeepSpeed; the example; then a config that leaves optimizer and schedule to
    the Trainer, whole and resumed, with a short last step."""
    compat.install()  # transformers looks for DeepSpeed once
    torch.set_num_threads(1)  # tiny models are quicker so
    options: dict[str, Any] = {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "save_steps": 2}
    stock = hf_trainer({**options, "save_strategy": "no"}, folder)
    example = printed("hf_causal_lm.py")
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    options["deepspeed"] = {**dict.fromkeys(sizes, "auto"), "zero_optimization": zero}
    whole, resumed = hf_trainer(options, folder), hf_trainer(options, folder, f"{folder}/checkpoint-2")
    return {"stock": stock, "example": example, "whole": whole, "resumed": resumed}


def again(rank: int, world: int, stages: tuple[int, int]) -> list[float]:
    """The weights of two engines that share a loss, after the model of one of them was given to initialize() again."""
    compat.install()
    import deepspeed

    model, inputs = net(), torch.ones(4, 6)
    first, *_ = deepspeed.initialize(model=model, config=config(stages[0]))
    step(first, 0)
    second, *_ = deepspeed.initialize(model=model, config=config(stages[1]))
    other, *_ = deepspeed.initialize(model=net(), config=config(stages[1]))
    for _ in range(2):
        loss = second(inputs).square().mean() + other(inputs).square().mean()
        loss.backward()  # DeepSpeed's way to train two engines with one loss
        second.step()
        other.step()
    with deepspeed.zero.GatheredParameters([*second.module.parameters(), *other.module.parameters()]):
        params = [*second.module.parameters(), *other.module.parameters()]
        found = [float(value) for param in params for value in param.detach().reshape(-1)]
    for engine in (second, other):
        engine.destroy()
    return found


def variants(rank: int, world: int, stage: int, folder: str) -> dict[str, Any]:
    """Weights after three steps in ways that a script may ask for, and what engines without an optimizer compute."""
    compat.install()
    import deepspeed

    found: dict[str, Any] = {}

    def train(name: str, moves: bool = False, **more: Any) -> Any:
        settings = config(stage, gradient_clipping=0, **more)
        engine, *_ = deepspeed.initialize(model=net(), config=settings)
        for seed in range(3):
            step(engine, seed)
            if moves and seed < 2:
                engine.reload_states() if seed else engine.offload_states()
                found[f"{name} {seed}"] = engine.optimizer.host_share
        with deepspeed.zero.GatheredParameters(engine.module):
            found[name] = [float(value) for param in engine.module.parameters() for value in param.detach().reshape(-1)]
        return engine

    train("moved", moves=True, zero_optimization={"stage": stage}).destroy()
    params = {"lr": 1e-2, "bias_correction": False}
    engine = train("uncorrected", optimizer={"type": "AdamW", "params": params})
    engine.save_checkpoint(folder, tag=f"of rank {rank}")
    saved = engine.module_state_dict(prefix="a.", exclude_frozen_parameters=True)
    found["names"] = sorted(saved)
    engine.destroy()
    if stage < 3:
        train("lamb", optimizer={"type": "Lamb", "params": {"lr": 1e-2}}).destroy()
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    engine, *_ = deepspeed.initialize(model=net(), config={"train_batch_size": world, "zero_optimization": zero})
    found["evaluated"] = engine(torch.ones(4, 6)).reshape(-1).tolist()
    engine.destroy()
    found["tags"] = sorted(path.name for path in Path(folder).iterdir())
    return found


def built_in_half(rank: int, world: int) -> tuple[list[float], str]:
    """The weights of a model that zero.Init builds in bf16, and their dtype when they are trained."""
    compat.install()
    import deepspeed

    settings = config(3, bf16={"enabled": True})
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
        model = net()
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    with deepspeed.zero.GatheredParameters(engine.module):
        params = list(engine.module.parameters())
        found = [float(value) for param in params for value in param.detach().reshape(-1)], str(params[0].dtype)
    engine.destroy()
    return found
