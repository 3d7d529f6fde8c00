# SPDX-License-Identifier: Apache-2.0
"""State on the disk with ZeRO stage 3, beside the same run in memory, for tests/dist/test_disk.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from twin_support import CONFIG, gpt

import twinflow
from twinflow.zero import Zero
from twinflow.zero.compression import Compression


def _engine(folder: Path | None, params: str) -> Any:
    offload: dict[str, Any] = {"device": "cpu", "bucket_numel": 4096}
    if folder is not None:
        offload |= {"device": "nvme", "nvme_path": str(folder / "disk"), "buffer_count": 2}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
    }
    if params != "none":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if params == "nvme" and folder is not None:
        there = {"device": "nvme", "nvme_path": str(folder / "disk"), "buffer_count": 2, "max_in_cpu": 0}
        config["zero_optimization"]["offload_param"] = there
    return twinflow.initialize(model=gpt(), config=config)[0]


def _run(engine: Any, rank: int, steps: range) -> None:
    for step in steps:
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            tokens = torch.randint(0, CONFIG.vocab_size, (2, CONFIG.context + 1), generator=generator)
            engine.backward(engine(tokens[:, :-1], tokens[:, 1:]).loss)
            engine.step()


def _state(engine: Any) -> list[Any]:
    """This rank's weights and state. Weights on the host are in the state."""
    engine.optimizer.wait()
    runtime = engine.optimizer.runtime
    found = [param.local.detach().clone() for param in runtime.params if not runtime.lives_on_host(param.tensor)]
    for _, entry in engine.optimizer.stream_state()[1]:
        found += [value.tensor().clone() for key, value in entry.items() if key != "step"]
    return found


def as_in_memory(rank: int, world: int, folder: str, params: str) -> list[int]:
    """Numbers of tensors, and of those that differ: after some steps, and after steps from a checkpoint of the disk.

    `params`: the device of `offload_param`.
    """
    root, counts = Path(folder), []
    memory, disk = _engine(None, params), _engine(root, params)
    for engine in (memory, disk):
        _run(engine, rank, range(3))
    disk.save_checkpoint(root / "saved")
    pairs = list(zip(_state(memory), _state(disk), strict=True))
    counts += [len(pairs), sum(not torch.equal(a, b) for a, b in pairs)]
    disk.destroy()
    loaded = _engine(None, params)
    loaded.load_checkpoint(root / "saved")
    for engine in (memory, loaded):
        _run(engine, rank, range(3, 5))
    pairs = list(zip(_state(memory), _state(loaded), strict=True))
    return [*counts, len(pairs), sum(not torch.equal(a, b) for a, b in pairs)]


def compressed(rank: int, world: int, folder: str) -> None:
    zero = Zero(stage=1, compression=Compression(freeze_step=4))
    tuning = twinflow.optim.twin.Tuning(nvme_path=folder)
    with pytest.raises(ValueError, match="1-bit Adam cannot be used with state on the disk"):
        twinflow.optim.twin.TwinOptimizer(gpt(), ratio=1.0, zero=zero, tuning=tuning)
