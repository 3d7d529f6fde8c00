# SPDX-License-Identifier: Apache-2.0
"""Optimizer state on the disk: the bits of state in memory, order of reads, failures, and what cannot be combined."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import NO_MEMORY, another_file, pairwise_of, use_disk_io
from torch import Tensor, nn
from twin_support import (
    MAX_NORM,
    assert_same,
    batch,
    gpt,
    loss_of,
    matrix_but,
    our_threads,
    quick_torch,
    snapshot,
    train,
    trained_with_schedule,
    twin,
)

import twinflow
from twinflow.compat.zero import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from twinflow.config import load_config, notes
from twinflow.config.fields import DiskIo
from twinflow.offload import state_file
from twinflow.offload.executor import WorkerError
from twinflow.offload.state_file import IO_URING, THREADS, StateFile
from twinflow.optim.loss_scale import dynamic
from twinflow.optim.twin import Tuning, TwinOptimizer
from twinflow.rules import RULES

_SUPPORT = [Path(__file__).parents[1]]
FORMATS = [(rule, states) for rule in RULES for states in RULES[rule].formats]
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": MAX_NORM},
    "on_host": {"max_grad_norm": MAX_NORM, "sums": "host", "hold": "host"},
    "late": {"max_grad_norm": MAX_NORM, "early": False},
}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_torch():
        yield


# test_state_file.py always tests both.
OTHER_IO = THREADS if state_file.AUTO == IO_URING else IO_URING


@pytest.fixture(params=["auto", pytest.param(OTHER_IO, marks=pytest.mark.matrix)], autouse=True)
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads and writes the files of all tests here."""
    if request.param != "auto":
        use_disk_io(request.param, monkeypatch)


def on_disk(folder: Path, **options: Any) -> dict[str, Any]:
    return {"nvme_path": str(folder), "shadow_bytes": 0, "disk_block_bytes": 4096, "ratio": 1.0, **options}


def file_of(optimizer: TwinOptimizer) -> StateFile:
    file = optimizer.runtime.executor.file
    assert file is not None
    return file


CELLS = [
    (rule, states, ratio, accumulation, buffers, mode)
    for (rule, states), ratio, accumulation, buffers, mode in product(FORMATS, (1.0, 0.4), (1, 3), (1, 2, 4), MODES)
    if not (mode == "late" and accumulation > 1)
]


@pytest.mark.parametrize(
    ("rule", "states", "ratio", "accumulation", "buffers", "mode"), matrix_but(list(pairwise_of(CELLS))[::2], CELLS)
)
def test_the_disk_gives_the_same_bits(
    tmp_path: Path, rule: str, states: str, ratio: float, accumulation: int, buffers: int, mode: str
) -> None:
    run = partial(trained_with_schedule, rule, states, accumulation, **MODES[mode])
    assert_same(run(**on_disk(tmp_path, ratio=ratio, buffer_count=buffers)), run(ratio=1.0))
    assert not list(tmp_path.iterdir())


