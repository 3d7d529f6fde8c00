"""ZeRO over many ranks: every rank updates its part of each bucket and publishes the new weights to the others."""

from twinflow.zero.partitioned import partition
from twinflow.zero.shared import Team, Zero

__all__ = ["Team", "Zero", "partition"]
