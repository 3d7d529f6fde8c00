# SPDX-License-Identifier: Apache-2.0
"""Splits an existing model into pipeline parts that keep their names. Each rank keeps its own parts.

A model defines its parts by a method `pipeline_parts()`. The parts of Hugging Face models are those of
`own_forward.py`. Inputs are token numbers, or a pair of token numbers and an attention mask. Targets are the labels
that the model expects. A causal language model shifts them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from twinflow.errors import invalid_value
from twinflow.parallel.own_forward import OwnForward, check_forward
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.specs import Part


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
    parts = parts_of(model)
    made = PipelineModule(
        parts,
        num_stages=num_ranks,
        partition_method=partition_method,
        activation_checkpoint_interval=activation_checkpoint_interval,
        schedule=schedule,
        num_chunks=num_chunks,
        index=index,
        layer_seconds=layer_seconds,
    )
    if isinstance(parts[0].chain, OwnForward):
        parts[0].chain.keep(made)
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
            check_forward(model, recipe)
        return own()
    if hasattr(getattr(model, "config", None), "model_type"):
        return OwnForward(model).parts()
    remedy = "For another class, define a method pipeline_parts() that returns a list of twinflow.parallel.Part."
    allowed = "twinflow's GPT, or a model of transformers or PEFT"
    raise invalid_value("The class of the model to split", type(model).__name__, allowed, remedy)
