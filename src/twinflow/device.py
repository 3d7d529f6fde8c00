# SPDX-License-Identifier: Apache-2.0
"""Streams, events and page-locked memory, with one interface for a GPU and for the CPU.

On CUDA a stream is a CUDA stream. On the CPU a stream is a thread that runs its work in order. Events are those of the
native library, so that the streams here and those of the native library (csrc/streams.cpp) can wait for each other.

Threads: any thread may queue work on a stream, record an event and wait for an event. Work on one stream runs in the
order in which it was queued. Only events order the work of two streams: `record` on one stream, `wait` on the other.
`Device._lock` guards the table of streams and the table of page-locked memory. On the CPU the thread of a stream runs
the work. Its first exception stops that stream, is kept in `Device.error`, and is raised in callers that wait for a
later event.

For tests: every stream can be given a delay, so that a missing wait gives wrong results also on a fast machine. Every
wait has a name, its sync point (offload/sync.py). A test can switch off the waits of a sync point (`Device.disabled`)
and check that results change, which shows that these waits are needed.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from twinflow.errors import wrong_state
from twinflow.native.executor import executor_library
from twinflow.native.kernels import advise_huge
from twinflow.trace import Trace

_FAILED = "A copy or an update in the background failed. Build a new optimizer and load the last checkpoint."
_PAGE = 4096
_MADV_DONTFORK, _MADV_DOFORK = 10, 11
_LARGE_BYTES = 1 << 26  # malloc does not take such a size from its heap, so the buffer shares no pages with others
_COPIED_NUMEL = 1 << 24  # elements of page-locked memory through which `to_host` copies
Work = Callable[[], object]
Mark = float | torch.cuda.Event  # a point in the model's work: a time on the CPU, an event on a GPU


class SpareMemory(Protocol):
    """Something that uses host memory only as long as nothing else needs it."""

    def make_room(self, num_bytes: int) -> None: ...


_spare_memory: weakref.WeakSet[SpareMemory] = weakref.WeakSet()


def holds_spare_memory(holder: SpareMemory) -> None:
    """From now on `holder` is asked to release memory before large host buffers are allocated."""
    _spare_memory.add(holder)


def make_room(num_bytes: int) -> None:
    """Asks holders of spare memory to release what a new host buffer needs. Without this, a buffer that is larger than
    the free memory would end the process, although memory could be released.
    """
    for holder in tuple(_spare_memory):
        holder.make_room(num_bytes)


def to_host(values: Tensor) -> Tensor:
    """`values` in host memory. A contiguous tensor of a GPU is copied through page-locked memory to huge pages by all
    threads, which takes a fraction of the time of `values.cpu()`.
    """
    if not values.is_cuda or not values.is_contiguous():
        return values.cpu()
    host = advise_huge(torch.empty_like(values, device="cpu"))
    source, into = values.view(-1), host.view(-1)
    locked = torch.empty(min(_COPIED_NUMEL, len(source)), dtype=values.dtype, pin_memory=True)
    for at in range(0, len(source), _COPIED_NUMEL):
        chunk = locked[: len(source) - at]
        chunk.copy_(source[at : at + len(chunk)])
        into[at : at + len(chunk)].copy_(chunk)
    return host


class Event:
    """A point in the work of a stream."""

    __slots__ = ("_device", "_library", "handle")

    def __init__(self, handle: int | None, device: Device | None = None) -> None:
        self._library = executor_library()
        self.handle = self._library.tf_event_new() if handle is None else handle
        self._device = device

    def __del__(self) -> None:
        self._library.tf_event_free(self.handle)

    def done(self) -> bool:
        """Whether the stream has passed the event."""
        return self._check(self._library.tf_event_state(self.handle))

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed the event."""
        self._check(self._library.tf_event_wait(self.handle))

    def fire(self, error: BaseException | None) -> None:
        """Mark the event as passed. `error`: the exception of the stream's work, if that has failed."""
        self._library.tf_event_signal(self.handle, error is not None)

    def _check(self, state: int) -> bool:
        if state < 0:  # the work has ended with an error
            raise (self._device.error if self._device is not None else None) or RuntimeError(_FAILED)
        return state > 0


