# SPDX-License-Identifier: Apache-2.0
"""Small models of the architectures that are split over tensor ranks and pipeline stages, and what happens to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB = 32
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 32}
_SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4}
_BASE = {**_TOKENS, **_SIZES, "intermediate_size": 24}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_MOE = {**_GROUPED, "num_experts_per_tok": 2}
_N = {"n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32}
_MIXED = ["sliding_attention", "full_attention"] * 2
_WINDOW = {"sliding_window": 4, "layer_types": _MIXED}


DROPOUT = "dropout depends on the number of stages"  # not refused, and not compared


@dataclass(frozen=True)
class Architecture:
    """A tiny model. `tensor`, `pipeline`: the reason in the error if the split is refused."""

    title: str
    kind: str  # model_type
    options: dict[str, Any] = field(default_factory=dict)
    head: str = "CausalLM"
    lora: bool = False
    tensor: str = ""
    pipeline: str = ""

    def build(self) -> Any:
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.kind, **self.options)
        for name, value in config.to_dict().items():  # dropout depends on the number of stages
            if "drop" in name and isinstance(value, float) and name not in self.options:
                setattr(config, name, 0.0)
        model = getattr(transformers, f"AutoModelFor{self.head}").from_config(config)
        if self.lora:
            import peft

            lora = peft.LoraConfig(
                r=4,
                lora_dropout=0.1 if self.pipeline == DROPOUT else 0.0,
                target_modules="all-linear",
                init_lora_weights=False,
            )
            model = peft.get_peft_model(model, lora)
            for name, param in model.named_parameters():
                if "lora_" in name:
                    param.data *= 0.1  # both factors are trained, and the model stays well-conditioned
        return model.train()


NO_PLAN = "transformers has no base_model_tp_plan for it"
TWO_LISTS = "the decoder needs the output of the encoder in every layer"
SHARED = "the stages divide a forward that calls each layer once, in order"
ROUTERS = "the loss needs the router logits of all layers, and a stage has only those of its layers"
ARCHITECTURES = {
    "llama": Architecture("Llama", "llama", _GROUPED),
    "llama-tied": Architecture(
        "Llama, tied", "llama", {**_GROUPED, "tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}
    ),
    "mistral": Architecture("Mistral", "mistral", {**_GROUPED, "sliding_window": 4}),
    "qwen2": Architecture("Qwen2", "qwen2", {**_GROUPED, "use_sliding_window": True, **_WINDOW}),
    "qwen3": Architecture("Qwen3", "qwen3", {**_GROUPED, "head_dim": 8}),
    "gemma": Architecture("Gemma", "gemma", {**_GROUPED, "head_dim": 4}),
    "gemma2": Architecture("Gemma 2", "gemma2", {**_GROUPED, "head_dim": 4, **_WINDOW}),
    "gemma3": Architecture("Gemma 3", "gemma3_text", {**_GROUPED, "head_dim": 4, **_WINDOW}),
    "phi3": Architecture("Phi-3", "phi3", _GROUPED),
    "phi": Architecture("Phi", "phi", _BASE),
    "olmo": Architecture("OLMo", "olmo", _GROUPED),
    "olmo2": Architecture("OLMo 2", "olmo2", _GROUPED),
    "gpt_neox": Architecture("GPT-NeoX", "gpt_neox", _BASE),
    "mixtral": Architecture("Mixtral", "mixtral", {**_MOE, "num_local_experts": 4}),
    "mixtral-balanced": Architecture(
        "Mixtral with the loss of its routers",
        "mixtral",
        {**_MOE, "num_local_experts": 4, "output_router_logits": True},
        pipeline=ROUTERS,
    ),
    "qwen3_moe": Architecture(
        "Qwen3-MoE", "qwen3_moe", {**_MOE, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 4}
    ),
    "olmoe": Architecture("OLMoE", "olmoe", {**_MOE, "num_experts": 4}),
    "granite": Architecture("Granite", "granite", _GROUPED),
    "smollm3": Architecture("SmolLM3", "smollm3", _GROUPED),
    "cohere": Architecture("Cohere", "cohere", _GROUPED),
    "cohere2": Architecture("Cohere 2", "cohere2", {**_GROUPED, **_WINDOW}),
    "starcoder2": Architecture("StarCoder2", "starcoder2", _GROUPED),
    "stablelm": Architecture("StableLM", "stablelm", _GROUPED),
    "glm": Architecture("GLM", "glm", {**_GROUPED, "head_dim": 4}),
    "glm4": Architecture("GLM-4", "glm4", {**_GROUPED, "head_dim": 4}),
    "falcon": Architecture("Falcon", "falcon", {**_TOKENS, **_SIZES}, tensor=NO_PLAN),
    "bloom": Architecture("BLOOM", "bloom", {**_TOKENS, "hidden_size": 16, "n_layer": 4, "n_head": 4}, tensor=NO_PLAN),
    "opt": Architecture("OPT", "opt", {**_TOKENS, **_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "gpt2": Architecture("GPT-2", "gpt2", {**_TOKENS, **_N}),
    "gptj": Architecture("GPT-J", "gptj", {**_TOKENS, **_N, "rotary_dim": 4}),
    "gpt_neo": Architecture(
        "GPT-Neo",
        "gpt_neo",
        {
            **_TOKENS,
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
        },
    ),
    "gpt_bigcode": Architecture("GPT-BigCode", "gpt_bigcode", {**_TOKENS, **_N}, tensor=NO_PLAN),
    "mpt": Architecture(
        "MPT",
        "mpt",
        {"vocab_size": VOCAB, "d_model": 16, "n_heads": 4, "n_layers": 4, "max_seq_len": 32},
        tensor=NO_PLAN,
    ),
    "qwen2_moe": Architecture(
        "Qwen2-MoE",
        "qwen2_moe",
        {**_MOE, "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    "deepseek_v3": Architecture(
        "DeepSeek-V3",
        "deepseek_v3",
        {
            **_BASE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
    ),
    "gpt_oss": Architecture(
        "GPT-OSS",
        "gpt_oss",
        {**_GROUPED, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOW},
        tensor=NO_PLAN,
    ),
    "nemotron": Architecture("Nemotron", "nemotron", _GROUPED),
    "ernie4_5": Architecture("Ernie 4.5", "ernie4_5", {**_GROUPED, "head_dim": 4}),
    "exaone4": Architecture("EXAONE 4", "exaone4", {**_GROUPED, **_WINDOW}),
    "olmo3": Architecture("OLMo 3", "olmo3", _GROUPED),
    "llama4": Architecture(
        "Llama 4, text", "llama4_text", {**_MOE, "num_local_experts": 4, "head_dim": 4, "intermediate_size_mlp": 24}
    ),
    "minimax": Architecture("MiniMax", "minimax", {**_MOE, "num_local_experts": 4}),
    "bert": Architecture("BERT", "bert", _BASE, head="MaskedLM"),
    "roberta": Architecture("RoBERTa", "roberta", {**_BASE, "max_position_embeddings": 40}, head="MaskedLM"),
    "llama-classifier": Architecture("Llama", "llama", _GROUPED, head="SequenceClassification"),
    "qwen3-tokens": Architecture("Qwen3", "qwen3", {**_GROUPED, "head_dim": 8}, head="TokenClassification"),
    "llama-answers": Architecture("Llama", "llama", _GROUPED, head="QuestionAnswering"),
    "gpt2-classifier": Architecture("GPT-2", "gpt2", {**_TOKENS, **_N}, head="SequenceClassification"),
    "bert-classifier": Architecture("BERT", "bert", _BASE, head="SequenceClassification"),
    "llama-lora": Architecture("Llama with LoRA", "llama", _GROUPED, lora=True),
    "qwen3-lora": Architecture("Qwen3 with LoRA", "qwen3", {**_GROUPED, "head_dim": 8}, lora=True),
    "qwen3-dropout": Architecture(
        "Qwen3 with dropout", "qwen3", {**_GROUPED, "head_dim": 8, "attention_dropout": 0.2}, pipeline=DROPOUT
    ),
    "phi-dropout": Architecture(
        "Phi with dropout",
        "phi",
        {**_BASE, "attention_dropout": 0.2, "embd_pdrop": 0.2, "resid_pdrop": 0.2},
        pipeline=DROPOUT,
    ),
    "gpt_neox-dropout": Architecture(
        "GPT-NeoX with dropout",
        "gpt_neox",
        {**_BASE, "attention_dropout": 0.2, "hidden_dropout": 0.2},
        pipeline=DROPOUT,
    ),
    "llama-lora-dropout": Architecture(
        "Llama with LoRA and dropout", "llama", {**_GROUPED, "attention_dropout": 0.2}, lora=True, pipeline=DROPOUT
    ),
    "t5": Architecture(
        "T5",
        "t5",
        {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
        head="Seq2SeqLM",
        tensor=NO_PLAN,
        pipeline=TWO_LISTS,
    ),
    "albert": Architecture(
        "ALBERT", "albert", {**_BASE, "embedding_size": 8}, head="MaskedLM", tensor=NO_PLAN, pipeline=SHARED
    ),
    "mamba": Architecture(
        "Mamba",
        "mamba",
        {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4},
        tensor=NO_PLAN,
    ),
}


def batch(head: str, seed: int, size: int = 2) -> tuple[torch.Tensor, Any]:
    """Token numbers, and the target of a head."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (size, 10), generator=generator)
    if head == "SequenceClassification":
        return ids, torch.randint(2, (size,), generator=generator)
    if head == "TokenClassification":
        return ids, torch.randint(2, (size, 10), generator=generator)
    if head == "QuestionAnswering":
        return ids, (torch.randint(10, (size,), generator=generator), torch.randint(10, (size,), generator=generator))
    labels = ids.clone()
    labels[:, :2] = -100
    return ids, labels


def arguments(head: str, target: Any) -> dict[str, Any]:
    if head == "QuestionAnswering":
        return dict(zip(("start_positions", "end_positions"), target, strict=True))
    return {"labels": target}
