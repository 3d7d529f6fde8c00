# SPDX-License-Identifier: Apache-2.0
"""The fused update on the GPU: parameters a second and bytes a second, beside a plain copy and torch's fused AdamW.

Every row is checked first: three steps of a small bucket must have the bits of the references on the same GPU. If one
differs, no speed is printed. Prints the machine, a table and one JSON line; needs CUDA and Triton.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinflow.bench.check import OPTIONS, same_bits
from twinflow.bench.machine import read_machine, version_of
from twinflow.gpu import FusedUpdate, Numbers, Piece, is_available
from twinflow.rules import RULES, reference
from twinflow.rules.formats import BLOCK, rounding_key
from twinflow.rules.segment import Segment, Store, new_store

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4.0 / BLOCK}
_MASTER_BYTES = {BF16: 8, FP16: 10, FP32: 8}  # both halves read and written; fp16: the weight is only written


@dataclass(frozen=True)
class Row:
    """One kernel to measure."""

    rule: str
    format: str
    grad: torch.dtype = BF16
    weight: torch.dtype = BF16

    def __str__(self) -> str:
        return f"{self.rule}, {self.format} states, {str(self.weight)[6:]} weight, {str(self.grad)[6:]} gradient"

    @property
    def bytes_per_param(self) -> float:
        """Read and written by one update."""
        num_states = sum(name is not None for name in RULES[self.rule].states)
        return self.grad.itemsize + _MASTER_BYTES[self.weight] + 2 * num_states * _STATE_BYTES[self.format]


FP32_ROW = Row("adamw", "fp32", FP32, FP32)  # as torch's own has it
ROWS = [Row(rule.name, format) for rule in RULES.values() for format in rule.formats]
ROWS += [Row("adamw", "fp32", FP16, FP16), FP32_ROW]


def make(row: Row, numel: int, num_pieces: int) -> tuple[Store, list[Piece], Tensor]:
    """A bucket on the GPU, cut into pieces of about equal size."""
    rule = RULES[row.rule]
    weight = torch.zeros(numel, dtype=row.weight, device="cuda") if row.weight != FP32 else None
    store = new_store(rule, row.format, torch.randn(numel, device="cuda"), weight, split=row.weight == BF16)
    weight = store.master if weight is None else weight
    size = -(-numel // num_pieces // BLOCK) * BLOCK
    pieces = [
        Piece(weight.narrow(0, at, min(size, numel - at)), at, min(size, numel - at), 0) for at in range(0, numel, size)
    ]
    return store, pieces, torch.randn(numel, device="cuda").to(row.grad)


def numbers_of(row: Row, pieces: list[Piece], step: int) -> dict[int, Numbers]:
    hyper = RULES[row.rule].hyper(OPTIONS, step)
    return {i: Numbers(hyper, 0.3, rounding_key(step, i)) for i in range(len(pieces))}


def differences(row: Row, numel: int = 1_000_077) -> list[str]:
    """Buffers whose bits are not those of the references after three steps."""
    torch.manual_seed(0)
    ours, pieces, grads = make(row, numel, 3)
    torch.manual_seed(0)
    truth, _, _ = make(row, numel, 3)
    fused = FusedUpdate(RULES[row.rule], pieces)
    for step in range(1, 4):
        numbers = numbers_of(row, pieces, step)
        fused(ours, grads, numbers)
        for i, (_, offset, length, first_index) in enumerate(pieces):
            grad, part = grads.narrow(0, offset, length), truth.narrow(offset, length)
            hyper, factor, key = numbers[i]
            reference.update([Segment(RULES[row.rule], hyper, grad, part, factor, key, first_index)])
        torch.cuda.synchronize()
    names = ("master", "weight", "first state", "second state", "first scales", "second scales")
    found = [(s.master, s.weight, *s.states, *s.scales) for s in (ours, truth)]
    return [
        f"{row}: {name}"
        for name, a, b in zip(names, *found, strict=True)
        if a is not None and b is not None and not same_bits(a, b)
    ]


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Of one call on the GPU, the median. The GPU spins first, so that the host is ahead of it and not measured."""
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(3_000_000)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_rate(numel: int, repeats: int) -> float:
    """Bytes a second of a plain copy on the device, read and written."""
    source = torch.zeros(numel * 2, device="cuda")
    into = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(partial(into.copy_, source), repeats)


def measure(row: Row, numel: int, repeats: int) -> dict[str, Any]:
    store, pieces, grads = make(row, numel, 8)
    fused = FusedUpdate(RULES[row.rule], pieces)
    numbers = numbers_of(row, pieces, 1)
    return result(str(row), seconds(lambda: fused(store, grads, numbers), repeats), numel, row.bytes_per_param)


def measure_torch(numel: int, repeats: int) -> dict[str, Any]:
    """torch.optim.AdamW, fused, on one fp32 tensor."""
    param = torch.nn.Parameter(torch.randn(numel, device="cuda"))
    param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW([param], lr=1e-3, fused=True)
    name = "torch.optim.AdamW(fused=True), float32"
    return result(name, seconds(optimizer.step, repeats), numel, FP32_ROW.bytes_per_param)


def result(name: str, call_s: float, numel: int, bytes_per_param: float) -> dict[str, Any]:
    return {
        "name": name,
        "bytes_per_param": bytes_per_param,
        "ms": call_s * 1e3,
        "params_s": numel / call_s,
        "bytes_s": numel * bytes_per_param / call_s,
    }


def page(rows: list[dict[str, Any]], copy_bytes_s: float, numel: int, date: str) -> str:
    machine = read_machine()
    lines = [f"# The fused update on the GPU, {date}", ""]
    lines += [f"- {torch.cuda.get_device_name()}; {machine.cpu}, {machine.usable_cores} cores"]
    lines += [f"- torch {torch.__version__}, triton {version_of('triton')}; {numel / 1e6:.0f} million parameters"]
    lines += [f"- a plain copy on the device: {copy_bytes_s / 1e9:.0f} GB/s, read and written", ""]
    lines += ["| update | bytes/param | ms | G params/s | GB/s | of a copy's rate |", "|---|" + "---:|" * 5]
    for row in rows:
        cells = [f"{row['bytes_per_param']:.2f}", f"{row['ms']:.3f}", f"{row['params_s'] / 1e9:.1f}"]
        cells += [f"{row['bytes_s'] / 1e9:.0f}", f"{row['bytes_s'] / copy_bytes_s:.0%}"]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    lines += ["", "Every kernel gave the bits of the references on this GPU before it was measured."]
    facts = {"date": date, "numel": numel, "copy_bytes_s": copy_bytes_s, "rows": rows}
    return "\n".join([*lines, "", "```json", json.dumps(facts), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the result to a dated file")
    parser.add_argument("--numel", type=int, default=1 << 28, help="parameters in the bucket")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each kernel")
    given = parser.parse_args()
    if not torch.cuda.is_available() or not is_available():
        sys.exit("needs CUDA and Triton")
    wrong = [difference for row in ROWS for difference in differences(row)]
    if wrong:
        sys.exit("no speed is reported, since bits differ from the references:\n" + "\n".join(wrong))
    copy_bytes_s = copy_rate(given.numel, given.repeats)
    rows = [measure(row, given.numel, given.repeats) for row in ROWS]
    rows.append(measure_torch(given.numel, given.repeats))
    date = datetime.date.today().isoformat()
    text = page(rows, copy_bytes_s, given.numel, date)
    print(text)
    if given.save:
        path = Path(__file__).parent / "results" / f"{date}-device-kernel.md"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
