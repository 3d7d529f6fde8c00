# SPDX-License-Identifier: Apache-2.0
"""The files of a DeepSpeed checkpoint: finds them, checks that they are complete, and reads their contents by stage.

Stages 1 and 2 concatenate the parameters of a group, split the result into equal parts and give one to each rank.
Padding at the end makes the length a multiple of twice the number of ranks. Some files include the padding and others
do not, so the tensors of fp32 masters and of optimizer states may differ in length. Newer versions may also pad after
each parameter.

Stage 3 pads each parameter, splits it into one part of equal length for each rank, and concatenates the parts of all
parameters on a rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from twinflow.checkpoint.disk import LATEST, check_tag, read_latest
from twinflow.checkpoint.manifest import MANIFEST
from twinflow.checkpoint.torch_files import load_torch_file
from twinflow.errors import invalid_value

MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIM: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
LAYER: Final = re.compile(r"layer_(\d+)-(?:model_00-)?model_states\.pt")  # of a pipeline (deepspeed_pipeline.py)
FOREIGN: Final = {  # names of files in checkpoints that cannot be imported
    r".*expert_\d+.*": "a mixture of experts",
    r"layer_\d+-(?!model_00-|model_states).*": "tensor parallelism",
    r"expp_rank_.*": "a mixture of experts",
    r"zero": "DeepSpeed's universal format",
}
WEIGHTS_ONLY: Final = "--weights-only (weights_only=True in Python)"
MISMATCH: Final = "The files are damaged or belong to different checkpoints. Copy all files of the checkpoint again."


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Values:
    """A tensor that is assembled from parts. The parts are memory-mapped from files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Tensor, ...]

    def read(self) -> Tensor:
        """Copies the values to new memory. At most one part is read at a time."""
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
        at = 0
        for part in self.parts:
            whole[at : at + part.numel()] = part.reshape(-1)
            at += part.numel()
        assert at == whole.numel()
        return whole.view(self.shape)


@dataclass(frozen=True)
class Files:
    """The files of one tag, by rank. Stages 0 to 2 have one model file. Stage 0 has optimizer files only for bf16.

    A pipeline has files of its layers, and files for each pipeline rank.
    """

    folder: Path  # named after the tag
    model: tuple[Path, ...]
    optim: tuple[Path, ...]
    layers: Mapping[int, Path] = field(default_factory=dict)
    pipe: tuple[Files, ...] = ()  # by pipeline rank: one model file, and optimizer files by data rank


