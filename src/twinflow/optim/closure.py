# SPDX-License-Identifier: Apache-2.0
"""The closure that may be passed to `step()` of an optimizer, as in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch


def loss_of(closure: Callable[[], object] | None) -> object:
    """The loss that `closure` returns. It runs with gradients, which `step()` disables. None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
