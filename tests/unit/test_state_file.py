# SPDX-License-Identifier: Apache-2.0
"""The file with optimizer state on the disk: bytes, order, failures of the disk, and space."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import re
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fork_support import answer_of, fork_context
from support import NO_MEMORY, another_file, use_disk_io
from torch import Tensor

from twinflow.native.executor import CFileSettings, executor_library
from twinflow.offload import state_file
from twinflow.offload.state_file import (
    IO_URING,
    PAGE,
    THREADS,
    Reserved,
    StateFile,
    in_pages,
    num_rings,
    ring_refusal,
)

BYTES = 5 * PAGE  # three blocks of two pages, the last of one page


@pytest.fixture(params=[THREADS, IO_URING], autouse=True)
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads and writes the files of all tests here."""
    use_disk_io(request.param, monkeypatch)


@contextmanager
def new_file(folder: Path, num_records: int = 6, num_buffers: int = 2, num_bytes: int = BYTES) -> Iterator[StateFile]:
    room = in_pages(num_bytes)
    with closing(StateFile(Reserved(folder, num_records * room, room, num_buffers, 3, 2 * PAGE))) as file:
        for record in range(num_records):
            file.add(record, num_bytes)
        if file.is_direct:
            assert file.io == state_file.AUTO
        yield file


def fill(file: StateFile, record: int, value: int) -> None:
    with file.hold(record, is_changed=True) as raw:
        raw.fill_(value)


def value_of(file: StateFile, record: int) -> int:
    with file.hold(record, is_changed=False) as raw:
        found = raw.unique()
        assert len(found) == 1
        return int(found)


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 6, 9])
def test_any_number_of_buffers_keeps_all_records(tmp_path: Path, num_buffers: int) -> None:
    rng, wanted = random.Random(num_buffers), [0] * 6
    with new_file(tmp_path, num_buffers=num_buffers) as file:
        for step in range(1, 200):
            record = rng.randrange(6)
            assert value_of(file, record) == wanted[record]
            if rng.random() < 0.6:
                fill(file, record, step)
                wanted[record] = step
        file.flush()
        assert [value_of(file, record) for record in range(6)] == wanted
        assert file.counters.bytes_written > 0
        assert (file.counters.bytes_read == 0) == (num_buffers >= 6)  # all records stay in memory


def test_several_threads_hold_records(tmp_path: Path) -> None:
    """Each record is a counter that several threads increase."""
    num_threads, num_rounds = 4, 25
    failures: list[BaseException] = []

    def count(seed: int) -> None:
        try:
            order = [record for record in range(6) for _ in range(num_rounds)]
            random.Random(seed).shuffle(order)
            for record in order:
                with file.hold(record, is_changed=True) as raw:
                    raw.view(torch.int32).add_(1)
        except BaseException as error:
            failures.append(error)

    with new_file(tmp_path, num_buffers=2) as file:
        threads = [threading.Thread(target=count, args=(seed,)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert file.counters.bytes_read <= num_threads * 6 * num_rounds * BYTES  # nobody's record is read in vain
        for record in range(6):
            with file.hold(record, is_changed=False) as raw:
                assert (raw.view(torch.int32) == num_threads * num_rounds).all()


def test_the_file_has_no_name_and_all_its_space(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        assert not list(tmp_path.iterdir())
        status = os.fstat(file.fd)
        assert status.st_size == 6 * BYTES
        assert status.st_blocks * 512 >= 6 * BYTES
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file.fd)


def test_sizes_are_rounded_to_pages(tmp_path: Path) -> None:
    with new_file(tmp_path, num_bytes=3 * PAGE - 7) as file, file.hold(1, is_changed=False) as raw:
        assert raw.numel() == 3 * PAGE
        assert raw.data_ptr() % PAGE == 0


def test_a_record_that_is_added_later_gets_space_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_file(tmp_path) as file:
        file.add(6, BYTES)
        file.add(6, BYTES)  # has no effect
        assert os.fstat(file.fd).st_size == 7 * BYTES
        fill(file, 6, 9)

        def full(fd: int, start: int, num_bytes: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"too little space.*uota exceeded") as caught:
            file.add(7, BYTES)
        assert caught.value.errno == errno.EDQUOT
        assert value_of(file, 6) == 9


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nvme_path '.*' has too little space: .* needs 1\d{9}\.\d* GB") as caught:
        StateFile(Reserved(tmp_path, 10**18, PAGE, 2, 1, PAGE))
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"nvme_path is {re.escape(repr(str(tmp_path / 'file')))}, but must be a folder"):
        StateFile(Reserved(tmp_path / "file", PAGE, PAGE, 1, 1, PAGE))


def test_a_missing_folder_is_created(tmp_path: Path) -> None:
    with new_file(tmp_path / "a" / "b") as file:
        fill(file, 0, 3)


def test_a_file_system_without_direct_io_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_file, "_DIRECT", 0)
    with new_file(tmp_path) as file:
        assert not file.is_direct
        for record in range(6):
            fill(file, record, record)
        assert [value_of(file, record) for record in range(6)] == [*range(6)]
    assert "without direct I/O" in caplog.text


