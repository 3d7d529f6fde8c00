# SPDX-License-Identifier: Apache-2.0
"""Steps with Muon beside steps with AdamW, and the speed of the Newton-Schulz iteration on a GPU.

    python benchmarks/muon.py --parts products 3b --save # about 150 s on an H200
    python benchmarks/muon.py --parts 7b --save          # about 200 s on an H200
    python benchmarks/muon.py --tiny                     # shows on any machine that the script works, nothing more

Part "products": the iteration on the shapes of Llama-3-8B beside the rate of a large matrix product in bf16.

Parts "3b" and "7b": a step of the shapes of real_models.py (random weights in bf16, activation checkpointing, clipping
on but not triggered) with AdamW and with Muon, all state on the host and with ratio "auto". A step has
`--micro-batches` micro-batches of 4 x 2048 tokens and is measured as a whole. Micro-batches in the middle of a step do
the same work with every optimizer. Steps with more tokens are therefore computed: by the measured time of a
micro-batch alone for each further one. "7b" has bf16 states, because fp32 states of AdamW need 91 GB of host memory.

Each line is printed as soon as it is measured. A setting that fails prints its error, and the others go on. `--seconds`
is the wall-clock time after which no further setting is started; the output names those that were left out. `--save`
writes a dated file in benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import real_models
import torch
from real_models import CUDA, DEVICE, NEVER, SHAPES, build, measure

from twinflow.bench.machine import describe, read_machine
from twinflow.offload.muon import batch_size
from twinflow.optim.twin import TwinOptimizer
from twinflow.rules.muon import MUON
from twinflow.rules.newton_schulz import iterate, orthogonalise, products_dtype

PARTS = {"3b": ("3b", "fp32"), "7b": ("qwen2.5-7b", "bf16"), "tiny": ("tiny", "fp32")}
LLAMA_8B = {"q, o": (4096, 4096, 2), "k, v": (1024, 4096, 2), "gate, up, down": (4096, 14336, 3)}
TOKENS = (131072, 524288)  # of a step
LIMITS = {131072: 1.15, 524288: 1.05}
RULES: dict[str, dict[str, Any]] = {"adamw": {}, "muon": {"adjust_lr_fn": "match_rms_adamw"}}
RATIOS: tuple[float | str, ...] = (1.0, "auto")

Found = dict[tuple[str, float | str], list[float]]  # by rule and ratio: seconds of steps with TOKENS tokens


class Report:
    """Lines that are printed at once and kept for the file."""

    def __init__(self, deadline: float) -> None:
        self.lines: list[str] = []
        self.deadline = deadline

    def add(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Runs a setting if there is time left. An error is printed, and the next setting can go on."""
        if time.monotonic() > self.deadline:
            self.add(f"left out, because the time is up: {name}")
            return
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.add(f"failed: {name}: {type(error).__name__}: {str(error)[:300]}")
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def seconds_of(work: Callable[[], object], num: int) -> float:
    """The median time of a call."""
    return statistics.median(measure(lambda: (work(), None)[1], 2, 5, num))


def iteration_flops(num_rows: int, num_columns: int, num_steps: int) -> float:
    return num_steps * (4.0 * num_rows**2 * num_columns + 2.0 * num_rows**3)


def products(report: Report, is_tiny: bool) -> None:
    dtype, size = products_dtype(torch.device(DEVICE)), 256 if is_tiny else 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    card = 2.0 * size**3 / seconds_of(partial(torch.mm, a, b), 1 if is_tiny else 10)
    report.add(f"Matrix product {size} x {size} x {size} in {dtype}: {card / 1e12:.0f} TFLOP/s")
    report.add()
    report.add("| matrices | shape | batch | iteration alone | of the card | whole, from and to fp32 | of the card |")
    report.add("|---|---|---:|---:|---:|---:|---:|")
    steps, coefficients = int(str(MUON.defaults["ns_steps"])), MUON.defaults["ns_coefficients"]
    assert isinstance(coefficients, tuple)
    total_flops = total_s = iterations_s = 0.0
    for name, (num_rows, num_columns, count) in LLAMA_8B.items():
        if is_tiny:
            num_rows, num_columns = num_rows // 32, num_columns // 32
        each = min(count, 1 if is_tiny else batch_size(torch.Size((num_rows, num_columns))))
        x = torch.randn(each, num_rows, num_columns, device=DEVICE, dtype=dtype) / (num_rows * num_columns) ** 0.5
        alone = seconds_of(partial(iterate, x, steps, coefficients), 1 if is_tiny else 4)
        wide = [torch.randn(num_rows, num_columns, device=DEVICE) for _ in range(each)]
        whole = seconds_of(partial(orthogonalise, wide, MUON.defaults, dtype), 1 if is_tiny else 4)
        flops = each * iteration_flops(num_rows, num_columns, steps)
        total_flops += flops * count / each
        iterations_s += alone * count / each
        total_s += whole * count / each
        rates = [flops / s for s in (alone, whole)]
        cells = " | ".join(f"{rate / 1e12:.0f} TFLOP/s | {rate / card:.0%}" for rate in rates)
        report.add(f"| {name} | {num_rows} x {num_columns} | {each} | {cells} |")
        del x, wide
    rates = [total_flops / s for s in (iterations_s, total_s)]
    cells = " | ".join(f"{rate / 1e12:.0f} TFLOP/s | {rate / card:.0%} (wanted >= 60%)" for rate in rates)
    report.add(f"| all of a block | | | {cells} |")
    report.add(f"One block takes {1e3 * total_s:.1f} ms, and 32 blocks take {32 * total_s:.3f} s")


