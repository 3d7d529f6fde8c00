"""Streams, events and page-locked memory, with the same interface on a GPU and on a CPU.

On CUDA, a stream is a CUDA stream. On the CPU, a stream is a thread that runs its work in order. Tests can delay every
stream, so that a missing wait shows even if it is harmless on a fast machine. Events are those of the native library.
The streams of the library (csrc/streams.cpp) and these streams can therefore wait for each other.

Every wait has the name of a sync point. A test can disable single points (`Device.disabled`) and check that results
change. This shows that each point is needed and tested.
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
from twinflow.trace import Trace

_PAGE = 4096
_MADV_DONTFORK, _MADV_DOFORK = 10, 11
_LARGE_BYTES = 1 << 26  # A larger buffer does not come from malloc's heap and shares no pages with other buffers.
Work = Callable[[], object]
Mark = float | torch.cuda.Event  # a point in time of the model's work, on the CPU and on a GPU


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
        """Whether the stream has reached the event."""
        return self._check(self._library.tf_event_state(self.handle))

    def synchronize(self) -> None:
        """Blocks the calling thread until the stream has reached the event."""
        self._check(self._library.tf_event_wait(self.handle))

    def fire(self, error: BaseException | None) -> None:
        """Marks the event as reached, or as failed if there is an error."""
        self._library.tf_event_signal(self.handle, error is not None)

    def _check(self, state: int) -> bool:
        if state < 0:  # The work has failed.
            error = self._device.error if self._device is not None else None
            raise error or RuntimeError("Work on a stream failed. See the first error of this process for the reason.")
        return state > 0


class Stream(Protocol):
    """A sequence of work that runs in order and concurrently with other streams."""

    name: str

    def run(self, work: Work, span: str = "", **args: int) -> None:
        """Queues work. With `span`, the work is recorded in the trace."""
        ...

    def record(self) -> Event:
        """An event after all work that is queued so far."""
        ...

    def wait(self, event: Event, point: str) -> None:
        """Makes all work that is queued from now on wait for the event."""
        ...

    def synchronize(self) -> None:
        """Blocks until all queued work is done."""
        ...

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for work on this stream. On a GPU, memory belongs to the stream on which it was allocated: memory that
        another stream has freed may still be in use there.
        """
        ...


