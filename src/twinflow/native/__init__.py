"""The native library: host kernels and the executor of offloaded training. If the library is missing, torch references
replace the kernels. The library is C++ without torch, bound with ctypes.
"""

from twinflow.native.kernels import *  # noqa: F403
