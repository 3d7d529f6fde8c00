"""Inputs of checkpointed layers on the host between forward and backward.

Out: when a layer is about to run, its large inputs are copied to page-locked memory on a stream of their own, beside
the layer's work. The last few originals stay on the device: they are the first that backward wants. An older one is let
go after the model's stream has been told to wait for its copy. The host never waits, and memory that is freed then is
in order on that stream: a thread that queues a whole forward ahead of the GPU does not keep every input by doing so.

Back: when backward asks for an input, those of the layers before it start on their way too.

One stream copies in both directions, so a host buffer can be used again as soon as nobody wants what is in it: whatever
still reads or writes it is queued before the next copy.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from twinflow.device import Device, Event, Stream

MIN_BYTES = 1 << 20  # smaller inputs stay: a copy would cost more than it gives
STREAM = "activations"
# Sync points.
MADE = "activation made"  # a copy out starts after the work that made the input
KEPT = "activation kept"  # an original's memory is used again after its copy out
ROOM = "activation room"  # a copy in starts after the work that used its memory before
BACK = "activation back"  # backward uses an input after its copy in


@dataclass(eq=False)
class Call:
    """One call of a layer."""

    layer: str
    previous: weakref.ref[Call] | None  # made before it, so its inputs are wanted after these
    inputs: list[weakref.ref[Saved]] = field(default_factory=list)


@dataclass(eq=False)
class Saved:
    """One input between forward and backward."""

    owner: Offload
    call: Call
    source: weakref.ref[Tensor]  # what the layer was given, to know it when it is given to another layer
    version: int
    original: Tensor | None  # while it is on the device
    size: torch.Size
    stride: tuple[int, ...]
    host: Tensor  # with the same layout
    buffer: Tensor  # which `host` is a view of
    out: Event | None = None
    back: Event | None = None
    restored: Tensor | None = None  # on its way back, or there and not asked for yet
    is_shared: bool = False  # several layers are given it: it stays
    is_spoiled: bool = False  # written to before its copy was known to be over
    is_ordered: bool = False  # the model's stream waits for `out`

    def __del__(self) -> None:
        self.owner._forget(self)


class Offload:
    """Takes inputs to the host and brings them back. Those of `window` layers on their way out and of `ahead` layers on
    their way back are on the device beside those of the layer at work."""

    def __init__(
        self, device: Device, where: torch.device, min_bytes: int = MIN_BYTES, window: int = 2, ahead: int = 2
    ) -> None:
        self.device = device
        self.bytes_out = 0
        self.bytes_back = 0
        self._where, self._min_bytes, self._window, self._ahead = where, min_bytes, window, ahead
        self._stream = device.stream(STREAM)  # now: the garbage collector must not have to ask for it
        self._pool = HostPool(device, self._stream)
        self._leaving: deque[weakref.ref[Call]] = deque()  # oldest first
        self._known: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()  # by id of the source
        self._last: weakref.ref[Call] | None = None
        self._is_closed = False

    @property
    def host_bytes(self) -> int:
        """Page-locked memory in use or kept for the next step."""
        return self._pool.num_bytes

    def saving(self, tensors: Sequence[Tensor], layer: str) -> saved_tensors_hooks:
        """Around a checkpointed call with these inputs: what is saved of them is on the host.

        Whatever runs inside the call is under the checkpoint's own hooks: only inputs come by here.
        """
        astray = next((tensor.device for tensor in tensors if tensor.is_cuda and tensor.device != self._where), None)
        if astray is not None:
            raise RuntimeError(
                f"{layer} is given a tensor on {astray}, but its inputs are offloaded from {self._where}. Move the "
                "model first, then checkpoint its layers; a model on several GPUs is not supported."
            )
        while len(self._leaving) >= self._window:
            self._let_go(self._leaving.popleft()())
        call = Call(layer, self._last)
        found = {_memory(tensor): self._save(tensor, call) for tensor in tensors if self._is_worth_it(tensor)}
        if call.inputs:
            self._last = weakref.ref(call)
            self._leaving.append(self._last)

        def pack(tensor: Tensor) -> Tensor | Saved:
            return found.get(_memory(tensor), tensor) if self._is_worth_it(tensor) else tensor

        def unpack(saved: Tensor | Saved) -> Tensor:
            return saved.owner._fetch(saved) if isinstance(saved, Saved) else saved

        return saved_tensors_hooks(pack, unpack)

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor  # a Parameter stays where it is, and of other kinds only their makers know the bytes
            and tensor.is_floating_point()
            and tensor.layout == torch.strided
            and tensor.device == self._where
            and tensor.numel() * tensor.element_size() >= self._min_bytes
            and not tensor.is_inference()
            and _is_dense(tensor)
        )

    def _save(self, tensor: Tensor, call: Call) -> Saved:
        """Start the copy out."""
        known = self._known.get(id(tensor))
        if known is not None and known.source() is tensor and known.version == tensor._version:
            # A mask, or the output of an encoder: while other layers use it, its memory is not free anyway.
            known.original, known.is_shared = tensor.detach(), True
            return known
        original, num_bytes = tensor.detach(), tensor.numel() * tensor.element_size()
        buffer = self._pool.take(num_bytes)
        host = buffer[:num_bytes].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        saved = Saved(
            self, call, weakref.ref(tensor), tensor._version, original, tensor.size(), tensor.stride(), host, buffer
        )
        stream = self._stream
        stream.wait(self.device.compute().record(), MADE)
        stream.run(_copy(host, original), "activation out", bytes=num_bytes)
        saved.out = stream.record()
        self.bytes_out += num_bytes
        call.inputs.append(weakref.ref(saved))
        self._known[id(tensor)] = saved
        return saved

    def _let_go(self, call: Call | None) -> None:
        """The copies out are waited for by the model's stream, so the originals' memory may be used again there."""
        for saved in _alive(call):
            if saved.original is not None and not saved.is_shared:
                self._order(saved)
                saved.is_spoiled = saved.original._version != saved.version
                saved.original = None

    def _order(self, saved: Saved) -> None:
        if not saved.is_ordered:
            assert saved.out is not None
            self.device.hold_compute(saved.out, KEPT)
            saved.is_ordered = True

    def _fetch(self, saved: Saved) -> Tensor:
        """The input on the device, for the model's stream; those before it are sent for."""
        if self._is_closed:
            raise RuntimeError(
                f"backward wants an input of {saved.call.layer} that was on the host, but checkpointing was removed. "
                "Call backward() first, then remove() or engine.destroy()."
            )
        found = saved.original
        if saved.is_spoiled or (found is not None and found._version != saved.version):
            raise RuntimeError(
                f"an input of the checkpointed layer {saved.call.layer} was changed by an in-place operation before "
                "its backward: the layer cannot run again. Write the result to a new tensor, or leave this layer out."
            )
        if found is not None:
            self._order(saved)  # when backward frees it, the copy out is over
        else:
            self._bring(saved)
            assert saved.back is not None
            self.device.hold_compute(saved.back, BACK)
            found, saved.restored = saved.restored, None  # a second backward through the same graph copies it again
        if not saved.is_shared:  # it belongs to many calls, and says nothing of which come next
            self._prefetch(saved.call)
        assert found is not None
        return found

    def _prefetch(self, call: Call) -> None:
        """Send for the inputs of the calls before it."""
        for _ in range(self._ahead):
            before = call.previous() if call.previous is not None else None
            if before is None:
                return
            for saved in _alive(before):
                if saved.original is None:
                    self._bring(saved)
            call = before

    def _bring(self, saved: Saved) -> None:
        """Start the copy in, unless it has started."""
        if saved.restored is not None:
            return
        tensor = torch.empty_strided(saved.size, saved.stride, dtype=saved.host.dtype, device=self._where)
        num_bytes = tensor.numel() * tensor.element_size()
        stream = self._stream
        stream.wait(self.device.compute().record(), ROOM)
        stream.run(_copy(tensor, saved.host), "activation back", bytes=num_bytes)
        saved.restored, saved.back = tensor, stream.record()
        self.bytes_back += num_bytes

    def _forget(self, saved: Saved) -> None:
        """Nobody can ask for it any more: after its backward, or with a graph that was dropped."""
        if self._is_closed:
            return
        if saved.original is not None and not saved.is_ordered:
            self._outlive_copies(saved.original)
        if saved.restored is not None:
            self._outlive_copies(saved.restored)
        self._pool.give(saved.buffer)

    def _outlive_copies(self, tensor: Tensor) -> None:
        """Freed with a copy under way that nobody waits for: the allocator is told to. Here, in any thread, even in the
        garbage collector, we must not wait ourselves. On the CPU the queued copy holds its tensors."""
        if tensor.is_cuda:
            self._stream.run(lambda: tensor.record_stream(torch.cuda.current_stream(tensor.device)))

    def close(self) -> None:
        """Give threads and page-locked memory back; a backward that is still to come is refused."""
        self._is_closed = True
        self._pool.clear()
        self.device.close()


