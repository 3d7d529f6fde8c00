# SPDX-License-Identifier: Apache-2.0
"""The probe without a GPU: numbers that can be, buffers that shrink, and a cache that is never in the way."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from twinflow import native
from twinflow.planner import probe
from twinflow.planner.formats import STATES
from twinflow.planner.machines import Rates

CPU = torch.device("cpu")
HOST = {"fp32": 3e9, "bf16": 4e9, "int8": 5e9, "4bit": 5e9}
RATES = Rates(55e9, 54e9, 50e9, HOST, {name: rate / 2 for name, rate in HOST.items()}, 4e12, 7e14)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A probe that counts instead of measuring."""
    made: list[torch.device] = []

    def measure(device: torch.device) -> Rates:
        made.append(device)
        return RATES

    monkeypatch.setattr(probe, "measure", measure)
    return made


def is_cached(calls: list[torch.device], folder: Path) -> bool:
    """Whether rates are there at once, without a measurement."""
    num_calls, start = len(calls), time.perf_counter()
    assert probe.load_or_measure(CPU, folder=folder) == RATES
    return len(calls) == num_calls and time.perf_counter() - start < 1


@pytest.mark.matrix
def test_numbers_that_can_be() -> None:
    threads = threading.active_count()
    with torch.inference_mode():  # callers may be in it; our threads are not
        rates = probe.measure(CPU, budget_s=0.3)
    assert probe.is_sane(rates)
    assert set(rates.host_params) == set(rates.host_params_copying) == set(STATES)
    assert all(1e8 < rate < 1e12 for rate in (rates.out_bytes, rates.in_bytes, rates.duplex_bytes))
    # How they compare says nothing where tests run beside it: tests/gpu/test_probe.py asks that of a GPU's link.
    assert all(1e5 < rate < 1e11 for host in (rates.host_params, rates.host_params_copying) for rate in host.values())
    assert 1e8 < rates.device_bytes < 1e13
    assert 1e8 < rates.flops < 1e14
    assert threading.active_count() == threads
    assert Rates(**json.loads(json.dumps(asdict(rates)))) == rates


def test_updates_walk_over_all_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_CALL_NUMEL", 256)
    numel = 1024
    store = probe.Store("bf16", torch.zeros(numel, dtype=torch.int16), torch.ones(numel, dtype=torch.bfloat16))
    states = probe.new_states(probe.ADAMW, "bf16", numel)
    store = replace(store, states=states[0], scales=states[1])
    call_numel, work = probe._updates(torch.ones(numel, dtype=torch.bfloat16), store)
    assert call_numel == 256
    first = store.states[0]
    assert first is not None
    work(3)
    assert first.count_nonzero() == 3 * 256
    work(1)
    assert first.count_nonzero() == numel
    before = first.clone()
    work(1)
    assert (before != first).sum() == 256


def test_copies_run_until_they_are_stopped() -> None:
    streams = probe.device_for(CPU)
    copies = probe._Copies(streams, CPU, 1 << 16)
    copies._device[0].fill_(3)
    copies._host[1].fill_(5)
    with copies.running():
        time.sleep(0.05)
    assert (copies._host[0] == 3).all()
    assert (copies._device[1] == 5).all()
    streams.close()


def test_an_error_on_a_copy_is_not_lost() -> None:
    streams = probe.device_for(CPU)
    copies = probe._Copies(streams, CPU, 1 << 16)
    copies._device[0] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="size"), copies.running():
        time.sleep(0.05)
    streams.close()


@pytest.mark.parametrize(
    ("once_s", "counts"),
    [
        (1e-3, {1, 4}),  # quick: several times a sample
        (0.5, {1}),  # slower than its share: no more than it takes
    ],
)
def test_time_of_one(once_s: float, counts: set[int]) -> None:
    now, seen = 0.0, []

    def work(count: int) -> None:
        nonlocal now
        seen.append(count)
        now += count * once_s

    assert probe._seconds_each(work, 0.2, lambda: now) == pytest.approx(once_s)
    assert set(seen) == counts
    assert now <= max(0.2 + 6 * once_s, 5.01 * once_s)


