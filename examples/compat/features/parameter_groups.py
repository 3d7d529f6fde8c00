# SPDX-License-Identifier: Apache-2.0
"""DeepSpeedCPUAdam with two parameter groups, one of them without weight decay, and a frozen layer."""

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from small import BASE, build_model, get_args, report, train

ZERO = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
CONFIG = {**{key: value for key, value in BASE.items() if key != "optimizer"}, "zero_optimization": ZERO}


def main():
    args = get_args()
    model = build_model()
    model.first.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    optimizer = DeepSpeedCPUAdam(groups, lr=1e-2, betas=(0.9, 0.95))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    losses = train(engine, args.steps)
    report(losses, rates=[group["lr"] for group in optimizer.param_groups], frozen=float(model.first.weight.sum()))


if __name__ == "__main__":
    main()
