"""Writes the tables of these pages that follow from declarations in the code, each between its two marks.

python docs/tables.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from twinflow.compat import NAME
from twinflow.compat.names import ALIASES, TABLE, Ours, Refused, Through
from twinflow.config.fields import HONOURED, REFUSED, UNUSED, dotted, is_on
from twinflow.config.params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULES
from twinflow.config.schema import RENAMES, Key, keys
from twinflow.rules import RULES

DOCS: Final = Path(__file__).parent
WORKS: Final = "works"
DIFFERS: Final = "works, with a difference"
NO_EFFECT: Final = "accepted, no effect"
OFF: Final = "refused unless off"
STATUSES: Final = (WORKS, DIFFERS, NO_EFFECT, OFF)

_BLOCKS: Final = "`initialize` wraps the model's blocks; in DeepSpeed the model must call `checkpoint`"
_NOT_FULLY_SHARD: Final = (
    "not available with stage 3 without offload_param, because fully_shard divides gradients itself"
)

# Differences from DeepSpeed 0.19.8 for keys that work. The declarations of the keys determine whether a key works.
DIFFERENCES: Final[Mapping[str, str]] = {
    "optimizer.type": "any class of torch.optim runs on the host too; some of DeepSpeed's types are refused, see below",
    "scheduler.type": "any class of torch.optim.lr_scheduler is allowed too",
    "zero_optimization.stage": (
        "stage 3 uses torch's fully_shard for each block; it needs one of twinflow's update rules, not a torch.optim "
        "class"
    ),
    "zero_optimization.offload_optimizer.ratio": (
        'exact to 128 elements and available with any stage; DeepSpeed needs stage 3; "auto" finds the fastest ratio'
    ),
    "zero_optimization.offload_param.device": "offload_optimizer.device must be cpu too",
    "activation_checkpointing.partition_activations": _BLOCKS,
    "activation_checkpointing.cpu_checkpointing": _BLOCKS,
    "sparse_attention.mode": "`initialize` applies the section to the model; DeepSpeed 0.19 has removed it",
    "pipeline.stages": "also splits an ordinary model into stages; DeepSpeed uses the stages of a PipelineModule",
    "pipeline.partition": "also for an ordinary model; DeepSpeed uses the partition of a PipelineModule",
    "tensor_parallel.autotp_size": (
        "built-in plans for twinflow's GPT, Llama, Mistral, Qwen2, GPT-2 and BERT; other models need "
        "tensor_parallel.plan"
    ),
    "prescale_gradients": _NOT_FULLY_SHARD,
    "gradient_predivide_factor": _NOT_FULLY_SHARD,
}


# DeepSpeed does not have the other update rules of twinflow.
DEEPSPEED_OPTIMIZERS: Final = ("adam", "adamw", "onebitadam", "adagrad", "lion", "sgd")


# docs/config.md and docs/rules.md


def key_tables() -> str:
    """The tables of docs/config.md, one for each kind of rule."""
    found = list(keys())
    lines = ["### Honoured", "", "| key | default | values | effect |", "|---|---|---|---|"]
    lines += [
        f"| `{dotted(key.path)}`{' (ours)' if key.rule.ours else ''} | {_shown(key)} | {_cell(key.allowed)} "
        f"| {_cell(key.rule.text)} |"
        for key in found
        if key.rule.kind == HONOURED
    ]
    lines += ["", "### Accepted, without effect", "", "| keys | reason |", "|---|---|"]
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in found:
        if key.rule.kind == UNUSED:
            groups.setdefault((dotted(key.path[:-1]), key.rule.text), []).append(key)
    lines += [
        f"| {', '.join(f'`{dotted(key.path)}`' for key in group)} | {_cell(text)} |"
        for (_, text), group in groups.items()
    ]
    lines += ["", "### Refused unless off", "", "| key | allowed values | alternative |", "|---|---|---|"]
    lines += [
        f"| `{dotted(key.path)}` | {_off(key)} | {_cell(key.rule.text)} |" for key in found if key.rule.kind == REFUSED
    ]
    return "\n".join(lines) + "\n"


def option_tables() -> str:
    """The table of docs/config.md with `optimizer.params` and `scheduler.params`, except those of update rules."""
    lines = ["| type | params (defaults) |", "|---|---|"]
    others = {name: section for name, section in OPTIMIZERS.items() if name not in RULES}
    for name, section in (*others.items(), *SCHEDULES.items()):
        found = [key for key in keys(section) if key.rule.kind == HONOURED]
        lines.append(f"| `{name}` | {', '.join(f'`{dotted(key.path)}` {_shown(key)}' for key in found)} |")
    return "\n".join(lines) + "\n"


def rule_table() -> str:
    """The table of docs/rules.md with each update rule, its options and its defaults in a config and in `twinflow
    train`.
    """
    lines = ["| rule | on CPU tensors | options (defaults) | in a config | `twinflow train` | states |"]
    lines.append("|---|---|---|---|---|---|")
    for name, rule in RULES.items():
        in_config = {key.path[-1]: key.default for key in keys(OPTIMIZERS[name]) if key.rule.kind == HONOURED}
        others = {key: value for key, value in in_config.items() if value != rule.defaults.get(key)}
        cells = [f"`{name}`", f"`Host{rule.title}`", _listed(rule.defaults), _listed(others), _listed(rule.train)]
        lines.append(f"| {' | '.join([*cells, ', '.join(rule.formats)])} |")
    return "\n".join(lines) + "\n"


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}` {json.dumps(value)}" for name, value in options.items()) or "the same"


def spelling_table() -> str:
    """The table of docs/config.md with alternative names of keys."""
    lines = [
        "| spelling | taken as |",
        "|---|---|",
        "| `zero_optimization`: true, false | `zero_optimization.stage` 1, 0 |",
    ]
    lines += [f"| `{dotted(rename.old)}` | `{dotted(rename.new)}` |" for rename in RENAMES]
    return "\n".join(lines) + "\n"


def _shown(key: Key) -> str:
    """The default of a key, as JSON."""
    return key.default if key.default == "must be given" else json.dumps(key.default)


def _off(key: Key) -> str:
    if key.rule.switch is None:
        return ", ".join(json.dumps(value) for value in (key.default, *key.rule.off))
    return "`enabled` false" if key.rule.switch is is_on else "left out"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# docs/coming-from-deepspeed.md


def status(key: Key) -> str:
    """The treatment of a key, as one of `STATUSES`."""
    if key.rule.kind == HONOURED:
        return DIFFERS if dotted(key.path) in DIFFERENCES or key.rule.hints else WORKS
    return NO_EFFECT if key.rule.kind == UNUSED else OFF


def deepspeed_keys() -> list[Key]:
    """The keys that DeepSpeed has too, in the order of declaration."""
    return [key for key in keys() if not key.rule.ours]


def summary() -> str:
    """A table with the number of keys of each status."""
    counts = Counter(status(key) for key in deepspeed_keys())
    lines = [f"| {name} | {counts[name]} |" for name in STATUSES]
    return "\n".join(["| status | keys |", "|---|---:|", *lines, f"| all | {counts.total()} |"]) + "\n"


def migration_tables() -> str:
    """A table for each section of the config, and one for optimizers and schedules."""
    groups: dict[str, list[Key]] = {}
    for key in deepspeed_keys():
        groups.setdefault(key.path[0] if len(key.path) > 1 else "", []).append(key)
    lines: list[str] = []
    for name, group in groups.items():
        lines += [f"### {f'`{name}`' if name else 'At the top'}", "", *_table(group), ""]
    return "\n".join([*lines, *_choices()]) + "\n"


def _table(group: list[Key]) -> Iterator[str]:
    yield "| key | status | here |"
    yield "|---|---|---|"
    for key in group:
        yield f"| `{dotted(key.path)}` | {status(key)} | {_cell(_text(key))} |"


def _text(key: Key) -> str:
    """The effect of a key, the reason why it has none, or a remedy, with differences from DeepSpeed."""
    if status(key) != DIFFERS:
        return key.rule.text
    told = [key.rule.text, DIFFERENCES.get(dotted(key.path), "")]
    told += [f'"{value}" is refused: {text}' for value, text in (key.rule.hints or {}).items()]
    return ". ".join(part[0].upper() + part[1:] for part in told if part)


def _choices() -> Iterator[str]:
    """Rows for the values of `optimizer.type` and `scheduler.type`, with options that have no effect or are refused."""
    yield from ["### Optimizers and schedules", "", "| type | status | here |", "|---|---|---|"]
    optimizers = {name: OPTIMIZERS[name] for name in DEEPSPEED_OPTIMIZERS}
    for name, options in (*optimizers.items(), *SCHEDULES.items()):
        found = list(keys(options))
        told = [
            f"{label}: {', '.join(names)}"
            for kind, label in ((NO_EFFECT, "no effect"), (OFF, "only the default is allowed"))
            if (names := [f"`{dotted(key.path)}`" for key in found if status(key) == kind])
        ]
        yield f"| `{name}` | {WORKS} | {'; '.join(told) or 'all options'} |"
    for name, instead in REFUSED_OPTIMIZERS.items():
        yield f"| `{name}` | refused | {_cell(instead)} |"


# docs/compat.md


def name_tables() -> str:
    """The tables of docs/compat.md: the names of DeepSpeed that exist, and those that are refused."""
    return "\n".join([*named(), "", *refused()]) + "\n"


def named() -> Iterator[str]:
    """One row for each group of names that come from one module of twinflow."""
    yield "| module | available names | implementation |"
    yield "|---|---|---|"
    for path, entries in TABLE.items():
        rows: dict[tuple[str, str], list[str]] = {}
        for name, entry in entries.items():
            if isinstance(entry, Ours):
                rows.setdefault((entry.target.partition(":")[0], entry.note), []).append(name)
            elif isinstance(entry, Through):
                rows.setdefault((entry.module, ""), []).append("all other names")
        for (home, note), names in rows.items():
            said = f"`{home}`" + (f"; {note}" if note else "")
            shown = ", ".join(name if name == "all other names" else f"`{name}`" for name in names)
            yield f"| `{_full(path)}` | {shown} | {said} |"
    for alias, path in ALIASES.items():
        yield f"| `{_full(alias)}` | all of `{_full(path)}` | the same module |"


def refused() -> Iterator[str]:
    """One row for each remedy, with the names that it is for."""
    yield "| not available | use instead |"
    yield "|---|---|"
    rows: dict[str, list[str]] = {}
    for path, entries in TABLE.items():
        for name, entry in entries.items():
            if isinstance(entry, Refused):
                rows.setdefault(entry.remedy, []).append(f"`{_full(f'{path}.{name}' if path else name)}`")
    for remedy, names in rows.items():
        yield f"| {', '.join(names)} | {remedy} |"


def _full(path: str) -> str:
    return f"{NAME}.{path}" if path else NAME


TABLES: Final[dict[tuple[str, str], Callable[[], str]]] = {  # by page and name of the marks
    ("config.md", "keys"): key_tables,
    ("config.md", "options"): option_tables,
    ("config.md", "spellings"): spelling_table,
    ("rules.md", "rules"): rule_table,
    ("coming-from-deepspeed.md", "summary"): summary,
    ("coming-from-deepspeed.md", "migration"): migration_tables,
    ("compat.md", "names"): name_tables,
}


def with_table(text: str, name: str, table: str) -> str:
    """A page's text with this table between its marks."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    assert begin in text, name
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for (page, name), table in TABLES.items():
        path = DOCS / page
        path.write_text(with_table(path.read_text(), name, table()))
