# SPDX-License-Identifier: Apache-2.0
"""Training data: sources of tokens, and the batch of each step."""

from twinflow.data.tokens import TokenData, load_data

__all__ = ["TokenData", "load_data"]
