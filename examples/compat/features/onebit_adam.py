# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam by config: Adam until freeze_step, then momenta with one bit for each element."""

import deepspeed
from small import BASE, build_model, get_args, report, train

PARAMS = {"lr": 5e-3, "betas": [0.9, 0.99], "freeze_step": 8, "comm_backend_name": "nccl", "cuda_aware": False}
CONFIG = {**BASE, "gradient_clipping": 0.0, "optimizer": {"type": "OneBitAdam", "params": PARAMS}}


def main():
    args = get_args()
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = train(engine, 8)
    compressed = train(engine, args.steps, start=8)
    report(losses, near=sum(compressed) / len(compressed))


if __name__ == "__main__":
    main()
