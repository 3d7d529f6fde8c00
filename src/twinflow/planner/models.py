"""Costs of a model, computed from its shape: elements of every block, FLOPs, activations. No module is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from twinflow.errors import invalid_value

# Memory traffic of a forward without its matrix products: bytes for each hidden unit, token and block. Fitted on an
# H200 to two Llama shapes of transformers (alone, they would give 372 and 240) and to the GPT of `twinflow train`.
HF_TRAFFIC: Final = 300.0
GPT_TRAFFIC: Final = 52.0
# Time to launch the kernels of a block's forward, its least time: 57 and 70 ms for 26 blocks of Llama shapes.
HF_LAUNCH_S: Final = 2.2e-3
GPT_LAUNCH_S: Final = 6e-4  # an estimate: the GPT has a third of the operations
LOSS_CHUNK: Final = 2048  # tokens whose logits the GPT of `twinflow train` computes at a time
# Widths of GPT-2 shapes in papers on offload, each with the least number of parameters.
_WIDTHS: Final = (
    (0.0, 768),
    (0.3e9, 1024),
    (0.7e9, 1600),
    (2e9, 2048),
    (3.5e9, 2304),
    (5e9, 3072),
    (9e9, 4096),
    (16e9, 8192),
    (65e9, 9216),
    (100e9, 12288),
)


@dataclass(frozen=True)
class Activations:
    """Bytes for each token of a forward, except `fixed_bytes`. Weights have 2 bytes."""

    stream_bytes: float  # input of a block, which checkpointing keeps
    block_bytes: float  # activations of a block without checkpointing
    end_bytes: float  # activations outside of the blocks
    loss_bytes: float  # all copies of the logits that the loss holds
    fixed_bytes: int = 0  # part of the loss that does not depend on the number of tokens
    chunk_tokens: int = 0  # tokens in a chunk, if the loss is computed in chunks
    chunk_bytes: float = 0.0  # bytes for each token of a chunk


@dataclass(frozen=True)
class ModelCost:
    """Costs of a model: a stack of blocks between an embedding and a head."""

    name: str
    blocks: tuple[int, ...]  # elements of each block, in forward order
    embedding_numel: int  # elements outside of the blocks whose gradients are complete last: embeddings and a tied head
    head_numel: int  # elements outside of the blocks whose gradients are complete first: final norm and head
    block_products: tuple[int, ...]  # weights of each block in matrix products
    head_products: int
    hidden: int
    attention_width: int  # number of heads times their width
    vocab_size: int
    context: int  # default number of tokens in a sequence
    activations: Activations
    traffic_bytes: float  # memory traffic of a forward for each token and block, without matrix products
    launch_s: float

    @property
    def numel(self) -> int:
        return sum(self.blocks) + self.embedding_numel + self.head_numel

    def with_layers(self, num_layers: int) -> ModelCost:
        """The same shape with another number of blocks."""
        blocks = tuple(self.blocks[i % len(self.blocks)] for i in range(num_layers))
        products = tuple(self.block_products[i % len(self.block_products)] for i in range(num_layers))
        return replace(self, blocks=blocks, block_products=products)

    def block_flops(self, tokens: int) -> list[float]:
        """Forward FLOPs for each token in each block: matrix products, and attention over sequences of `tokens`."""
        attention = 4.0 * tokens * self.attention_width
        return [2.0 * products + attention for products in self.block_products]

    def forward_flops(self, tokens: int) -> float:
        """FLOPs of a forward for each token."""
        return sum(self.block_flops(tokens)) + 2.0 * self.head_products

    def model_flops(self, tokens: int) -> float:
        """FLOPs of forward and backward for each token, without recomputation."""
        return 3.0 * self.forward_flops(tokens)


def activation_bytes(model: ModelCost, num_tokens: int, checkpointing: bool) -> int:
    """Peak memory of a micro-batch on the GPU beside weights, gradients and state.

    The activations that the blocks keep, and the larger of the loss with its logits and the backward of one block.
    """
    a = model.activations
    kept = len(model.blocks) * (a.stream_bytes if checkpointing else a.block_bytes) + a.end_bytes
    loss = num_tokens * a.loss_bytes + a.fixed_bytes + min(num_tokens, a.chunk_tokens) * a.chunk_bytes
    backward = num_tokens * a.block_bytes * (2 if checkpointing else 1)
    return int(num_tokens * kept + max(loss, backward))


def gpt_cost(
    name: str, vocab_size: int, context: int, num_layers: int, hidden: int, num_heads: int, tied: bool = True
) -> ModelCost:
    """Costs of the GPT of `twinflow train`. Tests check that they equal the arithmetic of `models/gpt.py`."""
    h, products = hidden, 12 * hidden * hidden
    head = 2 * h + (0 if tied else vocab_size * h)
    activations = Activations(
        stream_bytes=2 * h,
        block_bytes=32 * h + 4 * (4 + num_heads),
        end_bytes=2 * h + 24,
        loss_bytes=4 * h,
        fixed_bytes=vocab_size * h * 4,
        chunk_tokens=LOSS_CHUNK,
        chunk_bytes=6 * vocab_size,
    )
    return ModelCost(
        name=name,
        blocks=(products + 13 * h,) * num_layers,
        embedding_numel=(vocab_size + context) * h,
        head_numel=head,
        block_products=(products,) * num_layers,
        head_products=vocab_size * h,
        hidden=h,
        attention_width=h,
        vocab_size=vocab_size,
        context=context,
        activations=activations,
        traffic_bytes=GPT_TRAFFIC * h,
        launch_s=GPT_LAUNCH_S,
    )


def from_counts(
    name: str,
    blocks: Sequence[int],
    embedding_numel: int,
    head_numel: int,
    hidden: int,
    vocab_size: int,
    context: int = 1024,
) -> ModelCost:
    """Costs of any model from the elements of its blocks. All elements are assumed to be weights of matrix products."""
    products = tuple(blocks)
    head_products = vocab_size * hidden
    inner = max(4 * hidden, (max(blocks, default=0) - 4 * hidden * hidden) // max(1, 2 * hidden))
    return ModelCost(
        name=name,
        blocks=tuple(blocks),
        embedding_numel=embedding_numel,
        head_numel=head_numel,
        block_products=products,
        head_products=head_products,
        hidden=hidden,
        attention_width=hidden,
        vocab_size=vocab_size,
        context=context,
        activations=_hf_activations(hidden, inner, vocab_size, num_wide=2),
        traffic_bytes=HF_TRAFFIC * hidden,
        launch_s=HF_LAUNCH_S,
    )


def gpt2_like(numel: float, vocab_size: int = 50_304, context: int = 1024) -> ModelCost:
    """A GPT-2 shape with about `numel` parameters. The width is as in papers on offload, and the depth follows from
    it."""
    hidden = max((least, width) for least, width in _WIDTHS if numel >= least)[1]
    layer = 12 * hidden * hidden + 13 * hidden
    num_layers = max(1, round((numel - (vocab_size + context) * hidden) / layer))
    heads = hidden // (64 if hidden <= 1600 else 128)
    return gpt_cost(f"GPT-2 shape, {num_layers} x {hidden}", vocab_size, context, num_layers, hidden, heads)


def from_hf(config: Mapping[str, Any], name: str = "") -> ModelCost:
    """Costs of a transformers model with its language-model head, from its config.json."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        remedy = "For other models, name a function that builds the model: --model module:function."
        raise invalid_value("model_type", kind, _FAMILIES, remedy)
    try:
        return _FAMILIES[str(kind)](config, name or str(kind))
    except KeyError as error:
        key = f"without {error.args[0]!r}"
        raise invalid_value("config.json", key, f"a complete config of a {kind} model") from None


