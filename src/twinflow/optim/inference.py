# SPDX-License-Identifier: Apache-2.0
"""Weights on the host for a model that is not trained: a block's weights are copied to the device when it runs.

This is `offload_param` of a config without an optimizer. All weights of the blocks are frozen, so that the runtime has
no buckets, and only the part of it that fetches weights works (offload/param_offload.py).
"""

from __future__ import annotations

import logging
import weakref

from torch import nn

from twinflow.device import device_for
from twinflow.dist.group import alone
from twinflow.dist.meeting import Meeting
from twinflow.offload.blocks import find_blocks
from twinflow.offload.lost_weights import check_values
from twinflow.offload.runtime import Runtime
from twinflow.offload.settings import Settings, Tuning
from twinflow.offload.weight_guard import check_free
from twinflow.optim.twin_build import StateKind, own_device, set_aside
from twinflow.rules import SGD
from twinflow.zero.building import make_whole
from twinflow.zero.gathered import add_homes

LOGGER = logging.getLogger("twinflow")


class HostWeights:
    """The weights of a model's blocks, on the host until `close`. Its parameters require no gradients until then.

    Every rank keeps all weights. Other parts of the model are on the GPU, if there is one.
    """

    def __init__(self, model: nn.Module, tuning: Tuning | None = None) -> None:
        """`tuning.offload_embeddings`: the embedding and output layers are blocks too. `param_nvme_path`: a folder for
        weights on a disk.
        """
        tuning = tuning or Tuning()
        check_values(model.named_parameters())
        check_free(model.named_parameters())
        self._trained = [param for param in model.parameters() if param.requires_grad]
        model.requires_grad_(False)
        aside, where = set_aside(model, None, True, with_embeddings=tuning.offload_embeddings), own_device()
        make_whole(model.parameters())
        device = device_for(where)
        kind = StateKind(SGD, None, "fp32", is_stateless=True, offloads_params=True, tuning=tuning)
        file = kind.weights_file([], aside, 1, device)
        self.runtime = Runtime(
            device,
            kind.new_updaters(device, where),
            [],
            [],
            Settings(offload_params=True, tuning=tuning),
            list,
            lambda: 1.0,
            owner=weakref.ref(self),
            where=where,
            weights=file,
        )
        if not aside.frozen:
            LOGGER.warning(
                "offload_param has no effect: the model has no blocks (members of ModuleLists and Sequentials), whose "
                "weights are fetched from the host"
            )
        self.runtime.offload_params(aside.frozen, aside.values, None, file=file)
        aside.clear()
        self.runtime.attach(model, find_blocks(model, False, tuning.offload_embeddings))
        add_homes(model, alone(), Meeting(alone()), self.runtime)

    def close(self) -> None:
        """Returns the weights to the model."""
        self.runtime.close()
        for param in self._trained:
            param.requires_grad_(True)
