"""The folders beside the checkpoints: half written, set aside, half deleted.

Why a crash at any point leaves a checkpoint. A new one grows in `.<tag>.partial-<owner>`, which nobody loads. Once all
of it is on the disk, an old folder of the tag is renamed to `.<tag>.old-<owner>` and the new one takes its place.
Between the two renames the tag has no folder, and a reader takes the one set aside. What is to be deleted is first
renamed to `.<tag>.removed-<owner>`, so that half a folder never carries a name that somebody loads. `latest` is a file
replaced in one step, last of all. The next save clears away what was left behind.

What was left behind. The owner is the process that makes and renames the folder; of several ranks that write one
checkpoint, rank 0. Without it nobody can finish the folder, whoever still writes to it. A process of this machine can
be looked up; its start is in the name too, since process ids come again. One of another machine, or of another
container, cannot be: its folder is left alone until nothing in it has changed for `LEASE_S`, by the clock of the file
system. An owner at work touches it every `BEAT_S`, however long the ranks wait for each other.

One save at a time may go on under a root; any number of processes may read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from twinflow.checkpoint.disk import remove, sync_folder

LEASE_S: Final = 900.0
BEAT_S: Final = 60.0
MAX_PID: Final = 1 << 22  # Linux gives no higher ones

Kind = Literal["partial", "old", "removed"]


@dataclass(frozen=True)
class Side:
    """What a name says: the tag it belongs to, its kind, and its owner. Older versions gave the process id alone."""

    tag: str
    kind: str
    pid: int
    machine: str = ""
    born: int = 0


def side_path(root: Path, tag: str, kind: Kind, *, fresh: bool = False) -> Path:
    """Where this process puts a folder of `tag` that is not, or no longer, a checkpoint.

    With `fresh` the name was never there before, so that no other machine can remember another folder by it.
    """
    token = f"-{secrets.token_hex(8)}" if fresh else ""
    pid = os.getpid()
    return root / f".{tag}.{kind}-{pid}-{_machine()}-{_look_up(pid)[1]}{token}"


def parse_side(name: str) -> Side | None:
    """What the name made by `side_path` says; None for any other name."""
    owner = r"([0-9]{1,10})(?:-([0-9a-f]{16})-([0-9]{1,20})(?:-[0-9a-f]{16})?)?"
    match = re.fullmatch(rf"\.(.+)\.(partial|old|removed)-{owner}", name)
    return Side(match[1], match[2], int(match[3]), match[4] or "", int(match[5] or 0)) if match else None


def is_abandoned(path: Path, side: Side) -> bool:
    """True where nobody can be at work on `path`, whose name says `side`, or where it is this process's own."""
    if side.pid > MAX_PID:
        return True
    if side.machine == _machine():
        return side.pid == os.getpid() or not _is_running(side)
    return _idle_s(path) > LEASE_S


def _machine() -> str:
    """Names what a process id is unique in: this boot of this machine, and this container's processes and clock."""
    words = [platform.node()]
    with suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    for kind in ("pid", "time"):
        with suppress(OSError):
            words.append(os.readlink(f"/proc/self/ns/{kind}"))
    return hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()


def _look_up(pid: int) -> tuple[str, int]:
    """The state of a process of this machine and when it began; zero where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", 0
    fields = stat[stat.rindex(")") + 1 :].split()  # before that comes the program's name, with any character in it
    return fields[0], int(fields[19])


def _is_running(side: Side) -> bool:
    try:
        os.kill(side.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    state, born = _look_up(side.pid)
    return state not in ("Z", "X") and born == side.born


def _idle_s(path: Path) -> float:
    """Seconds since anything in `path` changed, by the clock of its file system: machines' own clocks differ."""
    probe = side_path(path.parent, "clock", "partial", fresh=True)
    try:
        probe.touch()
        now = probe.stat().st_mtime
    finally:
        remove(probe)
    changed = 0.0
    with suppress(FileNotFoundError):  # it is being renamed or deleted just now: by its owner
        for one in (path, *(path.iterdir() if path.is_dir() else ())):
            status = one.lstat()
            changed = max(changed, status.st_mtime, status.st_ctime)  # a rename changes only the second
        return now - changed
    return 0.0


@contextmanager
def kept_alive(*paths: Path) -> Iterator[None]:
    """Tell other machines, for as long as the block takes, that somebody is at work on `paths`."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            for path in paths:
                with suppress(OSError):  # not made yet, or renamed already
                    os.utime(path)

    thread = threading.Thread(target=beat, name="keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def discard(folder: Path, tag: str) -> None:
    """Delete the checkpoint of `tag` in `folder`, so that a crash on the way leaves no half of it under its name."""
    removed = side_path(folder.parent, tag, "removed")
    remove(removed)
    try:
        os.rename(folder, removed)
    except OSError:
        return  # it stays whole
    remove(removed)


def swap_in(new: Path, final: Path) -> None:
    """Rename the finished folder `new` to `final`, in place of what is there."""
    old = side_path(final.parent, final.name, "old")
    replaces = os.path.lexists(final)
    if replaces:
        os.rename(final, old)
    try:
        os.rename(new, final)
    except Exception:
        if replaces:
            os.rename(old, final)
        raise
    sync_folder(final.parent)
    if replaces:
        discard(old, final.name)
