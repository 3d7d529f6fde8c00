# SPDX-License-Identifier: Apache-2.0
"""Whether tensors and modules are those of torch's `fully_shard`.

Importing `torch.distributed.fsdp` takes over a second. These functions do not import it: a process in which it was not
imported has no such tensors and modules.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def with_rows(like: DTensor, rows: Tensor) -> DTensor:
    """A tensor that is divided over ranks as `like` is, of which this rank has `rows`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_fsdp(module: object) -> TypeIs[FSDPModule]:
    """Whether `fully_shard` was called for a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
