"""The optimizer update on the GPU: one fused Triton kernel with the bits of `rules` and of the host kernels."""

from twinflow.gpu.update import FusedUpdate, Numbers, Piece, is_available

__all__ = ["FusedUpdate", "Numbers", "Piece", "is_available"]