class Device:
    """The device of the model. Tests set `disabled` to skip sync points."""

    kind = "cpu"

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self.watchers: list[weakref.WeakMethod[Callable[[], None]]] = []  # called when delays or sync points change
        self._disabled: frozenset[str] = frozenset()
        self.stream_ids: Iterator[int] = repeat(0)  # next() gives the current stream of the calling thread.
        self.error: BaseException | None = None  # the first exception of work on a stream
        self._followers: Callable[[], Sequence[torch.cuda.Stream]] = tuple
        self._delays: dict[str, float] = {}
        self._streams: dict[str, Any] = {}
        self._lock = threading.Lock()  # Several threads call `stream`.
        self._is_closed = False

    def set_followers(self, find: Callable[[], Sequence[torch.cuda.Stream]]) -> None:
        """Sets a function that returns other streams with the model's work. They wait whenever the model's own stream
        waits.
        """
        self._followers = find

    @property
    def disabled(self) -> frozenset[str]:
        """The sync points that are skipped."""
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
        """The stream of this name. It is created at the first call."""
        return self._stream(name, lambda: _ThreadStream(name, self))

    def _stream(self, name: str, make: Callable[[], Stream]) -> Stream:
        with self._lock:
            if name not in self._streams:
                if self._is_closed:
                    raise wrong_state(
                        f"The stream {name!r} cannot be created", "its device is closed", "Build a new optimizer."
                    )
                self._streams[name] = make()
            stream: Stream = self._streams[name]
            return stream

    def compute(self) -> Stream:
        """The stream of the calling thread on which gradients are computed."""
        return self.stream("compute")

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """A context in which the calling thread queues work concurrently with the model's work."""
        return nullcontext()

    def join_streams(self, streams: Iterable[int]) -> None:
        """Makes the calling thread's stream wait for the work on these streams, which are given by their ids."""

    def hold_compute(self, event: Event, point: str) -> None:
        """Makes the model's work from now on wait for the event."""
        if point not in self.disabled:
            event.synchronize()  # On the CPU, the model runs in the calling thread.

    def mark(self) -> Mark:
        """The current point in the model's work, for `add_span` and `seconds`."""
        return time.perf_counter()

    def add_span(self, name: str, start: Mark, end: Mark) -> None:
        """Records the model's work between two marks in the trace."""
        assert isinstance(start, float) and isinstance(end, float)
        self.trace.add(name, "compute", start, end)

    def delay(self, name: str, seconds: float) -> None:
        """Makes this stream sleep before each piece of work (on a GPU: spin). For tests."""
        self._delays[name] = seconds
        self._tell()

    def delay_of(self, name: str) -> float:
        """The delay of a stream in seconds."""
        return self._delays.get(name, 0.0)

    def model_streams(self) -> ctypes.Array[ctypes.c_void_p]:
        """Handles of the streams with the model's work, for the native executor. Empty on the CPU, where the calling
        thread does the work.
        """
        return (ctypes.c_void_p * 0)()

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory from which and to which streams can copy asynchronously. It exists until `close`."""
        return hide_from_children(torch.empty(numel, dtype=dtype))

    def release(self, tensor: Tensor) -> None:
        """Releases page-locked memory that no copy uses any more. Does nothing for other memory."""

    def free_bytes(self) -> int | None:
        """Free memory of the device. None if it is host memory."""
        return None

    def capacity_bytes(self) -> int | None:
        """Memory of the device that this process has or could have. None if it is host memory."""
        return None

    def peak_bytes(self) -> int:
        """Peak memory use of the device since `reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """The time between two marks. Waits for the second one."""
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def close(self) -> None:
        """Waits for all work and releases streams and page-locked memory."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()


class _ThreadStream:
    """A stream with its own thread. After an exception in its work, all later events of the stream fail with it."""

    def __init__(self, name: str, device: Device) -> None:
        self.name = name
        self._device = device
        self._queue: queue.SimpleQueue[Work | Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=f"twinflow-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Work, span: str = "", **args: int) -> None:
        def traced() -> None:
            time.sleep(self._device._delays.get(self.name, 0.0))
            if not span:
                work()
                return
            with self._device.trace.span(span, track=self.name, **args):
                work()

        self._queue.put(traced)

    def record(self) -> Event:
        event = Event(None, self._device)
        self._queue.put(event)
        return event

    def wait(self, event: Event, point: str) -> None:
        if point not in self._device.disabled:
            self._queue.put(event.synchronize)

    def synchronize(self) -> None:
        self.record().synchronize()

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    @torch.no_grad()
    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, Event):  # Also after a failure, because another thread may wait for the event.
                work.fire(self._error)
            elif self._error is None:
                self._error = _failure(work)
                self._device.error = self._device.error or self._error


def _failure(work: Work) -> BaseException | None:
    """Runs `work` and returns its exception. The event passes it to waiting threads."""
    try:
        work()
    except BaseException as error:
        return error
    return None


class CudaDevice(Device):
    """A GPU with CUDA streams."""

    kind = "cuda"

    def __init__(self, device: torch.device, trace: Trace | None = None) -> None:
        super().__init__(trace)
        self.device = device
        self.stream_ids = map(torch._C._cuda_getCurrentRawStream, repeat(device.index))
        self._current: dict[int, _CurrentStream] = {}  # by stream id
        self._handles: dict[tuple[int, ...], ctypes.Array[ctypes.c_void_p]] = {}  # cache of `model_streams`
        self._pinned: dict[int, Tensor] = {}  # by address, guarded by the lock

    def stream(self, name: str) -> Stream:
        """The stream of this name. It has a high priority, so that small copies do not wait behind kernels."""
        return self._stream(name, lambda: _CudaStream(name, self, _new_stream(self.device)))

    def compute(self) -> Stream:
        """The current stream of the calling thread. In a hook, it is the stream that computed the gradient."""
        number = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._current.get(number)
        if found is None:
            found = self._current[number] = _CurrentStream("compute", self, torch.cuda.current_stream(self.device))
        return found

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """A context with the stream of this name as the current stream."""
        stream = self.stream(name)
        assert isinstance(stream, _CudaStream)
        return torch.cuda.stream(stream._stream)

    def join_streams(self, streams: Iterable[int]) -> None:
        here = torch._C._cuda_getCurrentRawStream(self.device.index)
        for stream in streams:
            if stream != here:  # Nearly always the only stream is the current one.
                other = torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(self.device).wait_stream(other)

    def hold_compute(self, event: Event, point: str) -> None:
        """Makes the GPU wait, but not the calling thread."""
        self.compute().wait(event, point)
        for stream in self._followers():
            _CudaStream("follower", self, stream).wait(event, point)

    def model_streams(self) -> ctypes.Array[ctypes.c_void_p]:
        """The current stream of the calling thread and its followers."""
        current = torch._C._cuda_getCurrentRawStream(self.device.index)
        streams = (current, *(stream.cuda_stream for stream in self._followers()))
        found = self._handles.get(streams)
        if found is None:
            found = self._handles[streams] = (ctypes.c_void_p * len(streams))(*streams)
        return found

    def mark(self) -> Mark:
        """A timed event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add_span(self, name: str, start: Mark, end: Mark) -> None:
        assert not isinstance(start, float) and not isinstance(end, float)
        self.trace.gpu(name, "compute", start, end)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Page-locked memory of the exact size. torch's pinned allocator rounds up to a power of two."""
        nbytes = numel * dtype.itemsize
        raw = torch.empty(nbytes + _PAGE, dtype=torch.uint8)
        start = -raw.data_ptr() % _PAGE
        tensor = raw[start : start + nbytes].view(dtype)
        hide_from_children(tensor)
        if nbytes:
            error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
            if int(error):
                warnings.warn(
                    f"{nbytes >> 20} MiB of host memory could not be page-locked (CUDA error {int(error)}): copies of "
                    "it will be slow. Raise the limit with `ulimit -l unlimited`.",
                    stacklevel=2,
                )
            else:
                with self._lock:
                    self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def free_bytes(self) -> int | None:
        """Free memory of CUDA plus cached memory of torch, within the fraction of the device that torch may use."""
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
        """Synchronizes before memory is unregistered, because a copy may be in progress."""
        torch.cuda.synchronize(self.device)
        for tensor in self._pinned.values():
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned.clear()
        self._is_closed = True


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


class _Switched:
    """Makes a stream the current one, without changing the device. torch.cuda.stream takes four times as long."""

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


class _CudaStream:
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


class _CurrentStream(_CudaStream):
    """The current stream of the calling thread. It needs no switch, which would take as long as a kernel launch."""

    def run(self, work: Work, span: str = "", **args: int) -> None:
        if self._device._delays or self._device.trace.enabled:
            super().run(work, span, **args)
        else:
            work()


def hide_from_children(tensor: Tensor) -> Tensor:
    """Excludes a large buffer from forked child processes, and returns it.

    A DataLoader forks its workers. Each worker would get a copy of every page-locked page at once, and would keep an
    old copy of each page of the state that is written later. This would take several times the memory, and workers
    never read these buffers. Small buffers may share pages with others, so they are not excluded.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if sys.platform == "linux" and nbytes >= _LARGE_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        last = (tensor.data_ptr() + nbytes) // _PAGE * _PAGE
        _advise(first, last - first, _MADV_DONTFORK)
        # Some allocators reuse freed pages. Their next user needs them in child processes.
        weakref.finalize(tensor, _advise, first, last - first, _MADV_DOFORK).atexit = False
    return tensor


def _advise(address: int, nbytes: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def device_for(device: torch.device, trace: Trace | None = None) -> Device:
    """The `Device` for a model on this torch device."""
    return CudaDevice(device, trace) if device.type == "cuda" else Device(trace)
