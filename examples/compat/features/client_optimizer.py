# SPDX-License-Identifier: Apache-2.0
"""An optimizer that the script builds: as an object, and as a function that gets the parameters."""

import deepspeed
import torch
from small import BASE, build_model, get_args, report, train

CONFIG = {key: value for key, value in BASE.items() if key != "optimizer"}


def build_optimizer(params):
    return torch.optim.SGD(params, lr=2e-2, momentum=0.9, nesterov=True)


def main():
    args = get_args()
    model = build_model()
    own = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=own, config=CONFIG)
    losses = train(engine, args.steps)
    rates = [group["lr"] for group in optimizer.param_groups]
    model = build_model(seed=1)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=CONFIG,
    )
    losses += train(engine, args.steps)
    report(losses, rates=[*rates, *(group["lr"] for group in optimizer.param_groups)])


if __name__ == "__main__":
    main()
