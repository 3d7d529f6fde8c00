# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small trained GPT on other text with 1-bit Adam, which is made for slow networks between ranks.

python examples/onebit_finetune.py                                       # one process, which uses plain AdamW
twinflow launch --num_procs 4 examples/onebit_finetune.py --steps 600    # four ranks, which send one bit a momentum
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import twinflow
from twinflow.data import load_data
from twinflow.models.gpt import GPT, GPTConfig

SHAPE = GPTConfig(vocab_size=256, context=48, num_layers=2, hidden=48, num_heads=2)
PRETRAIN_STEPS, MICRO_BATCH, NUM_BYTES = 60, 3, 3_000_000
OPTIMIZER: dict[str, Any] = {
    "type": "OneBitAdam",
    # The switch to compression comes when Adam's second moment hardly changes. `freeze_step` would set the step.
    "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.0},
}


def texts() -> tuple[Tensor, Tensor]:
    """Two parts of the source code of Python's standard library, as bytes: for pretraining and for fine-tuning."""
    tokens = torch.as_tensor(load_data("stdlib").tokens[:NUM_BYTES].astype("int64"))
    return tokens[: NUM_BYTES // 2], tokens[NUM_BYTES // 2 :]


def draw(text: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, len(text) - SHAPE.context - 1, (number,), generator=generator)
    rows = torch.stack([text[start : start + SHAPE.context + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def pretrained(text: Tensor) -> GPT:
    """Every rank trains the same model from the same seed."""
    torch.manual_seed(0)
    model, generator = GPT(SHAPE), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(PRETRAIN_STEPS):
        model(*draw(text, 16, generator)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def validate(model: Any, text: Tensor, device: torch.device) -> float:
    batch = draw(text[-100_000:], 64, torch.Generator().manual_seed(7))
    return float(model(*(part.to(device) for part in batch)).loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    me = twinflow.init_distributed()
    text, other = texts()
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": OPTIMIZER,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = twinflow.initialize(model=pretrained(text), config=config)
    first = validate(engine, other, engine.device)
    generator, switched = torch.Generator().manual_seed(1 + me.rank), None
    for step in range(1, steps + 1):
        batch = (part.to(engine.device) for part in draw(other[:-100_000], MICRO_BATCH, generator))
        engine.backward(engine(*batch).loss)
        engine.step()
        if switched is None and engine.optimizer.is_compressed:
            switched = step
    last = validate(engine, other, engine.device)
    if me.rank == 0:
        how = "without compression" if switched is None else f"in one bit from step {switched} on"
        print(f"ranks {me.world_size}, {steps} steps, {how}: validation loss {first:.3f} to {last:.3f}")
        print("the fine-tuned model is better" if last < first else "the fine-tuned model is not better")
    engine.destroy()


if __name__ == "__main__":
    main()
