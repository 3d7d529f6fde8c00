"""A checkpoint into an engine: all that can be wrong is found, checksums included, before anything changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from twinflow.checkpoint import Checkpoint, open_checkpoint
from twinflow.checkpoint.load import cut_for
from twinflow.checkpoint.shards import local_shape
from twinflow.checkpoint.together import agree
from twinflow.checkpoint.tree import put_together, tensor_names
from twinflow.engine.parts import EngineParts, Scheduler
from twinflow.engine.randoms import set_random_states
from twinflow.engine.ranks import Ranks, only_one, ranks_of
from twinflow.engine.state import (
    COUNTERS,
    PARTS,
    names_of,
    offloaded_in,
    param_offload_of,
    shards_of,
    state_of,
    tensors_of,
)
from twinflow.engine.values import UserValue
from twinflow.errors import invalid_value
from twinflow.offload.bucket import local_of
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_build import first_of
from twinflow.parallel.shard import TensorShard, shard_of
from twinflow.rules.formats import BLOCK
from twinflow.state_dict import StateDict, dict_of, int_of, list_of, tensor_of


@dataclass(frozen=True)
class What:
    """What to take over from a checkpoint."""

    strict: bool  # the names of the weights must be the model's
    optimizer: bool
    scheduler: bool
    everything_else: bool  # counters, random states, data position
    custom_load_fn: Callable[..., object] | None = None


def load(engine: EngineParts, root: Path, tag: str | None, what: What) -> tuple[str | None, dict[str, UserValue]]:
    """Take over `root`/`tag`, or the latest; its path and the client state."""
    if engine.optimizer is not None and engine.optimizer.runtime.job is not None:
        raise RuntimeError("load_checkpoint() between backward() and step(). Call step() first")
    ranks = (ranks_of(engine) or only_one()).meet(names_of(engine))
    found, tags = agree(ranks, lambda: _open(root, tag))
    other = next((rank for rank, other in enumerate(tags) if other != tags[0]), None)
    if other is not None:
        remedy = "load_dir must be on a file system that all ranks share."
        raise invalid_value(f"{root}: what rank {other} finds", tags[other], [tags[0]], remedy)
    if found is None:
        return None, {}
    checked, _ = agree(ranks, lambda: (_check(engine, found, what, ranks), None))
    names, source, head, others = checked
    meta = found.meta
    before = copy.copy(state_of(engine.lr_scheduler))
    if what.scheduler and others["scheduler"] is not None and engine.lr_scheduler is not None:
        _load_scheduler(engine.lr_scheduler, dict_of(others, "scheduler"), found.path)
    loader = engine.training_dataloader
    if what.everything_else and others["loader"] is not None and hasattr(loader, "load_state_dict"):
        try:
            loader.load_state_dict(others["loader"])
        except Exception:
            if engine.lr_scheduler is not None:
                assert isinstance(before, dict)
                engine.lr_scheduler.load_state_dict(before)
            raise
    engine.zero_grad()  # of micro-batches whose step will not come
    _load_weights(engine, found, names, what, dict_of(others, "extra") if others["extra"] else {})
    if head is not None:
        assert engine.optimizer is not None
        engine.optimizer.load_state_dict(head, source)
        if engine.optimizer.is_compressed:
            rest = _reader(found, "rest")
            engine.optimizer.load_exchange_errors(meta.get("errors", []), lambda named: put_together(named, rest))
    if what.everything_else:
        for name in COUNTERS:
            setattr(engine, name, meta[name])
        set_random_states(_own_random(found, dict_of(others, "random"), ranks))
    return str(found.path), dict_of(others, "client_state")


def _open(root: Path, tag: str | None) -> tuple[Checkpoint | None, str | None]:
    """A checkpoint of an engine, if there is one, and its tag."""
    found = open_checkpoint(root, tag)
    if found is None:
        return None, None
    missing = [name for name in (*COUNTERS, *PARTS, "aliases", "excluded") if name not in found.meta]
    if missing:
        raise ValueError(f"{found.path}: not a checkpoint of an engine: meta.json has no {', '.join(missing)}")
    return found, found.path.name


def _check(
    engine: EngineParts, found: Checkpoint, what: What, ranks: Ranks
) -> tuple[dict[str, str], _FileSource | None, StateDict | None, StateDict]:
    """All that can be wrong, before anything changes: names of weights, the optimizer's entries and head, the rest."""
    found.verify(share=(ranks.rank, ranks.world))
    meta, rest = found.meta, _reader(found, "rest")
    saved = _SavedNames(meta["aliases"], ranks)
    names = _check_model(engine.module, found, what, saved)
    source, head = None, None
    if what.optimizer and engine.optimizer is not None and "optimizer" in meta:
        head = put_together(meta["optimizer"], rest)
        head = {**head, "param_groups": _own_groups(engine.optimizer, head["param_groups"], saved)}
        source = _FileSource(found, engine.optimizer, saved)
        engine.optimizer.check_state(head, source)
        _check_errors(found)
    return names, source, head, {key: put_together(meta[key], rest) for key in PARTS}


