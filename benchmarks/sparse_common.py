# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of sparse attention share: sizes, structures, a clock, and kernels compiled side by side."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from twinflow.attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    Layout,
    LocalSlidingWindowSparsityConfig,
    from_flat,
    sparse_attention,
)
from twinflow.bench.machine import read_machine, version_of

PASSES = ("forward", "both")
TOLERANCE = 2e-2  # of the norm, in bf16; usual is 4e-3
WORKERS = 12

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Heads, and the dimension of each."""

    num_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads} x {self.head_dim}"


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    lengths: tuple[int, ...]
    check_length: int
    math_length: int
    most: int  # "a million"
    tune_length: int
    base: int  # the block of `patterns`
    blocks: tuple[int, ...]
    others: tuple[Shape, ...]  # further widths of heads
    short_length: int  # of a batch of short sequences


FULL = Scale(
    "cuda", torch.bfloat16, (Shape(12, 64), Shape(16, 128)), (32768, 131072), 4096, 8192, 1 << 20, 32768, 128,
    (128, 64, 32, 16), (Shape(16, 80), Shape(16, 96), Shape(8, 256)), 2048,
)  # fmt: skip
TINY = Scale(
    "cpu", torch.float32, (Shape(2, 16), Shape(1, 32)), (512, 1024), 256, 256, 2048, 128, 32, (32, 16),
    (Shape(2, 24),), 256,
)  # fmt: skip


@lru_cache(maxsize=64)
def layout_of(pattern: str, num_heads: int, block: int, length: int, base: int) -> Layout:
    """A structure in blocks of a size; what it keeps does not depend on the size, but for the window's uneven ends.

    A window of three bases, a local one of four, a global block of one; all bidirectional.
    """
    part = base // block  # blocks of this size in a base
    window = 3 * part + (part > 1)  # an odd number: one's own block and as many on both sides
    if pattern == "bigbird":
        return BigBirdSparsityConfig(num_heads, block, False, part, window, part).layout(length)
    if pattern == "longformer":
        return BSLongformerSparsityConfig(num_heads, block, False, window, tuple(range(part))).layout(length)
    if pattern == "fixed":
        return FixedSparsityConfig(num_heads, block, False, 4 * part, part).layout(length)
    if pattern == "window":
        wide = LocalSlidingWindowSparsityConfig(num_heads, block, window, "bidirectional")
        return wide.layout(length)
    if pattern == "dense":
        return DenseSparsityConfig(num_heads, block).layout(length)
    share, num = float(pattern.split()[1].rstrip("%")) / 100, length // block
    drawn = torch.rand(num, num, generator=torch.Generator().manual_seed(0)).topk(max(1, round(share * num))).indices
    flat = (torch.arange(num)[:, None] * num + drawn).reshape(-1)
    return from_flat([flat], num, num, block, head_to_pattern=[0] * num_heads)


def ours(layout: Layout, **options: Tensor) -> Way:
    return lambda q, k, v: sparse_attention(q, k, v, layout, **options)


def dense(backend: SDPBackend, mask: Tensor | None = None, is_causal: bool = False) -> Way:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)

    return run


def inputs(scale: Scale, shape: Shape, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the result."""
    size = (1, shape.num_heads, length, shape.head_dim)
    generator = torch.Generator(scale.device).manual_seed(length)
    drawn = [torch.randn(size, generator=generator, device=scale.device).to(scale.dtype) for _ in range(4)]
    return *(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3]  # type: ignore[return-value]


