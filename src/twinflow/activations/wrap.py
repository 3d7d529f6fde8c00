# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of chosen layers: autograd saves only their inputs, and the layers run again in backward.

The `forward` of a layer is replaced on the instance, so that the hooks of the layer are outside of the checkpoint. A
hook that waits for weights before a layer (TwinOptimizer) runs once, in forward, and not when the layer runs again. The
hooks of modules inside the layer do run again, and those of twinflow detect that backward is running. Deep copies and
pickles of the model have the original forwards.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import update_wrapper
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from twinflow.activations.disk import InputFile
from twinflow.activations.grouped import Grouping
from twinflow.activations.offload import MIN_BYTES, Offload
from twinflow.activations.partitioned import Partition
from twinflow.activations.selective import selective_contexts
from twinflow.conflicts import refuse
from twinflow.device import Device, device_for
from twinflow.errors import invalid_value
from twinflow.trace import Trace

LOGGER = logging.getLogger("twinflow")
KEY = "activation_checkpointing.layers"


def checkpoint_layers(
    model: nn.Module,
    layers: Sequence[str] | Sequence[nn.Module],
    *,
    offload: bool = False,
    partition: Partition | None = None,
    device: Device | None = None,
    trace: Trace | None = None,
    min_bytes: int = MIN_BYTES,
    selective: bool = False,
    every: int = 1,
    on_device: int = 0,
    float8: bool = False,
    disk: str | Path | None = None,
) -> Handle:
    """Checkpoint layers of the model. `layers`: names of classes, or modules.

    With `offload`, floating-point inputs of at least `min_bytes` are kept in page-locked host memory until backward.
    The copies use streams of `device`, which the handle then owns. Without `device` new streams are made, which record
    to `trace`. With `disk`, the path of a folder, the inputs are written to a file there. The inputs of the last
    `on_device` layers stay on the device. With `every` above 1, only every n-th layer keeps its input, and backward
    computes the others from it (grouped.py). With `float8`, the first input of each layer that keeps one is kept in
    float8, which changes gradients. With `partition`, each tensor rank keeps a part of the inputs. With `selective`,
    the results of matrix products and of attention are kept too, and backward computes only the other operations
    again. A model that has its own checkpointing switched on is not changed. A layer inside another checkpointed layer
    is not checkpointed separately.

    Raises ValueError if a layer is not found or is checkpointed already, or if `offload` and `partition` are both
    given.
    """
    if type(every) is not int or every < 1:
        raise invalid_value("every", every, "a whole number >= 1")
    if type(on_device) is not int or on_device < 0:
        raise invalid_value("on_device", on_device, "a whole number >= 0")
    if disk is not None and not offload:
        raise invalid_value("disk", disk, "None without offload=True", "A disk gets the inputs that leave the device.")
    found = {
        "activations": offload and partition is not None,
        "partitioned float8": partition is not None and (float8 or every > 1),
        "selective groups": selective and (float8 or every > 1),
    }
    refuse("Other keys of the config", found)
    chosen = _outermost(_find(model, layers))
    itself = _checkpoints_itself(model)
    if itself is not None:
        lost = ", and nothing is offloaded" if offload else ""
        LOGGER.info(
            f"activation checkpointing: the model has its own checkpointing ({itself}) and is not changed{lost}. "
            "Switch the model's own checkpointing off to let twinflow checkpoint these layers."
        )
        return Handle([], None)
    taken = [name for name, module in chosen.items() if isinstance(vars(module).get("forward"), Checkpointed)]
    if taken:
        raise invalid_value(
            f"A layer of {KEY}",
            taken[0],
            "a layer that is not checkpointed yet",
            "Call remove() of the handle that checkpoint_layers() has returned for this layer.",
        )
    mover: Offload | Partition | None = partition
    if offload or float8:
        where = next((param.device for param in model.parameters()), torch.device("cpu"))
        names = list(chosen)
        resident = names[len(names) - on_device :] if offload else names
        own = device or device_for(where, trace)
        file = InputFile(disk) if disk is not None else None
        mover = Offload(own, where, min_bytes, resident=resident, is_float8=float8, file=file)
    grouping = Grouping(every) if every > 1 else None
    made = [
        Checkpointed(name, module, mover, selective, grouping, i) for i, (name, module) in enumerate(chosen.items())
    ]
    return Handle(made, mover)


class Handle:
    """The checkpointed layers of a model. `remove` ends the checkpointing."""

    def __init__(self, layers: Sequence[Checkpointed], offload: Offload | Partition | None) -> None:
        self.offload = offload
        self._layers = list(layers)

    @property
    def names(self) -> list[str]:
        """Names of the checkpointed layers, as in `named_modules`."""
        return [layer.name for layer in self._layers]

    def remove(self) -> None:
        """Restore the forwards of the layers, and release the memory and the thread of the offload.

        Call it after backward, because a later backward cannot read the inputs on the host any more.
        """
        for layer in self._layers:
            layer.remove()
        self._layers.clear()
        if self.offload is not None:
            self.offload.close()
            self.offload = None


