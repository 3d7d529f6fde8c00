"""What pipeline ranks send each other: activations forward, gradients back.

A header goes before each value, so shapes may differ from one micro-batch to the next. Sending never waits. One thread
for each rank that sends to this one takes its messages as they come, in the order in which they are sent, which every
rank knows from the schedule; so two ranks never wait for each other to receive.

gloo carries headers, and tensors of the host; those of a GPU pass through the host where the process group is gloo's.
Between GPUs with NCCL the tensors go directly. That path needs a GPU for each rank; tests do not run it.

When something fails: gloo has no way to end a wait but one that runs out of time, which closes all connections of its
group. So a rank that gives up lets such a wait run out: its threads come back, and ranks that wait for it learn of it.
Before that it leaves word of what went wrong in the process group's store, where only the first to come does, and where
the others look. A process that is killed leaves none: what is told then is that its connection is closed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import product
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from twinflow.dist.group import TIMEOUT, Group, backend_for, new_group
from twinflow.errors import invalid_value
from twinflow.parallel.first_cause import HANG_UP_S, FirstCause
from twinflow.parallel.schedules import Action, Schedule

Value = tuple[Tensor | None, ...]

HEADER_NUMEL: Final = 512  # of int64, always as many: a receiver has to know
DTYPES: Final = tuple(
    getattr(torch, name)
    for name in (
        *("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"),
    )
)
_KINDS: Final = ("F", "B")
_PATIENCE_S: Final = 0.5  # between two looks at the clock
_UNUSED_TAG: Final = 1  # messages have tag 0


class Key(NamedTuple):
    """A message: what a stage takes from the one before (F), or the gradient that it gets from the one behind (B)."""

    kind: str
    stage: int  # that takes it
    micro_batch: int
    sender: int  # pipeline ranks
    receiver: int


class Spec(NamedTuple):
    """A tensor as a header tells of it."""

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]


class Message(NamedTuple):
    """A value that has come."""

    tensors: Value
    requires_grad: tuple[bool, ...]


def needed(schedule: Schedule, action: Action) -> Key | None:
    """The message that an action waits for; None where it needs none from another stage."""
    kind, stage, i = action
    if kind == "W" or (stage == 0 if kind == "F" else stage == schedule.num_stages - 1):
        return None
    other = stage - 1 if kind == "F" else stage + 1
    return Key("F" if kind == "F" else "B", stage, i, schedule.rank_of(other), schedule.rank_of(stage))


def made(schedule: Schedule, action: Action) -> Key | None:
    """The message that an action's result is."""
    kind, stage, i = action
    if kind == "W" or (stage == schedule.num_stages - 1 if kind == "F" else stage == 0):
        return None
    other = stage + 1 if kind == "F" else stage - 1
    return Key("F" if kind == "F" else "B", other, i, schedule.rank_of(stage), schedule.rank_of(other))


def incoming(schedule: Schedule, index: int) -> dict[int, tuple[Key, ...]]:
    """What comes from which other rank, in the order in which that one makes it."""
    found = {}
    for sender, actions in enumerate(schedule.actions):
        keys = tuple(key for key in (made(schedule, action) for action in actions) if key and key.receiver == index)
        if keys and sender != index:
            found[sender] = keys
    return found


