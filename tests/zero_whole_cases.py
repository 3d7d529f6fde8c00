"""What ranks do in the tests of whole weights under ZeRO-3: models of several kinds beside the same models whole."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import twinflow
from twinflow.optim.whole import whole_weights

SYMBOLS, WIDTH = 13, 6


class Plain(nn.Module):
    """Layers of odd sizes, one of them frozen, a buffer, and a weight outside of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers[1].requires_grad_(False)
        self.register_buffer("shift", torch.arange(WIDTH) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        hidden = (hidden + self.shift) * self.scale
        return hidden @ self.embed.weight.T  # a tied head


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=SYMBOLS, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    )


def _llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=SYMBOLS, tie_word_embeddings=tied, bos_token_id=0, **sizes))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=SYMBOLS, max_position_embeddings=16, **sizes))


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made = {"plain": Plain, "gpt2": _gpt2, "llama": _llama, "llama-tied": lambda: _llama(True), "bert": _bert}[kind]()
    return made.eval()  # without dropout, so that one process and several compute the same


def config(stage: int, place: str, world: int, **more: Any) -> dict[str, Any]:
    """`place`: "device", or "host" for weights on the host too."""
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if place == "host":
        zero["offload_param"] = {"device": "cpu"}
    # A large eps, because Adam would amplify the rounding errors of gradients that are zero (biases of keys).
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}
    return {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "optimizer": optimizer,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        **more,
    }


def tokens_of(step: int, rank: int, world: int) -> Tensor:
    tokens = torch.randint(0, SYMBOLS, (12, 5), generator=torch.Generator().manual_seed(100 + step))
    return tokens.chunk(world)[rank]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    found = model(tokens)
    logits = found if isinstance(found, Tensor) else found.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(engine: Any, steps: range, rank: int, world: int) -> None:
    for step in steps:
        engine.backward(loss_of(engine, tokens_of(step, rank, world)))
        engine.step()


def engine_of(kind: str, stage: int, place: str, world: int, **more: Any) -> Any:
    return twinflow.initialize(model=make(kind), config=config(stage, place, world, **more))[0]


def sums(state: dict[str, Tensor]) -> dict[str, list[float]]:
    """Values of a state dict for a comparison between processes."""
    return {name: value.detach().double().flatten().tolist() for name, value in state.items()}


def weights(rank: int, world: int, kind: str, stage: int, place: str) -> Any:
    """The whole weights after two steps, as `whole_weights` yields them, and whether tied ones are one tensor."""
    engine = engine_of(kind, stage, place, world)
    before = copy.deepcopy(dict(whole_weights(engine.optimizer)))
    train(engine, range(2), rank, world)
    state = dict(whole_weights(engine.optimizer))
    again = []
    for name, _ in whole_weights(engine.optimizer):  # rank 0 stops early
        again.append(name)
        break
    train(engine, range(2, 3), rank, world)
    found = {
        "before": sums(before),
        "after": sums(state),
        "num": len({value.data_ptr() for value in state.values()}),
        "again": len(again),
        "last": sums(dict(whole_weights(engine.optimizer))),
    }
    engine.destroy()
    return found
