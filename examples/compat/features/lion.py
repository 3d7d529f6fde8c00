# SPDX-License-Identifier: Apache-2.0
"""Lion and Adagrad by config, with the state on the host."""

import deepspeed
from small import BASE, build_model, get_args, report, train


def run(args, name, **options):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {**BASE, "optimizer": {"type": name, "params": options}, "zero_optimization": zero}
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return train(engine, args.steps)


def main():
    args = get_args()
    losses = run(args, "Lion", lr=2e-3, betas=[0.9, 0.99], weight_decay=0.1)
    losses += run(args, "Adagrad", lr=5e-2, weight_decay=0.01)
    report(losses)


if __name__ == "__main__":
    main()
