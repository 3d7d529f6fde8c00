"""The ranks that save and load together: who of them writes what several have, and what all of them say as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from twinflow.checkpoint.shards import join_marks
from twinflow.checkpoint.tree import Leaf
from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group, alone
from twinflow.engine.background import num_bytes

if TYPE_CHECKING:
    from twinflow.engine.core import Engine


@dataclass(frozen=True)
class Ranks:
    """Those that save and load together, and this one's place among them."""

    group: Group
    are_partitioned: bool  # each replica has its own part of the state; else all have all of it
    replicas: Group | None = None  # those with the same stages and tensor shards as this one; None: all of them
    stage: int = 0  # which of the pipeline's ranks this is
    tensor_rank: int = 0
    num_tensor: int = 1
    # Names here of tied parameters to those that they have where the model uses them first, which are saved.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # The first stage that has a tensor, by every name that a tensor has on any rank; see `meet`.
    holders: Mapping[str, int] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self.group.rank

    @property
    def world(self) -> int:
        """How many there are."""
        return self.group.world

    @property
    def data(self) -> Group:
        """Those that have the same weights as this one."""
        return self.group if self.replicas is None else self.replicas

    @property
    def speaks(self) -> bool:
        """Whether this rank says what all with its stages have in common."""
        return self.data.rank == 0 and self.tensor_rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return gather_json(self.group, value)

    def meet(self, names: Iterable[str]) -> Ranks:
        """The same, knowing which stage has what; `names` are those of this rank's tensors."""
        own = list(names)
        said = self.gather([self.stage, [*own, *map(self.canonical, own)] if self.speaks else []])
        holders: dict[str, int] = {}
        for stage, found in said:
            for name in found:
                holders[name] = min(stage, holders.get(name, stage))
        return replace(self, holders=holders)

    def canonical(self, name: str) -> str:
        """The name that a tensor is saved under."""
        return self.aliases.get(name, name)

    def saves(self, name: str, is_sharded: bool = False) -> bool:
        """Whether it is up to this rank, or to its replicas, to save a tensor: of equal copies the first is saved."""
        is_first = self.holders.get(self.canonical(name), self.stage) == self.stage
        return is_first and (is_sharded or self.tensor_rank == 0)


def only_one() -> Ranks:
    """A process that saves and loads alone."""
    return Ranks(alone(), are_partitioned=False)


def ranks_of(engine: Engine) -> Ranks | None:
    """The ranks that train with this one; None where nobody has a part of anything."""
    team = engine.optimizer.team if engine.optimizer is not None else None
    if team is None or team.everyone.world == 1:
        return None
    if team.grid is None:
        return Ranks(team.everyone, team.is_partitioned)
    return Ranks(
        team.everyone,
        team.is_partitioned,
        replicas=team.calls,
        stage=team.grid.pipe,
        tensor_rank=team.grid.model.rank,
        num_tensor=team.grid.num_model,
        aliases=getattr(engine.module, "aliases", {}),
    )


def deal(leaves: Sequence[Leaf], ranks: Ranks) -> list[Leaf]:
    """This rank's share of what its replicas have: the largest first, each to the rank that has least so far. What a
    rank has a part of is its own."""
    if ranks.data.world == 1:
        return list(leaves)
    is_own = {id(leaf): leaf.part is not None and ranks.are_partitioned for leaf in leaves}
    used, own = [0] * ranks.data.world, [leaf for leaf in leaves if is_own[id(leaf)]]
    for leaf in sorted((leaf for leaf in leaves if not is_own[id(leaf)]), key=lambda leaf: -num_bytes(leaf)):
        rank = used.index(min(used))
        used[rank] += num_bytes(leaf)
        if rank == ranks.data.rank:
            own.append(leaf)
    return own


def unite(meta: Mapping[str, Any], said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A checkpoint's `meta`, from one rank's and what all ranks have said of their stages, shards and parts.

    Every rank comes to the same. A ValueError where they do not fit together.
    """
    made = dict(meta)
    for key in ("extra", "aliases", "optimizer_state"):
        made[key] = {}
        for one in said:
            made[key] = {**one[key], **made[key]}  # of what several have, the first's stays
    made["excluded"] = list(dict.fromkeys(name for one in said for name in one["excluded"]))
    if "optimizer" in meta:
        groups = unite_groups([one["groups"] for one in said if one["groups"] is not None])
        made["optimizer"] = {**meta["optimizer"], "param_groups": groups}
    shards = join_marks([one["shards"] for one in said])
    return {**made, "shards": shards} if shards else made


def unite_groups(said: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Param groups with the names of all stages, each name once; their options must be the same everywhere."""
    for groups in said:
        if [_options(group) for group in groups] != [_options(group) for group in said[0]]:
            raise ValueError(
                "the stages of the pipeline have different param_groups. Give each the same number of groups with the "
                "same options, in the same order, and each group a trainable parameter on every rank"
            )
    names = [dict.fromkeys(name for groups in said for name in groups[i]["params"]) for i in range(len(said[0]))]
    return [{**group, "params": list(found)} for group, found in zip(said[0], names, strict=True)]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
