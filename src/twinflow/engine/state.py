"""An engine as a checkpoint: weights, optimizer, schedule, counters, random states and data position; back: restore.py.

Everything is streamed: one parameter's state is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from twinflow.checkpoint import Entry
from twinflow.checkpoint import save as save_files
from twinflow.checkpoint.tensors import PartOf
from twinflow.checkpoint.tree import Leaf, take_apart
from twinflow.engine.background import BackgroundSave, freeze
from twinflow.engine.randoms import random_states
from twinflow.engine.ranks import Ranks, deal, ranks_of
from twinflow.offload.bucket import local_of
from twinflow.offload.frozen import Frozen
from twinflow.offload.parking import Parking
from twinflow.optim.twin_build import first_of

if TYPE_CHECKING:
    from twinflow.engine.core import Engine

COUNTERS = ("global_steps", "micro_steps", "global_samples")
Progress = Callable[[int, int], None]  # told the bytes that are written, and all there are
PARTS = ("scheduler", "loader", "random", "client_state", "extra")


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
    leaves, meta["aliases"], meta["excluded"] = weights(engine.module, exclude_frozen, parking_of(engine))
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
    meta: dict[str, Any] = {name: getattr(engine, name) for name in COUNTERS}
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
        "scheduler": state_of(engine.lr_scheduler),
        "loader": state_of(engine.training_dataloader),
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
    if engine.optimizer is not None and engine.optimizer.is_compressed:
        own, more = take_apart(engine.optimizer.exchange_errors(), f"ranks/{ranks.rank}/errors")
        meta["errors"], found = ranks.gather(own), [*found, *more]
    named = ranks.gather(meta.get("optimizer_state", {}))
    meta["optimizer_state"] = {name: entry for one in named for name, entry in one.items()}
    return meta, states, [*found, *(others if ranks.rank == 0 else ())]  # the first speaks for all


def state_of(part: Any) -> Any:
    """What a part that may not be there gives to be saved."""
    if not hasattr(part, "state_dict"):
        return None
    return part.state_dict()


def parking_of(engine: Engine) -> Parking | None:
    """Where weights live that are on the host."""
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
    parked = parked_in(module, parking)
    for name, tensor in tensors_of(module).items():
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


def parked_in(module: nn.Module, parking: Parking | None) -> dict[str, nn.Parameter]:
    """Parameters whose weights live on the host, by every name they have."""
    if parking is None:
        return {}
    return {name: param for name, param in module.named_parameters(remove_duplicate=False) if parking.holds(param)}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A state dict without what is no tensor."""
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def _extra(module: nn.Module) -> dict[str, Any]:
    """What modules add to their state dict that is not a tensor."""
    return {name: value for name, value in module.state_dict().items() if not isinstance(value, Tensor)}
