# SPDX-License-Identifier: Apache-2.0
"""fp16 with a static loss scale, and with a dynamic one that begins too high."""

import deepspeed
import torch
from small import BASE, build_model, get_args, report, train

PRECISIONS = (
    {"enabled": True, "loss_scale": 128},
    {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 4, "hysteresis": 1},
)


def main():
    args = get_args()
    losses, scales, steps = [], [], []
    for precision in PRECISIONS:
        config = {**BASE, "fp16": precision, "zero_optimization": {"stage": 2}}
        model = build_model()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        for step in range(2 * args.steps):
            losses += train(engine, 1, start=step, dtype=torch.float16)
            scales.append(float(engine.optimizer.cur_scale))
        steps += [engine.global_steps, engine.skipped_steps]
    report(losses, scales=scales, steps=steps)


if __name__ == "__main__":
    main()
