# SPDX-License-Identifier: Apache-2.0
"""Two engines that train in turn, a third for a model that is only evaluated, and a second engine for one model."""

import deepspeed
import torch
from small import BASE, batch, build_model, get_args, report, train


def build(model, stage):
    config = {**BASE, "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def main():
    args = get_args()
    deepspeed.init_distributed()
    first, second = build(build_model(seed=0), 2), build(build_model(seed=1), 1)
    teacher = deepspeed.initialize(model=build_model(seed=2), config={"train_micro_batch_size_per_gpu": 4})[0]
    teacher.eval()
    losses = []
    for step in range(args.steps):
        losses += train(first, 1, start=step)
        x, _ = batch(step)
        with torch.no_grad():
            taught = teacher(x)
        loss = second(x, taught)
        second.backward(loss)
        second.step()
        losses.append(loss.item())
    model = first.module
    first.destroy()
    again = build(model, 2)
    losses += train(again, args.steps, start=args.steps)
    report(losses)


if __name__ == "__main__":
    main()
