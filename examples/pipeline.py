# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed pipeline script with one changed line. The embedding and the output head share one weight.

python examples/pipeline.py
twinflow launch --num_procs 2 examples/pipeline.py --stages 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import twinflow  # instead of deepspeed
from twinflow.parallel import LayerSpec, PipelineModule, TiedLayerSpec

VOCAB, HIDDEN, TOKENS, STEPS = 64, 32, 16, 20
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,  # micro-batches that run through the pipeline in a step
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}


class Layer(nn.Module):
    """A norm, a recurrent layer and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width]
        return x + self.mix(self.norm(x))[0]


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T / HIDDEN**0.5


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batches(replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(replica)  # the first and the last stage must see the same tokens
    while True:
        start = torch.randint(0, VOCAB, (4, 1), generator=generator)
        tokens = (start + 3 * torch.arange(TOKENS + 1)) % VOCAB
        yield tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=1, help="number of ranks that share the layers")
    stages = parser.parse_args().stages
    me = twinflow.init_distributed()
    layers = [
        TiedLayerSpec("embedding", nn.Embedding, VOCAB, HIDDEN),
        *(LayerSpec(Layer, HIDDEN) for _ in range(4)),
        TiedLayerSpec("embedding", nn.Embedding, VOCAB, HIDDEN, forward_fn=logits),
    ]
    model = PipelineModule(layers, num_stages=stages, loss_fn=loss_fn)
    engine, *_ = twinflow.initialize(model=model, config=CONFIG)
    data = batches(engine.dp_rank)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]  # the mean loss of all replicas, on every rank
    valid = float(engine.eval_batch(data))
    if me.rank == 0:
        print(f"ranks {me.world_size}, stages {stages}: losses", " ".join(f"{loss:.3f}" for loss in losses[::4]))
        print(f"validation loss {valid:.3f}: {'the loss fell' if valid < losses[0] / 2 else 'the loss hardly fell'}")
    engine.destroy()


if __name__ == "__main__":
    main()
