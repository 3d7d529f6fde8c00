# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages of a Hugging Face model that run the model's own forward.

A stage runs the whole `forward` of the model, in which other modules take the places of the modules of other stages:

- Embeddings of the first stage are replaced by `_Before`, which returns NaN with the shape of the activations.
- A layer before the stage is replaced by `_Skipped`, which computes nothing.
- The first layer of the stage gets the activations of the previous stage instead of its own first argument (`_Entry`).
- The layer after the stage is replaced by `_Exit`, which ends the forward with the activations that it would get.

So masks, positions, residuals of special kinds and losses are computed by the model's own code, and no model needs code
here. The last layer is in the last part, with everything that follows it. The inputs of the model are sent along with
the activations, because later stages compute masks and positions from them.

What a layer gets besides the activations must not depend on earlier layers or on embeddings. Otherwise it is NaN here:
`_Entry` looks for NaN in the arguments when a stage runs for the first time, and raises an error. Modules without
weights, such as rotary embeddings, are on all stages.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinflow.errors import incompatible, invalid_value
from twinflow.parallel.specs import Part

# Packages whose forwards compute the loss only from inputs, activations and the modules that they call.
_KNOWN: Final = ("transformers", "peft")
_POSITIONS: Final = ("start_positions", "end_positions")  # the targets of question answering
_REMEDY: Final = (
    "Use pipeline.stages=1, or define a method pipeline_parts() that returns a list of twinflow.parallel.Part."
)
_NUM_OUTPUTS: Final = 8  # a layer returns at most as many values, or a tensor
# Values of a model's config that need the outputs of all layers, or skip layers.
_WHOLE: Final = {
    "output_router_logits": "the loss needs the router logits of all layers, and a stage has only those of its layers",
    "layerdrop": "a layer that a stage begins or ends with might be skipped",
    "add_cross_attention": "the layers get the output of an encoder, which the stages do not receive",
    "is_encoder_decoder": "the decoder needs the output of the encoder in every layer",
}


