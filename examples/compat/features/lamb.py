# SPDX-License-Identifier: Apache-2.0
"""LAMB by config: each parameter's step is scaled by the ratio of its norm to the norm of its update."""

import deepspeed
from small import BASE, build_model, get_args, report, train

PARAMS = {"lr": 1e-2, "weight_decay": 0.01, "max_coeff": 0.3, "min_coeff": 0.01}
CONFIG = {**BASE, "gradient_clipping": 0.0, "optimizer": {"type": "Lamb", "params": PARAMS}}


def main():
    args = get_args()
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    report(train(engine, args.steps))


if __name__ == "__main__":
    main()