def run_once(way: Way, data: tuple[Tensor, ...]) -> list[Tensor]:
    """The result and the gradients of q, k and v."""
    q, k, v, grad = data
    out = way(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def relative(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error by norm; NaN counts as infinite."""
    pairs = zip(found, truth, strict=True)
    errors = [float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs]
    return max(error if math.isfinite(error) else math.inf for error in errors)


class Clock:
    """Times of work on the GPU, without the host's: the GPU waits until all is queued."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"

    def ms(self, work: Callable[[], object]) -> float:
        """The median of twelve runs; of fewer where one takes more than 50 ms."""
        if not self._is_cuda:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        host_s = time.perf_counter() - start
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - start
        times = []
        for _ in range(12 if whole_s < 0.05 else 4 if whole_s < 0.3 else 2):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if whole_s < 0.05:
                torch.cuda._sleep(int(host_s * 4e9))  # cycles: twice as long as the host takes
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        return statistics.median(times)

    def passes(self, way: Way, data: tuple[Tensor, ...]) -> dict[str, float]:
        """Milliseconds of the forward alone, and with the backward."""
        return {"forward": self.ms(lambda: way(*data[:3])), "both": self.ms(lambda: run_once(way, data))}


def try_passes(clock: Clock, name: str, way: Way, data: tuple[Tensor, ...]) -> dict[str, float]:
    """The result of `clock.passes`. It is infinite if a pass fails, for example because a kernel does not exist."""
    try:
        return clock.passes(way, data)
    except Exception as error:  # a kernel that does not compile or is not built has many names
        print(f"{name}: {type(error).__name__} {str(error)[:200]}", file=sys.stderr)
        return dict.fromkeys(PASSES, math.inf)


def best(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(times[name] for times in found) for name in PASSES}


def measure_dense(scale: Scale, clock: Clock, data: tuple[Tensor, ...], is_causal: bool = False) -> dict[str, float]:
    """The times of the faster of SDPA's flash and cuDNN kernels."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION] if scale.device == "cuda" else [SDPBackend.MATH]
    ways = {backend.name: dense(backend, is_causal=is_causal) for backend in backends}
    return best([try_passes(clock, name, way, data) for name, way in ways.items()])


def warm(rest: list[str], num_jobs: int, limit_s: float = math.inf) -> bool:
    """Compile everything in processes of their own, side by side; what they leave on the disk is found again. Processes
    that take longer than `limit_s` are killed, because a kernel that waits for a wrong barrier never ends. Returns
    whether all processes have ended by themselves.
    """
    stop = time.monotonic() + limit_s
    number = min(WORKERS, num_jobs, max(1, (os.cpu_count() or 2) - 2))
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    commands = [[sys.executable, sys.argv[0], *rest, "--warm", str(index), str(number)] for index in range(number)]
    workers = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for command in commands]
    is_complete = True
    for worker in workers:
        try:
            worker.wait(None if limit_s == math.inf else max(0.0, stop - time.monotonic()))
        except subprocess.TimeoutExpired:  # noqa: PERF203
            worker.kill()
            worker.wait()
            is_complete = False
    return is_complete


def run_jobs(given: list[Callable[[], object]], index: int, number: int) -> None:
    """Every `number`-th of them, from `index`; what fails here is seen again where it counts."""
    for job in given[index::number]:
        try:
            job()
        except Exception as error:  # noqa: PERF203
            print(f"{type(error).__name__} {str(error)[:100]}", file=sys.stderr)


def shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def table(title: str, heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["", f"## {title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def parts_of(given: str, known: tuple[str, ...]) -> list[str]:
    """The parts that a user named, with commas between."""
    parts = given.split(",")
    if not set(parts) <= set(known):
        raise SystemExit(f"--only {given}: parts are {','.join(known)}")
    return parts


def header() -> list[str]:
    """The machine, in two lines."""
    machine, gpu = read_machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "triton", "transformers"))
    return [f"- {gpu}; {machine.cpu}, {machine.usable_cores} cores", f"- {versions}"]


def to_json(facts: Row) -> list[str]:
    """One line of JSON, numbers rounded; what is infinite is null."""
    facts = json.loads(
        json.dumps(facts), parse_constant=lambda name: None, parse_float=lambda x: float(f"{float(x):.4g}")
    )
    return ["```json", json.dumps(facts), "```", ""]


def save(text: str, name: str, folder: Path | None = None) -> None:
    """A file in a folder, by default benchmarks/results."""
    folder = folder or Path(__file__).parent / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)
