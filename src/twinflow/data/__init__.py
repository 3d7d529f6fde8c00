"""Training data: where it comes from and which batch belongs to which step."""

from twinflow.data.tokens import TokenData, load_data

__all__ = ["TokenData", "load_data"]