def _check_errors(found: Checkpoint) -> None:
    """Those of compressed exchanges were once kept by piece, for one layout alone."""
    if any(one and "num_replicas" not in one for one in found.meta.get("errors", [])):
        given, allowed = "by piece, as an earlier version had them", "by parameter and replica"
        remedy = "Go on with the version that saved it, or pass load_optimizer_states=False."
        raise invalid_value(f"{found.path}: errors of compressed exchanges", given, allowed, remedy)


@dataclass(frozen=True)
class _SavedNames:
    """From names in this rank's module to those in a checkpoint, which another layout may have saved."""

    aliases: Mapping[str, str]  # the checkpoint's: names of tied tensors to those that they are stored under
    ranks: Ranks

    def find(self, name: str, there: Container[str]) -> str | None:
        """What a tensor of this rank is called among the names that are `there`."""
        first = self.ranks.canonical(name)
        names = (name, self.aliases.get(name), first, self.aliases.get(first))
        return next((one for one in names if one in there), None)

    def unclaimed(self, names: Iterable[str]) -> list[str]:
        """Those that no rank has."""
        known = set(self.ranks.holders)
        known |= {first for name, first in self.aliases.items() if name in known}
        return [name for name in names if name not in known]


def _own_groups(
    optimizer: TwinOptimizer, groups: Iterable[Mapping[str, object]], saved: _SavedNames
) -> list[StateDict]:
    """Saved param groups with this rank's parameters alone; those that no rank has stay, to be found wrong."""
    made = []
    for index, group in enumerate(groups):
        names = [str(name) for name in list_of(group, "params")]
        own, there = [param.name for param in optimizer.runtime.params if param.group == index], set(names)
        here = [name for name in own if saved.find(name, there) is not None]
        made.append({**group, "params": [*here, *saved.unclaimed(names)]})
    return made


def _own_random(found: Checkpoint, first: StateDict, ranks: Ranks) -> StateDict:
    """This rank's random states; a rank that was not there then begins with the first one's, moved on by its number."""
    saved, rank = found.meta.get("ranks"), ranks.rank
    if saved is None:
        return first
    if rank < len(saved):
        own: StateDict = put_together(saved[rank], _reader(found, "rest"))
        return own
    generator = torch.Generator()
    generator.set_state(tensor_of(first, "torch"))
    return {**first, "torch": generator.manual_seed(generator.initial_seed() + rank).get_state()}


def _load_scheduler(scheduler: Scheduler, saved: StateDict, path: Path) -> None:
    """A scheduler that cannot take the state keeps its own."""
    before = copy.copy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(saved)
    except Exception as error:
        scheduler.load_state_dict(before)
        kind = type(scheduler).__name__
        remedy = "Use the same scheduler, or pass load_lr_scheduler_states=False."
        raise invalid_value(f"{path}: scheduler", f"of another kind than {kind} ({error!r})", kind, remedy) from error


def _reader(found: Checkpoint, file: str, shard: TensorShard | None = None) -> Callable[[str], Tensor]:
    """Reads tensors whole; those that are of the shape of a parameter with this `shard`, this rank's part of them."""

    def read(name: str) -> Tensor:
        shape = found.shape(file, name)
        own = local_shape(shard, shape)
        if own == shape:
            return found.tensor(file, name)
        return cut_for(found, file, name, shard, 0, math.prod(own)).view(own)

    return read


