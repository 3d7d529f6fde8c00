"""The files of a DeepSpeed checkpoint: finds them, checks that they are complete, and reads their contents by stage.

Stages 1 and 2 concatenate the parameters of a group, split the result into equal parts and give one to each rank.
Padding at the end makes the length divisible. Some files include the padding and others do not, so the tensors of fp32
masters and of optimizer states may differ in length. Newer versions may also pad after each parameter.

Stage 3 splits each parameter into equal parts, pads the last one and concatenates the parts of all parameters on a
rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from twinflow.checkpoint.disk import LATEST, check_tag, read_latest
from twinflow.checkpoint.torch_files import load_torch_file
from twinflow.errors import invalid_value

MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
FOREIGN: Final = {
    r"layer_\d+.*model_states\.pt": "pipeline parallelism",
    r".*expert_\d+.*": "a mixture of experts",
    r"expp_rank_.*": "a mixture of experts",
    r"zero": "DeepSpeed's universal format",
}
_MISMATCH: Final = (
    "The shapes and the values of the parameters do not match, so a file is damaged or belongs to another checkpoint. "
    "Copy all files of the checkpoint again."
)


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Values:
    """A tensor that is assembled from parts. The parts are memory-mapped from files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Tensor, ...]

    def read(self) -> Tensor:
        """The values in new memory. Besides them, at most one part is in memory."""
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
        at = 0
        for part in self.parts:
            whole[at : at + part.numel()] = part.reshape(-1)
            at += part.numel()
        assert at == whole.numel()
        return whole.view(self.shape)


@dataclass(frozen=True)
class Files:
    """The files of one tag, by rank. Stages 0 to 2 have one model file. Stage 0 has no optimizer files."""

    folder: Path
    tag: str
    model: tuple[Path, ...]
    optim: tuple[Path, ...]


