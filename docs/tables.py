# SPDX-License-Identifier: Apache-2.0
"""Writes the generated tables of the docs, each between the comments `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

python docs/tables.py
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

from twinflow.cli.plan_text import kind_name
from twinflow.compat import NAME
from twinflow.compat.internals import INTERNAL
from twinflow.compat.names import ALIASES, TABLE, Ours, Refused, Through
from twinflow.config.fields import HONOURED, REFUSED, UNUSED, dotted, is_on
from twinflow.config.params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULES
from twinflow.config.schema import RENAMES, Key, keys
from twinflow.conflicts import CONFLICTS
from twinflow.engine import deepspeed_api as engine_api
from twinflow.engine.deepspeed_api import ENGINE, PIPELINE, Method, NoEffect, Own
from twinflow.parallel.support import LIMITS, Combination, broken
from twinflow.planner.cases import Setting
from twinflow.planner.costs import Bytes, Memory, Run, bytes_of, fits, placed_at
from twinflow.planner.fit import Wish, choose_fit
from twinflow.planner.formats import AUTOMATIC, STATES, WEIGHT_BYTES, state_bytes
from twinflow.planner.machines import GPUS, Host, Machine, rates_of
from twinflow.planner.models import ModelCost, from_hf
from twinflow.rules import ALL_RULES, RULES

DOCS: Final = Path(__file__).parent
WORKS: Final = "works"
DIFFERS: Final = "works, with a difference"
NO_EFFECT: Final = "accepted, no effect"
OFF: Final = "refused unless off"
STATUSES: Final = (WORKS, DIFFERS, NO_EFFECT, OFF)
METHOD_STATUSES: Final = (WORKS, "no effect", "refused")

_BLOCKS: Final = "`initialize` wraps the model's blocks; in DeepSpeed the model must call `checkpoint`"
_NOT_FULLY_SHARD: Final = (
    "refused with stage 3 unless offload_param is on, because fully_shard divides gradients itself"
)

# Differences from DeepSpeed 0.19.8 for keys that work.
DIFFERENCES: Final[Mapping[str, str]] = {
    "optimizer.type": (
        "any class of torch.optim runs on the host too; the last table of this page lists types that are refused"
    ),
    "scheduler.type": "any class of torch.optim.lr_scheduler is allowed too",
    "zero_optimization.stage": (
        "stage 3 uses torch's fully_shard for each block, and needs one of twinflow's update rules, not a torch.optim "
        "class"
    ),
    "zero_optimization.offload_optimizer.ratio": (
        "the ratio is exact to 128 elements and works with any stage; in DeepSpeed it needs stage 3"
    ),
    "checkpoint.tag_validation": "in DeepSpeed each rank uses its own tag",
    "bf16.bf16_optimizer_states": "DeepSpeed also rounds the master weights to bf16",
    "zero_optimization.offload_param.device": "in DeepSpeed the optimizer state can stay on the GPU",
    "activation_checkpointing.partition_activations": _BLOCKS,
    "activation_checkpointing.cpu_checkpointing": _BLOCKS,
    "sparse_attention.mode": "`initialize` applies the section to the model; DeepSpeed 0.19 no longer has this section",
    "pipeline.stages": "also splits an ordinary model into stages; DeepSpeed uses the stages of a PipelineModule",
    "pipeline.partition": "also works with an ordinary model; DeepSpeed uses the partition of a PipelineModule",
    "tensor_parallel.autotp_size": (
        "twinflow uses the plans in the configs of transformers, and has plans for its own GPT, GPT-2, OPT, BERT and "
        "some others; other models need tensor_parallel.plan"
    ),
    "prescale_gradients": _NOT_FULLY_SHARD,
    "gradient_predivide_factor": _NOT_FULLY_SHARD,
}


# The update rules of twinflow that DeepSpeed has too.
DEEPSPEED_OPTIMIZERS: Final = (
    "adam",
    "adamw",
    "onebitadam",
    "onebitlamb",
    "zerooneadam",
    "adagrad",
    "lamb",
    "lion",
    "sgd",
)


# docs/config.md and docs/rules.md


def key_tables() -> str:
    """The tables of docs/config.md, one for each kind of key: honoured, without effect, refused."""
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
    """The table of docs/config.md with the params of optimizers and schedules. Update rules are in docs/rules.md."""
    lines = ["| type | params (defaults) |", "|---|---|"]
    others = {name: section for name, section in OPTIMIZERS.items() if name not in ALL_RULES}
    for name, section in (*others.items(), *SCHEDULES.items()):
        found = [key for key in keys(section) if key.rule.kind == HONOURED]
        lines.append(f"| `{name}` | {', '.join(f'`{dotted(key.path)}` {_shown(key)}' for key in found)} |")
    return "\n".join(lines) + "\n"


def rule_table() -> str:
    """The table of docs/rules.md: each update rule with its options and defaults."""
    lines = ["| rule | class for CPU tensors | options (defaults) | in a config | in `twinflow train` | states |"]
    lines.append("|---|---|---|---|---|---|")
    for name, rule in ALL_RULES.items():
        in_config = {key.path[-1]: key.default for key in keys(OPTIMIZERS[name]) if key.rule.kind == HONOURED}
        others = {key: value for key, value in in_config.items() if value != rule.defaults.get(key)}
        host_class = f"`Host{rule.title}`" if name in RULES else "none"
        cells = [f"`{name}`", host_class, _listed(rule.defaults), _listed(others), _listed(rule.train)]
        lines.append(f"| {' | '.join([*cells, ', '.join(rule.formats)])} |")
    return "\n".join(lines) + "\n"


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}` {json.dumps(value)}" for name, value in options.items()) or "the same defaults"


def spelling_table() -> str:
    """The table of docs/config.md with alternative names of keys."""
    lines = [
        "| spelling | meaning |",
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
    return '`{"enabled": false}`' if key.rule.switch is is_on else "no value: remove the key"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# docs/coming-from-deepspeed.md


def status(key: Key) -> str:
    """What twinflow does with a key: one of `STATUSES`."""
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
    """The status of each key: a table for each section of the config, and one for optimizers and schedules."""
    groups: dict[str, list[Key]] = {}
    for key in deepspeed_keys():
        groups.setdefault(key.path[0] if len(key.path) > 1 else "", []).append(key)
    lines: list[str] = []
    for name, group in groups.items():
        lines += [f"### {f'`{name}`' if name else 'Top level'}", "", *_table(group), ""]
    return "\n".join([*lines, *_choices()]) + "\n"


def _table(group: list[Key]) -> Iterator[str]:
    yield "| key | status | in twinflow |"
    yield "|---|---|---|"
    for key in group:
        yield f"| `{dotted(key.path)}` | {status(key)} | {_cell(_text(key))} |"


def _text(key: Key) -> str:
    """The last column: effect of a key, or the reason why it has none, or what to do; differences from DeepSpeed."""
    if status(key) != DIFFERS:
        return key.rule.text
    told = [key.rule.text, DIFFERENCES.get(dotted(key.path), "")]
    told += [f'"{value}" is refused: {text}' for value, text in (key.rule.hints or {}).items()]
    return ". ".join(map(_capitalised, filter(None, told)))


def _capitalised(text: str) -> str:
    """The text with a capital letter, unless it starts with a name or a value."""
    return text[0].upper() + text[1:] if re.match(r"(?!twinflow)[^\W_]+ ", text) else text


def _choices() -> Iterator[str]:
    """Rows for the values of `optimizer.type` and `scheduler.type`, with options that have no effect or are refused."""
    yield from ["### Optimizers and schedules", "", "| type | status | in twinflow |", "|---|---|---|"]
    optimizers = {name: OPTIMIZERS[name] for name in DEEPSPEED_OPTIMIZERS}
    for name, options in (*optimizers.items(), *SCHEDULES.items()):
        found = list(keys(options))
        told = [
            f"{label}: {', '.join(names)}"
            for kind, label in ((NO_EFFECT, "options without effect"), (OFF, "options that must have their default"))
            if (names := [f"`{dotted(key.path)}`" for key in found if status(key) == kind])
        ]
        yield f"| `{name}` | {WORKS} | {'; '.join(told) or 'all options work'} |"
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
        yield f"| `{_full(alias)}` | all of `{_full(path)}` | an alias of that module |"


def refused() -> Iterator[str]:
    """One row for each remedy, with the names that it is for."""
    yield "| not available | use instead |"
    yield "|---|---|"
    rows: dict[str, list[str]] = {}
    for path, entries in TABLE.items():
        for name, entry in entries.items():
            if isinstance(entry, Refused) and name not in INTERNAL.get(path, "").split():
                rows.setdefault(entry.remedy, []).append(f"`{_full(f'{path}.{name}' if path else name)}`")
    for remedy, names in rows.items():
        yield f"| {', '.join(names)} | {remedy} |"


def script_table() -> str:
    """The scripts of examples/compat with the newest result of benchmarks/compat_deepspeed.py, and their counts."""
    benchmark, result, name = _compat_result()
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result["scripts"]:
        rows.setdefault(row["script"], []).append(row)
    lines = ["| script | content | largest relative difference of a loss | compared with |", "|---|---|---|---|"]
    counts: Counter[str] = Counter()
    for case in benchmark.all_cases():
        own = rows[case.name]
        is_equal = all(row["status"] == "equal" for row in own)
        if case.path.parent == benchmark.SCRIPTS:
            counts["equal" if is_equal else "refused"] += 1
        content = (ast.get_docstring(ast.parse(case.path.read_text())) or "").partition("\n")[0].rstrip(".")
        shown = f"{max(row['difference'] for row in own):.0e}" if is_equal else "refused"
        against = own[0]["reference"].replace("DeepSpeed", f"DeepSpeed {result['deepspeed']}")
        path = case.path.relative_to(benchmark.OLD)
        lines.append(f"| `{path}` | {_cell(content)} | {shown} | {against} |")
    told = f"Of the {counts.total()} scripts of `features/`, {counts['equal']} are equal on 1 and on 2 processes, and "
    told += f"{counts['refused']} are refused by name. [Result](../benchmarks/results/{name}) of {result['date']}."
    return "\n".join([told, "", *lines]) + "\n"


def published_table() -> str:
    """The published configs with the newest result of benchmarks/compat_deepspeed.py."""
    _, result, _ = _compat_result()
    rows = result["configs"]
    loads = [sum(not row[name] for row in rows) for name in ("twinflow", "deepspeed")]
    lines = [
        f"Of {len(rows)} configs, {loads[0]} load with twinflow and {loads[1]} with DeepSpeed {result['deepspeed']}.",
        "",
    ]
    lines += ["| config | twinflow | DeepSpeed | why twinflow refuses it |", "|---|---|---|---|"]
    for row in rows:
        cells = ["refused" if row[name] else "loads" for name in ("twinflow", "deepspeed")]
        lines.append(f"| `{row['config']}` | {cells[0]} | {cells[1]} | {_cell(' '.join(row['twinflow'].split()))} |")
    return "\n".join(lines) + "\n"


def _compat_result() -> tuple[Any, dict[str, Any], str]:
    """The benchmark as a module, its newest result, and the name of the result's file."""
    benchmark = loaded("benchmarks/compat_deepspeed.py")
    path = sorted((DOCS.parent / "benchmarks" / "results").glob("*-compat-deepspeed.md"))[-1]
    return benchmark, benchmark.saved_result(path), path.name


