"""What hangs on the model: waits before forwards, gradients taken when they are made, consistent state dicts.

All hooks are closures over the runtime, so that a deep copy of the model copies no runtime. A block waits for its own
weights; every module that owns a weight outside any block waits for all of those. Recomputation inside a backward
(activation checkpointing) runs forwards too: it must not wait, for what it would wait for may need this very backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from twinflow.offload.blocks import Block, owners
from twinflow.offload.bucket import Param
from twinflow.offload.plan import ROOT


class Listener(Protocol):
    """Who the hooks report to."""

    def before_forward(self, block: int, own: Iterable[nn.Parameter] | None = None) -> None:
        """A block's forward is about to run; ROOT for what lies outside any block, of which it will use its own."""
        ...

    def before_model(self) -> None:
        """The whole model's forward is about to run."""
        ...

    def after_model(self) -> None:
        """The whole model's forward has been queued."""
        ...

    def grad_ready(self, param: Param) -> None:
        """A gradient has been accumulated into a parameter."""
        ...

    def wait(self) -> None:
        """Somebody is about to read the weights."""
        ...


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


def install(model: nn.Module, blocks: list[Block], listener: Listener) -> list[RemovableHandle]:
    """Put the waits on the model."""
    inside = {id(module) for block in blocks for module in block.module.modules()}
    owner = owners(model, blocks)
    handles = [model.register_forward_hook(_outside_backward(model, listener.after_model))]
    for module in model.modules():
        owns = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if module is model:
            handles.append(_before(module, partial(listener.before_forward, ROOT)))
        elif owns and id(module) not in inside:
            below = [p for p in module.parameters() if owner.get(p) == ROOT]  # it may read those of its parts
            handles.append(_before(module, partial(listener.before_forward, ROOT, below)))
        if owns or module is model:
            hook: Any = _only_for(module, listener.wait)
            handles.append(module.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
    for block in blocks:
        handles.append(_before(block.module, partial(listener.before_forward, block.index)))
        shared = [p for p in block.module.parameters() if owner.get(p) == ROOT]  # with others
        if shared:
            handles.append(_before(block.module, partial(listener.before_forward, ROOT, shared)))
    handles.append(_before(model, listener.before_model))  # the last put first: it comes before all waits
    return handles


def take_gradients(params: list[Param], listener: Listener) -> list[RemovableHandle]:
    """Report every gradient as soon as it is accumulated.

    torch's hooks on tensors hide what they hold from the garbage collector: they must not hold the listener, which
    holds the tensors.
    """
    reference = weakref.ref(listener)

    def hook_for(param: weakref.ref[Param]) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            owner, found = reference(), param()
            if owner is not None and found is not None:
                owner.grad_ready(found)

        return hook

    tensors: list[Any] = [param.tensor for param in params]  # torch does not type this method
    hooks = [hook_for(weakref.ref(param)) for param in params]
    return [tensor.register_post_accumulate_grad_hook(hook) for tensor, hook in zip(tensors, hooks, strict=True)]


def _before(module: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    return module.register_forward_pre_hook(_outside_backward(module, call), prepend=True)


def _outside_backward(module: nn.Module, call: Callable[[], None]) -> Callable[..., None]:
    def hook(caller: nn.Module, *_: Any) -> None:
        if caller is module and not in_backward():  # a deep copy has the same hooks
            call()

    outside_graph: Callable[..., None] = torch._dynamo.disable(hook)  # type: ignore[no-untyped-call]
    return outside_graph


def _only_for(module: nn.Module, call: Callable[[], None]) -> Callable[..., None]:
    return lambda caller, *_: call() if caller is module else None


class Recorder:
    """Watches the first forward: the order of blocks, and modules that run more than once."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        self.order: list[int] = []
        self._runs: dict[nn.Module, int] = {}
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                self._handles.append(_before(module, partial(self._ran, module)))
        for block in blocks:
            self._handles.append(_before(block.module, partial(self.order.append, block.index)))

    def _ran(self, module: nn.Module) -> None:
        self._runs[module] = self._runs.get(module, 0) + 1

    def has_run(self, module: nn.Module) -> bool:
        """Whether a module with parameters of its own has run."""
        return self._runs.get(module, 0) > 0

    def finish(self) -> set[nn.Parameter]:
        """Stop watching; the parameters of modules that ran more than once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return {p for module, runs in self._runs.items() if runs > 1 for p in module.parameters(recurse=False)}
