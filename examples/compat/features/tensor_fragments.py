# SPDX-License-Identifier: Apache-2.0
"""safe_get_full_* and safe_set_full_*: masters, optimizer state and gradients of a partitioned model."""

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from small import BASE, batch, build_model, get_args, report, train

CONFIG = {**BASE, "zero_optimization": {"stage": 3}}


def main():
    args = get_args()
    engine = deepspeed.initialize(model=build_model(), config=CONFIG)[0]
    losses = train(engine, 2)
    x, y = (value.to(engine.device) for value in batch(2))
    loss = engine(x, y)
    engine.backward(loss)
    weight = engine.module.blocks[0].linear.weight
    found = {"gradient": float(safe_get_full_grad(weight).norm())}
    master = safe_get_full_fp32_param(weight)
    found["master"] = float(master.norm())
    for key in ("exp_avg", "exp_avg_sq"):
        state = safe_get_full_optimizer_state(weight, key)
        found[key] = float(state.norm())
        safe_set_full_optimizer_state(weight, 0.5 * state, key)
    safe_set_full_fp32_param(weight, torch.full_like(master, 0.01))
    engine.step()
    losses.append(loss.item())
    losses += train(engine, args.steps - 3, start=3)
    report(losses, **found)


if __name__ == "__main__":
    main()
