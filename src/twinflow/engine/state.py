# SPDX-License-Identifier: Apache-2.0
"""Saves an engine as a checkpoint: weights, optimizer, scheduler, counters, random states and data position.

State is streamed to the files: only two tensors, or those of a few blocks, are copied in memory at a time. restore.py
loads it.

With `is_background` in the settings, the thread "twinflow-save" writes the files while training continues. Before it
starts, `Frozen.begin` freezes the state (offload/frozen.py): updates of a bucket (a group of parameters) then leave the
old state to the thread, or wait until it is written or copied. `Frozen.end` releases all buckets when the thread has
written the files or has failed.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from twinflow.checkpoint import JSON, Entry, PartOf
from twinflow.checkpoint import save as save_files
from twinflow.checkpoint.plain import take_apart
from twinflow.checkpoint.shards import stored_name, to_mark
from twinflow.checkpoint.together import agree
from twinflow.engine.base import EngineBase
from twinflow.engine.ranks import Ranks, Said, deal, ranks_of, unite
from twinflow.errors import invalid_value, wrong_state
from twinflow.offload.bucket import Param, local_of
from twinflow.offload.frozen import Costs, Frozen
from twinflow.offload.param_offload import ParamOffload
from twinflow.offload.quantised import inner_tensors, quantised_in
from twinflow.offload.state_dict_weights import listed
from twinflow.optim.twin_state import weight_reader
from twinflow.parallel.shard import TensorShard, shard_of
from twinflow.planner.formats import reserved_bytes
from twinflow.state_dict import StateDict, list_of, tensor_of, value_of
from twinflow.zero.start import own_host_bytes
from twinflow.zero.whole import first_of

LOGGER = logging.getLogger("twinflow")
COUNTERS = ("global_steps", "micro_steps", "global_samples")
Files = dict[str, list[Entry]]  # the entries of each file
Progress = Callable[[int, int], None]  # called with the number of bytes written so far and the total
PARTS = ("scheduler", "loader", "random", "client_state", "extra")


def save(
    engine: EngineBase,
    root: Path,
    tag: str,
    client_state: StateDict,
    save_latest: bool,
    exclude_frozen: bool,
    on_progress: Progress | None,
) -> BackgroundSave | None:
    """Writes `root`/`tag`, or starts a thread that writes it if the engine saves in the background."""
    if engine.part:
        raise wrong_state(
            "save_checkpoint() cannot run in the middle of a step",
            f"it is called after {engine.part} of {engine.gradient_accumulation_steps()} micro-batches",
            "Call it after the step() of the last micro-batch.",
        )
    ranks = ranks_of(engine)
    if ranks.world == 1 and engine.global_rank > 0:
        return None  # all ranks have the same state, and rank 0 saves it
    tag = _common_tag(tag, ranks, engine.settings.parsed.checkpoint.tag_validation)
    ranks = ranks.meet(names_of(engine))
    own, said = agree(ranks, lambda: _collect(engine, client_state, exclude_frozen, ranks))
    meta, files, optimizer = unite(own.meta, said), own.files, engine.optimizer
    if ranks.world > 1:
        meta["ranks"] = [one["random"] for one in said]
    if optimizer is not None and optimizer.is_compressed:
        meta["errors"] = [one["errors"] for one in said]

    def progress(done: int, total: int) -> None:
        if engine.watch is not None:
            engine.watch.go_on()  # so that a slow disk does not look like a hang
        if on_progress is not None:
            on_progress(done, total)

    def write(files: Files, together: Ranks) -> None:
        entries = {
            file: [replace(leaf, name=own.names[file].get(leaf.name, leaf.name)) for leaf in leaves]
            for file, leaves in files.items()
        }
        keep_last = engine.settings.keep_last
        save_files(
            root,
            tag,
            entries,
            meta,
            save_latest=save_latest,
            keep_last=keep_last,
            on_progress=progress,
            together=together,
        )

    if not engine.settings.is_background or optimizer is None:
        write(files, ranks)
        return None
    frozen, files = _freeze(engine, files)
    if optimizer.team is not None and ranks.world > 1:
        ranks = replace(ranks, group=optimizer.team.saves)  # a group of its own, because training uses the others
    return BackgroundSave(lambda: write(files, ranks), frozen)


def _common_tag(tag: str, ranks: Ranks, mode: str) -> str:
    """The tag of rank 0, unless different tags are an error (`mode` "Fail"). A checkpoint has one folder."""
    if mode == "Fail" or ranks.world == 1:
        return tag
    tags = ranks.gather(tag)
    if mode == "Warn" and len(set(tags)) > 1 and ranks.rank == 0:
        LOGGER.warning(
            f"save_checkpoint() was called with different tags: {', '.join(sorted(set(tags)))}. All ranks use that of "
            f"rank 0, {tags[0]}. Give the same tag on all ranks"
        )
    return tags[0]


class BackgroundSave:
    """A thread that writes a checkpoint of the frozen state."""

    def __init__(self, write: Callable[[], object], frozen: Frozen) -> None:
        self._write = write
        self._frozen = frozen
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="twinflow-save", daemon=False)
        frozen.begin()
        try:
            self._thread.start()
        except RuntimeError:  # no thread will read the state, so updates must not wait for it
            frozen.end()
            raise

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread only: more would slow down updates, and the disk is slower than one
        try:
            self._write()
        except BaseException as error:
            self._error = error
            # `wait` raises the error too, but a script may end without calling it.
            # The text of an OSError has the name of the file, its `repr` does not.
            text = f"{type(error).__name__}: {error}".removesuffix(".")
            LOGGER.error(f"A thread could not write the checkpoint: {text}. Call save_checkpoint() again.")
        finally:
            self._frozen.end()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is written or has failed."""
        return not self._thread.is_alive()

    @property
    def costs(self) -> Costs:
        """Updates beside this checkpoint that needed a copy of the state, and those that did not."""
        return self._frozen.costs()

    def wait(self) -> None:
        """Waits until the checkpoint is written. Raises the exception of the thread if it has failed."""
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _freeze(engine: EngineBase, files: Mapping[str, Sequence[Entry]]) -> tuple[Frozen, Files]:
    """Waits for running updates and copies. Returns the frozen state, and the entries with `read` functions that return
    the present values even if training continues.
    """
    assert engine.optimizer is not None
    runtime = engine.optimizer.runtime
    if runtime.steps.job is not None:
        raise wrong_state(
            "save_checkpoint() in the background cannot run between backward() and step()",
            "updates of this step may have begun and would continue while the state is written",
            "Call step() first.",
        )
    runtime.wait()
    runtime.wait_for_copies()
    limit = engine.settings.background_bytes
    if limit is not None:
        limit = max(0, limit - runtime.speculative_stores.bytes_for_saves)
    else:  # measured now, because speculative stores and the user's loop have taken their memory
        free = own_host_bytes()
        limit = free - reserved_bytes(free)
    stores = {bucket.plan.index: bucket.store for bucket in runtime.buckets}
    frozen = Frozen(runtime.frozen, runtime.device, stores, limit)
    by_tensor = {param.tensor: param for param in runtime.params}
    params: dict[str, Param | None] = {param.name: param for param in runtime.params}
    untrained: dict[str, Tensor] = {}
    for name, tensor in engine.module.named_parameters(remove_duplicate=False):
        params[name] = by_tensor.get(tensor)  # None for a frozen parameter, which updates do not change
        if params[name] is None and runtime.param_offload is None and not tensor.is_inference():
            untrained[name] = tensor
    # A delayed update, or ranks that compress communication, have other weights in the state than in the parameters.
    has_weights = not (runtime.steps.has_unsent or runtime.settings.delayed_update or engine.optimizer.is_compressed)

    def frozen_entry(leaf: Entry, is_state: bool) -> Entry:
        name = leaf.name
        while name not in params and "/" in name:  # the name has the form parameter/key/key
            name = name.rpartition("/")[0]
        if name not in params:  # the entry may change, but not by the update of a bucket, so it is read at once
            value = leaf.tensor().detach().to("cpu", copy=True)
            return replace(leaf, read=lambda: value)
        param = params[name]
        if param is None:
            if name not in untrained:
                return leaf
            tensor = untrained[name]
            return replace(leaf, done=partial(_check_unchanged, name, tensor, tensor._version))
        read = leaf.read
        if not is_state and all(bucket.offloads_params for bucket in param.buckets):
            is_state = True
        elif not is_state and has_weights and leaf.part is None:
            weights = weight_reader(param)
            is_state, read = weights is not None, weights or read
        indices = [bucket.plan.index for bucket in param.buckets]
        read, done = frozen.add(read, indices, leaf.num_bytes, is_state)
        return replace(leaf, read=read, done=done)

    return frozen, {file: [frozen_entry(one, file == "optimizer") for one in leaves] for file, leaves in files.items()}


