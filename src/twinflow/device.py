"""Streams, events and page-locked memory, the same way on a GPU and without one.

On CUDA a stream is a CUDA stream. On the CPU a stream is a thread that runs its work in order, and every stream can be
given a delay: a missing wait, harmless by luck on a fast machine, then shows in a test. Events are those of the native
library, so that its own streams (csrc/streams.cpp) and these can wait for each other.

Every wait names its sync point. A test can switch single points off (`Device.disabled`) and see that results change:
that is how we know each of them is needed and tested.
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

from twinflow.native.executor import executor_library
from twinflow.trace import Trace

_PAGE = 4096
_MADV_DONTFORK, _MADV_DOFORK = 10, 11
_LARGE_BYTES = 1 << 26  # above the largest size that malloc takes from its heap: such a buffer has its pages for itself
Work = Callable[[], object]
Mark = float | torch.cuda.Event  # a moment in the model's work: on the CPU, and on a GPU


class Event:
    """A point in a stream's work."""

    __slots__ = ("_device", "_library", "handle")

    def __init__(self, handle: int | None, device: Device | None = None) -> None:
        self._library = executor_library()
        self.handle = self._library.tf_event_new() if handle is None else handle
        self._device = device

    def __del__(self) -> None:
        self._library.tf_event_free(self.handle)

    def done(self) -> bool:
        """Whether the stream has come past it."""
        return self._check(self._library.tf_event_state(self.handle))

    def synchronize(self) -> None:
        """Block the calling thread until the stream has come past it."""
        self._check(self._library.tf_event_wait(self.handle))

    def fire(self, error: BaseException | None) -> None:
        """The stream has come past it; with an error, its work has failed."""
        self._library.tf_event_signal(self.handle, error is not None)

    def _check(self, state: int) -> bool:
        if state < 0:  # work that failed is over, but not done
            raise (self._device.error if self._device is not None else None) or RuntimeError("Work on a stream failed")
        return state > 0


