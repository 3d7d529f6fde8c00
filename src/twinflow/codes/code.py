"""Codes of few bits: how numbers are packed for the wire.

A row of numbers is cut into blocks of 4096. A packed row holds the fp32 scale of each block, then the codes of all
elements, and is padded to 16 bytes:

- 1 bit: set for numbers below zero; the scale is the mean magnitude of the block, a number is plus or minus it;
- 4 bits: -7 to 7, stored plus 8, the first of two in the lower half of a byte; the scale is the largest magnitude / 7;
- 8 bits: -127 to 127 as int8; the scale is the largest magnitude / 127.

A block that holds an infinity or a NaN has the scale NaN and codes of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinflow.errors import invalid_value

BLOCK = 4096
_ALIGN = 16


@dataclass(frozen=True)
class Code:
    """One way to pack numbers."""

    name: str
    bits: int
    top: int  # the largest code; 0: signs

    def scale_bytes(self, numel: int) -> int:
        """Bytes of a row's scales, which come first."""
        return 4 * -(-numel // BLOCK)

    def code_bytes(self, numel: int) -> int:
        """Bytes of a row's codes, which come next."""
        return -(-numel * self.bits // 8)

    def row_bytes(self, numel: int) -> int:
        """Bytes of a packed row of as many numbers."""
        return -(-(self.scale_bytes(numel) + self.code_bytes(numel)) // _ALIGN) * _ALIGN


CODES = {code.name: code for code in (Code("1bit", 1, 0), Code("int4", 4, 7), Code("int8", 8, 127))}


def code_named(name: str) -> Code:
    """The code of this name."""
    if name not in CODES:
        raise invalid_value("code", name, tuple(CODES))
    return CODES[name]
