# SPDX-License-Identifier: Apache-2.0
"""Adam and LAMB for slow networks: ranks exchange one bit for each element of the momentum, with error feedback."""

from twinflow.optim.onebit.adam import OneBitAdam
from twinflow.optim.onebit.lamb import OneBitLamb
from twinflow.optim.onebit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
