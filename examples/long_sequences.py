# SPDX-License-Identifier: Apache-2.0
"""A causal language model on sequences that several processes share, with tiles for MLPs, norms and loss.

python examples/long_sequences.py
twinflow launch --num_procs 2 examples/long_sequences.py --mode ring
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import twinflow
from twinflow.integrations.tiled import tile_sequence

TOKENS, STEPS = 256, 6


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards, each from another start."""
    rows = [torch.arange(start, start + TOKENS) % 64 for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["ulysses", "ring"], default="ulysses")
    args = parser.parse_args()
    world = twinflow.init_distributed().world_size
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    tile_sequence(model, tile=64)  # before the sequences are split
    config: dict[str, Any] = {
        "train_batch_size": 2,  # all processes share each sequence
        "sequence_parallel_size": world,
        "sequence_mode": args.mode,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    engine, _, loader, _ = twinflow.initialize(model=model, config=config, training_data=texts(2 * STEPS))
    assert loader is not None
    losses = []
    for batch in loader:  # this process's part of each sequence
        own = {name: value.to(engine.device) for name, value in batch.items()}
        loss = engine(**own).loss  # the mean over the tokens of all processes
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        print(f"{world} processes, {own['input_ids'].shape[1]} of {TOKENS} tokens on each")
        print("losses", *(f"{loss:.4f}" for loss in losses))
        print("the loss fell" if losses[-1] < losses[0] else "the loss did not fall")
    engine.destroy()


if __name__ == "__main__":
    main()
