# SPDX-License-Identifier: Apache-2.0
"""Twin-Flow at any ZeRO stage: compares training with a share of the updates on the host, and with all of them there.

python examples/partial_offload.py --zero 3 --ratio 0.3
twinflow launch --num_procs 2 examples/partial_offload.py --zero 3
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import twinflow  # instead of deepspeed

HIDDEN, CLASSES, STEPS, BATCH_SIZE = 64, 4, 60, 32


def config(stage: int, ratio: float, world_size: int) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH_SIZE * world_size,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": ratio},
        },
    }


def train(stage: int, ratio: float, me: Any) -> list[float]:
    """Trains a model to find the largest of four numbers and returns its losses. Each rank has its own batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()) for _ in range(3)))
    engine, *_ = twinflow.initialize(model=model, config=config(stage, ratio, me.world_size))
    generator = torch.Generator().manual_seed(1 + me.rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH_SIZE, HIDDEN, generator=generator)
        target = x[:, :CLASSES].argmax(1)
        loss = nn.functional.cross_entropy(engine(x.to(engine.device)), target.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero", type=int, default=3, help="ZeRO stage, 0 to 3")
    parser.add_argument("--ratio", type=float, default=0.3, help="share of the optimizer state that is on the host")
    args = parser.parse_args()
    me = twinflow.init_distributed()
    losses = train(args.zero, args.ratio, me)
    whole = train(args.zero, 1.0, me)
    if me.rank == 0:
        print(f"ranks {me.world_size}, stage {args.zero}, ratio {args.ratio}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        same = "the same losses" if losses == whole else "other losses"
        fell = "the loss fell" if losses[-1] < losses[0] / 2 else "the loss hardly fell"
        print(f"with every update on the host: {same}; {fell}")


if __name__ == "__main__":
    main()
