# SPDX-License-Identifier: Apache-2.0
"""A schedule of torch: as an object that the engine steps, and as a function that gets the optimizer."""

import deepspeed
import torch
from small import BASE, build_model, get_args, report, train

CONFIG = {key: value for key, value in BASE.items() if key != "optimizer"}


def decay(step):
    return 0.9**step


def main():
    args = get_args()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG
    )
    losses = train(engine, args.steps)
    rates = list(scheduler.get_last_lr())
    model = build_model(seed=1)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        config={**BASE, "zero_optimization": {"stage": 2}},
    )
    losses += train(engine, args.steps)
    report(losses, rates=[*rates, *engine.get_lr()])


if __name__ == "__main__":
    main()