def method_tables() -> str:
    """The tables of docs/compat.md with the methods of DeepSpeed's engines: what each does here."""
    lines: list[str] = []
    for title, methods in (("DeepSpeedEngine", ENGINE), ("PipelineEngine", PIPELINE)):
        rows: dict[tuple[str, str], list[str]] = {}
        for name, method in methods.items():
            rows.setdefault(_said(method), []).append(f"`{name}`")
        counts = Counter(_said(method)[0] for method in methods.values())
        verbs = ("work", "have no effect", "are refused")
        told = ", ".join(f"{counts[one]} {verb}" for one, verb in zip(METHOD_STATUSES, verbs, strict=True))
        lines += [f"### `{title}`", "", f"{len(methods)} methods: {told}.", "", "| methods | status | in twinflow |"]
        lines.append("|---|---|---|")
        for status in METHOD_STATUSES:
            lines += [
                f"| {', '.join(sorted(names))} | {status} | {_cell(text)} |"
                for (found, text), names in rows.items()
                if found == status
            ]
        lines.append("")
    return "\n".join(lines)


def _said(method: Method) -> tuple[str, str]:
    """The status of a method, and what the page says about it."""
    if isinstance(method, Own):
        return WORKS, method.note or "as in DeepSpeed"
    if isinstance(method, NoEffect):
        return "no effect", method.reason
    if isinstance(method, engine_api.Refused):
        return "refused", method.remedy.rstrip(".")
    section = method.path.rpartition(".")[0] if isinstance(method, engine_api.Key) else ""
    if isinstance(method, engine_api.Key):
        return WORKS, f"returns a key of `{section}`" if section else "returns a key at the top of the config"
    return WORKS, f"returns {method.text}"