class ReplacedForward:
    """An object that takes the place of the `forward` of a module. A copy of the module has the original forward."""

    def __init__(self, module: nn.Module) -> None:
        update_wrapper(self, module.forward)
        self._module = module
        self._forward = module.forward
        self._was_own = "forward" in vars(module)  # another library has wrapped the forward on the instance before
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the forward, unless another library has wrapped this object."""
        if vars(self._module).get("forward") is self:
            if self._was_own:
                self._module.forward = self._forward
            else:
                del self._module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)  # the original forward, bound to the copy of the module

    def __reduce__(self) -> Any:
        return self._forward.__reduce__()


class Checkpointed(ReplacedForward):
    """The `forward` of a layer that is checkpointed in training."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        offload: Offload | Partition | None,
        is_selective: bool = False,
        grouping: Grouping | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(module)
        self.name = name
        self.is_selective = is_selective
        self._grouping, self._number = grouping, number
        self._offload = offload
        self._compiled: Callable[..., Any] | None = None
        self._is_on = True
        self._contexts = selective_contexts if is_selective else noop_context_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_training = self._module.training and torch.is_grad_enabled()
        forward = self._compiled or self._forward
        if not (self._is_on and is_training) or getattr(self._module, "gradient_checkpointing", False):
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten(_without_cache(self.name, args, kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}  # each tensor once
        numbers = {key: number for number, key in enumerate(tensors)}
        places = [numbers.get(id(leaf)) for leaf in leaves]
        # `run` must not refer to a tensor, which would then stay on the device.
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def run(*given: Tensor) -> Any:
            filled = [other if place is None else given[place] for place, other in zip(places, others, strict=True)]
            inner_args, inner_kwargs = tree_unflatten(filled, spec)
            return forward(*inner_args, **inner_kwargs)

        # All tensors, also those in tuples and keyword arguments, are passed as positional arguments, because torch
        # applies the hooks for saved tensors only to these.
        inputs = list(tensors.values())
        if self._grouping is None or not inputs:
            with self._saving(inputs):
                return checkpoint(run, *inputs, use_reentrant=False, context_fn=self._contexts)
        with self._grouping.calling(self._number, run, inputs, lambda: self._saving(inputs)) as note:
            out = checkpoint(run, *inputs, use_reentrant=False, context_fn=self._contexts)
        note(out)
        return out

    def _saving(self, inputs: Sequence[Tensor]) -> AbstractContextManager[object]:
        return self._offload.saving(inputs, self.name) if self._offload is not None else nullcontext()

    def compile(self, **options: Any) -> None:
        """Compile the layer inside of the checkpoint. `options`: arguments of torch.compile."""
        compiled: Callable[..., Callable[..., Any]] = torch.compile
        self._compiled = compiled(self._forward, **options)

    def remove(self) -> None:
        """Restore the forward. If another library has wrapped this object, it stays and calls the original forward."""
        self._is_on = False
        self.restore()


def _find(model: nn.Module, layers: Sequence[str] | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules that `layers` selects, by name."""
    if isinstance(layers, str) or not layers:
        allowed = "a list with at least one class name or module"
        raise invalid_value(KEY, layers, allowed, 'Write, for example, ["GPT2Block"].')
    named = dict(model.named_modules())
    if not isinstance(layers[0], str):
        wanted = {id(module) for module in layers}
        found = {name: module for name, module in named.items() if id(module) in wanted}
        if len(found) < len(wanted):
            raise ValueError(f"{KEY} is a list with a module that is not in the model. Pass only modules of the model.")
        return found
    classes = sorted({class_of(module) for module in named.values()})
    for name in cast(Sequence[str], layers):
        if name not in classes:
            near = get_close_matches(name, classes, 3)
            remedy = f"Did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
            raise invalid_value(KEY, name, f"a class of the model's modules: {', '.join(classes)}", remedy)
    return {name: module for name, module in named.items() if class_of(module) in layers}


def class_of(module: nn.Module) -> str:
    """The name of the module's original class. `fully_shard` replaces the class of a module by a new subclass."""
    bases = [base for base in type(module).__bases__ if base.__name__ != "FSDPModule"]
    is_made = len(bases) < len(type(module).__bases__)
    return (bases[0] if is_made else type(module)).__name__


def _outermost(found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules of `found` that are not inside another one of them. Inner layers run again with the outer layer."""
    inside = {id(part) for module in found.values() for part in module.modules() if part is not module}
    kept = {name: module for name, module in found.items() if id(module) not in inside}
    if len(kept) < len(found):
        names = ", ".join(sorted({class_of(module) for module in found.values() if id(module) in inside}))
        LOGGER.info(
            f"activation checkpointing: {names} inside other checkpointed layers are not checkpointed separately"
        )
    return kept


def _checkpoints_itself(model: nn.Module) -> str | None:
    """The option of a Hugging Face module or of twinflow's GPT with which the model checkpoints itself, or None."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            return f"{name or type(module).__name__}.gradient_checkpointing"
        if getattr(getattr(module, "config", None), "recompute", None) not in (None, "none"):
            return f"{name or type(module).__name__}.config.recompute"
    return None


def _without_cache(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments without the cache of keys and values, which Hugging Face passes to layers even in training.

    A layer that runs twice would write to the cache twice. An empty cache can be omitted, as Hugging Face's own
    checkpointing does. Raises ValueError for a cache that is not empty.
    """

    def kept(value: Any) -> Any:
        length: Callable[[], int] | None = getattr(value, "get_seq_length", None)
        if length is None or isinstance(value, (Tensor, nn.Module)):
            return value
        if length() > 0:
            raise ValueError(
                f"past_key_values of the checkpointed layer {name} is a cache with entries, but must be empty or None. "
                "Pass use_cache=False: a layer that runs again in backward would write to the cache twice."
            )
        return None

    changed = {key: kept(value) for key, value in kwargs.items()}
    if changed.get("use_cache") is True:
        changed["use_cache"] = False
    return tuple(kept(arg) for arg in args), changed
