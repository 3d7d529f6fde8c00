# SPDX-License-Identifier: Apache-2.0
"""Pretrained models for tests: tiny ones of many architectures, and training of a loaded one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import twinflow
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.offload.quantised import inner_tensors
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.whole import whole_weights
from twinflow.zero import Zero
from twinflow.zero.building import ClosedParameter, take_unread
from twinflow.zero.unread import unread

LLAMA = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "use_cache": False},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
HEAD = {**LLAMA, "head_dim": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
BERT = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "hidden_size": 32}
LM, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
# The name of a config in transformers, its values, and the class with which the model is loaded.
ZOO: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", LLAMA, LM),
    "llama tied": ("Llama", {**LLAMA, "tie_word_embeddings": True}, LM),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}, LM),
    "qwen3": ("Qwen3", HEAD, LM),
    "gemma": ("Gemma", HEAD, LM),
    "gemma2": ("Gemma2", HEAD, LM),
    "gemma3": ("Gemma3Text", HEAD, LM),
    "phi": ("Phi", LLAMA, LM),
    "phi3": ("Phi3", {**LLAMA, "pad_token_id": 0}, LM),
    "mistral": ("Mistral", LLAMA, LM),
    "gpt2": ("GPT2", {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, LM),
    "gpt-neox": ("GPTNeoX", {**LAYERS, "intermediate_size": 64}, LM),
    "opt": ("OPT", {**LAYERS, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}, LM),
    "falcon": ("Falcon", LAYERS, LM),
    "bloom": ("Bloom", {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4}, LM),
    "mamba": ("Mamba", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, LM),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}, LM),
    "qwen2 moe": ("Qwen2Moe", {**LLAMA, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}, LM),
    "qwen3 moe": ("Qwen3Moe", {**HEAD, **MOE, "num_experts": 4}, LM),
    "olmoe": ("Olmoe", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}, LM),
    "gpt-oss": ("GptOss", {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2}, LM),
    "deepseek": (
        "DeepseekV3",
        {
            **{**LLAMA, **MOE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
            **{"qk_nope_head_dim": 4, "v_head_dim": 8},
        },
        LM,
    ),
    "t5": ("T5", {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}, SEQ2SEQ),
    "bert": ("Bert", {**BERT, "num_attention_heads": 4}, "AutoModelForMaskedLM"),
}


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Writes a new model to a folder, in several files, and returns its class for loading."""
    import transformers

    kind, values, loader = ZOO[name]
    found: Any = getattr(transformers, loader)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**values, **changes})
    found.from_config(config).to(dtype).save_pretrained(folder, max_shard_size="40KB")
    return found


def num_closed(model: nn.Module) -> int:
    return sum(type(param) is ClosedParameter for param in model.parameters())


