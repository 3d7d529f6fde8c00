# SPDX-License-Identifier: Apache-2.0
"""Calls between steps: loss.backward(), another learning rate, sums over ranks, and the end of an engine."""

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from small import BASE, batch, build_model, get_args, report


def all_ranks(value):
    """The mean over ranks, as DeepSpeed-Chat computes it."""
    total = torch.tensor([value], device=get_accelerator().current_device_name())
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    parts = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, total)
    dist.broadcast(total, 0)
    dist.barrier()
    return [float(part) / dist.get_world_size() for part in parts]


def run(args, stage):
    model = build_model()
    config = {**BASE, "zero_optimization": {"stage": stage}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses, figures = [], []
    for step in range(args.steps):
        if step == 3:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] = 0.2
        x, y = (value.to(engine.device) for value in batch(step))
        loss = engine(x, y=y)
        if step % 2:
            loss.backward()
        else:
            engine.backward(loss, retain_graph=step == 4)
        engine.step()
        losses.append(loss.item())
        figures.append([*engine.get_lr(), *all_ranks(loss.item())])
        engine.optimizer.zero_grad()
    sizes = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]
    engine.destroy()
    return losses, [figures, sizes, engine.global_steps]


def main():
    args = get_args()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    losses, figures = [], []
    for stage in (1, 2, 3):
        found, others = run(args, stage)
        losses += found
        figures.append(others)
    report(losses, figures=figures)


if __name__ == "__main__":
    main()
