# SPDX-License-Identifier: Apache-2.0
"""Ray Train: two workers train one model with twinflow's engine, on the CPU or with one GPU each.

Ray starts the workers and torch's process group, which `twinflow.initialize` uses. With ZeRO stage 1 each worker has
half of the optimizer state. Needs `pip install "ray[train]"`.

python examples/ray_train.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

import twinflow
from twinflow.data import load_data
from twinflow.models.gpt import GPT, GPTConfig

STEPS, BATCH_SIZE, WORKERS = 30, 4, 2
SHAPE = GPTConfig(vocab_size=256, context=64, num_layers=2, hidden=64, num_heads=4)
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}


def train_on_worker(given: dict[str, Any]) -> None:
    """Each worker runs this function. Only `train.report` is specific to Ray."""
    from ray import train

    torch.manual_seed(0)  # all workers build the same model
    engine, *_ = twinflow.initialize(model=GPT(SHAPE), config=CONFIG)
    data, first = load_data("stdlib"), 0.0
    for step in range(given["steps"]):
        # Each worker has its own batch.
        tokens, targets = data.batch("train", step * engine.world_size + engine.global_rank, BATCH_SIZE, SHAPE.context)
        loss = engine(tokens.to(engine.device), targets.to(engine.device)).loss
        engine.backward(loss)
        engine.step()
        first = first or loss.item()
    engine.save_checkpoint(given["folder"])  # each worker writes its part; all workers must see this folder
    saved = train.Checkpoint.from_directory(given["folder"]) if engine.global_rank == 0 else None
    found = {"first": first, "last": loss.item(), "workers": engine.world_size, "steps": engine.global_steps}
    train.report(found, checkpoint=saved)
    engine.destroy()


def main() -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # Workers import the same installation of twinflow as this process.
    path = os.pathsep.join([str(Path(twinflow.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_on_worker,
            train_loop_config={"steps": STEPS, "folder": f"{folder}/checkpoints"},
            scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=torch.cuda.device_count() >= WORKERS),
            run_config=RunConfig(storage_path=folder, name="twinflow"),
        )
        result = trainer.fit()
        found, checkpoint = result.metrics, result.checkpoint
        assert found is not None
        assert checkpoint is not None
        with checkpoint.as_directory() as where:
            saved = (Path(where) / "latest").read_text().strip()
    ray.shutdown()
    workers, first, last = (found[name] for name in ("workers", "first", "last"))
    print(f"{workers} workers, {found['steps']} steps: loss {first:.3f} to {last:.3f}; Ray has the checkpoint {saved}")
    assert last < first - 1.0
    print("the loss fell")


if __name__ == "__main__":
    main()
