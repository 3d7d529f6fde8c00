# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint and load_checkpoint: a second engine continues where the first one stopped."""

import deepspeed
from small import BASE, build_model, get_args, report, shared_folder, train

CONFIG = {
    **BASE,
    "zero_optimization": {"stage": 2},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}},
}


def build(seed):
    model = build_model(seed=seed)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    losses = []
    if args.load is None:
        engine = build(seed=0)
        losses = train(engine, 4)
        engine.save_checkpoint(folder, client_state={"epoch": 3, "name": "small"})
    engine = build(seed=1)
    path, client_state = engine.load_checkpoint(args.load or folder)
    assert path is not None
    assert (client_state["epoch"], client_state["name"]) == (3, "small")
    after = train(engine, args.steps, start=4)
    report([*losses, *after], resumed=len(after), steps=engine.global_steps, rate=engine.get_lr()[0])


if __name__ == "__main__":
    main()
