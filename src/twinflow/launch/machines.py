# SPDX-License-Identifier: Apache-2.0
"""Finds which ranks are on one machine, for launchers that set only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Every rank writes the name of its machine to the store of the process group. A rank whose launcher has not set the local
rank or the number of local ranks waits for the names of all ranks and counts.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from twinflow.errors import invalid_value
from twinflow.launch.store import attempt

READ_S = 5.0  # time for the other ranks to read an error before the store of rank 0 ends
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_REMEDY = "Correct this environment variable, or leave LOCAL_RANK and LOCAL_WORLD_SIZE out on all ranks."


@dataclass(frozen=True)
class LocalRank:
    """The machine of a rank, its rank there, and the number of ranks there. None: its launcher does not set it."""

    machine: str
    rank: int | None = None
    size: int | None = None

    @property
    def host(self) -> str:
        return self.machine.split()[0]


def this_machine() -> str:
    """The name of this machine, with a number that differs between machines of the same name."""
    return f"{socket.gethostname()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"


def publish(
    store: Store,
    rank: int,
    world_size: int,
    local_rank: int | None,
    local_size: int | None,
    is_described: bool = True,
) -> None:
    """Tells the other ranks on which machine this rank is. Each rank calls this function. `is_described`: whether the
    variables of this rank describe the process group.
    """
    keys = _keys(store, world_size)
    own = f"process {os.getpid()} on {socket.gethostname()}"
    first = keys.compare_set(f"process/{rank}", "", own).decode()
    if first != own:
        keys.set("twice", f"RANK is {rank} in two processes: {first}, and {own}. Give each process its own RANK.")
    if not is_described:
        keys.set("undescribed", "")
    keys.set(f"machine/{rank}", json.dumps([this_machine(), local_rank, local_size]))


def find_local(store: Store, rank: int, world_size: int, timeout_s: float) -> tuple[int, int]:
    """The local rank of this rank, and the number of ranks on its machine, when all ranks have called `publish`. Raises
    TimeoutError if a rank does not, and ValueError if variables of the ranks contradict each other.
    """
    keys = _keys(store, world_size)
    names = [f"machine/{other}" for other in range(world_size)]
    end_s = time.monotonic() + timeout_s
    while not keys.check(names) and not keys.check(["twice"]):
        if time.monotonic() > end_s:
            late = ", ".join(str(other) for other, name in enumerate(names) if not keys.check([name]))
            raise TimeoutError(
                f"Rank {late} has not published the name of its machine within {timeout_s:g} s. Start {world_size} "
                "processes, and give each its own RANK."
            )
        time.sleep(0.02)
    try:
        if keys.check(["twice"]):
            raise ValueError(keys.get("twice").decode())
        said = [LocalRank(*json.loads(keys.get(name))) for name in names]
        if not are_described(store, world_size):
            said = [LocalRank(one.machine) for one in said]
        return local_ranks(said)[rank]
    except ValueError:
        keys.add("read", 1)
        end_s = time.monotonic() + READ_S
        while rank == 0 and keys.add("read", 0) < world_size and time.monotonic() < end_s:
            time.sleep(0.02)
        raise


def are_described(store: Store, world_size: int) -> bool:
    """Whether the variables of all ranks that have called `publish` describe the process group. If a script has created
    the group itself, all processes may have inherited the variables of one rank, for which they are right by chance.
    """
    return not _keys(store, world_size).check(["undescribed"])


def found_local(store: Store, rank: int, world_size: int) -> tuple[int, int] | None:
    """The result of `find_local` without waiting. None if a rank has not called `publish`."""
    keys = _keys(store, world_size)
    names = [f"machine/{other}" for other in range(world_size)]
    return find_local(store, rank, world_size, 0.0) if keys.check(names) else None


def local_ranks(said: Sequence[LocalRank]) -> list[tuple[int, int]]:
    """The local rank of every rank, and the number of ranks on its machine. Ranks without a local rank get the free
    numbers, in order.
    """
    machines: dict[str, list[int]] = {}
    for rank, one in enumerate(said):
        machines.setdefault(one.machine, []).append(rank)
    found = [(0, 1)] * len(said)
    for ranks in machines.values():
        size, taken = len(ranks), dict[int, int]()
        listed = f"the number of ranks on {said[ranks[0]].host} (ranks {', '.join(map(str, ranks))})"
        for rank in ranks:
            one = said[rank]
            if one.size not in (None, size):
                raise invalid_value(f"LOCAL_WORLD_SIZE of rank {rank}", one.size, f"{size}, {listed}", _REMEDY)
            if one.rank is None:
                continue
            if one.rank >= size:
                raise invalid_value(f"LOCAL_RANK of rank {rank}", one.rank, f"below {size}, {listed}", _REMEDY)
            if taken.setdefault(one.rank, rank) != rank:
                allowed = f"different from that of rank {taken[one.rank]}, because both are on {one.host}"
                raise invalid_value(f"LOCAL_RANK of rank {rank}", one.rank, allowed, _REMEDY)
        free = iter(number for number in range(size) if number not in taken)
        for rank in ranks:
            given = said[rank].rank
            found[rank] = (next(free) if given is None else given, size)
    return found


def _keys(store: Store, world_size: int) -> Store:
    return PrefixStore(f"twinflow/machines/{attempt()}/{world_size}", store)
