# SPDX-License-Identifier: Apache-2.0
"""bf16 weights with fp32 masters, with ZeRO stages 1 and 3 and with the state on the host."""

import deepspeed
import torch
from small import BASE, build_model, get_args, report, train

ZERO = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def main():
    args = get_args()
    losses = []
    for zero in ({"stage": 1}, ZERO, {"stage": 3}):
        config = {**BASE, "bf16": {"enabled": True}, "zero_optimization": zero}
        model = build_model()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        assert engine.bfloat16_enabled()
        losses += train(engine, args.steps, dtype=torch.bfloat16)
    report(losses)


if __name__ == "__main__":
    main()
