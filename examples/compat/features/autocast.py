# SPDX-License-Identifier: Apache-2.0
"""torch_autocast by config: fp32 weights, and matrix products in bf16."""

import deepspeed
import torch
from small import BASE, build_model, get_args, report, train


def main():
    args = get_args()
    deepspeed.init_distributed()
    losses, found = [], []
    # With ZeRO and several ranks DeepSpeed also sends gradients in bf16, whatever communication_data_type is.
    for stage in (0, 1, 2, 3) if torch.distributed.get_world_size() == 1 else (0,):
        config = {
            **BASE,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        }
        model = build_model()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        found.append([engine.torch_autocast_enabled(), str(engine.torch_autocast_dtype())])
        losses += train(engine, args.steps)
    report(losses, found=found)


if __name__ == "__main__":
    main()
