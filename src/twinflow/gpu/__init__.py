# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. The kernel of the optimizer update gives the same bits as `rules` and the host kernels."""

from twinflow.gpu.update import FusedUpdate, Numbers, Piece, is_available

__all__ = ["FusedUpdate", "Numbers", "Piece", "is_available"]
