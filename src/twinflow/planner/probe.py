# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of this machine in about three seconds, and keeps them in a file.

Measurements
------------
- Copies between page-locked host memory and the device, 128 MiB each: to the host alone, to the device alone, and both
  at once on two streams (the rate of each direction until the slower one is done). Without a GPU: copies in memory.
- AdamW updates on the host for each state format, with the native kernel and the current settings of its thread pool:
  bf16 gradient and weight (page-locked, as in training), lower halves of the master and states (on huge pages).
  Calls of 8 M parameters iterate over 64 M parameters, which do not fit into any cache. Updates are measured
  without copies, and while both directions copy continuously. The second rate is that of a training step, because
  updates and copies share the bandwidth of the host memory.
- Device memory: one elementwise operation from 256 MiB to another 256 MiB, bytes read and written.
- Matrix products: the three products of a linear layer in forward and backward, of width 4096 in bf16 (without a GPU:
  512 in fp32). The inputs are random, because a GPU multiplies zeros faster.

Every measurement gets the same share of the time budget. A fifth of the share is a warm-up of clocks and links. The
rest is samples of some milliseconds, and the median is the result. Allocations and the first call of each operation
are not part of the budget.

If memory is short, all buffers of a measurement are halved until they fit. If even small buffers do not fit, its rates
are low default values and `flops` is 0. Such rates are not written to the cache.

All memory is released, including that of the caching allocator. Only cuBLAS keeps its workspace for the calling thread,
which the first matrix product of training would allocate anyway.

Threads: `_Copies.running` starts one thread for each copy direction. Each thread owns one stream and enqueues copies
on it, at most `_MAX_IN_FLIGHT` ahead. The calling thread runs the updates, and stops the copies with an event.

The cache has one file for each kind of machine. The file name contains a hash of everything that affects the rates:
processor, usable cores, threads and ISA of the native pool, GPU, versions. The file also contains these facts as text,
so that a file copied from another machine is rejected. A file that cannot be read or written is not an error: the
machine is measured again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import re
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from twinflow import native
from twinflow.device import Device, Event, device_for
from twinflow.errors import invalid_value
from twinflow.files import read_json, write_whole
from twinflow.native.cgroup import free_host_bytes, read_text
from twinflow.native.threads import default_threads
from twinflow.planner.formats import STATES
from twinflow.planner.machines import Rates
from twinflow.rules import ADAMW
from twinflow.rules.formats import rounding_key
from twinflow.rules.segment import Segment, Store, check_format, new_states
from twinflow.version import __version__

FORMAT_VERSION: Final = 1  # must change if the file format or the meaning of the rates changes
_COPY_BYTES: Final = 128 << 20
_HOST_NUMEL: Final = 1 << 26
_CALL_NUMEL: Final = 1 << 23  # enough work to make the wake-up of the pool negligible
_TORCH_CALL_NUMEL: Final = 1 << 18  # smaller, because updates without the native library are slow
_MEMORY_NUMEL: Final = 1 << 26  # 256 MiB of fp32
_WIDTH: Final = 4096
_CPU_WIDTH: Final = 512
_SMALLEST_PART: Final = 256
_PEAK_BYTES: Final = 4 * _COPY_BYTES + 14 * _HOST_NUMEL  # peak of host memory: without a GPU, with fp32 states
_SAMPLE_S: Final = 0.004  # long compared with the microseconds of a launch and a wait
_MIN_SAMPLES: Final = 3
_MAX_IN_FLIGHT: Final = 2
_UNMEASURED_BYTES: Final = 1e9
_UNMEASURED_PARAMS: Final = 1e8
_OPTIONS: Final = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED", re.IGNORECASE)

Facts = dict[str, str | int]
Work = Callable[[int], None]  # runs an operation as often as its argument says, and waits for the end
T = TypeVar("T")


