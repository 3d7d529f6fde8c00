# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine for `twinflow doctor`, and the findings that follow from them. `cli.doctor` prints both."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from twinflow import native
from twinflow.bench.check import disagreements
from twinflow.bench.disk import DiskRates
from twinflow.bench.machine import Machine, read_machine, read_versions, version_of
from twinflow.monitor.progress import gib
from twinflow.native.cgroup import read_text
from twinflow.native.library import load

OLDEST_TORCH: Final = (2, 8)
PINNED_TRIAL_BYTES: Final = 1 << 24
BUILD_HELP: Final = "Reinstall twinflow on a machine with a C++17 compiler."
# Optional packages that twinflow uses if they are installed.
EXTRAS: Final = {"deepspeed": "comparison in `twinflow bench host`"}

Level = Literal["broken", "warning", "note"]


@dataclass(frozen=True)
class Kernels:
    """The native library and its settings. `setting_error`: message on an invalid TWINFLOW_ variable."""

    path: str | None
    problem: str | None
    isa: str
    isa_available: Sequence[str]
    isa_forced: bool
    threads: int
    threads_from: str
    setting_error: str | None = None
    disagreements: Sequence[str] = ()

    @property
    def abi_ok(self) -> bool:
        """Whether the library is loaded. The loader refuses a library with another ABI."""
        return self.problem is None and self.path is not None


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Cuda:
    """The GPUs that torch can use. `built_for`: the CUDA version that torch was built with."""

    built_for: str | None
    driver: str | None
    driver_cuda: str | None  # the newest CUDA version the driver can run
    gpus: Sequence[Gpu]
    problem: str | None


@dataclass(frozen=True)
class Pinned:
    """Page-locked memory: the limit, and whether a small allocation worked (None without a GPU)."""

    limit_bytes: int | None  # RLIMIT_MEMLOCK; None: unlimited
    works: bool | None
    problem: str | None


@dataclass(frozen=True)
class Extra:
    name: str
    version: str | None
    purpose: str


@dataclass(frozen=True)
class Finding:
    """A problem or a note for the user. Only the level `broken` makes twinflow unusable."""

    level: Level
    what: str
    remedy: str


@dataclass(frozen=True)
class Facts:
    machine: Machine
    versions: Mapping[str, str | None]
    kernels: Kernels
    cuda: Cuda
    pinned: Pinned
    extras: Sequence[Extra]
    disk: DiskRates | None = None  # None: no folder was given


def gather() -> Facts:
    """Read the facts of this machine. Problems become part of the facts and raise nothing."""
    machine, cuda = read_machine(), read_cuda()
    return Facts(
        machine=machine,
        versions=read_versions(),
        kernels=read_kernels(machine, os.environ),
        cuda=cuda,
        pinned=read_pinned(has_gpu=bool(cuda.gpus)),
        extras=[Extra(name, version_of(name), purpose) for name, purpose in EXTRAS.items()],
    )


def read_kernels(machine: Machine, environ: Mapping[str, str]) -> Kernels:
    """Load the library and compare a small run of every kernel with its reference."""
    try:
        loaded = load()
    except ValueError as error:  # TWINFLOW_ISA or TWINFLOW_THREADS is invalid
        return Kernels(None, None, "none", [], False, 0, "nothing", setting_error=str(error))
    return Kernels(
        path=str(loaded.path) if loaded.path is not None else None,
        problem=loaded.problem,
        isa=native.isa(),
        isa_available=native.isa_names(),
        isa_forced=bool(environ.get("TWINFLOW_ISA")) and loaded.library is not None,
        threads=native.get_threads(),
        threads_from=threads_source(environ, machine) if loaded.library is not None else "torch",
        disagreements=disagreements(numel=300) if loaded.library is not None else (),
    )


def threads_source(environ: Mapping[str, str], machine: Machine) -> str:
    """The setting that determined the number of threads (see `native.threads.default_threads`)."""
    if environ.get("TWINFLOW_THREADS"):
        return "TWINFLOW_THREADS"
    if machine.cgroup_cores is not None and machine.cgroup_cores < machine.affinity_cores:
        return "cgroup quota"
    return "affinity mask" if machine.affinity_cores < machine.logical_cores else "all cores"


