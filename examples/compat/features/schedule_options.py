# SPDX-License-Identifier: Apache-2.0
"""More schedules: a range test, one cycle with stairs and momenta, warm-up by logarithm, and their checkpoints."""

import deepspeed
from small import BASE, build_model, get_args, report, shared_folder, train

SCHEDULES = (
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2}},
    {
        "type": "LRRangeTest",
        "params": {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 3,
            "lr_range_test_step_rate": 2.0,
            "lr_range_test_staircase": True,
        },
    },
    {
        "type": "OneCycle",
        "params": {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": 1e-2,
            "decay_lr_rate": 0.1,
            "cycle_first_step_size": 3,
            "cycle_first_stair_count": 2,
            "cycle_second_step_size": 2,
            "decay_step_size": 1,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.95,
            "decay_mom_rate": 0.01,
        },
    },
    {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-2, "warmup_num_steps": 5}},
    {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": 2, "total_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
    },
)


def build(section, seed):
    model = build_model(seed=seed)
    groups = [
        {"params": model.first.parameters(), "lr": 5e-3},
        {"params": [*model.blocks.parameters(), *model.last.parameters()], "weight_decay": 0.0},
    ]
    config = {**BASE, "scheduler": section, "zero_optimization": {"stage": 2}}
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    losses, rates, momenta = [], [], []
    for number, section in enumerate(SCHEDULES):
        engine, _, _, scheduler = build(section, seed=0)
        for step in range(args.steps):
            if step == 5:
                engine.save_checkpoint(folder, tag=f"schedule{number}")
                engine, _, _, scheduler = build(section, seed=1)
                engine.load_checkpoint(folder, tag=f"schedule{number}")
            losses += train(engine, 1, start=step)
            rates.append([*engine.get_lr(), *scheduler.get_last_lr()])
            momenta.append([list(pair) for pair in engine.get_mom()])
    report(losses, rates=rates, momenta=momenta)


if __name__ == "__main__":
    main()
