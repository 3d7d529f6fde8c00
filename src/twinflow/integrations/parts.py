# SPDX-License-Identifier: Apache-2.0
"""Weights of which each rank has a part (ZeRO stage 3), for loops that expect whole weights."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from twinflow.offload.lost_weights import is_lost
from twinflow.optim.twin import TwinOptimizer
from twinflow.zero.start import own_host_bytes
from twinflow.zero.whole import gather_all, parts_of

LOGGER = logging.getLogger("twinflow")


def gathered_weights(twin: TwinOptimizer) -> dict[nn.Parameter, Tensor]:
    """Whole values of the weights that are on the hosts of several ranks, for the time after `close()`. Empty, with a
    warning, if one of the hosts does not have the memory. All ranks must call this.
    """
    team, offload = twin.team, twin.runtime.param_offload
    if twin.model is None or team is None or team.world == 1 or offload is None:
        return {}
    params = [param for param in twin.model.parameters() if offload.params.holds(param)]
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
    return any(is_lost(param) for param in module.parameters())


def allocate(module: nn.Module) -> None:
    """Give memory to parameters without values, so that weights can be loaded."""
    for param in module.parameters():
        if is_lost(param):
            param.data = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
