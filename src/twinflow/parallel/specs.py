# SPDX-License-Identifier: Apache-2.0
"""Layers of a pipeline: specs that are built later, layers that share weights, and parts of an existing model.

A spec is a class and its arguments. Only the rank that has the layer builds it, so no rank needs memory for the whole
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from twinflow.errors import incompatible, invalid_value

Item = Any  # an element of a list of layers: nn.Module, LayerSpec, TiedLayerSpec, Part, or a function


class LayerSpec:
    """A layer that is built later, and only on the rank that has it: `LayerSpec(nn.Linear, 4, 8, bias=False)`."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            remedy = "Put a function without weights into the list of layers directly."
            raise invalid_value("The typename of a LayerSpec", typename, "a subclass of torch.nn.Module", remedy)
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [repr(value) for value in self.module_args]
        given += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer that is used at several positions. All specs with the same `key` are one module, built from the first of
    these specs.

    `forward_fn(module, x)` is called at this position instead of the module. `tied_weight_attr` names the shared
    parameters, as in DeepSpeed ("weight", "embedding.weight", or a list). They must exist. The gradients of all
    parameters of the module are summed over its uses, not only of the named ones. Otherwise the result would depend
    on whether the uses are on the same rank.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key:
            raise invalid_value("The key of a TiedLayerSpec", key, "a string that is not empty")
        if forward_fn is not None and not callable(forward_fn):
            raise invalid_value("forward_fn", forward_fn, "a function of the module and its input, or None")
        names = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise invalid_value("tied_weight_attr", tied_weight_attr, "the name of a parameter, or a list of names")
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, names

    def check(self, module: nn.Module) -> None:
        """Raise a ValueError if `tied_weight_attr` names something that is not a parameter of the module."""
        own = set(module.parameters())
        for name in self.tied_weight_attr:
            found: Any = module
            for step in name.split("."):
                found = getattr(found, step, None)
            if not isinstance(found, nn.Parameter) or found not in own:
                allowed = [name for name, _ in module.named_parameters()]
                raise invalid_value(f"tied_weight_attr of the TiedLayerSpec {self.key!r}", name, allowed)


class Chain(Protocol):
    """Runs consecutive parts of a model in one call."""

    def call(self, start: int, stop: int, /, *values: Any) -> Any:
        """The output of the parts from `start` up to `stop`."""
        ...


@dataclass(frozen=True, eq=False)
class Part:
    """A layer that is cut out of an existing model. `modules` keep the names that they have in the model.

    `call(*values)` gets the output of the previous part. A tuple is passed as several arguments. Several parts may
    share a module without weights. `call` must reference only `modules`, through `functools.partial`. Then modules of
    other ranks can be freed, and a deep copy runs its own modules.

    The last part of a model has `is_loss`: `call(x, target)` returns the loss, and `call(x, None)` the output of the
    model.
    """

    modules: Mapping[str, nn.Module]
    call: Callable[..., Any]
    is_block: bool = False  # one of the model's equal layers: it may be recomputed in backward
    is_loss: bool = False
    chain: Chain | None = None  # also runs this part together with its neighbours of the same chain


def checked(layers: Iterable[Item], loss_fn: object) -> list[Item]:
    """The layers as a list. Raises a ValueError for an item that cannot be run."""
    items = list(layers)
    if not items:
        raise invalid_value("layers", items, "a list with at least one layer")
    first: dict[str, TiedLayerSpec] = {}
    for i, item in enumerate(items):
        if isinstance(item, type) or not (callable(item) or isinstance(item, (LayerSpec, Part))):
            remedy = "Write LayerSpec(Class, ...) for a layer that is built later." if isinstance(item, type) else ""
            raise invalid_value(f"Layer {i}", item, "an nn.Module, LayerSpec, TiedLayerSpec or function", remedy)
        if is_loss(item) and (i < len(items) - 1 or loss_fn is not None):
            fact = f"Layer {i} is a Part with is_loss=True, which must"
            if i < len(items) - 1:
                raise ValueError(f"{fact} be the last of the {len(items)} layers. Move the part to the end.")
            raise ValueError(f"{fact} not be used with loss_fn. Remove loss_fn or is_loss=True.")
        if isinstance(item, TiedLayerSpec) and first.setdefault(item.key, item).typename is not item.typename:
            name = f"The class of layer {i}, which is tied with the key {item.key!r},"
            allowed = f"{type_name(first[item.key])!r}, the class of the first layer with this key"
            raise invalid_value(name, type_name(item), allowed)
    if loss_fn is not None and not callable(loss_fn):
        raise invalid_value("loss_fn", loss_fn, "a function of the output and the target")
    return items


