# SPDX-License-Identifier: Apache-2.0
"""Limits of control groups, in made-up trees of both versions."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from twinflow.bench.machine import cgroup_memory, read_machine
from twinflow.native import cgroup, threads
from twinflow.native.cgroup import cgroup_cpus, cgroup_folders, free_host_bytes, own_groups, parse_quota

V2 = "0::/system.slice/job.scope/step\n"
V1 = "11:pids:/\n5:cpu,cpuacct:/slurm/job_7/step_0\n4:memory:/slurm/job_7/step_0\n1:name=systemd:/init\n0::/\n"


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("v2", "quota", "period", "cpus"),
    [
        ("max 100000", "", "", None),
        ("150000 100000", "", "", 2),
        ("50000 100000", "", "", 1),
        ("", "400000", "100000", 4),
        ("", "-1", "100000", None),
        ("", "", "", None),
        ("nonsense", "", "", None),
        ("100000 0", "", "", None),
    ],
)
def test_one_quota(v2: str, quota: str, period: str, cpus: int | None) -> None:
    assert parse_quota(v2, quota, period) == cpus


def test_the_groups_of_a_process() -> None:
    step = PurePosixPath("slurm/job_7/step_0")
    top = PurePosixPath()
    assert own_groups(V1, "cpu") == {"": top, "unified": top, "cpu": step, "cpu,cpuacct": step}
    scope = PurePosixPath("system.slice/job.scope/step")
    assert own_groups(V2, "memory") == {"": scope, "unified": scope, "memory": top}
    assert own_groups("", "cpu") == own_groups("nonsense\n::\n", "cpu") == {"": top, "unified": top, "cpu": top}
    assert own_groups("0::/with:colon", "cpu")[""] == PurePosixPath("with:colon")


def test_no_folder_lies_outside_of_the_mount(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/../../other\n4:memory:/../x"})
    mount = tmp_path / "sys/fs/cgroup"
    assert set(cgroup_folders("memory", tmp_path)) == {mount, mount / "unified", mount / "memory"}


@pytest.mark.parametrize("level", ["", "system.slice/", "system.slice/job.scope/", "system.slice/job.scope/step/"])
def test_v2_limits_of_any_level_hold(level: str, tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    write(tmp_path, {"proc/self/cgroup": V2, f"{base}system.slice/cpu.max": "max 100000"})
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (None, (None, None))
    write(tmp_path, {f"{base}{level}cpu.max": "250000 100000", f"{base}{level}memory.max": 1000})
    write(tmp_path, {f"{base}{level}memory.current": 400, f"{base}{level}memory.stat": "anon 1\ninactive_file 100"})
    write(tmp_path, {f"{base}other.slice/cpu.max": "100000 100000", f"{base}other.slice/memory.max": 1})
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (3, (1000, 700))
    machine = read_machine(tmp_path)
    assert (machine.cgroup_cores, machine.cgroup_memory_bytes) == (3, 1000)


@pytest.mark.parametrize("level", ["", "slurm/", "slurm/job_7/", "slurm/job_7/step_0/"])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_v1_limits_of_any_level_hold(mount: str, level: str, tmp_path: Path) -> None:
    cpu, memory = f"sys/fs/cgroup/{mount}/", "sys/fs/cgroup/memory/"
    write(tmp_path, {"proc/self/cgroup": V1, f"{memory}memory.limit_in_bytes": 9223372036854771712})
    write(tmp_path, {f"{cpu}cpu.cfs_quota_us": -1, f"{cpu}cpu.cfs_period_us": 100000})
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (None, (None, None))
    write(tmp_path, {f"{cpu}{level}cpu.cfs_quota_us": 400000, f"{cpu}{level}cpu.cfs_period_us": 100000})
    write(tmp_path, {f"{memory}{level}memory.limit_in_bytes": 1000, f"{memory}{level}memory.usage_in_bytes": 400})
    write(tmp_path, {f"{memory}{level}memory.stat": "inactive_file 1\ntotal_inactive_file 100"})
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (4, (1000, 700))


def test_nested_limits_the_smallest_holds(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/system.slice/"
    write(
        tmp_path,
        {
            "proc/self/cgroup": V2,
            f"{base}cpu.max": "200000 100000",
            f"{base}job.scope/cpu.max": "800000 100000",
            f"{base}job.scope/step/cpu.max": "400000 100000",
            f"{base}memory.max": 5000,
            f"{base}memory.current": 4900,  # neighbours fill it: less is left here than under the smaller limit
            f"{base}job.scope/memory.max": 3000,
            f"{base}job.scope/memory.current": 1000,
            f"{base}job.scope/step/memory.max": "max",
        },
    )
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (2, (3000, 100))


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "4:memory:/docker/0af3\n3:cpu:/docker/0af3\n"})
    write(tmp_path, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": 100000, "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000})
    write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": 1000})
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (1, (1000, 1000))


def test_what_cannot_be_read_sets_no_limit(tmp_path: Path) -> None:
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (None, (None, None))
    (tmp_path / "proc/self/cgroup").mkdir(parents=True)  # a folder in its place: reading fails for root too
    for name in ("cpu.max", "memory.max"):
        (tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True)
    assert (cgroup_cpus(tmp_path), cgroup_memory(tmp_path)) == (None, (None, None))


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (2, 2), (9, 4)])
def test_threads_keep_within_mask_and_quota(quota: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr(threads, "cgroup_cpus", lambda: quota)
    assert threads.default_threads({}) == expected
    assert threads.default_threads({"TWINFLOW_THREADS": "7"}) == 7


def test_threads_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: set(range(5000)), raising=False)
    monkeypatch.setattr(threads, "cgroup_cpus", lambda: None)
    assert threads.default_threads({}) == threads.MAX_THREADS
    for value in (0, threads.MAX_THREADS + 1, "many"):
        with pytest.raises(ValueError, match=rf"a whole number from 1 to {threads.MAX_THREADS}"):
            threads.check_threads(value, "--threads")


MEMINFO = "MemTotal:       1000 kB\nMemFree:         200 kB\nMemAvailable:    500 kB\n"
V1_MEMORY = {"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "1000"}


@pytest.mark.parametrize(
    ("meminfo", "groups", "expected"),
    [
        ("", {}, 0),
        (MEMINFO, {}, 500 * 1024),
        (MEMINFO, {"memory.max": "max\n", "memory.current": "12345\n"}, 500 * 1024),
        (MEMINFO, {"memory.max": "300000\n", "memory.current": "100000\n"}, 200_000),
        (MEMINFO, {"memory.max": "9000000\n", "memory.current": "100000\n"}, 500 * 1024),
        (MEMINFO, {"memory.max": "1000\n", "memory.current": "2000\n"}, 0),
        (MEMINFO, {"memory.max": "1000\n"}, 500 * 1024),
        (MEMINFO, V1_MEMORY, 2000),
        ("nonsense\nMemAvailable: much kB\n", V1_MEMORY, 2000),
        ("MemTotal: 5 kB\n", {}, 0),
        (
            MEMINFO,
            {"job/memory.max": "3000", "job/memory.current": "2500", "job/memory.stat": "anon 5\ninactive_file 400"},
            900,
        ),
    ],
)
def test_free_memory_is_the_least_that_a_limit_leaves(
    tmp_path: Path, meminfo: str, groups: dict[str, str], expected: int
) -> None:
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": "0::/job\n"}
    write(tmp_path, files | {f"sys/fs/cgroup/{name}": text for name, text in groups.items()})
    assert free_host_bytes(tmp_path) == expected


def test_free_memory_here() -> None:
    assert free_host_bytes() > 0


def test_a_limit_leaves_the_rest_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_withheld_bytes", 0)
    cgroup.limit_host_bytes(10**8)
    assert free_host_bytes() == pytest.approx(10**8, abs=9 * 10**7)
    cgroup.limit_host_bytes(10**18)  # more than there is
    assert free_host_bytes() > 10**9
