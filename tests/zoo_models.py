# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers, diffusers and timm, built from configs with random weights.

Nothing is downloaded. Each model has fewer than MAX_NUMEL parameters and no dropout, and takes a small part of a second
for forward and backward. `inputs(step)` depends on the step alone, so two copies of a model see the same data.

To add a model, add one line to one of the lists below. An option that a config does not know is kept by transformers
without an error, so `build` checks the size of the model: a misspelt option leaves a default of billions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_NUMEL = 600_000
NOISE = 0.03
Batch = dict[str, Any]
Inputs = Callable[[int], Batch]
Options = dict[str, Any]


@dataclass(frozen=True)
class ZooModel:
    """A way to build a model, and its inputs for each step."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Inputs

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make().train()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        numel = sum(param.numel() for param in model.parameters())
        assert numel < MAX_NUMEL, f"{self.name} has {numel} parameters: an option of its config was not understood"
        # Many models start with weights of zero or nearly zero (gates, biases, class tokens, layer scales). Gradients
        # behind them would be zero, so that a lost update would not be seen, or huge, behind the norm of a zero vector.
        with torch.no_grad():
            for i, param in enumerate(model.parameters()):
                param.add_(NOISE * normal(i, *param.shape).to(param))
        return model

    def loss(self, model: Callable[..., Any], step: int) -> Tensor:
        """The loss that the model computes, or the distance of its outputs from random targets."""
        torch.manual_seed(step)  # some models draw numbers in forward
        output = model(**self.inputs(step))
        own = output.get("loss") if isinstance(output, Mapping) else None
        if own is not None:
            return own
        losses = [functional.mse_loss(value, normal(step + 1000, *value.shape)) for value in trained_outputs(output)]
        return torch.stack(losses).sum()


def trained_outputs(output: Any) -> Iterator[Tensor]:
    """Tensors with a gradient in what a forward returns."""
    if isinstance(output, Tensor):
        if output.requires_grad or (not torch.is_grad_enabled() and output.is_floating_point()):
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from trained_outputs(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from trained_outputs(value)


# Inputs. Each function gives one batch for a step.


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(seed: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from 2, because 0 and 1 are padding or other special tokens in many models."""
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(seed))


def causal(step: int) -> Batch:
    return {"input_ids": whole(step, 64, 2, 8), "labels": whole(step, 64, 2, 8), "use_cache": False}


def causal_plain(step: int) -> Batch:
    return {"input_ids": whole(step, 64, 2, 8), "labels": whole(step, 64, 2, 8)}


def masked(step: int) -> Batch:
    labels = whole(step, 64, 2, 8)
    return {"input_ids": labels.masked_fill(torch.arange(8) % 3 == 0, 3), "labels": labels}


def classified(step: int) -> Batch:
    return {"input_ids": whole(step, 64, 2, 8), "labels": whole(step + 100, 4, 2) - 2}


def translated(step: int) -> Batch:
    return {"input_ids": whole(step, 64, 2, 8), "labels": whole(step + 100, 64, 2, 6), "use_cache": False}


def images(size: int = 16, channels: int = 3) -> Inputs:
    def make(step: int) -> Batch:
        return {"pixel_values": normal(step, 2, channels, size, size), "labels": whole(step, 5, 2) - 2}

    return make


def pixels(size: int = 16) -> Inputs:
    return lambda step: {"pixel_values": normal(step, 2, 3, size, size)}


def segments(size: int, scale: int = 1) -> Inputs:
    def make(step: int) -> Batch:
        labels = whole(step, 5, 2, size // scale, size // scale) - 2
        return {"pixel_values": normal(step, 2, 3, size, size), "labels": labels}

    return make


def waves(step: int) -> Batch:
    return {"input_values": normal(step, 2, 400), "labels": whole(step, 16, 2, 3)}


def spectra(step: int) -> Batch:
    return {"input_features": normal(step, 2, 8, 32), "labels": whole(step, 64, 2, 6), "use_cache": False}


def pairs(step: int) -> Batch:
    return {"input_ids": whole(step, 64, 2, 8), "pixel_values": normal(step, 2, 3, 16, 16), "return_loss": True}


def captions(step: int) -> Batch:
    ids = whole(step, 64, 2, 8)
    return {"input_ids": ids, "pixel_values": normal(step, 2, 3, 16, 16), "labels": ids}


def prompts(step: int) -> Batch:
    points = 16.0 * torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(step))
    return {
        "pixel_values": normal(step, 2, 3, 32, 32),
        "input_points": points,
        "input_labels": torch.ones(2, 1, 2, dtype=torch.long),
        "multimask_output": True,
    }