class Device:
    """The CPU as the device of a model; base class of `CudaDevice`."""

    kind = "cpu"

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self.watchers: list[weakref.WeakMethod[Callable[[], None]]] = []  # called when delays or `disabled` change
        self._disabled: frozenset[str] = frozenset()
        self.stream_ids: Iterator[int] = repeat(0)  # next() gives the id of the calling thread's current stream
        self.error: BaseException | None = None  # the first exception of work on a stream
        self._followers: Callable[[], Sequence[torch.cuda.Stream]] = tuple
        self._delays: dict[str, float] = {}
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()  # guards `_streams`, and `_pinned` of a GPU
        self._is_closed = False

    def set_followers(self, find: Callable[[], Sequence[torch.cuda.Stream]]) -> None:
        """`find` returns other streams that run the model's work. They wait wherever the model's own stream waits."""
        self._followers = find

    @property
    def disabled(self) -> frozenset[str]:
        """Sync points that are skipped. For tests only."""
        return self._disabled

    @disabled.setter
    def disabled(self, points: frozenset[str]) -> None:
        self._disabled = points
        self._tell()

    def _tell(self) -> None:
        for watcher in self.watchers:
            call = watcher()
            if call is not None:
                call()

    def stream(self, name: str) -> Stream:
        """Return the stream of this name. The first call makes it."""
        with self._lock:
            if name not in self._streams:
                if self._is_closed:
                    remedy = "Build a new optimizer to go on training."
                    raise wrong_state(f"The stream {name!r} cannot be created", "the optimizer is closed", remedy)
                self._streams[name] = self._new_stream(name)
            return self._streams[name]

    def _new_stream(self, name: str) -> Stream:
        return Stream(name, self)

    def compute(self) -> Stream:
        """Return the stream on which the calling thread produces gradients."""
        return self.stream("compute")

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """Return a context in which a GPU runs queued work on the stream `name`, and not on the model's stream."""
        return nullcontext()

    def join_streams(self, streams: Iterable[int]) -> None:
        """Let the calling thread's current stream wait for the work on these streams, which are given by id."""

    def hold_compute(self, event: Event, point: str) -> None:
        """Let the model's work that is queued from now on wait for the event."""
        if point not in self.disabled:
            event.synchronize()  # On the CPU, the model runs in the calling thread.

    def mark(self) -> Mark:
        """Return the current point in the model's work, for `add_span` and `seconds`."""
        return time.perf_counter()

    def add_span(self, name: str, start: Mark, end: Mark) -> None:
        """Record the model's work between two marks in the trace."""
        assert isinstance(start, float) and isinstance(end, float)
        self.trace.add(name, "compute", start, end)

    def delay(self, name: str, seconds: float) -> None:
        """Sleep (on a GPU: spin) before each piece of work of this stream. For tests."""
        self._delays[name] = seconds
        self._tell()

    def delay_of(self, name: str) -> float:
        return self._delays.get(name, 0.0)

    def model_streams(self) -> ctypes.Array[ctypes.c_void_p]:
        """Return the handles of the streams that run the model's work, for the native executor.

        There are none on the CPU, where the calling thread does the work.
        """
        return (ctypes.c_void_p * 0)()

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros in host memory for asynchronous copies (page-locked on a GPU). They live until `close` or
        `release`.
        """
        if numel * dtype.itemsize >= _LARGE_BYTES:
            make_room(numel * dtype.itemsize)
        return hide_from_children(advise_huge(torch.empty(numel, dtype=dtype))).zero_()

    def release(self, tensor: Tensor) -> None:
        """Unlock page-locked memory that no copy uses any more. Other memory does not change."""

    def free_bytes(self) -> int | None:
        """Return the free memory of the device; None if the device is the host."""
        return None

    def capacity_bytes(self) -> int | None:
        """Return the device memory that this process uses or could allocate; None if the device is the host."""
        return None

    def peak_bytes(self) -> int:
        """Return the largest amount of device memory in use since `reset_peak`; 0 if the device is the host."""
        return 0

    def reset_peak(self) -> None:
        """Start a new measurement for `peak_bytes`."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the time between two marks. Waits for the second mark."""
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def close(self) -> None:
        """Wait for all work, then end the streams and unlock page-locked memory."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()


class Stream:
    """Runs work in order, concurrently with other streams. On the CPU it is a thread; `CudaStream` is the stream of a
    GPU. After work has raised, later work is not run, and waiting for a later event raises the exception.
    """

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self._device = device
        self._queue: queue.SimpleQueue[Work | Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=f"twinflow-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Work, span: str = "", **args: int) -> None:
        """Queue work. `span`: the name under which the trace records the work, with `args`; "" for no record."""

        def traced() -> None:
            time.sleep(self._device.delay_of(self.name))
            with self._device.trace.span(span, track=self.name, **args) if span else nullcontext():
                work()

        self._queue.put(traced)

    def record(self) -> Event:
        """Return an event after all work that is queued so far."""
        event = Event(None, self._device)
        self._queue.put(event)
        return event

    def wait(self, event: Event, point: str) -> None:
        """Let all work that is queued from now on wait for the event. `point`: the name of the sync point."""
        if point not in self._device.disabled:
            self._queue.put(event.synchronize)

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        self.record().synchronize()

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for work on this stream.

        On a GPU memory belongs to the stream on which it was allocated. Memory that another stream has freed may still
        be in use there.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def close(self) -> None:
        """Wait for all work and end the thread."""
        self._queue.put(None)
        self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, Event):  # after a failure too, because a thread may wait for the event
                work.fire(self._error)
            elif self._error is None:
                try:
                    work()
                except BaseException as error:
                    self._error = error
                    self._device.error = self._device.error or error
            work = None  # so that the tensors of the work can be freed while the thread waits


class CudaDevice(Device):
    """One GPU as the device of a model."""

    kind = "cuda"

    def __init__(self, device: torch.device, trace: Trace | None = None) -> None:
        super().__init__(trace)
        if device.index is None:  # "cuda" is the current GPU, as in torch
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.stream_ids = map(torch._C._cuda_getCurrentRawStream, repeat(device.index))
        self._current: dict[int, _CurrentStream] = {}  # by stream id
        self._handles: dict[tuple[int, ...], ctypes.Array[ctypes.c_void_p]] = {}  # earlier results of `model_streams`
        self._pinned: dict[int, Tensor] = {}  # by address; `_lock` guards it

    def _new_stream(self, name: str) -> Stream:
        # The priority is high, so that small copies do not wait for kernels.
        return CudaStream(name, self, torch.cuda.Stream(self.device, priority=-1))  # type: ignore[no-untyped-call]

    def compute(self) -> Stream:
        """Return the calling thread's current stream. In a hook this is the stream that produced the gradient."""
        number = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._current.get(number)
        if found is None:
            found = self._current[number] = _CurrentStream("compute", self, torch.cuda.current_stream(self.device))
        return found

    def beside(self, name: str) -> AbstractContextManager[Any]:
        stream = self.stream(name)
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream._stream)

    def join_streams(self, streams: Iterable[int]) -> None:
        here = torch._C._cuda_getCurrentRawStream(self.device.index)
        for stream in streams:
            if stream != here:  # there is nearly always only the current stream
                other = torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(self.device).wait_stream(other)

    def hold_compute(self, event: Event, point: str) -> None:
        """Let the model's streams wait for the event. The calling thread does not wait."""
        self.compute().wait(event, point)
        for stream in self._followers():
            CudaStream("follower", self, stream).wait(event, point)

    def model_streams(self) -> ctypes.Array[ctypes.c_void_p]:
        """Return the handles of the calling thread's current stream and of its followers."""
        current = torch._C._cuda_getCurrentRawStream(self.device.index)
        streams = (current, *(stream.cuda_stream for stream in self._followers()))
        found = self._handles.get(streams)
        if found is None:
            found = self._handles[streams] = (ctypes.c_void_p * len(streams))(*streams)
        return found

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add_span(self, name: str, start: Mark, end: Mark) -> None:
        assert not isinstance(start, float) and not isinstance(end, float)
        self.trace.gpu(name, "compute", start, end)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory and page-lock exactly its size. torch's pinned allocator rounds up to a power of two."""
        nbytes = numel * dtype.itemsize
        if nbytes >= _LARGE_BYTES:
            make_room(nbytes)
        raw = torch.empty(nbytes + _PAGE, dtype=torch.uint8)
        start = -raw.data_ptr() % _PAGE
        tensor = raw[start : start + nbytes].view(dtype)
        hide_from_children(tensor)
        # Page-locking allocates missing pages one by one. All threads do it here, with huge pages where there are any.
        advise_huge(tensor).zero_()
        if nbytes:
            error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
            if int(error):
                warnings.warn(
                    f"{nbytes >> 20} MiB of host memory could not be page-locked (CUDA error {int(error)}), so copies "
                    "from and to this memory will be slow. Raise the limit with `ulimit -l unlimited`.",
                    stacklevel=2,
                )
            else:
                with self._lock:
                    self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def free_bytes(self) -> int | None:
        """Return the memory that CUDA has free or torch has cached, within the share of the device for this process."""
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(self.device)  # torch >= 2.9
        return min(free + torch.cuda.memory_reserved(self.device), int(share * total)) - allocated

    def release(self, tensor: Tensor) -> None:
        with self._lock:
            known = self._pinned.pop(tensor.data_ptr(), None)
        if known is not None:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]

    def capacity_bytes(self) -> int | None:
        return (self.free_bytes() or 0) + torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def seconds(self, start: Mark, end: Mark) -> float:
        assert not isinstance(start, float) and not isinstance(end, float)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def close(self) -> None:
        torch.cuda.synchronize(self.device)  # a running copy still uses the memory that is unregistered below
        for tensor in self._pinned.values():
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned.clear()
        self._is_closed = True


