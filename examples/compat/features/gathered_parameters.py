# SPDX-License-Identifier: Apache-2.0
"""zero.GatheredParameters: whole weights of a partitioned model, to initialise them and to read them."""

import deepspeed
import torch
from small import BASE, Model, get_args, report, train
from torch import nn

CONFIG = {**BASE, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    with deepspeed.zero.GatheredParameters(model.last.weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            nn.init.constant_(model.last.weight, 0.1)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = train(engine, args.steps)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=None):
        total = sum(float(param.detach().abs().sum()) for param in engine.module.parameters())
    report(losses, total=total)


if __name__ == "__main__":
    main()
