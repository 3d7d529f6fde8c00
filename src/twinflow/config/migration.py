"""The tables of docs/coming-from-deepspeed.md: every key of DeepSpeed's config and its treatment by twinflow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from twinflow.config.fields import HONOURED, UNUSED
from twinflow.config.messages import dotted
from twinflow.config.params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULES
from twinflow.config.registry import Key, keys

WORKS: Final = "works"
DIFFERS: Final = "works, with a difference"
NO_EFFECT: Final = "accepted, no effect"
REFUSED: Final = "refused unless off"
STATUSES: Final = (WORKS, DIFFERS, NO_EFFECT, REFUSED)

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


def status(key: Key) -> str:
    """The treatment of a key, as one of `STATUSES`."""
    if key.rule.kind == HONOURED:
        return DIFFERS if dotted(key.path) in DIFFERENCES or key.rule.hints else WORKS
    return NO_EFFECT if key.rule.kind == UNUSED else REFUSED


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
            for kind, label in ((NO_EFFECT, "no effect"), (REFUSED, "only the default is allowed"))
            if (names := [f"`{dotted(key.path)}`" for key in found if status(key) == kind])
        ]
        yield f"| `{name}` | {WORKS} | {'; '.join(told) or 'all options'} |"
    for name, instead in REFUSED_OPTIMIZERS.items():
        yield f"| `{name}` | refused | {_cell(instead)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
