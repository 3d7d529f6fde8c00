"""zero.GatheredParameters: read and write whole weights of a partitioned model."""

import deepspeed
import torch
from small import BASE, build_model, get_args, report, train

CONFIG = {**BASE, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def main():
    args = get_args()
    engine = deepspeed.initialize(model=build_model(), config=CONFIG)[0]
    losses = train(engine, 2)
    weight = engine.module.last.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            with torch.no_grad():
                weight.mul_(0.5)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        total = sum(float(param.detach().abs().sum()) for param in engine.module.parameters())
    losses += train(engine, args.steps - 2, start=2)
    report(losses, total=total)


if __name__ == "__main__":
    main()
