# SPDX-License-Identifier: Apache-2.0
"""deepspeed.checkpointing with several inputs and outputs, arguments by name, nested calls, and with ZeRO stage 3."""

import deepspeed
import torch
from small import BASE, INPUTS, WIDTH, Block, get_args, report, train
from torch import nn

RUNS = []


class Pairs(nn.Module):
    """Blocks that get a tensor, a factor and a flag, and return a pair."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        def inner(block, x, total, factor, is_doubled):
            RUNS.append(1)
            x = nn.functional.dropout(block(x) * factor, 0.2, self.training)
            return (2 * x if is_doubled else x), total + x.mean()

        x, total = self.first(x), torch.zeros((), device=x.device)
        for i, block in enumerate(self.blocks):
            x, total = deepspeed.checkpointing.checkpoint(inner, block, x, total, self.gate, i == 1)
        x = deepspeed.checkpointing.checkpoint(self.gated, x=x, gate=self.gate)
        return nn.functional.mse_loss(self.last(x), y) + total.square()

    def gated(self, x, gate):
        return torch.tanh(x) * gate


def main():
    args = get_args()
    deepspeed.init_distributed()
    deepspeed.checkpointing.configure(None, num_checkpoints=4, contiguous_checkpointing=False, synchronize=False)
    losses = []
    for stage in (0, 2, 3):
        torch.manual_seed(0)
        model = Pairs()
        config = {**BASE, "zero_optimization": {"stage": stage}}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        torch.manual_seed(7)
        losses += train(engine, args.steps)
        deepspeed.checkpointing.reset()
    report(losses, runs=len(RUNS))


if __name__ == "__main__":
    main()