def with_image_tokens(num: int, size: int = 16) -> Inputs:
    """Text whose first tokens (63) stand for an image."""

    def make(step: int) -> Batch:
        ids = torch.cat([torch.full((2, num), 63), whole(step, 60, 2, 6)], dim=1)
        return {"input_ids": ids, "pixel_values": normal(step, 2, 3, size, size), "labels": ids, "use_cache": False}

    return make


# transformers.

SHAPE: Options = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
TOKENS: Options = {"vocab_size": 64, "max_position_embeddings": 16}
SPECIAL: Options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
TEXT: Options = {**SHAPE, **TOKENS, **SPECIAL}
GROUPED: Options = {**TEXT, "num_key_value_heads": 1, "head_dim": 16}
IMAGE: Options = {**SHAPE, "image_size": 16, "patch_size": 4, "num_labels": 3}
BART: Options = {
    **TOKENS,
    **SPECIAL,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5: Options = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2} | SPECIAL
GPT: Options = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 2} | SPECIAL
WAVE: Options = {
    **SHAPE,
    **SPECIAL,
    "vocab_size": 16,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    # The loss is summed over time, and masked features are drawn at random unless this is zero.
    "mask_time_prob": 0.0,
    "ctc_loss_reduction": "mean",
}
MOE: Options = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def transformers_model(name: str, options: Options) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(importlib.import_module("transformers"), name)
        config = kind.config_class(**options)
        without_dropout(config)
        made: nn.Module = kind._from_config(config, attn_implementation="eager")
        return made

    return make


