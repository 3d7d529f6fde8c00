# SPDX-License-Identifier: Apache-2.0
"""Models with experts, for the tests of experts: transformers' fused tensors, and a module for each expert."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH = 32, 8
NUM_EXPERTS = 4
SILENT = 2  # an expert whose output counts nothing in odd steps: its gradient is zeros
LR, DECAY, MAX_NORM = 1e-2, 0.1, 0.5
EPS = 1e-4  # routers have gradients that are almost rounding errors, of which AdamW would make whole steps

_SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_SHAPE |= {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "max_position_embeddings": 16}
_SHAPE |= {"num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# Prefix of the classes of transformers, and options of the config.
FUSED: dict[str, dict[str, Any]] = {
    "Olmoe": {"num_experts": 16},
    "Qwen3Moe": {"num_experts": 16, "moe_intermediate_size": 8},
    "Mixtral": {"num_local_experts": 16},
    "DeepseekV3": {"n_routed_experts": 16, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8}
    | {"first_k_dense_replace": 1, **_LATENT, "num_key_value_heads": 2},
    "GptOss": {"num_local_experts": 16, "layer_types": ["sliding_attention", "full_attention"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


def fused(name: str, **changes: Any) -> nn.Module:
    """A causal language model of transformers, whose experts are tensors [experts, out, in]."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SHAPE | FUSED[name] | changes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).train()
    return model


class Layer(nn.Module):
    """Experts as modules. The last token of a sequence names its expert, and a router weighs the output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.Tanh(), nn.Linear(2 * hidden, hidden))
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, x: Tensor, chosen: Tensor, silent: float) -> Tensor:
        gates, y = self.router(x).softmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if bool((chosen == i).any()):  # an expert without tokens does not run
                own = chosen == i
                weight = gates[own, ..., i : i + 1] * (silent if i == SILENT else 1.0)
                y = y.index_add(0, own.nonzero()[:, 0], expert(x[own]) * weight)
        return x + y


class Modules(nn.Module):
    """A small language model with a module for each expert. A batch of two uses at most two experts of a layer."""

    def __init__(self, hidden: int = 16, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(num_layers))
        self.head = nn.Linear(hidden, VOCAB)

    def forward(self, tokens: Tensor, silent: float = 1.0) -> Tensor:
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, (tokens[:, -1] + i) % NUM_EXPERTS, silent)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, -2), tokens[:, 1:].flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {"Modules": Modules, **{name: partial(fused, name) for name in FUSED}}


def tokens_of(step: int, part: int = 0) -> Tensor:
    """The two sequences of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(3, VOCAB, (2, LENGTH), generator=generator)


def loss_of(model: Any, tokens: Tensor, step: int) -> Tensor:
    """The loss of a model, or of the model of an engine."""
    found: Tensor
    if isinstance(getattr(model, "module", model), Modules):
        found = model(tokens, 0.0 if step % 2 else 1.0)
    else:
        found = model(input_ids=tokens, labels=tokens).loss
    return found


def plain(name: str, parts: int, clips: bool, steps: int) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The weights after training with plain torch, and how many missing gradients and gradients of zeros it had."""
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    counts = {"missing": 0, "zeros": 0}
    for step in range(steps):
        for part in range(parts):
            (loss_of(model, tokens_of(step, part), step) / parts).backward()
        for key, param in model.named_parameters():
            if "experts." in key:
                experts = param.grad if param.grad is None or param.grad.dim() == 3 else param.grad[None]
                counts["missing"] += experts is None
                counts["zeros"] += 0 if experts is None else sum(not bool(one.any()) for one in experts)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}, counts


def check(found: Any, truth: dict[str, Tensor]) -> None:
    """Compares all weights with those of plain torch."""
    assert found.keys() == truth.keys()
    for key, value in truth.items():
        torch.testing.assert_close(torch.as_tensor(found[key]), value, rtol=0, atol=1e-5, msg=key)