def _hf_activations(h: int, inner: int, vocab_size: int, num_wide: int) -> Activations:
    """Activations of transformers models.

    Measured with checkpointing on two Llama shapes (within 0.1%): inputs of blocks, three fp32 copies of the logits,
    four times the hidden state. The activations within a block are an estimate.
    """
    return Activations(
        stream_bytes=2 * h,
        block_bytes=24 * h + 2 * (num_wide + 1) * inner,
        end_bytes=8 * h,
        loss_bytes=12 * vocab_size,
    )


@dataclass(frozen=True)
class _Parts:
    """Numbers of a model that each family computes in its own way."""

    hidden: int
    layers: int
    inner: int  # width of the MLP
    context: int
    block: int  # elements of a block
    products: int  # elements of a block in matrix products
    embedding: int
    head: int
    attention_width: int = 0  # 0: the hidden width
    num_wide: int = 2  # activations of MLP width that a block keeps


def _hf(config: Mapping[str, Any], name: str, parts: _Parts) -> ModelCost:
    """Costs from the numbers of a family."""
    vocab_size = int(config["vocab_size"])
    return ModelCost(
        name=name,
        blocks=(parts.block,) * parts.layers,
        embedding_numel=parts.embedding,
        head_numel=parts.head,
        block_products=(parts.products,) * parts.layers,
        head_products=vocab_size * parts.hidden,
        hidden=parts.hidden,
        attention_width=parts.attention_width or parts.hidden,
        vocab_size=vocab_size,
        context=parts.context,
        activations=_hf_activations(parts.hidden, parts.inner, vocab_size, parts.num_wide),
        traffic_bytes=HF_TRAFFIC * parts.hidden,
        launch_s=HF_LAUNCH_S,
    )


