"""Splits an existing model into pipeline parts that keep their names. Each rank keeps its own parts.

A model defines its parts by a method `pipeline_parts()`. Adapters here define the parts of some causal language models
of Hugging Face (transformers 5). They are found by the name of the class, so that twinflow does not import
transformers. Their layers get the same arguments as in the model's own forward: positions from 0 on, and the mask of
the attention in use. Inputs are token numbers without padding. Targets are the unshifted labels that the model expects:
the model's loss shifts them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from twinflow.errors import incompatible, invalid_value
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.specs import Part

SLIDING: Final = "sliding_attention"


def split_model(
    model: nn.Module,
    num_ranks: int,
    index: int,
    *,
    schedule: str = "1f1b",
    num_chunks: int = 1,
    partition_method: str = "parameters",
    activation_checkpoint_interval: int = 0,
    layer_seconds: Sequence[float] | None = None,
) -> PipelineModule:
    """The layers of rank `index` in a pipeline of `num_ranks`, with the names that they have in `model`.

    The modules are those of the model, not copies, on any device (also on the meta device). Modules of other ranks are
    not referenced: their memory is free once the caller releases the model. The end of the model becomes the `loss_fn`.
    """
    made = PipelineModule(
        parts_of(model),
        num_stages=num_ranks,
        partition_method=partition_method,
        activation_checkpoint_interval=activation_checkpoint_interval,
        schedule=schedule,
        num_chunks=num_chunks,
        index=index,
        layer_seconds=layer_seconds,
    )
    if any(param.is_meta for param in made.parameters()) and hasattr(model, "_init_weights"):
        # materialize() calls this method. It references the whole model, which is on the meta device and has no memory.
        vars(made)["_init_weights"] = model._init_weights
    return made.train(model.training)


def parts_of(model: nn.Module) -> list[Part]:
    """The parts of a model in the order of its forward. Raises ValueError for an unknown class, and for a subclass with
    a forward of its own, which the parts of its base class would not run.
    """
    own: Callable[[], list[Part]] | None = getattr(model, "pipeline_parts", None)
    if own is not None:
        recipe = next((cls for cls in type(model).__mro__ if "pipeline_parts" in vars(cls)), None)
        if recipe is not None and hasattr(recipe, "forward"):
            _check_forward(model, recipe)
        return own()
    for cls in type(model).__mro__:
        if cls.__name__ in ADAPTERS:
            _check_forward(model, cls)
            base: Any = getattr(model, "base_model", model)  # the layers without the head
            # The class from the file of `cls`, or nn.Module, whose forward nobody runs.
            own_file = (one for one in type(base).__mro__ if one.__module__ == cls.__module__)
            _check_forward(base, next(own_file, nn.Module))
            return ADAPTERS[cls.__name__](model)
    remedy = "For another class, define a method pipeline_parts() that returns a list of twinflow.parallel.Part."
    raise invalid_value("The class of the model to split", type(model).__name__, ADAPTERS, remedy)


def _check_forward(module: nn.Module, recipe: type) -> None:
    """Raises ValueError unless the module runs the forward of `recipe`, the class for which the parts are defined."""
    if type(module).forward is recipe.forward and "forward" not in vars(module):  # type: ignore[attr-defined]
        return
    raise incompatible(
        f"{type(module).__name__} with its own forward()",
        "pipeline stages",
        f"the stages run the layers as {recipe.__name__}.forward() does, and would not call it",
        f"Define a method pipeline_parts() in {type(module).__name__}, or use pipeline.stages=1.",
    )


def _gpt2(model: Any) -> list[Part]:
    base = model.transformer
    first = {"transformer.wte": base.wte, "transformer.wpe": base.wpe, "transformer.drop": base.drop}
    parts = [Part(first, partial(_gpt2_embed, base.wte, base.wpe, base.drop))]
    for i, block in enumerate(base.h):
        parts.append(Part({f"transformer.h.{i}": block}, partial(_gpt2_block, block, model.config), is_block=True))
    return [*parts, _head("transformer.ln_f", base.ln_f, model)]


def _gpt2_embed(tokens: nn.Module, positions: nn.Module, dropout: nn.Module, ids: Tensor) -> Any:
    x = tokens(ids)
    return dropout(x + positions(_positions(x)))


def _gpt2_block(block: nn.Module, config: Any, x: Tensor) -> Any:
    positions = _positions(x)
    return block(x, None, _mask(config, False, x, positions), use_cache=False, position_ids=positions)


def _decoder(model: Any) -> list[Part]:
    """Llama and similar models. Every layer computes the rotary positions, so that only `x` is sent between stages."""
    base = model.model
    return [
        Part({"model.embed_tokens": base.embed_tokens}, base.embed_tokens),
        *(_decoder_block(base, model.config, i) for i in range(len(base.layers))),
        _head("model.norm", base.norm, model),
    ]


def _decoder_block(base: Any, config: Any, index: int) -> Part:
    types = getattr(config, "layer_types", None)
    slides = types[index] == SLIDING if types else getattr(config, "sliding_window", None) is not None
    block, rotary = base.layers[index], base.rotary_emb
    modules = {f"model.layers.{index}": block, "model.rotary_emb": rotary}
    return Part(modules, partial(_run_decoder, block, rotary, config, slides), is_block=True)


def _run_decoder(block: nn.Module, rotary: nn.Module, config: Any, slides: bool, x: Tensor) -> Any:
    positions = _positions(x)
    return block(
        x,
        attention_mask=_mask(config, slides, x, positions),
        position_ids=positions,
        past_key_values=None,
        use_cache=False,
        position_embeddings=rotary(x, positions),
    )


def _head(name: str, norm: nn.Module, model: Any) -> Part:
    """Norm and head with the model's own loss."""
    loss = partial(model.loss_function, vocab_size=model.config.vocab_size)
    return Part({name: norm, "lm_head": model.lm_head}, partial(_finish, norm, model.lm_head, loss), is_loss=True)


def _finish(norm: nn.Module, head: nn.Module, loss: Callable[..., Any], x: Tensor, labels: Tensor | None) -> Any:
    logits = head(norm(x))
    return logits if labels is None else loss(logits=logits, labels=labels)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def _mask(config: Any, slides: bool, x: Tensor, positions: Tensor) -> Any:
    """The mask that the model's own forward would make. `slides`: the attention has a sliding window."""
    name = "create_sliding_window_causal_mask" if slides else "create_causal_mask"
    make = getattr(sys.modules["transformers.masking_utils"], name)  # the model has imported this module
    return make(config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=positions)


# Adapters by class. A subclass without its own forward uses the adapter of its base class.
ADAPTERS: Final = {
    "GPT2LMHeadModel": _gpt2,
    "LlamaForCausalLM": _decoder,
    "MistralForCausalLM": _decoder,
    "Qwen2ForCausalLM": _decoder,
}