class OwnForward:
    """Runs parts of a model by the model's own forward: 0 are the embeddings, i is layer i - 1, and the last part is
    the last layer with everything behind it.

    `keep` removes the modules of other ranks. Until then the object references the whole model.
    """

    def __init__(self, model: nn.Module) -> None:
        _check_config(model)
        names = [name for name, _ in _lists(model)]
        if len(names) != 1:
            raise incompatible(
                f"{type(model).__name__} with {len(names)} lists of layers{_listed(names)}",
                "pipeline stages",
                "the stages divide one nn.ModuleList of layers",
                _REMEDY,
            )
        self.path: str = names[0]
        steps = self.path.split(".")
        on_path = {".".join(steps[:i]) for i in range(len(steps) + 1)}
        for name in sorted(on_path - {self.path}):
            check_forward(model.get_submodule(name))
        self.root = _shell(model, steps)
        self.num_layers = len(self._list)
        self._layers: dict[int, nn.Module] = dict(enumerate(self._list))
        self._stubs = {i: _Skipped(layer, f"{self.path}.{i}") for i, layer in self._layers.items()}
        self._inner = type(_innermost(self.root))
        if "labels" not in self._arguments and not set(_POSITIONS) <= set(self._arguments):
            raise incompatible(
                f"{self._inner.__name__} without an argument labels",
                "pipeline stages",
                "the last stage needs the loss of the model",
                "Use a class of the model with a head, for example for causal language modelling.",
            )
        self._checked: set[tuple[int, int, int]] = set()
        self._has_checked_mask = False
        # Modules before and after the layers, by name. None: of another rank.
        self._before: dict[str, nn.Module | None] = {}
        self._after: dict[str, nn.Module | None] = {}
        before = self._find_before(on_path)
        after = self._find_after(on_path, list(before))
        self._dropouts = [name for name, module in before.items() if isinstance(module, nn.Dropout)]
        self._before |= before
        self._after |= after

    @property
    def _list(self) -> nn.ModuleList:
        found = self.root.get_submodule(self.path)
        assert isinstance(found, nn.ModuleList)
        return found

    def parts(self) -> list[Part]:
        last = self.num_layers
        parts = [Part(_present(self._before), partial(self.call, 0, 1), chain=self)]
        for i in range(1, last):
            modules = {f"{self.path}.{i - 1}": self._layers[i - 1]}
            parts.append(Part(modules, partial(self.call, i, i + 1), is_block=True, chain=self))
        modules = {f"{self.path}.{last - 1}": self._layers[last - 1], **_present(self._after)}
        return [*parts, Part(modules, self.finish, is_loss=True)]

    def keep(self, module: nn.Module) -> None:
        """Reference only the modules that `module`, a PipelineModule, has. It gets the containers of the model, with
        their buffers and attributes, in place of its own.
        """
        own = dict(module.named_modules())
        self._layers = {i: layer for i, layer in self._layers.items() if f"{self.path}.{i}" in own}
        self._list._modules = {str(i): layer for i, layer in self._layers.items()}
        for name in [*self._before, *self._after]:
            if name not in own:
                _place(self.root, name, None)
        self._before = {name: own.get(name) for name in self._before}
        self._after = {name: own.get(name) for name in self._after}
        module._modules = self.root._modules
        module._buffers = self.root._buffers

    def call(self, start: int, stop: int, *values: Any) -> Any:
        """Run the parts from `start` up to `stop`. `values`: the inputs of the model, after the activations if `start`
        is not 0. Returns the activations and the inputs.
        """
        x, inputs = (None, values) if start == 0 else (values[0], values[1:])
        if start == 0:
            self._check_mask(inputs)
        with self._running(start, stop, x) as run:
            try:
                self.root(**self._named(inputs))
            except _Left as left:
                run.check()
                return left.value, *inputs
        raise _refused_order(f"{self._inner.__name__}'s", stop - 1, 0)

    def finish(self, value: Any, target: Any) -> Any:
        """The loss of the last part, or without a target the output."""
        x, *inputs = value
        with self._running(self.num_layers, self.num_layers + 1, x) as run:
            output = self.root(**self._named(inputs), **self._labels(target))
            run.check()
        name = "logits" if target is None else "loss"
        found = output[0] if isinstance(output, tuple) else getattr(output, name, output[0])
        if target is not None and run.is_first and bool(found.isnan().any()) and run.reaches(found):
            raise _refused("The loss", "the embeddings")
        return found

    def _labels(self, target: Any) -> dict[str, Any]:
        """The target as arguments of forward: labels, or the two positions of question answering."""
        if target is None:
            return {}
        if "labels" in self._arguments:
            return {"labels": target}
        if not isinstance(target, tuple | list) or len(target) != len(_POSITIONS):
            raise invalid_value("The target of question answering", type(target).__name__, f"a pair of {_POSITIONS}")
        return dict(zip(_POSITIONS, target, strict=True))

    def _check_mask(self, inputs: Sequence[Any]) -> None:
        """Raises ValueError if the first attention mask is something else, such as positions."""
        mask = inputs[1] if len(inputs) > 1 else None
        if mask is None or self._has_checked_mask:
            return
        self._has_checked_mask = True
        if mask.shape[0] != inputs[0].shape[0] or bool(((mask != 0) & (mask != 1)).any()):
            expected = "an attention mask of zeros and ones, with a row for each row of token numbers"
            raise invalid_value("The second input of the model", f"of shape {tuple(mask.shape)}", expected)

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The inputs as arguments of forward."""
        names = ("input_ids", "attention_mask")
        if len(inputs) > len(names):
            raise invalid_value("The number of inputs", len(inputs), f"at most 2: {' and '.join(names)}")
        given = {name: value for name, value in zip(names, inputs, strict=False) if value is not None}
        return given | ({"use_cache": False} if "use_cache" in self._arguments else {})

    @property
    def _arguments(self) -> Sequence[str]:
        return list(inspect.signature(self._inner.forward).parameters)

    @contextmanager
    def _running(self, start: int, stop: int, x: Tensor | None) -> Iterator[_Run]:
        """A forward of the parts from `start` up to `stop`. Changes the children of the containers until the end."""
        run = _Run(start, x, self._first_time(start, stop, x))
        members: dict[int, nn.Module] = dict(self._stubs)
        members |= {i: layer for i, layer in self._layers.items() if start <= i + 1 < stop}
        if start > 0:
            members[start - 1] = _Entry(self._layers[start - 1], self._stubs[start - 1].first, run)
        if stop <= self.num_layers:
            members[stop - 1] = _Exit(self._stubs[stop - 1])
        for stub in self._stubs.values():
            stub.run = run
        self.root.training = self._list.training  # the containers are modules of the PipelineModule, but not the root
        before = self._list._modules
        self._list._modules = {str(i): member for i, member in sorted(members.items())}
        others: dict[str, nn.Module] = {name: _Absent(name) for name, module in self._after.items() if module is None}
        if start > 0:
            others |= {name: _Before(name, run, is_dropout=name in self._dropouts) for name in self._before}
        try:
            for name, other in others.items():
                _place(self.root, name, other)
            yield run
        except Exception as error:
            reason = str(error)
            if not isinstance(error, _ElsewhereError):
                if start == 0 or run.num_entries > 0:
                    raise
                reason = f"it fails before layer {start - 1} without the modules of other stages: {error}"
            name = f"The forward of {self._inner.__name__}"
            raise incompatible(name, "pipeline stages", reason, _REMEDY) from error
        finally:
            self._list._modules = before
            for stub in self._stubs.values():
                stub.run = None
            for name in others:
                _place(self.root, name, self._before.get(name, self._after.get(name)))

    def _first_time(self, start: int, stop: int, x: Tensor | None) -> bool:
        key = (start, stop, int(torch.is_grad_enabled()))
        is_first = key not in self._checked and x is not None
        self._checked.add(key)
        return is_first

    def _find_before(self, on_path: set[str]) -> dict[str, nn.Module]:
        """The modules that run before the layers and have weights, and dropout modules among them, by name. They are
        found by running the forward of two tokens up to the first layer.
        """
        called: list[str] = []
        hooks = []
        for name, module in self.root.named_modules():
            if name not in on_path and not name.startswith(f"{self.path}."):
                hooks.append(module.register_forward_pre_hook(partial(_note, called, name)))
        param = next(self.root.parameters())
        ids = torch.zeros((1, 2), dtype=torch.long, device=param.device)
        devices = [param.device] if param.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices), _MetaNumbers():  # type: ignore[no-untyped-call]
                self.call(0, 1, ids)
        finally:
            for hook in hooks:
                hook.remove()
        outermost = [name for name in dict.fromkeys(called) if not any(name.startswith(f"{one}.") for one in called)]
        found = {name: self.root.get_submodule(name) for name in outermost}
        return {
            name: module
            for name, module in found.items()
            if isinstance(module, nn.Dropout) or next(module.parameters(), None) is not None
        }

    def _find_after(self, on_path: set[str], before: Sequence[str]) -> dict[str, nn.Module]:
        """All other modules with weights, by name."""
        inside = {name for one in before for name in _parents(one)}  # containers of modules before the layers
        found: dict[str, nn.Module] = {}
        for name, module in self.root.named_modules():
            if name in on_path or name in inside:
                self._check_container(name, module, name in on_path)
                continue
            is_known = any(f"{name}.".startswith(f"{one}.") for one in (*before, *found, self.path))
            if not is_known and next(module.parameters(), None) is not None:
                found[name] = module
        return found

    def _check_container(self, name: str, module: nn.Module, is_copied: bool) -> None:
        what = next((f"The parameter {own} of {name or type(module).__name__}" for own in module._parameters), None)
        if what is None and not is_copied:
            what = f"The module {name}, of which only a child is called before the layers,"
        if what is not None:
            raise incompatible(
                what,
                "pipeline stages",
                "it belongs to several stages",
                _REMEDY,
            )


class _MetaNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """On the meta device, a forward that reads a number gets 1. Masks read whether all positions are in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