def test_one_slow_sample_does_not_count() -> None:
    now, num_calls = 0.0, 0

    def work(count: int) -> None:
        nonlocal now, num_calls
        num_calls += 1
        now += count * (1.0 if num_calls == 6 else 4e-3)

    assert probe._seconds_each(work, 0.01, lambda: now) == pytest.approx(4e-3)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_no_memory_means_smaller_buffers(error: Exception) -> None:
    parts = []

    def work(part: int) -> int:
        parts.append(part)
        if part < 8:
            raise error
        return part

    assert probe._halve_until_it_fits(work, 2) == 8
    assert parts == [2, 4, 8]


def test_what_is_not_for_want_of_memory_comes_through() -> None:
    def work(part: int) -> int:
        raise RuntimeError("illegal instruction")

    with pytest.raises(RuntimeError, match="illegal"):
        probe._halve_until_it_fits(work, 1)


def test_no_memory_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for stage in ("_measure_host", "_measure_memory", "_measure_products"):
        monkeypatch.setattr(probe, stage, fail)
    rates = probe.load_or_measure(CPU, folder=tmp_path)
    assert rates.flops == 0  # not known
    assert min(rates.out_bytes, rates.duplex_bytes, rates.device_bytes, *rates.host_params.values()) > 0
    assert not list(tmp_path.iterdir())


def test_the_smallest_buffers_work() -> None:
    part = probe._SMALLEST_PART
    host = probe._measure_host(CPU, ["int8"], 0.01, part)
    assert min(host.out_bytes, host.in_bytes, host.duplex_bytes) > 0
    assert min(host.host_params["int8"], host.host_params_copying["int8"]) > 0
    assert probe._measure_memory(CPU, 0.01, part) > 0
    assert probe._measure_products(CPU, 0.01, part) > 0


def test_buffers_take_a_quarter_of_the_memory() -> None:
    assert probe._fitting_part(64 << 30) == 1
    for free in (6 << 30, 1 << 30, 100 << 20):
        part = probe._fitting_part(free)
        assert probe._PEAK_BYTES / part <= free / 4 < 2 * probe._PEAK_BYTES / part
    assert probe._fitting_part(0) == probe._SMALLEST_PART


@pytest.mark.parametrize("arguments", [{"formats": ("fp32", "fp64")}, {"budget_s": 0.0}, {"budget_s": float("nan")}])
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(states is 'fp64'|budget_s is (0\.0|nan)), but must be "):
        probe.measure(CPU, **arguments)


def test_measured_once(calls: list[torch.device], tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    first, second = (is_cached(calls, folder) for _ in range(2))
    assert (first, second, len(calls)) == (False, True, 1)
    assert [path.name for path in folder.iterdir()] == [kept_file(folder).name]  # and nothing half written
    assert probe.load_or_measure(CPU, folder=folder, refresh=True) == RATES
    assert len(calls) == 2


def kept_file(folder: Path) -> Path:
    return probe.rates_file(probe.machine_facts(CPU), folder)


def as_text(change: Callable[[dict[str, Any]], object]) -> str:
    saved = {"machine": dict(probe.machine_facts(CPU)), "rates": asdict(RATES)}
    change(saved)
    return json.dumps(saved)


GARBAGE = {
    "empty": "",
    "not_json": "rates: many",
    "a_list": "[1, 2]",
    "a_number": "7",
    "nested": "[" * 100_000,
}
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "foreign": lambda saved: saved["machine"].update(cpu="another"),
    "no_machine": lambda saved: saved.pop("machine"),
    "no_rates": lambda saved: saved.pop("rates"),
    "rates_a_list": lambda saved: saved.update(rates=[1.0]),
    "a_rate_less": lambda saved: saved["rates"].pop("flops"),
    "a_rate_more": lambda saved: saved["rates"].update(luck=1.0),
    "a_format_less": lambda saved: saved["rates"]["host_params"].pop("int8"),
    "host_a_number": lambda saved: saved["rates"].update(host_params=3e9),
    "zero": lambda saved: saved["rates"].update(out_bytes=0),
    "negative": lambda saved: saved["rates"]["host_params_copying"].update(fp32=-1.0),
    "nan": lambda saved: saved["rates"].update(device_bytes=float("nan")),
    "infinite": lambda saved: saved["rates"].update(flops=float("inf")),
    "text": lambda saved: saved["rates"].update(in_bytes="5e9"),
    "true": lambda saved: saved["rates"].update(in_bytes=True),
    "null": lambda saved: saved["rates"].update(in_bytes=None),
}


