# SPDX-License-Identifier: Apache-2.0
"""Whole weights of a model that tensor or expert ranks have split: a state dict, and `save_pretrained` of transformers.

Both are collective: all tensor ranks of a replica, or all expert ranks, have to call them. They meet first
(dist/meeting.py), because a script often saves on rank 0 only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twinflow.conflicts import conflict
from twinflow.dist.group import Group
from twinflow.dist.meeting import Meeting
from twinflow.errors import invalid_value
from twinflow.parallel.shard import TensorShard, shard_of

_REMEDY = (
    "Call it on all ranks of a replica, for example on those with engine.dp_rank == 0. Only the first of them writes "
    "files."
)


class WholeWeights:
    """The whole weights of `module`, of which this rank has a part. `writes`: this rank writes files for all.
    `is_expert`: the ranks of `group` have different experts; otherwise they are tensor ranks.
    """

    def __init__(self, module: nn.Module, group: Group, writes: bool, is_expert: bool = False) -> None:
        self._module = module
        self._group = group
        kind, remedy = ("expert ranks", "Call it on all ranks.") if is_expert else ("tensor ranks", _REMEDY)
        self._reason = f"each of the {kind} has a part of the weights"
        self._meeting = Meeting(group, kind, remedy)
        wrap_save_pretrained(module, self.state_dict, writes)

    def __deepcopy__(self, memo: object) -> WholeWeights:
        return self  # `save_pretrained` of a copy passes the copy to `state_dict`

    def state_dict(self, call: str, part: nn.Module | None = None, exclude_frozen: bool = False) -> dict[str, object]:
        """The state dict of the whole module, or of a submodule, with copies on the host. Tied weights share memory.
        `call` is the name for errors. `exclude_frozen`: without parameters that are not trained. Raises RuntimeError if
        not all ranks of the group make the call.
        """
        self.meet(call)
        joined: dict[int, Tensor] = {}  # by the id of the parameter or buffer
        found: dict[str, object] = {}
        module = self._module if part is None else part
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                if exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad:
                    continue
                if id(value) not in joined:
                    joined[id(value)] = self.joined(value, shard_of(value))
                found[name] = joined[id(value)]
            else:
                found[name] = value
        return found

    def cut(self, state_dict: Mapping[str, object]) -> dict[str, object]:
        """The state dict of this rank's part. A tensor that does not have the shape of the whole one stays as it is."""
        shards = {
            name: (param, shard_of(param)) for name, param in self._module.named_parameters(remove_duplicate=False)
        }
        found = dict(state_dict)
        for name, (param, shard) in shards.items():
            value = found.get(name)
            if shard is not None and isinstance(value, Tensor) and value.shape == shard.whole_shape(param.shape):
                found[name] = shard.cut(value)
        return found

    def meet(self, call: str) -> None:
        """Raises RuntimeError if not all ranks of the group make the call."""
        self._meeting.meet(call, self._reason)

    def joined(self, value: Tensor, shard: TensorShard | None) -> Tensor:
        """A copy of the whole tensor on the host, from the parts of all ranks. `shard`: the part in `value`."""
        local = value.detach()
        if shard is None:
            return local.to("cpu", copy=True)
        parts = torch.empty((self._group.world, *local.shape), dtype=local.dtype, device=local.device)
        parts[self._group.rank] = local
        self._group.all_gather(parts.view(-1))
        return shard.join(list(parts.cpu()))


def wrap_save_pretrained(
    module: nn.Module, state_dict: Callable[[str, nn.Module], Mapping[str, object]], writes: bool
) -> None:
    """Makes `save_pretrained` of a module and its submodules save whole weights, unless the caller passes a state dict.

    `state_dict(call, submodule)` gathers them. `writes`: this rank writes the files.
    """
    for part in module.modules():  # a model with a head contains one without, which has the method too
        original: Any = getattr(part, "save_pretrained", None)
        if isinstance(original, partial) and original.func is _save_pretrained:  # of an optimizer that was closed
            original = original.args[1]
        if original is not None:
            vars(part)["save_pretrained"] = partial(_save_pretrained, part, original, state_dict, writes)


def _save_pretrained(
    part: nn.Module,
    original: Callable[..., Any],
    state_dict: Callable[[str, nn.Module], Mapping[str, object]],
    writes: bool,
    /,  # because save_pretrained has an argument `state_dict` too
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`save_pretrained` of transformers or PEFT with the whole weights."""
    given = dict(zip(inspect.signature(original).parameters, args, strict=False)) | kwargs
    if given.get("distributed_checkpoint"):
        remedy = "Leave it out: the weights of all ranks are gathered."
        raise invalid_value("distributed_checkpoint", True, [False], remedy)
    if given.get("state_dict") is not None:
        _check_whole(part, given["state_dict"])
        return original(**given)
    state = state_dict("save_pretrained()", part)
    return original(**{**given, "state_dict": state}) if writes else None


def _check_whole(module: nn.Module, state_dict: Mapping[str, object]) -> None:
    """Raises ValueError for a state dict with this rank's part of a weight."""
    for name, param in module.named_parameters(remove_duplicate=False):
        value, shard = state_dict.get(name), shard_of(param)
        if shard is not None and isinstance(value, Tensor) and value.shape != shard.whole_shape(param.shape):
            raise conflict("Expert parallelism", "given weights", name=name)
