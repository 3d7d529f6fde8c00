# SPDX-License-Identifier: Apache-2.0
"""Offload of the large inputs of checkpointed layers: they are on the host between forward and backward.

Copy out: before a layer runs, the copy of its large inputs to page-locked memory is queued on a separate stream, so
that it overlaps with the layer. The inputs of the last few layers stay on the device, because backward needs them
first. An older input is freed on the device after the model's stream was made to wait for its copy. The calling thread
waits only if a host buffer must be replaced by a larger one. Freed memory is reused in the order of the model's stream.
A thread that queues a whole forward ahead of the GPU therefore does not keep all inputs on the device.

With a `file`, an input is written to a disk when it leaves the device, and its host buffer is used again (disk.py).
Backward starts to read the inputs of some layers before those that are copied back.

The inputs of `resident` layers are not copied. With `is_float8`, the first input of a layer, which is the stream of
hidden states, is in float8 between forward and backward, on the host or on the device.

Copy back: when backward reads the input of a layer, the inputs of the preceding layers are prefetched.

One stream copies in both directions. A host buffer can therefore be reused as soon as its contents are not needed any
more, because copies that still read or write the buffer are ahead of the next copy on the stream.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from twinflow.activations.disk import InputFile, Record
from twinflow.activations.float8 import Encoded, decode, encode
from twinflow.device import Device, Event, Stream
from twinflow.errors import wrong_state

T = TypeVar("T")

MIN_BYTES = 1 << 20  # smaller inputs stay on the device: the memory saved is not worth a copy
STREAM = "activations"
# Synchronisation points: waits that tests switch off one by one, to show that each is needed.
MADE = "activation made"  # a copy out starts after the work that computed the input
KEPT = "activation kept"  # the memory of an original is reused after its copy out
ROOM = "activation room"  # a copy back starts after the work that used its target memory before
BACK = "activation back"  # backward uses an input after its copy back


@dataclass(eq=False)
class Call:
    """One call of a layer in forward, with its offloaded inputs."""

    layer: str
    previous: weakref.ref[Call] | None  # the call before it in forward; backward needs its inputs next
    inputs: list[weakref.ref[Saved]] = field(default_factory=list)


@dataclass(eq=False)
class Saved:
    """One input of a layer between forward and backward."""

    owner: Offload
    call: Call
    source: weakref.ref[Tensor]  # the tensor given to the layer, to recognise it if another layer gets it too
    version: int
    original: Tensor | None  # None after it was freed on the device
    # The copy on the host, with the layout of the original, or the memory of the input in float8. On the meta device
    # while the input is on a disk.
    host: Tensor
    buffer: Tensor | None  # the pool's buffer; `host` is a view of it
    record: Record | None = None  # on a disk
    encoded: Encoded | None = None  # the input in float8 on the device, until it is on the host
    out: Event | None = None
    back: Event | None = None
    restored: Tensor | None = None  # the copy back on the device, complete or not, until backward takes it
    is_shared: bool = False  # several layers have this input: the original stays on the device
    is_spoiled: bool = False  # the original was changed in place before it was freed
    is_ordered: bool = False  # the model's stream waits for `out`

    def __del__(self) -> None:
        self.owner._forget(self)


class Offload:
    """Copies large inputs to the host and back, except inputs of several layers, which stay on the device.

    In forward, the inputs of the last `window` layers, including the running one, are on the device. In backward, those
    of the running layer are there, and those of the `ahead` layers before it are copied back.
    """

    def __init__(
        self,
        device: Device,
        where: torch.device,
        min_bytes: int = MIN_BYTES,
        window: int = 2,
        ahead: int = 2,
        resident: Collection[str] = (),
        is_float8: bool = False,
        file: InputFile | None = None,
    ) -> None:
        self.device = device
        self.file = file
        self.bytes_out = 0
        self.bytes_back = 0
        self._where, self._min_bytes, self._window, self._ahead = where, min_bytes, window, ahead
        self._resident = frozenset(resident)  # names of layers whose inputs stay on the device
        self._is_float8 = is_float8
        # The stream is created here, because the garbage collector may use it and must not create it.
        self._stream = device.stream(STREAM)
        self._pool = HostPool(device, self._stream)
        self._leaving: deque[weakref.ref[Call]] = deque()  # oldest first
        self._known: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()  # by id of the source
        self._last: weakref.ref[Call] | None = None
        self._is_closed = False

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory, in use or kept for the next step."""
        return self._pool.num_bytes

    def saving(self, tensors: Sequence[Tensor], layer: str) -> saved_tensors_hooks:
        """Context manager for a checkpointed call with the inputs `tensors`. Autograd saves large ones on the host.

        The checkpoint installs its own hooks for tensors that are saved inside the call, so only inputs arrive here.
        """
        astray = next((tensor.device for tensor in tensors if tensor.is_cuda and tensor.device != self._where), None)
        if astray is not None:
            raise wrong_state(
                f"The checkpointed layer {layer} cannot use a tensor on {astray}",
                f"its inputs are offloaded from {self._where}",
                "Move the model before its layers are checkpointed. A model on several GPUs is not supported.",
            )
        while len(self._leaving) >= self._window:
            self._let_go(self._leaving.popleft()())
        if layer in self._resident:
            first = [tensor for tensor in tensors[:1] if self._is_float8 and self._is_worth_it(tensor)]
            return hooks_for({memory_key(tensor): encode(tensor) for tensor in first}, self._is_worth_it, decode)
        call = Call(layer, self._last)
        found = {
            memory_key(tensor): self._save(tensor, call, self._is_float8 and i == 0)
            for i, tensor in enumerate(tensors)
            if self._is_worth_it(tensor)
        }
        if call.inputs:
            self._last = weakref.ref(call)
            self._leaving.append(self._last)
        return hooks_for(found, self._is_worth_it, self._fetch)

    def _is_worth_it(self, tensor: Tensor) -> bool:
        is_here = tensor.device == self._where and not tensor.is_inference()
        return is_here and is_large(tensor, self._min_bytes) and _is_dense(tensor)

    def _save(self, tensor: Tensor, call: Call, is_float8: bool) -> Saved:
        """Start the copy of an input to the host, unless another layer has saved the same tensor."""
        known = self._known.get(id(tensor))
        if known is not None and known.source() is tensor and known.version == tensor._version:
            # Several layers have this input, for example a mask or the output of an encoder. It stays on the device.
            known.original, known.is_shared = tensor.detach(), True
            return known
        original = tensor.detach()
        encoded = encode(original) if is_float8 else None
        source = original if encoded is None else encoded.memory
        num_bytes = source.numel() * source.element_size()
        if self.file is not None:
            self.file.make_room()
        buffer = self._pool.take(num_bytes)
        host = buffer[:num_bytes].view(source.dtype).as_strided(source.size(), source.stride())
        saved = Saved(self, call, weakref.ref(tensor), tensor._version, original, host, buffer, encoded=encoded)
        stream = self._stream
        stream.wait(self.device.compute().record(), MADE)
        stream.run(lambda: host.copy_(source, non_blocking=True), "activation out", bytes=num_bytes)
        saved.out = stream.record()
        self.bytes_out += num_bytes
        call.inputs.append(weakref.ref(saved))
        self._known[id(tensor)] = saved
        return saved

    def _let_go(self, call: Call | None) -> None:
        """Free a call's unshared inputs on the device. The model's stream reuses the memory after their copies out."""
        for saved in _alive(call):
            if saved.original is not None and not saved.is_shared:
                self._order(saved)
                saved.is_spoiled = saved.original._version != saved.version
                saved.original = None
                if self.file is not None:
                    self._write(self.file, saved)
                if saved.encoded is not None:  # its size and dtype are kept
                    saved.encoded = saved.encoded._replace(memory=saved.host)

    def _write(self, file: InputFile, saved: Saved) -> None:
        """Start to write an input to the disk. Its buffer goes back to the pool when it is written."""
        buffer, out = saved.buffer, saved.out
        assert buffer is not None
        assert out is not None
        num_bytes = saved.host.numel() * saved.host.element_size()
        saved.record = file.write(buffer[:num_bytes], out, partial(self._pool.give, buffer))
        saved.host, saved.buffer = saved.host.to("meta"), None

    def _read(self, saved: Saved) -> None:
        """Start to read an input from the disk, unless it is on the host."""
        if self.file is None or saved.record is None or saved.buffer is not None or saved.restored is not None:
            return
        num_bytes = saved.record.num_bytes
        buffer = self._pool.take(num_bytes)
        # Copies that are queued on the stream may still read the buffer.
        self.file.read(saved.record, buffer[:num_bytes], self._stream.record())
        meta = saved.host
        saved.host = buffer[:num_bytes].view(meta.dtype).as_strided(meta.size(), meta.stride())
        saved.buffer = buffer

    def _order(self, saved: Saved) -> None:
        if not saved.is_ordered:
            assert saved.out is not None
            self.device.hold_compute(saved.out, KEPT)
            saved.is_ordered = True

    def _fetch(self, saved: Saved) -> Tensor:
        """Return the input on the device, for use on the model's stream, and prefetch the inputs of preceding calls."""
        if self._is_closed:
            raise wrong_state(
                f"backward() cannot read the offloaded input of {saved.call.layer}",
                "checkpointing was removed",
                "Call remove() or engine.destroy() after backward().",
            )
        found = saved.original
        if saved.is_spoiled or (found is not None and found._version != saved.version):
            raise wrong_state(
                f"The checkpointed layer {saved.call.layer} cannot run again in backward",
                "an in-place operation has changed one of its inputs",
                "Write the result to a new tensor, or do not checkpoint this layer.",
            )
        if found is not None:
            self._order(saved)  # Backward may free the original, so the model's stream must wait for its copy out.
        else:
            self._bring(saved)
            assert saved.back is not None
            self.device.hold_compute(saved.back, BACK)
            found, saved.restored = saved.restored, None  # A second backward through the same graph copies it again.
            if saved.encoded is not None and found is not None:
                found = decode(saved.encoded._replace(memory=found))
        if not saved.is_shared:  # A shared input does not tell which call comes next.
            self._prefetch(saved.call)
        assert found is not None
        return found

    def _prefetch(self, call: Call) -> None:
        """Start the copies back of the inputs of the `ahead` calls before this one, after the reads of as many more."""
        calls = list(itertools.islice(_before(call), 2 * self._ahead if self.file is not None else self._ahead))
        away = [[saved for saved in _alive(before) if saved.original is None] for before in calls]
        for saved in itertools.chain(*away):
            self._read(saved)
        for saved in itertools.chain(*away[: self._ahead]):
            self._bring(saved)

    def _bring(self, saved: Saved) -> None:
        """Start the copy back, unless it was started before."""
        if saved.restored is not None:
            return
        self._read(saved)
        if saved.record is not None:
            saved.record.wait()
        host = saved.host
        tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._where)
        num_bytes = tensor.numel() * tensor.element_size()
        stream = self._stream
        stream.wait(self.device.compute().record(), ROOM)
        stream.run(lambda: tensor.copy_(host, non_blocking=True), "activation back", bytes=num_bytes)
        saved.restored, saved.back = tensor, stream.record()
        self.bytes_back += num_bytes
        if saved.record is not None and saved.buffer is not None:  # another backward reads it from the disk again
            self._pool.give(saved.buffer)
            saved.host, saved.buffer = host.to("meta"), None

    def _forget(self, saved: Saved) -> None:
        """Release the memory of an input that no graph refers to, after its backward or when the graph was dropped."""
        if self._is_closed:
            return
        if saved.original is not None and not saved.is_ordered:
            self._outlive_copies(saved.original if saved.encoded is None else saved.encoded.memory)
        if saved.restored is not None:
            self._outlive_copies(saved.restored)
        if saved.record is not None and self.file is not None:
            self.file.free(saved.record, partial(self._give, saved.buffer))  # the buffer may still be read into
        else:
            self._give(saved.buffer)

    def _give(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._pool.give(buffer)

    def _outlive_copies(self, tensor: Tensor) -> None:
        """Make the allocator reuse the tensor's memory only after the copies that are queued on the stream.

        This function may run in any thread and in the garbage collector, so it must not wait for a copy itself. On the
        CPU the queued copy holds references to its tensors.
        """
        if tensor.is_cuda:
            self._stream.run(lambda: tensor.record_stream(torch.cuda.current_stream(tensor.device)))

    def close(self) -> None:
        """Release threads and page-locked memory. A later backward that reads an input raises RuntimeError."""
        self._is_closed = True
        if self.file is not None:
            self.file.close()
        self._pool.clear()
        self.device.close()


class HostPool:
    """A pool of page-locked buffers. Buffers are kept between steps, because page-locking takes longer than a copy.

    A new buffer is allocated only if no free buffer is large enough. It replaces the largest free buffer, if any.
    Even if sequence lengths change, there are never more buffers than were in use at the same time, and no buffer is
    larger than the largest request.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.num_bytes = 0
        self._device, self._stream = device, stream
        self._free: list[Tensor] = []
        self._returned: deque[Tensor] = deque()  # filled by any thread and by the garbage collector, so without a lock
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of at least this size. Copies that are queued on the stream may still use it."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            self._free.sort(key=Tensor.numel)
            for i, buffer in enumerate(self._free):
                if buffer.numel() >= num_bytes:
                    return self._free.pop(i)
            if self._free:
                self._stream.synchronize()  # Copies from or to the buffer must be complete before it is unlocked.
                self._device.release(dropped := self._free.pop())
                self.num_bytes -= dropped.numel()
            self.num_bytes += num_bytes
            return self._device.pinned(num_bytes, torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer whose contents are not needed any more."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Drop all buffers. `Device.close` unlocks their memory."""
        with self._lock:
            self._free.clear()
            self._returned.clear()
            self.num_bytes = 0


def _before(call: Call) -> Iterator[Call]:
    """The calls before this one, the last one first."""
    while call.previous is not None and (before := call.previous()) is not None:
        yield before
        call = before


def _alive(call: Call | None) -> Iterator[Saved]:
    """Inputs of a call that a graph still refers to."""
    for reference in call.inputs if call is not None else ():
        saved = reference()
        if saved is not None:
            yield saved


def hooks_for(
    found: Mapping[tuple[object, ...], T], is_worth_it: Callable[[Tensor], bool], restore: Callable[[T], Tensor]
) -> saved_tensors_hooks:
    """Hooks with which autograd saves an object of `found` instead of a tensor. `found`: objects by memory_key of the
    tensor. `restore` returns the tensor for such an object in backward.
    """

    def pack(tensor: Tensor) -> Tensor | T:
        return found.get(memory_key(tensor), tensor) if is_worth_it(tensor) else tensor

    def unpack(saved: Tensor | T) -> Tensor:
        return saved if isinstance(saved, Tensor) else restore(saved)

    return saved_tensors_hooks(pack, unpack)


def is_large(tensor: Tensor, min_bytes: int) -> bool:
    """Whether a tensor is a floating-point activation of at least this size. A Parameter is not an activation, and
    other subclasses of Tensor may hold their data elsewhere.
    """
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return is_plain and tensor.is_floating_point() and tensor.numel() * tensor.element_size() >= min_bytes


def memory_key(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors if they have the same memory, dtype and layout."""
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in any order of dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
