# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer with the usual calls of a DeepSpeed script.

In this folder, with twinflow:  python -m twinflow.compat transformer.py --deepspeed_config transformer.json
and with DeepSpeed:             deepspeed transformer.py --deepspeed_config transformer.json
"""

import argparse
import json
import tempfile

import deepspeed
import torch
from torch import nn


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        length = x.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf"), device=x.device), diagonal=1)
        h = self.first(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """A language model whose forward returns the mean loss of predicting each next token."""

    def __init__(self, vocabulary=64, width=48, heads=4, layers=3, length=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def batches(seed, size, length=32, vocabulary=64):
    """Batches of sequences in which each token depends on the token before it and on some noise."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(vocabulary, (size, 1), generator=draw)
        for _ in range(length - 1):
            noise = torch.randint(3, (size, 1), generator=draw)
            tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 7 + noise) % vocabulary], dim=1)
        yield tokens


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=30)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Transformer()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data = batches(torch.distributed.get_rank(), engine.train_micro_batch_size_per_gpu())
    losses, share = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        while engine.global_steps < args.steps:
            loss = engine(next(data).to(engine.device))
            engine.backward(loss)
            share += loss.item() / engine.gradient_accumulation_steps()
            if engine.is_gradient_accumulation_boundary():
                losses, share = [*losses, share], 0.0
            engine.step()
        norm = float(engine.get_global_grad_norm())
        if engine.world_size == 1:
            engine.save_checkpoint(folder, tag="last", client_state={"steps": engine.global_steps})
            path, client_state = engine.load_checkpoint(folder)
            assert path is not None
            assert client_state["steps"] == args.steps
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"losses": losses, "lr": engine.get_lr(), "norm": norm}))


if __name__ == "__main__":
    main()
