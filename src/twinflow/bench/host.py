# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the host kernels: measures every job and compares figures with their targets. It prints nothing."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from twinflow import native
from twinflow.bench import jobs
from twinflow.bench.jobs import FP32_BYTES, JOBS, Contender, Work, huge_random, load_deepspeed
from twinflow.errors import invalid_value
from twinflow.native.threads import check_threads

LARGEST_NUMEL: Final = 1 << 27
MAX_REPEATS: Final = 10_000
SMALLEST_NUMEL: Final = 1024
QUICK_NUMEL, QUICK_REPEATS, REPEATS = 1 << 24, 3, 7


@dataclass(frozen=True)
class Settings:
    """The size of a benchmark. All contenders (the functions that are timed) use the same number of threads."""

    numel: int
    threads: int
    repeats: int


@dataclass(frozen=True)
class Result:
    """Results of one contender: a kernel of twinflow, or another implementation (a rival). A rival has no bytes,
    because its memory traffic is not known.
    """

    job: str
    name: str
    rival_of: str | None
    numel: int
    median_s: float
    best_s: float
    bytes_per_param: float | None = None
    ceiling_before: float | None = None  # bytes per second of the memory passes directly before and after each call
    ceiling_after: float | None = None

    @property
    def params_per_s(self) -> float:
        return self.numel / self.median_s

    @property
    def bytes_per_s(self) -> float | None:
        """Memory traffic per second; None for a rival."""
        return self.params_per_s * self.bytes_per_param if self.bytes_per_param is not None else None

    @property
    def ceiling(self) -> float | None:
        """Read-modify-write rate of the memory: the mean of the rates before and after the calls."""
        if self.ceiling_before is None or self.ceiling_after is None:
            return None
        return (self.ceiling_before + self.ceiling_after) / 2

    @property
    def of_ceiling(self) -> float | None:
        """Memory traffic as a share of `ceiling`."""
        rate, ceiling = self.bytes_per_s, self.ceiling
        return rate / ceiling if rate is not None and ceiling else None


@dataclass(frozen=True)
class Figure:
    """A target for a measured value. `measured` is None if a part of it could not be measured."""

    name: str
    wanted: float
    measured: float | None
    unit: str  # "x" for a ratio of rates, "" for a share

    @property
    def met(self) -> bool | None:
        """Whether the target is reached, or None if it was not measured."""
        return self.measured >= self.wanted if self.measured is not None else None


@dataclass(frozen=True)
class Report:
    settings: Settings
    isa: str
    deepspeed: str
    results: Sequence[Result]
    figures: Sequence[Figure]


def choose_settings(
    numel: int | None, threads: int | None, repeats: int | None, quick: bool, available_bytes: int
) -> Settings:
    """Settings with defaults for options that are None. Raises a ValueError that names the option if its value is
    invalid.
    """
    if threads is not None:
        check_threads(threads, "--threads")
    if repeats is not None and not 1 <= repeats <= MAX_REPEATS:
        expected = "a whole number >= 1" if repeats < 1 else f"at most {MAX_REPEATS}"
        raise invalid_value("--repeats", repeats, expected)
    if numel is None:
        numel = fitting_numel(available_bytes, QUICK_NUMEL if quick else LARGEST_NUMEL)
    most = available_bytes // jobs.PEAK_BYTES
    if not SMALLEST_NUMEL <= numel <= most:
        remedy = f"Choose another number. Each parameter needs {jobs.PEAK_BYTES} bytes of available memory."
        raise invalid_value("--numel", numel, f"a whole number from {SMALLEST_NUMEL} to {most}", remedy)
    default_repeats = QUICK_REPEATS if quick else REPEATS
    return Settings(numel, threads or native.get_threads(), default_repeats if repeats is None else repeats)


def fitting_numel(available_bytes: int, largest: int) -> int:
    """`largest`, halved until its buffers fill at most half of the memory or `SMALLEST_NUMEL` is reached."""
    numel = largest
    while numel > SMALLEST_NUMEL and numel * jobs.PEAK_BYTES > available_bytes // 2:
        numel //= 2
    return numel


def measure(settings: Settings, announce: Callable[[str], object] = lambda name: None) -> Report:
    """Run all jobs. The caller must have checked the results of the kernels (`bench.check`)."""
    with same_threads(settings.threads):
        deepspeed = load_deepspeed(settings.threads)
        # As large as the fp32 state of AdamW, which has three numbers per parameter.
        state = huge_random(3 * settings.numel)
        results: list[Result] = []
        for name, build in JOBS.items():
            announce(name)
            results += run_job(name, build(settings.numel, deepspeed), settings, state)
    return Report(settings, native.isa(), deepspeed.about, results, figures(results, platform.machine()))


@contextmanager
def same_threads(threads: int) -> Iterator[None]:
    """Set the number of threads of our pool and of torch. The previous numbers are restored at the end."""
    ours, theirs = native.get_threads(), torch.get_num_threads()
    native.set_threads(threads)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        native.set_threads(ours)
        torch.set_num_threads(theirs)


@dataclass
class Timing:
    """Seconds of every timed call of a contender, and for our kernels of the memory passes before and after it."""

    call_s: list[float] = field(default_factory=list)
    before_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)


