# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of experts."""

from __future__ import annotations

from typing import Any

from experts_support import DECAY, EPS, LR, MAX_NORM, MODELS, loss_of, tokens_of

import twinflow

BATCH = 2  # sequences of a micro-batch, which ranks divide


def config_of(world: int, stage: int, parts: int, clips: bool, offload: dict[str, Any] | None) -> dict[str, Any]:
    """`offload`: keys of `offload_optimizer`, or "params" for weights on the host. None: no offload."""
    zero: dict[str, Any] = {"stage": stage}
    if offload is not None:
        others = {key: value for key, value in offload.items() if key != "params"}
        zero["offload_optimizer"] = {"device": "cpu", "bucket_numel": 1024, **others}
        if offload.get("params"):
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": MAX_NORM if clips else 0.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "eps": EPS}},
        "zero_optimization": zero,
    }


def train(
    rank: int, world: int, name: str, config: dict[str, Any], first: int, last: int, source: str = "", target: str = ""
) -> dict[str, Any]:
    """The weights after step `last`. `source`: the checkpoint to start from. `target`: the one to write at the end."""
    engine, *_ = twinflow.initialize(model=MODELS[name](), config=config)
    if source:
        engine.load_checkpoint(source)
    size = BATCH // world
    for step in range(first, last):
        for part in range(config["gradient_accumulation_steps"]):
            own = tokens_of(step, part)[rank * size : (rank + 1) * size]
            engine.backward(loss_of(engine, own, step))
            engine.step()
    if target:
        engine.save_checkpoint(target)
    state = engine.module_state_dict() or {}
    found = {key: value.tolist() for key, value in state.items()}
    engine.destroy()
    return found


def train_all(rank: int, world: int, cases: list[Any]) -> list[Any]:
    """Several trainings, one after the other."""
    return [train(rank, world, *case) for case in cases]
