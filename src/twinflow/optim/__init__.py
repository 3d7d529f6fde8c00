"""Optimizers: `HostAdamW`, `HostAdam`, `HostAdagrad`, `HostLion` and `HostSGD` for CPU tensors."""

from twinflow.optim.host import HostAdagrad, HostAdam, HostAdamW, HostLion, HostOptimizer, HostSGD

__all__ = ["HostAdagrad", "HostAdam", "HostAdamW", "HostLion", "HostOptimizer", "HostSGD"]
