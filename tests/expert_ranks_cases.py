# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of expert parallelism: trainings of models whose experts are on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experts_support import DECAY, EPS, FUSED, LENGTH, LR, MAX_NORM, VOCAB, Modules, fused
from torch import Tensor, nn

import twinflow
from twinflow import TwinOptimizer
from twinflow.compat import zero as deepspeed_zero
from twinflow.integrations.pretrained import from_pretrained
from twinflow.optim.whole import whole_weights
from twinflow.parallel import PipelineModule
from twinflow.zero import Zero, split_experts

BATCH = 4  # sequences of a micro-batch, which ranks divide
MODELS = {name: partial(fused, name) for name in FUSED}
MODELS["Olmoe, router loss"] = partial(fused, "Olmoe", output_router_logits=True)
DOWN = "model.layers.0.mlp.experts.down_proj"


def batch_of(step: int, part: int = 0, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """A rank's sequences of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    size = BATCH // world
    tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)[rank * size : (rank + 1) * size]
    return {"input_ids": tokens, "labels": tokens}


def plain(name: str, parts: int, clips: bool, steps: int) -> dict[str, Any]:
    """The weights, losses and norms of a training with plain torch, in one process with all sequences."""
    model = fused(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    losses, norms = [], []
    for step in range(steps):
        for part in range(parts):
            loss = model(**batch_of(step, part)).loss
            (loss / parts).backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM if clips else 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": values_of(model.state_dict()), "losses": losses, "norms": norms}


def values_of(state: Any) -> dict[str, Any]:
    return {key: value.tolist() for key, value in state.items()}


def config_of(
    world: int, size: int, stage: int, parts: int, clips: bool, offload: dict[str, Any] | None, **others: Any
) -> dict[str, Any]:
    """`offload`: keys of `offload_optimizer`; None: no offload. `size`: number of expert ranks."""
    zero: dict[str, Any] = {"stage": stage}
    if offload is not None:
        zero["offload_optimizer"] = {"device": "cpu", "bucket_numel": 1024, **offload}
    return {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": MAX_NORM if clips else 0.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "eps": EPS}},
        "zero_optimization": zero,
        "expert_parallel_size": size,
        **others,
    }


def train(
    rank: int, world: int, name: str, config: dict[str, Any], first: int, last: int, source: str = "", target: str = ""
) -> dict[str, Any]:
    """The weights after step `last`, and the losses and norms of all steps. `source`: the checkpoint to start from.
    `target`: the one to write at the end.
    """
    engine, *_ = twinflow.initialize(model=MODELS[name](), config=config)
    if source:
        engine.load_checkpoint(source)
    losses, norms = [], []
    for step in range(first, last):
        for part in range(config["gradient_accumulation_steps"]):
            loss = engine(**batch_of(step, part, rank, world)).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    if target:
        engine.save_checkpoint(target)
    numel = sum(param.numel() for param in engine.module.parameters())
    weights = values_of(engine.module_state_dict())
    engine.destroy()
    return {"weights": weights, "losses": losses, "norms": norms, "numel": numel}


def train_all(rank: int, world: int, cases: list[Any]) -> list[Any]:
    """Several trainings, one after the other."""
    return [train(rank, world, *case) for case in cases]


def use(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Other ways to build, read and write a model with expert ranks: what one gets, by a name."""
    found: dict[str, Any] = {}
    # Ranks may create different models: all get the weights of rank 0.
    model = fused("Olmoe")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(rank)
    engine, *_ = twinflow.initialize(model=model, config=config_of(world, 2, 2, 1, True, {}))
    found["first"] = values_of(engine.module_state_dict())
    engine.backward(engine(**batch_of(0, 0, rank, world)).loss)
    param = engine.module.get_parameter(DOWN)
    gradient = deepspeed_zero.safe_get_full_grad(param)
    assert gradient is not None
    deepspeed_zero.safe_set_full_grad(param, 2 * gradient)
    doubled = deepspeed_zero.safe_get_full_grad(param)
    deepspeed_zero.safe_set_full_grad(param, gradient)
    assert doubled is not None
    torch.testing.assert_close(doubled, 2 * gradient)
    found["gradient"] = gradient.tolist()
    engine.step()
    found["master"] = [rank % 2, deepspeed_zero.safe_get_full_fp32_param(param).tolist()]
    engine.save_16bit_model(f"{folder}/saved")
    engine.module.save_pretrained(f"{folder}/pretrained")
    whole = engine.module_state_dict()
    engine.load_module_state_dict({key: torch.ones_like(value) for key, value in whole.items()})
    assert all(bool((value == 1).all()) for value in engine.module_state_dict().values())
    engine.load_module_state_dict(whole)
    found["loaded"] = values_of(engine.module_state_dict())
    engine.destroy()
    # A model whose weights are read when they are needed.
    dist.barrier()  # rank 0 has written the files
    unread = from_pretrained(type(model), f"{folder}/pretrained")
    found["read"] = values_of(split_experts(unread, 2).state_dict())
    # Another engine for the same model.
    engine, *_ = twinflow.initialize(model=model, config=config_of(world, 2, 0, 1, True, {}))
    found["again"] = values_of(engine.module_state_dict())
    engine.destroy()
    # A TwinOptimizer over a model that was split without an engine.
    model = fused("Olmoe")
    ranks = split_experts(model, 2)
    assert ranks.rank == rank % 2
    copied = deepcopy(model)
    assert values_of(ranks.state_dict()) == found["first"]
    # Ranks stop after different numbers of tokens, but run as many forwards.
    model.generate(batch_of(0)["input_ids"], max_new_tokens=2 + rank, do_sample=False)
    copied.save_pretrained(f"{folder}/copied")
    options = {"lr": LR, "weight_decay": DECAY, "eps": EPS, "max_grad_norm": MAX_NORM}
    for stage, given in ((2, model), (0, list(model.parameters()))):
        optimizer = TwinOptimizer(given, zero=Zero(stage=stage), **options)
        optimizer.backward(model(**batch_of(0, 0, rank, world)).loss)
        optimizer.step()
        optimizer.wait()
        found[f"own part, stage {stage}"] = [rank % 2, model.get_parameter(DOWN).tolist()]
        if stage == 2:
            config = config_of(world, 2, 2, 1, True, None)
            engine, *_ = twinflow.initialize(model=model, optimizer=optimizer, config=config)
            found["whole"] = values_of(engine.module_state_dict())
            engine.save_checkpoint(f"{folder}/checkpoint")
        optimizer.close()
        with torch.no_grad():
            for own, old in zip(model.parameters(), fused("Olmoe").parameters(), strict=True):
                num = own.shape[0]
                own.copy_(old[rank % 2 * num : (rank % 2 + 1) * num] if own.shape != old.shape else old)
    return found


def errors(rank: int, world: int) -> dict[str, str]:
    """The messages of what is refused, by a name."""
    found: dict[str, str] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            found[name] = "no error"
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)

    def initialize(model: Any = None, optimizer: Any = None, size: int = 2, stage: int = 2, **others: Any) -> None:
        model = fused("Mixtral") if model is None else model
        twinflow.initialize(model=model, optimizer=optimizer, config=config_of(2, size, stage, 1, True, None, **others))

    params = {"lr": 1e-3}
    note("ranks", lambda: initialize(size=3))
    note("experts", lambda: initialize(fused("Mixtral", num_local_experts=3)))
    note("no experts", lambda: initialize(nn.Sequential(nn.Linear(2, 2))))
    note("modules", lambda: initialize(Modules()))
    note("stage", lambda: initialize(stage=3))
    note("tensor", lambda: initialize(tensor_parallel={"autotp_size": 2}))
    note("sequence", lambda: initialize(sequence_parallel_size=2))
    note("pipeline", lambda: initialize(PipelineModule([nn.Linear(2, 2)], num_stages=1)))
    note("compiled", lambda: initialize(compile={"blocks": True}))
    note("float8", lambda: initialize(float8={"enabled": True, "emulate": True}))
    for kind in ("Muon", "OneBitAdam", "RMSprop"):
        section = {"type": kind, "params": params}
        config = config_of(2, 2, 1, 1, False, None, optimizer=section)
        note(kind, lambda config=config: twinflow.initialize(model=fused("Mixtral"), config=config))  # type: ignore[misc]
    config = config_of(2, 2, 1, 1, False, None)
    del config["optimizer"]
    note("no optimizer", lambda: twinflow.initialize(model=fused("Mixtral"), config=config))
    model = fused("Mixtral")
    note("own optimizer", lambda: initialize(model, torch.optim.AdamW(model.parameters())))
    twin = TwinOptimizer(model, zero=Zero(stage=2))
    note("twin", lambda: initialize(model, twin))
    twin.close()
    vars(model)["peft_config"] = {}
    note("adapters", lambda: split_experts(model, 2))
    del vars(model)["peft_config"]
    split_experts(model, 2)
    note("twice", lambda: split_experts(model, 2))
    note("another size", lambda: initialize(model, size=1, stage=3))
    note("own rule", lambda: TwinOptimizer(model, torch.optim.RMSprop, zero=Zero(stage=2)))
    note("own stage", lambda: TwinOptimizer(deepcopy(model), zero=Zero(stage=3)))
    replaced = deepcopy(model)
    replaced.load_state_dict(model.state_dict(), assign=True)
    note("replaced", lambda: TwinOptimizer(replaced, zero=Zero(stage=2)))
    twin = TwinOptimizer(model, zero=Zero(stage=0))
    note("state dict", twin.state_dict)
    note("whole weights", lambda: list(whole_weights(twin)))
    twin.close()
    engine, *_ = twinflow.initialize(model=fused("Mixtral"), config=config_of(2, 2, 1, 1, True, None))
    part = engine.module.state_dict()
    note("given weights", lambda: engine.module.save_pretrained(Path("unused"), state_dict=part))
    engine.destroy()
    return found
