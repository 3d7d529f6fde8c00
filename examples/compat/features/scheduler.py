# SPDX-License-Identifier: Apache-2.0
"""Schedules of the config: warm-up with linear decay, with cosine decay, and one cycle."""

import deepspeed
from small import BASE, build_model, get_args, report, train

SCHEDULES = (
    {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2, "total_num_steps": 8}},
    {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 8}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}},
)


def main():
    args = get_args()
    losses, rates = [], []
    for section in SCHEDULES:
        model = build_model()
        config = {**BASE, "scheduler": section, "zero_optimization": {"stage": 1}}
        engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(args.steps):
            losses += train(engine, 1, start=step)
            rates += engine.get_lr()
        assert scheduler is engine.lr_scheduler
    report(losses, rates=rates)


if __name__ == "__main__":
    main()
