# SPDX-License-Identifier: Apache-2.0
"""Trains a model on the CPU with DeepSpeedCPUAdam in a plain torch loop.

With twinflow:  python -m twinflow.compat examples/compat/cpu_adam.py
With DeepSpeed: python examples/compat/cpu_adam.py
"""

import argparse
import json

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = DeepSpeedCPUAdam(groups, lr=3e-3, betas=(0.9, 0.98), eps=1e-8, adamw_mode=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    inputs = torch.randn(256, 16)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    losses = []
    for _ in range(args.steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
