# SPDX-License-Identifier: Apache-2.0
"""Blocks: modules that a forward runs one after the other. The forward of a block waits only for that block's weights.

The members of the outermost ModuleLists and Sequentials are blocks if they have trainable parameters. (A member that is
such a list itself is replaced by its members.) In practice blocks are transformer layers. A parameter that is not in
exactly one block, or is also used outside of it (`mark_external`), belongs to the root (`ROOT`). Before it starts, the
model's forward waits for the weights of the root, and of each block that the first forward has not called, because the
hooks of such a block never run (nn.MultiheadAttention never calls its out_proj).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from twinflow.offload.plan import ROOT

_LISTS = (nn.ModuleList, nn.Sequential)
_EXTERNAL = "_twinflow_external"  # an attribute of parameters that modules outside of their own block use


@dataclass(frozen=True)
class Block:
    """A module whose forward waits for the weights of its own parameters."""

    index: int
    name: str
    module: nn.Module


def find_blocks(model: nn.Module, is_trained: bool = True) -> list[Block]:
    """All blocks of the model that have trainable parameters, in registration order. For a model that is not trained
    (`is_trained=False`), all blocks with parameters.
    """
    named = [
        (name, module)
        for name, module in _walk(model, "")
        if any(p.requires_grad or not is_trained for p in module.parameters())
    ]
    seen: dict[int, str] = {}
    unique = [(name, module) for name, module in named if seen.setdefault(id(module), name) == name]
    return [Block(i, name, module) for i, (name, module) in enumerate(unique)]


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, _LISTS)
    for name, child in module.named_children():
        if is_list and not isinstance(child, _LISTS):
            yield f"{prefix}{name}", child
        else:
            yield from _walk(child, f"{prefix}{name}.")


def owners(model: nn.Module, blocks: list[Block], frozen: bool = False) -> dict[nn.Parameter, int]:
    """The block of each trainable (`frozen`: of each frozen) parameter. ROOT: not in one block only."""
    found: dict[nn.Parameter, set[int]] = {}
    for block in blocks:
        for param in block.module.parameters():
            found.setdefault(param, set()).add(block.index)
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