def is_loss(item: Item) -> bool:
    """Whether the item is the part with the loss, which needs a target."""
    return isinstance(item, Part) and item.is_loss


def type_name(item: Item) -> str:
    """The name of a layer's class (of a part: the class of its first module), or of a function."""
    if isinstance(item, LayerSpec):
        return item.typename.__name__
    if isinstance(item, Part):
        item = next(iter(item.modules.values()))
    return type(item).__name__ if isinstance(item, nn.Module) else getattr(item, "__name__", type(item).__name__)


def num_params(item: Item, counts_specs: bool) -> int | None:
    """Number of trainable parameters of a layer, each counted once. With `counts_specs`, the layer of a spec is
    built on the meta device to count its parameters. Otherwise the result for a spec is None."""
    modules = list(item.modules.values()) if isinstance(item, Part) else [item] if isinstance(item, nn.Module) else []
    if isinstance(item, LayerSpec):
        if not counts_specs:
            return None
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                modules = [item.build()]
        except (NotImplementedError, RuntimeError) as error:
            reason = "this layer cannot be built on the meta device, where its parameters are counted"
            remedy = "Use partition_method='uniform' or 'type:REGEX'."
            raise incompatible("partition_method='parameters'", str(item), reason, remedy) from error
    return sum(param.numel() for param in nn.ModuleList(modules).parameters() if param.requires_grad)


def seeded(spec: LayerSpec, seed: int, seed_fn: Callable[[int], object]) -> nn.Module:
    """Build a layer from a seed. The states of the random generators (CPU and current GPU) do not change."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        seed_fn(seed)
        return spec.build()


def make_layers(
    items: Sequence[Item], is_here: Sequence[bool], base_seed: int, seed_fn: Callable[[int], object]
) -> list[dict[str, nn.Module]]:
    """The modules of every layer of the model by name: all existing modules, and the specs of this rank.

    A module that is used again has the name of its first use. A spec is built from `base_seed` plus the index of its
    first use.
    """
    homes = [_first_use(items, i) for i in range(len(items))]
    here = {home for home, is_own in zip(homes, is_here, strict=True) if is_own}
    modules: dict[int, nn.Module] = {}
    for home in dict.fromkeys(homes):
        item = items[home]
        if isinstance(item, nn.Module):
            modules[home] = item
        elif isinstance(item, LayerSpec) and home in here:
            modules[home] = seeded(item, base_seed + home, seed_fn)
    made: list[dict[str, nn.Module]] = []
    for item, home in zip(items, homes, strict=True):
        if isinstance(item, TiedLayerSpec) and home in modules:
            item.check(modules[home])
        own = {f"layers.{home}": modules[home]} if home in modules else {}
        made.append(dict(item.modules) if isinstance(item, Part) else own)
    return made


def _first_use(items: Sequence[Item], index: int) -> int:
    """Index of the first layer with the same module: with the same key, or the same nn.Module in the list."""
    item = items[index]
    if isinstance(item, TiedLayerSpec):
        return next(i for i, other in enumerate(items) if isinstance(other, TiedLayerSpec) and other.key == item.key)
    if isinstance(item, nn.Module):
        return next(i for i, other in enumerate(items) if other is item)
    return index
