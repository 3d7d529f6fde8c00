"""What ranks do in the tests of architectures: train the same small model whole, with plain torch, and split."""

from __future__ import annotations

import copy
from typing import Any

import torch
from architectures import ARCHITECTURES, Architecture, arguments, batch
from torch import nn

import twinflow

STEPS, PARTS, CLIP = 3, 2, 0.5
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-4, "weight_decay": 0.01}


def config_of(mode: str, world: int) -> dict[str, Any]:
    axis = {"tensor_parallel": {"autotp_size": world}} if mode == "tensor" else {"pipeline": {"stages": world}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": CLIP,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        **axis,
    }


def batches(one: Architecture, step: int) -> list[tuple[Any, Any]]:
    return [batch(one.head, 10 * step + part) for part in range(PARTS)]


def whole(one: Architecture, model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the weights after them, of plain torch in one process."""
    torch.manual_seed(5)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=ADAM["lr"], betas=(0.9, 0.95), eps=ADAM["eps"], weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        found = [model(input_ids=ids, **arguments(one.head, target)).loss for ids, target in batches(one, step)]
        loss = torch.stack(found).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def split(one: Architecture, model: Any, mode: str, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same of the engine. A pipeline rank has the weights of its stages."""
    engine, *_ = twinflow.initialize(model=model, config=config_of(mode, world))
    torch.manual_seed(5)
    losses = []
    for step in range(STEPS):
        data = batches(one, step)
        if mode == "pipeline":
            losses.append(float(engine.train_batch(iter(data))))
            continue
        total = 0.0
        for ids, target in data:
            loss = engine(input_ids=ids, **arguments(one.head, target)).loss
            engine.backward(loss)
            engine.step()
            total += float(loss) / PARTS
        losses.append(total)
    state = engine.module_state_dict()
    found = {name: value.clone() for name, value in state.items()}
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
        losses, weights = whole(one, copy.deepcopy(model))
        start = {key: value.clone() for key, value in model.state_dict().items()}
        for mode in modes:
            seen, state = split(one, copy.deepcopy(model), mode, world)
            moved = max(float((weights[key] - start[key]).abs().max()) for key in weights)
            found[f"{name}/{mode}"] = {
                "losses": max(abs(a - b) / abs(b) for a, b in zip(seen, losses, strict=True)),
                "weights": max(float((value - weights[key]).abs().max()) for key, value in state.items()),
                "moved": moved,
                "names": sorted(state),
                "all": sorted(weights),
            }
    return found