# Failures of the disk. Real ones: the descriptor refers to a file that returns this error.


def check_failed(file: StateFile, match: str) -> None:
    """Every later use raises the first error, also when the disk works again."""
    for _ in range(2):
        with pytest.raises(OSError, match=match) as caught, file.hold(0, is_changed=False):
            pass
        assert str(file.path) in str(caught.value)
        with pytest.raises(OSError, match=match):
            file.flush()


def test_a_failed_read_is_named(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        for record in range(6):
            fill(file, record, record)
        file.flush()
        with another_file(file.fd, NO_MEMORY):
            # Any of the three blocks can be the first that fails.
            match = r"reading .* failed at byte (0|8192|16384): Input/output error"
            with pytest.raises(OSError, match=match) as caught:
                value_of(file, 0)
            assert caught.value.errno == errno.EIO
        check_failed(file, "Input/output error")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        fill(file, 0, 1)
        with another_file(file.fd, "/dev/full"):
            with pytest.raises(OSError, match=r"writing .* failed at byte .*: No space left") as caught:
                file.flush()
            assert caught.value.errno == errno.ENOSPC
        check_failed(file, "No space left")


def test_a_failed_write_stops_readers_of_other_records(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        for record in range(6):
            fill(file, record, record)
        expected = pytest.raises(OSError, match=r"writing .* failed .*: Input/output error")
        with another_file(file.fd, NO_MEMORY), expected:
            value_of(file, 0)  # needs a buffer, which is free only after a write
        check_failed(file, "Input/output error")


def test_a_short_file_is_named(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        for record in range(6):
            fill(file, record, record)
        file.flush()
        os.ftruncate(file.fd, BYTES // 2)
        with pytest.raises(OSError, match=r"reading .* failed .*: the file ends there"):
            value_of(file, 1)
        check_failed(file, "the file ends there")


@pytest.mark.parametrize("offset", [0, 2 * PAGE + 17, BYTES - 1])
def test_changed_data_is_detected(tmp_path: Path, offset: int) -> None:
    with new_file(tmp_path) as file:
        for record in range(6):
            fill(file, record, 1)
        file.flush()
        with open(f"/proc/self/fd/{file.fd}", "r+b") as raw:
            raw.seek(2 * BYTES + offset)
            raw.write(b"\x03")
        assert value_of(file, 1) == 1
        with pytest.raises(OSError, match="the checksum of the data is not that of the data that was written"):
            value_of(file, 2)
        check_failed(file, "checksum")


def test_close_ends_a_caller_that_waits(tmp_path: Path) -> None:
    found: list[object] = []

    def wait() -> None:
        try:
            value_of(file, 0)
        except RuntimeError as error:
            found.append(error)

    with new_file(tmp_path) as file:
        with file.hold(0, is_changed=False):
            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.05)
            closer = threading.Thread(target=file.close)
            closer.start()
            thread.join()
            assert closer.is_alive()  # the memory of a held record stays
        closer.join()
    assert "closed" in str(found)


def write_forever(folder: Path, io: str, runs: Event) -> None:
    file = StateFile(Reserved(folder, 1 << 24, 1 << 20, 2, 2, 1 << 18, io))
    assert file.io == io
    for record in range(16):
        file.add(record, 1 << 20)
    for step in range(10**9):
        with file.hold(step % 16, is_changed=True) as raw:
            raw.fill_(step % 251)
        if step == 20:
            runs.set()


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    context = fork_context()
    runs = context.Event()
    process = context.Process(target=write_forever, args=(tmp_path, state_file.AUTO, runs), daemon=True)
    process.start()
    assert runs.wait(60)
    descriptors = Path(f"/proc/{process.pid}/fd")
    assert any("twinflow-state-" in os.readlink(one) for one in descriptors.iterdir())
    process.kill()
    process.join()
    assert not list(tmp_path.iterdir())


def test_a_forked_process_ends_without_the_threads(tmp_path: Path) -> None:
    with new_file(tmp_path) as file:
        fill(file, 0, 5)
        child = os.fork()
        if not child:
            with suppress(BaseException):
                file.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert value_of(file, 0) == 5


# Forks and the memory of a caller.


def new_file_in_given_memory(folder: Path, released: list[Tensor]) -> StateFile:
    """With page-aligned buffers that a caller allocates, as for weights, and four records."""
    pages = torch.zeros(5 * PAGE, dtype=torch.uint8)
    sizes = Reserved(folder, 4 * PAGE, 2 * PAGE, 2, 4, PAGE)
    file = StateFile(sizes, lambda size: pages[-pages.data_ptr() % PAGE :][:size], released.append)
    for record in range(4):
        file.add(record, 2 * PAGE)
    return file


def is_hidden(address: int) -> bool:
    """Whether forked processes do not get the page at this address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_here = start <= address < end
        elif is_here and first == "VmFlags:":
            return "dc" in others
    raise AssertionError(f"no memory at {address}")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hides memory from forks")
def test_a_fork_does_not_copy_buffers(tmp_path: Path) -> None:
    """In older kernels a page that is copied while the disk writes to it loses what the disk writes."""
    released: list[Tensor] = []
    file = new_file_in_given_memory(tmp_path, released)
    with file.hold(0, is_changed=False) as raw:
        assert is_hidden(raw.data_ptr())
        assert is_hidden(raw.data_ptr() + len(raw) - 1)
    file.close()
    [memory] = released
    assert not any(is_hidden(memory.data_ptr() + page * PAGE) for page in range(4))
    memory.fill_(3)
    assert answer_of(lambda: memory.unique().tolist()) == "[3]"
    with new_file(tmp_path) as file, file.hold(0, is_changed=False) as raw:
        assert is_hidden(raw.data_ptr())


def test_forks_while_records_are_read_lose_nothing(tmp_path: Path) -> None:
    file = new_file_in_given_memory(tmp_path, [])
    for record in range(4):
        fill(file, record, record + 1)
    children: list[int] = []
    wrong: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            for record in range(4):
                with file.hold(record, is_changed=False) as raw:
                    if raw.unique().tolist() != [record + 1]:
                        wrong.append(record)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(30):
        child = os.fork()
        if not child:
            time.sleep(0.02)
            os._exit(0)
        children.append(child)
    is_over.set()
    thread.join()
    for child in children:
        os.waitpid(child, 0)
    assert (wrong, file.failure()) == ([], None)
    file.close()


def test_a_forked_process_cannot_use_the_file(tmp_path: Path) -> None:
    """It has no threads, which a caller would wait for, and no buffers."""
    file = new_file_in_given_memory(tmp_path, [])
    for record in (0, 3):  # at the second fork, the first record may be in a buffer or not
        fill(file, record, 5)
        assert "this process was forked after the file was opened" in answer_of(lambda: value_of(file, 0))
    assert "this process was forked after the file was opened" in answer_of(file.flush)
    assert value_of(file, 0) == 5
    file.close()


def test_buffers_that_the_kernel_may_still_use_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else may use their memory. tests/unit/test_ring.py shows when this is so."""
    kept: list[Tensor] = []
    released: list[Tensor] = []
    monkeypatch.setattr(state_file, "_IN_USE", kept)
    file = new_file_in_given_memory(tmp_path, released)
    monkeypatch.setattr(file, "_library", SimpleNamespace(tf_file_close=lambda handle: 0))
    memory = weakref.ref(file._memory[0])
    file.close()
    del file
    gc.collect()
    assert not released
    assert [memory()] == kept


def test_a_ring_that_breaks_is_an_error(tmp_path: Path) -> None:
    if state_file.AUTO != IO_URING:
        pytest.skip("threads have no ring")
    released: list[Tensor] = []
    before = rings()
    file = new_file_in_given_memory(tmp_path, released)
    fill(file, 0, 1)
    file.flush()
    with open(os.devnull) as other:
        for fd in rings() - before:
            os.dup2(other.fileno(), fd)

    def use_all() -> None:
        for record in range(1, 4):
            fill(file, record, record)
            file.flush()

    with pytest.raises(OSError, match=r"(reading|writing) the optimizer state in .* failed"):
        use_all()
    file.close()
    assert len(released) == 1


def rings() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "io_uring" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


# What reads and writes.


def test_the_kernel_may_refuse_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice without it, as in a container that blocks the system call."""
    monkeypatch.setattr(state_file, "ring_refusal", lambda: os.strerror(errno.EPERM))
    assert num_rings("auto", 8, is_direct=True) == 0
    assert not caplog.records
    with closing(StateFile(Reserved(tmp_path, PAGE, PAGE, 1, 1, PAGE, IO_URING))) as file:
        file.add(0, PAGE)
        fill(file, 0, 7)
        file.flush()
        assert file.io == THREADS
    assert 'disk_io is "io_uring", but the kernel refuses it (Operation not permitted)' in caplog.text


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "ring_refusal", lambda: None)
    assert num_rings(THREADS, 8, is_direct=True) == 0
    assert num_rings(IO_URING, 8, is_direct=False) == 2
    assert num_rings(IO_URING, 1, is_direct=True) == 1  # one request at a time
    assert num_rings("auto", 8, is_direct=False) == 0
    assert num_rings("auto", 8, is_direct=True) == (2 if state_file.AUTO == IO_URING else 0)


def write_without_rings(folder: Path) -> None:
    """In a process with a filter of system calls, as a container has it: io_uring_setup returns EPERM."""
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program)))
    assert libc.prctl(22, 2, header, 0, 0) == 0, ctypes.get_errno()
    assert ring_refusal() == "Operation not permitted", ring_refusal()
    file = StateFile(Reserved(folder, 8192, 4096, 1, 2, 4096))
    for record in range(2):
        file.add(record, 4096)
    for record in range(2):
        with file.hold(record, True) as raw:
            raw.fill_(record + 1)
    for record in range(2):
        with file.hold(record, False) as raw:
            assert raw.unique().tolist() == [record + 1]
    assert file.io == THREADS
    # Also if it was not asked before.
    library, settings = executor_library(), CFileSettings(file.fd, 1, 2, 4096, 4096, 2)
    handle = library.tf_file_new(ctypes.byref(settings))
    assert handle
    assert library.tf_file_num_rings(handle) == 0
    library.tf_file_close(handle)


def test_a_filter_of_system_calls_leaves_the_threads(tmp_path: Path) -> None:
    process = fork_context().Process(target=write_without_rings, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
