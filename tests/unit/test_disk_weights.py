# SPDX-License-Identifier: Apache-2.0
"""Optimizer state on the disk, with weights on the host or on the disk: the bits of weights and state in memory."""

from __future__ import annotations

import copy
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fork_support import answer_of
from param_offload_support import AWAY, DEVICE, HERE, SHAPE, gpt, loss_of, places, steps_of, train
from support import NO_MEMORY, another_file, use_disk_io
from torch import Tensor, nn
from twin_support import matrix_but

import twinflow
from twinflow.config import load_config, notes
from twinflow.config.fields import DiskIo
from twinflow.engine.state import param_offload_of
from twinflow.models.gpt import GPT
from twinflow.offload.executor import WorkerError
from twinflow.offload.host_params import HostParams
from twinflow.offload.state_file import IO_URING, THREADS
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.optim.twin_build import materialised
from twinflow.optim.whole import whole_weights


def tuning(folder: Path, num_buffers: int = 0, **options: Any) -> Tuning:
    """`num_buffers`: of weights on the disk; 0: these weights are in memory."""
    disk: dict[str, Any] = {"nvme_path": str(folder), "buffer_count": 2, "disk_block_bytes": 4096}
    if num_buffers:
        disk |= {"param_nvme_path": str(folder), "param_buffer_count": num_buffers}
    return Tuning(**{"bucket_numel": 4096, **disk, **options})


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_disk = pytest.mark.parametrize("num_buffers", [0, 2], ids=["weights in memory", "weights on the disk"])


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
    check_bits(tmp_path, dtype, options, 0)