class _Left(BaseException):
    """Ends a forward at the end of a stage. Not an Exception, so that no handler in the model catches it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Run:
    """One forward of a stage. `x`: the activations that enter it. `is_first`: its arguments are checked."""

    def __init__(self, start: int, x: Tensor | None, is_first: bool) -> None:
        self.x = x
        self.is_first = is_first
        self.num_entries = 0
        self._start = start
        self._nan: Tensor | None = None

    def nan(self) -> Tensor:
        """Stands for values that only earlier stages know."""
        assert self.x is not None
        if self._nan is None:
            self._nan = self.x.new_full((), torch.nan).requires_grad_(torch.is_grad_enabled() and self.is_first)
        return self._nan.expand(self.x.shape)

    def reaches(self, value: Tensor) -> bool:
        """Whether a value was computed from that of `nan`."""
        if self._nan is None or value.grad_fn is None:
            return False
        todo, seen = [value.grad_fn], set()
        while todo:
            node = todo.pop()
            if getattr(node, "variable", None) is self._nan:
                return True
            if node not in seen:
                seen.add(node)
                todo += [one for one, _ in node.next_functions if one is not None]
        return False

    def check(self) -> None:
        if self._start > 0 and self.num_entries != 1:
            raise _refused_order("The model's", self._start - 1, self.num_entries)


class _Stub(nn.Module):
    """In place of a layer. Has its simple attributes, which the model may read."""

    def __init__(self, layer: nn.Module, name: str, first: str) -> None:
        super().__init__()
        own = vars(self)
        simple = (str, int, float, bool, type(None))
        own |= {key: value for key, value in vars(layer).items() if isinstance(value, simple) and key not in own}
        self.name = name
        self.first = first  # the first argument of the layer's forward: the activations

    def __getattr__(self, name: str) -> Any:
        _absent(self, name)


class _Skipped(_Stub):
    """A layer that this forward does not run."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__(layer, name, next(iter(inspect.signature(layer.forward).parameters)))
        self.run: _Run | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.run is not None
        return (self.run.nan(),) * _NUM_OUTPUTS  # ignored by `_Entry`, also if the model expects a tensor


