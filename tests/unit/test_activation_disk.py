# SPDX-License-Identifier: Apache-2.0
"""Inputs of checkpointed layers on a disk: the bits of inputs in memory, few host buffers, and errors that name it."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from activations_support import INPUT_BYTES, SMALL, engine_of, gpt, gradients, same
from torch import Tensor, nn
from twin_support import batch, quick_torch

from twinflow.activations import Handle, checkpoint_layers, disk
from twinflow.activations.offload import STREAM
from twinflow.device import Device, Event

LAYERS = 10


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


@pytest.fixture
def wrap(tmp_path: Path) -> Iterator[Any]:
    made: list[Handle] = []

    def put(model: nn.Module, **options: Any) -> Handle:
        options = {"min_bytes": SMALL, "offload": True, "disk": tmp_path, **options}
        made.append(checkpoint_layers(model, ("Block",), **options))
        return made[-1]

    yield put
    for handle in made:
        handle.remove()


def deep(**changes: Any) -> Any:
    return gpt(num_layers=LAYERS, **changes)


def test_the_same_bits_with_few_buffers_and_no_growing_file(wrap: Any, tmp_path: Path) -> None:
    model = deep()
    handle = wrap(model)
    assert same(gradients(model, 3), gradients(deep(), 3))
    # Two layers keep their inputs, three buffers wait for the disk. Backward reads four inputs ahead.
    assert handle.offload.host_bytes <= 6 * INPUT_BYTES
    size = handle.offload.file.num_bytes
    assert size == (LAYERS - 2) * INPUT_BYTES
    gradients(model, 3)
    assert handle.offload.file.num_bytes == size
    assert not list(tmp_path.iterdir())  # the file has no name


def test_the_file_is_as_large_as_the_longest_step(wrap: Any) -> None:
    model = deep()
    handle = wrap(model)
    for length in (4, 8, 12, 16, 6, 10, 14, 16):
        tokens, targets = (given[:, :length] for given in batch(0))
        model(tokens, targets).loss.backward()
    assert handle.offload.file.num_bytes == (LAYERS - 2) * INPUT_BYTES


@pytest.mark.parametrize("options", [{"every": 3}, {"float8": True}, {"on_device": 4}], ids=str)
def test_with_other_options(wrap: Any, options: dict[str, Any]) -> None:
    found = []
    for where in ({"disk": None}, {}):
        model = deep()
        wrap(model, **options, **where)
        found.append(gradients(model, 3))
    assert same(*found)


@pytest.mark.parametrize("slow", ["write", "read", "copy"])
def test_delays_change_no_bit(wrap: Any, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    device, model = Device(), deep()
    if slow == "copy":
        device.delay(STREAM, 0.003)
    name = {"write": "pwrite", "read": "preadv"}.get(slow)
    if name:
        real: Callable[..., int] = getattr(os, name)

        def slowly(*args: Any) -> int:
            time.sleep(0.003)
            return real(*args)

        monkeypatch.setattr(os, name, slowly)
    handle = wrap(model, device=device)
    assert same(gradients(model, 2), gradients(deep(), 2))
    assert handle.offload.host_bytes <= 6 * INPUT_BYTES


def test_parts_of_transfers(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of several parts, of which the system moves a few bytes in each call."""
    monkeypatch.setattr(disk, "PART_BYTES", 1000)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, memory, at: write(file, memory[:300], at))
    monkeypatch.setattr(os, "preadv", lambda file, memories, at: read(file, [memories[0][:300]], at))
    model = deep()
    wrap(model)
    assert same(gradients(model, 2), gradients(deep(), 2))


class _Passed(Event):
    """An event that nothing waits for."""

    def synchronize(self) -> None:
        pass


