# SPDX-License-Identifier: Apache-2.0
"""Codes of few bits: the format in which compressed collectives send numbers.

A row of numbers is divided into blocks of 4096. A packed row consists of the fp32 scale of each block and the codes of
all elements, and is padded to 16 bytes:

- 1 bit: the bit is set for numbers below zero. The scale is the mean magnitude of the block. A decoded number is plus
  or minus the scale.
- 4 bits: codes are -7 to 7, stored with 8 added, two in a byte, the first one in the lower half. The scale is the
  largest magnitude / 7.
- 8 bits: codes are -127 to 127, stored as int8. The scale is the largest magnitude / 127.

A scale below 2**-100 is stored as zero. A scale that is not finite is stored as NaN, and all codes of its block are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinflow.errors import invalid_value

BLOCK = 4096
_ALIGN = 16


@dataclass(frozen=True)
class Code:
    """One format: the number of bits per element and the range of the codes."""

    name: str
    bits: int
    top: int  # the largest code; 0: codes are signs

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of a row, which come first."""
        return 4 * -(-numel // BLOCK)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of a row, which follow the scales."""
        return -(-numel * self.bits // 8)

    def row_bytes(self, numel: int) -> int:
        """Bytes of a packed row of `numel` numbers."""
        return -(-(self.scale_bytes(numel) + self.code_bytes(numel)) // _ALIGN) * _ALIGN


CODES = {code.name: code for code in (Code("1bit", 1, 0), Code("int4", 4, 7), Code("int8", 8, 127))}


def code_named(name: str) -> Code:
    """The code with this name. Raises ValueError for an unknown name."""
    if name not in CODES:
        raise invalid_value("code", name, tuple(CODES))
    return CODES[name]
