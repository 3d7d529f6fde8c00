"""Blocks: the modules a forward runs one after the other, each waiting for its own weights only.

The members of the outermost ModuleLists and Sequentials are blocks: transformer layers, in practice. A parameter
outside any block, or in two of them, belongs to the root, whose weights are waited for before anything runs. A block
that the first forward did not call is no place to wait either (nn.MultiheadAttention never calls its out_proj).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from twinflow.offload.plan import ROOT

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Block:
    """A module whose forward waits for its own parameters."""

    index: int
    name: str
    module: nn.Module


def find_blocks(model: nn.Module) -> list[Block]:
    """Every block of the model that has trainable parameters, in registration order."""
    named = [(name, module) for name, module in _walk(model, "") if any(p.requires_grad for p in module.parameters())]
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
    """The block of each trainable parameter, or of each frozen one; ROOT where it has none or several."""
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
    return {p: found[p].copy().pop() if len(found[p]) == 1 else ROOT for p in wanted}


def num_owners(model: nn.Module) -> dict[nn.Parameter, int]:
    """How many times each parameter is registered in the model: more than once for tied weights."""
    counts: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                counts[param] = counts.get(param, 0) + 1
    return counts
