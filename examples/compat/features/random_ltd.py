# SPDX-License-Identifier: Apache-2.0
"""Random-LTD by config: layers skip tokens, ever fewer of them."""

import deepspeed
from small import BASE, build_model, get_args, report, train

SCHEDULE = {"min_value": 4, "max_value": 8, "schedule_type": "fixed_linear"}
SCHEDULE |= {"schedule_config": {"require_steps": 4, "seq_per_step": 4}}
RANDOM_LTD = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [1],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": SCHEDULE,
    "global_batch_size": 4,
}
ROUTING = {"enabled": True, "random_ltd": RANDOM_LTD}
CONFIG = {**BASE, "data_efficiency": {"enabled": True, "seed": 1, "data_routing": ROUTING}}


def main():
    args = get_args()
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    report(train(engine, args.steps))


if __name__ == "__main__":
    main()
