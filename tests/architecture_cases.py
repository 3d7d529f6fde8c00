# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of architectures: train the same small model whole, with plain torch, and split."""

from __future__ import annotations

import copy
from typing import Any

import torch
from architectures import ARCHITECTURES, Architecture, arguments, batch
from torch import nn
from torch.distributed.tensor import DTensor

import twinflow

STEPS, PARTS, CLIP = 3, 2, 0.5
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-4, "weight_decay": 0.01}


TENSOR: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
STAGES: dict[str, Any] = {"pipeline": {"stages": 2}}
MODES: dict[str, dict[str, Any]] = {
    "tensor": TENSOR,
    "pipeline": STAGES,
    "both": {**TENSOR, **STAGES},  # four ranks
    "tensor, sequence": {"tensor_parallel": {"autotp_size": 2, "sequence": True}},
    "tensor, padded": TENSOR,
    "tensor, checkpointing": TENSOR,
    "pipeline, zbv": {"pipeline": {"stages": 2, "schedule": "zbv"}},
    "pipeline, interleaved": {"pipeline": {"stages": 2, "schedule": "interleaved"}},
    "pipeline, recomputed": {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}},
    "pipeline, stage 3": {  # four ranks: two replicas, which get the same batches
        **STAGES,
        "zero_optimization": {"stage": 3},
    },
    "pipeline, padded": STAGES,
    "pipeline, checkpointing": STAGES,
}


def config_of(mode: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": CLIP,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        **MODES[mode],
    }


def padded(ids: torch.Tensor) -> torch.Tensor:
    """An attention mask: the first row of a batch is shorter."""
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return mask


def batches(one: Architecture, step: int) -> list[tuple[Any, Any]]:
    return [batch(one.head, 10 * step + part) for part in range(PARTS)]


def whole(one: Architecture, model: Any, mode: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the weights after them, of plain torch in one process."""
    torch.manual_seed(5)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=ADAM["lr"], betas=(0.9, 0.95), eps=ADAM["eps"], weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        found = []
        for ids, target in batches(one, step):
            given = arguments(one.head, target) | ({"attention_mask": padded(ids)} if "padded" in mode else {})
            found.append(model(input_ids=ids, **given).loss)
        loss = torch.stack(found).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def split(one: Architecture, model: Any, mode: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same of the engine. A pipeline rank has the weights of its stages."""
    if "checkpointing" in mode:
        model.gradient_checkpointing_enable()
    engine, *_ = twinflow.initialize(model=model, config=config_of(mode))
    torch.manual_seed(5)
    losses = []
    for step in range(STEPS):
        data = batches(one, step)
        if "pipeline" in config_of(mode):
            if "padded" in mode:
                data = [((ids, padded(ids)), target) for ids, target in data]
            losses.append(float(engine.train_batch(iter(data))))
            continue
        total = 0.0
        for ids, target in data:
            given = arguments(one.head, target) | ({"attention_mask": padded(ids)} if "padded" in mode else {})
            loss = engine(input_ids=ids, **given).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / PARTS
        losses.append(total)
    state = engine.module_state_dict()
    found = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state.items()
    }
    engine.destroy()
    return losses, found


def compare(rank: int, world: int, asked: dict[str, list[str]]) -> dict[str, Any]:
    """By architecture and mode: the largest differences of losses and weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for name, modes in asked.items():
        one = ARCHITECTURES[name]
        model = one.build()
        start = {key: value.clone() for key, value in model.state_dict().items()}
        for mode in modes:
            losses, weights = whole(one, copy.deepcopy(model), mode)
            seen, state = split(one, copy.deepcopy(model), mode)
            moved = max(float((weights[key] - start[key]).abs().max()) for key in weights)
            found[f"{name}/{mode}"] = {
                "losses": max(abs(a - b) / abs(b) for a, b in zip(seen, losses, strict=True)),
                "weights": max(
                    (float((value - weights[key]).abs().max()) for key, value in state.items()), default=0.0
                ),
                "moved": moved,
                "names": sorted(state),
                "all": sorted(weights),
            }
    return found
