# SPDX-License-Identifier: Apache-2.0
"""Hooks on blocks whose weights are on the host. They fetch weights before a block runs and release them afterwards.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer.

Forward: a hook before the block calls `before_block`, and a hook after the block calls `after_block`. Recomputation
inside a backward (activation checkpointing) runs these hooks too.

Backward uses three kinds of hooks.

- Saved-tensor hooks replace a weight that autograd saves by a `Place`. When autograd needs the weight, `unpack` fetches
  the block's weights first. This covers every backward function that reads the weights.
- Hooks on the outputs of the block call `before_backward`, so that more blocks can be fetched ahead.
- Hooks on the inputs of the block call `after_backward`. Of all nodes that are ready, autograd runs the one that was
  created last. All nodes of a block have therefore run when the gradient of its input arrives. This is not true for an
  input that is a leaf, because a leaf has no node that was created before the block. Leaf inputs get no hook.

The backward of an embedding needs no weights, and neither does that of an output layer that computes the loss in
chunks. Such a layer (`Block.is_embedding`) has no hooks on its outputs, if autograd has saved no weight of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from twinflow.errors import wrong_state
from twinflow.offload.blocks import Block
from twinflow.offload.hooks import Hook, in_backward

_Result = TypeVar("_Result")  # tensors, in any structure
_Pack = Callable[[Tensor], object]
_Unpack = Callable[[object], Tensor]


class Keeper(Protocol):
    """The methods of `ParamOffload` that the hooks call. param_offload.py describes them."""

    def is_offloaded(self, block: int) -> bool: ...
    def before_block(self, block: int) -> None: ...
    def after_block(self, block: int, is_needed: bool) -> None: ...
    def hold_block(self, block: int) -> None: ...
    def before_backward(self, block: int) -> None: ...
    def after_backward(self, block: int) -> None: ...
    def leave_others(self, block: int) -> None: ...
    def owns(self, tensor: Tensor) -> bool: ...
    def edition(self, block: int) -> int: ...
    def copy_for_graph(self, view: Tensor) -> Tensor: ...

    def before_error(self) -> None:
        """Brings the runtime into a state that can be saved, because a backward is about to raise an exception."""
        ...


def check_transform() -> None:
    """Raises an exception inside a transform of torch.func, because transforms save tensors without these hooks, and
    inside torch.jit.trace and torch.export, whose result would have no weights.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        raise wrong_state(
            "The model cannot run inside a transform of torch.func (grad, vmap, ...)",
            "its weights are on the host (offload_param), and such a transform keeps weights after their block has run",
            "Train without offload_param.",
        )
    is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    if torch._C._get_tracing_state() is not None or is_exporting():
        raise wrong_state(
            "The model cannot be traced by torch.jit or exported",
            "its weights are on the host (offload_param), and the traced model would use them without fetching them",
            "Trace or export copy.deepcopy(model), which has all weights, or the model after close() of the optimizer.",
        )


class LazyOutput:
    """The base class of outputs of an output layer whose values are not computed yet. The layer will run again, in
    `run_inside`, to compute what is needed of them.
    """


class _FetchHook(Hook):
    """The hook before a block. `after`: the hook after it."""

    def __init__(self, before: Callable[..., object], after: Callable[..., object]) -> None:
        super().__init__(before)
        self.after = after


def run_inside(module: nn.Module, function: Callable[..., _Result], *args: object) -> _Result:
    """Calls a function that uses the weights of a module as if it were the forward of the module. If these weights are
    on the host, they are fetched before and released afterwards.
    """
    hook = next((one for one in module._forward_pre_hooks.values() if isinstance(one, _FetchHook)), None)
    if hook is None:
        return function(*args)
    hook(module, args, {})
    output: object = None
    try:
        output = function(*args)
    finally:
        replaced = hook.after(module, args, output)
    return cast(_Result, output if replaced is None else replaced)


class Place(NamedTuple):
    """A weight that autograd has saved, as a view. Its memory may be released and fetched again before backward."""

    view: Tensor
    edition: int  # `ParamOffload.edition` of the block when the weight was saved


