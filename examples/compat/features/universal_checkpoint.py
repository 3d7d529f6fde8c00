# SPDX-License-Identifier: Apache-2.0
"""A universal checkpoint: converted once, then loaded into another ZeRO stage."""

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert
from small import BASE, build_model, get_args, report, shared_folder, train


def build(stage, seed, **more):
    model = build_model(seed=seed)
    config = {**BASE, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = Path(shared_folder(args.folder))
    engine = build(1, seed=0)
    losses = train(engine, 4, dtype=torch.bfloat16)
    engine.save_checkpoint(str(folder), tag="step4")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        options |= {"inject_missing_state": True, "input_folder": str(folder / "step4")}
        convert(argparse.Namespace(**options, output_folder=str(folder / "step4_universal")))
        (folder / "latest").write_text("step4_universal")
        (folder / "latest_universal").write_text("step4_universal")
    torch.distributed.barrier()
    other = build(2, seed=1, checkpoint={"load_universal": True})
    other.load_checkpoint(str(folder), tag="step4_universal")
    losses += train(other, args.steps, start=4, dtype=torch.bfloat16)
    report(losses, steps=other.global_steps)


if __name__ == "__main__":
    main()