@dataclass(frozen=True)
class Group:
    """A parameter group: its options and the names of its parameters in the optimizer's order."""

    options: Mapping[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint. `states` maps the name of each updated parameter to its step (key "step") and its
    state tensors by name."""

    stage: int
    model: Mapping[str, Any]  # contents of the first model file
    optimizer: Mapping[str, Any]  # optimizer state dict of the first rank
    weights: Mapping[str, Values]
    aliases: Mapping[str, str]  # maps each further name of a tied weight to its first name
    groups: tuple[Group, ...]
    masters: Mapping[str, Values]
    states: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = ()  # sentences for the user


Place = Callable[[list[Tensor], str], dict[str, Values]]  # maps flat tensors of all ranks to parameters
# The groups, masters and states of a `Saved`.
Read = tuple[tuple[Group, ...], dict[str, Values], dict[str, dict[str, Any]]]


def find_files(root: Path, tag: str | None) -> Files:
    """The files of `tag` under `root`, or of the tag in the file `latest`. `root` may also be the folder of a tag."""
    if not root.is_dir():
        raise invalid_value("The DeepSpeed checkpoint", str(root), "an existing folder")
    folder = root.resolve() if tag is None and _has_model(root) else _find_folder(root, tag)
    for pattern, what in FOREIGN.items():
        if any(re.fullmatch(pattern, path.name) for path in folder.iterdir()):
            raise _foreign(folder, what)
    layers = _layers(folder)
    if layers:
        return _pipeline(folder, layers)
    model = _by_rank(folder, MODEL)
    if not model:
        text = f"{folder} contains no DeepSpeed checkpoint: it has no file *mp_rank_00_model_states.pt."
        if (folder / MANIFEST).is_file():
            raise ValueError(
                f"{text} It is a twinflow checkpoint. Load it with load_checkpoint(), or use twinflow export."
            )
        raise ValueError(f"{text} Give the folder that DeepSpeed's save_checkpoint() wrote to.")
    return Files(folder, model, _by_rank(folder, OPTIM))


def _has_model(folder: Path) -> bool:
    return any(MODEL.fullmatch(path.name) for path in folder.iterdir())


def _find_folder(root: Path, tag: str | None) -> Path:
    name = read_latest(root) if tag is None else check_tag(tag)
    if name is not None and (root / name).is_dir():
        return root / name
    tags = sorted(path.name for path in root.iterdir() if path.is_dir() and _has_model(path))
    if not tags:
        raise ValueError(f"{root} contains no DeepSpeed checkpoint. Give the folder that save_checkpoint wrote to.")
    if name is None:
        raise ValueError(f"{root} has no file {LATEST!r}, so a tag must be given. Pass one of {tags} as tag.")
    remedy = "Pass one of these as tag" + (", or no tag for the latest." if tag else ".")
    raise invalid_value(f"The tag under {root}", name, tags, remedy)


def _foreign(path: Path, what: str) -> ValueError:
    remedy = "Save the checkpoint without it. ZeRO stages 0 to 3, and pipelines, can be imported."
    return ValueError(f"{path} was saved with {what}, which cannot be imported. {remedy}")


def _layers(folder: Path) -> dict[int, Path]:
    """The files of the layers of a pipeline, by the index of the layer. Functions have no files."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = LAYER.fullmatch(path.name)
        if match is None:
            continue
        other = found.setdefault(int(match[1]), path)
        if other != path:
            raise ValueError(f"{path} and {other.name} are the same layer. Remove the file that another run wrote.")
    return found


def _pipeline(folder: Path, layers: Mapping[int, Path]) -> Files:
    matches = [MODEL.fullmatch(path.name) for path in folder.iterdir()]
    count = len({int(match[2]) for match in matches if match is not None})
    ranks = tuple(Files(folder, _by_rank(folder, MODEL, i), _by_rank(folder, OPTIM, i)) for i in range(count))
    if not ranks or any(len(one.model) != 1 for one in ranks):
        raise ValueError(
            f"{folder} has the layers of a pipeline, but not one file mp_rank_*_model_states.pt for each pipeline rank "
            "from mp_rank_00 on. Copy the files of all ranks."
        )
    optim = tuple(path for one in ranks for path in one.optim)
    return Files(folder, tuple(one.model[0] for one in ranks), optim, layers, ranks)


def _by_rank(folder: Path, pattern: re.Pattern[str], pipe: int | None = None) -> tuple[Path, ...]:
    """The files whose names match `pattern`, in the order of ranks. ValueError if the file of a rank is missing.
    `pipe`: only the files of this pipeline rank. None: there is no pipeline.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        rank, part = int(match[1] or 0), int(match[2])
        if pipe is None and part:
            raise _foreign(path, "tensor parallelism")
        if part != (pipe or 0):
            continue
        if rank in found:
            raise ValueError(
                f"{path} and {found[rank].name} belong to the same rank. Remove the file that another run wrote."
            )
        found[rank] = path
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        files = f"Files such as {next(iter(found.values())).name} are missing for rank {', '.join(map(str, missing))}"
        raise ValueError(f"{folder}: {files}. Copy the files of all ranks.")
    return tuple(found[rank] for rank in sorted(found))


def read_saved(files: Files, weights_only: bool = False) -> Saved:
    """Reads the files. Tensors stay mapped from them. `weights_only`: the optimizer of stage 0 is not read."""
    models = [dict_in(load_torch_file(path), path, "module") for path in files.model]
    key = "optimizer_state_dict"
    states = [dict_in(dict_in(load_torch_file(path), path, key)[key], path) for path in files.optim]
    stage = zero_stage(files, states)
    head = models[0]
    aliases = dict(head.get("shared_params") or {})
    if stage < 3:
        aliases |= _same_storage(dict_in(head["module"], files.model[0]))
    read: Read = ((), {}, {})
    if stage == 3:
        read = _read_stage3(files, head, states)
    elif states:
        read = read_row(files, head, states)
    elif head.get("optimizer") and not weights_only:
        read = _read_whole(files.model[0], head, aliases)
    groups, masters, found = read
    aliases = {name: first for name, first in aliases.items() if name not in masters}
    first = states[0] if states else head.get("optimizer") or {}
    weights = _weights(models, masters, aliases, stage)
    return Saved(stage, head, first, weights, aliases, groups, masters, found)


def dict_in(value: Any, path: Path, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict) or any(key not in value for key in keys):
        what = f"a dict with {', '.join(map(repr, keys))}" if keys else "a dict"
        raise ValueError(f"{path} is not a file of a DeepSpeed checkpoint: it does not contain {what}. Copy it again.")
    return value


def zero_stage(files: Files, states: Sequence[Mapping[str, Any]]) -> int:
    """The ZeRO stage. ValueError if the number of files does not fit the stage and the number of ranks."""
    if not states:
        if len(files.model) > 1:  # Only stage 3 has several model files.
            raise ValueError(f"{files.folder}: The files *_optim_states.pt with the weights are missing. Copy them.")
        return 0
    stage = states[0].get("zero_stage", 3 if "fp32_flat_groups" in states[0] else 1)
    if stage not in (1, 2, 3):
        raise invalid_value(f"zero_stage in the files of {files.folder}", stage, [1, 2, 3], MISMATCH)
    count = states[0].get("partition_count", len(states))
    count = max(count) if isinstance(count, list) and count else count
    wanted = {"optim": count, "model": count if stage == 3 else 1}
    for kind, paths in (("optim", files.optim), ("model", files.model)):
        if len(paths) != wanted[kind]:
            raise ValueError(
                f"{files.folder} was saved by {count} ranks, but there are {len(paths)} files *_{kind}_states.pt "
                f"instead of {wanted[kind]}. Copy the files of all ranks, and remove those of other runs."
            )
    return int(stage)


def _shapes(head: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters by group. They determine which values of a flat tensor belong to a parameter."""
    shapes = head.get("param_shapes")
    if not isinstance(shapes, list):
        raise ValueError(
            f"{path} has no list param_shapes. Save it with ZeRO stage 1 to 3, by a newer version of DeepSpeed."
        )
    return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]