class _Exit(_Stub):
    """The layer after a stage."""

    def __init__(self, stub: _Skipped) -> None:
        super().__init__(stub, stub.name, stub.first)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Left(args[0] if args else kwargs[self.first])


class _Entry(nn.Module):
    """The first layer of a stage, with the activations of the previous stage."""

    def __init__(self, layer: nn.Module, first: str, run: _Run) -> None:
        super().__init__()
        vars(self)["_layer"] = layer  # not a child
        self._first = first
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        run.num_entries += 1
        others = {name: value for name, value in kwargs.items() if name != self._first}
        if run.is_first:
            self._check(args[1:], others)
        return self._layer(run.x, *args[1:], **others)

    def _check(self, args: Any, kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(self._layer.forward).parameters)[1:]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any()):
                    raise _refused(f"The argument {name} of {type(self._layer).__name__}", "embeddings or other layers")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)


class _Before(nn.Module):
    """A module before the layers, in a forward that begins with a layer."""

    def __init__(self, name: str, run: _Run, is_dropout: bool) -> None:
        super().__init__()
        self.name = name
        self._run = run
        self._is_dropout = is_dropout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if self._is_dropout else self._run.nan()

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self._run.x is not None:
            return _Weight(f"{self.name}.weight", self._run.x)
        return _absent(self, name)


