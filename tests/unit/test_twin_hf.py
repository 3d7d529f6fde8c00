# SPDX-License-Identifier: Apache-2.0
"""Unmodified Hugging Face models train to plain PyTorch's losses, whether updates start in backward or in step(), with
every stream slowed down."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin_support import matrix_but

from twinflow.optim.twin import Tuning, TwinOptimizer

transformers = pytest.importorskip("transformers")

STEPS, LR, DECAY, MAX_NORM = 6, 1e-3, 0.01, 1.0
Batch = dict[str, Tensor]


def tokens(step: int, vocab: int = 64) -> Tensor:
    return torch.randint(2, vocab, (2, 8), generator=torch.Generator().manual_seed(step))


def causal(step: int) -> Batch:
    return {"input_ids": tokens(step), "labels": tokens(step)}


def masked(step: int) -> Batch:
    labels = tokens(step)
    return {"input_ids": labels.masked_fill(torch.arange(8) % 3 == 0, 1), "labels": labels}


def translation(step: int) -> Batch:
    return {"input_ids": tokens(step), "labels": tokens(step + 100)}


def images(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": tokens(step, 4)[:, 0]}


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TOKENS = {"vocab_size": 64, "max_position_embeddings": 16}
# name: model, config, its options, batches
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], Batch]]] = {
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}
        | {"word_embed_proj_dim": 32},
        causal,
    ),
    "bert": ("BertForMaskedLM", "BertConfig", {**SHAPE, **TOKENS}, masked),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        translation,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "tie_word_embeddings": True},
        causal,
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SHAPE, **TOKENS, "num_key_value_heads": 1}, causal),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**SHAPE, "image_size": 16, "patch_size": 4, "num_labels": 4},
        images,
    ),
}


def build(name: str) -> nn.Module:
    model, config, options, _ = MODELS[name]
    torch.manual_seed(0)
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
    return made


def losses(name: str, model: nn.Module, finish: Callable[[], None]) -> list[float]:
    """Losses of a few steps, then the one of a forward without dropout."""
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)  # dropout
        loss = model(**MODELS[name][3](step)).loss
        loss.backward()
        finish()
        found.append(loss.item())
    with torch.no_grad():
        found.append(model.eval()(**MODELS[name][3](0)).loss.item())
    return found


@cache
def plain_losses(name: str) -> list[float]:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)

    def finish() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return losses(name, model, finish)


@pytest.mark.parametrize(
    ("name", "early"), matrix_but([*((name, True) for name in MODELS), ("gpt2", False)], product(MODELS, (True, False)))
)
def test_it_trains_as_with_plain_pytorch(name: str, early: bool) -> None:
    model = build(name)
    optimizer = TwinOptimizer(
        model, lr=LR, weight_decay=DECAY, max_grad_norm=MAX_NORM, early=early, tuning=Tuning(bucket_numel=4096)
    )
    for stream, seconds in {"in": 0.002, "out": 0.002, "compute": 0.0005}.items():
        optimizer.runtime.device.delay(stream, seconds)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found = losses(name, model, finish)
    optimizer.close()
    assert found == pytest.approx(plain_losses(name), rel=1e-5)
