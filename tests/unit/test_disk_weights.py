# SPDX-License-Identifier: Apache-2.0
"""Weights on the host and optimizer state on the disk: the bits of weights and state in host memory."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from param_offload_support import AWAY, HERE, SHAPE, gpt, loss_of, places, steps_of, train
from support import NO_MEMORY, another_file
from torch import nn

import twinflow
from twinflow.models.gpt import GPT
from twinflow.offload.executor import WorkerError
from twinflow.optim.twin import Tuning, TwinOptimizer


def tuning(folder: Path, **options: Any) -> Tuning:
    disk = {"nvme_path": str(folder), "buffer_count": 2, "disk_block_bytes": 4096}
    return Tuning(**{"bucket_numel": 4096, **disk, **options})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"rule": "sgd"}),  # without momentum there is no state beside the weights
        (torch.bfloat16, {"accumulation_steps": 2}),
        (torch.bfloat16, {"states": "4bit", "master": "none"}),
        (torch.bfloat16, {"states": "int8", "ratio": 0.5, "max_grad_norm": None}),
        (torch.float16, {}),
        pytest.param(torch.float32, {"rule": "lion", "lr": 1e-3}, marks=pytest.mark.matrix),
        pytest.param(torch.bfloat16, {"early": False}, marks=pytest.mark.matrix),
        pytest.param(torch.bfloat16, {"states": "bf16", "ratio": 0.5}, marks=pytest.mark.matrix),
        pytest.param(torch.float16, {"states": "int8"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_the_disk_changes_no_bit(tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]) -> None:
    options = {"ratio": 1.0, **options}
    losses, weights = train(gpt(dtype, num_layers=2), True, steps=3, **options)

    def watch(optimizer: TwinOptimizer) -> None:
        assert optimizer.runtime.executor.file is not None

    options["tuning"] = tuning(tmp_path)
    found, others = train(gpt(dtype, num_layers=2), True, steps=3, watch=watch, **options)
    assert found == losses
    assert len(set(losses)) > 2
    assert [name for name, value in weights.items() if not torch.equal(value, others[name])] == []
    assert not list(tmp_path.iterdir())


def test_only_weights_of_blocks_are_in_memory(tmp_path: Path) -> None:
    with closing(TwinOptimizer(gpt()().bfloat16(), ratio=0.5, offload_params=True, tuning=tuning(tmp_path))) as made:
        found = list(places(made).values())
        assert found.count(AWAY) == found.count(HERE) == 2
        runtime = made.runtime
        file = runtime.executor.file
        assert file is not None
        hosted = [bucket for bucket in runtime.buckets if not bucket.is_on_device]
        assert [bucket.nbytes for bucket in hosted] == [
            2 * bucket.plan.numel if bucket.offloads_params else 0 for bucket in hosted
        ]
        # Two fp32 states and the lower halves of the masters, in whole pages.
        numel = sum(bucket.plan.numel for bucket in hosted)
        assert 10 * numel <= file.sizes.total_bytes <= 10 * numel + 4096 * len(hosted)
        assert f"on the disk ({tmp_path}), {2 * numel / 1e3:.1f} kB on the host" in repr(made)


def test_code_between_steps_reads_and_writes_weights(tmp_path: Path) -> None:
    found = []
    for options in ({"tuning": Tuning(bucket_numel=4096)}, {"tuning": tuning(tmp_path)}):
        model = gpt(torch.bfloat16)()
        with closing(TwinOptimizer(model, lr=1e-2, ratio=1.0, offload_params=True, early=True, **options)) as optimizer:
            weight = model.blocks[1].mlp.up.weight
            for step in range(5):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(weight.detach().float().sum())
                with torch.no_grad():
                    if step == 1:
                        weight.mul_(0.5)
                    if step == 2:
                        weight.data[0] = 2.0
                if step == 3:
                    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        found += [value.float().sum() for value in model.state_dict().values()]
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert len(set(map(float, found[:5]))) == 5


def config(folder: Path | None, **more: Any) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "bucket_numel": 4096}
    if folder is not None:
        offload |= {"device": "nvme", "nvme_path": str(folder / "disk"), "buffer_count": 2}
    section = {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": "cpu"}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "zero_optimization": section,
        **more,
    }


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_continues_on_the_disk_and_in_memory(tmp_path: Path, background: bool) -> None:
    def engine_of(folder: Path | None) -> Any:
        return twinflow.initialize(
            model=gpt(num_layers=2)(), config=config(folder, checkpoint={"background": background})
        )[0]

    engine = engine_of(tmp_path)
    steps_of(engine, 0, 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    truth = steps_of(engine, 2, 2)
    engine.destroy()
    for folder in (tmp_path, None):
        engine = engine_of(folder)
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert steps_of(engine, 2, 2) == truth
        engine.destroy()


def step_until_error(model: nn.Module, optimizer: TwinOptimizer) -> None:
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.wait()


def test_a_failing_disk_stops_the_run(tmp_path: Path) -> None:
    model: nn.Module = gpt()()
    optimizer = TwinOptimizer(model, ratio=1.0, early=True, offload_params=True, tuning=tuning(tmp_path))
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()
    file = optimizer.runtime.executor.file
    assert file is not None
    file.flush()
    with another_file(file.fd, NO_MEMORY), pytest.raises(WorkerError, match="Input/output error"):
        step_until_error(model, optimizer)
    with pytest.raises(WorkerError, match="Input/output error"):
        loss_of(model, 0)
    before = set(threading.enumerate())
    with suppress(WorkerError):  # whether close() raises depends on the moment of the error
        optimizer.close()
    assert "twinflow-compute" in {thread.name for thread in before - set(threading.enumerate())}


def test_a_model_that_is_built_by_the_optimizer(tmp_path: Path) -> None:
    """Each block is built, and its weights go into the state, before the next one."""
    found = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        engine = twinflow.initialize(model=lambda: GPT(replace(SHAPE, num_layers=2)), config=config(folder))[0]
        found.append(steps_of(engine, 0, 3))
        engine.destroy()
    assert found[0] == found[1]
