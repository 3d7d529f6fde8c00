# SPDX-License-Identifier: Apache-2.0
"""Options of the gradients: norms in all stages, prescaling, a divisor, the dtype of sums and of messages."""

import deepspeed
import torch
from small import BASE, build_model, get_args, report, train

CONFIGS = (
    {"gradient_clipping": 0.5, "prescale_gradients": True, "gradient_predivide_factor": 2.0},
    {"zero_optimization": {"stage": 1, "reduce_scatter": False}, "gradient_clipping": 0.2},
    {"zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": False, "reduce_bucket_size": 100}},
    {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "communication_data_type": "fp32"},
    {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20, "sub_group_size": 200}},
    {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_accumulation_steps": 2,
    },
)


def main():
    args = get_args()
    losses, norms = [], []
    for more in CONFIGS:
        model = build_model()
        config = {**BASE, **more}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        dtype = torch.bfloat16 if "bf16" in more else torch.float32
        for step in range(args.steps):
            losses += train(engine, 1, start=step, dtype=dtype)
            if engine.zero_optimization() and dtype == torch.float32:
                norms.append(float(engine.get_global_grad_norm()))
    report(losses, norms=norms)


if __name__ == "__main__":
    main()
