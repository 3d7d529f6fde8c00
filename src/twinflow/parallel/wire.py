# SPDX-License-Identifier: Apache-2.0
"""Messages between pipeline ranks: activations to the next stage, gradients to the previous stage.

A header precedes each value, so shapes may differ between micro-batches. gloo carries the headers and host tensors.
GPU tensors pass through the host if the process group uses gloo. With NCCL they are sent directly between GPUs. That
path needs a GPU for each rank, and the tests do not run it.

Threads of a rank:

- The computing thread calls `expect`, `send` and `receive`. Sending does not block.
- One thread for each sending rank receives its messages in the order of the schedule, which every rank knows, and
  puts them into `_mailbox`. So two ranks never wait for each other to receive. With NCCL each thread has its own stream
  and synchronizes it before a message is put into the mailbox.
- One thread waits for sends and keeps the sent memory alive until they are done. With NCCL it synchronizes its stream.

The condition `_changed` guards the mailbox, the expected messages and the error. It is notified on every change.

Errors: gloo can end a wait only by a timeout, which closes all connections of its group. So a rank that fails starts a
wait with a short timeout on purpose. Then its threads return, and ranks that wait for it notice. Before that it writes
the error to the store of the process group. Only the first error is kept there, and the other ranks read it. A killed
process writes no error. In that case the other ranks report that its connection is closed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from twinflow.dist.group import TIMEOUT, Sending, backend_for, new_group, own_stream, use_here
from twinflow.errors import invalid_value, wrong_state
from twinflow.launch.store import group_store, own_keys, wait_for
from twinflow.parallel.schedules import Action, Schedule

T = TypeVar("T")
Value = tuple[Tensor | None, ...] | list[Tensor | None]  # the receiver gets a list if the sender's value is one
# A received value: each tensor, and whether it requires a gradient.
Message = tuple[tuple[Tensor | None, bool], ...] | list[tuple[Tensor | None, bool]]

HEADER_NUMEL: Final = 512  # int64 numbers in a header; constant, because the receiver has to know the size
DTYPES: Final = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint16, torch.uint32, torch.uint64),
)
_KINDS: Final = ("F", "B")
_PATIENCE_S: Final = 0.5  # interval of the checks for a timeout
HANG_UP_S: Final = 5.0  # longer than threads need to return after connections are closed
_CAUSE_CHARS: Final = 500  # limit of an error's text for other ranks


class Key(NamedTuple):
    """Identifies a message: the input of a stage from the previous one (F), or the gradient from the next stage (B)."""

    kind: str
    stage: int  # stage that gets the message
    micro_batch: int
    sender: int  # pipeline rank, like receiver
    receiver: int

    def __str__(self) -> str:
        value = "input" if self.kind == "F" else "gradient of the output"
        return f"the {value} of stage {self.stage}, micro-batch {self.micro_batch}, from pipeline rank {self.sender}"


class Spec(NamedTuple):
    """Description of a tensor in a header."""

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]


def needed(schedule: Schedule, action: Action) -> Key | None:
    """The message that an action waits for. None if the action needs no message from another stage."""
    kind, stage, i = action
    if kind == "W" or (stage == 0 if kind == "F" else stage == schedule.num_stages - 1):
        return None
    other = stage - 1 if kind == "F" else stage + 1
    return Key("F" if kind == "F" else "B", stage, i, schedule.rank_of(other), schedule.rank_of(stage))


def made(schedule: Schedule, action: Action) -> Key | None:
    """The message with the result of an action. None if no other stage needs the result."""
    kind, stage, i = action
    if kind == "W" or (stage == schedule.num_stages - 1 if kind == "F" else stage == 0):
        return None
    other = stage + 1 if kind == "F" else stage - 1
    return Key("F" if kind == "F" else "B", other, i, schedule.rank_of(stage), schedule.rank_of(other))


def incoming(schedule: Schedule, index: int) -> dict[int, tuple[Key, ...]]:
    """The messages that each other rank sends to rank `index`, in the order of sending."""
    found = {}
    for sender, actions in enumerate(schedule.actions):
        keys = tuple(key for key in (made(schedule, action) for action in actions) if key and key.receiver == index)
        if keys and sender != index:
            found[sender] = keys
    return found


def encode(key: Key, value: Value) -> Tensor:
    """Encode the header of a message."""
    numbers = [_KINDS.index(key.kind), *key[1:], len(value), int(isinstance(value, list))]
    for tensor in value:
        if tensor is None:
            numbers += [-1]
        elif tensor.dtype not in DTYPES:
            remedy = "Convert the tensor in the layer that returns it."
            raise invalid_value("The dtype of a tensor between stages", tensor.dtype, DTYPES, remedy)
        else:
            numbers += [DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.dim(), *tensor.shape]
    if len(numbers) > HEADER_NUMEL:
        name = f"The length of the header with the shapes of {len(value)} tensors between stages"
        remedy = "Return fewer tensors from the last layer of the stage."
        raise invalid_value(name, len(numbers), f"at most {HEADER_NUMEL}", remedy)
    header = torch.zeros(HEADER_NUMEL, dtype=torch.int64)
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def decode(header: Tensor) -> tuple[Key, tuple[Spec | None, ...] | list[Spec | None]]:
    """Decode a header: the key, and the description of each tensor, in a list if the value is one."""
    numbers = iter(header.tolist())
    kind, stage, micro_batch, sender, receiver, num_tensors, is_list = (next(numbers) for _ in range(7))
    specs = [_spec(numbers) for _ in range(num_tensors)]
    return Key(_KINDS[kind], stage, micro_batch, sender, receiver), specs if is_list else tuple(specs)


def _spec(numbers: Iterator[int]) -> Spec | None:
    dtype = next(numbers)
    if dtype < 0:
        return None
    requires_grad, num_dims = bool(next(numbers)), next(numbers)
    return Spec(DTYPES[dtype], requires_grad, tuple(next(numbers) for _ in range(num_dims)))


class Wire:
    """The connections of this rank. `ranks`: global ranks of the pipeline, in order. `index`: position of this rank.

    Values are tuples or lists of tensors and None. All ranks of the pipeline have to build their `Wire` at the same
    time. Only one thread may use it.
    """

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device, timeout: timedelta = TIMEOUT) -> None:
        self.sent_bytes = 0  # bytes of tensors sent to other ranks, without headers
        self.device = device
        self._index, self._timeout_s = index, timeout.total_seconds()
        self._links = _Links(ranks, index, device, timeout)
        self._first = _FirstCause(ranks, index)
        self._giving_up = threading.Lock()
        self._changed = threading.Condition()  # guards the attributes below up to _is_closed
        self._mailbox: dict[Key, Message] = {}
        self._expected: dict[int, deque[Key]] = {}  # by sender
        self._error: BaseException | None = None  # first error of this rank
        self._cause = ""  # error of the rank that failed first
        self._is_closed = False
        self._sent: queue.SimpleQueue[tuple[int, Sending] | None] = queue.SimpleQueue()  # receiver and message
        self._threads = [self._start(self._wait_sent)] if len(ranks) > 1 else []

    def expect(self, keys: Mapping[int, Sequence[Key]]) -> None:
        """Announce the next messages, from each sender in its order. Messages are received only after this call."""
        with self._changed:
            self._check()
            for sender in keys.keys() - self._expected.keys():
                self._expected[sender] = deque()
                self._threads.append(self._start(self._receive_from, sender))
            for sender, some in keys.items():
                self._expected[sender].extend(some)
            self._changed.notify_all()

    def send(self, key: Key, value: Value) -> None:
        """Send a value. Returns at once. The caller may then free the tensors, but must not change them."""
        assert key.sender == self._index
        with self._changed:
            self._check()
            if key.receiver == self._index:
                message: list[tuple[Tensor | None, bool]] = [
                    (one, False) if one is None else (one.detach(), one.requires_grad) for one in value
                ]
                self._mailbox[key] = message if isinstance(value, list) else tuple(message)
                return
        tensors = [_bytes_of(one) for one in value if one is not None and one.numel()]
        self.sent_bytes += sum(one.numel() for one in tensors)
        try:
            for sending in self._links.send(key.receiver, encode(key, value), tensors):
                self._sent.put((key.receiver, sending))
        except RuntimeError as error:
            self._give_up(_not_sent(key.receiver, error))
            raise self._failure() from self._error

    def receive(self, key: Key) -> Value:
        """Wait for a message. A tensor is a leaf that requires a gradient if the sender's tensor required one."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while key not in self._mailbox:
                self._check()
                if time.monotonic() > deadline:
                    late = f"The message with {key} did not come within {self._timeout_s:.0f} s."
                    raise RuntimeError(f"{late} Look for the first error in the logs of all ranks.")
                self._changed.wait(_PATIENCE_S)
            message = self._mailbox.pop(key)
        values = [
            None if one is None else self._links.arrived(one).requires_grad_(requires_grad)
            for one, requires_grad in message
        ]
        return values if isinstance(message, list) else tuple(values)

    def check(self) -> None:
        """Raise RuntimeError if the pipeline has failed or is closed."""
        with self._changed:
            self._check()

    def fail(self, error: BaseException) -> None:
        """Report an error. Ranks that wait for this one fail soon."""
        self._give_up(error)
        self._first.wait_until_known()

    def close(self) -> None:
        """Close the connections after the last batch. In the middle of a batch this is a failure of this rank."""
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
                self._first.after(RuntimeError("The pipeline was closed in the middle of a batch."))
            self._links.hang_up()
            self._first.wait_until_known()
        for thread in self._threads:  # sends may still be running, and other ranks wait for them
            thread.join(self._timeout_s if is_done else HANG_UP_S)

    def _check(self) -> None:
        if self._error is not None:
            raise self._failure() from self._error
        if self._is_closed:
            raise wrong_state("The pipeline cannot send or receive", "it is closed", "Build a new engine.")

    def _failure(self) -> RuntimeError:
        return RuntimeError(f"The pipeline has failed, first on {self._cause}")

    def _give_up(self, error: BaseException) -> None:
        """Record the first error and close the connections.

        Any thread may call this, so that other ranks need not wait until this rank has computed.
        """
        with self._giving_up:
            if self._error is not None:
                return
            cause = self._first.after(error)  # before other ranks notice the closed connections
            with self._changed:
                self._error, self._cause = error, cause
                self._changed.notify_all()
            self._links.hang_up()

    # Functions of the threads.

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
        """Receive a message into the mailbox.

        This is a separate function, so that the message is not referenced while the thread waits for the next one.
        """
        try:
            message = self._links.receive(sender, keys[0])
        except RuntimeError as error:
            cause = f"Receiving from pipeline rank {sender} failed. Look for the first error in its log. Cause: {error}"
            raise RuntimeError(cause) from error
        with self._changed:
            self._mailbox[keys.popleft()] = message
            self._changed.notify_all()

    def _is_next(self, keys: deque[Key]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: keys or self._is_closed or self._error is not None)
            return not self._is_closed and self._error is None

    def _wait_sent(self) -> None:
        """Keep sent memory alive until the send is done. A gloo send can be waited for, but not polled."""
        while (sent := self._sent.get()) is not None:
            try:
                sent[1].wait()
            except RuntimeError as error:
                raise _not_sent(sent[0], error) from error
            del sent