def _llama(config: Mapping[str, Any], name: str) -> ModelCost:
    """Llama, Mistral and Qwen2: rotary positions, gated MLP, RMS norms."""
    h, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or h // heads
    wide, narrow = heads * width, kv_heads * width
    products = 2 * h * wide + 2 * h * narrow + 3 * h * inner
    biases = 2 * h  # the two norms
    if config["model_type"] == "qwen2":
        biases += wide + 2 * narrow
    elif config.get("attention_bias"):
        biases += wide + 2 * narrow + h
    if config.get("mlp_bias"):
        biases += 2 * inner + h
    embedding = config["vocab_size"] * h
    parts = _Parts(
        block=products + biases,
        products=products,
        embedding=embedding,
        head=h + (0 if config.get("tie_word_embeddings") else embedding),
        hidden=h,
        layers=config["num_hidden_layers"],
        inner=inner,
        attention_width=wide,
        context=min(2048, config.get("max_position_embeddings", 2048)),
        num_wide=3,
    )
    return _hf(config, name, parts)


def _opt(config: Mapping[str, Any], name: str) -> ModelCost:
    """OPT: learned positions, tied head."""
    h, inner = config["hidden_size"], config["ffn_dim"]
    narrow = config.get("word_embed_proj_dim") or h
    products = 4 * h * h + 2 * h * inner
    positions = config["max_position_embeddings"] + 2
    projections = 2 * h * narrow if narrow != h else 0
    parts = _Parts(
        block=products + 9 * h + inner,
        products=products,
        embedding=config["vocab_size"] * narrow + positions * h + projections,
        head=0 if config.get("_remove_final_layer_norm") or narrow != h else 2 * h,
        hidden=h,
        layers=config["num_hidden_layers"],
        inner=inner,
        context=min(2048, config["max_position_embeddings"]),
    )
    return _hf(config, name, parts)


def _gpt2(config: Mapping[str, Any], name: str) -> ModelCost:
    """GPT-2: learned positions, tied head."""
    h = config["n_embd"]
    inner = config.get("n_inner") or 4 * h
    products = 4 * h * h + 2 * h * inner
    parts = _Parts(
        block=products + 9 * h + inner,
        products=products,
        embedding=(config["vocab_size"] + config["n_positions"]) * h,
        head=2 * h,
        hidden=h,
        layers=config["n_layer"],
        inner=inner,
        context=config["n_positions"],
    )
    return _hf(config, name, parts)


def _gpt_neox(config: Mapping[str, Any], name: str) -> ModelCost:
    """GPT-NeoX and Pythia: rotary positions, untied head."""
    h, inner = config["hidden_size"], config["intermediate_size"]
    products = 4 * h * h + 2 * h * inner
    embedding = config["vocab_size"] * h
    parts = _Parts(
        block=products + 9 * h + inner,
        products=products,
        embedding=embedding,
        head=2 * h + (0 if config.get("tie_word_embeddings") else embedding),
        hidden=h,
        layers=config["num_hidden_layers"],
        inner=inner,
        context=min(2048, config.get("max_position_embeddings", 2048)),
    )
    return _hf(config, name, parts)


def _bert(config: Mapping[str, Any], name: str) -> ModelCost:
    """BERT with its masked-language head, which is tied except for a bias."""
    h, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    positions, types = config["max_position_embeddings"], config.get("type_vocab_size", 2)
    products = 4 * h * h + 2 * h * inner
    parts = _Parts(
        block=products + 9 * h + inner,
        products=products,
        embedding=(vocab + positions + types) * h + 2 * h,
        head=h * h + 3 * h + vocab,
        hidden=h,
        layers=config["num_hidden_layers"],
        inner=inner,
        context=min(512, positions),
    )
    return _hf(config, name, parts)


_FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any], str], ModelCost]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
}
