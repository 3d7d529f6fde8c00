# SPDX-License-Identifier: Apache-2.0
"""Costs of a model, computed from its shape: elements of every block, FLOPs, activations. No module is built."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from twinflow.errors import invalid_value
from twinflow.planner.formats import Activations, gpt_activations, hf_activations

# Memory traffic of a forward without its matrix products: bytes for each hidden unit, token and block. The values are
# fitted on an H200. HF_TRAFFIC fits two Llama shapes of transformers, which would give 372 and 240 separately.
# GPT_TRAFFIC fits the GPT of `twinflow train`.
HF_TRAFFIC: Final = 300.0
CLASSIC_TRAFFIC: Final = 225.0  # as in steps of GPT-2 350M; forward and backward alone of OPT-13B would give 94
GPT_TRAFFIC: Final = 52.0
# The grouped products of experts in transformers take longer than their memory traffic: tokens are sorted, gathered,
# weighed and summed. Forward and backward alone on an H200 would give 2.82 for OLMoE and 2.72 for Qwen3-30B-A3B.
EXPERT_TRAFFIC: Final = 2.77
# Time to launch the kernels of a block's forward, which is the shortest time of a block. It depends on the CPU: Qwen2.5
# 0.5B gives 1.4 to 2.2 ms in five runs, and OPT-13B 1.0 to 1.6 ms.
HF_LAUNCH_S: Final = 1.6e-3
CLASSIC_LAUNCH_S: Final = 1.3e-3
GPT_LAUNCH_S: Final = 6e-4  # an estimate: the GPT has a third of the operations
# Widths of GPT-2 shapes in papers on offload, and the numbers of parameters from which the next width is used.
_WIDTHS: Final = (768, 1024, 1600, 2048, 2304, 3072, 4096, 8192, 9216, 12288)
MAX_LAYERS: Final = 1000  # limits of what can be planned: no model has more, and a plan is simulated block by block
MAX_SIZE: Final = 2**31
MAX_NUMEL: Final = 1e12
_LAYERS: Final = frozenset({"num_hidden_layers", "n_layer"})
_SIZES: Final = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "type_vocab_size", "ffn_dim", "word_embed_proj_dim"),
    *("n_embd", "n_inner", "n_head", "n_positions"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
)
# A layer outside of the blocks can be a block itself if it has at least this share of the largest block's elements.
LARGE: Final = 1.0 / 16.0
_NEXT_WIDTH: Final = (0.3e9, 0.7e9, 2e9, 3.5e9, 5e9, 9e9, 16e9, 65e9, 100e9)


@dataclass(frozen=True)
class ModelCost:
    """Costs of a model: a stack of blocks between an embedding and a head."""

    name: str
    blocks: tuple[int, ...]  # elements of each block, in forward order
    embedding_numel: int  # elements outside of the blocks whose gradients are complete last: embeddings and a tied head
    head_numel: int  # elements outside of the blocks whose gradients are complete first: final norm and head
    block_products: tuple[int, ...]  # weights of each block in the matrix products of a token
    head_products: int  # weights of the head in matrix products
    hidden: int
    attention_width: int  # number of heads times their width
    vocab_size: int
    context: int  # default number of tokens in a sequence
    activations: Activations
    traffic_bytes: float  # memory traffic of a forward for each token and block, without matrix products
    launch_s: float  # time to launch the kernels of a block's forward
    # Sizes that tensor ranks divide. 0: not known.
    num_heads: int = 0
    num_kv_heads: int = 0  # heads of keys and values
    inner: int = 0  # width of the MLP
    tensor_units: int = 0  # all other sizes: a multiple of each possible number of tensor ranks
    joins_last: bool = False  # a pipeline has the last block on the stage of the head (parallel/own_forward.py)
    # Elements of LoRA adapters of rank 1 on all linear layers of a block: the sum of their input and output widths.
    adapter_unit: int = 0
    experts: tuple[int, ...] = ()  # elements of each block in experts; empty without experts
    num_experts: int = 0  # experts of a block that has some; 0 without experts
    num_chosen: int = 0  # experts of a block that a token uses
    divides_experts: bool = False  # ranks can divide the experts (zero/experts.py)
    expert_stack: int = 0  # elements of the largest tensor that holds the experts of a block; 0 without experts

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest tensor of a block."""
        return max(self.hidden * max(self.hidden, self.inner), self.expert_stack)

    @property
    def ends(self) -> tuple[int, int]:
        """Elements of the embedding and output layers, if they are large enough to be blocks, else 0. A tied head is
        part of the embedding. Position embeddings and norms, which stay outside, count here because they are small.
        """
        least = LARGE * max(self.blocks, default=0)
        first, last = (numel if numel >= least else 0 for numel in (self.embedding_numel, self.head_numel))
        return first, last

    @property
    def numel(self) -> int:
        return sum(self.blocks) + self.embedding_numel + self.head_numel

    @property
    def active_numel(self) -> int:
        """Elements that a token uses: of the experts of a layer, only those to which it is sent."""
        return self.numel - sum(self.idle)

    @property
    def idle(self) -> tuple[int, ...]:
        """Elements of each block in experts that a token does not use; empty without experts."""
        return tuple(numel // self.num_experts * (self.num_experts - self.num_chosen) for numel in self.experts)

    def experts_here(self, size: int) -> tuple[int, ...]:
        """Elements of each block on one of `size` expert ranks, which has only some of the experts."""
        if size == 1 or not self.experts:
            return self.blocks
        pairs = zip(self.blocks, self.experts, strict=True)
        return tuple(block - experts + experts // size for block, experts in pairs)

    def with_layers(self, num_layers: int) -> ModelCost:
        """The same shape with another number of blocks."""
        blocks = tuple(self.blocks[i % len(self.blocks)] for i in range(num_layers))
        products = tuple(self.block_products[i % len(self.block_products)] for i in range(num_layers))
        experts = tuple(self.experts[i % len(self.experts)] for i in range(num_layers) if self.experts)
        return replace(self, blocks=blocks, block_products=products, experts=experts)

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


def gpt_cost(
    name: str,
    vocab_size: int,
    context: int,
    num_layers: int,
    hidden: int,
    num_heads: int,
    tied: bool = True,
    width: int = 2,
    has_dropout: bool = False,
    experts: tuple[int, int, int] | None = None,
) -> ModelCost:
    """Costs of the GPT of `twinflow train`, with weights of `width` bytes. `experts`: their number, the number that a
    token uses, and their width.
    """
    h, products = hidden, 12 * hidden * hidden
    block, in_experts, num, chosen, stack = products + 13 * h, 0, 0, 0, 0
    activations = gpt_activations(h, num_heads, vocab_size, width, has_dropout)
    if experts is not None:
        num, chosen, inner = experts
        in_experts, stack = num * 2 * h * inner, num * h * inner
        products = 4 * h * h + num * h + chosen * 2 * h * inner
        block = 4 * h * h + num * h + 8 * h + in_experts
        # The tokens of each expert are gathered, and its outputs are weighed and summed. This is an estimate.
        more = 3 * width * chosen * h
        activations = replace(activations, block_bytes=activations.block_bytes + more, selective_bytes=0.0)
    return ModelCost(
        name=name,
        blocks=(block,) * num_layers,
        embedding_numel=(vocab_size + context) * h,
        head_numel=2 * h + (0 if tied else vocab_size * h),
        block_products=(products,) * num_layers,
        head_products=vocab_size * h,
        hidden=h,
        attention_width=h,
        vocab_size=vocab_size,
        context=context,
        activations=activations,
        traffic_bytes=GPT_TRAFFIC * h,
        launch_s=GPT_LAUNCH_S,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        inner=4 * h,
        adapter_unit=16 * h,
        experts=(in_experts,) * num_layers if in_experts else (),
        num_experts=num,
        num_chosen=chosen,
        expert_stack=stack,
    )


def from_counts(
    name: str,
    blocks: Sequence[int],
    embedding_numel: int,
    head_numel: int,
    hidden: int,
    vocab_size: int,
    context: int = 1024,
    *,
    products: int | None = None,
    inner: int | None = None,
    attention_width: int | None = None,
    num_wide: int = 2,
    num_heads: int = 0,
    num_kv_heads: int = 0,
    tensor_units: int = 0,
    adapter_unit: int = 0,
) -> ModelCost:
    """Costs of any model from the number of elements of each of its blocks.

    `products`: weights of a block in matrix products; by default all elements. `inner`: width of the MLP; by default it
    follows from the largest block. `num_wide`: number of activations of this width that a block keeps. `num_heads`,
    `num_kv_heads`, `tensor_units`: 0 if they are not known. `adapter_unit`: by default as if all products were square.
    """
    known_inner = inner or 0
    if inner is None:
        inner = max(4 * hidden, (max(blocks, default=0) - 4 * hidden * hidden) // max(1, 2 * hidden))
    largest = products or max(blocks, default=0)
    return ModelCost(
        name=name,
        blocks=tuple(blocks),
        embedding_numel=embedding_numel,
        head_numel=head_numel,
        block_products=tuple(blocks) if products is None else (products,) * len(blocks),
        head_products=vocab_size * hidden,
        hidden=hidden,
        attention_width=attention_width or hidden,
        vocab_size=vocab_size,
        context=context,
        activations=hf_activations(hidden, inner, vocab_size, num_wide),
        traffic_bytes=HF_TRAFFIC * hidden,
        launch_s=HF_LAUNCH_S,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        inner=known_inner,
        tensor_units=tensor_units,
        adapter_unit=adapter_unit or 2 * largest // max(1, hidden),
    )


def gpt2_like(numel: float, vocab_size: int = 50_304, context: int = 1024) -> ModelCost:
    """A GPT-2 shape with about `numel` parameters. The width is as in papers on offload, and the depth follows from
    it."""
    hidden = _WIDTHS[bisect_right(_NEXT_WIDTH, numel)]
    layer = 12 * hidden * hidden + 13 * hidden
    num_layers = max(1, round((numel - (vocab_size + context) * hidden) / layer))
    heads = hidden // (64 if hidden <= 1600 else 128)
    return gpt_cost(f"GPT-2 shape, {num_layers} x {hidden}", vocab_size, context, num_layers, hidden, heads)


# Sizes of the parts in which TRL (version 1.16) computes the logits.
_FUSED_TOKENS, _FUSED_SYMBOLS = 4096, 32768


def with_fused_head(model: ModelCost, trains_head: bool) -> ModelCost:
    """The model with TRL's loss, which never has more than a tile of the logits.

    The loss keeps its input, and the gradient of it in fp32 and in the dtype of the weights. If the head is trained,
    its gradient is in both dtypes too.
    """
    activations = replace(
        model.activations,
        loss_bytes=8 * model.hidden,
        fixed_bytes=6 * model.vocab_size * model.hidden if trains_head else 0,
        chunk_tokens=_FUSED_TOKENS,
        chunk_bytes=2 * min(model.vocab_size, _FUSED_SYMBOLS),
    )
    return replace(model, activations=activations)


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether `from_hf` knows the type of this model."""
    return config.get("model_type") in _FAMILIES


def from_hf(config: Mapping[str, Any], name: str = "") -> ModelCost:
    """Costs of a transformers model with its language-model head, from its config.json."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        remedy = "For other models, name a function that builds the model: --model module:function."
        raise invalid_value("model_type", kind, _FAMILIES, remedy)
    for key in (*_SIZES, *_LAYERS):
        most = MAX_LAYERS if key in _LAYERS else MAX_SIZE
        value = config.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise invalid_value(f"{key} in config.json", value, f"a whole number from 1 to {most}")
    try:
        return replace(_FAMILIES[str(kind)](config, name or str(kind)), joins_last=True)
    except KeyError as error:
        key = error.args[0]
        raise ValueError(f"config.json has no key {key!r}, which a {kind} model needs. Add this key.") from None
    except TypeError:
        raise ValueError(f"config.json has null for a size that a {kind} model needs. Give a number.") from None


def _llama(config: Mapping[str, Any], name: str) -> ModelCost:
    """Llama, Mistral, Qwen2 and Qwen3: rotary positions, gated MLP, RMS norms."""
    h, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or h // heads
    wide, narrow = heads * width, kv_heads * width
    products = 2 * h * wide + 2 * h * narrow + 3 * h * inner
    biases = 2 * h  # the two norms
    if config["model_type"] == "qwen2":
        biases += wide + 2 * narrow
    elif config["model_type"] == "qwen3":
        biases += 2 * width  # the norms of queries and keys
    elif config.get("attention_bias"):
        biases += wide + 2 * narrow + h
    if config.get("mlp_bias"):
        biases += 2 * inner + h
    vocab_size = config["vocab_size"]
    return from_counts(
        name,
        [products + biases] * config["num_hidden_layers"],
        embedding_numel=vocab_size * h,
        head_numel=h + (0 if config.get("tie_word_embeddings") else vocab_size * h),
        hidden=h,
        vocab_size=vocab_size,
        context=min(2048, config.get("max_position_embeddings", 2048)),
        products=products,
        inner=inner,
        attention_width=wide,
        num_wide=3,
        num_heads=heads,
        num_kv_heads=kv_heads,
        adapter_unit=2 * (h + wide) + 2 * (h + narrow) + 3 * (h + inner),
    )


def _sparse(config: Mapping[str, Any], name: str) -> ModelCost:
    """Mixtral, OLMoE, Qwen3-MoE and gpt-oss: the attention of Llama, and experts instead of the MLP."""
    kind, h, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    llama = _llama({**config, "model_type": {"qwen3_moe": "qwen3"}.get(kind, "llama")}, name)
    num, chosen = config.get("num_experts") or config["num_local_experts"], config["num_experts_per_tok"]
    if chosen > num:
        raise invalid_value("num_experts_per_tok in config.json", chosen, f"at most the number of experts, {num}")
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    expert, router, others = 3 * h * inner, num * h, 0
    if kind == "gpt_oss":
        expert, router, others = expert + 2 * inner + h, router + num, heads  # biases, and a sink for each head
    elif kind == "olmoe":
        others = h + h // heads * llama.num_kv_heads  # norms of queries and keys
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    layers = range(len(llama.blocks))
    is_sparse = [kind != "qwen3_moe" or ((i + 1) % step == 0 and i not in dense) for i in layers]
    mlp = 3 * h * config["intermediate_size"]
    block = llama.blocks[0] - mlp + num * expert + router + others
    products = llama.block_products[0] - mlp + chosen * 3 * h * inner + num * h
    activations = hf_activations(h, chosen * inner, config["vocab_size"], num_wide=3)
    # The tokens of each expert are gathered, and its outputs are weighed and summed. These are estimates.
    copies = replace(activations, block_bytes=activations.block_bytes + 6 * chosen * h)
    return replace(
        llama,
        blocks=tuple(block if sparse else llama.blocks[0] for sparse in is_sparse),
        block_products=tuple(products if sparse else llama.block_products[0] for sparse in is_sparse),
        experts=tuple(num * expert * sparse for sparse in is_sparse),
        num_experts=num,
        num_chosen=chosen,
        divides_experts=True,
        expert_stack=num * 2 * h * inner,  # the first two matrices of all experts
        activations=copies,
        traffic_bytes=llama.traffic_bytes + EXPERT_TRAFFIC * 2 * chosen * (9 * h + 10 * inner),
        inner=inner,
        adapter_unit=llama.adapter_unit - 3 * (h + config["intermediate_size"]),  # experts are no linear layers
    )


def _opt(config: Mapping[str, Any], name: str) -> ModelCost:
    """OPT: learned positions, tied head."""
    h, positions = config["hidden_size"], config["max_position_embeddings"]
    narrow = config.get("word_embed_proj_dim") or h
    projections = 2 * h * narrow if narrow != h else 0
    embedding = config["vocab_size"] * narrow + (positions + 2) * h + projections
    head = 0 if config.get("_remove_final_layer_norm") or narrow != h else 2 * h
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    return _classic(name, config, h, heads, config["ffn_dim"], layers, embedding, head, min(2048, positions))


def _gpt2(config: Mapping[str, Any], name: str) -> ModelCost:
    """GPT-2: learned positions, tied head."""
    h, positions = config["n_embd"], config["n_positions"]
    embedding = (config["vocab_size"] + positions) * h
    inner, layers, heads = config.get("n_inner") or 4 * h, config["n_layer"], config["n_head"]
    # Its GELU consists of several operations, each of which keeps its input. Measured with the 350M shape.
    return _classic(name, config, h, heads, inner, layers, embedding, 2 * h, positions, num_wide=3)


def _gpt_neox(config: Mapping[str, Any], name: str) -> ModelCost:
    """GPT-NeoX and Pythia: rotary positions, a head that is untied by default."""
    h, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    embedding = config["vocab_size"] * h
    head = 2 * h + (0 if config.get("tie_word_embeddings") else embedding)
    context = min(2048, config.get("max_position_embeddings", 2048))
    return _classic(name, config, h, heads, config["intermediate_size"], layers, embedding, head, context)


def _bert(config: Mapping[str, Any], name: str) -> ModelCost:
    """BERT with its masked-language head: a dense layer, a norm, and a projection that is tied except for its bias."""
    h, vocab, positions = config["hidden_size"], config["vocab_size"], config["max_position_embeddings"]
    embedding = (vocab + positions + config.get("type_vocab_size", 2)) * h + 2 * h
    head, layers, heads = h * h + 3 * h + vocab, config["num_hidden_layers"], config["num_attention_heads"]
    inner = config["intermediate_size"]
    return _classic(name, config, h, heads, inner, layers, embedding, head, min(512, positions))


def _classic(
    name: str,
    config: Mapping[str, Any],
    h: int,
    heads: int,
    inner: int,
    layers: int,
    embedding: int,
    head: int,
    context: int,
    num_wide: int = 2,
) -> ModelCost:
    """A model whose blocks have equally many query, key and value heads, a plain MLP, biases and two layer norms."""
    products = 4 * h * h + 2 * h * inner
    blocks, vocab_size = [products + 9 * h + inner] * layers, config["vocab_size"]
    sizes: dict[str, int] = {"products": products, "inner": inner, "num_heads": heads}
    sizes |= {"adapter_unit": 8 * h + 2 * (h + inner), "num_wide": num_wide}
    found = from_counts(name, blocks, embedding, head, h, vocab_size, context, **sizes)
    return replace(found, traffic_bytes=CLASSIC_TRAFFIC * h, launch_s=CLASSIC_LAUNCH_S)


_FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any], str], ModelCost]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "mixtral": _sparse,
    "olmoe": _sparse,
    "qwen3_moe": _sparse,
    "gpt_oss": _sparse,
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
}
