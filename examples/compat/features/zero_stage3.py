# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3: ranks partition weights too."""

import deepspeed
from small import BASE, build_model, get_args, report, train

CONFIG = {**BASE, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def main():
    args = get_args()
    model = build_model()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=CONFIG)
    losses = train(engine, args.steps)
    report(losses, norm=float(engine.get_global_grad_norm()), steps=engine.global_steps)


if __name__ == "__main__":
    main()
