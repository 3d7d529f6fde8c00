# SPDX-License-Identifier: Apache-2.0
"""deepspeed.checkpointing: the model recomputes its blocks in backward, as the config says."""

import deepspeed
import torch
from small import BASE, Model, get_args, report, train
from torch import nn

CONFIG = {
    **BASE,
    "zero_optimization": {"stage": 2},
    "activation_checkpointing": {
        "partition_activations": False,
        "contiguous_memory_optimization": False,
        "cpu_checkpointing": False,
    },
}
RUNS = []


class Recomputed(Model):
    """The blocks run twice in a training step."""

    def forward(self, x, y):
        def run(block):
            def inner(x):
                RUNS.append(1)
                return nn.functional.dropout(block(x), 0.1, self.training)

            return inner

        x = self.first(x)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(run(block), x)
        return nn.functional.mse_loss(self.last(x), y)


def main():
    args = get_args()
    deepspeed.init_distributed()
    deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=CONFIG)
    assert deepspeed.checkpointing.is_configured()
    torch.manual_seed(0)
    model = Recomputed()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    torch.manual_seed(7)
    report(train(engine, args.steps), runs=len(RUNS))


if __name__ == "__main__":
    main()