def test_a_missing_wait_for_a_copy_shows(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input is read into a buffer only when the copy of the input that was there before has ended."""
    truth, read = gradients(deep(), 2), disk.InputFile.read

    def at_once(self: disk.InputFile, record: disk.Record, buffer: Tensor, _: Event) -> None:
        read(self, record, buffer, _Passed(None))
        record.wait()

    for waits in (True, False):
        device, model = Device(), deep()
        device.delay(STREAM, 0.02)
        if not waits:
            monkeypatch.setattr(disk.InputFile, "read", at_once)
        wrap(model, device=device)
        assert same(gradients(model, 2), truth) == waits


def test_a_missing_wait_for_a_read_shows(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the device waits until the input was read."""
    read = os.preadv

    def slowly(*args: Any) -> int:
        time.sleep(0.02)
        return read(*args)

    monkeypatch.setattr(os, "preadv", slowly)
    truth = gradients(deep(), 2)
    for waits in (True, False):
        model = deep()
        if not waits:
            monkeypatch.setattr(disk.Record, "wait", lambda self: None)
        wrap(model)
        assert same(gradients(model, 2), truth) == waits


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_several_forwards_before_their_backwards(wrap: Any, order: tuple[int, ...]) -> None:
    found = []
    for is_on in (False, True):
        model = deep(dropout=0.0)
        if is_on:
            wrap(model)
        losses = [model(*batch(step)).loss for step in range(3)]
        for index in order:
            losses[index].backward()
        found.append([p.grad for p in model.parameters()])
    assert same(*found)


def test_graphs_that_are_kept_and_dropped(wrap: Any) -> None:
    found = []
    for is_on in (False, True):
        model = deep()
        handle = wrap(model) if is_on else None
        torch.manual_seed(0)
        loss = model(*batch(0)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
        del loss
    assert same(*found)
    for step in range(6):
        loss = model(*batch(step)).loss
        if step % 2:  # reads begin, and the graph is dropped before they are used
            torch.autograd.grad(loss, model.blocks[-3].mlp.parameters(), allow_unused=True)
        del loss
        gc.collect()
    truth = deep()
    model.zero_grad()
    assert same(gradients(model, 2), gradients(truth, 2))
    assert handle.offload.file.num_bytes <= 2 * (LAYERS - 2) * INPUT_BYTES
    assert handle.offload.host_bytes <= 8 * INPUT_BYTES


def test_remove_ends_threads_and_closes_the_file(tmp_path: Path) -> None:
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    model = deep()
    handle = checkpoint_layers(model, ["Block"], offload=True, min_bytes=SMALL, disk=tmp_path)
    loss = model(*batch(0)).loss
    handle.remove()
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == files
    with pytest.raises(RuntimeError, match="because checkpointing was removed"):
        loss.backward()


@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_a_disk_that_fails_is_named(wrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    model = deep()
    wrap(model)
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match=f"cannot be kept in {tmp_path}: Input/output error. Use another disk"):
        model(*batch(0)).loss.backward()


def test_a_full_disk_is_named_before_anything_is_written(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = deep()
    wrap(model)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match=f"Not enough space in {tmp_path}: the inputs of checkpointed layers"):
        model(*batch(0))


def test_what_is_refused(wrap: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk is .* but must be None without offload=True"):
        wrap(deep(), offload=False)
    with pytest.raises(FileNotFoundError, match="but must be a folder in which a file can be created"):
        wrap(deep(), disk=tmp_path / "missing")


def test_the_config_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinflow.activations.wrap.MIN_BYTES", 1)
    found: list[list[Tensor]] = []
    for section in ({}, {"nvme_path": str(tmp_path)}):
        model = deep(dropout=0.0)
        engine = engine_of(model, section)
        for step in range(2):
            engine.backward(engine(*batch(step)).loss)
            engine.step()
        assert (engine.activations is not None and engine.activations.offload.file is not None) == bool(section)
        engine.optimizer.wait()
        found.append([p.detach().clone() for p in model.parameters()])
        engine.destroy()
    assert same(*found)
