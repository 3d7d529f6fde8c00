"""An engine as a checkpoint, and back: weights, optimizer, schedule, counters, random states and data position.

Everything is streamed: one parameter's state is in memory at a time. Loading checks all that can be wrong, checksums
included, before it changes anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinflow.checkpoint import Checkpoint, Entry, open_checkpoint
from twinflow.checkpoint import save as save_files
from twinflow.checkpoint.tensors import PartOf
from twinflow.checkpoint.together import Alone, agree
from twinflow.checkpoint.tree import Leaf, put_together, take_apart, tensor_names
from twinflow.engine.background import BackgroundSave, freeze
from twinflow.engine.randoms import random_states, set_random_states
from twinflow.engine.ranks import Ranks, deal, ranks_of
from twinflow.errors import bad_value
from twinflow.offload.bucket import local_of
from twinflow.offload.frozen import Frozen
from twinflow.offload.parking import Parking
from twinflow.optim.twin_build import first_of
from twinflow.rules.formats import BLOCK

if TYPE_CHECKING:
    from twinflow.engine.core import Engine

_COUNTERS = ("global_steps", "micro_steps", "global_samples")
Progress = Callable[[int, int], None]  # told the bytes that are written, and all there are
_PARTS = ("scheduler", "loader", "random", "client_state", "extra")


@dataclass(frozen=True)
class What:
    """What to take over from a checkpoint."""

    strict: bool  # the names of the weights must be the model's
    optimizer: bool
    scheduler: bool
    everything_else: bool  # counters, random states, data position
    custom_load_fn: Callable[..., Any] | None = None


def save(
    engine: Engine,
    root: Path,
    tag: str,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
    on_progress: Progress | None,
) -> BackgroundSave | None:
    """Write `root`/`tag`; where the engine saves in the background, begin to."""
    if engine.part:
        raise RuntimeError(
            f"save_checkpoint() after {engine.part} of {engine.gradient_accumulation_steps()} micro-batches of a step. "
            "Call it after a boundary's step()"
        )
    ranks = ranks_of(engine)
    if ranks is None and engine.global_rank > 0:
        return None  # all ranks have the same, and no part of anything: the first saves it
    meta, states, others = _collect(engine, client_state, ranks)
    if engine.optimizer is not None:
        engine.optimizer.wait()
    leaves, meta["aliases"], meta["excluded"] = weights(engine.module, exclude_frozen, _parking(engine))
    if ranks is not None:
        leaves = deal(leaves, ranks)
        if not ranks.are_partitioned:
            states = deal(states, ranks)
    files = {"model": leaves, "optimizer": states, "rest": others}
    frozen = _freeze(engine) if engine.settings.background_bytes is not None else None
    if frozen is not None:
        files = freeze(files, frozen, _buckets_of(engine))

    def write(together: Ranks | None) -> None:
        entries = {name: [Entry(*leaf) for leaf in found] for name, found in files.items()}
        save_files(
            root,
            tag,
            entries,
            meta,
            save_latest=save_latest,
            keep_last=engine.settings.keep_last,
            on_progress=_telling(engine, on_progress),
            together=together,
        )

    if frozen is None:
        write(ranks)
        return None
    team = engine.optimizer.team if engine.optimizer is not None else None
    background = BackgroundSave(
        lambda: write(replace(ranks, group=team.saves) if ranks is not None and team else None), frozen
    )
    background.start()
    return background


def _telling(engine: Engine, on_progress: Progress | None) -> Progress:
    """The watch is told too, however long a disk takes."""

    def told(done: int, total: int) -> None:
        if engine.watch is not None:
            engine.watch.go_on()
        if on_progress is not None:
            on_progress(done, total)

    return told


def _freeze(engine: Engine) -> Frozen | None:
    """A moment at which nothing is under way."""
    if engine.optimizer is None:
        return None
    runtime, limit = engine.optimizer.runtime, engine.settings.background_bytes
    assert limit is not None
    if runtime.job is not None:  # updates of it may have begun, and would go on while it is written
        raise RuntimeError("save_checkpoint() in the background between backward() and step(). Call step() first")
    runtime.wait()
    runtime.wait_for_copies()
    return Frozen(runtime.board, runtime.device, limit)


def _buckets_of(engine: Engine) -> Callable[[Leaf], Sequence[int] | None]:
    """The buckets whose updates would change a leaf: those of its parameter, by the name of either."""
    assert engine.optimizer is not None
    params = engine.optimizer.runtime.params
    by_tensor = {param.tensor: [bucket.plan.index for bucket in param.buckets] for param in params}
    found: dict[str, list[int] | None] = {param.name: by_tensor[param.tensor] for param in params}
    for name, tensor in engine.module.named_parameters(remove_duplicate=False):
        found[name] = by_tensor.get(tensor)  # a frozen one does not change

    def buckets(leaf: Leaf) -> Sequence[int] | None:
        name = leaf.name
        while name not in found and "/" in name:  # parameter/key, with more keys below
            name = name.rpartition("/")[0]
        return found.get(name, [])

    return buckets


def _collect(
    engine: Engine, client_state: dict[str, Any], ranks: Ranks | None
) -> tuple[dict[str, Any], list[Leaf], list[Leaf]]:
    """All but the weights: as JSON, and the tensors of the optimizer and of the rest."""
    meta: dict[str, Any] = {name: getattr(engine, name) for name in _COUNTERS}
    states: list[Leaf] = []
    others: list[Leaf] = []
    if engine.optimizer is not None:
        head, entries = engine.optimizer.stream_state()
        meta["optimizer"], found = take_apart(head, "optimizer")
        others += found
        meta["optimizer_state"] = {}
        for name, entry in entries:
            meta["optimizer_state"][name], found = take_apart(entry, name)
            states += found
    parts = {
        "scheduler": _state_of(engine.lr_scheduler),
        "loader": _state_of(engine.training_dataloader),
        "random": random_states(),
        "client_state": client_state,
        "extra": _extra(engine.module),
    }
    for name, value in parts.items():
        meta[name], found = take_apart(value, name)
        others += found
    if ranks is None:
        return meta, states, others
    own, found = take_apart(random_states(), f"ranks/{ranks.rank}/random")
    meta["ranks"] = ranks.gather(own)
    named = ranks.gather(meta.get("optimizer_state", {}))
    meta["optimizer_state"] = {name: entry for one in named for name, entry in one.items()}
    return meta, states, [*found, *(others if ranks.rank == 0 else ())]  # the first speaks for all


def _state_of(part: Any) -> Any:
    if not hasattr(part, "state_dict"):
        return None
    return part.state_dict()


def _parking(engine: Engine) -> Parking | None:
    return engine.optimizer.runtime.parking if engine.optimizer is not None else None


def weights(
    module: nn.Module, exclude_frozen: bool, parking: Parking | None = None
) -> tuple[list[Leaf], dict[str, str], list[str]]:
    """A model's tensors, each once; names of those that are the same tensor as another; names that were left out."""
    leaves: list[Leaf] = []
    seen: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    frozen = {name for name, param in module.named_parameters(remove_duplicate=False) if not param.requires_grad}
    excluded = []
    parked = _parked(module, parking)
    for name, tensor in _tensors(module).items():
        local, first = local_of(tensor), first_of(tensor)
        key: tuple[Any, ...] = (local.data_ptr(), tensor.shape, local.stride(), tensor.dtype)
        if name in parked:
            key = (id(parked[name]),)
        if exclude_frozen and name in frozen:
            excluded.append(name)
        elif tensor.numel() and seen.setdefault(key, name) != name:
            aliases[name] = seen[key]
        elif name in parked:
            assert parking is not None
            for piece in parking.pieces(parked[name]):
                part = PartOf(tuple(tensor.shape), piece.start)
                leaves.append(Leaf(name, tensor.dtype, (piece.numel,), piece.read, part))
        elif local is tensor:
            leaves.append(Leaf(name, tensor.dtype, tuple(tensor.shape), tensor.detach))
        else:
            rows = local.detach().reshape(-1)
            part = PartOf(tuple(tensor.shape), first)
            leaves.append(Leaf(name, tensor.dtype, (rows.numel(),), rows.detach, part))
    return leaves, aliases, excluded