def encode(key: Key, value: Value) -> Tensor:
    """The header of a message."""
    numbers = [_KINDS.index(key.kind), *key[1:], len(value)]
    for tensor in value:
        if tensor is None:
            numbers += [-1]
        elif tensor.dtype not in DTYPES:
            raise invalid_value("dtype between stages", tensor.dtype, DTYPES)
        else:
            numbers += [DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
    if len(numbers) > HEADER_NUMEL:
        raise invalid_value(
            "tensors between stages", len(value), f"what a header of {HEADER_NUMEL} numbers can tell of"
        )
    header = torch.zeros(HEADER_NUMEL, dtype=torch.int64)
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def decode(header: Tensor) -> tuple[Key, tuple[Spec | None, ...]]:
    """What `encode` was given."""
    numbers = iter(header.tolist())
    kind, stage, micro_batch, sender, receiver, num_tensors = (next(numbers) for _ in range(6))
    return Key(_KINDS[kind], stage, micro_batch, sender, receiver), tuple(_spec(numbers) for _ in range(num_tensors))


def _spec(numbers: Iterator[int]) -> Spec | None:
    dtype = next(numbers)
    if dtype < 0:
        return None
    requires_grad, num_dims = bool(next(numbers)), next(numbers)
    return Spec(DTYPES[dtype], requires_grad, tuple(next(numbers) for _ in range(num_dims)))


class Wire:
    """This rank's end. `ranks`: global ranks of the pipeline, in order; this is number `index`. One thread uses it.

    Values are tuples of tensors and None. All ranks of the pipeline have to make theirs at the same time.
    """

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device, timeout: timedelta = TIMEOUT) -> None:
        self.sent_bytes = 0  # of tensors, to other ranks; headers are not in it
        self.device = device
        self._index, self._timeout_s = index, timeout.total_seconds()
        self._links = _Links(ranks, index, device, timeout)
        self._first = FirstCause(ranks, index)
        self._giving_up = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._mailbox: dict[Key, Message] = {}
        self._expected: dict[int, deque[Key]] = {}  # by sender
        self._error: BaseException | None = None  # of this rank
        self._cause = ""  # of the rank that failed first
        self._is_closed = False
        self._sent: queue.SimpleQueue[tuple[int, Any, Tensor] | None] = queue.SimpleQueue()  # with its receiver
        self._threads = [self._start(self._wait_sent)] if len(ranks) > 1 else []

    def expect(self, keys: Mapping[int, Sequence[Key]]) -> None:
        """What comes next, from each sender in its order. Before this nothing is taken from them."""
        with self._changed:
            self._check()
            for sender in keys.keys() - self._expected.keys():
                self._expected[sender] = deque()
                self._threads.append(self._start(self._receive_from, sender))
            for sender, some in keys.items():
                self._expected[sender].extend(some)
            self._changed.notify_all()

    def send(self, key: Key, value: Value) -> None:
        """Returns at once; the tensors may be freed then, but not changed."""
        assert key.sender == self._index
        with self._changed:
            self._check()
            if key.receiver == self._index:
                flags = tuple(one is not None and one.requires_grad for one in value)
                self._mailbox[key] = Message(tuple(None if one is None else one.detach() for one in value), flags)
                return
        tensors = [_bytes_of(one) for one in value if one is not None and one.numel()]
        self.sent_bytes += sum(one.numel() for one in tensors)
        try:
            for work, memory in self._links.send(key.receiver, encode(key, value), tensors):
                self._sent.put((key.receiver, work, memory))
        except RuntimeError as error:
            self._give_up(_not_sent(key.receiver, error))
            raise self._failure() from self._error

    def receive(self, key: Key) -> Value:
        """Waits for a message. Tensors whose sender's needed a gradient are leaves that do too."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while key not in self._mailbox:
                self._check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{key} did not come within {self._timeout_s:.0f} s")
                self._changed.wait(_PATIENCE_S)
            message = self._mailbox.pop(key)
        tensors = [None if one is None else self._links.arrived(one) for one in message.tensors]
        for one, flag in zip(tensors, message.requires_grad, strict=True):
            if flag and one is not None:
                one.requires_grad_()
        return tuple(tensors)

    def fail(self, error: BaseException) -> None:
        """Give up: whoever waits for this rank fails too, and soon."""
        self._give_up(error)
        self._first.wait_until_known()

    def close(self) -> None:
        """After the last batch; in the middle of one it is as if this rank had failed."""
        with self._changed:
            was_closed = self._is_closed
            has_failed = self._error is not None
            is_done = not has_failed and not any(self._expected.values())
            self._is_closed = True
            self._changed.notify_all()
        if was_closed:
            return
        self._sent.put(None)
        if not is_done:
            if not has_failed:
                self._first.after(RuntimeError("closed in the middle of a batch"))
            self._links.hang_up()
            self._first.wait_until_known()
        for thread in self._threads:  # what is sent may still be on its way: others wait for it
            thread.join(self._timeout_s if is_done else HANG_UP_S)

    def _check(self) -> None:
        if self._error is not None:
            raise self._failure() from self._error
        if self._is_closed:
            raise RuntimeError("this pipeline is closed")

    def _failure(self) -> RuntimeError:
        return RuntimeError(f"this pipeline has failed, first on {self._cause}")

    def _give_up(self, error: BaseException) -> None:
        """Only the first error counts. Any thread's call: other ranks need not wait until this one has computed."""
        with self._giving_up:
            if self._error is not None:
                return
            cause = self._first.after(error)  # before others can notice
            with self._changed:
                self._error, self._cause = error, cause
                self._changed.notify_all()
            self._links.hang_up()

    # The threads.

    def _start(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=self._watched, args=(work, *args), name=work.__name__, daemon=True)
        thread.start()
        return thread

    def _watched(self, work: Callable[..., None], *args: Any) -> None:
        try:
            with self._links.beside():
                work(*args)
        except BaseException as error:
            self._give_up(error)

    def _receive_from(self, sender: int) -> None:
        keys = self._expected[sender]
        while self._is_next(keys):
            self._take(sender, keys)

    def _take(self, sender: int, keys: deque[Key]) -> None:
        """Into the mailbox. A call of its own: what came must not live on in a thread that waits for the next."""
        try:
            message = self._links.receive(sender, keys[0])
        except RuntimeError as error:
            raise RuntimeError(f"nothing more comes from pipeline rank {sender}: {error}") from error
        with self._changed:
            self._mailbox[keys.popleft()] = message
            self._changed.notify_all()

    def _is_next(self, keys: deque[Key]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: keys or self._is_closed or self._error is not None)
            return not self._is_closed and self._error is None

    def _wait_sent(self) -> None:
        """Keeps what is sent alive until it is gone: gloo's sends can be waited for, but not asked."""
        while (sent := self._sent.get()) is not None:
            try:
                sent[1].wait()
            except RuntimeError as error:
                raise _not_sent(sent[0], error) from error
            del sent


