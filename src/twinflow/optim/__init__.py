"""Optimizers. For CPU tensors there is one for each update rule: `HostAdamW`, `HostSGD` and so on."""

from twinflow.optim import host
from twinflow.optim.host import HostOptimizer

__all__ = ["HostOptimizer"]


def __getattr__(name: str) -> type[HostOptimizer]:
    """Finds host optimizers by the name of their class."""
    return host.__getattr__(name)
