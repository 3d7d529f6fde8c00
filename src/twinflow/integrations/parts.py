"""Weights of which each rank has a part (ZeRO stage 3), for loops that expect whole weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twinflow.dist.group import new_group
from twinflow.dist.sharded import is_dtensor
from twinflow.optim.twin import TwinOptimizer
from twinflow.zero.start import own_host_bytes
from twinflow.zero.whole import gather_all, gather_on_first, parts_of

LOGGER = logging.getLogger("twinflow")


def gathered_weights(twin: TwinOptimizer) -> dict[nn.Parameter, Tensor]:
    """Whole values of the weights that are on the hosts of several ranks, for the time after `close()`. Empty, with a
    warning, if one of the hosts does not have the memory. All ranks must call this.
    """
    team, offload = twin.team, twin.runtime.param_offload
    if twin.model is None or team is None or team.world == 1 or offload is None:
        return {}
    params = [param for param in twin.model.parameters() if offload.holds(param)]
    needed = sum(param.numel() * param.element_size() for param in params)
    (room,) = team.least([float(own_host_bytes())])
    if room < 2 * needed:  # some of the memory stays free
        LOGGER.warning(
            f"The model has no weights after training: each rank needs {needed / 1e9:.1f} GB of host memory for all of "
            f"them, and {room / 1e9:.1f} GB are free. Load them from a checkpoint."
        )
        return {}
    twin.runtime.settle_all()
    parts = [part for param in params if (part := parts_of(param, offload)) is not None]
    return dict(zip(params, gather_all(parts, team.calls), strict=True))


def has_no_values(module: nn.Module) -> bool:
    """Whether the weights of a module were on the hosts of several ranks when its optimizer was closed."""
    return any(_is_empty(param) for param in module.parameters())


def allocate(module: nn.Module) -> None:
    """Give memory to parameters without values, so that weights can be loaded."""
    for param in module.parameters():
        if _is_empty(param):
            param.data = torch.zeros(param.shape, dtype=param.dtype, device=param.device)


def _is_empty(param: Tensor) -> bool:
    """Whether a parameter is a scalar that is expanded to its shape (offload/param_offload.py)."""
    return not is_dtensor(param) and param.numel() > 1 and not any(param.stride())


def whole_state(module: nn.Module) -> dict[str, Any]:
    """The state dict of a module after `fully_shard`, with whole values on rank 0. All ranks must call this."""
    state = module.state_dict()
    params = dict(module.named_parameters(remove_duplicate=False))
    named = {name: part for name in state if name in params and (part := parts_of(params[name])) is not None}
    whole = dict(zip(named, gather_on_first(list(named.values()), new_group("gloo")), strict=True))
    return {**state, **whole}


@torch.no_grad()
def load_whole(twin: TwinOptimizer, state: Mapping[str, Any], strict: bool) -> None:
    """Load whole weights into the part that this rank has. The caller then loads the optimizer state."""
    assert twin.model is not None
    twin.flush()
    offload = twin.runtime.param_offload
    twin.runtime.settle_all()
    own: dict[str, Tensor] = dict(twin.model.named_parameters(remove_duplicate=False))
    own |= {name: tensor for name, tensor in twin.model.named_buffers() if name in twin.model.state_dict()}
    missing, shapes = own.keys() - state.keys(), {name: tuple(value.shape) for name, value in own.items()}
    if missing and strict:
        raise ValueError(f"The checkpoint has no {sorted(missing)[0]}. Build the model that was saved.")
    for name, tensor in own.items():
        if name not in state:
            continue
        if tuple(state[name].shape) != shapes[name]:
            raise ValueError(f"{name} has the shape {tuple(state[name].shape)}, but must have {shapes[name]}.")
        part = parts_of(tensor, offload)
        if part is None:
            tensor.copy_(state[name])
        else:
            flat = state[name].detach().to(tensor.dtype).reshape(-1)
            for piece in part.pieces:
                piece.write(flat[piece.start : piece.start + piece.numel])