def _flat_groups(files: Files, states: Sequence[Mapping[str, Any]], key: str) -> list[list[Tensor]]:
    """The flat fp32 masters under `key`: for each rank, a list of one tensor for each group."""
    found: list[Any] = [state.get(key) for state in states]
    for path, values in zip(files.optim, found, strict=True):
        if not isinstance(values, list) or not all(isinstance(value, Tensor) for value in values):
            raise ValueError(f"{path}: {key} is not a list of tensors. {MISMATCH}")
    return found


def _states(entries: Sequence[Mapping[str, Any]], step: Any, place: Place) -> dict[str, dict[str, Any]]:
    """The states of each parameter. `entries`: dicts of flat state tensors, by rank (in stage 3 also by group)."""
    names = [sorted(k for k, v in entry.items() if isinstance(v, Tensor) and v.shape) for entry in entries]
    if any(other != names[0] for other in names):
        raise ValueError(f"Some ranks have other optimizer states than rank 0, which has {names[0]}. {MISMATCH}")
    found: dict[str, dict[str, Any]] = {}
    for state in names[0]:
        for name, values in place([entry[state] for entry in entries], state).items():
            found.setdefault(name, {"step": step})[state] = values
    return found


def read_row(files: Files, head: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Read:
    """Reads groups, masters and states of stages 1 and 2, and of bf16 training without a stage."""
    flats = _flat_groups(files, states, "single_partition_of_fp32_groups")
    shapes = _shapes(head, files.model[0])
    paddings = states[0].get("param_alignment_paddings") or [[]] * len(shapes)
    if {len(flat) for flat in flats} | {len(paddings)} != {len(shapes)}:
        raise ValueError(f"param_shapes has {len(shapes)} groups, but a rank's files have more or fewer. {MISMATCH}")
    bases = [state.get("base_optimizer_state") for state in states]
    order = {name: at for at, name in enumerate(head["module"])}
    zero = (head.get("ds_config") or {}).get("zero_optimization") or {}
    shuffled = isinstance(zero, dict) and zero.get("round_robin_gradients")
    groups: list[Group] = []
    masters: dict[str, Values] = {}
    found: dict[str, dict[str, Any]] = {}
    for g, group in enumerate(shapes):
        place = partial(_in_row, group, paddings[g])
        masters |= place([flat[g] for flat in flats], f"group {g}")
        names = sorted(group, key=lambda name: order.get(name, 0)) if shuffled else list(group)
        entries = [_base_entry(base, g) for base in bases]
        options = dict(bases[0]["param_groups"][g]) if isinstance(bases[0], dict) else {}
        groups.append(Group(options, tuple(names)))
        step = entries[0].get("step", options.get("step", states[0].get("base_optimizer_state_step")))
        found |= _states(entries, step, place)
    return tuple(groups), masters, found


def _base_entry(base: Any, group: int) -> dict[str, Any]:
    """The state of a group in `base`: one rank's optimizer state, as torch's dict or as a list (if elastic)."""
    if isinstance(base, list):
        return dict(base[group])
    if not isinstance(base, dict):
        return {}
    params = base["param_groups"][group]["params"]
    return dict(base["state"].get(params[0], {})) if params else {}


def _read_stage3(files: Files, head: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Read:
    parts = _shapes(head, files.model[0])
    shapes = {name: shape for part in parts for name, shape in part.items()}
    masters = _in_parts(shapes, _flat_groups(files, states, "fp32_flat_groups"), "fp32_flat_groups")
    bases = [dict_in(s.get("optimizer_state_dict", {}), files.optim[i]) for i, s in enumerate(states)]
    saved = bases[0].get("param_groups") or [{"params": list(range(len(parts)))}]
    numbers = [at for group in saved for at in group["params"]]
    if len(numbers) == len(parts):
        groups = [Group(group, tuple(n for at in group["params"] for n in parts[at])) for group in saved]
    elif len(saved) == len(parts):
        groups = [Group(group, tuple(part)) for group, part in zip(saved, parts, strict=True)]
    else:
        raise ValueError(f"param_shapes has {len(parts)} groups, but param_groups has {len(saved)}. {MISMATCH}")
    entries = [base.get("state", {}).get(at, {}) for base in bases for at in numbers]
    if not any(entries):
        return tuple(groups), masters, {}

    def place(tensors: list[Tensor], what: str) -> dict[str, Values]:
        ranks = [tensors[i : i + len(numbers)] for i in range(0, len(tensors), len(numbers))]
        return _in_parts(shapes, ranks, what)

    return tuple(groups), masters, _states(entries, entries[0].get("step", saved[0].get("step")), place)


def _read_whole(path: Path, head: Mapping[str, Any], aliases: Mapping[str, str]) -> Read:
    known = {n: t for n, t in head["module"].items() if isinstance(t, Tensor) and n not in aliases}
    buffers = set(head.get("buffer_names") or [])
    candidates = {name: tensor.shape for name, tensor in known.items() if name not in buffers}
    optimizer = TorchState.of(head["optimizer"], path)
    if optimizer.flats is not None:
        return _read_fused(optimizer.base, optimizer.flats, candidates)
    names = [name for group in optimizer.base["param_groups"] for name in group.get("param_names") or []]
    if len(names) != len(optimizer.entries):
        names = _match(optimizer.shapes, candidates, len(optimizer.base["param_groups"]))
    return optimizer.read(names)


@dataclass(frozen=True)
class TorchState:
    """The optimizer of stage 0: the state dict of an optimizer of torch, with states of whole parameters. That of
    half-precision training also contains fp32 masters.
    """

    base: Mapping[str, Any]
    entries: tuple[Mapping[str, Any], ...]  # by parameter
    masters: tuple[Tensor, ...]
    flats: Sequence[Tensor] | None  # masters, if each group is one flat tensor

    @classmethod
    def of(cls, value: Any, path: Path) -> TorchState:
        optimizer = dict_in(value, path)
        base = dict_in(optimizer.get("optimizer_state_dict", optimizer), path, "state", "param_groups")
        numbers = [at for group in base["param_groups"] for at in group["params"]]
        masters = tuple(tensor for group in optimizer.get("fp32_groups") or [] for tensor in group)
        return cls(base, tuple(base["state"].get(at, {}) for at in numbers), masters, optimizer.get("fp32_groups_flat"))

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """The shape of each parameter. None for one without state."""
        if self.masters:
            return [tuple(tensor.shape) for tensor in self.masters]
        return [next((tuple(one.shape) for one in _tensors(entry).values()), None) for entry in self.entries]

    def read(self, names: Sequence[str]) -> Read:
        """The groups, masters and states. `names`: the names of all parameters, in the order of the optimizer."""
        numbers = [at for group in self.base["param_groups"] for at in group["params"]]
        by_number = dict(zip(numbers, names, strict=True))
        groups = tuple(Group(one, tuple(by_number[at] for at in one["params"])) for one in self.base["param_groups"])
        masters = {name: of_tensor(tensor) for name, tensor in zip(names, self.masters, strict=False)}
        states = {
            name: {"step": step, **{key: of_tensor(value) for key, value in _tensors(entry).items()}}
            for name, entry, step in zip(names, self.entries, self._steps(), strict=True)
            if _tensors(entry)
        }
        return groups, masters, states

    def _steps(self) -> list[Any]:
        """The step of each parameter. DeepSpeed's FusedAdam updates all parameters of a group with the step of the last
        one, and counts only that one. Its groups have the key "step".
        """
        found: list[Any] = []
        for group in self.base["param_groups"]:
            steps = [self.base["state"].get(at, {}).get("step") for at in group["params"]]
            counted = [step for step in steps if isinstance(step, int)]
            found += [max(counted)] * len(steps) if "step" in group and counted else steps
        return found


def _tensors(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.shape}


def unmatched(reason: str) -> ValueError:
    text = f"The optimizer states cannot be matched to parameters. Stage 0 does not save {reason}."
    return ValueError(f"{text} Import only the weights with {WEIGHTS_ONLY}.")


def _match(shapes: Sequence[tuple[int, ...] | None], candidates: Shapes, num_groups: int) -> list[str]:
    """The parameter name for each of these shapes of states. It must follow from order and shapes, because the file has
    no names.
    """
    names = list(candidates)
    if len(shapes) != len(names):  # Some parameters are frozen. The shapes may still identify the others.
        names = [name for name in names if candidates[name] in shapes]
    fits = num_groups == 1 and len(names) == len(shapes)
    if not fits or any(s is not None and s != candidates[n] for s, n in zip(shapes, names, strict=True)):
        raise unmatched("their names, and with several groups or frozen parameters, order and shapes are not enough")
    return names


def _read_fused(base: Mapping[str, Any], flats: Sequence[Tensor], shapes: Shapes) -> Read:
    """Reads a checkpoint of half-precision training without a ZeRO stage, in which each group is one flat tensor."""
    if len(flats) != 1 or flats[0].numel() != sum(map(math.prod, shapes.values())):
        raise unmatched("which parameters are in a group, so there must be one group with all parameters")
    group = base["param_groups"][0]
    entry = base["state"].get(group["params"][0], {})
    place = partial(_in_row, shapes, ())
    states = _states([entry], entry.get("step", group.get("step")), place)
    return (Group(group, tuple(shapes)),), place(flats, "fp32_groups_flat"), states


def _same_storage(module: Mapping[str, Any]) -> dict[str, str]:
    """Maps each further name of a tied weight to its first name. Tied tensors have the same place in the file."""
    first: dict[Any, str] = {}
    tensors = {name: value for name, value in module.items() if isinstance(value, Tensor) and value.numel()}
    places = {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in tensors.items()}
    return {name: first[place] for name, place in places.items() if first.setdefault(place, name) != name}


def _weights(
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
            found[name] = Values(shape, tensor.dtype, _cut(parts, 0, math.prod(shape), name))
        else:
            found[name] = of_tensor(tensor)
    missing = [name for name in masters if name not in found]
    if missing:
        raise ValueError(f"param_shapes contains {missing[0]!r}, but the module has no such parameter. {MISMATCH}")
    return found


# The places of parameters in flat tensors.


def of_tensor(tensor: Tensor) -> Values:
    return Values(tuple(tensor.shape), tensor.dtype, (tensor,))


def _in_row(shapes: Shapes, paddings: Sequence[int], row: Sequence[Tensor], what: str) -> dict[str, Values]:
    """Stages 1 and 2: a group's parameters, from its parts on all ranks. `paddings`: values after each (or none)."""
    found: dict[str, Values] = {}
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
        numel = math.prod(shape)
        found[name] = Values(shape, torch.float32, _cut(row, at, numel, f"{what} of {name}"))
        at += numel + padding
    total, slack = sum(part.numel() for part in row), 2 * len(row)
    # The padding makes the length a multiple of twice the number of ranks. More padding means wrong shapes.
    if -(-total // slack) != -(-at // slack):
        raise ValueError(f"{what}: The parameters need {at} values, but the files have {total}. {MISMATCH}")
    return found


def _in_parts(shapes: Shapes, ranks: Sequence[Sequence[Tensor]], what: str) -> dict[str, Values]:
    """Stage 3: all parameters, from the concatenated parts of each rank, which may be split into several tensors."""
    found: dict[str, Values] = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(ranks))
        parts = [one for row in ranks for one in _cut(row, at, part, f"{what} of {name}")]
        found[name] = Values(shape, torch.float32, _cut(parts, 0, numel, f"{what} of {name}"))
        at += part
    sizes = sorted({sum(tensor.numel() for tensor in row) for row in ranks})
    if sizes != [at]:
        raise ValueError(f"{what}: The parameters of a rank need {at} values, but ranks have {sizes}. {MISMATCH}")
    return found


def _cut(row: Sequence[Tensor], start: int, numel: int, what: str) -> tuple[Tensor, ...]:
    """Values [start, start + numel) of the concatenated tensors `row`, as views."""
    parts = []
    at = 0
    for tensor in row:
        first, last = max(start, at), min(start + numel, at + tensor.numel())
        if first < last:
            parts.append(tensor.reshape(-1)[first - at : last - at])
        at += tensor.numel()
    if sum(part.numel() for part in parts) != numel:
        raise ValueError(f"{what} ends at value {start + numel}, but the files have only {at} values. {MISMATCH}")
    return tuple(parts)
