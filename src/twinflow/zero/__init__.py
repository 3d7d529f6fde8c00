"""ZeRO: ranks share the optimizer state. Each rank updates its part of the weights, and they exchange the results."""

from twinflow.zero.partitioned import partition
from twinflow.zero.shared import Team, Zero

__all__ = ["Team", "Zero", "partition"]