def _check_unchanged(name: str, tensor: Tensor, version: int) -> None:
    """Raises RuntimeError if a frozen parameter was written after the call of save(). It is read without a copy."""
    if tensor._version != version:
        raise wrong_state(
            "The checkpoint in the background cannot be written",
            f"the frozen parameter {name} was written after save_checkpoint()",
            "Call wait_for_checkpoint() before the write, make it a buffer, or set checkpoint.background to false.",
        )


class _Own:
    """The entries (leaves) that this rank saves, and its report to the other ranks (`said`).

    Entries have this rank's names. `names` maps them to the names in the files where these differ.
    """

    def __init__(self, engine: EngineBase, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks
        self.meta: dict[str, JSON] = {name: getattr(engine, name) for name in COUNTERS}
        self.said: Said = {
            "extra": {},
            "aliases": {},
            "optimizer_state": {},
            "excluded": [],
            "groups": None,
            "shards": {},
        }
        self.files: dict[str, list[Entry]] = {"model": [], "optimizer": [], "rest": []}
        self.names: dict[str, dict[str, str]] = {"model": {}, "optimizer": {}, "rest": {}}

    def add_optimizer(self) -> None:
        """Adds the optimizer's options, which rank 0 saves, and its state of each parameter."""
        optimizer, ranks = self._engine.optimizer, self._ranks
        if optimizer is None:
            return
        head, entries = optimizer.stream_state()
        self.meta["optimizer"] = self._take(head, "optimizer", ranks.rank == 0)
        groups = value_of(value_of(self.meta, "optimizer", dict), "param_groups", list)
        if ranks.speaks:
            named = [[ranks.canonical(name) for name in group["params"]] for group in groups]
            self.said["groups"] = [{**group, "params": names} for group, names in zip(groups, named, strict=True)]
        params = {param.name: param.tensor for param in optimizer.runtime.params}
        leaves: list[Entry] = []
        shards: dict[str, TensorShard] = {}
        for name, entry in entries:
            stripped, found = take_apart(entry, name)
            shards |= (cut := sharded_leaves(found, params[name]))
            leaves += [leaf for leaf in found if ranks.saves(name, leaf.name in cut)]
            if ranks.saves(name):
                self.said["optimizer_state"][ranks.canonical(name)] = stripped
        self._add("optimizer", leaves if ranks.are_partitioned else deal(leaves, ranks, shards), shards)

    def add_weights(self, exclude_frozen: bool) -> None:
        """Adds the parameters and buffers that this rank saves. `exclude_frozen`: leave out frozen parameters."""
        engine, ranks = self._engine, self._ranks
        leaves, aliases, excluded = weights(engine.module, exclude_frozen, param_offload_of(engine))
        shards = shards_of(engine.module)
        if ranks.speaks:
            own = {**aliases, **{leaf.name: leaf.name for leaf in leaves}}
            named = {name: ranks.canonical(first) for name, first in own.items()}
            self.said["aliases"] = {name: first for name, first in named.items() if name != first}
            self.said["excluded"] = excluded
        kept = [leaf for leaf in leaves if ranks.saves(leaf.name, leaf.name in shards)]
        self.names["model"] = {leaf.name: ranks.canonical(leaf.name) for leaf in kept}
        self._add("model", deal(kept, ranks, shards), shards)

    def add_rest(self, client_state: StateDict) -> None:
        """Adds values of the whole run, which rank 0 saves, and values of each stage and rank."""
        engine, ranks = self._engine, self._ranks
        common = {
            "scheduler": _state_of(engine.lr_scheduler),
            "loader": _state_of(engine.training_dataloader),
            "random": random_states(),
            "client_state": client_state,
        }
        for name, value in common.items():
            self.meta[name] = self._take(value, name, ranks.rank == 0)
        for name, value in listed(engine.module).items():
            if not isinstance(value, Tensor) and ranks.data.rank == 0 and ranks.saves(name):  # of `get_extra_state`
                self.said["extra"][name] = self._take(value, f"extra/{name}")
        if ranks.world > 1:
            self.said["random"] = self._take(random_states(), f"ranks/{ranks.rank}/random")
        if engine.optimizer is not None and engine.optimizer.is_compressed:
            self.said["errors"] = self._take(engine.optimizer.exchange_errors(), f"ranks/{ranks.rank}/errors")

    def _take(self, value: object, path: str, is_saved: bool = True) -> JSON:
        """Adds the tensors in `value` to this rank's entries if `is_saved`. Returns `value` with references to them."""
        stripped: JSON
        stripped, found = take_apart(value, path)
        if is_saved:
            self.files["rest"] += found
        return stripped

    def _add(self, file: str, leaves: list[Entry], shards: Mapping[str, TensorShard]) -> None:
        """Adds entries that this rank writes, and reports those that are shards."""
        names, marks = self.names[file], self.said["shards"].setdefault(file, {})
        self.files[file] = leaves
        for leaf in {leaf.name: leaf for leaf in leaves}.values():  # parts of a tensor have the same name
            shard, name = shards.get(leaf.name), names.get(leaf.name, leaf.name)
            if shard is not None:
                own = self._ranks.tensor_rank, self._ranks.num_tensor
                assert shard.is_expert or (shard.rank, shard.world) == own
                marks[name] = to_mark(shard, whole_shape(leaf))
                names[leaf.name] = stored_name(name, shard.rank)


def _collect(engine: EngineBase, client_state: StateDict, exclude_frozen: bool, ranks: Ranks) -> tuple[_Own, Said]:
    """The entries that this rank saves, and its report to all ranks."""
    own = _Own(engine, ranks)
    own.add_optimizer()
    own.add_rest(client_state)
    if engine.optimizer is not None:
        engine.optimizer.wait()
    own.add_weights(exclude_frozen)
    return own, own.said


def _state_of(part: object) -> object:
    """The state dict of an object; None if it has no `state_dict`."""
    return part.state_dict() if hasattr(part, "state_dict") else None


def sharded_leaves(leaves: Sequence[Entry], param: Tensor) -> dict[str, TensorShard]:
    """The entries of a parameter's optimizer state that are sharded like the parameter.

    Scalars are not sharded: they are equal on all tensor ranks. Raises ValueError for an entry of another shape.
    """
    shard, shape = shard_of(param), tuple(param.shape)
    if shard is None:
        return {}
    for leaf in leaves:
        if whole_shape(leaf) != shape and math.prod(whole_shape(leaf)) > 1:
            expected = f"{shape}, the shape of the parameter, or ()"
            remedy = (
                "Tensor ranks have parts of the parameter and cannot save state of another shape. "
                "Use an optimizer whose state has the shape of its parameter."
            )
            raise invalid_value(f"The shape of {leaf.name}", whole_shape(leaf), expected, remedy)
    return {leaf.name: shard for leaf in leaves if whole_shape(leaf) == shape}


def whole_shape(leaf: Entry) -> tuple[int, ...]:
    """The shape of the tensor of which an entry is a part."""
    return tuple(leaf.shape if leaf.part is None else leaf.part.shape)


def names_of(engine: EngineBase) -> dict[str, None]:
    """All names of this rank: those in the module's state dict, and those of trained parameters."""
    params = engine.optimizer.runtime.params if engine.optimizer is not None else []
    quantised = quantised_in(engine.module)
    named = [name for name in listed(engine.module) if name not in quantised]
    inner = [name for name in tensors_of(engine.module, quantised) if name not in named]
    return dict.fromkeys([*named, *inner, *(param.name for param in params)])


def shards_of(module: nn.Module) -> dict[str, TensorShard]:
    """The shards of parameters that tensor ranks have split, by every name of the parameter."""
    named = ((name, shard_of(param)) for name, param in module.named_parameters(remove_duplicate=False))
    return {name: shard for name, shard in named if shard is not None}


def param_offload_of(engine: EngineBase) -> ParamOffload | None:
    """The engine's `ParamOffload`; None if weights are on the device."""
    source = engine.optimizer if engine.optimizer is not None else engine.host_weights
    return source.runtime.param_offload if source is not None else None


def weights(
    module: nn.Module, exclude_frozen: bool, param_offload: ParamOffload | None = None
) -> tuple[list[Entry], dict[str, str], list[str]]:
    """The entries of a model (each tensor once), the aliases of tensors with several names, and the excluded names."""
    leaves: list[Entry] = []
    seen: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    frozen = {name for name, param in module.named_parameters(remove_duplicate=False) if not param.requires_grad}
    frozen |= set(tensors_in(quantised_in(module)))
    excluded = []
    offloaded = offloaded_in(module, param_offload)
    for name, tensor in tensors_of(module).items():
        local, first = local_of(tensor), first_of(tensor)
        key: tuple[object, ...] = (local.data_ptr(), tensor.shape, local.stride(), tensor.dtype)
        if name in offloaded:
            key = (id(offloaded[name]),)
        if exclude_frozen and name in frozen:
            excluded.append(name)
        elif tensor.numel() and seen.setdefault(key, name) != name:
            aliases[name] = seen[key]
        elif name in offloaded:
            assert param_offload is not None
            for piece in param_offload.params.pieces(offloaded[name]):
                part = PartOf(tuple(tensor.shape), piece.start)
                # A view of the present store, which an update may replace. From a disk it is read when it is written.
                read = piece.read if piece.is_on_disk else piece.read().detach
                leaves.append(Entry(name, tensor.dtype, (piece.numel,), read, part))
        elif local is tensor:
            leaves.append(Entry(name, tensor.dtype, tuple(tensor.shape), tensor.detach))
        else:
            rows = local.detach().reshape(-1)
            part = PartOf(tuple(tensor.shape), first)
            leaves.append(Entry(name, tensor.dtype, (rows.numel(),), rows.detach, part))
    return leaves, aliases, excluded


def offloaded_in(module: nn.Module, param_offload: ParamOffload | None) -> dict[str, nn.Parameter]:
    """Parameters whose weights are on the host, by every name of the parameter."""
    if param_offload is None:
        return {}
    found = {**dict(module.named_parameters(remove_duplicate=False)), **tensors_in(quantised_in(module))}
    return {name: p for name, p in found.items() if isinstance(p, nn.Parameter) and param_offload.params.holds(p)}


def tensors_of(module: nn.Module, quantised: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors in a module's state dict. Those of which a quantised weight consists replace the weight. Weights on a
    disk are not read and have no values.
    """
    quantised = quantised_in(module) if quantised is None else quantised
    found: dict[str, Tensor] = {}
    for name, value in listed(module).items():
        if name in quantised:
            found.update(tensors_in({name: quantised[name]}))
        elif isinstance(value, Tensor):
            found[name] = value
    return found


def tensors_in(quantised: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of which quantised weights consist, with names such as `weight:scale`."""
    return {
        f"{name}:{path}" if path else name: inner
        for name, param in quantised.items()
        for path, inner in inner_tensors(param)
    }


def random_states() -> StateDict:
    """States of the generators of Python, NumPy, torch and all GPUs."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    states: StateDict = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def check_random_states(states: Mapping[str, object]) -> None:
    """Raises an exception if `set_random_states` could not set these states. No generator changes."""
    random.Random().setstate(value_of(states, "python", tuple))
    np.random.RandomState().set_state(_numpy_state(states))
    _check_generator("cpu", tensor_of(states, "torch"))
    for device, value in enumerate(value_of(states, "cuda", list) if "cuda" in states else ()):
        if not isinstance(value, Tensor) or value.dtype != torch.uint8:
            raise TypeError("The random state of a GPU is not a tensor of bytes.")
        if device < torch.cuda.device_count():
            _check_generator(f"cuda:{device}", value)


def _check_generator(device: str, value: Tensor) -> None:
    try:
        torch.Generator(device).set_state(value)
    except RuntimeError as error:
        raise ValueError(f"The random state of torch on {device} cannot be set: {error}.") from error


def _numpy_state(states: Mapping[str, object]) -> dict[str, object]:
    kind, keys, position, has_gauss, gauss = list_of(states, "numpy")
    if not isinstance(keys, torch.Tensor):
        raise TypeError("The keys of NumPy's random state are not a tensor.")
    twister = {"key": keys.numpy().astype(np.uint32), "pos": position}
    return {"bit_generator": kind, "state": twister, "has_gauss": has_gauss, "gauss": gauss}


def set_random_states(states: Mapping[str, object]) -> None:
    """Sets states of `random_states`. A GPU that `states` does not contain keeps its state."""
    random.setstate(value_of(states, "python", tuple))
    np.random.set_state(_numpy_state(states))  # noqa: NPY002
    torch.set_rng_state(tensor_of(states, "torch"))
    for device, value in enumerate(value_of(states, "cuda", list) if "cuda" in states else ()):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, device)
