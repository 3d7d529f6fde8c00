"""What hangs on a block whose weights live on the host: fetched before it runs, given back when it has run.

What autograd saves of a block's weights, it saves as a place: whoever needs it in a backward finds them fetched, by
whatever way he came into the block. That a block's backward is near is told by hooks on what its forward gave, so that
blocks can be fetched ahead; that it has ended, by hooks on what it was given: torch runs, of all nodes that are ready,
the one that was made last, so that nothing of a block is left when the node before it runs. (A leaf has no node before
it, and is no sign.) Recomputation inside a backward runs the forward's hooks too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from twinflow.offload.blocks import Block
from twinflow.offload.hooks import Hook, in_backward

_Pack = Callable[[Tensor], object]
_Unpack = Callable[[object], Tensor]


class Keeper(Protocol):
    """Who has the weights."""

    def before_block(self, block: int) -> None:
        """It is about to run, forwards or again in a backward."""
        ...

    def after_block(self, block: int) -> None:
        """It has run."""
        ...

    def before_backward(self, block: int) -> None:
        """A block's backward begins."""
        ...

    def after_backward(self, block: int) -> None:
        """The gradients of its inputs are there."""
        ...

    def leave_others(self, block: int) -> None:
        """Of all other blocks nothing is needed any more in this backward."""
        ...

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a block's weights."""
        ...

    def edition(self, block: int) -> int:
        """Another number with every step that changes the weights."""
        ...

    def copy_for_graph(self, view: Tensor) -> Tensor:
        """The weights in `view` for a graph of gradients, which needs them after the block's backward."""
        ...

    def before_error(self) -> None:
        """A backward is about to fail: leave a state that can be saved."""
        ...


def check_transform() -> None:
    """Transforms of torch.func save tensors in their own way, which knows nothing of weights that come and go."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            "The model runs inside a transform of torch.func (grad, vmap, ...), which has no place for weights "
            "that live on "
            "the host (offload_param). Leave offload_param out."
        )


class Place(NamedTuple):
    """A tensor in the memory of a block's weights, which may be given back and taken again meanwhile."""

    view: Tensor
    edition: int


def put_hooks(param_offload: Keeper, block: Block) -> list[RemovableHandle]:
    """Before a block's forward and after it."""
    open_now: list[saved_tensors_hooks | None] = []  # what is around forwards that run

    def before(caller: nn.Module, args: object, kwargs: object) -> None:
        if caller is not block.module:  # a deep copy has the same hooks
            return
        check_transform()
        param_offload.before_block(block.index)
        if not torch.is_grad_enabled():
            open_now.append(None)
            return
        given = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
        for tensor in given:
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: param_offload.after_backward(block.index))  # type: ignore[no-untyped-call]
        if in_backward() and any(tensor.grad_fn is None for tensor in given):  # reentrant checkpointing
            param_offload.leave_others(block.index)
        saving = _saving(param_offload, block)
        open_now.append(saving)
        saving.__enter__()

    def after(caller: nn.Module, _: object, output: object) -> object:
        if caller is not block.module:
            return None
        context = open_now.pop() if open_now else None
        if context is not None:
            context.__exit__(None, None, None)
        given = list(_tensors(output))
        if any(param_offload.owns(tensor) for tensor in given):
            output = _copied(output, param_offload.owns, block.name)
            given = list(_tensors(output))
        if torch.is_grad_enabled() and not in_backward():
            for tensor in given:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: param_offload.before_backward(block.index))  # type: ignore[no-untyped-call]
        param_offload.after_block(block.index)
        return output

    outside: Callable[[Callable[..., object]], Callable[..., object]] = torch._dynamo.disable
    first = block.module.register_forward_pre_hook(Hook(outside(before)), prepend=True, with_kwargs=True)
    return [first, block.module.register_forward_hook(Hook(outside(after)), always_call=True)]


def _saving(param_offload: Keeper, block: Block) -> saved_tensors_hooks:
    """Around a forward: weights are saved as places; all else as whoever is around us wants it, checkpointing, say."""
    # torch has no public name for the hooks that are around ours, and older ones have no name at all.
    get_outer: Callable[[bool], tuple[_Pack, _Unpack] | None] = getattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
    )
    outer_pack, outer_unpack = get_outer(True) or (_same, _same)

    def pack(tensor: Tensor) -> object:
        if param_offload.owns(tensor):
            return Place(tensor.detach(), param_offload.edition(block.index))
        return outer_pack(tensor)

    def unpack(saved: object) -> Tensor:
        if not isinstance(saved, Place):
            return outer_unpack(saved)
        param_offload.before_backward(block.index)
        if saved.edition != param_offload.edition(block.index):
            param_offload.before_error()
            raise RuntimeError(
                f"{block.name}: its weights, needed for gradient computation, have been modified by a step or a write "
                f"since "
                "the forward. Call backward() before step(), and write to weights after backward()"
            )
        return param_offload.copy_for_graph(saved.view) if torch.is_grad_enabled() else saved.view  # create_graph=True

    return saved_tensors_hooks(pack, unpack)


def _same(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors in containers and dataclasses."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for item in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, item.name, None))


def _copied(value: object, is_weight: Callable[[Tensor], bool], name: str) -> object:
    """The same with copies of what lies in the weights' memory, which is given back."""
    if isinstance(value, Tensor):
        return value.clone() if is_weight(value) else value
    if type(value) is tuple:
        return tuple(_copied(item, is_weight, name) for item in value)
    if type(value) is list:
        return [_copied(item, is_weight, name) for item in value]
    if type(value) is dict:
        return {key: _copied(item, is_weight, name) for key, item in value.items()}
    if any(is_weight(tensor) for tensor in _tensors(value)):
        raise RuntimeError(
            f"{name} returns a view of its weights in a {type(value).__name__}. They live on the host (offload_param) "
            "and are there only while the block runs: return a clone()"
        )
    return value