class _Weight:
    """In place of a weight of another stage. A model may read where it is, but not its values."""

    def __init__(self, name: str, x: Tensor) -> None:
        self.name = name
        self.device = x.device
        self.dtype = x.dtype

    def __getattr__(self, name: str) -> Any:
        _absent(self, name)


class _Absent(nn.Module):
    """A module of another rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self.name} was called on a stage that does not have it.")

    def __getattr__(self, name: str) -> Any:
        _absent(self, name)


class _ElsewhereError(AttributeError):
    """The model reads an attribute of a module of another stage."""


def _absent(stub: object, name: str) -> NoReturn:
    of = vars(stub)["name"]
    raise _ElsewhereError(f"it reads the attribute {name} of {of}, which is on another stage")


def check_forward(module: nn.Module, recipe: type | None = None) -> None:
    """Raises ValueError unless the module runs the forward of `recipe`, a class for which parts are defined, or without
    `recipe` a forward of transformers or PEFT.
    """
    kind: Any = type(module)
    own = "forward" in vars(module)
    if recipe is None:
        home = kind.forward.__module__.partition(".")[0]
        is_known = home in _KNOWN or kind.forward is nn.Module.forward
        named = next((one for one in kind.__mro__ if one.__module__.partition(".")[0] in _KNOWN), nn.Module)
        reason = (
            f"a stage runs it without the layers of other stages. This is exact if it computes what "
            f"{named.__name__}.forward() does, but not for a loss of other weights, for example"
        )
    else:
        is_known = kind.forward is recipe.forward  # type: ignore[attr-defined]
        reason = f"the stages run the layers as {recipe.__name__}.forward() does, and would not call it"
    if own or not is_known:
        raise incompatible(
            f"{kind.__name__} with its own forward()",
            "pipeline stages",
            reason,
            f"Define a method pipeline_parts() in {kind.__name__}, or use pipeline.stages=1.",
        )


def _check_config(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    for name, reason in _WHOLE.items():
        value = getattr(config, name, None)
        if value:
            remedy = f"Set {name} of the model's config to {type(value)()}, or use pipeline.stages=1."
            raise incompatible(f"config.{name}={value!r}", "pipeline stages", reason, remedy)
    peft = getattr(model, "active_peft_config", None)
    if getattr(peft, "is_prompt_learning", False):
        reason = "it changes the inputs of the model, and stages after the first one get the original inputs"
        raise incompatible("Prompt learning of PEFT", "pipeline stages", reason, "Use LoRA, or pipeline.stages=1.")


def _lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of modules with weights."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if next(child.parameters(), None) is not None:
                yield prefix + name, child
        else:
            yield from _lists(child, f"{prefix}{name}.")


def _shell(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """A copy of the modules along a path. Everything else is shared."""
    made = copy.copy(module)
    for kept in ("_parameters", "_buffers", "_modules"):
        vars(made)[kept] = dict(vars(module)[kept])
    if path:
        made._modules[path[0]] = _shell(module.get_submodule(path[0]), path[1:])
    return made


def _innermost(model: Any) -> nn.Module:
    """The model inside of PEFT's wrappers."""
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def _present(modules: Mapping[str, nn.Module | None]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if module is not None}


def _place(root: nn.Module, name: str, module: nn.Module | None) -> None:
    """Set the child with this name, or remove it."""
    parent, _, last = name.rpartition(".")
    siblings = root.get_submodule(parent)._modules
    if module is None:
        siblings.pop(last, None)
    else:
        siblings[last] = module


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _note(called: list[str], name: str, *_: Any) -> None:
    called.append(name)


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _refused(what: str, source: str) -> ValueError:
    return incompatible(
        what,
        "pipeline stages",
        f"it is computed from {source}, which are on another stage",
        _REMEDY,
    )


def _refused_order(name: str, layer: int, num_calls: int) -> ValueError:
    return incompatible(
        f"{name} forward() with {num_calls} calls of layer {layer}",
        "pipeline stages",
        "the stages divide a forward that calls each layer once, in order",
        "Use pipeline.stages=1.",
    )