def _parked(module: nn.Module, parking: Parking | None) -> dict[str, nn.Parameter]:
    """Parameters whose weights live on the host, by every name they have."""
    if parking is None:
        return {}
    return {name: param for name, param in module.named_parameters(remove_duplicate=False) if parking.holds(param)}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def _extra(module: nn.Module) -> dict[str, Any]:
    """What modules add to their state dict that is not a tensor."""
    return {name: value for name, value in module.state_dict().items() if not isinstance(value, Tensor)}


def load(engine: Engine, root: Path, tag: str | None, what: What) -> tuple[str | None, dict[str, Any]]:
    """Take over `root`/`tag`, or the latest; its path and the client state."""
    if engine.optimizer is not None and engine.optimizer.runtime.job is not None:
        raise RuntimeError("load_checkpoint() between backward() and step(). Call step() first")
    ranks = ranks_of(engine)
    found, tags = agree(ranks or Alone(), lambda: _open(root, tag))
    other = next((rank for rank, other in enumerate(tags) if other != tags[0]), None)
    if other is not None:
        remedy = "load_dir must be on a file system that all ranks share."
        raise bad_value(f"{root}: what rank {other} finds", tags[other], [tags[0]], remedy)
    if found is None:
        return None, {}
    checked, _ = agree(ranks or Alone(), lambda: (_check(engine, found, what, ranks), None))
    names, source, head, others = checked
    meta = found.meta
    before = copy.copy(_state_of(engine.lr_scheduler))
    if what.scheduler and others["scheduler"] is not None and engine.lr_scheduler is not None:
        _load_scheduler(engine.lr_scheduler, others["scheduler"], found.path)
    loader = engine.training_dataloader
    if what.everything_else and others["loader"] is not None and hasattr(loader, "load_state_dict"):
        try:
            loader.load_state_dict(others["loader"])
        except Exception:
            if engine.lr_scheduler is not None:
                engine.lr_scheduler.load_state_dict(before)
            raise
    engine.zero_grad()  # of micro-batches whose step will not come
    engine.part = 0
    _load_weights(engine, found, names, what, others["extra"])
    if head is not None:
        assert engine.optimizer is not None
        engine.optimizer.load_state_dict(head, source)
    if what.everything_else:
        for name in _COUNTERS:
            setattr(engine, name, meta[name])
        set_random_states(_own_random(found, others["random"], ranks))
    return str(found.path), others["client_state"]


