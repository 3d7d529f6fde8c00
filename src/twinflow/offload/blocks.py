# SPDX-License-Identifier: Apache-2.0
"""Blocks: modules that a forward runs one after the other. The forward of a block waits only for that block's weights.

The members of the outermost ModuleLists and Sequentials are blocks if they have trainable parameters. (A member that is
such a list itself is replaced by its members.) In practice blocks are transformer layers. A parameter that is not in
exactly one block, or is also used outside of it (`mark_external`), belongs to the root (`ROOT`). Before it starts, the
model's forward waits for the weights of the root, and of each block that the first forward has not called, because the
hooks of such a block never run (nn.MultiheadAttention never calls its out_proj).

With weights on the host, the large layers outside of the lists can be blocks too (`with_embeddings`). In practice they
are the embedding and the output layer. If their weights are tied, the first of them has the weights, and the others
refer to it (`Block.owner`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from twinflow.offload.plan import ROOT
from twinflow.planner.models import LARGE

_LISTS = (nn.ModuleList, nn.Sequential)
_EXTERNAL = "_twinflow_external"  # an attribute of parameters that modules outside of their own block use


@dataclass(frozen=True)
class Block:
    """A module whose forward waits for the weights of its own parameters."""

    index: int
    name: str
    module: nn.Module
    is_embedding: bool = False  # a layer outside of the lists
    tied_to: int | None = None  # the block that has the weights of this one, because they are tied

    @property
    def owner(self) -> int:
        """The index of the block to which the weights belong."""
        return self.index if self.tied_to is None else self.tied_to


def find_blocks(model: nn.Module, is_trained: bool = True, with_embeddings: bool = False) -> list[Block]:
    """All blocks of the model that have trainable parameters, in registration order. For a model that is not trained
    (`is_trained=False`), all blocks with parameters. `with_embeddings`: also the large layers outside of the lists,
    with or without trainable parameters.
    """
    listed: dict[nn.Module, str] = {}
    for name, module in _walk(model, ""):
        listed.setdefault(module, name)
    names = {
        module: name
        for module, name in listed.items()
        if any(p.requires_grad or not is_trained for p in module.parameters())
    }
    large = _find_large(model, list(listed)) if with_embeddings and names else {}
    names |= large
    blocks: list[Block] = []
    first: dict[nn.Parameter, int] = {}  # of each parameter of a large layer: the first layer that has it
    for module in (module for module in model.modules() if module in names):
        index, params = len(blocks), list(module.parameters()) if module in large else []
        owner = min((first[param] for param in params if param in first), default=index)
        first.update((param, owner) for param in params)
        tied_to = owner if owner != index else None
        blocks.append(Block(index, names[module], module, module in large, tied_to))
    return blocks


def _find_large(model: nn.Module, listed: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Layers outside of the lists that have a matrix and at least a 16th of the elements of the largest block."""
    inside = {module for one in listed for module in one.modules()}
    least = LARGE * max(sum(p.numel() for p in one.parameters()) for one in listed)
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        own = [param for param in module._parameters.values() if param is not None]
        is_leaf = not module._modules and type(module).forward is not nn.Module.forward  # a ParameterList has none
        is_layer = module not in inside and is_leaf and any(param.dim() > 1 for param in own)
        if is_layer and sum(param.numel() for param in own) >= least:
            found[module] = name
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, _LISTS)
    for name, child in module.named_children():
        if is_list and not isinstance(child, _LISTS):
            yield f"{prefix}{name}", child
        else:
            yield from _walk(child, f"{prefix}{name}.")


def owners(model: nn.Module, blocks: Sequence[Block], frozen: bool = False) -> dict[nn.Parameter, int]:
    """The block of each trainable (`frozen`: of each frozen) parameter. ROOT: not in one block only."""
    found: dict[nn.Parameter, set[int]] = {}
    for block in blocks:
        for param in block.module.parameters():
            found.setdefault(param, set()).add(block.owner)
    inside = {id(m) for block in blocks for m in block.module.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for param in module.parameters(recurse=False):
                found.setdefault(param, set()).add(ROOT)
    wanted = [param for param in model.parameters() if param.requires_grad != frozen]
    return {p: found[p].copy().pop() if len(found[p]) == 1 and not is_external(p) else ROOT for p in wanted}


def experts_of(blocks: Sequence[Block]) -> dict[nn.Parameter, int]:
    """The number of the expert to which a parameter belongs, for experts that are modules.

    Modules inside a block are taken for experts if they are members of one ModuleList and have parameters of equal
    shapes. A forward may leave out any of them.
    """
    lists = (m for block in blocks for m in block.module.modules() if isinstance(m, nn.ModuleList))
    alike = (members for members in lists if len({tuple(p.shape for p in one.parameters()) for one in members}) == 1)
    found: dict[nn.Parameter, int] = {}
    for number, expert in enumerate((one for members in alike for one in members), 1):
        for param in expert.parameters():
            found.setdefault(param, number)
    return found


def mark_external(param: nn.Parameter) -> None:
    """Makes a parameter belong to the root, because modules outside of its own block use it."""
    setattr(param, _EXTERNAL, True)


def is_external(param: nn.Parameter) -> bool:
    return bool(getattr(param, _EXTERNAL, False))


def num_owners(model: nn.Module) -> dict[nn.Parameter, int]:
    """How many times each parameter is registered in the model: more than once for tied weights."""
    counts: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                counts[param] = counts.get(param, 0) + 1
    return counts