def digest(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A checksum of the bytes of each tensor."""
    return {
        name: hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()[:16]
        for name, tensor in tensors.items()
    }


# How a model is trained: options of TwinOptimizer, or the ZeRO section of an engine.
CPU = {"device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "optimizer": {},
    "optimizer, weights on the host": {"offload_params": True},
    "engine": {"stage": 2, "offload_optimizer": CPU},
    "engine, stage 3": {"stage": 3, "offload_optimizer": CPU},
    "engine, weights on the host": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


def train(rank: int, world: int, folder: str, way: str, plain: bool, num_steps: int = 5, **changes: Any) -> Any:
    """Losses and weights of a model that is loaded and trained. `plain`: loaded by transformers."""
    import transformers

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cls = transformers.AutoModelForCausalLM
    model = cls.from_pretrained(folder) if plain else twinflow.from_pretrained(cls, folder)
    closed = num_closed(model)
    model.train()
    options = {**WAYS[way], **changes}
    optimizer: Any
    if "stage" in options:
        config = {
            **{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "steps_per_print": 1000},
            **{"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": options},
        }
        engine, optimizer, *_ = twinflow.initialize(model=model, config=config)
        backward, step, call = engine.backward, engine.step, engine
    else:
        if world > 1:
            options["zero"] = Zero(stage=3, parks=True) if options.get("offload_params") else Zero(stage=2)
        optimizer = TwinOptimizer(model, "adamw", lr=1e-2, max_grad_norm=1.0, **options)
        backward, call = optimizer.backward, model

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

    first = digest(dict(whole_weights(optimizer)))
    draws = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(num_steps):
        tokens = torch.randint(0, 128, (2, 8), generator=draws)
        loss = call(input_ids=tokens, labels=tokens).loss
        backward(loss)
        step()
        losses.append(loss.item())
    last = digest(dict(whole_weights(optimizer)))
    engine.destroy() if "stage" in options else optimizer.close()
    return {"closed": closed, "first": first, "losses": losses, "last": last, "still closed": num_closed(model)}


def train_both(rank: int, world: int, folder: str, way: str) -> Any:
    """`train` with the model of transformers, and with ours."""
    return [train(rank, world, folder, way, plain) for plain in (True, False)]


class Memory:
    """A leaf of unread tensors, and how much of it was read."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.clone()
        self.num_read = 0

    def read(self, start: int, into: Tensor) -> None:
        into.view(-1).copy_(self.values.view(-1)[start : start + into.numel()])
        self.num_read += into.numel()


def train_unread(rank: int, world: int, way: str) -> Any:
    """A small GPT that is trained from memory, and one whose parameters have not been read before. Without packages of
    others, whose imports take seconds.
    """
    results = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=64, context=16, num_layers=2, hidden=32, num_heads=2))
        leaves: list[Memory] = []
        if not plain:
            tensors: dict[Tensor, Tensor] = {}
            for module in model.modules():
                for name, param in module._parameters.items():
                    if param is not None:
                        if param not in tensors:
                            leaves.append(Memory(param.detach()))
                            tensors[param] = nn.Parameter(unread(leaves[-1], param.shape, param.dtype))
                        module._parameters[name] = tensors[param]  # type: ignore[assignment]
            take_unread(model)
        config = {
            **{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "steps_per_print": 1000},
            **{"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": WAYS[way]},
        }
        engine, optimizer, *_ = twinflow.initialize(model=model, config=config)
        assert optimizer is not None
        draws = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(3):
            tokens = torch.randint(0, 64, (2, 9), generator=draws)
            loss = engine(tokens[:, :-1], tokens[:, 1:]).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        results.append({"losses": losses, "last": digest(dict(whole_weights(optimizer)))})
        engine.destroy()
        if leaves:
            total = sum(leaf.values.numel() for leaf in leaves)
            results[-1]["read"] = sum(leaf.num_read for leaf in leaves) / total
    return results


def train_adapters(rank: int, world: int, stage: int) -> Any:
    """Checksums of a quantised model and of its adapters, before and after training, and the losses."""
    import peft
    import torchao.quantization as torchao
    from integrations_support import llama, rows

    model: Any = llama()
    torchao.quantize_(model.model.layers, torchao.Int8WeightOnlyConfig())
    if rank:  # the first rank's values count
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.scale.zero_()
    torch.manual_seed(1 + rank)
    options: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    zero = None if world == 1 else Zero(stage=stage, parks=stage == 3)
    optimizer = TwinOptimizer(model, "adamw", lr=1e-2, max_grad_norm=1.0, zero=zero, offload_params=stage == 3)
    losses = []
    for row in rows(8).view(4, 2, -1):
        loss = model(input_ids=row, labels=row).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = dict(whole_weights(optimizer))
    inner = {f"{name}:{key}": one for name, value in found.items() for key, one in inner_tensors(value)}
    optimizer.close()
    return {"losses": losses, "weights": digest(inner)}


def peak_mb(rank: int, world: int, folder: str, way: str, plain: bool) -> Any:
    """Megabytes of host memory: most until the optimizer was built, and after that; what they were before is not
    counted.
    """
    import transformers

    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status_mb("VmRSS")
    cls = transformers.AutoModelForCausalLM
    given = {"dtype": torch.bfloat16}
    model = cls.from_pretrained(folder, **given) if plain else twinflow.from_pretrained(cls, folder, **given)
    zero = None if world == 1 else Zero(stage=3, parks=True)
    optimizer = TwinOptimizer(model, "adamw", lr=1e-3, states="bf16", zero=zero, **WAYS[way])
    peak, now = _status_mb("VmHWM") - before, _status_mb("VmRSS") - before
    numel = sum(param.numel() for param in model.parameters())
    optimizer.close()
    return {"peak": peak, "now": now, "model": 2 * numel / 1e6}


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))
