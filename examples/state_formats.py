# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT with bf16 weights in each state format, and compares memory and loss.

Weights and gradients are bf16. Matrix products are computed in fp32, because few CPUs are fast in bf16.
"""

from __future__ import annotations

import torch

from twinflow.data import load_data
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.optim import HostAdamW

STEPS, BATCH_SIZE = 100, 4
CONFIG = GPTConfig(vocab_size=256, context=64, num_layers=2, hidden=64, num_heads=4)


def main() -> None:
    data = load_data("stdlib")  # the source code of Python's standard library
    print("states  bytes a parameter: weight + master + states  first loss  last loss")
    for states in ("fp32", "bf16", "int8"):
        torch.manual_seed(0)
        model = GPT(CONFIG).bfloat16()
        optimizer = HostAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), states=states)
        losses = []
        for step in range(STEPS):
            wide = {name: param.float() for name, param in model.named_parameters()}
            batch = data.batch("train", step, BATCH_SIZE, CONFIG.context)
            loss = torch.func.functional_call(model, wide, batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weight, master, kept = bytes_per_param(model, optimizer)
        size = f"{weight + master + kept:5.2f}: {weight:.2f} + {master:.2f} + {kept:.2f}"
        print(f"{states:6}  {size:43}  {losses[0]:10.3f}  {sum(losses[-10:]) / 10:9.3f}")


def bytes_per_param(model: GPT, optimizer: HostAdamW) -> tuple[float, float, float]:
    """Bytes a parameter of the weights, of the optimizer's part of the fp32 masters, and of its states with scales."""
    params = list(model.parameters())
    numel = sum(param.numel() for param in params)
    kept = [(name, value) for param in params for name, value in optimizer.state[param].items() if name != "step"]
    masters = sum(value.nbytes for name, value in kept if name.startswith("master"))
    states = sum(value.nbytes for name, value in kept if not name.startswith("master"))
    return sum(param.nbytes for param in params) / numel, masters / numel, states / numel


if __name__ == "__main__":
    main()
