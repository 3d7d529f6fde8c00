# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens that the last token of a sparse GPT sees, and trains a sparse GPT with a pattern from the config.

python examples/sparse_attention.py
"""

from __future__ import annotations

from typing import Any

import torch

import twinflow
from twinflow.attention import BigBirdSparsityConfig, LocalSlidingWindowSparsityConfig, SparsityConfig, sparsify
from twinflow.data import load_data
from twinflow.models.gpt import GPT, GPTConfig

HEADS, STEPS, BATCH_SIZE = 4, 25, 4
CONFIG = GPTConfig(vocab_size=256, context=128, num_layers=1, hidden=64, num_heads=HEADS)
PATTERNS: dict[str, SparsityConfig] = {
    "window": LocalSlidingWindowSparsityConfig(HEADS, 16),
    "window, first block and a random block": BigBirdSparsityConfig(HEADS, 16, attention="unidirectional"),
}
ENGINE: dict[str, Any] = {
    "train_batch_size": BATCH_SIZE,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "sparse_attention": {"mode": "bigbird", "num_random_blocks": 1, "attention": "unidirectional"},
}


def seen_by_the_last_token(pattern: SparsityConfig) -> int:
    """The number of tokens that influence the logits of the last token, which is shown by their gradients."""
    torch.manual_seed(0)
    model = sparsify(GPT(CONFIG), pattern)
    embedded: list[torch.Tensor] = []
    model.token_embedding.register_forward_hook(lambda module, args, out: embedded.append(out))
    logits = model(torch.randint(256, (1, CONFIG.context))).logits
    (grad,) = torch.autograd.grad(logits[0, -1].square().sum(), embedded[0])
    return int((grad[0] != 0).any(-1).sum())


def train() -> list[float]:
    """Trains on the source code of Python's standard library and returns the losses."""
    data = load_data("stdlib")
    torch.manual_seed(0)
    engine, *_ = twinflow.initialize(model=GPT(CONFIG), config=ENGINE)
    losses = []
    for step in range(STEPS):
        tokens, targets = (part.to(engine.device) for part in data.batch("train", step, BATCH_SIZE, CONFIG.context))
        loss = engine(tokens, targets).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def main() -> None:
    for name, pattern in PATTERNS.items():
        kept = pattern.layout(CONFIG.context).density
        seen = seen_by_the_last_token(pattern)
        print(f"{name}: {kept:.0%} of the scores are computed, and the last token sees {seen} tokens")
    losses = train()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {STEPS} steps")
    assert losses[-1] < losses[0] - 1.0
    print("the sparse model learns")


if __name__ == "__main__":
    main()
