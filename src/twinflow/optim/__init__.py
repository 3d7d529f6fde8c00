# SPDX-License-Identifier: Apache-2.0
"""Optimizers. For CPU tensors there is one for each update rule: `HostAdamW`, `HostSGD` and so on."""

from twinflow.optim.host import HostOptimizer
from twinflow.optim.host import __getattr__ as __getattr__  # finds host optimizers by the name of their class

__all__ = ["HostOptimizer"]