@pytest.mark.parametrize(
    ("dtype", "options", "num_buffers"),
    [
        (torch.bfloat16, {"accumulation_steps": 2}, 1),
        (torch.float32, {"rule": "sgd"}, 5),
        (torch.float16, {"max_grad_norm": None}, 2),
        pytest.param(torch.float32, {}, 1, marks=pytest.mark.matrix),
        pytest.param(torch.float32, {"rule": "lion", "lr": 1e-3}, 100, marks=pytest.mark.matrix),
        pytest.param(torch.bfloat16, {"states": "4bit", "master": "none"}, 1, marks=pytest.mark.matrix),
        pytest.param(
            torch.bfloat16, {"states": "int8", "ratio": 0.5, "max_grad_norm": None}, 2, marks=pytest.mark.matrix
        ),
        pytest.param(torch.bfloat16, {"states": "bf16", "early": False}, 5, marks=pytest.mark.matrix),
        pytest.param(torch.float16, {"states": "int8"}, 1, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_weights_on_the_disk_change_no_bit(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any], num_buffers: int
) -> None:
    check_bits(tmp_path, dtype, options, num_buffers)


def check_bits(folder: Path, dtype: torch.dtype, options: dict[str, Any], num_buffers: int) -> None:
    options = {"ratio": 1.0, **options}
    num_layers = 4 if num_buffers else 2  # so that there are blocks to read ahead
    losses, weights = train(gpt(dtype, num_layers=num_layers), True, steps=3, **options)

    def watch(optimizer: TwinOptimizer) -> None:
        executor = optimizer.runtime.executor
        assert executor.file is not None
        assert (executor.weights is not None) == (num_buffers > 0)
        if executor.weights is not None:
            assert executor.weights.sizes.num_buffers == min(num_buffers, len(executor.weights._records))
            assert all(bucket.nbytes == 0 for bucket in optimizer.runtime.buckets if not bucket.is_on_device)

    options["tuning"] = tuning(folder, num_buffers)
    found, others = train(gpt(dtype, num_layers=num_layers), True, steps=3, watch=watch, **options)
    assert found == losses
    assert len(set(losses)) > 2
    assert [name for name, value in weights.items() if not torch.equal(value, others[name])] == []
    assert not list(folder.iterdir())


class Half(nn.Module):
    """A block that uses one of its weights only in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_whole = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x).tanh()
        return self.sometimes(y).tanh() if self.is_whole else y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_without_a_gradient_stay(tmp_path: Path, dtype: torch.dtype) -> None:
    """An update writes all weights of a bucket to the disk, also those that it does not change."""
    found = []
    for options in (Tuning(), tuning(tmp_path, 1)):
        torch.manual_seed(0)
        model = nn.Sequential(*(Half() for _ in range(3))).to(dtype)
        made = TwinOptimizer(model, lr=1e-2, ratio=1.0, offload_params=True, early=True, tuning=options)
        with closing(made) as optimizer:
            for step in range(6):
                for block in model:
                    block.is_whole = step % 3 == 0
                model(torch.ones(2, 8, dtype=dtype, device=DEVICE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.wait()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert [name for name, value in found[0].items() if not torch.equal(value, found[1][name])] == []


def test_records_are_read_ahead_of_their_blocks(tmp_path: Path) -> None:
    model = gpt(num_layers=8)()
    made = TwinOptimizer(model, ratio=1.0, early=True, offload_params=True, tuning=tuning(tmp_path, 24))
    with closing(made) as optimizer:
        file = optimizer.runtime.executor.weights
        assert file is not None
        assert file.sizes.num_buffers == 24 < len(file._records)
        for step in range(4):
            before = file.counters
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.wait()
            after = file.counters
        uses, late = after.num_updates - before.num_updates, after.num_late - before.num_late
        assert uses >= 2 * len(file._records) - 4  # the last block stays for its backward
        assert late <= uses // 3


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


@on_disk
def test_code_between_steps_reads_and_writes_weights(tmp_path: Path, num_buffers: int) -> None:
    found = []
    for options in ({"tuning": Tuning(bucket_numel=4096)}, {"tuning": tuning(tmp_path, num_buffers)}):
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


@pytest.mark.parametrize("embeddings", matrix_but([True], [False, True]))
@pytest.mark.parametrize("dtype", matrix_but([torch.bfloat16, torch.float16], DTYPES), ids=str)
@pytest.mark.parametrize("where", ["state in memory", "weights in memory", "weights on the disk"])
def test_writes_to_a_state_dict_change_the_weights(
    tmp_path: Path, dtype: torch.dtype, where: str, embeddings: bool
) -> None:
    """As with torch, although the dict has copies."""

    def run(**options: Any) -> list[float]:
        model, found = gpt(dtype, vocab_size=256)(), []
        if not options.get("offload_params"):
            model.to(DEVICE)
        with closing(TwinOptimizer(model, lr=1e-2, early=True, ratio=1.0, **options)) as optimizer:
            for step in range(4):
                state = model.state_dict()
                state["blocks.1.mlp.up.weight"].mul_(0.5)
                state["head.weight"][3:9] = 0.25
                if step == 2:
                    state["blocks.2.mlp.up.weight"].zero_()
                loss = loss_of(model, step)
                loss.backward()
                found.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            model.state_dict()["blocks.3.mlp.up.weight"].zero_()
            found += sums_of(model)
        return found + sums_of(model)

    def sums_of(model: nn.Module) -> list[float]:
        return [value.cpu().float().sum().item() for value in model.state_dict().values()]

    options: dict[str, Any] = {"bucket_numel": 4096, "offload_embeddings": embeddings}
    if where != "state in memory":
        options = vars(tuning(tmp_path, int(where == "weights on the disk"), **options))
    assert run(tuning=Tuning(bucket_numel=4096)) == run(offload_params=True, tuning=Tuning(**options))


@pytest.mark.parametrize("num_buffers", [None, 0, 2])
def test_a_state_dict_stays_as_it_is(tmp_path: Path, num_buffers: int | None) -> None:
    """Steps swap stores: a view of one would soon be the memory of other weights."""
    model = gpt(num_layers=2)()
    chosen = Tuning(bucket_numel=4096) if num_buffers is None else tuning(tmp_path, num_buffers)
    with closing(TwinOptimizer(model, lr=1e-2, ratio=1.0, early=True, offload_params=True, tuning=chosen)) as optimizer:
        with torch.inference_mode():
            model.state_dict()["blocks.1.mlp.up.weight"].fill_(0.25)
        state = {name: value for name, value in model.state_dict().items() if "blocks" in name}
        assert state["blocks.1.mlp.up.weight"].eq(0.25).all()
        before = {name: value.clone() for name, value in state.items()}
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in before.items())
        assert not any(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("num_buffers", [None, 0, 2])
def test_every_write_to_a_state_dict_counts_until_the_next_step(tmp_path: Path, num_buffers: int | None) -> None:
    name = "blocks.1.mlp.up.weight"
    model = gpt(num_layers=2)()
    weight = model.get_parameter(name)
    chosen = Tuning(bucket_numel=4096) if num_buffers is None else tuning(tmp_path, num_buffers)
    with closing(TwinOptimizer(model, lr=1e-2, ratio=1.0, early=True, offload_params=True, tuning=chosen)) as optimizer:
        state = model.state_dict()
        for value in (0.25, 0.5):
            state[name].fill_(value)
            assert weight.eq(value).all()
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = weight.clone()
        assert not after.eq(0.5).all()
        state[name].fill_(0.75)
        with pytest.raises(RuntimeError, match="has changed the weight since the copy was made"):
            weight.sum()
        assert torch.equal(weight, after)  # the write is dropped, and the optimizer can go on
        state[name].fill_(0.875)
        with pytest.raises(RuntimeError, match="has changed the weight since the copy was made"):
            weight.sum()
        loss_of(model, 1).backward()
        optimizer.step()


def test_a_write_to_a_copy_undoes_no_other_write() -> None:
    name = "blocks.1.mlp.up.weight"
    model = gpt(num_layers=2)()
    weight = model.get_parameter(name)
    message = "has changed the weight since the copy was made"
    with closing(TwinOptimizer(model, lr=1e-2, ratio=1.0, offload_params=True)), torch.no_grad():
        earlier, first, second = weight.data, model.state_dict(), model.state_dict()
        first[name].fill_(0.5)
        assert weight.eq(0.5).all()
        for copied in (second[name], earlier):
            copied[0] = 1
            with pytest.raises(RuntimeError, match=message):
                weight.sum()
            assert weight.eq(0.5).all()
        first[name][0] = 1  # this copy has the values of the weight
        assert weight[0].eq(1).all()
        assert weight[1:].eq(0.5).all()
        weight.fill_(0.25)
        first[name][0] = 1
        with pytest.raises(RuntimeError, match=message):
            weight.sum()
        rows = [weight[0], weight[1]]
        for row in rows:
            row.fill_(2)
        with pytest.raises(RuntimeError, match=message):
            weight.sum()
        for state in (model.state_dict(), model.state_dict()):
            state[name].fill_(3)
        assert weight.eq(3).all()
        alias = weight.data
        alias.mul_(2)
        weight.data = alias + 1  # in the order of the writes
        assert weight.eq(7).all()


def config(folder: Path | None, num_buffers: int = 0, **more: Any) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "bucket_numel": 4096}
    params: dict[str, Any] = {"device": "cpu"}
    if folder is not None:
        offload |= {"device": "nvme", "nvme_path": str(folder / "disk"), "buffer_count": 2}
    if folder is not None and num_buffers:
        params = {"device": "nvme", "nvme_path": str(folder / "disk"), "buffer_count": num_buffers, "max_in_cpu": 0}
    section = {"stage": 3, "offload_optimizer": offload, "offload_param": params}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": optimizer,
        "zero_optimization": section,
        **more,
    }


@on_disk
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_continues_on_the_disk_and_in_memory(tmp_path: Path, background: bool, num_buffers: int) -> None:
    def engine_of(folder: Path | None) -> Any:
        return twinflow.initialize(
            model=gpt(num_layers=2)(), config=config(folder, num_buffers, checkpoint={"background": background})
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


@on_disk
@pytest.mark.parametrize("io", [THREADS, IO_URING])
def test_a_failing_disk_stops_the_run(
    tmp_path: Path, num_buffers: int, io: DiskIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_disk_io(io, monkeypatch)
    before = set(threading.enumerate())
    model: nn.Module = gpt()()
    made = tuning(tmp_path, num_buffers)
    optimizer = TwinOptimizer(model, ratio=1.0, early=True, offload_params=True, tuning=made)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()
    executor = optimizer.runtime.executor
    file = executor.weights if num_buffers else executor.file
    assert file is not None
    assert file.io == io
    file.flush()
    what = "weights of blocks" if num_buffers else "optimizer state"
    with another_file(file.fd, NO_MEMORY), pytest.raises(WorkerError, match=f"the {what} in .*Input/output error"):
        step_until_error(model, optimizer)
    with pytest.raises(WorkerError, match="Input/output error"):
        loss_of(model, 0)
    with suppress(WorkerError):  # whether close() raises depends on the moment of the error
        optimizer.close()
    assert not [thread.name for thread in set(threading.enumerate()) - before if "twinflow" in thread.name]


@pytest.mark.parametrize(("has_optimizer", "num_buffers"), [(True, 0), (True, 1), (False, 1)])
def test_a_checkpoint_never_copies_all_weights(
    tmp_path: Path, has_optimizer: bool, num_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes come from a state dict without values, and the weights are read record by record."""
    given = config(tmp_path, num_buffers)
    if not has_optimizer:
        given["optimizer"] = None
        given["zero_optimization"].pop("offload_optimizer")
    engine = twinflow.initialize(model=gpt(num_layers=2)(), config=given)[0]
    weights = {name: value.cpu().clone() for name, value in engine.module.state_dict().items()}
    monkeypatch.setattr(HostParams, "on_host", Mock(side_effect=AssertionError("a state dict reads all weights")))
    engine.save_checkpoint(str(tmp_path / "saved"))
    whole = dict(whole_weights(engine.optimizer or engine.module))
    with torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()
    engine.load_checkpoint(str(tmp_path / "saved"))
    monkeypatch.undo()
    found = {name: value.cpu() for name, value in engine.module.state_dict().items()}
    assert whole.keys() == weights.keys() == found.keys()
    assert all(torch.equal(value, whole[name]) and torch.equal(value, found[name]) for name, value in weights.items())
    engine.destroy()


@on_disk
def test_a_state_dict_with_other_names_is_saved(tmp_path: Path, num_buffers: int) -> None:
    """A hook of the user, which ran before ours, may give other names, under which no parameter is known."""

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        state[f"{prefix}other"] = state.pop(f"{prefix}weight")

    def rename_back(state: dict[str, Tensor], prefix: str, *_: object) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}other")

    values = []
    for step in range(2):
        model = gpt(num_layers=2)()
        model.blocks[1].mlp.up.register_state_dict_post_hook(rename)
        model.blocks[1].mlp.up._register_load_state_dict_pre_hook(rename_back)
        engine = twinflow.initialize(model=model, config=config(tmp_path, num_buffers))[0]
        if step == 0:
            steps_of(engine, 0, 2)
            engine.save_checkpoint(str(tmp_path / "saved"))
        else:
            engine.load_checkpoint(str(tmp_path / "saved"))
        values.append({name: value.clone() for name, value in engine.module.state_dict().items()})
        engine.destroy()
    assert "blocks.1.mlp.up.other" in values[0]
    assert all(value.isfinite().all() for value in values[0].values())
    assert [name for name, value in values[0].items() if not torch.equal(value, values[1][name])] == []


@pytest.mark.parametrize("when", ["close", "before"])
def test_weights_that_cannot_be_read_at_the_end_are_refused(tmp_path: Path, when: str) -> None:
    """They are not NaN without a word."""
    model: nn.Module = gpt()()
    optimizer = TwinOptimizer(model, ratio=1.0, early=True, offload_params=True, tuning=tuning(tmp_path, 1))
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()
    file = optimizer.runtime.executor.weights
    assert file is not None
    file.flush()
    with another_file(file.fd, NO_MEMORY):
        if when == "before":
            with pytest.raises(WorkerError, match="Input/output error"):
                step_until_error(model, optimizer)
        with pytest.raises((OSError, RuntimeError), match="Input/output error"):
            optimizer.close()
    for use in (lambda: loss_of(model, 0), model.state_dict):
        with pytest.raises(RuntimeError, match="has no values"):
            use()


@on_disk
def test_a_model_that_is_built_by_the_optimizer(
    tmp_path: Path, num_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is built, and its weights go into the state, before the next one."""
    found, files = [], Mock(wraps=tempfile.TemporaryFile)
    monkeypatch.setattr(tempfile, "TemporaryFile", files)
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        given = config(folder, num_buffers)
        engine = twinflow.initialize(model=lambda: GPT(replace(SHAPE, num_layers=2)), config=given)[0]
        found.append(steps_of(engine, 0, 3))
        engine.destroy()
    assert found[0] == found[1]
    assert (files.call_count > 0) == (num_buffers > 0)


def mapped(address: int) -> str:
    """The file whose pages are at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return " ".join(line.split()[5:])
    raise AssertionError("no memory")


def test_a_model_is_built_on_the_disk(tmp_path: Path) -> None:
    """Its weights are in files without names, and not in host memory, until they are in the records."""
    torch.manual_seed(0)
    expected, _ = materialised(lambda: GPT(SHAPE), True)
    torch.manual_seed(0)
    made, _ = materialised(lambda: GPT(SHAPE), True, tuning=tuning(tmp_path, 2))
    assert isinstance(made, nn.Module)
    assert isinstance(expected, nn.Module)
    for param, other in zip(made.parameters(), expected.parameters(), strict=True):
        assert mapped(param.data_ptr()).startswith(str(tmp_path))
        assert torch.equal(param, other)
    assert not list(tmp_path.iterdir())


# Frozen weights, whose state is not on a disk.


def frozen_gpt(**changes: Any) -> nn.Module:
    """A model that trains only norms and biases of its blocks."""
    model = gpt(**changes)()
    for param in model.parameters():
        param.requires_grad_(param.dim() == 1)
    return model


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_frozen_weights_are_on_the_disk(tmp_path: Path, num_buffers: int) -> None:
    found = []
    disk = tuning(tmp_path, num_buffers, nvme_path=None)
    for options in (Tuning(bucket_numel=4096), disk):
        losses, weights = train(frozen_gpt, True, steps=3, ratio=1.0, tuning=options)
        found.append((losses, {name: value.tolist() for name, value in weights.items()}))
    assert found[0] == found[1]
    with closing(TwinOptimizer(frozen_gpt(), ratio=1.0, offload_params=True, tuning=disk)) as optimizer:
        file = optimizer.runtime.executor.weights
        assert file is not None
        model = optimizer.model
        assert model is not None
        num_bytes = sum(4 * p.numel() for name, p in model.named_parameters() if "blocks" in name and p.dim() > 1)
        assert num_bytes <= file.sizes.total_bytes <= num_bytes + 4096 * len(file._records)
        weight = model.blocks[0].mlp.up.weight  # type: ignore[union-attr, index]
        before = weight.clone()
        with torch.no_grad():
            weight.mul_(2)  # a write of the user
        assert torch.equal(weight, 2 * before)
        loss_of(model, 0)
        assert torch.equal(weight, 2 * before)


def test_state_in_memory_contains_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights on the disk .* cannot be used with optimizer state in host memory"):
        TwinOptimizer(gpt()(), ratio=1.0, offload_params=True, tuning=tuning(tmp_path, 1, nvme_path=None))


def test_a_model_that_is_only_run(tmp_path: Path) -> None:
    """Without an optimizer all weights of blocks are frozen."""
    outputs = []
    for folder in (None, tmp_path):
        given = config(folder, 1, optimizer=None)
        given["zero_optimization"].pop("offload_optimizer")
        engine = twinflow.initialize(model=gpt()(), config=given)[0]
        with torch.no_grad():
            outputs.append([loss_of(engine, step).item() for step in range(2)])
        engine.destroy()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_the_config_chooses_what_reads_and_writes_weights(
    tmp_path: Path, has_optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_disk_io(IO_URING, monkeypatch)
    monkeypatch.undo()
    given = config(tmp_path, 1)
    section = given["zero_optimization"]["offload_optimizer"]
    section["disk_io"] = IO_URING
    if not has_optimizer:
        given["optimizer"] = None
        section.pop("nvme_path")
        section["device"] = "none"
    assert not [note for note in notes(load_config(given)) if "disk_io" in note]
    engine = twinflow.initialize(model=gpt(num_layers=2)(), config=given)[0]
    offload = param_offload_of(engine)
    assert offload is not None
    assert offload._file is not None
    assert offload._file.io == IO_URING
    loss_of(engine, 0)
    engine.destroy()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"device": "cpu"}, r"offload_param\.device is 'cpu', but must be 'nvme'"),
        ({"nvme_path": "/elsewhere"}, r"offload_param\.nvme_path is '/elsewhere'"),
        ({"buffer_count": 7}, r"offload_param\.buffer_count is 7, but must be 2"),
        ({"max_in_cpu": 7}, r"offload_param\.max_in_cpu is 7"),
        ({}, ""),
    ],
)
def test_a_config_does_not_contradict_a_given_optimizer(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    model = gpt(num_layers=2)()
    with closing(TwinOptimizer(model, ratio=1.0, offload_params=True, tuning=tuning(tmp_path, 2))) as optimizer:
        section = {"device": "nvme", "nvme_path": str(tmp_path), **changes}
        given = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": section}}
        expected = pytest.raises(ValueError, match=match) if match else nullcontext()
        with expected:
            twinflow.initialize(model=model, optimizer=optimizer, config=given)


def test_a_config_with_a_disk_refuses_a_given_optimizer_without(tmp_path: Path) -> None:
    model = gpt(num_layers=2)()
    with closing(TwinOptimizer(model, ratio=1.0, offload_params=True)) as optimizer:
        section = {"device": "nvme", "nvme_path": str(tmp_path)}
        given = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "offload_param": section}}
        with pytest.raises(ValueError, match=r"offload_param\.device is 'nvme', but must be 'cpu'"):
            twinflow.initialize(model=model, optimizer=optimizer, config=given)