class _Links:
    """Process groups for messages: "up" to later ranks, and "down" to earlier ranks.

    Each group carries only one direction between two ranks. Two ranks that send to each other over one NCCL
    communicator would deadlock. The kind of a message does not determine its direction: a ring of two ranks sends both
    kinds in both directions.
    """

    def __init__(self, ranks: Sequence[int], index: int, device: torch.device, timeout: timedelta) -> None:
        self._index, self._device = index, device
        self._is_direct = len(ranks) > 1 and backend_for(device) == "nccl"
        self._headers = [new_group("gloo", ranks, timeout) for _ in ("down", "up")]
        self._bodies = self._headers
        if self._is_direct:
            self._bodies = [new_group("nccl", ranks, timeout, has_collectives=False) for _ in ("down", "up")]

    def send(self, receiver: int, header: Tensor, tensors: Sequence[Tensor]) -> Iterator[Sending]:
        """Start to send the header and the tensors."""
        up = receiver > self._index
        yield self._headers[up].send(header, receiver)
        for tensor in tensors:
            yield self._bodies[up].send(tensor if self._is_direct else tensor.cpu(), receiver)

    def receive(self, sender: int, key: Key) -> Message:
        """Receive the next message of a rank, which must be `key`. Blocks until the message is complete."""
        up = sender < self._index
        header = torch.empty(HEADER_NUMEL, dtype=torch.int64)
        self._headers[up].receive([header], sender)
        found, specs = decode(header)
        if found != key:
            differ = (
                "The schedules of the ranks differ. Use the same config and the same number of micro-batches on all."
            )
            raise RuntimeError(f"A message with {found} came, but {key} was expected. {differ}")
        device = self._device if self._is_direct else torch.device("cpu")
        message: list[tuple[Tensor | None, bool]] = []
        for spec in specs:
            tensor = None if spec is None else torch.empty(spec.shape, dtype=spec.dtype, device=device)
            message.append((tensor, spec is not None and spec.requires_grad))
        tensors = [_bytes_of(tensor) for tensor, _ in message if tensor is not None and tensor.numel()]
        self._bodies[up].receive(tensors, sender)
        return message if isinstance(specs, list) else tuple(message)

    def arrived(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, ready for the stream of the computing thread."""
        return use_here(tensor.to(self._device))

    def beside(self) -> AbstractContextManager[None]:
        """Give a thread its own stream, so that its waits do not delay the computation."""
        return own_stream(self._device) if self._is_direct else nullcontext()

    def hang_up(self) -> None:
        """Close the connections (see the module's docstring)."""
        for group in self._headers:
            group.hang_up()


class _FirstCause:
    """The first error of a pipeline, in the store of the process group. Every rank reads the same error.

    The store ends with the process that hosts it. So every access runs on a daemon thread with a time limit (`_soon`).
    """

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self._index, self._num_ranks = index, len(ranks)
        kind = f"pipeline/{'-'.join(map(str, ranks))}"
        self._keys = own_keys(group_store(), kind, index) if len(ranks) > 1 else None
        self._has_waited = False

    def after(self, error: BaseException) -> str:
        """Report an error. Returns the rank and the text of the first reported error, which may be this one."""
        text = f"{type(error).__name__}: {error}"[:_CAUSE_CHARS].encode(errors="replace").decode()
        own = f"pipeline rank {self._index}: {text}"
        return _soon(lambda: self._tell(own)) or own

    def wait_until_known(self) -> None:
        """Wait once until the other ranks have read the error, because the store may end with this process."""
        keys, has_waited, self._has_waited = self._keys, self._has_waited, True
        if keys is not None and not has_waited:
            names = [f"known/{i}" for i in range(self._num_ranks)]
            _soon(lambda: wait_for(keys, names, HANG_UP_S))

    def _tell(self, own: str) -> str:
        if self._keys is None:
            return own
        first = self._keys.compare_set("first", "", own)
        self._keys.set(f"known/{self._index}", "1")
        return first.decode(errors="replace")


def _soon(work: Callable[[], T]) -> T | None:
    """The result of `work`. None if it fails or does not return in time."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    with suppress(RuntimeError):  # a thread cannot be started while the interpreter shuts down
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(HANG_UP_S)
    return results[0] if results else None


def _not_sent(receiver: int, error: RuntimeError) -> RuntimeError:
    return RuntimeError(f"A message to pipeline rank {receiver} could not be sent: {error}")


def _bytes_of(tensor: Tensor) -> Tensor:
    """The contiguous memory of a tensor as bytes. gloo does not support all dtypes, and no backend supports strides."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