def _full(path: str) -> str:
    return f"{NAME}.{path}" if path else NAME


# docs/conflicts.md and docs/memory.md

# How the docs show placeholders such as {stage} in the table of conflicts. All other placeholders become "...".
SHOWN: Final = {
    "stage": "0, 1 or 2",
    "stage_except_1": "0, 2 or 3",
    "stage_2_or_3": "2 or 3",
    "ranks": "several",
    "rules": "in the list of [update rules](rules.md)",
    "name": "NAME",
    "callback": "WeightAveraging or StochasticWeightAveraging",
    "own_key": "fp16.enabled, or a key of offload_optimizer that DeepSpeed does not have",
}
LINK: Final = r"\[[^\]]*\]\([^)]*\)"
CALL: Final = r"[\w.=]+\([^)\s]*(?: \w+=[^)]*)?\)"
VALUE: Final = r"[\w.]+=(?:\.{3}|[^\s,;.]+)"
DOTTED: Final = r"[A-Za-z]\w*(?:\.\w+)+|\w*_\w+|\w+\[\d\]"
CODE: Final = re.compile(f"`[^`]*`|{LINK}|{CALL}|{VALUE}|{DOTTED}")

# Published shapes: layers, hidden size, inner size, heads, key-value heads, vocabulary, whether the head is tied.
SHAPES: Final = {
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 4864, 14, 2, 151_936, True),
    "Qwen2.5-1.5B": ("qwen2", 28, 1536, 8960, 12, 2, 151_936, True),
    "Llama-3.2-3B": ("llama", 28, 3072, 8192, 24, 8, 128_256, True),
    "Llama-3-8B": ("llama", 32, 4096, 14_336, 32, 8, 128_256, False),
    "Qwen2.5-14B": ("qwen2", 48, 5120, 13_824, 40, 8, 152_064, False),
    "Qwen2.5-32B": ("qwen2", 64, 5120, 27_648, 40, 8, 152_064, False),
    "Llama-3-70B": ("llama", 80, 8192, 28_672, 64, 8, 128_256, False),
}
RATIOS: Final = (1.0, 0.5, 0.0)
CARDS: Final = ("rtx4090", "rtx5090", "l40s", "h100", "h200", "b200")
RAM_GB: Final = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Cards and host memory of docs/what-fits.md: desktops, a workstation and servers.
PLANNED_MODELS: Final = ("Qwen2.5-1.5B", "Llama-3.2-3B", "Llama-3-8B", "Qwen2.5-14B", "Qwen2.5-32B")
PLANNED_CARDS: Final = ("rtx4070", "rtx4080", "rtx4090", "rtx6000ada", "h100", "h200")
PLANNED_RAM_GB: Final = (32, 64, 128, 256)
DESKTOP_DRAM, SERVER_DRAM = 70e9, 150e9  # bytes/s: two channels of DDR5, and a share of a server as measured
# Tokens a second of cells that were measured with the settings of the plan: model, card, host memory, method.
MEASURED_CELLS: Final[dict[tuple[str, str, int, str], int]] = {}
# GPU and host bytes of a machine: gradients that wait for the norm fit on the GPU, and no speculative stores are made.
ENOUGH: Final = Memory(10**15, 0)


