# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: the engine counts micro-batches, and its batch size changes during training."""

import deepspeed
from small import BASE, batch, build_model, get_args, report

CONFIG = {**BASE, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}}


def main():
    args = get_args()
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses, boundaries, sizes = [], [], []
    for step in range(3 * args.steps):
        if step == 12:
            engine.set_train_batch_size(2 * 4 * engine.world_size)
        x, y = (value.to(engine.device) for value in batch(step))
        loss = engine(x, y)
        engine.backward(loss)
        boundaries.append(int(engine.is_gradient_accumulation_boundary()))
        engine.step()
        losses.append(loss.item())
        sizes.append(engine.train_batch_size())
    report(losses, boundaries=boundaries, steps=engine.global_steps, micro_steps=engine.micro_steps, sizes=sizes)


if __name__ == "__main__":
    main()
