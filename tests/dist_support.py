# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this machine: run a function on each, get what they return."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fork_support import fork_context

TIMEOUT_S = 240.0


def run_ranks(
    world: int, work: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S, backend: str = "gloo"
) -> list[Any]:
    """What `work(rank, world, *args)` returns on each rank, as JSON; with its traceback where one fails.

    `work` is a function of a module in tests/. Without a group for a world of 0: one process that knows of no others.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = fork_context()
        given = (max(world, 1), backend if world > 0 else "", folder, work, args)
        ranks = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(max(world, 1))]
        stuck = list(range(len(ranks)))
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(timeout_s)
            stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:  # a test that is out of time leaves none of them to others
            for rank in stuck:
                if ranks[rank].pid is not None:
                    ranks[rank].kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error")) if path.stat().st_size]
        assert not stuck or errors, f"ranks {stuck} did not end"
        silent = {rank: p.exitcode for rank, p in enumerate(ranks) if not (Path(folder) / f"{rank}.json").exists()}
        failed = bool(errors or silent)
        assert not failed, f"no result, but exit codes, of ranks {silent}\n" + "\n".join(errors)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(max(world, 1))]


def _rank(rank: int, world: int, backend: str, folder: str, work: Callable[..., Any], args: Any) -> None:
    gc.freeze()  # or each rank would look through all of torch's objects for garbage
    torch.set_num_threads(1)
    os.environ["TWINFLOW_THREADS"] = "1"
    fault = (Path(folder) / f"{rank}.error").open("w")  # of a signal, say
    faulthandler.enable(fault)
    try:
        if backend:
            dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=world)
        result = work(rank, world, *args)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
        if backend:
            dist.destroy_process_group()
        faulthandler.disable()
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)


def assert_near(found: dict[str, list[float]], truth: dict[str, list[float]]) -> None:
    """Equal names, in this order, and equal values up to rounding."""
    assert list(found) == list(truth)
    for name, values in truth.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name
