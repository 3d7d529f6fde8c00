# SPDX-License-Identifier: Apache-2.0
"""benchmarks/onebit_convergence.py on a tiny model, and its ranks in one process against real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow.dist.group import Group
from twinflow.optim.onebit import OneBitAdam

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORLD = 4
SHAPES = ((37, 19), (300,), (64, 128), (5,))
sys.path.insert(0, str(BENCHMARKS))

from onebit_played import CompressedAdam, PlainAdam, PlayedAdam  # noqa: E402

pytestmark = pytest.mark.matrix  # benchmarks are no part of the library


class ThreadGroup(Group):
    """Ranks that are threads: a collective reads the tensors of all threads between two barriers."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(None, range(WORLD), is_on_host=True)
        self.rank = rank
        self._board = board
        self._barrier = barrier

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor.clone()
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def _exchange(self, given: Tensor) -> Tensor:
        return torch.cat([one.view(WORLD, -1)[self.rank] for one in self._all(given)]).view(given.shape)

    def _gather(self, whole: Tensor) -> None:
        self._count(whole.numel() * whole.element_size())
        parts = self._all(whole.view(WORLD, -1)[self.rank])
        whole.copy_(torch.cat(parts))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if self.rank == source:
            self.sent_bytes += tensor.numel() * tensor.element_size()
        tensor.detach().copy_(self._all(tensor.detach())[source])


def first_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradient(step: int, rank: int, i: int, param: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + i)
    return 0.1 * param.detach() + torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("clip", [None, 5.0])
@pytest.mark.parametrize("freeze_step", [4, None])
def test_played_ranks_are_real_ranks(freeze_step: int | None, clip: float | None) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.8), "weight_decay": 0.01, "bucket_numel": 1 << 13}
    options |= {"freeze_step": freeze_step, "wire_dtype": torch.bfloat16, "max_grad_norm": clip}
    board: list[Any] = [None] * WORLD
    barrier = threading.Barrier(WORLD, timeout=30)

    def real(rank: int) -> tuple[list[Tensor], int, int | None]:
        params = first_params()
        optimizer = OneBitAdam(params, group=ThreadGroup(rank, board, barrier), **options)
        for step in range(20):
            for i, param in enumerate(params):
                param.grad = gradient(step, rank, i, param)
            optimizer.step()
        return [param.detach() for param in params], optimizer.sent_bytes, optimizer.frozen_step

    with ThreadPoolExecutor(WORLD) as pool:
        weights, sent_bytes, frozen_step = next(iter(list(pool.map(real, range(WORLD)))))
    params = first_params()
    optimizer = PlayedAdam(params, WORLD, **options)
    for step in range(20):
        optimizer.take([torch.stack([gradient(step, r, i, p) for r in range(WORLD)]) for i, p in enumerate(params)])
        optimizer.step()
    assert optimizer.frozen_step == frozen_step
    assert frozen_step is not None
    assert optimizer.sent_bytes == sent_bytes
    assert all(torch.equal(param, weight) for param, weight in zip(params, weights, strict=True))


def test_the_baseline_is_adam_of_torch() -> None:
    params, others = first_params(), first_params()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.01}
    played, plain = PlainAdam(params, WORLD, **options), torch.optim.AdamW(others, **options)
    for step in range(10):
        grads = [torch.stack([gradient(step, r, i, p) for r in range(WORLD)]) for i, p in enumerate(params)]
        played.take(grads)
        played.step()
        for other, grad in zip(others, grads, strict=True):
            other.grad = grad.mean(0)
        plain.step()
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other)


def test_errors_hold_what_was_not_sent() -> None:
    params = first_params()
    optimizer = CompressedAdam(params, WORLD, freeze_step=0, lr=0.0)
    grads = [torch.stack([gradient(0, r, i, p) for r in range(WORLD)]) for i, p in enumerate(params)]
    (bucket,) = optimizer._buckets
    total = torch.zeros_like(bucket.grads)
    for _ in range(10):
        optimizer.take(grads)
        optimizer.step()
        total += bucket.grads
    total += optimizer._workers[0].mean(0) + optimizer._servers[0]
    for view, grad in zip(bucket.views(total), grads, strict=True):
        torch.testing.assert_close(view, 10 * grad.mean(0), atol=1e-4, rtol=1e-4)


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_the_script_runs_on_a_tiny_model(tmp_path: Path) -> None:
    script = str(BENCHMARKS / "onebit_convergence.py")
    command = [sys.executable, script, "--tiny", "--save", "--save-to", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table, curves, drawing = (next(tmp_path.glob(f"*-onebit-convergence.{kind}")) for kind in ("md", "json", "svg"))
    result = json.loads(curves.read_text())
    assert not result["left_out"]
    assert len(result["sweep"]) == 8
    assert len(result["runs"]) == 7
    for part in ("Accuracy after fine-tuning", "figure 13", "| fine-tuning | 8 | 2 (25%) |", "Predicted speed"):
        assert part in table.read_text()
    before = drawing.read_text()
    drawing.unlink()
    subprocess.run([sys.executable, script, "--plot", str(curves)], check=True)
    assert curves.with_suffix(".svg").read_text() == before


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_runs_without_time_are_named(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "onebit_convergence.py"), "--tiny", "--budget", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("- Left out: ") == 8