def load_or_measure(device: torch.device, *, folder: Path | None = None, refresh: bool = False) -> Rates:
    """The rates of this machine, from the cache or measured. `refresh`: measure in any case."""
    facts = machine_facts(device)
    path = rates_file(facts, folder)
    rates = None if refresh else read_rates(path, facts)
    if rates is None:
        rates = measure(device)
        if is_sane(rates):
            write_rates(path, facts, rates)
    return rates


def machine_facts(device: torch.device) -> Facts:
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "probe": FORMAT_VERSION,
        "cpu": _cpu_name(read_text(Path("/proc/cpuinfo"))) or platform.processor() or platform.machine(),
        "cores": default_threads({}),  # number of cores that this process may use, whatever TWINFLOW_THREADS is
        "threads": native.get_threads(),
        "isa": native.isa(),
        "gpu": gpu.name if gpu is not None else "",
        "gpu_bytes": gpu.total_memory if gpu is not None else 0,
        "twinflow": __version__,
        "torch": str(torch.__version__),
    }


def _cpu_name(cpuinfo: str) -> str:
    """All types of cores in /proc/cpuinfo: names on x86, numbers of implementer and part on Arm."""
    kinds = re.findall(r"^(?:model name|CPU implementer|CPU part)\s*: (.*)$", cpuinfo, flags=re.MULTILINE)
    return ", ".join(sorted({" ".join(kind.split()) for kind in kinds}))


def rates_file(facts: Facts, folder: Path | None = None) -> Path:
    """Path of the cache file for a machine with these facts, in `folder` or in the user's cache."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return (default_folder(os.environ) if folder is None else folder) / f"rates-{key}.json"


def default_folder(environ: Mapping[str, str]) -> Path:
    """$TWINFLOW_CACHE, or the folder `twinflow` in the user's cache."""
    if environ.get("TWINFLOW_CACHE"):
        return Path(environ["TWINFLOW_CACHE"])
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "twinflow"
    home = Path(os.path.expanduser("~"))
    # In a container a user may have no home. Then a temporary folder is better than a folder with the name "~".
    return (home / ".cache" if home.is_absolute() else Path(tempfile.gettempdir())) / "twinflow"


