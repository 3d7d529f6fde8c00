# SPDX-License-Identifier: Apache-2.0
"""Converts a DeepSpeed checkpoint: weights, masters, states, steps, counters, schedule and loss scale."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from twinflow.checkpoint.deepspeed_files import WEIGHTS_ONLY, Group, Saved, Values, find_files, read_saved
from twinflow.checkpoint.deepspeed_pipeline import read_pipeline
from twinflow.checkpoint.disk import check_tag
from twinflow.checkpoint.plain import take_apart
from twinflow.checkpoint.save import save
from twinflow.checkpoint.torch_files import Record
from twinflow.errors import invalid_value
from twinflow.optim import loss_scale
from twinflow.optim.twin_state import KIND, VERSION
from twinflow.rules import RULES
from twinflow.state_dict import Entry

# Keys that DeepSpeed writes to a model file. All others are the client_state that the user passed to save_checkpoint.
_OWN_KEYS: Final = """
    module buffer_names param_shapes frozen_param_shapes frozen_param_fragments shared_params
    optimizer lr_scheduler data_sampler random_ltd ds_config ds_version
    skipped_steps global_steps global_samples dp_world_size mp_world_size num_experts
    sparse_tensor_module_names csr_tensor_module_names checkpoint_parallel_dimensions universal_checkpoint_info
"""
OWN_KEYS: Final = frozenset(_OWN_KEYS.split())
OPTIONS: Final = ("initial_lr", *(option.name for rule in RULES.values() for option in rule.options))
# Options that twinflow's rules do not have, and the only value that can be imported.
UNLIKE: Final = {"amsgrad": False, "maximize": False}
# The update rule by its state names, if no file names the rule. Adam has the states of AdamW: AdamW is used.
BY_STATES: Final = {tuple(sorted(name for name in rule.states if name)): rule.name for rule in reversed(RULES.values())}
RULE: Final = "--rule (rule= in Python)"
MAX_PLAIN: Final = 1_000_000  # largest number of values in a client state: nested references can expand without limit


@dataclass(frozen=True)
class Imported:
    """The result of an import. `notes`: sentences about values that were not converted."""

    path: Path
    stage: int
    num_ranks: int
    num_params: int  # number of parameters with optimizer state
    rule: str | None
    global_steps: int
    notes: tuple[str, ...]


def import_deepspeed(
    source: Path,
    root: Path,
    tag: str | None = None,
    *,
    rule: str | None = None,
    weights_only: bool = False,
    replace: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Writes `root/<tag>` from the DeepSpeed checkpoint `source`. Without `tag`, its file `latest` determines the tag.

    `source` may also be the folder of a tag. `rule` is the update rule (default: that of the files, or AdamW if they
    only have Adam's states). One parameter is in memory at a time. No code in the pickles is run, see `torch_files`.
    """
    files = find_files(Path(source), tag)
    path = Path(root) / check_tag(files.folder.name)
    if path.exists() and not replace:
        raise ValueError(f"{path} exists. Choose another folder, or use --force (replace=True in Python).")
    try:
        saved = read_pipeline(files, weights_only) if files.layers else read_saved(files, weights_only)
        contents, meta, notes = _convert(saved, rule, weights_only)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        if isinstance(error, ValueError) and str(files.folder) in str(error):
            raise
        raise ValueError(f"{files.folder} cannot be imported: {error}") from error
    save(path.parent, path.name, contents, meta, on_progress=on_progress)
    num_params = len(meta.get("optimizer_state", {}))
    ranks = max(len(files.optim), len(files.model))
    chosen = meta["optimizer"]["rule"] if "optimizer" in meta else None
    return Imported(path, saved.stage, ranks, num_params, chosen, meta["global_steps"], tuple(notes))


def _convert(
    saved: Saved, rule: str | None, weights_only: bool
) -> tuple[dict[str, list[Entry]], dict[str, Any], list[str]]:
    """The files, the `meta` and the notes of a twinflow checkpoint that is not written yet."""
    notes = list(saved.notes)
    meta = _counters(saved)
    leaves: list[Entry] = []
    if saved.states and not weights_only:
        chosen = _choose_rule(rule, saved)
        meta["optimizer"] = _head(saved, chosen, meta["global_steps"])
        meta["optimizer_state"], leaves = _states(saved, chosen)
    elif not weights_only:
        notes.append("There is no optimizer state. The optimizer starts from zero.")
    rest = _rest(saved, meta, notes)
    meta |= {"aliases": dict(saved.aliases), "excluded": []}
    model = [Entry(name, values.dtype, values.shape, values.read) for name, values in saved.weights.items()]
    return {"model": model, "optimizer": leaves, "rest": rest}, meta, notes


