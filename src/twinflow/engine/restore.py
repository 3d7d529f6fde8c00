# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint into an engine. Everything is checked, checksums included, before the engine changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from twinflow.checkpoint import Checkpoint, open_checkpoint
from twinflow.checkpoint.disk import damaged
from twinflow.checkpoint.manifest import META
from twinflow.checkpoint.plain import put_together, tensor_names
from twinflow.checkpoint.shards import local_shape
from twinflow.checkpoint.together import agree
from twinflow.engine.base import EngineBase
from twinflow.engine.ranks import Ranks, ranks_of
from twinflow.engine.state import (
    COUNTERS,
    PARTS,
    check_random_states,
    names_of,
    offloaded_in,
    param_offload_of,
    set_random_states,
    shards_of,
    tensors_in,
    tensors_of,
)
from twinflow.engine.values import UserValue
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import local_of
from twinflow.offload.quantised import quantised_in
from twinflow.offload.weight_guard import plain
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.shard import TensorShard, shard_of
from twinflow.rules.formats import BLOCK
from twinflow.state_dict import StateDict, dict_of, int_of, list_of, tensor_of
from twinflow.zero.whole import first_of

PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True)
class What:
    """The parts of a checkpoint that are loaded."""

    strict: bool  # the checkpoint must have exactly the weights of the model
    optimizer: bool
    scheduler: bool
    everything_else: bool  # counters, random states, data position
    custom_load_fn: Callable[..., object] | None = None


def load(engine: EngineBase, root: Path, tag: str | None, what: What) -> tuple[str | None, dict[str, UserValue]]:
    """Loads `root`/`tag`, or the latest checkpoint. Returns its path and client state, or (None, {}) if none exists."""
    if engine.optimizer is not None and engine.optimizer.runtime.steps.job is not None:
        raise wrong_state(
            "load_checkpoint() cannot run between backward() and step()",
            "updates of this step may have begun",
            "Call step() first.",
        )
    ranks = ranks_of(engine).meet(names_of(engine))
    found, tags = agree(ranks, lambda: _open(root, tag))
    other = next((rank for rank, other in enumerate(tags) if other != tags[0]), None)
    if other is not None:
        remedy = "Use a load_dir on a file system that all ranks share."
        expected = f"{tags[0]!r}, as on rank 0"
        raise invalid_value(f"The checkpoint that rank {other} finds in {root}", tags[other], expected, remedy)
    if found is None:
        return None, {}
    checked, _ = agree(ranks, lambda: (_check_all(engine, found, what, ranks), None))
    names, source, head, others, own_random = checked
    meta = found.meta
    scheduler = engine.lr_scheduler
    loader: object = engine.training_dataloader
    with ExitStack() as undo:  # if the scheduler or the loader raises an exception, the scheduler keeps its state
        if what.scheduler and others["scheduler"] is not None and scheduler is not None:
            undo.callback(scheduler.load_state_dict, copy.copy(scheduler.state_dict()))
            try:
                scheduler.load_state_dict(dict_of(others, "scheduler"))
            except Exception as error:
                raise ValueError(
                    f"{found.path}: the saved scheduler state does not fit {type(scheduler).__name__} ({error!r}). Use "
                    "the scheduler that was saved, or pass load_lr_scheduler_states=False."
                ) from error
        if what.everything_else and others["loader"] is not None and hasattr(loader, "load_state_dict"):
            try:
                loader.load_state_dict(others["loader"])
            except Exception as error:
                raise ValueError(f"{found.path}: the saved position in the data cannot be used: {error}") from error
        undo.pop_all()
    engine.zero_grad()  # drops gradients of a step that was not completed
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
        set_random_states(own_random)
    return str(found.path), dict_of(others, "client_state")


