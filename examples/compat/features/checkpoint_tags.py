# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with tags: one of several, its weights alone, without optimizer state, and a missing one."""

import deepspeed
from small import BASE, build_model, get_args, report, shared_folder, train

CONFIG = {**BASE, "zero_optimization": {"stage": 1}, "checkpoint": {"tag_validation": "WARN"}}


def build(seed):
    model = build_model(seed=seed)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    engine = build(seed=0)
    losses = []
    for part in range(3):
        losses += train(engine, 2, start=2 * part)
        engine.save_checkpoint(folder, tag=f"part{part}", client_state={"part": part}, save_latest=part < 2)
    found = [engine.load_checkpoint(folder)[1]["part"]]
    losses += train(engine, 2, start=20)
    found.append(engine.load_checkpoint(folder, tag="part0")[1]["part"])
    losses += train(engine, 2, start=20)
    other = build(seed=1)
    other.load_checkpoint(folder, tag="part2", load_module_only=True)
    losses += train(other, args.steps, start=30)
    other = build(seed=2)
    other.load_checkpoint(folder, tag="part1", load_optimizer_states=False, load_lr_scheduler_states=False)
    losses += train(other, args.steps, start=30)
    missing, _ = other.load_checkpoint(shared_folder(None))
    report(losses, found=found, missing=missing)


if __name__ == "__main__":
    main()
