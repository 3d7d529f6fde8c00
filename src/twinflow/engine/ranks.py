"""The ranks that save and load together, and who of them writes what all of them have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinflow.checkpoint.tree import Leaf
from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group
from twinflow.engine.background import num_bytes

if TYPE_CHECKING:
    from twinflow.engine.core import Engine


@dataclass(frozen=True)
class Ranks:
    """Those that save and load together."""

    group: Group
    are_partitioned: bool  # each has its own part of the state; else all have all of it

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.group.rank

    @property
    def world(self) -> int:
        """How many there are."""
        return self.group.world

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return gather_json(self.group, value)


def ranks_of(engine: Engine) -> Ranks | None:
    """The ranks that train with this one; None where nobody has a part of anything."""
    team = engine.optimizer.team if engine.optimizer is not None else None
    return Ranks(team.calls, team.is_partitioned) if team is not None and team.world > 1 else None


def deal(leaves: Sequence[Leaf], ranks: Ranks) -> list[Leaf]:
    """This rank's share of what all have: the largest first, each to the rank that has least so far. What a rank has a
    part of is its own."""
    is_own = {id(leaf): leaf.part is not None and ranks.are_partitioned for leaf in leaves}
    used, own = [0] * ranks.world, [leaf for leaf in leaves if is_own[id(leaf)]]
    for leaf in sorted((leaf for leaf in leaves if not is_own[id(leaf)]), key=lambda leaf: -num_bytes(leaf)):
        rank = used.index(min(used))
        used[rank] += num_bytes(leaf)
        if rank == ranks.rank:
            own.append(leaf)
    return own
