# SPDX-License-Identifier: Apache-2.0
"""The ranks that save and load a checkpoint together: which rank writes which tensor, and the contents of meta.json."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from twinflow.checkpoint import JSON, Entry
from twinflow.checkpoint.load import deal as deal_out
from twinflow.checkpoint.shards import join_marks
from twinflow.dist.agree import gather_json
from twinflow.dist.group import Group, alone
from twinflow.engine.base import EngineBase
from twinflow.state_dict import Kind, list_of, value_of
from twinflow.zero.shared import Team


@dataclass(frozen=True)
class Ranks:
    """All ranks that save and load together, and the position of this rank."""

    group: Group
    are_partitioned: bool  # each replica has its own part of the state; otherwise each has all of it
    replicas: Group | None = None  # ranks with the same stages and tensor shards as this one; None: all ranks
    stage: int = 0  # index of this rank in the pipeline
    tensor_rank: int = 0
    num_tensor: int = 1
    # Maps the name of a tied parameter on this rank to its name in the first module that uses it. That name is saved.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Maps every name of a tensor on any rank to the first stage that has this tensor. `meet` fills it.
    holders: Mapping[str, int] = field(default_factory=dict)
    experts: Group | None = None  # ranks with the same experts as this one; None: there is no expert parallelism

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world(self) -> int:
        return self.group.world

    @property
    def data(self) -> Group:
        """The ranks with the same stages and tensor shards as this one, itself included."""
        return self.group if self.replicas is None else self.replicas

    @property
    def speaks(self) -> bool:
        """Whether this rank reports the values that are equal on all ranks with the same pipeline stages."""
        return self.data.rank == 0 and self.tensor_rank == 0

    def gather(self, value: Kind) -> list[Kind]:
        """The values of all ranks, on every rank."""
        return gather_json(self.group, value)

    def meet(self, names: Iterable[str]) -> Ranks:
        """A copy whose `holders` map each name to the first stage that has the tensor.

        All ranks call this method, each with the `names` of its tensors.
        """
        own = list(names)
        spoken = [*own, *map(self.canonical, own)] if self.speaks else []
        holders: dict[str, int] = {}
        for stage, found in self.gather((self.stage, spoken)):
            for name in found:
                holders[name] = min(stage, holders.get(name, stage))
        return replace(self, holders=holders)

    def canonical(self, name: str) -> str:
        """The name under which a tensor is saved."""
        return self.aliases.get(name, name)

    def saves(self, name: str, is_sharded: bool = False) -> bool:
        """Whether this rank or one of its replicas saves a tensor.

        Of equal copies on several ranks, the first is saved.
        """
        is_first = self.holders.get(self.canonical(name), self.stage) == self.stage
        return is_first and (is_sharded or self.tensor_rank == 0)


def ranks_of(engine: EngineBase) -> Ranks:
    """The ranks that save and load with this one: only this one if no other rank has a part of the state."""
    team = engine.optimizer.team if engine.optimizer is not None else None
    if team is None or team.grid is None or team.everyone.world == 1:
        return ranks_of_team(team)
    return Ranks(
        team.everyone,
        team.is_partitioned,
        replicas=team.calls,
        stage=team.grid.pipe,
        tensor_rank=team.grid.model.rank,
        num_tensor=team.grid.num_model,
        aliases=getattr(engine.module, "aliases", {}),
    )


def ranks_of_team(team: Team | None) -> Ranks:
    """The same for an optimizer whose ranks all have the same layers."""
    if team is None or team.everyone.world == 1:
        return Ranks(alone(), are_partitioned=False)
    experts = team.expert_calls if team.expert_shard is not None else None
    return Ranks(team.everyone, team.is_partitioned, experts=experts)


def deal(leaves: Sequence[Entry], ranks: Ranks, shards: Container[str] = ()) -> list[Entry]:
    """Distributes entries (tensors to save) over the replicas, so that all write about equal numbers of bytes. Returns
    the entries of this rank, which always include its own parts of partitioned tensors. `shards`: the names of tensors
    that this rank has in part.
    """
    if ranks.data.world == 1:
        return list(leaves)
    own = [leaf for leaf in leaves if leaf.part is not None and ranks.are_partitioned]
    common = [leaf for leaf in leaves if leaf.part is None or not ranks.are_partitioned]
    if ranks.experts is not None:  # the replicas of experts are other ranks
        experts = [leaf for leaf in common if leaf.name in shards]
        common = [leaf for leaf in common if leaf.name not in shards]
        own += deal_out(experts, ranks.experts.rank, ranks.experts.world)
    return own + deal_out(common, ranks.data.rank, ranks.data.world)


class Said(TypedDict, total=False):
    """What a rank reports about its stage, shards and parts to all other ranks, as JSON values."""

    extra: dict[str, JSON]
    aliases: dict[str, str]
    optimizer_state: dict[str, JSON]
    excluded: list[str]
    groups: list[dict[str, JSON]] | None
    shards: dict[str, dict[str, JSON]]
    random: JSON
    errors: JSON


def unite(meta: Mapping[str, JSON], said: Sequence[Said]) -> dict[str, JSON]:
    """The contents of meta.json, from the `meta` of one rank and the reports `said` of all ranks. It is equal on every
    rank. Raises ValueError if the reports contradict each other.
    """
    made = dict(meta)
    first_last = list(reversed(said))  # the first rank's value stays if several ranks report a name
    made["extra"] = {name: value for one in first_last for name, value in one["extra"].items()}
    made["aliases"] = {name: value for one in first_last for name, value in one["aliases"].items()}
    made["optimizer_state"] = {name: value for one in first_last for name, value in one["optimizer_state"].items()}
    made["excluded"] = list(dict.fromkeys(name for one in said for name in one["excluded"]))
    if "optimizer" in meta:
        groups = unite_groups([one["groups"] for one in said if one["groups"] is not None])
        made["optimizer"] = {**value_of(meta, "optimizer", dict), "param_groups": groups}
    shards = join_marks([one["shards"] for one in said])
    return {**made, "shards": shards} if shards else made


def unite_groups(said: Sequence[Sequence[Mapping[str, JSON]]]) -> list[dict[str, JSON]]:
    """Joins the param groups of all stages. Each name appears once.

    Raises ValueError if the options of a group differ between stages.
    """
    for groups in said:
        if [_options(group) for group in groups] != [_options(group) for group in said[0]]:
            raise ValueError(
                "The stages of the pipeline have different param_groups, but must have the same ones. Pass the same "
                "number of groups with the same options in the same order on every rank. Each group needs a trainable "
                "parameter on every rank."
            )
    names = [
        dict.fromkeys(str(name) for groups in said for name in list_of(groups[i], "params"))
        for i in range(len(said[0]))
    ]
    return [{**group, "params": list(found)} for group, found in zip(said[0], names, strict=True)]


def _options(group: Mapping[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in group.items() if key != "params"}
