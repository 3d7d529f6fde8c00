# SPDX-License-Identifier: Apache-2.0
"""A watch inside each training process: no rank waits forever for a rank that failed, died or hangs.

Ranks communicate through a store of torch.distributed, each with its own connection. The threads of a rank:

  thread    owns                        does
  poller    the connection to the store writes the pulse of this rank, reads the cause of a failure, checks the pulse
                                        of the next rank in the ring
  judge     the clock                   measures stalls, detects a store that does not answer, ends the process
  main      `_place`                    records progress in `beat`

The judge never uses the store, because a read from a machine without power does not return. The main thread may be in a
collective that cannot be interrupted. Therefore the judge ends the process with os._exit, some seconds after the cause
is known. `_known` is set when the cause is known, `_released` when the poller has finished with the store, and
`_closed` when this rank has finished in order.

The first cause wins (compare_set). "Connection closed" is not a first cause: a rank with this error has lost another
rank. It waits until the ring has found the dead rank. It publishes its own error only if no rank has published a cause.

The store may be in the process of rank 0. Rank 0 therefore ends last: it waits, for a limited time, until all other
ranks have read the result.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from torch._C._distributed_c10d import Store

from twinflow.errors import invalid_value
from twinflow.launch.environment import is_elastic
from twinflow.launch.store import attempt, own_keys, wait_for
from twinflow.launch.worker import LOST_PEER, Failure, write_all

LONGEST_TICK_S = 2.0
RUNNING, PAUSED, CLOSED, LEFT = "running", "paused", "closed", "left"
TICK_S = 0.2
WAITING_S = 5.0  # time after which ranks that wait for each other in different calls are in a deadlock
PUBLISH_S = 5.0  # time for the poller to publish the failure of this rank
PAUSE_TIMES = 6.0  # limit of a pause, as a multiple of the limit of a step
ENDED_EARLY = "the process ended before the others, without engine.destroy()"
STDERR = 2


@dataclass(frozen=True)
class Timing:
    """Intervals of the watch in seconds. With the defaults, a run ends within 30 s of the death of a rank."""

    poll_s: float = 1.0  # interval between two reads of the store
    dead_after_s: float = 20.0  # A rank without a heartbeat for this time is dead.
    suspect_after_s: float = 6.0  # Replaces dead_after_s after a rank has lost its connection to another one.
    grace_s: float = 3.0  # time for the main thread to end by itself
    hold_s: float = 5.0  # time for which rank 0 keeps the store for the others


@dataclass(frozen=True)
class Cause:
    """The first failure, for which the run ends."""

    rank: int
    step: int
    kind: str  # "error", "death" or "hang"
    error: str
    time_s: float
    attempt: int

    def __str__(self) -> str:
        how = "hung" if self.kind == "hang" else f"failed in step {self.step}"
        return f"rank {self.rank} {how}: {self.error}"

    def failure(self) -> Failure:
        """The cause as a `Failure`, which `twinflow launch` reads from the output."""
        how = "hung" if self.kind == "hang" else f"in step {self.step}"
        return Failure(self.rank, self.time_s, 1, self.attempt, f"{how}: {self.error}")


@dataclass(frozen=True)
class Pulse:
    """The state of a rank, which it publishes each second."""

    rank: int
    life: int  # number of heartbeats
    beats: int  # number of signs of progress
    step: int
    doing: str
    stalled_s: float  # time since the last sign of progress
    limit_s: float  # limit of stalled_s; 0: no limit
    state: str
    is_waiting: bool = False  # in a call for which all ranks must come
    place: int = 0  # number of calls of `beat` and `pause` in this step

    @property
    def is_over(self) -> bool:
        """Whether the rank has made no progress for longer than its limit. There is no limit before the first beat."""
        return self.beats > 0 and 0 < self.limit_s <= self.stalled_s


def hung_rank(me: Pulse, others: Sequence[Pulse]) -> Pulse | None:
    """The rank that hangs, called when this rank has made no progress for too long. None if this rank may be waiting
    for a rank that works.

    A rank works if its pause is within its limit, or if it is not ahead of this rank and made progress recently. If no
    rank works, the rank in the lowest step hangs, or of several in that step the one that made the fewest calls in it:
    the other ranks went further and wait for it. If these are equal too, it is the one with the longest stall. A stall
    alone says little in a run with short steps, because a pulse is up to a second old.
    """
    for other in others:
        waiting_for = other.state == RUNNING and other.beats > 0 and other.step <= me.step
        if waiting_for and other.stalled_s < me.limit_s / 2:
            return None
        if other.state == PAUSED and not other.is_over:
            return None
    here = [pulse for pulse in (me, *others) if pulse.state != CLOSED]
    return min(here, key=lambda pulse: (pulse.step, pulse.place, -pulse.stalled_s))


class AwakeClock:
    """Counts the seconds in which this process runs. Time in which it is stopped (SIGSTOP, a debugger, a suspended
    machine) counts for at most `LONGEST_TICK_S`.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_s = time.monotonic()

    def tick(self) -> None:
        """Advances the clock. The judge calls this method several times a second."""
        now_s = time.monotonic()
        self.now_s += min(now_s - self._last_s, LONGEST_TICK_S)
        self._last_s = now_s