@dataclass(frozen=True)
class Group:
    """A parameter group: its options and the names of its parameters in the optimizer's order."""

    options: Mapping[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint. `states` contains the step (key "step") and the states of each updated
    parameter."""

    files: Files
    stage: int
    model: Mapping[str, Any]  # contents of the first model file
    optimizer: Mapping[str, Any]  # optimizer state dict of the first rank
    weights: Mapping[str, Values]
    aliases: Mapping[str, str]
    groups: tuple[Group, ...]
    masters: Mapping[str, Values]
    states: Mapping[str, Mapping[str, Any]]


def find_files(root: Path, tag: str | None) -> Files:
    """The files of `tag` under `root`, or of the tag in the file `latest`. `root` may also be the folder of a tag."""
    if not root.is_dir():
        raise invalid_value("The DeepSpeed checkpoint", str(root), "an existing folder")
    if tag is None and _names(root):
        folder = root.resolve()
    else:
        folder = root / (_latest(root) if tag is None else check_tag(tag))
    if not folder.is_dir():
        tags = _tags(root)
        if not tags:
            raise ValueError(f"{root} contains no DeepSpeed checkpoint. Give the folder that save_checkpoint wrote to.")
        remedy = f"Pass one of these as tag{', or no tag for the latest' if tag is not None else ''}."
        raise invalid_value(f"The tag under {root}", folder.name, tags, remedy)
    for pattern, what in FOREIGN.items():
        if any(re.fullmatch(pattern, path.name) for path in folder.iterdir()):
            raise ValueError(
                f"{folder} was saved with {what}. Such a checkpoint cannot be imported. Only checkpoints with ZeRO "
                "stage 0 to 3 and without other parallelism can be imported."
            )
    model = _by_rank(folder, MODEL)
    optim = _by_rank(folder, OPTIM)
    if not model:
        raise ValueError(
            f"{folder} contains no DeepSpeed checkpoint: the file *mp_rank_00_model_states.pt is missing. "
            "Give another folder or tag."
        )
    return Files(folder, folder.name, model, optim)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if MODEL.fullmatch(path.name)]


def _tags(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and _names(path))


def _latest(root: Path) -> str:
    tag = read_latest(root)
    if tag is None:
        tags = _tags(root)
        remedy = (
            f"Give one of the tags {', '.join(tags)}." if tags else "Give the folder that save_checkpoint wrote to."
        )
        raise ValueError(f"{root} has no file {LATEST!r}. {remedy}")
    return tag


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> tuple[Path, ...]:
    """The files of a kind, in the order of ranks. ValueError if a rank is missing."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        rank, part = int(match[1] or 0), int(match[2])
        if part:
            raise ValueError(
                f"{path} was saved with tensor or pipeline parallelism. Such a checkpoint cannot be imported. Only "
                "checkpoints with ZeRO stage 0 to 3 and without other parallelism can be imported."
            )
        if rank in found:
            raise ValueError(
                f"{path} and {found[rank].name} belong to the same rank. Remove the file of the other run."
            )
        found[rank] = path
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        example = next(iter(found.values())).name
        ranks = ", ".join(map(str, missing))
        raise ValueError(
            f"{folder}: Files such as {example} are missing for rank {ranks}. Copy the files of all ranks."
        )
    return tuple(found[rank] for rank in sorted(found))


def read_saved(files: Files, weights_only: bool = False) -> Saved:
    """Reads the contents of the files. Tensors are not read: they are references to places in the files."""
    models = [_load(path, "module") for path in files.model]
    ranks = [_load(path, "optimizer_state_dict") for path in files.optim]
    states = [_dict(rank["optimizer_state_dict"], files.optim[i]) for i, rank in enumerate(ranks)]
    stage = _stage(states)
    if states:
        _check_ranks(files, stage, states)
    if stage == 3 and not states:
        raise ValueError(
            f"{files.folder}: The files *_optim_states.pt are missing. With stage 3 they contain all weights. "
            "Copy these files too."
        )
    head = models[0]
    aliases = dict(head.get("shared_params") or {})
    if stage < 3:
        aliases |= _same_storage(_dict(head["module"], files.model[0]))
    masters: dict[str, Values] = {}
    groups: tuple[Group, ...] = ()
    found: dict[str, dict[str, Any]] = {}
    if stage == 3:
        groups, masters, found = _read_stage3(files, head, states)
    elif states:
        groups, masters, found = _read_row(files, head, states)
    elif head.get("optimizer") and not weights_only:
        groups, masters, found = _read_stage0(files.model[0], head, aliases)
    aliases = {name: first for name, first in aliases.items() if name not in masters}
    first = states[0] if states else head.get("optimizer") or {}
    weights = _weights(files, models, masters, aliases, stage)
    return Saved(files, stage, head, first, weights, aliases, groups, masters, found)


def _load(path: Path, key: str) -> dict[str, Any]:
    return _dict(load_torch_file(path), path, key)


def _dict(value: Any, path: Path, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict) or any(key not in value for key in keys):
        what = f"a dict with {', '.join(map(repr, keys))}" if keys else "a dict"
        raise ValueError(f"{path} is not a file of a DeepSpeed checkpoint: it does not contain {what}.")
    return value


def _stage(states: Sequence[Mapping[str, Any]]) -> int:
    if not states:
        return 0
    stage = states[0].get("zero_stage", 3 if "fp32_flat_groups" in states[0] else 1)
    if stage not in (1, 2, 3):
        raise invalid_value("zero_stage", stage, [1, 2, 3])
    return int(stage)


def _check_ranks(files: Files, stage: int, states: Sequence[Mapping[str, Any]]) -> None:
    count = states[0].get("partition_count", len(states))
    count = max(count) if isinstance(count, list) and count else count
    if count != len(states):
        raise ValueError(
            f"{files.folder} was saved by {count} ranks, but there are {len(states)} files *_optim_states.pt. "
            "Copy the files of all ranks."
        )
    wanted = len(states) if stage == 3 else 1
    if len(files.model) != wanted:
        raise ValueError(
            f"{files.folder} has {len(files.model)} files *_model_states.pt, but stage {stage} with {len(states)} "
            f"ranks has {wanted}. Copy the files of all ranks, and remove those of other runs."
        )


def _shapes(head: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    shapes = head.get("param_shapes")
    if not isinstance(shapes, list):
        raise ValueError(
            f"{path} has no list param_shapes, which maps the values in the other files to parameters. "
            "The file is damaged, or its version of DeepSpeed is not supported."
        )
    return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]


def _tensors(values: Any, path: Path, what: str) -> list[Tensor]:
    if not isinstance(values, list) or not all(isinstance(value, Tensor) for value in values):
        raise ValueError(
            f"{path}: {what} must be a list of tensors, but is not. The optimizer state is in other files, or the "
            "file is damaged. Copy all files of the checkpoint again."
        )
    return values


def _read_row(files: Files, head: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Any:
    """Reads groups, masters and states of stages 1 and 2, and of bf16 training without a stage."""
    key = "single_partition_of_fp32_groups"
    flats = [_tensors(state.get(key), files.optim[i], key) for i, state in enumerate(states)]
    shapes = _shapes(head, files.model[0])
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    if {len(flat) for flat in flats} | {len(paddings)} != {len(shapes)}:
        raise ValueError(
            f"{files.folder}: param_shapes has {len(shapes)} parameter groups, but {key} has another number of groups. "
            "The files do not belong to one checkpoint. Copy all files of one checkpoint again."
        )
    bases = [state.get("base_optimizer_state") for state in states]
    order = {name: at for at, name in enumerate(head["module"])}
    zero = (head.get("ds_config") or {}).get("zero_optimization") or {}
    shuffled = isinstance(zero, dict) and zero.get("round_robin_gradients")
    groups: list[Group] = []
    masters: dict[str, Values] = {}
    found: dict[str, dict[str, Any]] = {}
    for g, group in enumerate(shapes):
        what = f"{files.folder}: group {g}"
        masters |= _in_row(group, paddings[g], [flat[g] for flat in flats], what)
        names = sorted(group, key=lambda name: order.get(name, 0)) if shuffled else list(group)
        entries = [_base_entry(base, g) for base in bases]
        groups.append(Group(_base_options(bases[0], g), tuple(names)))
        step = entries[0].get("step", groups[-1].options.get("step", states[0].get("base_optimizer_state_step")))
        for state in _state_names(entries, files.folder):
            row = [entry[state] for entry in entries]
            for name, values in _in_row(group, paddings[g], row, f"{what} {state}").items():
                found.setdefault(name, {"step": step})[state] = values
    return tuple(groups), masters, found


def _base_entry(base: Any, group: int) -> dict[str, Any]:
    """The state of a group on one rank. It is in torch's format, or in a list (elastic checkpoints)."""
    if isinstance(base, list):
        return dict(base[group])
    if not isinstance(base, dict):
        return {}
    params = base["param_groups"][group]["params"]
    return dict(base["state"].get(params[0], {})) if params else {}


def _base_options(base: Any, group: int) -> dict[str, Any]:
    return dict(base["param_groups"][group]) if isinstance(base, dict) else {}


def _state_names(entries: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """The names of the states that are flat tensors. ValueError if ranks have different ones."""
    names = [sorted(k for k, v in entry.items() if isinstance(v, Tensor) and v.shape) for entry in entries]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"{folder}: All ranks must have the states of rank 0, which are {names[0]}. The files belong to several "
            "runs. Copy the files of one run."
        )
    return names[0]


def _read_stage3(files: Files, head: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Any:
    key = "fp32_flat_groups"
    flats = [_tensors(state.get(key), files.optim[i], key) for i, state in enumerate(states)]
    parts = _shapes(head, files.model[0])
    shapes = {name: shape for part in parts for name, shape in part.items()}
    masters = _in_parts(shapes, flats, f"{files.folder}")
    bases = [_dict(s.get("optimizer_state_dict", {}), files.optim[i]) for i, s in enumerate(states)]
    saved = bases[0].get("param_groups") or [{"params": list(range(len(parts)))}]
    if sum(len(group["params"]) for group in saved) == len(parts):
        groups = [Group(group, tuple(n for at in group["params"] for n in parts[at])) for group in saved]
    elif len(saved) == len(parts):
        groups = [Group(group, tuple(part)) for group, part in zip(saved, parts, strict=True)]
    else:
        raise ValueError(
            f"{files.folder}: param_shapes has {len(parts)} groups, which do not match those of param_groups. "
            "The files do not belong to one checkpoint. Copy all files of one checkpoint again."
        )
    numbers = [at for group in saved for at in group["params"]]
    rows = [[base.get("state", {}).get(at, {}) for at in numbers] for base in bases]
    found: dict[str, dict[str, Any]] = {}
    everything = [entry for row in rows for entry in row]
    if everything and any(everything):
        step = rows[0][0].get("step", saved[0].get("step"))
        for state in _state_names(everything, files.folder):
            row = [[entry[state] for entry in rank] for rank in rows]
            for name, values in _in_parts(shapes, row, f"{files.folder}: {state}").items():
                found.setdefault(name, {"step": step})[state] = values
    return tuple(groups), masters, found


def _read_stage0(path: Path, head: Mapping[str, Any], aliases: Mapping[str, str]) -> Any:
    """Reads a checkpoint without a ZeRO stage: torch's state with whole parameters in the optimizer's order.
    Half-precision training adds masters.
    """
    optimizer = _dict(head["optimizer"], path)
    base = _dict(optimizer.get("optimizer_state_dict", optimizer), path, "state", "param_groups")
    masters = [tensor for group in optimizer.get("fp32_groups") or [] for tensor in group]
    numbers = [at for group in base["param_groups"] for at in group["params"]]
    flat = optimizer.get("fp32_groups_flat")
    known = {n: t for n, t in head["module"].items() if isinstance(t, Tensor) and n not in aliases}
    candidates = [name for name in known if name not in set(head.get("buffer_names") or [])]
    if flat is not None:
        return _read_fused(path, base, _tensors(flat, path, "fp32_groups_flat"), {n: known[n] for n in candidates})
    shapes = [_entry_shape(base["state"].get(at, {}), masters[i] if masters else None) for i, at in enumerate(numbers)]
    given = [name for group in base["param_groups"] for name in group.get("param_names") or []]
    names = given if len(given) == len(numbers) else _match(path, shapes, known, candidates, base["param_groups"])
    by_number = dict(zip(numbers, names, strict=True))
    groups = tuple(Group(group, tuple(by_number[at] for at in group["params"])) for group in base["param_groups"])
    wide = {name: _of_tensor(tensor) for name, tensor in zip(names, masters, strict=False)}
    found: dict[str, dict[str, Any]] = {}
    for at, name in by_number.items():
        entry = base["state"].get(at, {})
        found[name] = {"step": entry.get("step")} | {
            key: _of_tensor(value) for key, value in entry.items() if isinstance(value, Tensor) and value.shape
        }
    return groups, wide, {name: entry for name, entry in found.items() if len(entry) > 1}


def _entry_shape(entry: Mapping[str, Any], master: Tensor | None) -> tuple[int, ...] | None:
    if master is not None:
        return master.shape
    return next((value.shape for value in entry.values() if isinstance(value, Tensor) and value.shape), None)


def _match(
    path: Path,
    shapes: Sequence[tuple[int, ...] | None],
    known: Mapping[str, Tensor],
    candidates: Sequence[str],
    groups: Sequence[Any],
) -> list[str]:
    """The name of the parameter of each state. Files of stage 0 do not contain it, so it must follow from order and
    shapes.
    """
    if len(groups) == 1 and len(shapes) == len(candidates):
        names = list(candidates)
    else:  # Some parameters are frozen. The shapes may still identify the others.
        names = [name for name in candidates if known[name].shape in shapes]
    fits = len(groups) == 1 and len(names) == len(shapes)
    if not fits or any(s is not None and s != known[n].shape for s, n in zip(shapes, names, strict=True)):
        raise ValueError(
            f"{path}: The optimizer states cannot be matched to parameters. Stage 0 does not save their names, and "
            f"with {len(groups)} parameter groups or with frozen parameters, order and shapes are not enough. "
            "Import only the weights with --weights-only."
        )
    return names


def _read_fused(path: Path, base: Mapping[str, Any], flats: list[Tensor], known: Mapping[str, Tensor]) -> Any:
    """Reads a checkpoint of half-precision training without a ZeRO stage, in which each group is one flat tensor."""
    shapes = {name: tensor.shape for name, tensor in known.items()}
    if len(flats) != 1 or flats[0].numel() != sum(tensor.numel() for tensor in known.values()):
        raise ValueError(
            f"{path}: The optimizer states cannot be matched to parameters. Stage 0 does not save which parameters are "
            "in a group, and the only group must contain all of them. Import only the weights with --weights-only."
        )
    entry = base["state"].get(base["param_groups"][0]["params"][0], {})
    masters = _in_row(shapes, [0] * len(shapes), flats, f"{path}: fp32_groups_flat")
    found: dict[str, dict[str, Any]] = {}
    for state in _state_names([entry], path):
        for name, values in _in_row(shapes, [0] * len(shapes), [entry[state]], f"{path}: {state}").items():
            found.setdefault(name, {"step": entry.get("step", base["param_groups"][0].get("step"))})[state] = values
    return (Group(base["param_groups"][0], tuple(shapes)),), masters, found


def _same_storage(module: Mapping[str, Any]) -> dict[str, str]:
    """Maps the names of tied weights to the first name: tensors at the same place in the file are one weight."""
    first: dict[Any, str] = {}
    tensors = {name: value for name, value in module.items() if isinstance(value, Tensor) and value.numel()}
    places = {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in tensors.items()}
    return {name: first[place] for name, place in places.items() if first.setdefault(place, name) != name}


def _weights(
    files: Files,
    models: Sequence[Mapping[str, Any]],
    masters: Mapping[str, Values],
    aliases: Mapping[str, str],
    stage: int,
) -> dict[str, Values]:
    """The tensors of the model. A parameter with a master comes from the master, because the weight is the rounded
    master.
    """
    head = models[0]
    frozen = head.get("frozen_param_shapes") or {}
    found: dict[str, Values] = {}
    for name, tensor in head["module"].items():
        if name in masters:
            found[name] = masters[name]
        elif name in aliases or not isinstance(tensor, Tensor):
            continue
        elif stage == 3 and name in frozen:
            parts = [model["frozen_param_fragments"][name] for model in models]
            shape = tuple(frozen[name])
            what = f"{files.folder}: {name}"
            found[name] = Values(shape, tensor.dtype, _cut(parts, 0, math.prod(shape), what))
        else:
            found[name] = _of_tensor(tensor)
    missing = [name for name in masters if name not in found]
    if missing:
        raise ValueError(
            f"{files.model[0]}: param_shapes contains {missing[0]!r}, but the module has no such parameter. "
            "The file is damaged."
        )
    return found


# The places of parameters in flat tensors.


def _of_tensor(tensor: Tensor) -> Values:
    """The values of one saved tensor."""
    return Values(tuple(tensor.shape), tensor.dtype, (tensor,))


def _in_row(shapes: Shapes, paddings: Sequence[int], row: Sequence[Tensor], what: str) -> dict[str, Values]:
    """Stages 1 and 2: the parameters of one group, from its parts on all ranks."""
    if len(paddings) != len(shapes):
        raise ValueError(
            f"{what}: There are {len(paddings)} paddings for {len(shapes)} parameters. The checkpoint is damaged."
        )
    found: dict[str, Values] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        numel = math.prod(shape)
        found[name] = Values(shape, torch.float32, _cut(row, at, numel, f"{what}: {name}"))
        at += numel + padding
    total, slack = sum(part.numel() for part in row), 2 * len(row)
    # The padding makes the length a multiple of twice the number of ranks. More padding means wrong shapes.
    if -(-total // slack) != -(-at // slack):
        raise ValueError(f"{what}: The parameters need {at} values, but the files have {total}. {_MISMATCH}")
    return found


def _in_parts(shapes: Shapes, ranks: Sequence[Sequence[Tensor]], what: str) -> dict[str, Values]:
    """Stage 3: all parameters, from the concatenated parts of each rank, which may be split into several tensors."""
    found: dict[str, Values] = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        parts = [one for row in ranks for one in _cut(row, at, part, f"{what}: {name}")]
        found[name] = Values(shape, torch.float32, _cut(parts, 0, numel, f"{what}: {name}"))
        at += part
    totals = {sum(tensor.numel() for tensor in row) for row in ranks}
    if totals != {at}:
        raise ValueError(
            f"{what}: The parameters of a rank need {at} values, but ranks have {sorted(totals)}. "
            "The files do not belong to one model. Copy all files of one checkpoint again."
        )
    return found


def _cut(row: Sequence[Tensor], start: int, numel: int, what: str) -> tuple[Tensor, ...]:
    """Values `start` to `start + numel` of concatenated tensors."""
    parts = []
    at = 0
    for tensor in row:
        first, last = max(start, at), min(start + numel, at + tensor.numel())
        if first < last:
            parts.append(tensor.reshape(-1)[first - at : last - at])
        at += tensor.numel()
    if sum(part.numel() for part in parts) != numel:
        raise ValueError(
            f"{what}: The parameter ends at value {start + numel}, but the files have only {at} values. {_MISMATCH}"
        )
    return tuple(parts)
