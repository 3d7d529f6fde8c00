# SPDX-License-Identifier: Apache-2.0
"""The script itself says when a step is due, with set_gradient_accumulation_boundary and no_sync."""

from contextlib import nullcontext

import deepspeed
from small import BASE, batch, build_model, get_args, report


def run(args, stage, is_silent):
    """`is_silent`: micro-batches before the last are not reduced over ranks."""
    config = {**BASE, "zero_optimization": {"stage": stage}}
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses, number = [], 0
    for step in range(args.steps):
        count = 1 + step % 3
        for i in range(count):
            is_last = i == count - 1
            x, y = (value.to(engine.device) for value in batch(number))
            number += 1
            with nullcontext() if is_last or not is_silent else engine.no_sync():
                if not is_silent:
                    engine.set_gradient_accumulation_boundary(is_last)
                loss = engine(x, y) / count
                engine.backward(loss)
            losses.append(loss.item())
            if is_last or not is_silent:
                engine.step()
    return losses, engine.global_steps


def main():
    args = get_args()
    losses, steps = run(args, 2, is_silent=False)
    more, steps_silent = run(args, 1, is_silent=True)
    report([*losses, *more], steps=[steps, steps_silent])


if __name__ == "__main__":
    main()