class HostPool:
    """Page-locked buffers, kept from step to step: to make one takes longer than to copy into it.

    A new one is made only when no free one is large enough, and then replaces one that was too small: however lengths
    change, there are never more buffers than were in use at one time, nor larger ones than were asked for.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.num_bytes = 0
        self._device, self._stream = device, stream
        self._free: list[Tensor] = []
        self._returned: deque[Tensor] = deque()  # by any thread, and by the garbage collector: without a lock
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of at least this size; copies queued on the stream may still use it."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            self._free.sort(key=Tensor.numel)
            for i, buffer in enumerate(self._free):
                if buffer.numel() >= num_bytes:
                    return self._free.pop(i)
            if self._free:
                self._stream.synchronize()  # what is copied from or to it must be over
                self._device.release(dropped := self._free.pop())
                self.num_bytes -= dropped.numel()
            self.num_bytes += num_bytes
            return self._device.pinned(num_bytes, torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Nobody wants what is in it."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Let go of all; the device unlocks them when it is closed."""
        with self._lock:
            self._free.clear()
            self._returned.clear()
            self.num_bytes = 0


def _alive(call: Call | None) -> Iterator[Saved]:
    """Inputs of a call that somebody may still ask for."""
    for reference in call.inputs if call is not None else ():
        saved = reference()
        if saved is not None:
            yield saved


def _copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    """A copy that lets go of the source when it is done: a thread keeps the last work it did."""
    pair = [(target, source)]

    def work() -> None:
        to, what = pair.pop()
        to.copy_(what, non_blocking=True)

    return work


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Tensors for which this is the same have the same bytes in the same layout."""
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    """No gaps and no element twice, in whatever order of dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
