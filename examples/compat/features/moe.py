# SPDX-License-Identifier: Apache-2.0
"""A layer of experts, each token sent to the best one."""

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from small import BASE, INPUTS, WIDTH, get_args, report, train
from torch import nn

CONFIG = {**BASE, "zero_optimization": {"stage": 0}}


class Experts(nn.Module):
    """A linear layer, experts and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=1, k=1, use_rts=False)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, y):
        hidden, balance, _ = self.experts(self.first(x))
        return nn.functional.mse_loss(self.last(hidden), y) + 0.01 * balance


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Experts()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    report(train(engine, args.steps))


if __name__ == "__main__":
    main()