def _open(root: Path, tag: str | None) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint and its tag; None if there is no checkpoint."""
    found = open_checkpoint(root, tag)
    if found is None:
        return None, None
    missing = [name for name in (*COUNTERS, *PARTS, "aliases", "excluded") if name not in found.meta]
    if missing:
        raise ValueError(
            f"{found.path} is not a checkpoint of an engine: meta.json has no {', '.join(missing)}. "
            "Load a checkpoint that engine.save_checkpoint() has written."
        )
    _check_meta(found)
    return found, found.path.name


class _Meta(BaseModel):
    """The types of the values in `meta` that an engine has saved."""

    model_config = ConfigDict(strict=True)

    global_steps: Count
    micro_steps: Count
    global_samples: Count
    aliases: dict[str, str]
    excluded: list[str]
    random: dict[str, object]
    client_state: dict[str, object]
    extra: dict[str, object]
    scheduler: object
    loader: object
    optimizer: dict[str, object] = {}
    optimizer_state: dict[str, dict[str, object]] = {}
    ranks: list[dict[str, object]] | None = None
    errors: list[object] = []


def _check_meta(found: Checkpoint) -> None:
    try:
        _Meta.model_validate(found.meta)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged(f"{found.path / META} was not written by an engine ({where}: {first['msg']})") from error


def _check_all(
    engine: EngineBase, found: Checkpoint, what: What, ranks: Ranks
) -> tuple[dict[str, str], FileSource | None, StateDict | None, StateDict, StateDict]:
    """Checks everything before the engine changes: names, shapes and dtypes of weights, the optimizer, the rest.

    The checksums of `meta` are right here. A value that the checks do not expect was written by something else.
    """
    found.verify(share=(ranks.rank, ranks.world))
    with checking(found):
        return _check(engine, found, what, ranks)


@contextmanager
def checking(found: Checkpoint) -> Iterator[None]:
    """Adds the path of a checkpoint to errors of checks of its values."""
    try:
        yield
    except ValueError as error:
        if str(found.path) in str(error):
            raise
        raise ValueError(f"{found.path}: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        text = f"{found.path / META} has values that no engine has written ({type(error).__name__}: {error})"
        raise damaged(text) from error


def _check(
    engine: EngineBase, found: Checkpoint, what: What, ranks: Ranks
) -> tuple[dict[str, str], FileSource | None, StateDict | None, StateDict, StateDict]:
    meta, rest = found.meta, _reader(found, "rest")
    saved = _SavedNames(meta["aliases"], ranks)
    names = _check_model(engine.module, found, what, saved)
    source, head = None, None
    if what.optimizer and engine.optimizer is not None and "optimizer" in meta:
        head = put_together(meta["optimizer"], rest)
        head = {**head, "param_groups": _own_groups(engine.optimizer, head["param_groups"], saved)}
        source = _source(found, engine.optimizer, saved)
        source.check()
        engine.optimizer.check_state(head, source)
        for own, group in zip(engine.optimizer.param_groups, list_of(head, "param_groups"), strict=True):
            _check_kinds(found, "a param group", {key: own[key] for key in own if key != "params"}, group)
            # An optimizer of torch accepts None for any option, and fails in its first step.
            is_known = engine.optimizer.rule_name.startswith("torch.optim.")
            missing = {key for key, value in group.items() if value is None} if isinstance(group, Mapping) else set()
            for key in missing.intersection(own):
                if (is_known or key == "lr") and _kind_of(own[key]) == "number":
                    raise damaged(f"{found.path / META}: {key} in a param group is None, but must be a number")
        _check_errors(found)
        if engine.optimizer.is_compressed:
            errors = meta.get("errors", [])
            engine.optimizer.check_exchange_errors(errors, lambda named: put_together(named, _zeros(found, "rest")))
    others = {key: put_together(meta[key], rest) for key in PARTS}
    own_random = _own_random(found, dict_of(others, "random"), ranks)
    if what.everything_else:
        check_random_states(own_random)
    if what.scheduler and others["scheduler"] is not None and engine.lr_scheduler is not None:
        own_schedule = engine.lr_scheduler.state_dict()
        _check_kinds(found, "the scheduler's state", own_schedule, others["scheduler"])
        if type(engine.lr_scheduler).__module__.startswith(("torch.", "twinflow.")):
            _check_schedule(found, own_schedule, dict_of(others, "scheduler"))
    return names, source, head, others, own_random


def _zeros(found: Checkpoint, file: str) -> Callable[[str], Tensor]:
    """A function that returns zeros of the shape and dtype of a saved tensor, without reading it."""
    return lambda name: torch.zeros((), dtype=found.dtype(file, name)).expand(found.shape(file, name))


def _check_kinds(found: Checkpoint, where: str, own: Mapping[str, object], saved: object) -> None:
    """Raises ValueError if a saved value has another kind than `own`. Schedulers and optimizers of torch accept any
    value, and fail only in the next step.
    """
    if not isinstance(saved, Mapping):
        raise damaged(f"{found.path / META}: {where} is not a dict")
    for key, value in own.items():
        number = saved.get(key)
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            raise damaged(f"{found.path / META}: {key} in {where} is a number of more than 64 bits")
        kind, there = _kind_of(value), _kind_of(saved.get(key, value))
        is_number = {kind, there} == {"number", "tensor"}  # such as a learning rate
        if kind and there and kind != there and not is_number:
            raise damaged(f"{found.path / META}: {key} in {where} is a {there}, but must be a {kind}")


def _check_schedule(found: Checkpoint, own: Mapping[str, object], saved: StateDict) -> None:
    """Raises ValueError for a number or list that is None, for items of another kind, and for learning rates that
    cannot be used. Only for schedulers that this code knows: one of a user may have other rules.
    """
    for key, value in own.items():
        there, name = saved.get(key, value), f"{found.path / META}: {key} in the scheduler's state"
        if _kind_of(value) in ("number", "list") and there is None:
            raise damaged(f"{name} is None, but must be a {_kind_of(value)}")
        if not isinstance(value, (list, tuple)) or not isinstance(there, (list, tuple)) or not value:
            continue
        if not {_kind_of(one) for one in there} <= {_kind_of(one) for one in value}:
            raise damaged(f"{name} has values of another kind than this scheduler uses")
        if key in ("base_lrs", "_last_lr"):
            rates = [float(one) for one in there if isinstance(one, (int, float))]
            if len(there) != len(value) or not all(0.0 <= rate < math.inf for rate in rates):
                raise damaged(f"{name} must have {len(value)} learning rates, which are finite numbers >= 0")


def _kind_of(value: object) -> str:
    """The kind of a value, for comparisons. Empty for None and for other values."""
    number, sequence = (int, float), (list, tuple)
    kinds: dict[str, type | tuple[type, ...]] = {"boolean": bool, "number": number, "text": str, "list": sequence}
    if isinstance(value, (Mapping, Tensor)):
        return "dict" if isinstance(value, Mapping) else "tensor"
    return next((kind for kind, types in kinds.items() if isinstance(value, types)), "")


def _check_errors(found: Checkpoint) -> None:
    """Raises ValueError for error-feedback state of an earlier version, which fits only one layout of ranks."""
    if any(one and "num_replicas" not in one for one in found.meta.get("errors", [])):
        raise ValueError(
            f"{found.path}: The compression errors of 1-bit Adam have the format of an earlier version of twinflow, "
            "which this version cannot read. Continue with the version that saved the checkpoint, or pass "
            "load_optimizer_states=False."
        )


@dataclass(frozen=True)
class _SavedNames:
    """Maps names in this rank's module to names in a checkpoint, which another layout of ranks may have saved."""

    aliases: Mapping[str, str]  # name of a tied tensor -> name under which the checkpoint stores it
    ranks: Ranks

    def find(self, name: str, there: Container[str]) -> str | None:
        """The saved name of this rank's tensor `name`; None if it is not among the saved names `there`."""
        first = self.ranks.canonical(name)
        names = (name, self.aliases.get(name), first, self.aliases.get(first))
        return next((one for one in names if one in there), None)

    def unclaimed(self, names: Iterable[str]) -> list[str]:
        """The saved names whose tensors no rank has."""
        known = set(self.ranks.holders)
        known |= {first for name, first in self.aliases.items() if name in known}
        return [name for name in names if name not in known]


