# SPDX-License-Identifier: Apache-2.0
"""Options of Adam in the config: L2 regularisation instead of decoupled decay, and no bias correction."""

import deepspeed
from small import BASE, build_model, get_args, report, train


def run(args, **options):
    section = {"type": "Adam", "params": {"lr": 2e-3, "eps": 1e-6, "weight_decay": 0.1, **options}}
    config = {**BASE, "optimizer": section, "zero_optimization": {"stage": 1}}
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return train(engine, args.steps)


def main():
    args = get_args()
    losses = run(args, adam_w_mode=False)
    losses += run(args, adam_w_mode=True, bias_correction=False)
    losses += run(args, torch_adam=True)
    report(losses)


if __name__ == "__main__":
    main()
