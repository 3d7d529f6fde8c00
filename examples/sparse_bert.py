# SPDX-License-Identifier: Apache-2.0
"""Masked language modelling with Hugging Face's BERT. One call (`sparsify`) makes its attention sparse.

python examples/sparse_bert.py                             # a small model, on any machine
python examples/sparse_bert.py --size base --tokens 16384  # BERT-base, on a GPU
python examples/sparse_bert.py --size large --tokens 8192
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import twinflow
from twinflow.attention import BigBirdSparsityConfig, sparsify
from twinflow.data import load_data

MASK = 256  # the token for hidden bytes; tokens 0 to 255 are bytes
SIZES: dict[str, dict[str, int]] = {
    "small": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
}


def build(size: str, tokens: int, block: int) -> BertForMaskedLM:
    torch.manual_seed(0)
    # Most models for long sequences are trained without dropout of attention probabilities. It would work too.
    shape = BertConfig(
        vocab_size=MASK + 1, max_position_embeddings=tokens, attention_probs_dropout_prob=0.0, **SIZES[size]
    )
    pattern = BigBirdSparsityConfig(shape.num_attention_heads, block)
    print(f"{pattern.layout(tokens).density:.1%} of the scores of {tokens:,} tokens are computed")
    return sparsify(BertForMaskedLM(shape), pattern)


def masked(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replaces 15% of the tokens by MASK. The labels are -100, which the loss ignores, for all other tokens."""
    is_hidden = torch.rand(tokens.shape, generator=generator) < 0.15
    return tokens.masked_fill(is_hidden, MASK), tokens.masked_fill(~is_hidden, -100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--tokens", type=int, default=256, help="length of a sequence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2)
    args = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    config: dict[str, Any] = {
        "train_batch_size": args.batch_size,
        "bf16": {"enabled": is_cuda},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3 if args.size == "small" else 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    model = build(args.size, args.tokens, 64 if is_cuda else 16)
    if args.size != "small":
        model.gradient_checkpointing_enable()
    data, generator = load_data("stdlib"), torch.Generator().manual_seed(0)
    engine, *_ = twinflow.initialize(model=model, config=config)
    losses = []
    for step in range(args.steps):
        tokens, _ = data.batch("train", step, args.batch_size, args.tokens)
        inputs, labels = (part.to(engine.device) for part in masked(tokens, generator))
        loss = engine(input_ids=inputs, labels=labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    print("the loss fell" if losses[-1] < losses[0] - 0.5 else "the loss hardly fell")
    engine.destroy()


if __name__ == "__main__":
    main()
