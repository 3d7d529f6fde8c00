# SPDX-License-Identifier: Apache-2.0
"""Codes of 1, 4 and 8 bits for compressed collectives, and their reference implementation."""

from twinflow.codes.code import BLOCK, CODES, Code, code_named

__all__ = ["BLOCK", "CODES", "Code", "code_named"]