def read_cuda(root: Path = Path("/")) -> Cuda:
    """The CUDA devices that torch sees, or the reason why there are none."""
    driver, driver_cuda = read_driver(root)
    if torch.version.cuda is None:
        return Cuda(None, driver, driver_cuda, [], "this torch is built without CUDA")
    try:
        torch.cuda.current_device()  # initializes CUDA and raises if that fails
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # torch raises several types for a missing, old or broken driver
        return Cuda(torch.version.cuda, driver, driver_cuda, [], str(error).strip().splitlines()[0])
    gpus = [Gpu(each.name, each.total_memory, f"{each.major}.{each.minor}") for each in found]
    return Cuda(torch.version.cuda, driver, driver_cuda, gpus, None if gpus else "no CUDA device is visible")


def read_driver(root: Path) -> tuple[str | None, str | None]:
    """The version of the NVIDIA driver and the newest CUDA version that the driver supports."""
    text = read_text(root / "proc/driver/nvidia/version")
    driver = next((word for word in text.partition("\n")[0].split() if word[0].isdigit() and "." in word), None)
    version = ctypes.c_int(0)
    try:
        answer = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return driver, None
    return driver, f"{version.value // 1000}.{version.value % 1000 // 10}" if answer == 0 else None


def read_pinned(has_gpu: bool) -> Pinned:
    """The limit of pinned memory. With a GPU, also the result of a trial allocation of 16 MiB."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    if not has_gpu:
        return Pinned(limit, None, None)
    try:
        works = torch.empty(PINNED_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True).is_pinned()
    except RuntimeError as error:
        return Pinned(limit, False, str(error).splitlines()[0])
    return Pinned(limit, works, None if works else "the allocation is not pinned")


def findings(facts: Facts) -> list[Finding]:
    """All problems and notes, the most severe first."""
    order: tuple[Level, ...] = ("broken", "warning", "note")
    return sorted(_judge(facts), key=lambda finding: order.index(finding.level))


def is_usable(found: Sequence[Finding]) -> bool:
    """Whether twinflow can train on this machine."""
    return all(finding.level != "broken" for finding in found)


def _judge(facts: Facts) -> Iterator[Finding]:
    version, oldest = facts.versions["torch"] or torch.__version__, ".".join(map(str, OLDEST_TORCH))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        yield Finding("broken", f"torch {version} is older than {oldest}.", f"pip install 'torch>={oldest}'")
    kernels = facts.kernels
    if kernels.setting_error is not None:
        yield Finding("broken", kernels.setting_error, "Unset the variable or set it to an allowed value.")
    elif kernels.disagreements:
        wrong = ", ".join(kernels.disagreements)
        what = f"These native kernels compute other results than their references: {wrong}."
        yield Finding("broken", what, f"{BUILD_HELP} Until then set TWINFLOW_ISA to another variant.")
    elif not kernels.abi_ok:
        what = (
            f"The native library cannot be loaded: {kernels.problem}. It is required by `twinflow train` and all "
            "offloaded training. Host optimizers run without it on torch operations, many times slower."
        )
        yield Finding("broken", what, BUILD_HELP)
    cuda, pinned = facts.cuda, facts.pinned
    if not cuda.gpus:
        driver = f" (driver {cuda.driver}, up to CUDA {cuda.driver_cuda or 'unknown'})" if cuda.driver else ""
        what = (
            f"torch can use no GPU: {cuda.problem}{driver}. Host optimizers, `twinflow train` and `twinflow bench "
            "host` work without one."
        )
        remedy = "To use a GPU, install the NVIDIA driver and a torch for a CUDA version that the driver supports."
        yield Finding("warning" if cuda.driver else "note", what, remedy)
    elif pinned.works is False:
        what = (
            f"Pinned memory cannot be allocated: {pinned.problem}. Copies between host and GPU are several times "
            "slower without it."
        )
        yield Finding("warning", what, "Raise the limit (ulimit -l unlimited, or the container's memlock).")
    machine = facts.machine
    if machine.system != "Linux":
        yield Finding("warning", f"twinflow is not tested on {machine.system}.", "Use Linux.")
    if machine.huge_pages == "never":
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("note", "Huge pages are off, so updates of large optimizer states are slower.", remedy)
    if machine.cgroup_memory_bytes is not None and machine.cgroup_memory_bytes < machine.memory_bytes:
        what = f"A cgroup limits this process to {gib(machine.cgroup_memory_bytes)} of the machine's memory."
        remedy = "Raise the memory limit of the container, job or service to hold more optimizer state."
        yield Finding("note", what, remedy)
