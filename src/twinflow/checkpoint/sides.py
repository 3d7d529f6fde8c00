# SPDX-License-Identifier: Apache-2.0
"""Temporary folders next to the checkpoints: incomplete ones, replaced ones and partly deleted ones.

Crashes. A new checkpoint is written to `.<tag>.partial-<owner>`, which is never loaded. When all of it is on the disk,
an existing folder of the tag is renamed to `.<tag>.old-<owner>`, and the new folder gets its name. Between the two
renames the tag has no folder, and a reader uses the old folder. A folder that is to be deleted is first renamed to
`.<tag>.removed-<owner>`, so that a partly deleted folder never has a name that is loaded. The file `latest` is replaced
last, and atomically. Therefore a crash at any time leaves the old or the new checkpoint complete. The next save removes
or restores folders that a crash left behind.

Ownership. The owner is the process that creates and renames the folder. If several ranks write one checkpoint, it is
rank 0. If the owner has ended, nobody completes the folder. The folder's name contains the process id of the owner, and
its start time, because process ids are reused. Therefore a process on the owner's machine can look up whether the owner
runs. From another machine or container it cannot. There the folder is kept until nothing in it has changed for
`LEASE_S`, by the clock of the file system. A thread of the owner touches the folder every `BEAT_S`, however long the
ranks wait for each other.

Only one save at a time may run under a root. Any number of processes may read.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from twinflow.checkpoint.disk import remove, sync_folder

LEASE_S: Final = 900.0
BEAT_S: Final = 60.0
MAX_PID: Final = 1 << 22  # the largest process id of Linux

Kind = Literal["partial", "old", "removed"]


@dataclass(frozen=True)
class Side:
    """The parts of a temporary name: tag, kind and owner. Names of older versions contain only the process id of the
    owner.
    """

    tag: str
    kind: str
    pid: int
    machine: str = ""
    born: int = 0


def side_path(root: Path, tag: str, kind: Kind, *, fresh: bool = False) -> Path:
    """The path of a temporary folder of `tag` for this process.

    With `fresh`, the name is new, so that no other machine has another folder of this name in its cache.
    """
    token = f"-{secrets.token_hex(8)}" if fresh else ""
    pid = os.getpid()
    return root / f".{tag}.{kind}-{pid}-{_machine()}-{_look_up(pid)[1]}{token}"


def parse_side(name: str) -> Side | None:
    """The parts of a name that `side_path` made. None for other names."""
    owner = r"([0-9]{1,10})(?:-([0-9a-f]{16})-([0-9]{1,20})(?:-[0-9a-f]{16})?)?"
    match = re.fullmatch(rf"\.(.+)\.(partial|old|removed)-{owner}", name)
    return Side(match[1], match[2], int(match[3]), match[4] or "", int(match[5] or 0)) if match else None


def abandoned(root: Path, is_wanted: Callable[[Side], bool] = lambda _: True) -> Iterator[tuple[Path, Side]]:
    """Temporary paths under `root` whose owner is this process, has ended, or is elsewhere and idle for `LEASE_S`."""
    for path in sorted(root.iterdir()):
        side = parse_side(path.name)
        if side is None or not is_wanted(side):
            continue
        if side.machine == _machine():
            is_over = side.pid == os.getpid() or not _is_running(side)
        else:
            is_over = side.pid > MAX_PID or _idle_s(path) > LEASE_S
        if is_over:
            yield path, side


def _machine() -> str:
    """A hash of machine, boot and container namespaces. Two running processes of one hash have different ids."""
    words = [platform.node()]
    with suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    for kind in ("pid", "time"):
        with suppress(OSError):
            words.append(os.readlink(f"/proc/self/ns/{kind}"))
    return hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()


def _look_up(pid: int) -> tuple[str, int]:
    """The state and the start time of a process of this machine. ("", 0) if they are unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", 0
    fields = stat[stat.rindex(")") + 1 :].split()  # The program's name in parentheses may contain any character.
    return fields[0], int(fields[19])


def _is_running(side: Side) -> bool:
    try:
        os.kill(side.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # The process belongs to another user.
        return True
    state, born = _look_up(side.pid)
    return state not in ("Z", "X") and born == side.born


def _idle_s(path: Path) -> float:
    """Seconds since the last change in `path`, by the clock of its file system, because clocks of machines differ."""
    probe = side_path(path.parent, "clock", "partial", fresh=True)
    try:
        probe.touch()
        now = probe.stat().st_mtime
    finally:
        remove(probe)
    changed = 0.0
    with suppress(FileNotFoundError):  # Its owner is renaming or deleting it.
        for one in (path, *(path.iterdir() if path.is_dir() else ())):
            status = one.lstat()
            changed = max(changed, status.st_mtime, status.st_ctime)  # A rename changes only the ctime.
        return now - changed
    return 0.0


@contextmanager
def kept_alive(*paths: Path) -> Iterator[None]:
    """A context in which a thread touches `paths` regularly, so that other machines see that they are in use."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            for path in paths:
                with suppress(OSError):  # The path may not exist yet, or may be renamed already.
                    os.utime(path)

    thread = threading.Thread(target=beat, name="keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def discard(folder: Path, tag: str) -> None:
    """Deletes the checkpoint of `tag` in `folder`. It is renamed first: a crash leaves no partly deleted folder of this
    name.
    """
    removed = side_path(folder.parent, tag, "removed")
    remove(removed)
    try:
        os.rename(folder, removed)
    except OSError:
        return  # The checkpoint stays complete.
    remove(removed)


def swap_in(new: Path, final: Path) -> None:
    """Renames the complete folder `new` to `final` and replaces an existing one."""
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
