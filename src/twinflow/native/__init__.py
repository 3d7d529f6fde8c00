# SPDX-License-Identifier: Apache-2.0
"""Bindings for the native library: host kernels and the executor of offloaded training. The library is written in C++
without torch and is called through ctypes. If it is missing, torch functions replace the kernels, but not the executor.
"""

from twinflow.native.kernels import *  # noqa: F403
