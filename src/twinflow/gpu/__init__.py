"""The optimizer update on the GPU: one fused Triton kernel. It gives the same bits as `rules` and the host kernels."""

from twinflow.gpu.update import FusedUpdate, Numbers, Piece, is_available

__all__ = ["FusedUpdate", "Numbers", "Piece", "is_available"]