def conflict_tables() -> str:
    """The conflicts between features, one table for each group."""
    parts = []
    for group, found in CONFLICTS.items():
        rows = [(c.option, c.other, c.reason, c.remedy) for c in found.values()]
        parts.append(f"### {group}\n\n{refusals(rows)}\n")
    return "\n" + "\n".join(parts) + "\n"


def limit_table() -> str:
    """The conflicts with pipeline and tensor ranks."""
    rows = [(limit.key, f"{' or '.join(limit.axes)} ranks", limit.reason, limit.remedy) for limit in LIMITS]
    return f"\n{refusals(rows)}\n\n"


def refusals(rows: Iterable[tuple[str, str, str, str]]) -> str:
    lines = ["| feature | cannot be used with | reason | what to do |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(as_markdown, row))} |" for row in rows)])


def as_markdown(text: str) -> str:
    """A text of an error, with names and values marked as code."""
    text = re.sub(r"\{(\w+)[^}]*\}", lambda found: SHOWN.get(found[1], "..."), text).rstrip(",")
    return CODE.sub(lambda found: found[0] if found[0][0] in "`[" else f"`{found[0]}`", text)


def models() -> dict[str, ModelCost]:
    found = {}
    for name, (kind, layers, hidden, inner, heads, kv_heads, vocab, is_tied) in SHAPES.items():
        config = {
            "model_type": kind,
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "tie_word_embeddings": is_tied,
        }
        found[name] = from_hf(config, name)
    return found