def _open(root: Path, tag: str | None) -> tuple[Checkpoint | None, str | None]:
    """A checkpoint of an engine, if there is one, and its tag."""
    found = open_checkpoint(root, tag)
    if found is None:
        return None, None
    missing = [name for name in (*_COUNTERS, *_PARTS, "aliases", "excluded") if name not in found.meta]
    if missing:
        raise ValueError(f"{found.path}: not a checkpoint of an engine: meta.json has no {', '.join(missing)}")
    return found, found.path.name


def _check(
    engine: Engine, found: Checkpoint, what: What, ranks: Ranks | None
) -> tuple[dict[str, str], _FileSource, Any, dict[str, Any]]:
    """All that can be wrong, before anything changes: names of weights, the optimizer's entries and head, the rest."""
    found.verify(share=None if ranks is None else (ranks.rank, ranks.world))
    meta, rest = found.meta, _reader(found, "rest")
    names = _check_model(engine.module, found, what)
    source, head = _FileSource(found), None
    if what.optimizer and engine.optimizer is not None and "optimizer" in meta:
        head = put_together(meta["optimizer"], rest)
        engine.optimizer.check_state(head, source)
    return names, source, head, {key: put_together(meta[key], rest) for key in _PARTS}


def _own_random(found: Checkpoint, first: Any, ranks: Ranks | None) -> Any:
    """This rank's random states; a rank that was not there then begins with the first one's, moved on by its number."""
    saved, rank = found.meta.get("ranks"), 0 if ranks is None else ranks.rank
    if saved is None:
        return first
    if rank < len(saved):
        return put_together(saved[rank], _reader(found, "rest"))
    generator = torch.Generator()
    generator.set_state(first["torch"])
    return {**first, "torch": generator.manual_seed(generator.initial_seed() + rank).get_state()}


