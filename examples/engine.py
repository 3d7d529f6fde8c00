# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed script with one changed line. It trains, saves a checkpoint, and compares a resumed run bit for bit.

python examples/engine.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

import twinflow  # instead of deepspeed

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "states": "bf16"}},
}


def build() -> twinflow.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1))
    inputs = torch.randn(512, 64)
    data = torch.utils.data.TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    return twinflow.initialize(model=model, training_data=data, config=CONFIG)[0]


def epoch(engine: twinflow.Engine) -> float:
    loss = torch.tensor(0.0)
    for x, y in engine.training_dataloader:
        loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
    return loss.item()


def main() -> None:
    engine = build()
    first = epoch(engine)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, client_state={"epoch": 1})
        last = epoch(engine)
        resumed = build()
        _, client_state = resumed.load_checkpoint(folder)
    again = epoch(resumed)
    print(f"loss {first:.4f} after epoch {client_state['epoch']}, {last:.4f} after the next, {again:.4f} when resumed")
    one, two = engine.module_state_dict(), resumed.module_state_dict()  # waits for all updates
    same = last == again and all(torch.equal(one[name], two[name]) for name in one)
    print("the resumed run has the same bits" if same else "the resumed run differs")
    engine.destroy()
    resumed.destroy()


if __name__ == "__main__":
    main()
