# SPDX-License-Identifier: Apache-2.0
"""Packing into few bits on the GPU: bytes a second of encode, mean and decode, beside a plain copy of as many bytes.

Bytes read and written are counted for both. Every row is checked first: small rows of numbers whose sums are exact must
have the bits of codes/reference.py on the host; where one differs, no speed is printed. An encode below 60% of the
copy's rate is an error. Prints the machine, a table and one JSON line; needs CUDA and Triton. `--tiny` shows on the
CPU, in Triton's interpreter, that the script works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinflow.bench.check import same_bits
from twinflow.bench.machine import read_machine, version_of
from twinflow.codes import BLOCK, CODES, Code, reference
from twinflow.gpu import is_available, packing

BF16, FP32 = torch.bfloat16, torch.float32
LEAST_ENCODE = 0.6  # of a copy's rate


@dataclass(frozen=True)
class Row:
    """One pass to measure."""

    work: str  # encode, mean or decode
    code: Code
    dtype: torch.dtype  # of the gradients, or of what comes out
    has_exponents: bool = False
    has_base: bool = False
    num_rows: int = 1

    def __str__(self) -> str:
        words = {"encode": "encode with error", "mean": f"mean of {self.num_rows} rows", "decode": "decode, added"}
        extras = [", exponents"] * self.has_exponents + [", base"] * self.has_base
        return f"{words[self.work]}, {self.code.name}, {str(self.dtype)[6:]}{''.join(extras)}"

    @property
    def bytes_per_element(self) -> float:
        """Read and written."""
        size, packed = self.dtype.itemsize, self.code.bits / 8 + 4 / BLOCK
        if self.work == "encode":
            return size + 8 + packed + self.has_exponents + size * self.has_base
        return size * (1 if self.work == "mean" else 2) + packed * self.num_rows + self.has_exponents


def make_rows() -> list[Row]:
    one, rows = CODES["1bit"], []
    for dtype in (FP32, BF16):
        rows += [Row("encode", one, dtype), Row("encode", one, dtype, True), Row("encode", one, dtype, True, True)]
    rows += [Row("encode", code, BF16) for code in CODES.values() if code is not one]
    for code in CODES.values():
        rows += [Row("mean", code, FP32, num_rows=4), Row("decode", code, BF16)]
    return [*rows, Row("mean", one, FP32, True, num_rows=4), Row("decode", one, FP32, True)]


@dataclass(frozen=True)
class Buffers:
    """Of one pass."""

    values: Tensor  # what comes out of a mean or a decode
    packed: Tensor
    error: Tensor | None
    base: Tensor | None
    exponents: Tensor | None

    def to(self, device: str) -> Buffers:
        """A copy there."""
        tensors = (self.values, self.packed, self.error, self.base, self.exponents)
        return Buffers(*(None if t is None else t.to(device, copy=True) for t in tensors))  # type: ignore[arg-type]


def make(row: Row, numel: int, device: str) -> Buffers:
    """Small whole numbers, so that sums of them are exact in any order."""
    generator = torch.Generator(device).manual_seed(0)

    def numbers(dtype: torch.dtype) -> Tensor:
        return torch.randint(-9, 10, (numel,), generator=generator, device=device, dtype=torch.int8).to(dtype)

    is_encode, row_bytes = row.work == "encode", row.code.row_bytes(numel)
    packed = torch.randint(256, (row.num_rows, row_bytes), generator=generator, device=device, dtype=torch.uint8)
    scales = torch.rand(row.num_rows, row.code.scale_bytes(numel) // 4, generator=generator, device=device)
    packed[:, : row.code.scale_bytes(numel)] = scales.view(torch.uint8)
    exponents = torch.randint(124, 130, (numel,), generator=generator, device=device, dtype=torch.uint8)
    exponents[::5] = 0
    return Buffers(
        numbers(row.dtype),
        packed,
        numbers(FP32) if is_encode else None,
        numbers(row.dtype) if row.has_base else None,
        exponents if row.has_exponents else None,
    )


def run(row: Row, buffers: Buffers, place: Any) -> None:
    """One pass, by `packing` or by `reference`."""
    values, packed, exponents = buffers.values, buffers.packed, buffers.exponents
    if row.work == "mean":
        place.mean(row.code, values, packed, exponents)
    elif row.work == "decode":
        place.decode(row.code, values, packed, exponents=exponents, is_added=True)
    else:
        options = {"base": buffers.base, "base_factor": 0.25 if row.has_base else 0.0, "exponents": exponents}
        place.encode(row.code, packed, values, buffers.error, factor=0.5, **options)


def differences(row: Row, numel: int, device: str) -> list[str]:
    """Buffers whose bits are not those of the reference on the host."""
    ours = make(row, numel, device)
    truth = ours.to("cpu")
    run(row, ours, packing)
    run(row, truth, reference)
    found = {"packed": (ours.packed, truth.packed), "values": (ours.values, truth.values)}
    if ours.error is not None and truth.error is not None:
        found["error"] = (ours.error, truth.error)
    return [f"{row}: {name}" for name, (a, b) in found.items() if not same_bits(a.cpu(), b)]


def seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    """Of one call, the median. The GPU spins first, so that the host is ahead of it and not measured."""
    times = []
    for i in range(repeats + 2):
        if device == "cpu":
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(3_000_000)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(row: Row, numel: int, repeats: int, device: str) -> dict[str, Any]:
    """The pass and, right after it, a copy that moves as many bytes."""
    moved = numel * row.bytes_per_element
    buffers = make(row, numel, device)
    work_s = seconds(partial(run, row, buffers, packing), repeats, device)
    del buffers
    source = torch.zeros(int(moved / 2) // 16 * 16, dtype=torch.uint8, device=device)
    copy_s = seconds(partial(torch.empty_like(source).copy_, source), repeats, device)
    return {
        "name": str(row),
        "work": row.work,
        "bytes_per_element": row.bytes_per_element,
        "ms": work_s * 1e3,
        "bytes_s": moved / work_s,
        "copy_bytes_s": 2 * source.numel() / copy_s,
        "of_copy": moved / work_s * copy_s / (2 * source.numel()),
    }


def page(rows: list[dict[str, Any]], numel: int, date: str) -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU, interpreted: no speed"
    machine = read_machine()
    lines = [f"# Packing into few bits on the GPU, {date}", ""]
    lines += [f"- {name}; {machine.cpu}, {machine.usable_cores} cores"]
    lines += [f"- torch {torch.__version__}, triton {version_of('triton')}; {numel / 1e6:.3g} million elements"]
    lines += ["- bytes are those read and written, of a pass as of a copy", ""]
    lines += ["| pass | bytes/element | ms | GB/s | a copy, GB/s | of a copy's rate |", "|---|" + "---:|" * 5]
    for row in rows:
        cells = [f"{row['bytes_per_element']:.3f}", f"{row['ms']:.3f}", f"{row['bytes_s'] / 1e9:.0f}"]
        cells += [f"{row['copy_bytes_s'] / 1e9:.0f}", f"{row['of_copy']:.0%}"]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    slowest = min(row["of_copy"] for row in rows if row["work"] == "encode")
    lines += ["", f"The slowest encode has {slowest:.0%} of a copy's rate; {LEAST_ENCODE:.0%} is the least allowed."]
    lines += ["Every pass gave the bits of the reference on the host before it was measured."]
    facts = {"date": date, "device": name, "numel": numel, "slowest_encode": slowest, "rows": rows}
    return "\n".join([*lines, "", "```json", json.dumps(facts), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--numel", type=int, default=1 << 28, help="elements of a pass")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each pass")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in Triton's interpreter")
    given = parser.parse_args()
    device, numel, repeats, checked = "cuda", given.numel, given.repeats, 1_000_077
    if given.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported
        device, numel, repeats, checked = "cpu", 5000, 1, 5003
    if not is_available() or (device == "cuda" and not torch.cuda.is_available()):
        sys.exit("needs Triton, and CUDA but for --tiny")
    rows = make_rows()
    wrong = [difference for row in rows for difference in differences(row, checked, device)]
    if wrong:
        sys.exit("no speed is reported, since bits differ from the reference:\n" + "\n".join(wrong))
    found = [measure(row, numel, repeats, device) for row in rows]
    date = datetime.date.today().isoformat()
    text = page(found, numel, date)
    print(text)
    if given.save:
        path = Path(__file__).parent / "results" / f"{date}-packing.md"
        path.write_text(text, encoding="utf-8")
    slow = [row["name"] for row in found if row["work"] == "encode" and row["of_copy"] < LEAST_ENCODE]
    if slow and not given.tiny:
        sys.exit("slower than allowed: " + "; ".join(slow))


if __name__ == "__main__":
    main()
