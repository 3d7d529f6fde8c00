# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of 1-bit Adam with pipeline and tensor ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from parallel_cases import config_of, make, one_step, rows_of

from twinflow.codes import CODES
from twinflow.optim import twin_build
from twinflow.parallel.shard import shard_of

FREEZE = 5
NUM_STEPS = 12
SHAPE = {"num_layers": 2}
OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": [0.9, 0.95], "freeze_step": FREEZE}


def onebit_config(pipe: int, model: int, data: int, **more: Any) -> dict[str, Any]:
    """As a user would write it."""
    params = {**OPTIONS, **more.pop("params", {})}
    return config_of(pipe, model, data, **more, optimizer={"type": "OneBitAdam", "params": params})


def prints(engine: Any) -> dict[str, str]:
    """Digests of weights by name and tensor rank, and of this replica's errors, by the replica too."""
    engine.optimizer.wait()
    params, aliases = dict(engine.module.named_parameters()), getattr(engine.module, "aliases", {})
    keys, found = {}, {}
    for name, param in params.items():
        shard, first = shard_of(param), aliases.get(name, name)
        keys[first] = first if shard is None else f"{first}@{shard.rank}"
        found[keys[first]] = _digest(rows_of(engine, param))
    errors = engine.optimizer.exchange_errors()
    for name, entry in errors.get("params", {}).items():
        assert float(entry["error"].abs().max()) > 0.0, name
        found[f"error of {keys[name]} in {errors['replica']}"] = _digest(entry["error"])
    return found


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def steps(engine: Any, num_steps: int) -> dict[str, list[Any]]:
    """Losses, digests, and bytes along the data axis, of each step."""
    groups = engine.optimizer.team.groups
    found: dict[str, list[Any]] = {"losses": [], "prints": [], "sent": [], "compressed": [], "norms": []}
    for _ in range(num_steps):
        before = sum(groups[name].sent_bytes for name in ("reduce", "publish"))
        found["losses"].append(one_step(engine, 0))  # the same batch again and again, so that it is learned
        found["prints"].append(prints(engine))
        found["sent"].append(sum(groups[name].sent_bytes for name in ("reduce", "publish")) - before)
        found["compressed"].append(engine.optimizer.is_compressed)
        found["norms"].append(engine.get_global_grad_norm())
    return found


def bytes_of_a_step(engine: Any) -> int:
    """By the formula: every bucket to its owners in one bit, and back."""
    world, code = engine.optimizer.team.world, CODES["1bit"]
    buckets = engine.optimizer.runtime.buckets
    return sum(2 * (world - 1) * code.row_bytes(bucket.gathered.numel // world) for bucket in buckets)


def train_all(
    rank: int, world: int, configs: dict[str, dict[str, Any]], num_steps: int = NUM_STEPS, lies_anywhere: bool = False
) -> dict[str, Any]:
    """Several configs one after the other; `lies_anywhere`: as if copies needed no buckets of their own."""
    if lies_anywhere:
        twin_build._shared_by_axes = lambda *_: {}
    found = {}
    for name, config in configs.items():
        engine = make(config, **SHAPE)
        found[name] = {**steps(engine, num_steps), "formula": bytes_of_a_step(engine)}
        found[name]["sums"] = engine.optimizer._switch.state()["sums"]  # of the second moment, as far as watched
        engine.destroy()
    return found


def save_and_go_on(rank: int, world: int, config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A checkpoint in the middle of compressed steps, and more of them."""
    engine = make(config, **SHAPE)
    steps(engine, FREEZE + 3)
    engine.save_checkpoint(Path(folder))
    found = {"before": prints(engine), **steps(engine, 4)}
    engine.destroy()
    return found


def load_and_go_on(rank: int, world: int, configs: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """The same steps from the checkpoint, in several layouts."""
    found = {}
    for i, (name, config) in enumerate(configs.items()):
        engine = make(config, seed=i + 1, **SHAPE)
        engine.load_checkpoint(Path(folder))
        found[name] = {"before": prints(engine), **steps(engine, 4)}
        engine.destroy()
    return found