def _own_groups(
    optimizer: TwinOptimizer, groups: Iterable[Mapping[str, object]], saved: _SavedNames
) -> list[StateDict]:
    """The saved param groups with only this rank's parameters.

    Names that no rank has stay in the groups, so that the optimizer's check reports them.
    """
    made = []
    for index, group in enumerate(groups):
        names = [str(name) for name in list_of(group, "params")]
        own, there = [param.name for param in optimizer.runtime.params if param.group == index], set(names)
        here = [name for name in own if saved.find(name, there) is not None]
        made.append({**group, "params": [*here, *saved.unclaimed(names)]})
    return made


def _own_random(found: Checkpoint, first: StateDict, ranks: Ranks) -> StateDict:
    """This rank's random states. A rank that the checkpoint lacks gets those of rank 0, with another seed for torch."""
    saved, rank = found.meta.get("ranks"), ranks.rank
    if saved is None:
        return first
    if rank < len(saved):
        own: StateDict = put_together(saved[rank], _reader(found, "rest"))
        return own
    generator = torch.Generator()
    generator.set_state(tensor_of(first, "torch"))
    return {**first, "torch": generator.manual_seed(generator.initial_seed() + rank).get_state()}


def _reader(found: Checkpoint, file: str, shard: TensorShard | None = None) -> Callable[[str], Tensor]:
    """A function that reads tensors by name: this rank's part if the tensor has the shape of a sharded parameter."""

    def read(name: str) -> Tensor:
        shape = found.shape(file, name)
        own = local_shape(shard, shape)
        if own == shape:
            return found.tensor(file, name)
        return found.cut_shard(file, name, shard, 0, math.prod(own)).view(own)

    return read


