"""The split of a GPT into parts of a pipeline: embeddings, blocks, and norm and head, which compute the loss."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinflow.errors import invalid_value
from twinflow.parallel.specs import Part

if TYPE_CHECKING:
    from twinflow.models.gpt import GPT


def gpt_parts(model: GPT) -> list[Part]:
    """The parts of a GPT, in the order of its forward."""
    first: dict[str, nn.Module] = {
        "token_embedding": model.token_embedding,
        "position_embedding": model.position_embedding,
        "dropout": model.dropout,
    }
    run = _run_again if model.config.checkpoint_activations else _run
    return [
        Part(first, partial(_embed, model.token_embedding, model.position_embedding, model.dropout)),
        *(Part({f"blocks.{i}": block}, partial(run, block), is_block=True) for i, block in enumerate(model.blocks)),
        Part({"norm": model.norm, "head": model.head}, partial(_finish, model.norm, model.head), is_loss=True),
    ]


def _embed(tokens: nn.Module, positions: nn.Embedding, dropout: nn.Module, ids: Tensor) -> Any:
    num_tokens = ids.shape[1]
    if num_tokens > positions.num_embeddings:
        allowed = f"at most the model's context, which is {positions.num_embeddings}"
        raise invalid_value("length of tokens", num_tokens, allowed, "Shorten the input or build a longer model.")
    return dropout(tokens(ids) + positions(torch.arange(num_tokens, device=ids.device)))


def _run(block: nn.Module, x: Tensor) -> Any:
    return block(x)


def _run_again(block: nn.Module, x: Tensor) -> Any:
    """Run a block with activation checkpointing, as GPTConfig.checkpoint_activations requests."""
    if block.training and torch.is_grad_enabled():
        return checkpoint(block, x, use_reentrant=False)
    return block(x)


def _finish(norm: nn.Module, head: nn.Module, x: Tensor, targets: Tensor | None) -> Any:
    return head(norm(x)) if targets is None else head(norm(x), targets)
