# SPDX-License-Identifier: Apache-2.0
"""training_data: the engine makes the data loader. Collectives through deepspeed.comm, and the accelerator's names."""

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import RepeatingLoader
from small import BASE, INPUTS, build_model, get_args, report

CONFIG = {**BASE, "zero_optimization": {"stage": 1}, "dataloader_drop_last": True}


def main():
    args = get_args()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(64, INPUTS, generator=draw)
    data = torch.utils.data.TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    model = build_model()
    torch.manual_seed(3)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=CONFIG
    )
    batches = iter(RepeatingLoader(loader))
    losses = []
    for _ in range(args.steps):
        x, y = next(batches)
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG if dist.get_world_size() == 1 else dist.ReduceOp.SUM)
        losses.append(float(mean / dist.get_world_size()))
    dist.barrier()
    device = get_accelerator().device_name()
    report(losses, batches=len(loader), is_device=device == engine.device.type)


if __name__ == "__main__":
    main()
