# SPDX-License-Identifier: Apache-2.0
"""ZeRO: ranks share the optimizer state. Each rank updates its part, and all ranks exchange the new weights."""

from twinflow.zero.experts import split_experts
from twinflow.zero.partitioned import partition
from twinflow.zero.shared import Team, Zero

__all__ = ["Team", "Zero", "partition", "split_experts"]
