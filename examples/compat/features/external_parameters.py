# SPDX-License-Identifier: Apache-2.0
"""A weight that another module uses, and leaf modules, with ZeRO stage 3."""

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from small import BASE, Block, Model, get_args, report, train
from torch import nn

CONFIG = {**BASE, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


class Shared(Model):
    """The first layer's weight is used again for the output."""

    def __init__(self):
        super().__init__()
        deepspeed.zero.register_external_parameter(self, self.first.weight)

    def forward(self, x, y):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        again = nn.functional.linear(hidden, self.first.weight.t())
        return nn.functional.mse_loss(self.last(hidden) + again.mean(dim=1, keepdim=True), y)


def main():
    args = get_args()
    torch.manual_seed(0)
    model = Shared()
    leaves = set_z3_leaf_modules(model, [Block])
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    report(train(engine, args.steps), leaves=len(leaves))


if __name__ == "__main__":
    main()
