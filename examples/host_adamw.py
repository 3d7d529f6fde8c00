# SPDX-License-Identifier: Apache-2.0
"""Trains on the CPU with HostAdamW, int8 states, a schedule and clipping. Saves half-way and resumes bit for bit."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from twinflow import native
from twinflow.optim import HostAdamW

STEPS, CLIP = 120, 0.5


def build() -> tuple[nn.Module, HostAdamW, CosineAnnealingLR]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = HostAdamW(model.parameters(), lr=3e-3, states="int8")
    return model, optimizer, CosineAnnealingLR(optimizer, T_max=STEPS)


def train(model: nn.Module, optimizer: HostAdamW, schedule: CosineAnnealingLR, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(128, 16, generator=torch.Generator().manual_seed(step))  # the same batch in a resumed run
        loss = nn.functional.mse_loss(model(x), x[:, :1] * x[:, 1:2])
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(native.sum_squares([p.grad for p in model.parameters()])))
        if math.isfinite(norm):  # otherwise a gradient is NaN or infinite, and the step is skipped
            optimizer.step(factor=min(1.0, CLIP / (norm + 1e-6)))  # the kernel multiplies gradients by the factor
        schedule.step()
        if step % 20 == 0 or step == last - 1:
            print(f"  step {step:3d}  loss {loss.item():.4f}  gradient norm {norm:.2f}")


def main() -> None:
    run, resumed = build(), build()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        print("run from start to end, saved half-way:")
        train(*run, 0, STEPS // 2)
        torch.save([part.state_dict() for part in run], path)
        train(*run, STEPS // 2, STEPS)
        for part, saved in zip(resumed, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(saved)
    print("run from the checkpoint to the end:")
    train(*resumed, STEPS // 2, STEPS)
    pairs = zip(run[0].parameters(), resumed[0].parameters(), strict=True)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
    print("the resumed run ends with the same bits")


if __name__ == "__main__":
    main()