def take_turns(
    contenders: Sequence[Contender],
    memory_pass: Work,
    repeats: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    pause_s: float = 0.005,
) -> dict[str, Timing]:
    """Time each contender `repeats` times, with one call of each in every round, so that changes of the machine's speed
    affect all of them alike. Returns timings by name.

    After a call the threads of OpenMP keep a core busy for some time. The pause lets them stop.
    """
    timings = {contender.name: Timing() for contender in contenders}
    for round_index in range(warmup + repeats):
        for contender in contenders:
            if contender.prepare is not None:
                contender.prepare()
            time.sleep(pause_s)
            is_kernel = contender.rival_of is None
            before = _seconds(memory_pass, clock) if is_kernel else None
            call = _seconds(contender.run, clock)
            after = _seconds(memory_pass, clock) if is_kernel else None
            if round_index < warmup:
                continue
            timing = timings[contender.name]
            timing.call_s.append(call)
            if before is not None and after is not None:
                timing.before_s.append(before)
                timing.after_s.append(after)
    return timings


def _seconds(work: Work, clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def run_job(job: str, contenders: Sequence[Contender], settings: Settings, state: torch.Tensor) -> list[Result]:
    """Time the contenders of a job. A pass over `state` around each call of a kernel measures the memory's rate."""
    timings = take_turns(contenders, partial(native.scale_in_place, state, 1.0), settings.repeats)
    pass_bytes = 2 * FP32_BYTES * state.numel()

    def rate(seconds: list[float]) -> float | None:
        return pass_bytes / median(seconds) if seconds else None

    results = []
    for contender in contenders:
        timing = timings[contender.name]
        results.append(
            Result(
                job=job,
                name=contender.name,
                rival_of=contender.rival_of,
                numel=settings.numel,
                median_s=median(timing.call_s),
                best_s=min(timing.call_s),
                bytes_per_param=contender.bytes_per_param,
                ceiling_before=rate(timing.before_s),
                ceiling_after=rate(timing.after_s),
            )
        )
    return results


def figures(results: Sequence[Result], architecture: str) -> list[Figure]:
    """All figures with targets, whether or not this run reaches them."""
    by_name = {result.name: result for result in results}

    def ratio(name: str, over: str) -> float | None:
        if name not in by_name or over not in by_name:
            return None
        return by_name[name].params_per_s / by_name[over].params_per_s

    main, loop = jobs.ADAMW_FP32_STATE, jobs.TORCH_ADAM["loop"]
    subnormal = Figure("half subnormal / all normal", 0.9, ratio(jobs.ADAMW_SUBNORMAL, jobs.ADAMW_NORMAL), "x")
    # On two Arm cores arithmetic was the limit. So on Arm the kernels are compared with torch, not with the memory.
    if architecture in ("aarch64", "arm64"):
        return [
            Figure(f"{main} / {jobs.TORCH_MIXED}", 1.3, ratio(main, jobs.TORCH_MIXED), "x"),
            Figure(f"{jobs.ADAMW_FP32} / {jobs.TORCH_FP32}", 1.0, ratio(jobs.ADAMW_FP32, jobs.TORCH_FP32), "x"),
            subnormal,
        ]
    share = by_name[main].of_ceiling if main in by_name else None
    return [
        Figure(f"{main}: share of the memory's ceiling", 0.90, share, ""),
        Figure(f"{main} / {jobs.TORCH_MIXED}", 1.4, ratio(main, jobs.TORCH_MIXED), "x"),
        Figure(f"{jobs.ADAMW_SCALED} / {jobs.DEEPSPEED}", 1.4, ratio(jobs.ADAMW_SCALED, jobs.DEEPSPEED), "x"),
        Figure(f"{jobs.ADAM_FP32} / {loop}", 5.0, ratio(jobs.ADAM_FP32, loop), "x"),
        Figure("out of place / in place", 0.85, ratio(jobs.ADAMW_OUT_OF_PLACE, main), "x"),
        Figure("bf16 state / fp32 state", 1.35, ratio(jobs.ADAMW_BF16_STATE, main), "x"),
        Figure("int8 state / fp32 state", 1.5, ratio(jobs.ADAMW_INT8_STATE, main), "x"),
        subnormal,
    ]


def speedup(result: Result, results: Sequence[Result]) -> float | None:
    """Speed of our kernel divided by the speed of a rival. None for our own kernels."""
    ours = next((other for other in results if other.name == result.rival_of), None)
    return ours.params_per_s / result.params_per_s if ours is not None else None


def to_dict(report: Report, extra: Mapping[str, Any]) -> dict[str, Any]:
    """All results as a dict for JSON. Rates are in parameters or bytes per second."""
    rows = [
        {
            **asdict(result),
            "params_per_s": result.params_per_s,
            "bytes_per_s": result.bytes_per_s,
            "of_ceiling": result.of_ceiling,
            "speedup": speedup(result, report.results),
        }
        for result in report.results
    ]
    return {
        "benchmark": "host",
        "correct": True,
        **extra,
        **asdict(report.settings),
        "isa": report.isa,
        "deepspeed": report.deepspeed,
        "results": rows,
        "figures": [{**asdict(figure), "met": figure.met} for figure in report.figures],
    }
