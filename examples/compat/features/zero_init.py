# SPDX-License-Identifier: Apache-2.0
"""zero.Init: the model is partitioned while it is built."""

import deepspeed
import torch
from small import BASE, Model, get_args, report, train

CONFIG = {**BASE, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    report(train(engine, args.steps))


if __name__ == "__main__":
    main()