def without_dropout(config: Any) -> None:
    """Sets every probability to drop something to zero, in the configs inside this one as well."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
            setattr(config, key, 0.0)


# name: class, options of its config, inputs
TRANSFORMERS: dict[str, tuple[str, Options, Inputs]] = {
    # Decoders.
    "llama": ("LlamaForCausalLM", GROUPED, causal),
    "llama-tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}, causal),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, causal),
    "qwen2": ("Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}, causal),
    "qwen3": ("Qwen3ForCausalLM", GROUPED, causal),
    "gemma": ("GemmaForCausalLM", GROUPED, causal),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 4}, causal),
    "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "query_pre_attn_scalar": 16, "sliding_window": 4}, causal),
    "phi": ("PhiForCausalLM", {**TEXT, "partial_rotary_factor": 0.5}, causal),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "sliding_window": None}, causal),
    "gpt2": ("GPT2LMHeadModel", GPT, causal),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            **TOKENS,
            **SPECIAL,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        causal,
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", TEXT, causal),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 8}, causal),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", GPT, causal),
    "codegen": ("CodeGenForCausalLM", {**GPT, "n_head": 4, "rotary_dim": 4}, causal),
    "opt": ("OPTForCausalLM", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 16}, causal),
    "bloom": ("BloomForCausalLM", {**SPECIAL, "vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 2}, causal),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 2, "max_seq_len": 16, "expansion_ratio": 2},
        causal,
    ),
    "falcon": ("FalconForCausalLM", TEXT, causal),
    "falcon-new": (
        "FalconForCausalLM",
        {**TEXT, "new_decoder_architecture": True, "num_kv_heads": 1, "parallel_attn": True},
        causal,
    ),
    "olmo": ("OlmoForCausalLM", {**TEXT, "num_key_value_heads": 2}, causal),
    "olmo2": ("Olmo2ForCausalLM", {**TEXT, "num_key_value_heads": 2}, causal),
    "granite": ("GraniteForCausalLM", GROUPED, causal),
    "cohere": ("CohereForCausalLM", GROUPED, causal),
    "cohere2": ("Cohere2ForCausalLM", {**GROUPED, "sliding_window": 4}, causal),
    "stablelm": ("StableLmForCausalLM", {**GROUPED, "partial_rotary_factor": 0.5}, causal),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED, causal),
    "glm4": ("Glm4ForCausalLM", GROUPED, causal),
    "nemotron": ("NemotronForCausalLM", {**GROUPED, "partial_rotary_factor": 0.5}, causal),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED, causal),
    "helium": ("HeliumForCausalLM", GROUPED, causal),
    "exaone4": ("Exaone4ForCausalLM", {**GROUPED, "sliding_window": 4}, causal),
    "diffllama": ("DiffLlamaForCausalLM", {**GROUPED, "num_attention_heads": 4, "num_key_value_heads": 2}, causal),
    "modernbert-decoder": (
        "ModernBertDecoderForCausalLM",
        {**TEXT, "cls_token_id": 1, "sep_token_id": 1, "local_attention": 8},
        causal,
    ),
    "biogpt": ("BioGptForCausalLM", TEXT, causal),
    "xglm": (
        "XGLMForCausalLM",
        {**TOKENS, **SPECIAL, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 2},
        causal,
    ),
    # Mixtures of experts.
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, causal),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {**MOE, "shared_expert_intermediate_size": 24}, causal),
    "qwen3-moe": ("Qwen3MoeForCausalLM", MOE, causal),
    "olmoe": ("OlmoeForCausalLM", {**MOE, "num_key_value_heads": 2}, causal),
    "granite-moe": ("GraniteMoeForCausalLM", {**GROUPED, "num_local_experts": 4}, causal),
    "gpt-oss": ("GptOssForCausalLM", {**GROUPED, "num_local_experts": 4, "sliding_window": 4}, causal),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        causal,
    ),
    # Recurrent and hybrid models.
    "mamba": (
        "MambaForCausalLM",
        {**SPECIAL, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2},
        causal,
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            **SPECIAL,
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 4,
            "n_groups": 1,
            "chunk_size": 4,
        },
        causal,
    ),
    "rwkv": (
        "RwkvForCausalLM",
        {**SPECIAL, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 16},
        causal,
    ),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM",
        {
            **GROUPED,
            "lru_width": 32,
            "attention_window_size": 4,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        causal,
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            **GROUPED,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 2,
            "use_mamba_kernels": False,
        },
        causal,
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            **GROUPED,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
        },
        causal,
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {**GROUPED, "block_ff_dim": 48, "block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv"]},
        causal,
    ),
    # Encoders and decoders.
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, translated),
    "mt5": (
        "MT5ForConditionalGeneration",
        {**T5, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu"},
        translated,
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {
            **T5,
            "decoder_start_token_id": 0,
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_decoder_layers": 2,
        },
        translated,
    ),
    "bart": ("BartForConditionalGeneration", BART, translated),
    "mbart": ("MBartForConditionalGeneration", BART, translated),
    "pegasus": ("PegasusForConditionalGeneration", BART, translated),
    "marian": ("MarianMTModel", BART, translated),
    "m2m100": ("M2M100ForConditionalGeneration", BART, translated),
    "blenderbot": ("BlenderbotForConditionalGeneration", BART, translated),
    "led": (
        "LEDForConditionalGeneration",
        {
            **BART,
            "attention_window": 4,
            "max_encoder_position_embeddings": 16,
            "max_decoder_position_embeddings": 16,
        },
        translated,
    ),
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        {
            **TOKENS,
            **SPECIAL,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "decoder_start_token_id": 1,
            "num_buckets": 4,
            "relative_max_distance": 8,
        },
        translated,
    ),
    # Encoders.
    "bert": ("BertForMaskedLM", TEXT, masked),
    "roberta": ("RobertaForSequenceClassification", {**TEXT, "num_labels": 2}, classified),
    "distilbert": (
        "DistilBertForMaskedLM",
        {**TOKENS, **SPECIAL, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 2},
        masked,
    ),
    "albert": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 16}, masked),
    "electra": ("ElectraForMaskedLM", {**TEXT, "embedding_size": 16}, masked),
    "deberta": (
        "DebertaForMaskedLM",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
        masked,
    ),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8},
        masked,
    ),
    "mpnet": ("MPNetForMaskedLM", TEXT, masked),
    "longformer": ("LongformerForMaskedLM", {**TEXT, "attention_window": 4}, masked),
    "big-bird": ("BigBirdForMaskedLM", {**TEXT, "attention_type": "original_full"}, masked),
    "funnel": (
        "FunnelForMaskedLM",
        {
            "vocab_size": 64,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 32,
            "n_head": 2,
            "d_head": 16,
            "d_inner": 48,
        },
        masked,
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        {**SPECIAL, "vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
        causal_plain,
    ),
    "xlm": (
        "XLMWithLMHeadModel",
        {**SPECIAL, "vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16},
        masked,
    ),
    "mobilebert": (
        "MobileBertForMaskedLM",
        {
            **TEXT,
            "embedding_size": 16,
            "true_hidden_size": 16,
            "intra_bottleneck_size": 16,
            "num_feedforward_networks": 2,
        },
        masked,
    ),
    "convbert": ("ConvBertForMaskedLM", {**TEXT, "embedding_size": 16, "conv_kernel_size": 3}, masked),
    "squeezebert": ("SqueezeBertForMaskedLM", {**TEXT, "embedding_size": 32}, masked),
    "fnet": ("FNetForMaskedLM", {**TEXT, "use_tpu_fourier_optimizations": False}, masked),
    "nystromformer": ("NystromformerForMaskedLM", {**TEXT, "num_landmarks": 4, "segment_means_seq_len": 8}, masked),
    "roformer": ("RoFormerForMaskedLM", {**TEXT, "embedding_size": 16}, masked),
    "esm": ("EsmForMaskedLM", {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"}, masked),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**TEXT, "cls_token_id": 1, "sep_token_id": 1, "local_attention": 8, "reference_compile": False},
        masked,
    ),
    "eurobert": ("EuroBertForMaskedLM", {**GROUPED, "mask_token_id": 3}, masked),
    "canine": (
        "CanineForSequenceClassification",
        {
            **SHAPE,
            "max_position_embeddings": 16,
            "num_hash_functions": 2,
            "num_hash_buckets": 16,
            "local_transformer_stride": 8,
            "downsampling_rate": 4,
            "num_labels": 2,
        },
        classified,
    ),
    # Speech.
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "begin_suppress_tokens": None,
        },
        spectra,
    ),
    "speech-to-text": (
        "Speech2TextForConditionalGeneration",
        {
            **BART,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 16,
        },
        lambda step: {"input_features": normal(step, 2, 32, 8), "labels": whole(step, 64, 2, 6), "use_cache": False},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", WAVE, waves),
    "hubert": ("HubertForCTC", WAVE, waves),
    "wavlm": ("WavLMForCTC", {**WAVE, "num_buckets": 8, "max_bucket_distance": 16}, waves),
    "audio-spectrogram": (
        "ASTForAudioClassification",
        {**SHAPE, "patch_size": 4, "time_stride": 4, "frequency_stride": 4, "max_length": 16, "num_mel_bins": 8}
        | {"num_labels": 3},
        lambda step: {"input_values": normal(step, 2, 16, 8), "labels": whole(step, 5, 2) - 2},
    ),
    # Images.
    "vit": ("ViTForImageClassification", IMAGE, images()),
    "vit-mae": (
        "ViTMAEForPreTraining",
        {
            **IMAGE,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
        pixels(),
    ),
    "deit": ("DeiTForImageClassification", IMAGE, images()),
    "beit": ("BeitForImageClassification", {**IMAGE, "use_relative_position_bias": True}, images()),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
        | {"num_labels": 3},
        images(),
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
        | {"num_labels": 3},
        images(),
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "num_labels": 3},
        images(),
    ),
    "convnextv2": (
        "ConvNextV2ForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "patch_size": 2, "num_labels": 3},
        images(),
    ),
    "dinov2": ("Dinov2ForImageClassification", IMAGE, images()),
    "mobilevit": (
        "MobileViTForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [16, 16, 16, 16, 16, 16, 32],
            "num_attention_heads": 2,
            "output_stride": 8,
            "num_labels": 3,
        },
        images(32),
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic", "num_labels": 3},
        images(32),
    ),
    "regnet": (
        "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "groups_width": 8, "num_labels": 3},
        images(32),
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 3,
        },
        segments(32),
    ),
    "poolformer": (
        "PoolFormerForImageClassification",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_labels": 3,
        },
        images(32),
    ),
    "vivit": (
        "VivitForVideoClassification",
        {**IMAGE, "num_frames": 2, "tubelet_size": [1, 4, 4]},
        lambda step: {"pixel_values": normal(step, 2, 2, 3, 16, 16), "labels": whole(step, 5, 2) - 2},
    ),
    "detr-yolos": (
        "YolosForObjectDetection",
        {**IMAGE, "image_size": [16, 16], "num_detection_tokens": 4},
        pixels(),
    ),
    "sam": (
        "SamModel",
        {
            "vision_config": {
                "hidden_size": 16,
                "output_channels": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "mlp_dim": 24,
                "window_size": 2,
                "global_attn_indexes": [1],
                "num_pos_feats": 16,
            },
            "prompt_encoder_config": {
                "hidden_size": 32,
                "image_size": 32,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
            "mask_decoder_config": {
                "hidden_size": 32,
                "mlp_dim": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 8,
                "iou_head_depth": 2,
            },
        },
        prompts,
    ),
    # Text with images.
    "clip": ("CLIPModel", {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}, pairs),
    "siglip": ("SiglipModel", {"text_config": TEXT, "vision_config": IMAGE}, pairs),
    "altclip": (
        "AltCLIPModel",
        {"text_config": {**TEXT, "project_dim": 16}, "vision_config": IMAGE, "projection_dim": 16},
        pairs,
    ),
    "blip": (
        "BlipForConditionalGeneration",
        {
            "text_config": {**TEXT, "encoder_hidden_size": 32, "projection_dim": 16},
            "vision_config": IMAGE,
            "projection_dim": 16,
        },
        captions,
    ),
    "git": ("GitForCausalLM", {**TEXT, "vision_config": IMAGE}, captions),
    "vilt": (
        "ViltForImagesAndTextClassification",
        {**IMAGE, **TEXT, "num_images": 1, "num_labels": 3, "max_image_length": -1},
        lambda step: {
            "input_ids": whole(step, 64, 2, 8),
            "pixel_values": normal(step, 2, 1, 3, 16, 16),
            "labels": whole(step, 5, 2) - 2,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**GROUPED, "model_type": "llama", "max_position_embeddings": 64},
            "vision_config": {**IMAGE, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_id": 63,
            "vision_feature_layer": -1,
        },
        with_image_tokens(16),
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**GROUPED, "model_type": "gemma", "max_position_embeddings": 64},
            "vision_config": {**IMAGE, "model_type": "siglip_vision_model", "projection_dim": 32},
            "image_token_id": 63,
            "projection_dim": 32,
        },
        lambda step: {
            **with_image_tokens(16)(step),
            "token_type_ids": torch.zeros(2, 22, dtype=torch.long),
        },
    ),
    # Others.
    "decision-transformer": (
        "DecisionTransformerModel",
        {
            "state_dim": 5,
            "act_dim": 3,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 2,
            "max_ep_len": 16,
            "n_positions": 32,
        },
        lambda step: {
            "states": normal(step, 2, 4, 5),
            "actions": normal(step + 1, 2, 4, 3),
            "rewards": normal(step + 2, 2, 4, 1),
            "returns_to_go": normal(step + 3, 2, 4, 1),
            "timesteps": torch.arange(4).expand(2, 4),
            "attention_mask": torch.ones(2, 4),
        },
    ),
    "patchtst": (
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "prediction_length": 4,
            "loss": "mse",
        },
        lambda step: {"past_values": normal(step, 2, 16, 2), "future_values": normal(step + 1, 2, 4, 2)},
    ),
}


# diffusers.


def diffusers_model(name: str, options: Options) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module("diffusers"), name)(**options)
        return made

    return make


def noisy(channels: int, size: int, **shapes: tuple[int, ...]) -> Inputs:
    """A noisy image `sample` with its time, and other tensors of the given shapes."""

    def make(step: int) -> Batch:
        others = {key: normal(step + i + 1, *shape) for i, (key, shape) in enumerate(shapes.items())}
        return {"sample": normal(step, 2, channels, size, size), "timestep": torch.tensor([3, 7]), **others}

    return make


def hidden(*shape: int, **others: Any) -> Inputs:
    """`hidden_states` of this shape with their time, and others: shapes of random tensors, or tensors."""

    def make(step: int) -> Batch:
        batch: Batch = {"hidden_states": normal(step, *shape), "timestep": torch.tensor([3, 7])}
        for i, (key, value) in enumerate(others.items()):
            batch[key] = normal(step + i + 1, *value) if isinstance(value, tuple) else value
        return batch

    return make


CROSS: Options = {
    "in_channels": 4,
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
HEADS: Options = {"num_attention_heads": 2, "attention_head_dim": 8}
ROPE_IDS = torch.zeros(16, 3).index_put((torch.arange(16), torch.tensor(1)), torch.arange(16.0))
DIFFUSERS: dict[str, tuple[str, Options, Inputs]] = {
    "unet": (
        "UNet2DModel",
        {
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "attention_head_dim": 4,
        },
        noisy(3, 8),
    ),
    "unet-text": (
        "UNet2DConditionModel",
        {**CROSS, "sample_size": 8, "out_channels": 4, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        noisy(4, 8, encoder_hidden_states=(2, 4, 8)),
    ),
    "controlnet": (
        "ControlNetModel",
        {**CROSS, "conditioning_embedding_out_channels": (4, 8)},
        noisy(4, 8, encoder_hidden_states=(2, 4, 8), controlnet_cond=(2, 3, 16, 16)),
    ),
    "uvit": (
        "UVit2DModel",
        {
            "hidden_size": 32,
            "cond_embed_dim": 16,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "encoder_hidden_size": 16,
            "vocab_size": 32,
            "codebook_size": 32,
            "in_channels": 16,
            "block_out_channels": 16,
            "num_res_blocks": 1,
            "block_num_heads": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "sample_size": 4,
        },
        lambda step: {
            "input_ids": whole(step, 32, 2, 4, 4),
            "encoder_hidden_states": normal(step, 2, 4, 16),
            "pooled_text_emb": normal(step + 1, 2, 16),
            "micro_conds": normal(step + 2, 2, 5),
        },
    ),
    "dit": (
        "DiTTransformer2DModel",
        {**HEADS, "num_layers": 3, "sample_size": 8, "norm_num_groups": 4, "num_embeds_ada_norm": 16},
        hidden(2, 4, 8, 8, class_labels=torch.tensor([1, 2])),
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            **HEADS,
            "num_layers": 3,
            "sample_size": 8,
            "norm_num_groups": 4,
            "cross_attention_dim": 16,
            "caption_channels": 8,
        },
        hidden(2, 4, 8, 8, encoder_hidden_states=(2, 4, 8)),
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "joint_attention_dim": 8,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 8,
            "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        hidden(2, 4, 8, 8, encoder_hidden_states=(2, 4, 8), pooled_projections=(2, 8)),
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 8,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (4, 4, 8),
        },
        hidden(
            *(2, 16, 4),
            encoder_hidden_states=(2, 4, 8),
            pooled_projections=(2, 8),
            img_ids=ROPE_IDS,
            txt_ids=torch.zeros(4, 3),
        ),
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 8,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
        hidden(2, 4, 8, 8, encoder_hidden_states=(2, 4, 8)),
    ),
    "sana": (
        "SanaTransformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "sample_size": 8,
        },
        hidden(2, 4, 8, 8, encoder_hidden_states=(2, 4, 8)),
    ),
    "ltx-video": (
        "LTXVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "caption_channels": 8,
        },
        hidden(
            *(2, 16, 4),
            encoder_hidden_states=(2, 4, 8),
            encoder_attention_mask=torch.ones(2, 4),
            num_frames=1,
            height=4,
            width=4,
        ),
    ),
    "wan-video": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 8,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 16,
        },
        hidden(2, 4, 2, 8, 8, encoder_hidden_states=(2, 4, 8)),
    ),
    "cogview3": (
        "CogView3PlusTransformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 4,
            "pos_embed_max_size": 8,
            "sample_size": 8,
        },
        hidden(
            *(2, 4, 8, 8),
            encoder_hidden_states=(2, 4, 8),
            original_size=torch.full((2, 2), 8.0),
            target_size=torch.full((2, 2), 8.0),
            crop_coords=torch.zeros(2, 2),
        ),
    ),
    "prior": (
        "PriorTransformer",
        {**HEADS, "num_layers": 2, "embedding_dim": 8, "num_embeddings": 4},
        hidden(2, 8, proj_embedding=(2, 8), encoder_hidden_states=(2, 4, 8)),
    ),
    "stable-audio": (
        "StableAudioDiTModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 8,
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 8,
        },
        lambda step: {
            **hidden(2, 4, 8, encoder_hidden_states=(2, 4, 8), global_hidden_states=(2, 1, 8))(step),
            "rotary_embedding": (torch.ones(9, 4), torch.zeros(9, 4)),
        },
    ),
    "autoencoder-kl": (
        "AutoencoderKL",
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
            "norm_num_groups": 4,
        },
        lambda step: {"sample": normal(step, 2, 3, 16, 16)},
    ),
    "autoencoder-tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        lambda step: {"sample": normal(step, 2, 3, 16, 16)},
    ),
    "vq-model": (
        "VQModel",
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
            "norm_num_groups": 4,
            "num_vq_embeddings": 16,
        },
        lambda step: {"sample": normal(step, 2, 3, 16, 16)},
    ),
}


# timm.


def timm_model(name: str, options: Options) -> Callable[[], nn.Module]:
    """Of a class of timm.models, or of an architecture that timm has registered."""

    def make() -> nn.Module:
        timm = importlib.import_module("timm")
        made: nn.Module
        if hasattr(timm.models, name) and isinstance(getattr(timm.models, name), type):
            made = getattr(timm.models, name)(num_classes=3, **options)
        else:
            made = timm.create_model(name, num_classes=3, **options)
        return made

    return make


def squares(size: int) -> Inputs:
    return lambda step: {"x": normal(step, 4, 3, size, size)}


VIT: Options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
MLP: Options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_blocks": 3}
# name: class or architecture, options, size of the images
TIMM: dict[str, tuple[str, Options, int]] = {
    "timm-vit": ("vit_tiny_patch16_224", VIT, 16),
    "timm-deit": ("deit_tiny_distilled_patch16_224", VIT, 16),
    "timm-beit": ("beit_base_patch16_224", {**VIT, "use_rel_pos_bias": True}, 16),
    "timm-eva02": ("eva02_tiny_patch14_224", VIT, 16),
    "timm-cait": ("cait_xxs24_224", VIT, 16),
    "timm-mixer": ("MlpMixer", MLP, 16),
    "timm-swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)},
        32,
    ),
    "timm-convnext": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}, 32),
    "timm-resnet": ("resnet10t", {"channels": (8, 8, 16, 16), "stem_width": 8}, 64),
    "timm-efficientnet": ("test_efficientnet", {}, 64),
    "timm-byobnet": ("test_byobnet", {}, 64),
    "timm-nfnet": ("test_nfnet", {}, 64),
    "timm-poolformer": ("MetaFormer", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}, 32),
    "timm-xcit": ("Xcit", {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}, 32),
}

ZOO: dict[str, ZooModel] = {
    **{
        name: ZooModel(name, "transformers", transformers_model(kind, options), inputs)
        for name, (kind, options, inputs) in TRANSFORMERS.items()
    },
    **{
        name: ZooModel(name, "diffusers", diffusers_model(kind, options), inputs)
        for name, (kind, options, inputs) in DIFFUSERS.items()
    },
    **{
        name: ZooModel(name, "timm", timm_model(kind, options), squares(size))
        for name, (kind, options, size) in TIMM.items()
    },
}
