# SPDX-License-Identifier: Apache-2.0
"""Steps with gradients that are not finite, in bf16: they are skipped on all ranks, with their schedule."""

import math

import deepspeed
import torch
from small import BASE, batch, build_model, get_args, report

CONFIG = {
    **BASE,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}},
}


def main():
    args = get_args()
    losses, figures = [], []
    for stage in (1, 2):
        model = build_model()
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        for step in range(args.steps):
            x, y = (value.to(engine.device) for value in batch(step, dtype=torch.bfloat16))
            loss = engine(x, y)
            is_bad = step in (2, 3, 5) and engine.global_rank == 0  # on one rank only
            engine.backward(loss * (math.inf if is_bad else 1.0))
            engine.step()
            losses.append(loss.item())
            figures += [engine.skipped_steps, engine.global_steps, bool(engine.was_step_applied()), engine.get_lr()[0]]
    report(losses, figures=figures)


if __name__ == "__main__":
    main()
