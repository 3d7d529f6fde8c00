# SPDX-License-Identifier: Apache-2.0
"""The probe on a GPU: rates that can be, nothing left behind, a card without room, and a quick second time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from twinflow.planner import probe
from twinflow.planner.machines import Rates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CUDA = torch.device("cuda")  # without an index, as the commands pass it


@pytest.fixture(scope="module")
def rates() -> Rates:
    return probe.measure(CUDA)


@pytest.fixture
def little_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    # On the current device: torch 2.11 takes no device without an index here.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CUDA) + (200 << 20)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_copies(rates: Rates) -> None:
    assert 5e9 < rates.out_bytes < 200e9
    assert 5e9 < rates.in_bytes < 200e9
    assert 0.3 * min(rates.out_bytes, rates.in_bytes) < rates.duplex_bytes
    assert rates.duplex_bytes <= 1.05 * min(rates.out_bytes, rates.in_bytes)


def test_updates_share_the_memory_with_copies(rates: Rates) -> None:
    for format in probe.STATES:
        assert 1e7 < rates.host_params_copying[format] <= 1.1 * rates.host_params[format]


def test_the_device(rates: Rates) -> None:
    assert 1e11 < rates.device_bytes < 2e13
    assert 1e13 < rates.flops < 5e15


def test_the_budget_is_kept() -> None:
    probe.measure(CUDA, budget_s=0.1)  # loads what is loaded once
    start = time.perf_counter()
    probe.measure(CUDA, budget_s=0.1)
    making_s = time.perf_counter() - start  # mostly buffers
    start = time.perf_counter()
    probe.measure(CUDA, budget_s=1.5)
    assert time.perf_counter() - start < 1.5 + 2 * making_s


def test_nothing_is_left_behind() -> None:
    probe.measure(CUDA, budget_s=0.1)  # cuBLAS keeps a workspace, once
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(CUDA), torch.cuda.memory_reserved(CUDA)
    for _ in range(2):
        probe.measure(CUDA, budget_s=0.1)
        assert (torch.cuda.memory_allocated(CUDA), torch.cuda.memory_reserved(CUDA)) == before


@pytest.mark.usefixtures("little_memory")
def test_a_card_that_is_full() -> None:
    rates = probe.measure(CUDA, budget_s=0.5)
    assert rates.out_bytes > 5e9
    assert rates.device_bytes > 1e11
    assert rates.flops > 1e12


def test_the_second_time_is_quick(tmp_path: Path) -> None:
    first = probe.load_or_measure(CUDA, folder=tmp_path)
    start = time.perf_counter()
    second = probe.load_or_measure(CUDA, folder=tmp_path)
    assert time.perf_counter() - start < 0.1  # from the cache
    assert first == second
