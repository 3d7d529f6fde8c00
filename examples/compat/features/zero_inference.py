# SPDX-License-Identifier: Apache-2.0
"""ZeRO-Inference: weights on the host, no optimizer, forward only."""

import deepspeed
import torch
from small import batch, build_model, get_args, report

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
}


def main():
    args = get_args()
    engine = deepspeed.initialize(model=build_model(), config=CONFIG)[0]
    engine.module.eval()
    losses = []
    with torch.no_grad():
        for step in range(args.steps):
            x, y = (value.to(engine.device) for value in batch(step))
            losses.append(engine(x, y).item())
    report(losses)


if __name__ == "__main__":
    main()