# What cannot be combined, and disks that are too small.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"offload_params": False}, r"weights on the disk .* cannot be used with offload_params=False"),
        ({"ratio": "auto", "tuning": {"nvme_path": None}}, 'ratio="auto" cannot be used with weights on the disk'),
        ({"tuning": {"param_nvme_path": ""}}, r"tuning\.param_nvme_path is '', but must be a folder"),
        ({"tuning": {"param_buffer_count": 0}}, r"tuning\.param_buffer_count is 0"),
    ],
)
def test_conflicts_are_named(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    given = {"ratio": 1.0, "offload_params": True, **options}
    given["tuning"] = tuning(tmp_path, 1, **options.get("tuning", {}))
    with pytest.raises(ValueError, match=match):
        TwinOptimizer(gpt()(), **given)
    assert not list(tmp_path.iterdir())


def test_too_little_space_for_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = os.posix_fallocate

    def full(fd: int, start: int, num_bytes: int) -> None:
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        calls.append(num_bytes)
        reserve(fd, start, num_bytes)

    calls: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="has too little space: the weights of blocks need") as caught:
        TwinOptimizer(gpt()(), ratio=1.0, offload_params=True, tuning=tuning(tmp_path, 1))
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("use", [torch.sum, copy.deepcopy, lambda weight: weight.data], ids=["sum", "copy", "data"])
@on_disk
def test_a_forked_process_cannot_read_weights(
    tmp_path: Path, num_buffers: int, use: Callable[[Tensor], object]
) -> None:
    """They are in the memory and in the files of the process from which it was forked."""
    model = gpt()()
    optimizer = TwinOptimizer(model, offload_params=True, tuning=tuning(tmp_path, num_buffers))
    weight = next(iter(model.blocks[0].parameters()))
    for _ in range(2):
        assert "this process was forked after the optimizer was built" in answer_of(lambda: use(weight))
    use(weight)
    optimizer.close()
