# SPDX-License-Identifier: Apache-2.0
"""`twinflow doctor`: parsing, judging and printing, with made-up machines."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from fork_support import run_script
from rich.console import Console
from typer.testing import CliRunner, Result

from twinflow.bench import disk
from twinflow.bench import machine as machine_module
from twinflow.bench.disk import measure_disk
from twinflow.bench.machine import Machine, parse_cpu, parse_huge_pages, parse_meminfo
from twinflow.cli import doctor as doctor_module
from twinflow.cli import facts as facts_module
from twinflow.cli.doctor import doctor, print_report, to_dict
from twinflow.cli.facts import Cuda, Extra, Facts, Gpu, Kernels, Pinned, findings, is_usable, threads_source
from twinflow.monitor.progress import gib
from twinflow.offload import state_file

MACHINE = Machine(
    system="Linux",
    architecture="x86_64",
    cpu="Some CPU",
    logical_cores=32,
    physical_cores=16,
    affinity_cores=16,
    cgroup_cores=None,
    memory_bytes=64 << 30,
    available_bytes=60 << 30,
    cgroup_memory_bytes=None,
    cache_bytes=32 << 20,
    huge_pages="madvise",
    numa_nodes=1,
)
KERNELS = Kernels("libtwinflow.so", None, "avx2", ["avx2", "baseline"], False, 16, "affinity mask")
GOOD = Facts(
    machine=MACHINE,
    versions={"torch": "2.13.0+cu130", "triton": "3.5", "python": "3.11.7"},
    kernels=KERNELS,
    cuda=Cuda("13.0", "580.65", "13.0", [Gpu("Some GPU", 80 << 30, "9.0")], None),
    pinned=Pinned(None, True, None),
    extras=[Extra("safetensors", "0.6", "export"), Extra("lightning", None, "loops")],
)
NO_GPU = replace(GOOD, cuda=Cuda(None, None, None, [], "no CUDA here"), pinned=Pinned(8 << 20, None, None))


def run_doctor(*options: str) -> Result:
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, list(options))


def report(facts: Facts) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(console, facts, findings(facts))
    return console.export_text()


def levels(facts: Facts) -> list[str]:
    return [finding.level for finding in findings(facts)]


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Intel(R)  Xeon(R) @ 2.0GHz\npower management:\n", "Intel(R) Xeon(R) @ 2.0GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "Neoverse-N1"),
        ("CPU implementer\t: 0x99\nCPU part\t: 0x001\n", "Arm core, implementer 0x99, part 0x001"),
        ("", ""),
    ],
)
def test_cpu_names(cpuinfo: str, name: str) -> None:
    assert parse_cpu(cpuinfo) == name


def test_small_parsers() -> None:
    assert parse_meminfo("MemTotal:       100 kB\nMemAvailable:    50 kB\nHugePages_Total:  0\n") == {
        "MemTotal": 102400,
        "MemAvailable": 51200,
    }
    assert parse_huge_pages("always [madvise] never") == "madvise"
    assert parse_huge_pages("") == "unknown"
    assert gib(3 << 29) == "1.5 GiB"
    assert gib(8 << 20) == "8 MiB"


def test_a_machine_in_a_container(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "model name\t: Some CPU\n",
        "proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": str(1 << 30),
        "sys/fs/cgroup/memory.current": "0",
        "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
        "sys/devices/system/node/node0/x": "",
        "sys/devices/system/node/node1/x": "",
        "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0-1\n",
        "sys/devices/system/cpu/cpu1/topology/thread_siblings_list": "0-1\n",
        "sys/devices/system/cpu/cpu0/cache/index2/level": "2",
        "sys/devices/system/cpu/cpu0/cache/index2/size": "512K",
        "sys/devices/system/cpu/cpu0/cache/index3/level": "3",
        "sys/devices/system/cpu/cpu0/cache/index3/size": "1024K",
        "sys/devices/system/cpu/cpu1/cache/index3/level": "3",
        "sys/devices/system/cpu/cpu1/cache/index3/size": "1024K",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    machine = machine_module.read_machine(tmp_path)
    assert (machine.cpu, machine.cgroup_cores, machine.physical_cores) == ("Some CPU", 2, 1)
    assert (machine.memory_bytes, machine.available_bytes, machine.cgroup_memory_bytes) == (4 << 30, 1 << 30, 1 << 30)
    assert (machine.huge_pages, machine.numa_nodes, machine.cache_bytes) == ("always", 2, 1 << 20)
    assert machine.usable_cores <= 2
    assert "2 NUMA nodes" in machine_module.describe(machine)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    machine = machine_module.read_machine(tmp_path)
    assert machine.cpu
    assert (machine.memory_bytes, machine.cgroup_cores, machine.huge_pages) == (0, None, "unknown")
    assert (machine.numa_nodes, machine.cache_bytes) == (1, 0)


def test_where_the_threads_come_from() -> None:
    assert threads_source({"TWINFLOW_THREADS": "3"}, MACHINE) == "TWINFLOW_THREADS"
    assert threads_source({}, MACHINE) == "affinity mask"
    assert threads_source({}, replace(MACHINE, cgroup_cores=4)) == "cgroup quota"
    assert threads_source({}, replace(MACHINE, affinity_cores=32)) == "all cores"


def test_a_good_machine_has_no_findings() -> None:
    assert findings(GOOD) == []


def test_without_a_gpu_it_stays_usable() -> None:
    assert levels(NO_GPU) == ["note"]
    assert is_usable(findings(NO_GPU))
    # A driver without a working torch is more than a machine without a GPU.
    assert levels(replace(NO_GPU, cuda=Cuda(None, "580.65", "13.0", [], "torch is built without CUDA"))) == ["warning"]


@pytest.mark.parametrize(
    "facts",
    [
        replace(GOOD, versions={"torch": "2.7.1"}),
        replace(GOOD, kernels=replace(KERNELS, setting_error="TWINFLOW_THREADS is 'many', but must be a whole number")),
        replace(GOOD, kernels=replace(KERNELS, disagreements=["update: adamw"])),
        replace(GOOD, kernels=replace(KERNELS, path=None, problem="libtwinflow.so is not installed")),
    ],
    ids=["old torch", "bad variable", "wrong bits", "no library"],
)
def test_what_makes_it_unusable(facts: Facts) -> None:
    found = findings(facts)
    assert found[0].level == "broken"
    assert found[0].remedy
    assert not is_usable(found)
    assert "cannot work here" in report(facts)


def test_smaller_findings() -> None:
    assert levels(replace(GOOD, pinned=Pinned(65536, False, "out of memory"))) == ["warning"]
    assert levels(replace(GOOD, machine=replace(MACHINE, huge_pages="never"))) == ["note"]
    assert levels(replace(GOOD, machine=replace(MACHINE, cgroup_memory_bytes=1 << 30))) == ["note"]
    assert levels(replace(GOOD, machine=replace(MACHINE, system="Darwin"))) == ["warning"]


def test_the_report_names_everything() -> None:
    text = report(GOOD)
    for words in ("Some CPU", "32 logical", "avx2: the best of avx2, baseline", "16: affinity mask", "compatible ABI"):
        assert words in text, words
    for words in ("Some GPU, 80.0 GiB", "580.65", "works; RLIMIT_MEMLOCK: no limit", "pip install lightning"):
        assert words in text, words
    assert "findings" not in text
    assert "not tried without a GPU; RLIMIT_MEMLOCK: 8 MiB" in report(NO_GPU)
    forced = replace(GOOD, kernels=replace(KERNELS, isa_forced=True))
    assert "forced by TWINFLOW_ISA" in report(forced)


def test_on_this_machine() -> None:
    result = run_doctor()
    assert result.exit_code == 0, result.output
    for section in ("machine", "native kernels", "versions", "CUDA", "twinflow can work here"):
        assert section in result.output
    answer = run_doctor("--json")
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["usable"] is True
    assert torch.__version__.startswith(found["versions"]["torch"])  # a wheel of PyPI has no "+cu130" in its name
    assert found["machine"]["memory_bytes"] > 0


def test_exit_code_when_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "gather", lambda: replace(GOOD, versions={"torch": "1.13.0"}))
    assert run_doctor().exit_code == 1
    answer = run_doctor("--json")
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["usable"] is False


def test_cuda_as_torch_tells_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12\n")
    found = SimpleNamespace(name="Some GPU", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    cuda = facts_module.read_cuda(tmp_path)
    assert (cuda.driver, cuda.problem, cuda.gpus) == ("580.65.06", None, [Gpu("Some GPU", 80 << 30, "9.0")] * 2)

    def fail() -> int:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nMore lines")

    monkeypatch.setattr(torch.cuda, "current_device", fail)
    cuda = facts_module.read_cuda(tmp_path)
    assert (cuda.problem, cuda.gpus) == ("The NVIDIA driver on your system is too old.", [])


def test_pinned_memory_is_tried_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts_module.read_pinned(has_gpu=False).works is None

    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("cannot pin\nmore")

    monkeypatch.setattr(torch, "empty", refuse)
    pinned = facts_module.read_pinned(has_gpu=True)
    assert (pinned.works, pinned.problem) == (False, "cannot pin")


CODE = "import typer; from twinflow.cli.doctor import doctor; typer.run(doctor)"


@pytest.mark.parametrize(
    ("variable", "value", "code", "words"),
    [
        ("TWINFLOW_THREADS", "many", 1, "TWINFLOW_THREADS is 'many'"),
        pytest.param("TWINFLOW_LIBRARY", "no-such-file.so", 1, "offloaded training", marks=pytest.mark.matrix),
    ],
)
def test_variables_that_cannot_work(variable: str, value: str, code: int, words: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CODE)
    run = run_script(script, tmp_path, tmp_path, **{variable: value})
    assert run.returncode == code, run.stderr
    assert words in " ".join(run.stdout.split())


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_disk(tmp_path, num_bytes=1 << 20, num_requests=3, block_bytes=1 << 16)
    assert min(found.read, found.write, found.update) > 1e5
    assert found.free_bytes > 1 << 20
    assert not list(tmp_path.iterdir())
    for word in ("disk", str(tmp_path), "read", "write", "update", "GB/s"):
        assert word in report(replace(GOOD, disk=found))
    assert "through the page cache" in report(replace(GOOD, disk=replace(found, is_direct=False)))
    assert f"by {found.io}" in report(replace(GOOD, disk=found))
    monkeypatch.setattr(state_file, "ring_refusal", lambda: "Operation not permitted")
    monkeypatch.setattr(disk, "ring_refusal", state_file.ring_refusal)
    refused = measure_disk(tmp_path, num_bytes=1 << 20, num_requests=3, block_bytes=1 << 16)
    assert refused.io == "threads; the kernel refuses io_uring: Operation not permitted"
    assert to_dict(replace(GOOD, disk=found), [])["disk"]["read"] == found.read


def test_a_disk_that_cannot_be_measured_is_named(tmp_path: Path) -> None:
    result = run_doctor("--disk", str(tmp_path / "missing"))
    assert result.exit_code == 1
    assert "--disk is" in result.output
    with pytest.raises(OSError, match=r"--disk is .*, but must be a folder with"):
        measure_disk(tmp_path, num_bytes=1 << 60)
    assert not list(tmp_path.iterdir())
