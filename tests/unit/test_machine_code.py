# SPDX-License-Identifier: Apache-2.0
"""Operands of products whose address is not written on all paths are found in machine code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from machine_code import unwritten_operands

# A loop that is skipped if P0 is false, and after it a product.
CODE = """
        /*0000*/                   UMOV UR9, 0x40000040 ;
        /*0010*/                   UIADD3 UR10, UP0, UR4, 0x2, URZ ;
        /*0020*/                   UIMAD.WIDE.U32 UR10, UR4, 0x2, URZ ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0040*/                   UIADD3 UR8, UR4, 0x2, URZ ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, {operands}, R24 ;
        /*0080*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("operands", "is_written"), [("gdesc[UR8]", False), ("R56, gdesc[UR8].tnspB", True), ("R56, gdesc[UR6]", False)]
)
def test_an_address_must_be_written_on_all_paths(operands: str, is_written: bool) -> None:
    found = unwritten_operands(CODE.replace("{operands}", operands))
    assert found == ([] if is_written else [f"HGMMA.64x64x16.F32.BF16 R24, {operands}, R24"])
    # Without the branch the loop is on all paths.
    straight = CODE.replace("@!P0 BRA `(.L_x_2)", "NOP").replace("{operands}", operands)
    assert not unwritten_operands(straight)