@pytest.mark.parametrize("name", [*GARBAGE, *CHANGES, "cut"])
def test_a_bad_file_is_measured_over(name: str, calls: list[torch.device], tmp_path: Path) -> None:
    good = as_text(lambda saved: None)
    kept_file(tmp_path).write_text(good)
    assert is_cached(calls, tmp_path)  # it is the change that matters
    bad = good[:-40] if name == "cut" else as_text(CHANGES[name]) if name in CHANGES else GARBAGE[name]
    kept_file(tmp_path).write_text(bad)
    assert probe.load_or_measure(CPU, folder=tmp_path) == RATES
    assert len(calls) == 1
    assert is_cached(calls, tmp_path)


def test_bytes_that_are_no_text(calls: list[torch.device], tmp_path: Path) -> None:
    kept_file(tmp_path).write_bytes(b"\xff\xfe\x00{")
    assert probe.load_or_measure(CPU, folder=tmp_path) == RATES
    assert len(calls) == 1


def test_from_dict_refuses_garbage() -> None:
    for garbage in ({}, {"out_bytes": 1.0}, {**asdict(RATES), "luck": 1.0}):
        with pytest.raises((KeyError, TypeError)):
            Rates(**garbage)


def test_a_folder_that_cannot_be_written(calls: list[torch.device], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.warns(UserWarning, match="TWINFLOW_CACHE"):
            assert probe.load_or_measure(CPU, folder=folder) == RATES
    kept_file(tmp_path).mkdir()  # neither read nor replaced
    with pytest.warns(UserWarning, match="cannot be written"):
        assert probe.load_or_measure(CPU, folder=tmp_path) == RATES
    assert not list(tmp_path.glob(".rates*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(calls: list[torch.device], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert probe.load_or_measure(CPU, folder=tmp_path) == RATES


def test_it_warns_once(calls: list[torch.device], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(3):
            probe.load_or_measure(CPU, folder=tmp_path / "file")
    assert len(warned) == 1
    assert "cannot be written" in str(warned[0].message)


def test_a_write_that_fails_leaves_the_old_file(
    calls: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.load_or_measure(CPU, folder=tmp_path)
    before = kept_file(tmp_path).read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)  # after the content was written to a temporary file
    with pytest.warns(UserWarning, match="no space left"):
        probe.load_or_measure(CPU, folder=tmp_path, refresh=True)
    assert kept_file(tmp_path).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_many_at_once(calls: list[torch.device], tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=probe.load_or_measure, args=(CPU,), kwargs={"folder": tmp_path}) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_cached(calls, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_another_number_of_threads_is_another_machine(calls: list[torch.device], tmp_path: Path) -> None:
    probe.load_or_measure(CPU, folder=tmp_path)
    before = native.get_threads()
    native.set_threads(before + 1)
    try:
        assert not is_cached(calls, tmp_path)
    finally:
        native.set_threads(before)
    assert is_cached(calls, tmp_path)
    assert len(calls) == len(list(tmp_path.iterdir())) == 2


def test_every_fact_is_in_the_name(tmp_path: Path) -> None:
    facts = probe.machine_facts(CPU)
    assert set(facts) == {"probe", "cpu", "cores", "threads", "isa", "gpu", "gpu_bytes", "twinflow", "torch"}
    names = {probe.rates_file({**facts, name: "other"}, tmp_path).name for name in facts}
    assert len(names | {kept_file(tmp_path).name}) == len(facts) + 1


def test_processors_have_names() -> None:
    assert probe._cpu_name("model name\t: Xeon  8481C\nflags : x\n\nmodel name\t: Xeon 8481C\n") == "Xeon 8481C"
    assert probe._cpu_name("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n") == "0x41, 0xd0c"
    assert probe._cpu_name("") == ""


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = probe.default_folder
    assert folder({"TWINFLOW_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/twinflow")
    monkeypatch.setenv("HOME", "/home/me")
    assert folder({}) == Path("/home/me/.cache/twinflow")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home
    assert folder({}).is_absolute()
