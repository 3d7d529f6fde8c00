# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows of timers, load and profile."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from twinflow.monitor.flops import profile
from twinflow.monitor.metrics import LoadMeter
from twinflow.monitor.timers import MANY_EVENTS, Timers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: GPU timers, memory and profile were not run"),
]


def test_timers_do_not_wait_and_tell_the_gpus_time() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    watch = Timers()
    start = time.perf_counter()
    with watch.measure("forward"):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
    with watch.measure("step"):
        x @ x
    queued_s = time.perf_counter() - start
    means = watch.means_ms()
    assert 1000.0 * queued_s < 0.5 * means["forward"]
    assert 0.0 < means["step"] < means["forward"]
    for _ in range(3 * MANY_EVENTS):
        with watch.measure("step"):
            x.add_(1.0)
    assert watch.means_ms()["step"] > 0.0


def test_the_peak_is_that_of_the_step() -> None:
    meter = LoadMeter(torch.device("cuda", torch.cuda.current_device()))
    meter.look()
    large = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    del large
    first, second = meter.look(), meter.look()
    assert first.gpu_peak_bytes - first.gpu_bytes >= 64 * 2**20
    assert second.gpu_peak_bytes == second.gpu_bytes
    assert meter.gpu_peak_bytes >= first.gpu_peak_bytes


def test_backward_on_the_gpus_own_thread_finds_its_module() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda")
    with profile(model) as p:
        model(x).sum().backward()
    product = 2 * 32 * 64 * 64
    found = {row.name: (row.forward_flops / product, row.backward_flops / product) for row in p.report.rows}
    assert found == {"": (3, 5), "0": (1, 1), "1": (1, 2), "1.0": (1, 2), "1.1": (0, 0), "2": (1, 2)}
    assert all(0.0 < row.forward_s < p.report.seconds for row in p.report.rows)