def read_rates(path: Path, facts: Facts) -> Rates | None:
    """The rates in a file. None if the file is missing, of another machine, or invalid."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        saved = read_json(path)
        if saved["machine"] == facts:
            rates = Rates(**saved["rates"])
            return rates if is_sane(rates) else None
    return None


def is_sane(rates: Rates) -> bool:
    """Whether all rates are positive and finite, and the rates of the host exist for every state format."""
    hosts = (rates.host_params, rates.host_params_copying)
    if not all(isinstance(host, Mapping) and set(STATES) <= set(host) for host in hosts):
        return False
    alone = (rates.out_bytes, rates.in_bytes, rates.duplex_bytes, rates.device_bytes, rates.flops)
    return all(_is_positive(rate) for rate in (*alone, *hosts[0].values(), *hosts[1].values()))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # no conversion to float: an integer may be too large for it


def write_rates(path: Path, facts: Facts, rates: Rates) -> None:
    """Write the rates atomically. A failure is only a warning."""
    text = json.dumps({"machine": facts, "rates": asdict(rates)}, indent=1) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        warnings.warn(
            f"The measured rates of this machine cannot be written to {path.parent} ({error}). Every start measures "
            "them again, which takes some seconds. Set TWINFLOW_CACHE to a folder that can be written.",
            stacklevel=2,
        )


def measure(device: torch.device, formats: Sequence[str] = STATES, budget_s: float = 3.0) -> Rates:
    """Measure the rates in about `budget_s` seconds, plus the time for allocations and first calls."""
    for format in formats:
        check_format(ADAMW, format)
    if not budget_s > 0:
        raise invalid_value("budget_s", budget_s, "a number > 0")
    share_s = budget_s / (5 + 2 * len(formats))
    is_cuda = device.type == "cuda"
    host_part = _fitting_part(free_host_bytes() or 4 * _PEAK_BYTES)  # unknown free memory counts as sufficient
    device_part = 1 if is_cuda else host_part
    # Other threads write these tensors. In inference mode only the calling thread could.
    with torch.cuda.device(device) if is_cuda else nullcontext(), torch.inference_mode(False), torch.no_grad():
        host = _halve_until_it_fits(partial(_measure_host, device, formats, share_s), host_part)
        memory = _halve_until_it_fits(partial(_measure_memory, device, share_s), device_part)
        flops = _halve_until_it_fits(partial(_measure_products, device, share_s), device_part)
    is_complete = host is not None and memory is not None
    if host is None:
        params = dict.fromkeys(formats, _UNMEASURED_PARAMS)
        host = Rates(_UNMEASURED_BYTES, _UNMEASURED_BYTES, _UNMEASURED_BYTES, params, params, _UNMEASURED_BYTES, 0.0)
    return replace(host, device_bytes=memory or _UNMEASURED_BYTES, flops=(flops or 0.0) if is_complete else 0.0)


def _halve_until_it_fits(work: Callable[[int], T], first_part: int) -> T | None:
    """The result of work(part) with buffers of 1/part of their size. None if no size fits."""
    part = first_part
    while part <= _SMALLEST_PART:
        try:
            return work(part)
        except (MemoryError, RuntimeError) as error:  # torch raises a plain RuntimeError if host memory is short
            if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
                raise
        finally:
            torch.cuda.empty_cache()  # all tensors of this attempt are released; without CUDA this does nothing
        part *= 2
    return None


def _fitting_part(free_bytes: int) -> int:
    """The least power of two (limit: _SMALLEST_PART) that divides all buffers to at most a quarter of `free_bytes`."""
    part = 1
    while part < _SMALLEST_PART and free_bytes * part < 4 * _PEAK_BYTES:
        part *= 2
    return part


def _measure_host(device: torch.device, formats: Sequence[str], share_s: float, part: int) -> Rates:
    """Measure copies, updates, and updates during copies. The rates of the device are 0."""
    streams = device_for(device)
    try:
        copies = _Copies(streams, device, _COPY_BYTES // part)
        works = [partial(copies.run, directions) for directions in ((0,), (1,), (0, 1))]
        rates = [copies.num_bytes / _seconds_each(work, share_s) for work in works]
        alone, copying = {}, {}
        numel = _HOST_NUMEL // part
        grad, weight = (_random_pinned(streams, numel, scale) for scale in (1e-2, 2e-2))
        for format in formats:
            lower = native.huge_zeros(numel, dtype=torch.int16)
            store = Store(format, lower, weight, *new_states(ADAMW, format, numel, native.huge_zeros))
            call_numel, work = _updates(grad, store)
            alone[format] = call_numel / _seconds_each(work, share_s)
            with copies.running():
                copying[format] = call_numel / _seconds_each(work, share_s)
            del lower, store, work  # release memory before the next format allocates
        return Rates(rates[0], rates[1], rates[2], alone, copying, device_bytes=0.0, flops=0.0)
    finally:
        streams.close()


def _random_pinned(streams: Device, numel: int, scale: float) -> Tensor:
    """Normally distributed numbers, repeated to `numel`, because drawing all would take longer than the measurement."""
    pattern = torch.randn(min(numel, 1 << 18), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    tensor = streams.pinned(numel, torch.bfloat16)
    tensor.view(-1, pattern.numel()).copy_(pattern * scale)
    return tensor


def _updates(grad: Tensor, store: Store) -> tuple[int, Work]:
    """The number of parameters of a call, and a function that updates one range of the store after another."""
    numel = grad.numel()
    call_numel = min(_CALL_NUMEL if native.available() else _TORCH_CALL_NUMEL, numel // 2)
    hyper, key = ADAMW.hyper(_OPTIONS, 10), rounding_key(10, 1)
    turns = itertools.cycle(
        [
            Segment(ADAMW, hyper, grad.narrow(0, at, call_numel), store.narrow(at, call_numel), key=key)
            for at in range(0, numel, call_numel)
        ]
    )

    def work(count: int) -> None:
        for _ in range(count):
            native.update([next(turns)], check=False)

    return call_numel, work


class _Copies:
    """For each direction: a buffer on the host, a buffer on the device, and a stream. The directions share nothing."""

    def __init__(self, streams: Device, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._streams = [streams.stream("out"), streams.stream("in")]
        # Buffers are written before they are read: unwritten memory maps to one page of zeros, which is fast to read.
        self._host = [streams.pinned(num_bytes, torch.uint8) for _ in range(2)]
        self._device = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        _wait(device)  # the streams of the copies are not ordered after the stream that wrote the zeros

    def run(self, directions: Sequence[int], count: int) -> None:
        """Copy `count` times in each direction, and wait for all copies. 0: to the host, 1: to the device."""
        for _ in range(count):
            for direction in directions:
                self._queue(direction)
        for direction in directions:
            self._streams[direction].synchronize()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copy continuously in both directions while the body of the `with` statement runs. Each direction
        has a thread, so that the faster one does not wait for the slower."""
        stop = threading.Event()
        with ThreadPoolExecutor(2) as executor:
            threads = [executor.submit(self._keep_busy, direction, stop) for direction in (0, 1)]
            try:
                yield
            finally:
                stop.set()
            for thread in threads:
                thread.result()

    def _queue(self, direction: int) -> None:
        pair = self._host[direction], self._device[direction]
        target, source = reversed(pair) if direction else pair
        self._streams[direction].run(lambda: target.copy_(source, non_blocking=True))

    def _keep_busy(self, direction: int, stop: threading.Event) -> None:
        events: deque[Event] = deque()
        while not stop.is_set():
            self._queue(direction)
            events.append(self._streams[direction].record())
            if len(events) > _MAX_IN_FLIGHT:
                events.popleft().synchronize()  # sleeps, so that the update threads can use this core
        self._streams[direction].synchronize()


