# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam by config: the second moment is updated ever more rarely, and later ranks exchange ever more rarely too."""

import deepspeed
from small import BASE, build_model, get_args, report, train

PARAMS = {
    "lr": 5e-3,
    "betas": [0.9, 0.99],
    "var_freeze_step": 12,
    "var_update_scaler": 8,
    "local_step_scaler": 4,
    "local_step_clipper": 2,
    "cuda_aware": False,
    "comm_backend_name": "nccl",
}
CONFIG = {**BASE, "gradient_clipping": 0.0, "optimizer": {"type": "ZeroOneAdam", "params": PARAMS}}


def main():
    args = get_args()
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = train(engine, 8)
    compressed = train(engine, args.steps, start=8)
    report(losses, near=sum(compressed) / len(compressed))


if __name__ == "__main__":
    main()