class Stream(Protocol):
    """Work in order, beside other streams."""

    name: str

    def run(self, work: Work, span: str = "", **args: int) -> None:
        """Queue work; with a `span` it is recorded in the trace."""
        ...

    def record(self) -> Event:
        """An event after all work queued so far."""
        ...

    def wait(self, event: Event, point: str) -> None:
        """Let all work queued from now on wait for the event."""
        ...

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        ...

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for work on this stream. On a GPU memory belongs to the stream it was made on: what another stream
        has freed may still be in use there."""
        ...


class Device:
    """Where the model lives. `disabled` holds sync points that are skipped: for tests only."""

    kind = "cpu"

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self.watchers: list[weakref.WeakMethod[Callable[[], None]]] = []  # told of delays and of disabled sync points
        self._disabled: frozenset[str] = frozenset()
        self.stream_ids: Iterator[int] = repeat(0)  # each the calling thread's current stream, when it is asked for
        self.error: BaseException | None = None  # the first that work on a stream has raised
        self._followers: Callable[[], Sequence[torch.cuda.Stream]] = tuple
        self._delays: dict[str, float] = {}
        self._streams: dict[str, Any] = {}
        self._lock = threading.Lock()  # several threads ask for streams
        self._is_closed = False

    def set_followers(self, find: Callable[[], Sequence[torch.cuda.Stream]]) -> None:
        """Streams that others run the model's work on. They wait wherever the model's own stream waits."""
        self._followers = find

    @property
    def disabled(self) -> frozenset[str]:
        """Sync points that are skipped."""
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
        """The stream of this name, made when first asked for."""
        return self._stream(name, lambda: _ThreadStream(name, self))

    def _stream(self, name: str, make: Callable[[], Stream]) -> Stream:
        with self._lock:
            if name not in self._streams:
                if self._is_closed:
                    raise RuntimeError(f"stream {name!r} is asked for after its device was closed")
                self._streams[name] = make()
            stream: Stream = self._streams[name]
            return stream

    def compute(self) -> Stream:
        """Where gradients are produced, for the calling thread."""
        return self.stream("compute")

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """What the calling thread queues inside runs beside the model's work."""
        return nullcontext()

    def join_streams(self, streams: Iterable[int]) -> None:
        """Let the calling thread's stream wait for what was queued on these, by their ids."""

    def hold_compute(self, event: Event, point: str) -> None:
        """Let the model's work from now on wait for the event."""
        if point not in self.disabled:
            event.synchronize()  # on the CPU the model runs in the calling thread

    def mark(self) -> Mark:
        """A moment in the model's work, for `add_span`."""
        return time.perf_counter()

    def add_span(self, name: str, start: Mark, end: Mark) -> None:
        """Record in the trace what the model did between two marks."""
        assert isinstance(start, float) and isinstance(end, float)
        self.trace.add(name, "compute", start, end)

    def delay(self, name: str, seconds: float) -> None:
        """Before each piece of work of this stream, sleep (on a GPU: spin). For tests."""
        self._delays[name] = seconds
        self._tell()

    def delay_of(self, name: str) -> float:
        """What `delay` has set."""
        return self._delays.get(name, 0.0)

    def model_streams(self) -> ctypes.Array[ctypes.c_void_p]:
        """Handles of the streams that the model's work is queued on, for the native executor; none on the CPU, where
        the calling thread does the work."""
        return (ctypes.c_void_p * 0)()

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory that streams can copy from and to without stopping; lives until `close`."""
        return hide_from_children(torch.empty(numel, dtype=dtype))

    def release(self, tensor: Tensor) -> None:
        """Page-locked memory that is needed no more, and that no copy uses; other memory is left alone."""

    def free_bytes(self) -> int | None:
        """Memory left on the device; None where it is the host's own."""
        return None

    def capacity_bytes(self) -> int | None:
        """Memory that this process has on the device or could have; None where it is the host's own."""
        return None

    def peak_bytes(self) -> int:
        """The most memory that was in use on the device since `reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Count the peak from here."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Between two marks; waits for the second."""
        assert isinstance(start, float) and isinstance(end, float)
        return end - start

    def close(self) -> None:
        """Wait for all work, then give streams and page-locked memory back."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()


class _ThreadStream:
    """A stream as a thread. Work that raises breaks the stream: whoever waits for a later event gets the exception."""

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
            if isinstance(work, Event):  # after a failure too: somebody may wait for it
                work.fire(self._error)
            elif self._error is None:
                self._error = _failure(work)
                self._device.error = self._device.error or self._error


def _failure(work: Work) -> BaseException | None:
    """Run it; what it raised is handed to whoever waits."""
    try:
        work()
    except BaseException as error:
        return error
    return None


class CudaDevice(Device):
    """One GPU."""

    kind = "cuda"

    def __init__(self, device: torch.device, trace: Trace | None = None) -> None:
        super().__init__(trace)
        self.device = device
        self.stream_ids = map(torch._C._cuda_getCurrentRawStream, repeat(device.index))
        self._current: dict[int, _CurrentStream] = {}  # by their ids
        self._handles: dict[tuple[int, ...], ctypes.Array[ctypes.c_void_p]] = {}  # what `model_streams` has returned
        self._pinned: dict[int, Tensor] = {}  # by address; the lock guards it

    def stream(self, name: str) -> Stream:
        """The stream of this name; copies get a high priority, so that small ones do not queue behind kernels."""
        return self._stream(name, lambda: _CudaStream(name, self, _new_stream(self.device)))

    def compute(self) -> Stream:
        """The calling thread's current stream: in a hook, the one that produced the gradient."""
        number = torch._C._cuda_getCurrentRawStream(self.device.index)
        found = self._current.get(number)
        if found is None:
            found = self._current[number] = _CurrentStream("compute", self, torch.cuda.current_stream(self.device))
        return found

    def beside(self, name: str) -> AbstractContextManager[Any]:
        """On a stream of this name."""
        stream = self.stream(name)
        assert isinstance(stream, _CudaStream)
        return torch.cuda.stream(stream._stream)

    def join_streams(self, streams: Iterable[int]) -> None:
        """Nearly always it is the only one."""
        here = torch._C._cuda_getCurrentRawStream(self.device.index)
        for stream in streams:
            if stream != here:
                other = torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(self.device).wait_stream(other)

    def hold_compute(self, event: Event, point: str) -> None:
        """The GPU waits; the calling thread does not."""
        self.compute().wait(event, point)
        for stream in self._followers():
            _CudaStream("follower", self, stream).wait(event, point)

    def model_streams(self) -> ctypes.Array[ctypes.c_void_p]:
        """The calling thread's, and those that wait with it."""
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
        """The GPU's time between two marks."""
        assert not isinstance(start, float) and not isinstance(end, float)
        self.trace.gpu(name, "compute", start, end)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Registered at its exact size: torch's own pinned allocator rounds up to a power of two."""
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
        """What CUDA has left and what torch has cached, within the share of the device that torch may use."""
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(self.device)  # torch >= 2.9
        return min(free + torch.cuda.memory_reserved(self.device), int(share * total)) - allocated

    def release(self, tensor: Tensor) -> None:
        """Unregistered at once."""
        with self._lock:
            known = self._pinned.pop(tensor.data_ptr(), None)
        if known is not None:
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]

    def capacity_bytes(self) -> int | None:
        """What is free, and what torch has allocated."""
        return (self.free_bytes() or 0) + torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        """What torch has allocated at most."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Of torch's own counter."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def seconds(self, start: Mark, end: Mark) -> float:
        """The GPU's time."""
        assert not isinstance(start, float) and not isinstance(end, float)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def close(self) -> None:
        """Synchronise before unregistering: a copy in flight must not lose its memory."""
        torch.cuda.synchronize(self.device)
        for tensor in self._pinned.values():
            torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned.clear()
        self._is_closed = True


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return stream


class _Switched:
    """The calling thread's work goes to a stream of the current device. torch.cuda.stream takes four times as long."""

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
    """The calling thread's own: nothing has to be switched, which takes as long as a launch."""

    def run(self, work: Work, span: str = "", **args: int) -> None:
        if self._device._delays or self._device.trace.enabled:
            super().run(work, span, **args)
        else:
            work()


def hide_from_children(tensor: Tensor) -> Tensor:
    """Leave a large buffer out of processes that are forked from this one; returns it.

    A DataLoader forks its workers. They would get a copy of every page-locked page at once, and keep an old copy of
    each page of the state that is written later: several times the memory, for something they never look at. Small
    buffers may share their pages with others, so they are left alone.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if sys.platform == "linux" and nbytes >= _LARGE_BYTES:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        last = (tensor.data_ptr() + nbytes) // _PAGE * _PAGE
        _advise(first, last - first, _MADV_DONTFORK)
        # Some allocators keep pages that are freed: whoever gets them next must have them in its children.
        weakref.finalize(tensor, _advise, first, last - first, _MADV_DOFORK).atexit = False
    return tensor


def _advise(address: int, nbytes: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def device_for(device: torch.device, trace: Trace | None = None) -> Device:
    """The streams that belong to a model on this device."""
    return CudaDevice(device, trace) if device.type == "cuda" else Device(trace)