def _load_scheduler(scheduler: Any, saved: Any, path: Path) -> None:
    """A scheduler that cannot take the state keeps its own."""
    before = copy.copy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(saved)
    except Exception as error:
        scheduler.load_state_dict(before)
        kind = type(scheduler).__name__
        remedy = "Use the same scheduler, or pass load_lr_scheduler_states=False."
        raise bad_value(f"{path}: scheduler", f"of another kind than {kind} ({error!r})", kind, remedy) from error


def _reader(found: Checkpoint, file: str) -> Callable[[str], Tensor]:
    return lambda name: found.tensor(file, name)


class _FileSource:
    """The optimizer's entries in a checkpoint."""

    def __init__(self, found: Checkpoint) -> None:
        self._found = found
        self._entries: dict[str, Any] = found.meta.get("optimizer_state", {})

    def names(self) -> Iterable[str]:
        return self._entries

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        tensors = tensor_names(self._entries[name])
        return {key: self._found.shape("optimizer", path) for key, path in tensors.items()}

    def step(self, name: str) -> int:
        return int(self._entries[name]["step"])

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, Any]:
        entry, read = self._entries[name], _reader(self._found, "optimizer")
        tensors = tensor_names(entry)
        cut: dict[str, Any] = {}
        for key, path in tensors.items():
            unit = BLOCK if key.endswith("_scale") else 1
            end = -(-(start + numel) // unit)
            cut[key] = self._found.cut("optimizer", path, start // unit, end - start // unit)
        others = {key: value for key, value in entry.items() if key not in tensors and isinstance(value, dict)}
        return cut | {key: put_together(value, read) for key, value in others.items()}


def _check_model(module: nn.Module, found: Checkpoint, what: What) -> dict[str, str]:
    """The model's tensors that the checkpoint has, and under which name; ValueError where they do not fit."""
    own, aliases = _tensors(module), found.meta["aliases"]
    saved = set(found.names("model"))
    names = {name: aliases.get(name, name) for name in own if aliases.get(name, name) in saved}
    if what.custom_load_fn is not None:
        return names
    if what.strict:
        missing = set(own) - set(names) - set(found.meta["excluded"])
        unknown = (saved | set(aliases)) - set(own)
        if missing or unknown:
            raise ValueError(
                f"{found.path}: its weights are not this model's: {_some('missing', missing)}"
                f"{_some('not in the model', unknown)}. Build the same model, or pass load_module_strict=False"
            )
    for name, path in names.items():
        shape = found.shape("model", path)
        if shape != tuple(own[name].shape):
            raise bad_value(f"{found.path}: shape of {name}", shape, [tuple(own[name].shape)])
    return names


def _some(what: str, names: set[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f" {what} {shown};"


@torch.no_grad()
def _load_weights(engine: Engine, found: Checkpoint, names: Mapping[str, str], what: What, extra: Any) -> None:
    module = engine.module
    if engine.optimizer is not None:
        engine.optimizer.flush()  # weights on their way, or still to come, would be written over what is loaded
    if what.custom_load_fn is not None:
        everything = {name: found.tensor("model", path) for name, path in names.items()}
        what.custom_load_fn(src=everything, dst=module)
        return
    own, memory = _tensors(module), {local_of(t).data_ptr() for t in (*module.parameters(), *module.buffers())}
    written: set[tuple[Any, ...]] = set()
    foreign: dict[str, Any] = dict(extra or {})
    parking = _parking(engine)
    parked = _parked(module, parking)
    for name, path in names.items():
        if name in parked:
            assert parking is not None
            for piece in parking.pieces(parked[name]):
                piece.write(found.cut("model", path, piece.start, piece.numel))
            continue
        local = local_of(own[name])
        key = (local.data_ptr(), own[name].shape)
        if own[name].numel() and local.data_ptr() not in memory:
            foreign[name] = found.tensor("model", path)  # made for the state dict alone: its module knows what it is
        elif key not in written:  # a tied weight is written once
            written.add(key)
            if local is own[name]:
                local.copy_(found.tensor("model", path))
            else:
                local.copy_(found.cut("model", path, first_of(own[name]), local.numel()).view(local.shape))
    if foreign:
        module.load_state_dict(foreign, strict=False)
