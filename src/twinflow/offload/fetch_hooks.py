"""What hangs on a block whose weights live on the host: fetched before it runs, given back when it has run.

Autograd tells when a block's backward begins, by hooks on what its forward gave, and when it has ended, by a node that
its inputs pass through. Recomputation inside a backward runs the forward's hooks too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from twinflow.offload.blocks import Block
from twinflow.offload.hooks import in_backward


class Keeper(Protocol):
    """Who has the weights."""

    def before_block(self, block: int) -> None:
        """It is about to run, forwards or again in a backward."""
        ...

    def after_block(self, block: int) -> None:
        """It has run."""
        ...

    def at_first_gradient(self) -> None:
        """Called inside a backward, before its first block's."""
        ...

    def before_backward(self, block: int) -> None:
        """A block's backward begins."""
        ...

    def after_backward(self, block: int) -> None:
        """The gradients of its inputs are there."""
        ...


class _Leaving(torch.autograd.Function):
    """The identity. Its backward comes when all that needs the block's weights has been queued."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Nothing but the graph."""
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pass the gradients on."""
        ctx.call()
        return None, *grads


def put_hooks(parking: Keeper, block: Block) -> list[RemovableHandle]:
    """Before a block's forward and after it."""

    def begin_backward(_: Tensor) -> None:
        parking.at_first_gradient()
        parking.before_backward(block.index)

    def before(caller: nn.Module, args: Any, kwargs: Any) -> Any:
        if caller is not block.module:  # a deep copy has the same hooks
            return None
        parking.before_block(block.index)
        if not torch.is_grad_enabled():
            return None
        leaves, tree = tree_flatten((args, kwargs))
        found = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not found:
            return None
        made: Any = _Leaving.apply(lambda: parking.after_backward(block.index), *(leaves[i] for i in found))  # type: ignore[no-untyped-call]
        for i, leaf in zip(found, made, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, tree)

    def after(caller: nn.Module, _: Any, output: Any) -> None:
        if caller is not block.module:
            return
        if torch.is_grad_enabled() and not in_backward():
            found: list[Any] = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
            for leaf in found:
                if leaf.requires_grad:
                    leaf.register_hook(begin_backward)
        parking.after_block(block.index)

    outside: Callable[[Any], Any] = torch._dynamo.disable
    first = block.module.register_forward_pre_hook(outside(before), prepend=True, with_kwargs=True)
    return [first, block.module.register_forward_hook(outside(after))]
