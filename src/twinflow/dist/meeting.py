# SPDX-License-Identifier: Apache-2.0
"""Meetings of ranks in the store of the process group, before a collective that the user's code calls.

A script often saves or reads weights on one rank only. That rank would wait in a collective until its timeout, and
the collectives of other ranks would be paired with the wrong ones. So ranks first meet in the store. If some do not
come, or come for another call, the others raise an error, and no collective has begun.
"""

from __future__ import annotations

from twinflow.dist.group import Group
from twinflow.errors import wrong_state
from twinflow.launch.store import group_store, own_keys, wait_for

PATIENCE_S = 60.0  # limit for the other ranks to make the same call
_GO, _STOP = "go", "stop"


class Meeting:
    """Meetings of the ranks of one group. All of them create this object, in the same order. `kind` and `remedy` are
    for errors: what these ranks are ("tensor ranks"), and how to call all of them.
    """

    def __init__(self, group: Group, kind: str = "ranks", remedy: str = "Call it on all ranks.") -> None:
        self._group = group
        self._kind = kind
        self._remedy = remedy
        self._count = 0
        if group.world > 1:
            self._keys = own_keys(group_store(), f"meeting/{'-'.join(map(str, group.ranks))}", group.rank)

    def meet(self, call: str, reason: str = "each rank has a part of the values") -> None:
        """Waits until all ranks have come to the same meeting with the same `call`.

        If some do not come in time, the meeting is cancelled, and ranks that come later go to the next one. The key
        `outcome` makes sure that all ranks decide alike. Raises RuntimeError if ranks do not come, or if they make
        different calls. `reason`: why all ranks are needed, for the error.
        """
        group = self._group
        if group.world == 1:
            return
        while True:
            meeting = f"{self._count}"
            self._count += 1
            if self._keys.check([f"{meeting}/outcome"]) and self._decide(meeting, _STOP) == _STOP:
                continue
            self._keys.set(f"{meeting}/{group.rank}", call)
            missing = wait_for(self._keys, [f"{meeting}/{rank}" for rank in range(group.world)], PATIENCE_S)
            if self._decide(meeting, _STOP if missing else _GO) == _GO:
                self._compare(meeting, call)
                return
            if missing:
                ranks = [group.ranks[int(name.rpartition("/")[2])] for name in missing]
                raise wrong_state(
                    f"{call} cannot run",
                    f"{reason}, and the {self._kind} {ranks} have not called it within {PATIENCE_S:g} s",
                    self._remedy,
                )

    def _compare(self, meeting: str, call: str) -> None:
        group = self._group
        calls = [self._keys.get(f"{meeting}/{rank}").decode() for rank in range(group.world)]
        # All ranks have come to this meeting, so none of them will read the keys of the one before.
        before = int(meeting) - 1
        if before >= 0:
            self._keys.delete_key(f"{before}/{group.rank}")
            if group.rank == 0:
                self._keys.delete_key(f"{before}/outcome")
        other = next((rank for rank, made in enumerate(calls) if made != call), None)
        if other is not None:
            raise wrong_state(
                f"{call} cannot run",
                f"rank {group.ranks[other]} calls {calls[other]} at the same time",
                f"Make the same calls in the same order on all {self._kind}.",
            )

    def _decide(self, meeting: str, outcome: str) -> str:
        """The outcome of a meeting: that of the first rank that decides."""
        return self._keys.compare_set(f"{meeting}/outcome", "", outcome).decode()
