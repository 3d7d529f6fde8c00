# SPDX-License-Identifier: Apache-2.0
"""What a call of sparse attention costs the CPU, and a short sequence beside dense flash attention.

    python benchmarks/sparse_calls.py --save   # needs CUDA
    python benchmarks/sparse_calls.py --tiny   # shows on any machine that the script works

The time of the CPU is that of calls in a row, while the GPU waits: it is held by a kernel that sleeps, and the clock
stops before it ends. Windows of sparse and dense calls alternate. The second table has the time of the GPU and the time
of a call as a loop sees it, which is the larger of both. Prints the machine and the tables; `--save` writes a dated
file.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from sparse_common import Clock, header, layout_of, run_once, save, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from twinflow.attention import sparse_attention

CALLS = 100  # in a window
SLEEP_CYCLES = 300_000_000  # about 0.16 s: longer than the calls of a window take
WANTED = {"forward": 0.10, "with backward": 0.30}  # ms of the CPU, sparse
Work = Callable[[], object]


def cpu_ms(work: Work, is_cuda: bool) -> float:
    """Milliseconds of the CPU for a call."""
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    seconds = time.perf_counter() - start
    if is_cuda:
        torch.cuda.synchronize()
    return seconds / CALLS * 1e3


def loop_ms(work: Work, is_cuda: bool) -> float:
    """Milliseconds of a call in a loop, until the GPU has done all."""
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    if is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e3


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-sparse-calls.md")
    args = parser.parse_args()
    is_cuda = not args.tiny
    if is_cuda and not torch.cuda.is_available():
        parser.error("needs CUDA; --tiny runs on any machine")
    device, dtype = ("cuda", torch.bfloat16) if is_cuda else ("cpu", torch.float32)
    batch, length, heads, width, block = (8, 2048, 12, 64, 64) if is_cuda else (1, 64, 2, 16, 16)
    layout = layout_of("bigbird", heads, block, length, block)
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, length, width)
    drawn = [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(4)]
    data = (*(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3])

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, layout)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    works: dict[tuple[str, str], Work] = {}
    for name, way in (("sparse, BigBird", sparse), ("dense flash", dense)):
        works[name, "forward"] = lambda way=way: way(*data[:3])
        works[name, "with backward"] = lambda way=way: run_once(way, data)
    cpu: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    loop: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    gpu: dict[tuple[str, str], float] = {}
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION] if is_cuda else [SDPBackend.MATH]):
        for work in works.values():
            for _ in range(5):
                work()
        for _ in range(args.windows):
            for key, work in works.items():
                cpu[key].append(cpu_ms(work, is_cuda))
                loop[key].append(loop_ms(work, is_cuda))
        for key, work in works.items():
            gpu[key] = Clock(device).ms(work)
    rows = [[name, part, spread(cpu[name, part]), f"{gpu[name, part]:.3f}", spread(loop[name, part])]
            for name, part in works]  # fmt: skip
    title = f"{batch} x {length} tokens, {heads} heads of {width}, {dtype}".replace("torch.", "")
    heads_of_table = ["attention", "pass", "ms of the CPU", "ms of the GPU", "ms of a call in a loop"]
    notes = [
        "",
        f"Medians of {args.windows} windows of {CALLS} calls, with the least and the most. Wanted: the CPU's time of a "
        f"sparse call at most {WANTED['forward']:.2f} ms forward and {WANTED['with backward']:.2f} ms with backward.",
    ]
    today = datetime.date.today().isoformat()
    command = "`python benchmarks/sparse_calls.py" + (" --tiny" if args.tiny else "") + "`"
    lines = [f"# Calls of sparse attention, {today}", "", command, "", *header()]
    lines += [*table(title, heads_of_table, rows), *notes, ""]
    print("\n".join(lines))
    if args.save:
        save("\n".join(lines), f"{today}-sparse-calls")


if __name__ == "__main__":
    main()
