# SPDX-License-Identifier: Apache-2.0
"""Which parameters Muon updates: param groups are split into groups of matrices and groups for AdamW.

Each group has the key `use_muon`. If a given group has no such key, its parameters are split: those with the attribute
`use_muon` by the value of this attribute, as with DeepSpeed, and all others by `is_hidden_matrix`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from torch import Tensor, nn

from twinflow.conflicts import conflict
from twinflow.errors import incompatible, invalid_value, wrong_state
from twinflow.offload.blocks import find_blocks, owners
from twinflow.offload.plan import ROOT
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.shard import shard_of
from twinflow.rules import MUON, Rule
from twinflow.rules.rule import Options
from twinflow.state_dict import ParamEntry, StateDict

USE_MUON: Final = "use_muon"
_RATES: Final = {True: "muon_lr", False: "adam_lr"}  # learning rates of matrices, and of all other parameters
_NEAR: Final = 0.75  # similarity from which on a key of a group counts as a misspelt option
_OPTIONS: Final = (*MUON.defaults, *_RATES.values())
# The last one is a key of OneCycleLR.
_GROUP_KEYS: Final = (*_OPTIONS, USE_MUON, "params", "param_names", "max_momentum")
_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)
_OTHER_NAMES: Final = ("embed", "lm_head", "norm", "bias")  # parts of names of parameters that AdamW updates


def split(
    groups: Sequence[ParamEntry], options: Mapping[str, object], model: nn.Module | None
) -> tuple[list[ParamEntry], dict[str, object]]:
    """The param groups, each with the key `use_muon`, and the options without `muon_lr` and `adam_lr`.

    Raises ValueError if no parameter is a matrix, if one with use_muon=True cannot be updated by Muon, and for unknown
    options, misspelt keys of groups, and learning rates of groups that contradict each other.
    """
    for key in options:
        if key not in _OPTIONS:
            raise _unknown("An option", key, _OPTIONS)
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()} if model is not None else {}
    hidden = _hidden(model) if model is not None else None
    is_split = any(isinstance(group, dict) for group in groups)
    found: list[ParamEntry] = []
    num_matrices = 0
    for group in groups if is_split else [{"params": list(groups)}]:
        assert isinstance(group, dict)
        asked = group.get(USE_MUON)
        if asked is not None and not isinstance(asked, bool):
            raise invalid_value(f"{USE_MUON} of a param group", asked, [True, False])
        _check_keys(group, asked)
        members = list(zip(group["params"], group.get("param_names") or [None] * len(group["params"]), strict=True))
        for uses_muon in (True, False):
            own = [one for one in members if _uses_muon(_tensor(one[0]), asked, names, hidden) is uses_muon]
            # A pipeline stage keeps empty groups, because stages identify groups by their index.
            if not own and not isinstance(model, PipelineModule):
                continue
            for param, _ in own if uses_muon else ():
                _check_matrix(_tensor(param), names)
            num_matrices += len(own) * uses_muon
            kept = {key: value for key, value in group.items() if key not in (*_RATES.values(), "param_names")}
            made: StateDict = {**kept, "params": [param for param, _ in own], USE_MUON: uses_muon}
            if "param_names" in group:
                made["param_names"] = [name for _, name in own]
            rate = _rate(group, options, _RATES[uses_muon])
            found.append({**made, "lr": rate} if rate is not None else made)
    if not num_matrices and not isinstance(model, PipelineModule):
        raise ValueError(
            "No parameter is a matrix that Muon could update. These are by default the matrices inside of the model's "
            "blocks (the members of its outermost ModuleLists and Sequentials). Put the matrices into a param group "
            'with "use_muon": True, or use rule="adamw".'
        )
    return found, {key: value for key, value in options.items() if key not in _RATES.values()}


def _check_keys(group: StateDict, asked: bool | None) -> None:
    """Raises ValueError for a key that is nearly the name of an option, and for a rate that no parameter would have.
    As with torch, other keys are the user's.
    """
    for key in group:
        if key not in _GROUP_KEYS and get_close_matches(str(key), _GROUP_KEYS, n=1, cutoff=_NEAR):
            raise _unknown("A key of a param group", key, _GROUP_KEYS)
    other = _RATES[not asked]
    if asked is not None and other in group:
        reason = f"all parameters of the group have the learning rate {_RATES[asked]}"
        raise incompatible(f"{other} in a param group", f"{USE_MUON}={asked}", reason, f"Remove {other}.")


def _unknown(what: str, key: object, known: Sequence[str]) -> ValueError:
    near = get_close_matches(str(key), known, n=1)
    remedy = f"Did you mean {near[0]!r}?" if near else ""
    return invalid_value(f"{what} of Muon", key, f"one of {', '.join(known)}", remedy)


def _rate(group: StateDict, options: Mapping[str, object], name: str) -> object:
    """The learning rate of the matrices (`name` is muon_lr) or of the other parameters (adam_lr) of a group. None: the
    `lr` of the optimizer.
    """
    if name in group:
        return group[name]
    if "lr" not in group:
        return options.get(name)
    if USE_MUON not in group and options.get(name, group["lr"]) != group["lr"]:
        remedy = f"Write {', '.join(_RATES.values())} into the group instead of lr, or {USE_MUON}."
        reason = "the group has no use_muon, so that either could be meant for its parameters"
        raise incompatible(f"lr={group['lr']} of a param group", f"{name}={options[name]}", reason, remedy)
    return group["lr"]


def _tensor(entry: object) -> Tensor:
    """The parameter of an entry, which may be a pair with its name."""
    found = entry[1] if isinstance(entry, tuple) else entry
    assert isinstance(found, Tensor)
    return found


def _uses_muon(
    param: Tensor, asked: bool | None, names: Mapping[Tensor, str], hidden: Mapping[Tensor, bool] | None
) -> bool:
    marked = getattr(param, USE_MUON, None)
    if asked is not None or isinstance(marked, bool):
        return bool(asked if asked is not None else marked)
    is_matrix = param.dim() == 2 and min(param.shape) > 1
    return is_matrix and (hidden is None or (hidden.get(param, False) and _has_hidden_name(names.get(param, ""))))


def _has_hidden_name(name: str) -> bool:
    return not any(part in name.lower() for part in _OTHER_NAMES)


def _hidden(model: nn.Module) -> dict[Tensor, bool]:
    """Whether each parameter belongs to exactly one block and is not the weight of an embedding. In a model without
    blocks, all parameters count as parts of blocks.
    """
    embedded = {param for module in model.modules() if isinstance(module, _EMBEDDINGS) for param in module.parameters()}
    blocks = find_blocks(model)
    found = owners(model, blocks)
    return {param: (not blocks or block != ROOT) and param not in embedded for param, block in found.items()}


def _check_matrix(param: Tensor, names: Mapping[Tensor, str]) -> None:
    name = names.get(param, "a parameter")
    if param.dim() not in (2, 3):
        remedy = 'Put it into a param group with "use_muon": False.'
        raise invalid_value(
            f"The number of dimensions of {name}, which Muon is to update,", param.dim(), [2, 3], remedy
        )
    if shard_of(param) is not None:
        raise conflict("Muon", "tensor ranks", name=name)


def of_matrices(rule: Rule | None, groups: Sequence[Options]) -> tuple[int, ...]:
    """The indices of the groups that Muon updates."""
    if rule is None or rule.elementwise is None:
        return ()
    return tuple(i for i, group in enumerate(groups) if group[USE_MUON])


def check_unchanged(rule: Rule | None, groups: Sequence[Options], matrix_groups: Sequence[int]) -> None:
    """Raises RuntimeError if `use_muon` of a group has another value than when the optimizer was built."""
    if rule is None or rule.elementwise is None:
        return
    for i, group in enumerate(groups):
        if group.get(USE_MUON) is not (i in matrix_groups):
            raise wrong_state(
                f"param_groups[{i}] cannot have {USE_MUON}={group.get(USE_MUON)}",
                f"the optimizer was built with {USE_MUON}={i in matrix_groups} for this group",
                "Build a new optimizer.",
            )
