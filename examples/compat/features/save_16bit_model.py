# SPDX-License-Identifier: Apache-2.0
"""save_16bit_model: the weights of a partitioned model as one file of torch."""

from pathlib import Path

import deepspeed
import torch
from small import BASE, build_model, get_args, report, shared_folder, sums, train

ZERO = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
CONFIG = {**BASE, "bf16": {"enabled": True}, "zero_optimization": ZERO}


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = train(engine, args.steps, dtype=torch.bfloat16)
    engine.save_16bit_model(folder, "pytorch_model.bin")
    torch.distributed.barrier()
    weights = torch.load(Path(folder) / "pytorch_model.bin", weights_only=True)
    report(losses, weights=sums(weights), is_half=all(value.dtype == torch.bfloat16 for value in weights.values()))


if __name__ == "__main__":
    main()
