"""A checkpoint into an engine: all that can be wrong is found, checksums included, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinflow.checkpoint import Checkpoint, open_checkpoint
from twinflow.checkpoint.together import Alone, agree
from twinflow.checkpoint.tree import put_together, tensor_names
from twinflow.engine.randoms import set_random_states
from twinflow.engine.ranks import Ranks, ranks_of
from twinflow.engine.state import COUNTERS, PARTS, parked_in, parking_of, state_of, tensors_of
from twinflow.errors import bad_value
from twinflow.offload.bucket import local_of
from twinflow.optim.twin_build import first_of
from twinflow.rules.formats import BLOCK

if TYPE_CHECKING:
    from twinflow.engine.core import Engine


@dataclass(frozen=True)
class What:
    """What to take over from a checkpoint."""

    strict: bool  # the names of the weights must be the model's
    optimizer: bool
    scheduler: bool
    everything_else: bool  # counters, random states, data position
    custom_load_fn: Callable[..., Any] | None = None


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
    before = copy.copy(state_of(engine.lr_scheduler))
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
        if engine.optimizer.is_compressed:
            read = _reader(found, "rest")
            engine.optimizer.load_exchange_errors([put_together(one, read) for one in meta.get("errors", [])])
    if what.everything_else:
        for name in COUNTERS:
            setattr(engine, name, meta[name])
        set_random_states(_own_random(found, others["random"], ranks))
    return str(found.path), others["client_state"]


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
    return names, source, head, {key: put_together(meta[key], rest) for key in PARTS}


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
    own, aliases = tensors_of(module), found.meta["aliases"]
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
    own, memory = tensors_of(module), {local_of(t).data_ptr() for t in (*module.parameters(), *module.buffers())}
    written: set[tuple[Any, ...]] = set()
    foreign: dict[str, Any] = dict(extra or {})
    parking = parking_of(engine)
    if parking is not None and engine.optimizer is not None:
        engine.optimizer.runtime.wait_for_copies()
        parking.settle()
    parked = parked_in(module, parking)
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