def _source(found: Checkpoint, optimizer: TwinOptimizer, saved: _SavedNames) -> FileSource:
    """The optimizer's state in a checkpoint, cut for this rank's parameters."""
    params, entries = optimizer.runtime.params, found.meta.get("optimizer_state", {})
    names = {param.name: saved.find(param.name, entries) for param in params}
    own = {name: entries[there] for name, there in names.items() if there is not None}
    own |= {name: entries[name] for name in saved.unclaimed(entries)}  # the optimizer's check reports them
    return FileSource(found, own, {param.name: shard_of(param.tensor) for param in params})


class FileSource:
    """The optimizer's state in a checkpoint. `shards`: this rank's shards of parameters; None for whole parameters."""

    def __init__(
        self, found: Checkpoint, entries: Mapping[str, StateDict], shards: Mapping[str, TensorShard | None]
    ) -> None:
        self._found = found
        self._entries = entries
        self._shards = shards

    def names(self) -> Iterable[str]:
        return self._entries

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        tensors, shard = tensor_names(self._entries[name]), self._shards.get(name)
        return {key: local_shape(shard, self._found.shape("optimizer", path)) for key, path in tensors.items()}

    def dtypes(self, name: str) -> dict[str, torch.dtype]:
        return {key: self._found.dtype("optimizer", path) for key, path in tensor_names(self._entries[name]).items()}

    def check(self) -> None:
        """Raises ValueError if an entry refers to tensors that are not in the file, or if a value in the state of a
        user's optimizer is of another kind than for other parameters. No tensor is read.
        """
        kinds: dict[tuple[str, str], str] = {}
        for name, entry in self._entries.items():
            values: StateDict = put_together(entry, _zeros(self._found, "optimizer"))
            for key, value in values.items():
                if key.endswith("_scale") and not isinstance(value, Tensor):
                    raise damaged(f"{self._found.path / META}: {key} of {name} is not a tensor, but must be one")
            for part in ("state", "group"):
                for key, value in dict_of(values, part).items():
                    kind = _kind_of(value)
                    if part == "state" and value is None:  # such as momentum that does not exist yet
                        continue
                    if kinds.setdefault((part, key), kind) != kind:
                        what = f"{key} in the {part} of {name} is a {kind}, but a {kinds[part, key]} for others"
                        raise damaged(f"{self._found.path / META}: {what}")

    def step(self, name: str) -> int:
        return int_of(self._entries[name], "step")

    def cut(self, name: str, start: int, numel: int) -> Mapping[str, object]:
        entry, shard = self._entries[name], self._shards.get(name)
        read = _reader(self._found, "optimizer", shard)
        tensors = tensor_names(entry)
        cut: StateDict = {}
        for key, path in tensors.items():
            if not key.endswith("_scale"):
                cut[key] = self._found.cut_shard("optimizer", path, shard, start, numel)
            elif shard is None:  # a shard's quantization blocks differ from those of the whole tensor
                end = -(-(start + numel) // BLOCK)
                cut[key] = self._found.cut("optimizer", path, start // BLOCK, end - start // BLOCK)
        others = {key: value for key, value in entry.items() if key not in tensors and isinstance(value, dict)}
        return cut | {key: put_together(value, read) for key, value in others.items()}


def _check_model(module: nn.Module, found: Checkpoint, what: What, saved: _SavedNames) -> dict[str, str]:
    """Maps the names of this rank's tensors to their names in the checkpoint, if the checkpoint has them.

    Raises ValueError if names or shapes do not fit.
    """
    own, there = tensors_of(module), dict.fromkeys(found.names("model"))
    every = {name: saved.find(name, there) for name in own}
    names = {name: path for name, path in every.items() if path is not None}
    if what.custom_load_fn is not None:
        return names
    if what.strict:
        missing = set(own) - set(names) - set(found.meta["excluded"])
        unknown = set(saved.unclaimed([*there, *saved.aliases]))
        if missing or unknown:
            differences = [*_some("the checkpoint has no", missing), *_some("the model has no", unknown)]
            raise ValueError(
                f"{found.path}: the weights do not fit this model: {'; '.join(differences)}. "
                "Build the model that was saved, or pass load_module_strict=False."
            )
    shards = shards_of(module)
    for name, path in names.items():
        shape, wanted = found.shape("model", path), tuple(own[name].shape)
        if name in shards:
            wanted = shards[name].whole_shape(wanted)
        if shape != wanted:
            remedy = "Build the model that was saved."
            raise invalid_value(f"{found.path}: the shape of {name}", shape, f"{wanted}, as in the model", remedy)
        dtype, expected = found.dtype("model", path), own[name].dtype
        # A run may go on in another precision: the masters keep theirs.
        if dtype != expected and not (dtype in PRECISIONS and expected in PRECISIONS):
            remedy = "Build the model that was saved."
            raise invalid_value(f"{found.path}: the dtype of {name}", dtype, f"{expected}, as in the model", remedy)
    return names


def _some(what: str, names: set[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"{what} {shown}"]


@torch.no_grad()
def _load_weights(
    engine: EngineBase, found: Checkpoint, names: Mapping[str, str], what: What, extra: StateDict
) -> None:
    module = engine.module
    shards = shards_of(module)
    if engine.optimizer is not None:
        engine.optimizer.flush()  # weights of running updates would overwrite the loaded ones
    if what.custom_load_fn is not None:
        everything = {name: _reader(found, "model", shards.get(name))(path) for name, path in names.items()}
        what.custom_load_fn(src=everything, dst=module)
        return
    own = tensors_of(module)
    with plain():  # addresses do not need the values of weights on the host, of which this rank may have a part
        inner = tensors_in(quantised_in(module)).values()
        memory = {local_of(t).data_ptr() for t in (*module.parameters(), *module.buffers(), *inner)}
    written: set[tuple[object, ...]] = set()
    foreign = dict(extra)
    param_offload = param_offload_of(engine)
    if param_offload is not None:
        if engine.optimizer is not None:
            engine.optimizer.runtime.wait_for_copies()
        param_offload.settle()
    offloaded = offloaded_in(module, param_offload)
    for name, path in names.items():
        shard = shards.get(name)
        if name in offloaded:
            assert param_offload is not None
            for piece in param_offload.params.pieces(offloaded[name]):
                piece.write(found.cut_shard("model", path, shard, piece.start, piece.numel))
            continue
        local = local_of(own[name])
        key = (local.data_ptr(), own[name].shape)
        if own[name].numel() and local.data_ptr() not in memory:
            foreign[name] = found.tensor("model", path)  # the module made this tensor and must load it itself
        elif key not in written:  # a tied weight is written once
            written.add(key)
            if local is own[name]:
                local.copy_(_reader(found, "model", shard)(path))
            else:
                local.copy_(found.cut_shard("model", path, shard, first_of(own[name]), local.numel()).view(local.shape))
    if foreign:
        module.load_state_dict(foreign, strict=False)