class _Switched:
    """A context manager that makes a stream of the current device the current stream.

    torch.cuda.stream takes four times as long.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def __exit__(self, *_: object) -> None:
        stream_id, device_index, device_type = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class CudaStream(Stream):
    _device: CudaDevice

    def __init__(self, name: str, device: CudaDevice, stream: torch.cuda.Stream) -> None:
        self.name = name
        self._device = device
        self._stream = stream

    def run(self, work: Work, span: str = "", **args: int) -> None:
        trace = self._device.trace
        delay = self._device.delay_of(self.name)
        with _Switched(self._stream):
            if delay:
                torch.cuda._sleep(int(delay * 1e9))  # type: ignore[no-untyped-call]
            if not (span and trace.enabled):
                work()
                return
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record(self._stream)
            work()
            after.record(self._stream)
            trace.gpu(span, self.name, before, after, **args)

    def record(self) -> Event:
        library = executor_library()
        return Event(library.tf_event_record(self._device.device.index, self._stream.cuda_stream), self._device)

    def wait(self, event: Event, point: str) -> None:
        if point not in self._device.disabled:
            executor_library().tf_event_hold(event.handle, self._stream.cuda_stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.zeros(numel, dtype=dtype, device=device)


class _CurrentStream(CudaStream):
    """The calling thread's current stream. Work needs no switch of streams, which would take as long as a kernel
    launch.
    """

    def run(self, work: Work, span: str = "", **args: int) -> None:
        if self._device._delays or self._device.trace.enabled:
            super().run(work, span, **args)
        else:
            work()


def hide_from_children(tensor: Tensor) -> Tensor:
    """Exclude a large buffer from processes that are forked from this one, and return the buffer.

    A DataLoader forks its workers. Each worker would copy every page-locked page at the fork, and would keep the old
    content of every other page that this process writes to later. The copies would take several times the memory of the
    state, and workers never read the state. Small buffers are not excluded, because they may share pages with other
    data.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if sys.platform == "linux" and nbytes >= _LARGE_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        last = (tensor.data_ptr() + nbytes) // _PAGE * _PAGE
        _advise(first, last - first, _MADV_DONTFORK)
        # Some allocators keep freed pages. The next buffer in these pages must be visible in child processes.
        weakref.finalize(tensor, _advise, first, last - first, _MADV_DOFORK).atexit = False
    return tensor


def _advise(address: int, nbytes: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def device_for(device: torch.device, trace: Trace | None = None) -> Device:
    """Return the `Device` for a model on this torch device."""
    return CudaDevice(device, trace) if device.type == "cuda" else Device(trace)