@dataclass(frozen=True)
class Case:
    """One optimizer of a part."""

    shape: str
    states: str
    rule: str
    ratio: float | str

    def measure(
        self, report: Report, model: Any, data: torch.Tensor, micro_s: float, micro_batches: int, found: Found
    ) -> None:
        """Measures a step, and adds a line."""
        begin = time.monotonic()
        options = {"states": self.states, "max_grad_norm": NEVER, "early": True, "lr": 1e-5, **RULES[self.rule]}
        optimizer = TwinOptimizer(model, self.rule, ratio=self.ratio, accumulation_steps=2, **options)
        built_s = time.monotonic() - begin

        def step() -> None:
            for _ in range(optimizer.accumulation_steps):
                model(input_ids=data, labels=data).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        try:
            for _ in range(2):
                step()
            while not optimizer.is_placed:  # "auto" measures and moves state during the first steps
                step()
            optimizer.set_accumulation_steps(micro_batches)
            step()  # the first one still has the update of a short step before it
            times = measure(step, 0, 2, 1)
        finally:
            optimizer.close()
        step_s = min(times)  # only other work on the machine makes a step longer
        longer = [step_s + (n / data.numel() - micro_batches) * micro_s for n in TOKENS]
        found[self.rule, self.ratio] = longer
        more = [
            f"steps of {min(times):.3f} and {max(times):.3f} s",
            f"{optimizer.host_share:.2f} of the state on the host",
            f"at most {torch.cuda.max_memory_allocated() / 1e9:.0f} GB on the GPU so far" if CUDA else "no GPU",
            f"built in {built_s:.0f} s",
        ]
        cells = [f"{step_s:.3f} s", f"{step_s - micro_batches * micro_s:+.3f} s", *(f"{s:.2f} s" for s in longer)]
        report.add(f"| {self.rule}, {self.ratio} | {' | '.join(cells)} | {'; '.join(more)} |")


def steps_of(report: Report, part: str, micro_batches: int) -> None:
    shape, states = PARTS[part]
    begin = time.monotonic()
    model: Any = build(shape, "eager")
    numel = sum(param.numel() for param in model.parameters())
    generator = torch.Generator().manual_seed(1)
    size = (real_models.BATCH, real_models.TOKENS)
    data = torch.randint(0, SHAPES[shape][5], size, generator=generator).to(DEVICE)

    def two_backwards() -> None:
        for _ in range(2):
            model(input_ids=data, labels=data).loss.backward()
        model.zero_grad(set_to_none=True)

    micro_s = statistics.median(measure(two_backwards, 1, 3, 1)) / 2
    report.add()
    report.add(
        f"{shape}, {numel / 1e9:.2f} B parameters, {states} states: built in {time.monotonic() - begin:.0f} s; "
        f"a micro-batch of {data.numel():,} tokens takes {micro_s:.3f} s alone"
    )
    report.add()
    computed = [f"{tokens // 1024}k tokens (computed)" for tokens in TOKENS]
    report.add(f"| rule, ratio | {micro_batches} micro-batches | beyond alone | {' | '.join(computed)} | |")
    report.add("|---|---:|---:|" + "---:|" * len(TOKENS) + "---|")
    found: Found = {}
    for ratio in RATIOS:
        for rule in RULES:
            case = Case(shape, states, rule, ratio)
            work = partial(case.measure, report, model, data, micro_s, micro_batches, found)
            report.attempt(f"{shape}, {rule}, ratio {ratio}", work)
    for ratio in RATIOS:
        if all((rule, ratio) in found for rule in RULES):
            quotients = zip(TOKENS, found["muon", ratio], found["adamw", ratio], strict=True)
            texts = [f"{n // 1024}k tokens {m / a:.3f} (wanted <= {LIMITS[n]:.2f})" for n, m, a in quotients]
            report.add(f"Muon / AdamW, ratio {ratio}: {', '.join(texts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("products", *PARTS), default=["products", "3b", "7b"])
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a measured step")
    parser.add_argument("--seconds", type=float, default=270.0, help="time after which no further setting is started")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    report = Report(time.monotonic() + options.seconds)
    gpu = torch.cuda.get_device_name() if CUDA else "no GPU"
    report.add(f"# Muon beside AdamW, {datetime.date.today()}")
    report.add()
    report.add(f"`python benchmarks/muon.py`: {gpu}, {describe(read_machine())}; torch {torch.__version__}")
    report.add()
    parts = ["products", "tiny"] if options.tiny else options.parts
    for part in parts:
        if part == "products":
            report.attempt(part, partial(products, report, options.tiny))
        else:
            report.attempt(part, partial(steps_of, report, part, options.micro_batches))
    if options.save:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-muon-{'-'.join(parts)}.md"
        path.write_text("\n".join(report.lines) + "\n")


if __name__ == "__main__":
    main()
