# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping: every step is clipped, and the norm before clipping is read."""

import deepspeed
from small import BASE, build_model, get_args, report, train

CONFIG = {**BASE, "gradient_clipping": 0.05, "zero_optimization": {"stage": 2}}


def main():
    args = get_args()
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses, norms = [], []
    for step in range(args.steps):
        losses += train(engine, 1, start=step)
        norms.append(float(engine.get_global_grad_norm()))
    report(losses, norms=norms, limit=engine.gradient_clipping())


if __name__ == "__main__":
    main()
