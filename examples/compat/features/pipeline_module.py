# SPDX-License-Identifier: Apache-2.0
"""A PipelineModule of layers over as many stages as there are processes, trained and evaluated batch by batch."""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from small import BASE, Block, batch, get_args, report
from torch import nn

CONFIG = {**BASE, "gradient_accumulation_steps": 4, "gradient_clipping": 0.0}


def micro_batches(start):
    while True:
        yield batch(start, rank=0)
        start += 1


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), Block(), Block(), lambda x: 2 * x, nn.Linear(16, 1)]
    net = PipelineModule(
        layers=layers,
        loss_fn=nn.MSELoss(),
        num_stages=torch.distributed.get_world_size(),
        partition_method="parameters",
    )
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]
    data = micro_batches(0)
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(args.steps)]
    losses.append(float(engine.eval_batch(data_iter=micro_batches(500))))
    report(losses, stages=net.num_stages, steps=engine.global_steps)


if __name__ == "__main__":
    main()