class Halves(nn.Module):
    """Half-precision weights of odd sizes, one of them not contiguous."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Module() for _ in range(3))
        for block in self.blocks:
            block.a = nn.Parameter(torch.randn(7, 61).to(dtype))
            block.b = nn.Parameter(torch.randn(300).to(dtype))
            block.c = nn.Parameter(torch.randn(9, 33).to(dtype).t())

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        total = torch.zeros(())
        for block in self.blocks:
            for weight in (block.a, block.b, block.c):
                total = total + (weight.float() * torch.randn(weight.shape, generator=generator)).tanh().sum()
        return total


@pytest.mark.parametrize(
    ("dtype", "master", "states"),
    [
        *((torch.bfloat16, "fp32", states) for states in ("fp32", "bf16", "int8", "4bit")),
        (torch.bfloat16, "none", "fp32"),
        (torch.bfloat16, "none", "4bit"),
        (torch.float16, "fp32", "int8"),
        (torch.float16, "fp32", "fp32"),
    ],
)
def test_half_precision_gives_the_same_bits(tmp_path: Path, dtype: torch.dtype, master: str, states: str) -> None:
    def run(**where: Any) -> dict[str, Tensor]:
        model = Halves(dtype)
        scale = dynamic(4, 2) if dtype == torch.float16 else None
        options = {"bucket_numel": 384, "loss_scale": scale, "max_grad_norm": 1.0, "lr": 1e-2, "early": True}
        with closing(twin(model, states=states, master=master, **options, **where)) as optimizer:
            for step in range(5):
                loss = model(step)
                optimizer.backward(loss * torch.inf if step == 2 else loss)  # this step is skipped
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.num_skipped == 1
            return snapshot(model, optimizer)

    assert_same(run(**on_disk(tmp_path, buffer_count=2)), run(ratio=1.0))


def test_a_saved_state_continues_in_memory_and_on_the_disk(tmp_path: Path) -> None:
    kinds = {"disk": on_disk(tmp_path, buffer_count=2), "memory": {"ratio": 1.0}}
    found = []
    for first, second in product(kinds, kinds):
        model = gpt()
        with closing(twin(model, states="int8", max_grad_norm=MAX_NORM, **kinds[first])) as optimizer:
            train(model, optimizer, range(3))
            saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        other = gpt(1)
        other.load_state_dict(weights)
        with closing(twin(other, states="int8", max_grad_norm=MAX_NORM, **kinds[second])) as optimizer:
            optimizer.load_state_dict(saved)
            train(other, optimizer, range(3, 5))
            found.append(snapshot(other, optimizer))
    for one in found[1:]:
        assert_same(one, found[0])


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_code_between_steps_changes_weights_and_state(tmp_path: Path, where: str) -> None:
    """Writes to weights, an unused parameter, moves of state, and a state that was read after each step."""

    def run(options: dict[str, Any], reads: bool) -> dict[str, Tensor]:
        model = gpt()
        with closing(twin(model, max_grad_norm=MAX_NORM, early=True, **options)) as optimizer:
            for step in range(6):
                train(model, optimizer, [step])
                if step == 1:
                    with torch.no_grad():
                        model.blocks[0].mlp.up.weight.mul_(0.5)
                if step == 2:
                    optimizer.offload_state()
                if step == 4:
                    optimizer.reload_state()
                if reads:
                    optimizer.state_dict()
            return snapshot(model, optimizer)

    options = on_disk(tmp_path, buffer_count=2, ratio=0.5) if where == "disk" else {"ratio": 1.0}
    assert_same(run(options, reads=True), run({"ratio": 1.0}, reads=False))


def test_records_are_read_before_their_gradients_exist(tmp_path: Path) -> None:
    model = gpt()
    with closing(twin(model, early=True, **on_disk(tmp_path, buffer_count=3))) as optimizer:
        file, num_buckets = file_of(optimizer), len(optimizer.runtime.buckets)
        late = []
        for step in range(24):
            before = file.counters.num_late
            train(model, optimizer, [step])
            optimizer.wait()
            late.append(file.counters.num_late - before)
        found = file.counters
        assert num_buckets > 6
        assert found.num_updates == 24 * num_buckets
        assert late[0] >= num_buckets - 3  # no order is known in the first step
        # Later steps may differ from the one before in a few places. On a busy machine the threads of the disk may not
        # run in time, but not in every step.
        assert min(late[1:]) < num_buckets / 3
        # The start writes each record, and so does each step. Only the buffers hold records that were read for nothing.
        written = found.bytes_written / (file.sizes.total_bytes / num_buckets)
        assert written == pytest.approx(25 * num_buckets, abs=6)


def test_an_update_that_waits_for_a_slot_holds_no_buffer(tmp_path: Path) -> None:
    """The slots may wait for a background checkpoint, which reads weights and needs a buffer for state."""
    model = gpt()
    with closing(twin(model, early=True, num_slots=1, **on_disk(tmp_path, buffer_count=1))) as optimizer:
        executor, file = optimizer.runtime.executor, file_of(optimizer)
        train(model, optimizer, [0])
        optimizer.wait()
        before, indices = file.counters.num_updates, [bucket.plan.index for bucket in optimizer.runtime.buckets]
        for index in indices:
            executor.freeze(index, False, True)  # as a checkpoint that has not read the weights
        train(model, optimizer, [1])
        deadline = time.monotonic() + 10
        while file.counters.num_updates == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # the next updates get as far as they can

        def read() -> None:
            for index in indices:
                with file.hold(index, False):
                    pass

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(5)
        is_stuck = reader.is_alive()
        for index in indices:
            executor.freeze(index, False, False)
        reader.join()
        assert not is_stuck


def test_memory_and_space_are_shown_and_freed(tmp_path: Path) -> None:
    before = our_threads()
    model = gpt()
    optimizer = twin(model, **on_disk(tmp_path))
    file = file_of(optimizer)
    assert f"on the disk ({tmp_path})" in repr(optimizer)
    assert os.fstat(file.fd).st_blocks * 512 >= file.sizes.total_bytes
    assert file.sizes.num_buffers == 4
    assert f"reads and writes of the disk: 8 at the same time, by {optimizer.disk_io}" in repr(optimizer)
    assert any("twinflow-disk" in name for name in our_threads() - before)
    optimizer.close()
    assert our_threads() == before
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file.fd)


def test_a_ratio_of_zero_needs_no_space(tmp_path: Path) -> None:
    with closing(twin(gpt(), **on_disk(tmp_path, ratio=0.0))) as optimizer:
        assert file_of(optimizer).sizes.total_bytes == 0
        train(optimizer.model, optimizer, range(2))  # type: ignore[arg-type]


def test_the_default_ratio_is_one(tmp_path: Path) -> None:
    options = on_disk(tmp_path)
    del options["ratio"]
    with closing(twin(gpt(), **options)) as optimizer:
        assert optimizer.ratio == 1.0


# Failures.


def step_until_error(model: nn.Module, optimizer: TwinOptimizer) -> None:
    for step in range(10, 20):
        train(model, optimizer, [step])  # type: ignore[arg-type]
        optimizer.wait()


@pytest.mark.parametrize(
    ("path", "reason"), [(NO_MEMORY, "Input/output error"), ("/dev/full", "No space left on device|checksum")]
)
def test_a_failing_disk_stops_the_run(tmp_path: Path, path: str, reason: str) -> None:
    model = gpt()
    optimizer = twin(model, max_grad_norm=MAX_NORM, early=True, **on_disk(tmp_path, buffer_count=2))
    train(model, optimizer, range(3))
    optimizer.wait()
    file = file_of(optimizer)
    file.flush()
    with another_file(file.fd, path), pytest.raises(WorkerError, match=reason) as caught:
        step_until_error(model, optimizer)
    assert str(file.path) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    # The disk works again, and the state is not what it should be. Nothing continues with it.
    calls: list[Callable[[], object]] = [
        optimizer.step,
        optimizer.state_dict,
        model.blocks[0].mlp.up.weight.clone,
        lambda: loss_of(model, 0),
    ]
    for call in calls:
        with pytest.raises(WorkerError, match=reason):
            call()
    with pytest.raises(WorkerError, match=reason):
        optimizer.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file.fd)


def test_changed_data_stops_the_run(tmp_path: Path) -> None:
    model = gpt()
    optimizer = twin(model, early=True, **on_disk(tmp_path, buffer_count=2))
    with suppress(WorkerError), closing(optimizer):  # whether close() raises depends on the moment of the error
        train(model, optimizer, range(3))
        optimizer.wait()
        file = file_of(optimizer)
        file.flush()
        with open(f"/proc/self/fd/{file.fd}", "r+b") as raw:
            data = bytearray(file.sizes.total_bytes)
            raw.readinto(data)
            raw.seek(0)
            raw.write(bytes(255 - byte for byte in data))
        with pytest.raises(WorkerError, match="checksum"):
            step_until_error(model, optimizer)


def test_too_little_space_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, model = our_threads(), gpt()

    def full(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"nvme_path '.*' has too little space") as caught:
        twin(model, **on_disk(tmp_path))
    assert caught.value.errno == errno.ENOSPC
    assert our_threads() == before
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    with closing(twin(model, ratio=1.0)) as optimizer:  # the model is as before
        train(model, optimizer, range(1))


# What cannot be combined.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ratio": "auto"}, 'ratio="auto"'),
        ({"rule": torch.optim.AdamW}, "A user's optimizer"),
        ({"rule": "muon"}, 'rule="muon"'),
        ({"delayed_update": True, "early": True}, "delayed_update=True"),
        ({"streamed": 0.5}, r"tuning\.streamed=0\.5"),
        ({"shadow_bytes": 1024}, "shadow_bytes=1024"),
    ],
)
def test_conflicts_are_named(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=rf"{match}.* cannot be used with state on the disk \(nvme_path\)"):
        twin(gpt(), **on_disk(tmp_path, **options))
    assert not list(tmp_path.iterdir())


def test_an_empty_path_is_no_path() -> None:
    with pytest.raises(ValueError, match=r"tuning\.nvme_path is '', but must be a folder"):
        twin(gpt(), nvme_path="", shadow_bytes=0, ratio=1.0)


@pytest.mark.parametrize("field", ["buffer_count", "disk_requests", "disk_block_bytes"])
def test_numbers_are_checked(tmp_path: Path, field: str) -> None:
    with pytest.raises(ValueError, match=rf"tuning\.{field} is 0, but must be a whole number"):
        TwinOptimizer(gpt(), tuning=Tuning(nvme_path=str(tmp_path), **{field: 0}))  # type: ignore[arg-type]


# The engine.


def config_of(folder: Path | None, **more: Any) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "bucket_numel": 4096}
    if folder is not None:
        offload |= {"device": "nvme", "nvme_path": str(folder / "disk"), "buffer_count": 2}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {**offload, "states": "int8"}},
        **more,
    }


def engine_of(folder: Path | None, seed: int = 0, **more: Any) -> Any:
    return twinflow.initialize(model=gpt(seed), config=config_of(folder, **more))[0]


def run(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(*batch(step)).loss)
        engine.step()


def save(engine: Any, folder: Path, tag: str) -> None:
    engine.save_checkpoint(folder, tag=tag)
    engine.wait_for_checkpoint()


def test_the_config_is_that_of_deepspeed(tmp_path: Path) -> None:
    aio = {"block_size": 10000, "queue_depth": 3, "thread_count": 2, "single_submit": False, "overlap_events": True}
    engine = engine_of(tmp_path, aio=aio)
    sizes = file_of(engine.optimizer).sizes
    assert (sizes.num_buffers, sizes.num_threads, sizes.block_bytes) == (2, 6, 3 * 4096)
    assert sizes.folder == tmp_path / "disk"
    assert sizes.io == "auto"
    assert engine.zero_nvme_offload_optimizer()
    assert engine.zero_use_cpu_optimizer()
    assert not engine.zero_cpu_offload()
    engine.destroy()


def test_keys_of_the_disk_without_the_device_are_named() -> None:
    config = config_of(None, aio={"block_size": 4096})
    config["zero_optimization"]["offload_optimizer"] |= {"nvme_path": "there", "buffer_count": 5, "disk_io": "threads"}
    found = " ".join(notes(load_config(config)))
    for key in ("offload_optimizer.nvme_path", "offload_optimizer.buffer_count", "offload_optimizer.disk_io", "aio"):
        assert f"{key}: no effect here, because" in found
    engine = twinflow.initialize(model=gpt(), config=config)[0]
    assert engine.optimizer.runtime.executor.file is None
    assert engine.optimizer.disk_io is None
    engine.destroy()


@pytest.mark.parametrize("io", [THREADS, IO_URING])
def test_the_config_chooses_what_reads_and_writes(tmp_path: Path, io: DiskIo, monkeypatch: pytest.MonkeyPatch) -> None:
    use_disk_io(io, monkeypatch)
    monkeypatch.undo()
    config = config_of(tmp_path)
    config["zero_optimization"]["offload_optimizer"]["disk_io"] = io
    engine = twinflow.initialize(model=gpt(), config=config)[0]
    run(engine, range(1))
    assert engine.optimizer.disk_io == io
    engine.destroy()
    config["zero_optimization"]["offload_optimizer"]["disk_io"] = "mmap"
    with pytest.raises(ValueError, match=r"offload_optimizer\.disk_io is 'mmap', but must be"):
        load_config(config)


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_of_a_run_on_the_disk_continues_anywhere(tmp_path: Path, background: bool) -> None:
    """In the background, updates wait until the state of their bucket is in the checkpoint."""
    first = engine_of(tmp_path, checkpoint={"background": background})
    run(first, range(3))
    first.save_checkpoint(tmp_path / "saved")
    run(first, range(3, 6))
    wanted = snapshot(first.module, first.optimizer)
    first.destroy()
    for folder in (tmp_path, None):
        engine = engine_of(folder, seed=1)
        engine.load_checkpoint(tmp_path / "saved")
        run(engine, range(3, 6))
        assert_same(snapshot(engine.module, engine.optimizer), wanted)
        engine.destroy()


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fails_in_a_save_leaves_the_checkpoint_before(tmp_path: Path, background: bool) -> None:
    engine = engine_of(tmp_path, checkpoint={"background": background})
    run(engine, range(2))
    save(engine, tmp_path / "saved", "first")
    run(engine, range(2, 3))
    engine.optimizer.wait()
    file = file_of(engine.optimizer)
    file.flush()
    with another_file(file.fd, NO_MEMORY), pytest.raises((OSError, RuntimeError), match="Input/output error"):
        save(engine, tmp_path / "saved", "second")
    assert (tmp_path / "saved" / "latest").read_text().strip() == "first"
    with suppress(OSError, RuntimeError):
        engine.destroy()
    engine = engine_of(None, seed=1)
    engine.load_checkpoint(tmp_path / "saved")
    assert engine.global_steps == 2
    engine.destroy()


def test_deepspeeds_functions_read_and_write_state_on_the_disk(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path, None):
        engine = engine_of(folder)
        run(engine, range(2))
        weight = engine.module.blocks[1].mlp.up.weight
        safe_set_full_optimizer_state(weight, torch.full_like(weight, 0.25), "exp_avg")
        safe_set_full_fp32_param(weight, torch.full_like(weight, 0.125))
        run(engine, range(2, 4))
        found.append(
            {
                "master": safe_get_full_fp32_param(weight),
                "exp_avg_sq": safe_get_full_optimizer_state(weight, "exp_avg_sq"),
                **snapshot(engine.module, engine.optimizer),
            }
        )
        engine.destroy()
    assert_same(*found)


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import torch
from twinflow.offload import state_file
state_file.AUTO = sys.argv[2]
from test_disk_tier import engine_of, run
torch.set_num_threads(1)
folder = Path(sys.argv[1])
engine = engine_of(folder, checkpoint={"keep_last": 2})
print("begins", flush=True)
for step in range(10**6):
    run(engine, range(step, step + 1))
    engine.save_checkpoint(folder / "saved")
"""


@pytest.mark.matrix
@pytest.mark.parametrize("moment", range(20))
def test_a_killed_run_leaves_a_checkpoint_that_loads(tmp_path: Path, moment: int) -> None:
    command = [
        sys.executable,
        "-c",
        KILLED,
        str(tmp_path),
        state_file.AUTO,
        *map(str, (Path(__file__).parent, *_SUPPORT)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        while not (tmp_path / "saved" / "latest").exists():
            time.sleep(0.01)
        time.sleep(0.037 * moment)
        process.send_signal(signal.SIGKILL)
    assert not list((tmp_path / "disk").iterdir())
    engine = engine_of(tmp_path, seed=1)
    engine.load_checkpoint(tmp_path / "saved")
    steps = engine.global_steps
    assert steps > 0
    run(engine, range(steps, steps + 2))
    found = snapshot(engine.module, engine.optimizer)
    engine.destroy()
    engine = engine_of(None)
    run(engine, range(steps + 2))
    assert_same(found, snapshot(engine.module, engine.optimizer))
    engine.destroy()
