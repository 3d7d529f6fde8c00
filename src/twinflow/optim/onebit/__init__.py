"""Adam and LAMB for slow networks: momentum travels in one bit for each element, and what that loses is made up for."""

from twinflow.optim.onebit.adam import OneBitAdam
from twinflow.optim.onebit.lamb import OneBitLamb
from twinflow.optim.onebit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