class _Links:
    """Groups of ranks to send over: up, to ranks further on, and down.

    So each carries one direction only between two ranks: with NCCL two that send to each other over one communicator
    would wait for each other. Kinds of messages do not tell them apart: a ring of two ranks sends both kinds both ways.
    """

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device, timeout: timedelta) -> None:
        self._ranks, self._index, self._device = tuple(ranks), index, device
        self._is_direct = len(ranks) > 1 and backend_for(device) == "nccl"
        self._headers = [new_group("gloo", ranks, timeout) for _ in ("down", "up")]
        self._bodies = [new_group("nccl", ranks, timeout) for _ in ("down", "up")] if self._is_direct else self._headers

    def send(self, receiver: int, header: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, Tensor]]:
        """Each part as it is under way, with the memory that it is sent from."""
        up, rank = receiver > self._index, self._ranks[receiver]
        yield _isend(header, rank, self._headers[up]), header
        for tensor in tensors:
            body = tensor if self._is_direct else tensor.cpu()
            yield _isend(body, rank, self._bodies[up]), body

    def receive(self, sender: int, key: Key) -> Message:
        """The next message of a rank, which has to be `key`. A thread's call: waits until all is there."""
        up, rank = sender < self._index, self._ranks[sender]
        header = torch.empty(HEADER_NUMEL, dtype=torch.int64)
        dist.recv(header, rank, group=self._headers[up].handle)
        found, specs = decode(header)
        if found != key:
            raise RuntimeError(f"{found} came where {key} was expected: the ranks' schedules differ")
        device = self._device if self._is_direct else torch.device("cpu")
        tensors = tuple(spec and torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs)
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                dist.recv(_bytes_of(tensor), rank, group=self._bodies[up].handle)
        if self._is_direct:
            torch.cuda.current_stream().synchronize()
        return Message(tensors, tuple(spec is not None and spec.requires_grad for spec in specs))

    def arrived(self, tensor: Tensor) -> Tensor:
        """For the thread that computes: a tensor on the device, ready for its stream."""
        there = tensor.to(self._device)
        if there.is_cuda:
            there.record_stream(torch.cuda.current_stream())  # it may have been allocated on a thread's
        return there

    @contextmanager
    def beside(self) -> Iterator[None]:
        """For a thread: a stream of its own, so that its waiting does not hold up what is computed."""
        if not self._is_direct:
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            yield

    def hang_up(self) -> None:
        """Close the connections: see the module's text. Over one that is closed already nothing can be waited for."""
        for group, rank in product(self._headers, self._ranks):
            if rank != self._ranks[self._index]:
                with suppress(RuntimeError):
                    work = dist.irecv(torch.empty(1), rank, group=group.handle, tag=_UNUSED_TAG)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))


def _not_sent(receiver: int, error: RuntimeError) -> RuntimeError:
    return RuntimeError(f"pipeline rank {receiver} can no longer be sent to: {error}")


def _isend(tensor: Tensor, rank: int, group: Group) -> Any:
    return dist.isend(tensor, rank, group=group.handle)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Its memory, in order: gloo does not know all dtypes, and no backend strides."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