class Watch:
    """Ends this rank when another rank fails, and the other ranks when this rank fails. See the module docstring.

    Create a Watch on every rank, call `beat` in each step and `close` at the end. `store` may be that of the process
    group (`group_store`). `on_failure` is called once with the cause, in a thread, before the process ends.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        hang_timeout_s: float = 600.0,
        on_failure: Callable[[Cause], None] | None = None,
        timing: Timing | None = None,
    ) -> None:
        if not 0 <= hang_timeout_s < float("inf"):
            raise invalid_value("hang_timeout_s", hang_timeout_s, "a finite number of seconds >= 0 (0 means no limit)")
        if not 0 <= rank < world_size:
            raise invalid_value("rank", rank, f"a number from 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.cause: Cause | None = None
        self._timing = timing or Timing()
        self._on_failure = on_failure
        self._store = store  # Kept, because a clone does not keep the server of rank 0 alive.
        self._attempt = attempt()
        self._is_elastic = is_elastic()
        self._keys = own_keys(store, "watch", rank)
        self._pid = os.getpid()
        self._clock = AwakeClock()
        self._place = Pulse(rank, 0, 0, 0, "start", 0.0, float(hang_timeout_s), RUNNING)
        self._num_aside = 0
        self._moved = (0, 0.0)  # number of beats, and the time at which the judge saw it
        self._life = 0
        self._contact_s = self._next_age_s = self._looked_s = self._hang_look_s = self._steps_look_s = 0.0
        self._next_life: tuple[int, int] | None = None
        self._gone: dict[int, Pulse] = {}  # last pulses of ranks that have ended in order
        self._draft: Cause | None = None  # the cause that this rank publishes next
        self._has_lost_peer = self._is_alone = self._has_said = self._compares_steps = False
        self._suspect: Pulse | None = None  # another rank that seems to hang
        self._is_finder = False  # this rank has found the cause, which is another rank that cannot report by itself
        self._lock = threading.Lock()
        self._wake, self._known, self._released, self._closed = (threading.Event() for _ in range(4))
        self._hook()
        self._poller = threading.Thread(target=self._poll, name="twinflow-watch-poll", daemon=True)
        self._judge = threading.Thread(target=self._keep_time, name="twinflow-watch", daemon=True)
        self._poller.start()
        self._judge.start()

    # Methods for the training loop.

    def beat(self, step: int, doing: str = "step") -> None:
        """Records progress: this rank begins `doing` in `step`. The poller publishes it."""
        before = self._place
        place = before.place + 1 if step == before.step else 1
        self._place = replace(before, step=step, doing=doing, beats=before.beats + 1, place=place)

    def compare_steps(self) -> None:
        """From now on it is a failure if this rank is in a step for which it waits in vain, because another rank has
        ended or is in `waiting`. All ranks must call `beat` at the start of each step.
        """
        self._compares_steps = True

    @contextmanager
    def waiting(self, call: str) -> Iterator[None]:
        """A context for a call in which this rank waits for all other ranks."""
        before = self._place
        self._place = replace(before, doing=call, beats=before.beats + 1, is_waiting=True)
        try:
            yield
        finally:
            beats = self._place.beats + 1
            self._place = replace(self._place, doing=before.doing, beats=beats, is_waiting=before.is_waiting)

    def go_on(self) -> None:
        """Records progress of background work, such as a checkpoint: steps that wait for it do not count as hanging."""
        self._num_aside += 1

    @contextmanager
    def pause(self, doing: str = "pause", limit_s: float | None = None) -> Iterator[None]:
        """A context in which no rank counts as hanging for `limit_s` (0: no limit; default: six times the limit of a
        step).

        Use it for long work without a beat: checkpoints, evaluation, downloads. Only the rank that does the work needs
        this context. It also covers ranks that wait for this rank in a collective.
        """
        before = self._place
        limit_s = PAUSE_TIMES * before.limit_s if limit_s is None else limit_s
        place = before.place + 1  # a rank that saves is ahead of one that has not begun to save
        self._place = replace(before, doing=doing, beats=before.beats + 1, limit_s=limit_s, state=PAUSED, place=place)
        try:
            yield
        finally:
            now = self._place
            self._place = replace(before, step=now.step, beats=now.beats + 1, place=now.place)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A context that reports an exception to all ranks, except an exit with code 0."""
        try:
            yield
        except BaseException as error:
            if _is_failure(error):
                self.report(error)
            raise

    def report(self, error: BaseException) -> None:
        """Reports a failure of this rank. Returns when the first cause is known and printed. The first cause may be
        that of another rank.
        """
        if os.getpid() != self._pid or self._closed.is_set():  # A forked child has the hooks, but not the threads.
            return
        own = self._cause("error", _one_line(f"{type(error).__name__}: {error}"))
        if LOST_PEER.search(own.error):
            self._has_lost_peer = True
            self._wake.set()
            # In an elastic run the launcher sees which rank has ended. The others make room for a new group at once.
            is_last = self._is_elastic or self._released.is_set()
            self._known.wait(0.0 if is_last else self._timing.suspect_after_s + 6 * self._timing.poll_s)
            own = self._blame_left() or own
        self._draft = own
        self._wake.set()
        if self._released.is_set() or not self._known.wait(PUBLISH_S):
            self._learn(own)
        self._say()

    def close(self) -> None:
        """Ends the watch of this rank. If an exception is being handled (in a `finally`), it is reported instead."""
        error = sys.exc_info()[1]
        if error is not None and _is_failure(error):
            self.report(error)
        if not self._known.is_set() and not self._closed.is_set():
            self._leave(CLOSED)

    # Methods of the poller, which owns the connection to the store.

    def _poll(self) -> None:
        keys = self._keys
        try:
            while not self._closed.is_set() and not self._known.is_set():
                self._round()
                self._contact_s = self._clock.now_s
                self._wake.wait(self._timing.poll_s)
                self._wake.clear()
            self._tell_pulse()
            keys.set(f"done/{self.rank}", "1")
            if self.rank == 0:
                dead = {self.cause.rank} if self.cause is not None and self.cause.kind == "death" else set()
                others = set(range(1, self.world_size)) - dead
                wait_for(keys, [f"done/{rank}" for rank in sorted(others)], self._timing.hold_s)
        except (RuntimeError, OSError) as error:
            self._lose_store(f"{type(error).__name__}: {error}")
        finally:
            self._released.set()

    def _round(self) -> None:
        keys = self._keys
        self._tell_pulse()
        if self._has_lost_peer:
            keys.set("suspect", "1")
        if self._draft is not None:
            keys.compare_set("cause", "", json.dumps(asdict(self._draft)))
        if keys.check(["cause"]):
            cause = Cause(**json.loads(keys.get("cause")))
            self._is_finder = cause == self._draft
            self._learn(cause)
            return
        host = self._read(0)
        if host is not None and host.state in (CLOSED, LEFT):
            keys.set(f"done/{self.rank}", "1")  # The store may end with the process of rank 0.
        draft = self._look_at_next() or self._look_for_hang() or self._look_at_steps()
        if draft is not None:
            self._draft = draft
            self._wake.set()

    def _tell_pulse(self) -> None:
        self._life += 1
        self._keys.set(f"pulse/{self.rank}", json.dumps(asdict(self._pulse())))

    def _read(self, rank: int) -> Pulse | None:
        if rank not in self._gone:
            key = f"pulse/{rank}"
            if not self._keys.check([key]):
                return None
            pulse = Pulse(**json.loads(self._keys.get(key)))
            if pulse.state not in (CLOSED, LEFT):
                return pulse
            self._gone[rank] = pulse
        return self._gone[rank]

    def _look_at_next(self) -> Cause | None:
        """Checks whether the next rank in the ring that has not ended in order is alive. Each rank is checked by one
        other rank.
        """
        is_suspect = self._keys.check(["suspect"])
        for distance in range(1, self.world_size):
            pulse = self._read((self.rank + distance) % self.world_size)
            if pulse is None:
                return None  # The rank has not started yet.
            if pulse.state == LEFT and is_suspect:
                return self._cause("death", ENDED_EARLY, pulse)
            if pulse.state not in (CLOSED, LEFT):
                return self._age(pulse, is_suspect)
        return None

    def _look_at_steps(self) -> Cause | None:
        """Checks whether this rank is in a step that another rank has not begun and will not begin: that rank has ended
        in order, or waits in a call for this rank. It can do so only if this rank has begun its last step.
        """
        me = self._pulse()
        if not self._compares_steps or me.doing != "step" or me.stalled_s < WAITING_S:
            return None
        if self._clock.now_s < self._steps_look_s:
            return None
        self._steps_look_s = self._clock.now_s + WAITING_S  # The check below reads the pulses of all ranks.
        for rank in range(self.world_size):
            other = self._read(rank) if rank != self.rank else None
            if other is None or other.step == me.step:
                continue
            how = "has ended" if other.state in (CLOSED, LEFT) else f"waits in {other.doing}"
            if other.state in (CLOSED, LEFT) or (other.is_waiting and other.stalled_s >= WAITING_S):
                remedy = "Give all ranks equally many batches, for example with accelerator.prepare(data_loader)"
                text = f"rank {rank} {how} after step {other.step}, and this rank has begun step {me.step}. {remedy}"
                return self._cause("error", text)
        return None

    def _age(self, pulse: Pulse, is_suspect: bool) -> Cause | None:
        now_s, looked_s = self._clock.now_s, self._looked_s
        self._looked_s = now_s
        if self._next_life != (pulse.rank, pulse.life):
            self._next_life, self._next_age_s = (pulse.rank, pulse.life), 0.0
            return None
        # A late answer of the store must not count as a death. Therefore the time between two reads is limited.
        self._next_age_s += min(now_s - looked_s, 2 * self._timing.poll_s)
        limit_s = self._timing.suspect_after_s if is_suspect else self._timing.dead_after_s
        if self._next_age_s < limit_s:
            return None
        text = f"no heartbeat for {self._next_age_s:.0f} s: the process was killed or stopped, or its machine is down"
        # The failure is as old as the last heartbeat.
        return replace(self._cause("death", text, pulse), time_s=time.time() - self._next_age_s)

    def _look_for_hang(self) -> Cause | None:
        me = self._pulse()
        if not me.is_over or self._clock.now_s < self._hang_look_s:
            return None
        self._hang_look_s = self._clock.now_s + me.limit_s / 20  # The check below reads the pulses of all ranks.
        found = (self._read(rank) for rank in range(self.world_size) if rank != self.rank)
        hung = hung_rank(me, [pulse for pulse in found if pulse is not None])
        if hung is None or hung.rank == self.rank or hung.state == LEFT:
            return self._hang(hung)
        before, self._suspect = self._suspect, hung
        if before is None or before.rank != hung.rank:  # Its pulse may be old. A second look shows whether it runs.
            self._hang_look_s = self._clock.now_s + 3 * self._timing.poll_s
            return None
        if before.life != hung.life:
            return self._hang(hung)
        text = f"no heartbeat and no step for {me.stalled_s:.0f} s: the process was killed or stopped"
        return replace(self._cause("death", text, hung), time_s=time.time() - me.stalled_s)

    def _hang(self, pulse: Pulse | None) -> Cause | None:
        if pulse is None:
            return None
        where = f"in step {pulse.step} ({pulse.doing})" + (", then it ended" if pulse.state == LEFT else "")
        return self._cause("hang", f"no step for {pulse.stalled_s:.0f} s, {where}", pulse)

    # Methods of the judge, which measures time and ends the process.

    def _keep_time(self) -> None:
        while not self._closed.is_set():
            if self._known.wait(TICK_S):
                self._end()
            self._clock.tick()
            if (beats := self._place.beats + self._num_aside) != self._moved[0]:
                self._moved = (beats, self._clock.now_s)
            if self._clock.now_s - self._contact_s > self._timing.dead_after_s and not self._released.is_set():
                self._lose_store("no answer")
            if self._is_alone and self._pulse().is_over:
                self._learn(self._blame_left() or cast(Cause, self._hang(self._pulse())))

    def _lose_store(self, why: str) -> None:
        if self._known.is_set() or self._closed.is_set():
            return
        self._is_alone = 0 in self._gone
        if not self._is_alone:
            text = _one_line(f"the store of rank 0 or of its launcher does not respond ({why})")
            self._is_finder = True
            self._learn(replace(self._cause("death", text), rank=0))

    def _blame_left(self) -> Cause | None:
        """The cause if rank 0 has ended without `close` and with it the store, so that no rank can look for others."""
        pulse = self._gone.get(0)
        if not self._is_alone or pulse is None or pulse.state != LEFT:
            return None
        self._is_finder = True
        return self._cause("death", ENDED_EARLY, pulse)

    def _end(self) -> None:
        """Ends the process after a grace period in which the main thread may end by itself."""
        timing = self._timing
        # A timer in C ends the process if the interpreter hangs in its own shutdown.
        faulthandler.dump_traceback_later(timing.grace_s + timing.hold_s + PUBLISH_S, exit=True, file=STDERR)
        self._say()
        with suppress(RuntimeError):  # The interpreter starts no threads during its shutdown.
            threading.Thread(target=self._tidy, daemon=True).start()
        time.sleep(timing.grace_s)
        self._released.wait(timing.hold_s)
        os._exit(1)

    def _tidy(self) -> None:
        """Calls `on_failure` and flushes stdout, in a separate thread, because the main thread may have locked
        stdout.
        """
        assert self.cause is not None
        try:
            if self._on_failure is not None:
                self._on_failure(self.cause)
        finally:
            sys.stdout.flush()

    def _say(self) -> None:
        """Prints the cause once. After a hang, also prints the stacks of all threads. The failed rank prints the line
        for the launcher. If it cannot, because it is dead, stopped or has left, the rank that found this does so.
        """
        with self._lock:
            if self._has_said:
                return
            self._has_said = True
            cause = self.cause
            assert cause is not None
            text = self._stacks() if cause.kind == "hang" else ""
            is_teller = cause.rank == self.rank or (self._is_finder and cause.kind == "death")
            text += cause.failure().line() if is_teller else ""
            write_all(STDERR, f"{text}twinflow: rank {self.rank} ends: {cause}\n".encode())

    def _stacks(self) -> str:
        place = self._place
        text = f"stacks of all threads of rank {self.rank}, in step {place.step} ({place.doing}):\n"
        try:
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                text += file.read().decode(errors="replace")
        except OSError:  # There is no space for the file.
            faulthandler.dump_traceback(STDERR, all_threads=True)
        return "".join(f"[rank {self.rank}] {line}\n" for line in text.splitlines())  # Ranks may share stderr.

    # Helpers.

    def _pulse(self) -> Pulse:
        place, (beats, moved_s) = self._place, self._moved
        stalled_s = self._clock.now_s - moved_s if place.beats + self._num_aside == beats else 0.0
        return replace(place, life=self._life, stalled_s=stalled_s)

    def _cause(self, kind: str, text: str, of: Pulse | None = None) -> Cause:
        rank, step = (self.rank, self._place.step) if of is None else (of.rank, of.step)
        if kind == "death":  # The last pulse is old. This rank waits in the step in which the other one died.
            step = max(step, self._place.step)
        return Cause(rank, step, kind, text, time.time(), self._attempt)

    def _learn(self, cause: Cause) -> None:
        with self._lock:
            if self.cause is None:
                self.cause = cause
        self._known.set()
        self._wake.set()

    def _leave(self, state: str) -> None:
        self._place = replace(self._place, state=state)
        self._closed.set()
        self._wake.set()
        self._poller.join(self._timing.hold_s + PUBLISH_S)
        self._judge.join(1.0)
        self._unhook()

    def _hook(self) -> None:
        self._old_hooks = (sys.excepthook, threading.excepthook)
        self._hooks = (self._on_exception, self._on_thread_exception)
        sys.excepthook, threading.excepthook = self._hooks
        atexit.register(self._at_exit)

    def _unhook(self) -> None:
        atexit.unregister(self._at_exit)
        if sys.excepthook is self._hooks[0]:  # Otherwise a hook that was installed later calls this one.
            sys.excepthook = self._old_hooks[0]
        if threading.excepthook is self._hooks[1]:
            threading.excepthook = self._old_hooks[1]

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self.report(error)
        self._old_hooks[0](kind, error, trace)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            self.report(args.exc_value)
        self._old_hooks[1](args)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self._closed.is_set():
            return
        if self._known.is_set():
            self._say()
            self._released.wait(self._timing.hold_s)
        else:
            self._leave(LEFT)


def _is_failure(error: BaseException) -> bool:
    clean = isinstance(error, SystemExit) and error.code in (None, 0)
    return not clean and not isinstance(error, GeneratorExit)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
