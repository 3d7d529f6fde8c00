"""ZeRO: every rank updates its part of each bucket and sends the new weights to the other ranks."""

from twinflow.zero.partitioned import partition
from twinflow.zero.shared import Team, Zero

__all__ = ["Team", "Zero", "partition"]
