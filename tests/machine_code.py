# SPDX-License-Identifier: Apache-2.0
"""Reads the machine code of kernels for Hopper: products whose operands may have an address that nothing has written.

A product (HGMMA) takes the addresses of its operands in shared memory from uniform registers (UR). In some kernels
ptxas 12.8 has computed a part of an address in a block that is not on all paths to the product. Such a kernel reads any
memory, or ends with an error, depending on its input. `unwritten_operands` follows all paths from the first
instruction: a register is unwritten until an instruction writes it, and after two paths meet, if it is unwritten on one
of them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_NUM_REGISTERS = 63
# Instructions whose first operand that is a uniform register is their result.
_WRITES = re.compile(r"U(?!TMA|SETMAXREG)|R2UR|S2UR|VOTEU|REDUX|CS2UR")


def disassembled(ptx: str) -> str:
    """The machine code of a kernel for an H100 or H200."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        assembler = Path(triton.knobs.nvidia.ptxas.path)
        subprocess.run([assembler, "-arch=sm_90a", source, "-o", out], check=True, capture_output=True)
        command = [assembler.with_name("nvdisasm"), "-c", out]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def unwritten_operands(code: str) -> list[str]:
    """Products of `code` that may read a uniform register before it is written."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            # The targets of a table of branches are in a comment.
            targets = re.findall(r"\.L_x_\d+", line) if "BRX" in found[1] else []
            lines.append(" ".join([found[1].partition("(*")[0].strip(), *targets]))
    unwritten: list[frozenset[int] | None] = [None] * len(lines)
    unwritten[0] = frozenset(range(_NUM_REGISTERS))
    work = [0]
    while work:
        at = work.pop()
        after = (unwritten[at] or frozenset()) - _written(lines[at])
        for target in _targets(lines, at, labels):
            before = unwritten[target]
            both = after if before is None else before | after
            if both != before:
                unwritten[target] = both
                work.append(target)
    return [line for line, known in zip(lines, unwritten, strict=True) if known and known & _addresses(line)]


def _written(line: str) -> frozenset[int]:
    """The uniform registers that an instruction writes. One with a condition counts too, because the registers of both
    of its cases are written by two such instructions.
    """
    name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
    first = re.match(r"\s*(?:U?P\w+,\s*)*UR(\d+)\b", operands)
    if first is None or not _WRITES.match(name) or "ISETP" in name:
        return frozenset()
    width = 2 if ".64" in name or ".WIDE" in name else 1
    return frozenset(range(int(first[1]), int(first[1]) + width))


def _addresses(line: str) -> frozenset[int]:
    """The uniform registers with the addresses of a product's operands: two for each operand. An operand in registers
    has none.
    """
    found = re.search(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", line)
    if found is None:
        return frozenset()
    return frozenset(range(int(found[2]) + (2 if found[1] else 0), int(found[2]) + 4))


def _targets(lines: list[str], at: int, labels: dict[str, int]) -> list[int]:
    """The numbers of the instructions that may follow."""
    line = lines[at]
    name = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")[0]
    is_certain = not line.startswith("@") and not re.search(r"BRA\S*\s+!?UP\d", line)
    found = [labels[label] for label in re.findall(r"\.L_x_\d+", line)] if name.startswith("BR") else []
    if not (is_certain and name.startswith(("BR", "EXIT", "RET"))) and at + 1 < len(lines):
        found.append(at + 1)
    return found
