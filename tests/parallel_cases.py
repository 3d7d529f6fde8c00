# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of pipeline x tensor x data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

import twinflow
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.parallel.shard import shard_of

SHAPE = GPTConfig(vocab_size=64, context=16, num_layers=4, hidden=32, num_heads=4)
GLOBAL_BATCH = 16
NUM_STEPS = 10
OFFLOADS: dict[str, dict[str, Any] | None] = {"none": None, "full": {}, "half": {"ratio": 0.5}}


def config_of(
    pipe: int, model: int, data: int, *, stage: int = 0, offload: str = "full", schedule: str = "1f1b", **more: Any
) -> dict[str, Any]:
    """As a user would write it."""
    zero: dict[str, Any] = {"stage": stage}
    if (given := OFFLOADS[offload]) is not None:
        zero["offload_optimizer"] = {"device": "cpu", "bucket_numel": 8192, **given}
    num_micro = more.pop("num_micro", 4)
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // num_micro // data,
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    if pipe > 1:
        config["pipeline"] = {"stages": pipe, "schedule": schedule}
    if model > 1:
        config["tensor_parallel"] = {"autotp_size": model}
    for key, value in more.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    return config


def tokens(step: int) -> torch.Tensor:
    """One batch of all replicas."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, SHAPE.vocab_size, (GLOBAL_BATCH, SHAPE.context + 1), generator=generator)


def micro_batches(engine: Any, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This replica's, in order."""
    micro, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for part in range(parts):
        start = (part * engine.dp_world_size + engine.dp_rank) * micro
        batch = tokens(step)[start : start + micro].to(engine.device)
        yield batch[:, :-1], batch[:, 1:]


def one_step(engine: Any, step: int) -> float:
    """The loss of the global batch."""
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(micro_batches(engine, step)))
    total = torch.zeros((), dtype=torch.float64)
    for inputs, targets in micro_batches(engine, step):
        loss = engine(inputs, targets).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().double().cpu() / engine.gradient_accumulation_steps()
    team = engine.optimizer.team
    if team is not None:
        rows = team.calls.gather_rows(total.view(1))
        total = rows.mean()
    return float(total)


def make(config: dict[str, Any], seed: int = 0, **shape: Any) -> Any:
    """An engine over the small GPT."""
    torch.manual_seed(seed)
    given = {**vars(SHAPE), **shape}
    return twinflow.initialize(model=GPT(GPTConfig(**given)), config=config)[0]


def train_all(
    rank: int,
    world: int,
    configs: dict[str, dict[str, Any]],
    num_steps: int = NUM_STEPS,
    shape: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Several configs one after the other: losses, norms, and the weights' digest of each rank's parameters."""
    found = {}
    for name, config in configs.items():
        engine = make(config, **(shape or {}))
        losses, norms = [], []
        for step in range(num_steps):
            losses.append(one_step(engine, step))
            norms.append(engine.get_global_grad_norm())
        found[name] = {"losses": losses, "norms": norms, "digests": digests(engine), "kept": kept_bytes(engine)}
        found[name]["whole"] = {key: value.numel() for key, value in engine.module_state_dict().items()}
        engine.destroy()
    return found


def kept_bytes(engine: Any) -> list[int]:
    """Of inputs of checkpointed layers: all bytes, and this rank's, where tensor ranks keep parts."""
    found = engine.activations.offload if engine.activations is not None else None
    return [found.whole_bytes, found.kept_bytes] if found is not None else []


def digests(engine: Any) -> dict[str, str]:
    """Of each parameter here, rows where ranks have rows; with the tensor rank in the name of a part."""
    engine.optimizer.wait()
    found = {}
    for name, param in engine.module.named_parameters():
        shard = shard_of(param)
        key = name if shard is None else f"{name}@{shard.rank}"
        found[key] = hashlib.sha256(rows_of(engine, param).numpy().tobytes()).hexdigest()
    return found


def rows_of(engine: Any, param: torch.Tensor) -> torch.Tensor:
    """A parameter's values; of rows only this rank's."""
    return getattr(param.detach(), "_local_tensor", param.detach()).cpu().contiguous()


def train_and_save(rank: int, world: int, config: dict[str, Any], folder: str) -> list[float]:
    """Some steps, a checkpoint, and the losses of two steps more."""
    engine = make(config)
    for step in range(3):
        one_step(engine, step)
    engine.save_checkpoint(folder, client_state={"note": "here"})
    losses = [one_step(engine, step) for step in (3, 4)]
    engine.destroy()
    return losses


def load_and_save(rank: int, world: int, configs: dict[str, dict[str, Any]], folder: str) -> dict[str, list[float]]:
    """Each from the same checkpoint into one of its own, and two steps more."""
    found = {}
    for i, (name, config) in enumerate(configs.items()):
        engine = make(config, seed=i + 1)
        path, client = engine.load_checkpoint(folder)
        assert (path is not None, client) == (True, {"note": "here"})
        engine.save_checkpoint(f"{folder}-{name}", client_state=client)
        found[name] = [one_step(engine, step) for step in (3, 4)]
        engine.destroy()
    return found