def _counters(saved: Saved) -> dict[str, Any]:
    found = {}
    for key in ("global_steps", "global_samples"):
        value = saved.model.get(key, 0)
        if type(value) is not int or value < 0:
            raise invalid_value(key, value, "a whole number >= 0")
        found[key] = value
    config = saved.model.get("ds_config")
    parts = config.get("gradient_accumulation_steps", 1) if isinstance(config, dict) else 1
    return found | {"micro_steps": found["global_steps"] * (parts if type(parts) is int else 1)}


def _choose_rule(given: str | None, saved: Saved) -> str:
    """The update rule: `given`, or the one in the saved config, or the one with the saved states."""
    names = tuple(sorted(key for key in next(iter(saved.states.values())) if key != "step"))
    config = saved.model.get("ds_config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    kind = str(section.get("type", "")).lower() if isinstance(section, dict) else ""
    params = section.get("params") if isinstance(section, dict) else None
    if kind == "adam" and not (isinstance(params, dict) and params.get("adam_w_mode") is False):
        kind = "adamw"  # DeepSpeed's Adam has decoupled weight decay by default, as AdamW.
    if kind not in RULES:
        torch_adam = any(group.options.get("decoupled_weight_decay") is False for group in saved.groups)
        kind = "adam" if torch_adam and len(names) == 2 else BY_STATES.get(names, "")
    chosen = given or kind
    if chosen not in RULES:
        remedy = f"The files have the states {names}. Give one of these rules with {RULE}, or use {WEIGHTS_ONLY}."
        raise invalid_value("The update rule", chosen or None, RULES, remedy)
    wanted = tuple(sorted(name for name in RULES[chosen].states if name))
    if names != wanted:
        raise ValueError(
            f"The files have the optimizer states {names}, but the rule {chosen!r} needs {wanted}. "
            f"Give another rule with {RULE}, or use {WEIGHTS_ONLY}."
        )
    return chosen


def _head(saved: Saved, rule: str, global_steps: int) -> dict[str, Any]:
    """The state dict of a TwinOptimizer without the state of its parameters."""
    skipped = saved.model.get("skipped_steps", 0)
    groups = [{**_options(group), "params": list(group.names)} for group in saved.groups]
    head = {
        "kind": KIND,
        "version": VERSION,
        "rule": rule,
        "states": "fp32",
        "num_steps": global_steps,
        "num_skipped": skipped if type(skipped) is int else 0,
        "num_jobs": global_steps,
        "has_unsent": False,
        "loss_scale": loss_scale.to_dict(_loss_scale(saved)),
        "param_groups": groups,
    }
    stripped, leaves = take_apart(head, "optimizer")
    assert not leaves
    return dict(stripped)


def _options(group: Group) -> dict[str, Any]:
    for key, value in UNLIKE.items():
        if bool(group.options.get(key, value)) is not value:
            remedy = f"Use {WEIGHTS_ONLY}: twinflow's update rules do not have this option."
            raise invalid_value(f"The option {key} of the saved optimizer", group.options[key], [value], remedy)
    found = {key: group.options[key] for key in OPTIONS if group.options.get(key) is not None}
    if "betas" in found:
        found["betas"] = tuple(float(beta) for beta in found["betas"])
    return {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in found.items()}


def _loss_scale(saved: Saved) -> loss_scale.LossScale:
    """The state of fp16's loss scale. The scale is 1 for bf16 and fp32."""
    scaler = saved.optimizer.get("loss_scaler")
    values: Mapping[Any, Any] = scaler.state if isinstance(scaler, Record) else saved.optimizer
    scale = float(values.get("cur_scale", 1.0))
    try:
        if not (values.get("dynamic") or values.get("dynamic_loss_scale")):
            return loss_scale.static(scale)
        return loss_scale.LossScale(
            scale=scale,
            dynamic=True,
            window=int(values.get("scale_window", 1000)),
            factor=float(values.get("scale_factor", 2.0)),
            hysteresis=int(values.get("delayed_shift", 2)),
            min_scale=float(values.get("min_scale", 1.0)),
            consecutive_hysteresis=bool(values.get("consecutive_hysteresis", False)),
            raise_at_min=bool(values.get("raise_error_at_min_scale", True)),
            iteration=int(values.get("cur_iter", 0)),
            last_overflow=int(values.get("last_overflow_iter", -1)),
            hysteresis_left=int(values.get("cur_hysteresis", values.get("delayed_shift", 2))),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"the loss scale is invalid: {error}") from error


def _states(saved: Saved, rule: str) -> tuple[dict[str, Any], list[Entry]]:
    """The entry of each parameter in the format of TwinOptimizer, and the tensors of all entries."""
    wanted = [name for name in RULES[rule].states if name]
    found: dict[str, Any] = {}
    leaves: list[Entry] = []
    for name, entry in saved.states.items():
        master: Values = saved.masters.get(name) or saved.weights[name]
        tensors = {"master": master, **{key: entry[key] for key in wanted if key in entry}}
        if len(tensors) < 1 + len(wanted):
            states = f"{name} has the states {sorted(entry)}, but the rule {rule!r} needs {wanted}"
            raise ValueError(f"{states}. Give another rule with {RULE}, or use {WEIGHTS_ONLY}.")
        for key, values in tensors.items():
            if values.shape != saved.weights[name].shape:
                shapes = f"the shape {values.shape}, but the weight has {saved.weights[name].shape}"
                raise ValueError(f"{key} of {name} has {shapes}. Copy all files of the checkpoint again.")
        wide = {key: Values(v.shape, torch.float32, v.parts) for key, v in tensors.items()}
        streams = {key: Entry(f"{name}/{key}", v.dtype, v.shape, v.read) for key, v in wide.items()}
        found[name], made = take_apart({"step": _step(entry["step"], name, saved), **streams}, name)
        leaves += made
    return found, leaves


def _step(value: Any, name: str, saved: Saved) -> int:
    """The number of updates of a parameter. If no file contains it: all steps that were not skipped."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None:
        value = int(saved.model.get("global_steps", 0)) - int(saved.model.get("skipped_steps", 0))
    if not isinstance(value, (int, float)) or value != int(value) or value < 0:
        raise invalid_value(f"The step of {name}", value, "a whole number >= 0")
    return int(value)


def _rest(saved: Saved, meta: dict[str, Any], notes: list[str]) -> list[Entry]:
    """Adds schedule, client state and extra state of modules to `meta`, if they are plain. Returns their tensors."""
    client = {key: value for key, value in saved.model.items() if key not in OWN_KEYS}
    extra = {k: v for k, v in saved.model["module"].items() if not isinstance(v, Tensor) and v is not None}
    parts: dict[str, Any] = {
        "scheduler": _plain(saved.model.get("lr_scheduler"), "the scheduler's state", notes),
        "loader": None,  # DeepSpeed does not save the position in the data.
        "random": _fresh_random(),
        "client_state": _plain_items(client, "client state", notes),
        "extra": _plain_items(extra, "extra state", notes),
    }
    leaves: list[Entry] = []
    for name, value in parts.items():
        meta[name], found = take_apart(value, name)
        leaves += found
    return leaves


def _plain_items(values: Mapping[Any, Any], what: str, notes: list[str]) -> dict[str, Any]:
    found = {key: _plain(value, f"{what} {key!r}", notes) for key, value in values.items() if isinstance(key, str)}
    return {key: value for key, value in found.items() if value is not None or values[key] is None}


def _plain(value: Any, what: str, notes: list[str]) -> Any:
    """`value` if it contains only plain values and tensors. Otherwise None, and a note is added to `notes`."""
    num_left = MAX_PLAIN

    def count(item: Any, depth: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0 or depth > 32:
            raise ValueError(f"it contains more than {MAX_PLAIN} values, or is nested more than 32 levels deep")
        for one in item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ():
            count(one, depth + 1)

    try:
        count(value, 0)
        take_apart(value, "it")
    except ValueError as error:
        notes.append(f"{what} is not imported: {error}")
        return None
    return value


def _fresh_random() -> dict[str, Any]:
    """Random states of generators with seed 0, because DeepSpeed does not save them. The generators of this process do
    not change.
    """
    kind, keys, *rest = np.random.RandomState(0).get_state()
    return {
        "python": random.Random(0).getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.Generator().manual_seed(0).get_state(),
    }


def describe(imported: Imported) -> Sequence[str]:
    """A summary of an import in lines for the user."""
    from_what = f"DeepSpeed ZeRO stage {imported.stage}, {imported.num_ranks} rank(s)"
    what = f"{imported.num_params} parameters with {imported.rule} state" if imported.rule else "weights only"
    return [f"{imported.path}: {from_what}, step {imported.global_steps}, {what}", *imported.notes]
