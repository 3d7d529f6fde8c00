# SPDX-License-Identifier: Apache-2.0
"""zero_to_fp32: fp32 weights of a partitioned checkpoint, in memory, in a model and as a file."""

from pathlib import Path

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from safetensors.torch import load_file
from small import BASE, batch, build_model, get_args, report, shared_folder, sums, train

CONFIG = {**BASE, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = shared_folder(args.folder)
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = train(engine, args.steps, dtype=torch.bfloat16)
    engine.save_checkpoint(folder, tag="last")
    torch.distributed.barrier()
    weights = get_fp32_state_dict_from_zero_checkpoint(folder)
    loaded = load_state_dict_from_zero_checkpoint(build_model(seed=1), folder, tag="last")
    losses.append(loaded(*batch(99)).item())
    written = None
    if torch.distributed.get_rank() == 0:
        convert_zero_checkpoint_to_fp32_state_dict(folder, Path(folder) / "fp32", safe_serialization=True)
        written = sums(load_file(Path(folder) / "fp32" / "model.safetensors"))
    report(losses, weights=sums(weights), written=written)


if __name__ == "__main__":
    main()