def run_of(model: ModelCost, states: str = "fp32", world: int = 1, stage: int = 0) -> Run:
    """A run with 2048 tokens on each GPU, bf16 weights, clipping and activation checkpointing."""
    return Run(model, batch=1, tokens=2048, states=states, world=world, stage=stage)


def used(run: Run, ratio: float) -> Bytes:
    return bytes_of(run, placed_at(run, ratio), ENOUGH)


def gb(count: float) -> str:
    return f"{count / 1e9:.1f}" if count < 99.95e9 else f"{count / 1e9:,.0f}"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], num_texts: int = 1) -> str:
    """A table whose columns are right-aligned, except the first `num_texts`."""
    names = list(head)
    rule = "---|" * num_texts + "---:|" * (len(names) - num_texts)
    lines = [f"| {' | '.join(names)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n" + "\n".join(lines) + "\n\n"


def bytes_table() -> str:
    """Bytes a parameter of state on GPU and host, by format and dtype of the weights."""
    rows = []
    for weights in WEIGHT_BYTES:
        sizes = [state_bytes(states, weights) for states in STATES]
        cells = [f"{size.resident:.3g} / {size.host:.3g}" for size in sizes]
        least = state_bytes(STATES[-1], weights, master="none")
        cells.append(f"{least.resident:.3g} / {least.host:.3g}" if weights == "bf16" else "-")
        rows.append([weights, *cells])
    return markdown(["weights", *(f"{states} state" for states in STATES), f"{STATES[-1]} state, no master"], rows)


def ratio_tables() -> str:
    """Memory on one GPU and its host, by model and ratio, one table for each state format."""
    parts = []
    for states in AUTOMATIC:
        rows = []
        for name, model in models().items():
            sizes = [both(used(run_of(model, states), ratio)) for ratio in RATIOS]
            rows.append([name, f"{model.numel / 1e9:.2f} B", *sizes])
        head = ["model", "parameters", *(f"ratio {ratio:g}" for ratio in RATIOS)]
        parts.append(f"\n### {states} state\n{markdown(head, rows)}")
    return "".join(parts).rstrip("\n") + "\n\n"


def both(found: Bytes) -> str:
    return f"{gb(found.gpu_total)} / {gb(found.host_total)}"


def kinds_table() -> str:
    """GB of weights, gradients, state and so on for one model, by ratio and place."""
    model = models()["Llama-3-8B"]
    rows = []
    for ratio in RATIOS:
        found = used(run_of(model), ratio)
        for place, sizes in (("GPU", found.gpu), ("host", found.host)):
            kinds = ", ".join(f"{kind_name(kind)} {gb(count)}" for kind, count in sizes.items() if count)
            rows.append([f"{ratio:g}", place, kinds, gb(sum(sizes.values()))])
    return markdown(["ratio", "place", "GB of each kind", "sum"], rows, 3)


def cards_table() -> str:
    """The smallest host memory, in GB, with which each model fits on each GPU."""
    head = ["model", *(GPUS[card].title for card in CARDS)]
    return markdown(head, [[name, *(least_ram(model, card) for card in CARDS)] for name, model in models().items()])


def least_ram(model: ModelCost, card: str) -> str:
    cells = []
    for states in AUTOMATIC:
        run = run_of(model, states)
        sizes = (size for size in RAM_GB if fits(run, Memory(GPUS[card].memory_bytes, size * 10**9)))
        cells.append(str(next(sizes, "-")))
    return " / ".join(cells) if len(set(cells)) > 1 else cells[0]


def stages_table() -> str:
    """Memory of a machine with eight GPUs, by ZeRO stage."""
    world, rows = 8, []
    for name, model in models().items():
        alone = used(run_of(model), 1.0)
        shared = [both(used(run_of(model, world=world, stage=stage), 1.0)) for stage in (2, 3)]
        # With stage 0 every rank has the whole state.
        rows.append([name, f"{gb(alone.gpu_total)} / {gb(alone.host_total * world)}", *shared])
    return markdown(["model", "stage 0", "stages 1 and 2", "stage 3"], rows)


# docs/3d.md


def support_table() -> str:
    """The features that work with pipeline ranks, with tensor ranks and with both."""
    features: list[tuple[str, Combination]] = [
        *((f"ZeRO stage {stage}", Combination(stage=stage)) for stage in range(4)),
        ("`offload_optimizer`, with any number as `ratio`", Combination(ratio=0.5)),
        ("`offload_optimizer`, ratio `auto`", Combination(ratio="auto")),
        ("`delayed_update`", Combination(delayed_update=True)),
        ("`offload_param`", Combination(stage=3, offload_param=True)),
        ("1-bit Adam", Combination(stage=1)),
        ("activation checkpointing", Combination()),
        ("checkpointing with inputs on the host (`cpu_checkpointing`)", Combination(cpu_checkpointing=True)),
        ("checkpointing with partitioned inputs (`partition_activations`)", Combination(partition_activations=True)),
        ("`tensor_parallel.sequence`", Combination(sequence=True)),
        ("`tensor_parallel.sequence` with a Hugging Face model", Combination(sequence=True, foreign=True)),
        ("sparse attention", Combination()),
        ("sparse attention with a pattern for each head", Combination(head_patterns=True)),
    ]
    layouts = {"pipeline": (2, 1), "tensor": (1, 2), "pipeline x tensor": (2, 2)}
    rows = [f"| | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
    for name, asked in features:
        found = [next(broken(replace(asked, pipe=p, model=m)), None) for p, m in layouts.values()]
        cells = ["yes" if limit is None else f"no, because {limit.reason}" for limit in found]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def loaded(path: str) -> Any:
    """A Python file of the repository as a module."""
    spec = spec_from_file_location(Path(path).stem, DOCS.parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for the module there
    spec.loader.exec_module(module)
    return module


# docs/plan.md and docs/what-fits.md


def error_table() -> str:
    return f"\n{loaded('benchmarks/plan_errors.py').table('../benchmarks/results/')}\n\n"


def fit_tables() -> str:
    """What fits if all parameters are trained: a table for each model, with a row for each card and a column for each
    size of host memory.
    """
    parts = []
    for name in PLANNED_MODELS:
        rows = [
            [GPUS[card].title, *(fit_cell(name, card, ram, "full") for ram in PLANNED_RAM_GB)] for card in PLANNED_CARDS
        ]
        head = ["card", *(f"{ram} GB RAM" for ram in PLANNED_RAM_GB)]
        parts.append(f"\n### {name} ({models()[name].numel / 1e9:.2f} B parameters)\n{markdown(head, rows)}")
    return "".join(parts).rstrip("\n") + "\n\n"


def adapter_tables() -> str:
    """What fits with adapters, with 64 GB of host memory."""
    parts = []
    for method, title in (("lora", "LoRA"), ("qlora", "QLoRA")):
        rows = [
            [GPUS[card].title, *(fit_cell(name, card, 64, method) for name in PLANNED_MODELS)] for card in PLANNED_CARDS
        ]
        parts.append(f"\n### {title}\n{markdown(['card', *PLANNED_MODELS], rows)}")
    return "".join(parts).rstrip("\n") + "\n\n"


def fit_cell(name: str, card: str, ram_gb: int, method: str) -> str:
    """Tokens a second and the settings of the plan, or by how much it is short."""
    gpu, dram_rate = GPUS[card], DESKTOP_DRAM if card.startswith("rtx") else SERVER_DRAM
    setting = Setting(
        rates_of(Machine(gpu, Host(ram_gb * 10**9, 16, dram_rate))), Memory(gpu.memory_bytes, ram_gb * 10**9)
    )
    fit = choose_fit(Wish(models()[name], tokens=2048, sequences=4, method=method), setting)
    if not fit.fits:
        return "-"
    marks = [fit.states] if method == "full" else []
    marks += ["WE" if fit.offload_embeddings else "W"] if fit.offload_params else []
    marks += ["C"] if fit.checkpointing else []
    marks += [] if fit.clips else ["N"]
    count = fit.micro_batch * fit.accumulation
    marks += [f"{count} x"] if count != 4 else []
    measured = MEASURED_CELLS.get((name, card, ram_gb, method))
    seen = f", measured {measured:,}" if measured else ""
    return f"{fit.tokens_s:,.0f} ({' '.join(marks)}){seen}" if marks else f"{fit.tokens_s:,.0f}{seen}"


def architecture_table() -> str:
    """The models of tests/architectures.py, which tests split over two tensor ranks and over two stages."""
    module = loaded("tests/architectures.py")
    rows = []
    for one in module.ARCHITECTURES.values():
        kind = "PeftModel" if one.lora else one.head
        cells = [
            reason if reason == module.DROPOUT else f"no, because {reason}" for reason in (one.tensor, one.pipeline)
        ]
        cells = [text if reason else "equal" for text, reason in zip(cells, (one.tensor, one.pipeline), strict=True)]
        rows.append(f"| {one.title} | `{one.kind}`, {kind} | {' | '.join(cells)} |")
    return "\n".join(["| model | type, class | tensor ranks | pipeline stages |", "|---|---|---|---|", *rows])


TABLES: Final[dict[tuple[str, str], Callable[[], str]]] = {  # by page and NAME
    ("config.md", "keys"): key_tables,
    ("config.md", "options"): option_tables,
    ("config.md", "spellings"): spelling_table,
    ("rules.md", "rules"): rule_table,
    ("coming-from-deepspeed.md", "summary"): summary,
    ("coming-from-deepspeed.md", "migration"): migration_tables,
    ("conflicts.md", "conflicts"): conflict_tables,
    ("conflicts.md", "parallel"): limit_table,
    ("memory.md", "bytes"): bytes_table,
    ("memory.md", "ratios"): ratio_tables,
    ("memory.md", "kinds"): kinds_table,
    ("memory.md", "cards"): cards_table,
    ("memory.md", "stages"): stages_table,
    ("3d.md", "architectures"): lambda: f"\n{architecture_table()}\n\n",
    ("3d.md", "support"): lambda: f"\n{support_table()}\n\n",
    ("compat.md", "scripts"): script_table,
    ("compat.md", "published"): published_table,
    ("compat.md", "names"): name_tables,
    ("compat.md", "methods"): method_tables,
}


# Tables that are simulated, which takes minutes. `make test` does not compare them, `make test-all` does.
SLOW_TABLES: Final[dict[tuple[str, str], Callable[[], str]]] = {
    ("plan.md", "errors"): error_table,
    ("what-fits.md", "full"): fit_tables,
    ("what-fits.md", "adapters"): adapter_tables,
}


def with_table(text: str, name: str, table: str) -> str:
    """The text of a page, with the table between the comments of its name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    assert begin in text, name
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for (page, name), table in (TABLES | SLOW_TABLES).items():
        path = DOCS / page
        path.write_text(with_table(path.read_text(), name, table()))