def put_hooks(param_offload: Keeper, block: Block) -> list[RemovableHandle]:
    """Registers the hooks on a block."""
    open_now: list[_Saving | None] = []  # saved-tensor hooks of running forwards; None under no_grad

    def before(caller: nn.Module, args: object, kwargs: object) -> None:
        # A deep copy of the module has the same hooks. With ratio "auto" the weights may have moved to the device.
        if caller is not block.module or not param_offload.is_offloaded(block.index):
            return
        check_transform()
        param_offload.before_block(block.index)
        if not torch.is_grad_enabled():
            open_now.append(None)
            return
        given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        for tensor in given:
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: param_offload.after_backward(block.index))  # type: ignore[no-untyped-call]
        if in_backward() and any(tensor.grad_fn is None for tensor in given):  # reentrant checkpointing
            param_offload.leave_others(block.index)
        saving = _saving(param_offload, block)
        open_now.append(saving)
        saving.hooks.__enter__()

    def after(caller: nn.Module, _: object, output: object) -> object:
        if caller is not block.module or not param_offload.is_offloaded(block.index):
            return None
        saving = open_now.pop() if open_now else None
        if saving is not None:
            saving.hooks.__exit__(None, None, None)
        if isinstance(output, LazyOutput):
            param_offload.hold_block(block.index)
            return None
        given = list(tensors_in(output))
        if any(param_offload.owns(tensor) for tensor in given):
            output = _copied(output, param_offload.owns, block.name)
            given = list(tensors_in(output))
        is_needed = not block.is_embedding or saving is None or bool(saving.saved)
        if torch.is_grad_enabled() and not in_backward() and is_needed:
            for tensor in given:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: param_offload.before_backward(block.index))  # type: ignore[no-untyped-call]
        param_offload.after_block(block.index, is_needed)
        return output

    outside: Callable[[Callable[..., object]], Callable[..., object]] = torch._dynamo.disable
    hook = _FetchHook(outside(before), outside(after))
    first = block.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return [first, block.module.register_forward_hook(Hook(hook.after), always_call=True)]


class _Saving(NamedTuple):
    hooks: saved_tensors_hooks
    saved: list[bool]  # not empty if autograd has saved a weight


def _saving(param_offload: Keeper, block: Block) -> _Saving:
    """Saved-tensor hooks that save each weight as a `Place`. They pass other tensors on to the outer hooks, if any."""
    # torch has no public name for the outer saved-tensor hooks. Older versions do not offer them at all.
    get_outer: Callable[[bool], tuple[_Pack, _Unpack] | None] = getattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
    )
    outer_pack, outer_unpack = get_outer(True) or (_same, _same)
    saved: list[bool] = []

    def pack(tensor: Tensor) -> object:
        if param_offload.owns(tensor):
            saved[:] = [True]
            return Place(tensor.detach(), param_offload.edition(block.index))
        return outer_pack(tensor)

    def unpack(saved: object) -> Tensor:
        if not isinstance(saved, Place):
            return outer_unpack(saved)
        param_offload.before_backward(block.index)
        if saved.edition != param_offload.edition(block.index):
            param_offload.before_error()
            raise wrong_state(
                f"The gradients of {block.name} cannot be computed",
                "its weights have been modified by a step or a write since its forward",
                "Call backward() before step(), and write to weights only after backward().",
            )
        return param_offload.copy_for_graph(saved.view) if torch.is_grad_enabled() else saved.view  # create_graph=True

    return _Saving(saved_tensors_hooks(pack, unpack), saved)


def _same(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested containers and dataclasses."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for item in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, item.name, None))


def _copied(value: object, is_weight: Callable[[Tensor], bool], name: str) -> object:
    """The output of a block, with clones of tensors in the memory of weights, because that memory is released."""
    if isinstance(value, Tensor):
        return value.clone() if is_weight(value) else value
    if type(value) is tuple:
        return tuple(_copied(item, is_weight, name) for item in value)
    if type(value) is list:
        return [_copied(item, is_weight, name) for item in value]
    if type(value) is dict:
        return {key: _copied(item, is_weight, name) for key, item in value.items()}
    if any(is_weight(tensor) for tensor in tensors_in(value)):
        raise wrong_state(
            f"{name} cannot return a view of its weights in a {type(value).__name__}",
            "the weights are on the device only while the block runs (offload_param)",
            "Return a clone() of the view.",
        )
    return value
