"""The host kernels' benchmark: measure every job, judge the figures that matter. Nothing is printed here."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from twinflow import native
from twinflow.bench import jobs
from twinflow.bench.buffers import FP32_BYTES, huge_random
from twinflow.bench.jobs import JOBS
from twinflow.bench.rivals import load_deepspeed
from twinflow.bench.timing import Contender, take_turns
from twinflow.errors import invalid_value
from twinflow.native.threads import check_threads

LARGEST_NUMEL: Final = 1 << 27
SMALLEST_NUMEL: Final = 1024
QUICK_NUMEL, QUICK_REPEATS, REPEATS = 1 << 24, 3, 7


@dataclass(frozen=True)
class Settings:
    """The size of a run; everybody gets the same number of threads."""

    numel: int
    threads: int
    repeats: int


@dataclass(frozen=True)
class Result:
    """One contender's numbers. Rates of a rival have no bytes: how many it moves is its own affair."""

    job: str
    name: str
    rival_of: str | None
    numel: int
    median_s: float
    best_s: float
    bytes_per_param: float | None = None
    ceiling_before: float | None = None  # bytes a second of the memory passes right before and right after each call
    ceiling_after: float | None = None

    @property
    def params_per_s(self) -> float:
        """Parameters a second."""
        return self.numel / self.median_s

    @property
    def bytes_per_s(self) -> float | None:
        """Memory traffic by our count."""
        return self.params_per_s * self.bytes_per_param if self.bytes_per_param is not None else None

    @property
    def ceiling(self) -> float | None:
        """The memory's read-modify-write rate around the calls: the mean of before and after."""
        if self.ceiling_before is None or self.ceiling_after is None:
            return None
        return (self.ceiling_before + self.ceiling_after) / 2

    @property
    def of_ceiling(self) -> float | None:
        """Share of the memory's rate."""
        rate, ceiling = self.bytes_per_s, self.ceiling
        return rate / ceiling if rate is not None and ceiling else None


@dataclass(frozen=True)
class Figure:
    """A number we hold ourselves to. `measured` is None when one side of it could not be measured."""

    name: str
    wanted: float
    measured: float | None
    unit: str  # "x" for a ratio of rates, "" for a share

    @property
    def met(self) -> bool | None:
        """Whether it is reached."""
        return self.measured >= self.wanted if self.measured is not None else None


@dataclass(frozen=True)
class Report:
    """Everything one run measured."""

    settings: Settings
    isa: str
    deepspeed: str
    results: Sequence[Result]
    figures: Sequence[Figure]


def choose_settings(
    numel: int | None, threads: int | None, repeats: int | None, quick: bool, available_bytes: int
) -> Settings:
    """Fill in what was not given; raise a ValueError that names the option for what cannot work."""
    if threads is not None:
        check_threads(threads, "--threads")
    if repeats is not None and repeats < 1:
        raise invalid_value("--repeats", repeats, "a whole number >= 1")
    if numel is None:
        numel = fitting_numel(available_bytes, QUICK_NUMEL if quick else LARGEST_NUMEL)
    most = available_bytes // jobs.PEAK_BYTES
    if not SMALLEST_NUMEL <= numel <= most:
        remedy = f"{jobs.PEAK_BYTES} bytes a parameter must fit into the memory that is available"
        raise invalid_value("--numel", numel, f"a whole number from {SMALLEST_NUMEL} to {most}", remedy)
    default_repeats = QUICK_REPEATS if quick else REPEATS
    return Settings(numel, threads or native.get_threads(), default_repeats if repeats is None else repeats)


def fitting_numel(available_bytes: int, largest: int) -> int:
    """The largest power of two up to `largest` whose buffers fill at most half of the memory."""
    numel = largest
    while numel > SMALLEST_NUMEL and numel * jobs.PEAK_BYTES > available_bytes // 2:
        numel //= 2
    return numel


def measure(settings: Settings, announce: Callable[[str], object] = lambda name: None) -> Report:
    """Run every job. The caller has checked that the kernels are right (`bench.check`)."""
    with same_threads(settings.threads):
        deepspeed = load_deepspeed(settings.threads)
        # As large as the fp32 state of AdamW: three numbers a parameter.
        state = huge_random(3 * settings.numel)
        results: list[Result] = []
        for name, build in JOBS.items():
            announce(name)
            results += run_job(name, build(settings.numel, deepspeed), settings, state)
    return Report(settings, native.isa(), deepspeed.about, results, figures(results, platform.machine()))


@contextmanager
def same_threads(threads: int) -> Iterator[None]:
    """The same number of threads for our pool and for torch, and afterwards what was set before."""
    ours, theirs = native.get_threads(), torch.get_num_threads()
    native.set_threads(threads)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        native.set_threads(ours)
        torch.set_num_threads(theirs)


def run_job(job: str, contenders: Sequence[Contender], settings: Settings, state: torch.Tensor) -> list[Result]:
    """Time one job's contenders, with a pass over `state` as the memory's ceiling around each call of a kernel."""
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
    """The figures we hold ourselves to, whether or not this run reaches them."""
    by_name = {result.name: result for result in results}

    def ratio(name: str, over: str) -> float | None:
        if name not in by_name or over not in by_name:
            return None
        return by_name[name].params_per_s / by_name[over].params_per_s

    main, loop = jobs.ADAMW_FP32_STATE, jobs.TORCH_ADAM["loop"]
    subnormal = Figure("half subnormal / all normal", 0.9, ratio(jobs.ADAMW_SUBNORMAL, jobs.ADAMW_NORMAL), "x")
    if architecture in ("aarch64", "arm64"):  # two cores of it are bound by arithmetic: torch is the measure
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
    """For a rival: how many times faster our kernel is."""
    ours = next((other for other in results if other.name == result.rival_of), None)
    return ours.params_per_s / result.params_per_s if ours is not None else None


def to_dict(report: Report, extra: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers for JSON; rates in units of one, not of 10**9."""
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