def _measure_memory(device: torch.device, share_s: float, part: int) -> float:
    """Bytes/s that an elementwise operation reads and writes."""
    numel = _MEMORY_NUMEL // part
    source, target = (torch.ones(numel, dtype=torch.float32, device=device) for _ in range(2))
    work = _repeated(partial(torch.mul, source, 0.5, out=target), device)
    return (source.nbytes + target.nbytes) / _seconds_each(work, share_s)


def _measure_products(device: torch.device, share_s: float, part: int) -> float:
    """FLOPS of a linear layer: its forward, the gradient of its input and the gradient of its weight."""
    is_cuda = device.type == "cuda"
    width, dtype = max((_WIDTH if is_cuda else _CPU_WIDTH) // part, 64), torch.float32
    if is_cuda:  # GPUs before Ampere have no bf16 units and train in fp16
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    generator = torch.Generator(device).manual_seed(0)
    inputs, weight, grad = torch.randn(3, width, width, generator=generator, dtype=dtype, device=device)

    def products() -> None:
        linear(inputs, weight)
        torch.mm(grad, weight)
        torch.mm(grad.t(), inputs)

    return 3 * 2 * width**3 / _seconds_each(_repeated(products, device), share_s)


def _repeated(operation: Callable[[], object], device: torch.device) -> Work:
    def work(count: int) -> None:
        for _ in range(count):
            operation()
        _wait(device)

    return work


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds_each(work: Work, share_s: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median seconds of one operation, measured for about `share_s` seconds."""
    work(1)  # the first call loads kernels and allocates memory
    begin = before = clock()
    while True:
        work(1)
        now = clock()
        once_s, before = now - before, now
        if now - begin >= share_s / 5:
            break
    count = max(1, round(_SAMPLE_S / max(once_s, 1e-6)))
    samples: list[float] = []
    while len(samples) < _MIN_SAMPLES or before - begin < share_s:
        work(count)
        now = clock()
        samples.append((now - before) / count)
        before = now
    return median(samples)
