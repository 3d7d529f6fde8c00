# SPDX-License-Identifier: Apache-2.0
"""Which models of transformers `sparsify` accepts: with a dense pattern, loss and gradients are those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo_models import TRANSFORMERS, ZOO

from twinflow.attention import DenseSparsityConfig, sparsify
from twinflow.attention.huggingface import TransformersAttention, heads_of_layers, transformers_models

# Models that consist of several models, and the one that is made sparse.
PARTS = {"clip": "text_model", "siglip": "text_model", "altclip": "text_model", "llava": "model.language_model"}
PARTS |= {"paligemma": "model.language_model"}
ACCEPTED = [
    "llama",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt2",
    "gpt-neox",
    "gpt-bigcode",
    "opt",
    "olmo",
    "olmo2",
    "granite",
    "cohere",
    "cohere2",
    "stablelm",
    "starcoder2",
    "glm4",
    "nemotron",
    "smollm3",
    "helium",
    "exaone4",
    "diffllama",
    "modernbert-decoder",
    "biogpt",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "granite-moe",
    "gpt-oss",
    "deepseek-v3",
    "recurrent-gemma",
    "jamba",
    "bamba",
    "lfm2",
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "electra",
    "mobilebert",
    "esm",
    "modernbert",
    "eurobert",
    "wav2vec2",
    "hubert",
    "audio-spectrogram",
    "vit",
    "vit-mae",
    "deit",
    "beit",
    "dinov2",
    "vivit",
    "detr-yolos",
    "decision-transformer",
    "patchtst",
    "clip",
    "siglip",
    "altclip",
    "llava",
    "paligemma",
]
REFUSED = [name for name in TRANSFORMERS if name not in ACCEPTED]
QUICK = ("gpt-oss", "deepseek-v3", "beit")  # sinks, values of another width, a learned bias


def part_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(PARTS[name]) if name in PARTS else model


def make_sparse(model: nn.Module) -> None:
    (found,) = transformers_models(model)
    sparsify(model, DenseSparsityConfig(heads_of_layers(found)[0]))


def loss_and_grads(model: nn.Module, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = ZOO[name].loss(model, 0)
    loss.backward()
    grads = {key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None}
    return loss.detach(), grads


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix) for name in ACCEPTED]
)
def test_a_dense_pattern_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    attention = TransformersAttention.__call__

    def counted(self: TransformersAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append(self)
        return attention(self, *args, **kwargs)

    monkeypatch.setattr(TransformersAttention, "__call__", counted)
    model = ZOO[name].build()
    loss, grads = loss_and_grads(model, name)
    make_sparse(part_of(model, name))
    found_loss, found = loss_and_grads(model, name)
    assert calls
    torch.testing.assert_close(found_loss, loss, rtol=1e-5, atol=1e-6)
    assert found.keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for key, grad in grads.items():
        # The gradient of a bias of keys is zero but for rounding, so errors are compared with the largest gradients.
        error = float((found[key] - grad).abs().max())
        assert error <= 1e-4 * float(grad.abs().max()) + 1e-5 * largest, (key, error)


@pytest.mark.matrix
@pytest.mark.parametrize("name", REFUSED)
def test_sparsify_itself_refuses(name: str) -> None:
    model = ZOO[name].build()
    with pytest.raises(ValueError, match=r"cannot be applied|must be a whole number"):
        sparsify(model, DenseSparsityConfig(4 if name == "codegen" else 2))


def test_at_least_half_are_accepted() -> None:
    assert len(set(ACCEPTED)) >= 50
    assert set(ACCEPTED) <= set(TRANSFORMERS)
