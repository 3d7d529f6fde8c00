# SPDX-License-Identifier: Apache-2.0
"""Which gradients are given to updates during backward, if each expert is a module and some experts get no tokens.

    python benchmarks/expert_buckets.py

Two layouts of buckets are compared: a bucket for each expert, and buckets with all parameters of a block. The numbers
are shares of all parameters, after backward and before `step`. They do not depend on the machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twinflow.offload import plan
from twinflow.optim.twin import Tuning, TwinOptimizer

NUM_EXPERTS, NUM_LAYERS, HIDDEN = 16, 4, 32
STEPS, SKIPPED = 20, 4


class Layer(nn.Module):
    """Sends each row to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero()[:, 0]
            y = y.index_add(0, rows, self.experts[index](x[rows]))
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for layer, own in zip(self.layers, chosen, strict=True):
            x = layer(x, own)
        return x.square().mean()


def shares(num_rows: int, small: int) -> list[float]:
    """Mean shares of all parameters: with a gradient, given to an update, and in buffers that wait for `step`.

    `small`: as `plan._SMALL`; 0 gives no expert a bucket of its own.
    """
    plan._SMALL = small
    torch.manual_seed(0)
    model = Model()
    optimizer = TwinOptimizer(model, lr=1e-3, ratio=1.0, early=True, tuning=Tuning(bucket_numel=1 << 16))
    runtime, rows = optimizer.runtime, []
    total = sum(param.tensor.numel() for param in runtime.params)
    for _ in range(STEPS):
        model(torch.randn(num_rows, HIDDEN), torch.randint(NUM_EXPERTS, (NUM_LAYERS, num_rows))).backward()
        job = runtime.steps.job
        hit = sum(param.tensor.numel() for param in runtime.params if param.was_hit)
        begun = sum(task.bucket.plan.numel for task in job.tasks) if job is not None else 0
        waits = sum(bucket.plan.numel for bucket in runtime.buckets if runtime.collector.task_of(bucket) is not None)
        rows.append([hit / total, begun / total, waits / total])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    means: list[float] = torch.tensor(rows[SKIPPED:]).mean(dim=0).tolist()
    return means


def main() -> None:
    """Print the table."""
    print("| rows | with a gradient | begun, by expert | begun, by block | waiting, by expert | waiting, by block |")
    print("|---:|---:|---:|---:|---:|---:|")
    for num_rows in (4, 16, 48):
        (hit, begun, waits), (_, others, waiting) = shares(num_rows, 16), shares(num_rows, 0)
        print(f"| {num_rows} | {hit:.0%} | {begun:.0%} | {others:.0%} | {waits:.0%} | {waiting:.0%} |")


if __name__ == "__main__":
    main()
