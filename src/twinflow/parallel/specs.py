"""What a pipeline is made of: layers that are not made yet, layers that share weights, and parts of a made model.

A spec is a class and its arguments. Only the rank that has the layer makes it, so that no rank ever needs memory for
the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twinflow.errors import invalid_value

Item = Any  # of a list of layers: nn.Module, LayerSpec, TiedLayerSpec, Part, or a function


class LayerSpec:
    """A layer that is made when its rank is known: `LayerSpec(nn.Linear, 4, 8, bias=False)`."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            remedy = "A function that needs no weights goes into the list of layers as it is."
            raise invalid_value("typename of a LayerSpec", typename, "a subclass of torch.nn.Module", remedy)
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    @property
    def type_name(self) -> str:
        """The class's name."""
        return self.typename.__name__

    def build(self) -> nn.Module:
        """The layer itself."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [repr(value) for value in self.module_args]
        given += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.type_name, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer that is used in several places: all uses of a `key` are one module, made of the first use's spec.

    `forward_fn(module, x)` runs it in this place; without it, it is called. `tied_weight_attr` names what is shared, as
    DeepSpeed wants it ("weight", or "embedding.weight", or a list), and has to be there. Gradients of all parameters of
    the module are summed over its uses, named or not: otherwise training would depend on which ranks the uses are on.
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
            raise invalid_value("key of a TiedLayerSpec", key, "a name")
        if forward_fn is not None and not callable(forward_fn):
            raise invalid_value("forward_fn", forward_fn, "a function of the module and its input, or None")
        names = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise invalid_value("tied_weight_attr", tied_weight_attr, "a name, or a list of names")
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, names

    def check(self, module: nn.Module) -> None:
        """The names that are said to be tied must be parameters of the module."""
        own = set(module.parameters())
        for name in self.tied_weight_attr:
            found: Any = module
            for step in name.split("."):
                found = getattr(found, step, None)
            if not isinstance(found, nn.Parameter) or found not in own:
                allowed = [name for name, _ in module.named_parameters()]
                raise invalid_value(f"tied_weight_attr of {self.key!r}", name, allowed)


@dataclass(frozen=True, eq=False)
class Part:
    """A layer that is cut out of a made model: `modules` keep the names they have there.

    `call(*values)` takes what the part before gave, a tuple as several arguments. Several parts may have a module in
    common if it has no weights. It is a function that holds these modules alone, and by `functools.partial`, so that
    what other ranks have can be let go, and a deep copy runs its own modules.

    The part that ends a model `is_loss`: `call(x, target)` is the loss, `call(x, None)` the model's output.
    """

    modules: Mapping[str, nn.Module]
    call: Callable[..., Any]
    is_block: bool = False  # one of the model's many equal layers: it may run again in backward
    is_loss: bool = False

    @property
    def type_name(self) -> str:
        """The class of its first module."""
        return type(next(iter(self.modules.values()))).__name__


def count_trainable(*modules: nn.Module) -> int:
    """Numbers that are trained; those of a shared parameter once."""
    params = {param for module in modules for param in module.parameters() if param.requires_grad}
    return sum(param.numel() for param in params)


def count_spec(spec: LayerSpec) -> int:
    """The same of a layer that is not made: it is made without memory, and thrown away."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return count_trainable(spec.build())
    except (NotImplementedError, RuntimeError) as error:
        remedy = "It cannot be made on the meta device, which counting its parameters takes."
        raise invalid_value(f"partition_method for {spec}", "parameters", ("uniform", "type:REGEX"), remedy) from error


def checked(layers: Iterable[Item], loss_fn: object) -> list[Item]:
    """The layers as a list, each of a kind that can be run."""
    items = list(layers)
    if not items:
        raise invalid_value("layers", items, "at least one layer")
    first: dict[str, TiedLayerSpec] = {}
    for i, item in enumerate(items):
        if isinstance(item, type) or not (callable(item) or isinstance(item, (LayerSpec, Part))):
            remedy = "Write LayerSpec(Class, ...) for a layer that is made later." if isinstance(item, type) else ""
            raise invalid_value(f"layer {i}", item, "an nn.Module, LayerSpec, TiedLayerSpec or function", remedy)
        if is_loss(item) and (i < len(items) - 1 or loss_fn is not None):
            raise invalid_value(f"layer {i}", "a loss", "the last layer, without another loss_fn")
        if isinstance(item, TiedLayerSpec) and first.setdefault(item.key, item).typename is not item.typename:
            raise invalid_value(f"layer {i}, tied as {item.key!r}", item.type_name, [first[item.key].type_name])
    if loss_fn is not None and not callable(loss_fn):
        raise invalid_value("loss_fn", loss_fn, "a function of output and target")
    return items


def is_loss(item: Item) -> bool:
    """Whether it ends the model and needs a target."""
    return isinstance(item, Part) and item.is_loss


def type_name(item: Item) -> str:
    """The class of a layer, or a function's name."""
    if isinstance(item, (LayerSpec, Part)):
        return item.type_name
    return type(item).__name__ if isinstance(item, nn.Module) else getattr(item, "__name__", type(item).__name__)


def num_params(item: Item, counts_specs: bool) -> int | None:
    """Trainable parameters of a layer; None for a spec that nobody wants counted."""
    if isinstance(item, LayerSpec):
        return count_spec(item) if counts_specs else None
    if isinstance(item, Part):
        return count_trainable(*item.modules.values())
    return count_trainable(item) if isinstance(item, nn.Module) else 0


def seeded(spec: LayerSpec, seed: int, seed_fn: Callable[[int], object]) -> nn.Module:
    """The layer, made from a seed; random numbers go on afterwards as if none had been drawn."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        seed_fn(seed)
        return spec.build()


def make_layers(
    items: Sequence[Item], is_here: Sequence[bool], build: Callable[[LayerSpec, int], nn.Module]
) -> list[dict[str, nn.Module]]:
    """For every layer of the model its modules by name: of all ranks those that came made, and this rank's specs.

    A module that is used again has the name of its first use, and is built as that one: `build(spec, index)`.
    """
    homes = [_first_use(items, i) for i in range(len(items))]
    here = {home for home, is_own in zip(homes, is_here, strict=True) if is_own}
    modules: dict[int, nn.Module] = {}
    for home in dict.fromkeys(homes):
        item = items[home]
        if isinstance(item, nn.Module):
            modules[home] = item
        elif isinstance(item, LayerSpec) and home in here:
            modules[home] = build(item, home)
    made: list[dict[str, nn.Module]] = []
    for item, home in zip(items, homes, strict=True):
        if isinstance(item, TiedLayerSpec) and home in modules:
            item.check(modules[home])
        own = {f"layers.{home}": modules[home]} if home in modules else {}
        made.append(dict(item.modules) if isinstance(item, Part) else own)
    return made


def _first_use(items: Sequence[Item], index: int) -> int:
    """The first layer that is the same module: by its key, or because it is given twice."""
    item = items[index]
    if isinstance(item, TiedLayerSpec):
        return next(i for i, other in enumerate(items) if isinstance(other, TiedLayerSpec) and other.key == item.key)
    if isinstance(item, nn.Module):
        return next(i for i, other in enumerate(items) if other is item)
    return index