class _FileSource:
    """The optimizer's entries in a checkpoint, as this rank's parameters need them."""

    def __init__(self, found: Checkpoint, optimizer: TwinOptimizer, saved: _SavedNames) -> None:
        self._found = found
        entries: dict[str, StateDict] = found.meta.get("optimizer_state", {})
        names = {param.name: saved.find(param.name, entries) for param in optimizer.runtime.params}
        self._entries = {name: entries[there] for name, there in names.items() if there is not None}
        self._entries |= {name: entries[name] for name in saved.unclaimed(entries)}  # to be found wrong
        self._shards = {param.name: shard_of(param.tensor) for param in optimizer.runtime.params}

    def names(self) -> Iterable[str]:
        return self._entries

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        tensors, shard = tensor_names(self._entries[name]), self._shards.get(name)
        return {key: local_shape(shard, self._found.shape("optimizer", path)) for key, path in tensors.items()}

    def step(self, name: str) -> int:
        return int_of(self._entries[name], "step")

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, object]:
        entry, shard = self._entries[name], self._shards[name]
        read = _reader(self._found, "optimizer", shard)
        tensors = tensor_names(entry)
        cut: StateDict = {}
        for key, path in tensors.items():
            if not key.endswith("_scale"):
                cut[key] = cut_for(self._found, "optimizer", path, shard, start, numel)
            elif shard is None:  # else blocks of the whole are not those of a part
                end = -(-(start + numel) // BLOCK)
                cut[key] = self._found.cut("optimizer", path, start // BLOCK, end - start // BLOCK)
        others = {key: value for key, value in entry.items() if key not in tensors and isinstance(value, dict)}
        return cut | {key: put_together(value, read) for key, value in others.items()}


def _check_model(module: nn.Module, found: Checkpoint, what: What, saved: _SavedNames) -> dict[str, str]:
    """This rank's tensors that the checkpoint has, and under which name; ValueError where they do not fit."""
    own, there = tensors_of(module), dict.fromkeys(found.names("model"))
    every = {name: saved.find(name, there) for name in own}
    names = {name: path for name, path in every.items() if path is not None}
    if what.custom_load_fn is not None:
        return names
    if what.strict:
        missing = set(own) - set(names) - set(found.meta["excluded"])
        unknown = set(saved.unclaimed([*there, *saved.aliases]))
        if missing or unknown:
            raise ValueError(
                f"{found.path}: its weights are not this model's: {_some('missing', missing)}"
                f"{_some('not in the model', unknown)}. Build the same model, or pass load_module_strict=False"
            )
    shards = shards_of(module)
    for name, path in names.items():
        shape, wanted = found.shape("model", path), tuple(own[name].shape)
        if name in shards:
            wanted = shards[name].whole_shape(wanted)
        if shape != wanted:
            raise invalid_value(f"{found.path}: shape of {name}", shape, [wanted])
    return names


def _some(what: str, names: set[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f" {what} {shown};"


@torch.no_grad()
def _load_weights(
    engine: EngineParts, found: Checkpoint, names: Mapping[str, str], what: What, extra: StateDict
) -> None:
    module = engine.module
    shards = shards_of(module)
    if engine.optimizer is not None:
        engine.optimizer.flush()  # weights on their way, or still to come, would be written over what is loaded
    if what.custom_load_fn is not None:
        everything = {name: _reader(found, "model", shards.get(name))(path) for name, path in names.items()}
        what.custom_load_fn(src=everything, dst=module)
        return
    own, memory = tensors_of(module), {local_of(t).data_ptr() for t in (*module.parameters(), *module.buffers())}
    written: set[tuple[object, ...]] = set()
    foreign = dict(extra)
    param_offload = param_offload_of(engine)
    if param_offload is not None and engine.optimizer is not None:
        engine.optimizer.runtime.wait_for_copies()
        param_offload.settle()
    offloaded = offloaded_in(module, param_offload)
    for name, path in names.items():
        shard = shards.get(name)
        if name in offloaded:
            assert param_offload is not None
            for piece in param_offload.pieces(offloaded[name]):
                piece.write(cut_for(found, "model", path, shard, piece.start, piece.numel))
            continue
        local = local_of(own[name])
        key = (local.data_ptr(), own[name].shape)
        if own[name].numel() and local.data_ptr() not in memory:
            foreign[name] = found.tensor("model", path)  # made for the state dict alone: its module knows what it is
        elif key not in written:  # a tied weight is written once
            written.add(key)
            if local is own[name]:
                local.copy_(_reader(found, "model", shard)(path))
            else:
                local.copy_(cut_for(found, "model", path, shard, first_of(own[name]), local.numel()).view(local.shape))
    if foreign:
        module.load_state_dict(foreign, strict=False)
