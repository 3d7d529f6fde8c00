"""Writes the tables of these pages that follow from declarations in the code, each between its two marks.

python docs/tables.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from twinflow.config.migration import migration_tables, summary
from twinflow.config.registry import key_tables, option_tables, rule_table, spelling_table
from twinflow.conflicts import CONFLICTS
from twinflow.parallel.support import LIMITS
from twinflow.parallel.support import table as support_table
from twinflow.planner.costs import Bytes, Memory, Run, bytes_of, fits, placed_at
from twinflow.planner.formats import STATES, WEIGHT_BYTES, state_bytes
from twinflow.planner.machines import GPUS
from twinflow.planner.models import ModelCost, from_hf

DOCS: Final = Path(__file__).parent
# How the docs show values that are in braces in the table of conflicts. The others become an ellipsis.
SHOWN: Final = {
    "stage": "0, 1 or 2",
    "stage_except_1": "0, 2 or 3",
    "stage_2_or_3": "2 or 3",
    "ranks": "several",
    "rules": "that [this page](rules.md) lists",
    "name": "Any parameter",
    "callback": "WeightAveraging or StochasticWeightAveraging",
    "own_key": "fp16.enabled, or a key of offload_optimizer that DeepSpeed does not have",
}
LINK: Final = r"\[[^\]]*\]\([^)]*\)"
CALL: Final = r"[\w.=]+\([^)\s]*(?: \w+=[^)]*)?\)"
VALUE: Final = r"[\w.]+=(?:\.{3}|[^\s,;.]+)"
NAME: Final = r"[A-Za-z]\w*(?:\.\w+)+|\w*_\w+|\w+\[\d\]"
CODE: Final = re.compile(f"`[^`]*`|{LINK}|{CALL}|{VALUE}|{NAME}")

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
# Enough for gradients to wait on the GPU, and no spare host memory for speculative stores.
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
    rows = []
    for limit in LIMITS:
        values = ", ".join(map(repr, limit.allowed))
        option = limit.key if isinstance(limit.allowed[0], bool) else f"{limit.key}, except {values},"
        remedy = limit.remedy or "Leave out one of the two."
        rows.append((option, f"{' or '.join(sorted(limit.axes))} ranks", limit.reason, remedy))
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
    """One sequence of 2048 tokens on each GPU, clipping, activation checkpointing, bf16 weights."""
    return Run(model, batch=1, tokens=2048, states=states, world=world, stage=stage)


def used(run: Run, ratio: float) -> Bytes:
    return bytes_of(run, placed_at(run, ratio), ENOUGH)


def gb(count: float) -> str:
    return f"{count / 1e9:.1f}" if count < 99.95e9 else f"{count / 1e9:,.0f}"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]], num_texts: int = 1) -> str:
    """A table whose columns are right-aligned, except the first ones."""
    names = list(head)
    rule = "---|" * num_texts + "---:|" * (len(names) - num_texts)
    lines = [f"| {' | '.join(names)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n" + "\n".join(lines) + "\n\n"


def bytes_table() -> str:
    """Bytes a parameter of state on GPU and host, by format and dtype of the weights."""
    rows = []
    for weights in WEIGHT_BYTES:
        sizes = [state_bytes(states, weights) for states in STATES]
        rows.append([weights, *(f"{size.resident:.3g} / {size.host:.3g}" for size in sizes)])
    return markdown(["weights", *(f"{states} state" for states in STATES)], rows)


def ratio_tables() -> str:
    """Memory on one GPU and its host, by model and ratio, one table for each state format."""
    parts = []
    for states in STATES:
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
    """What the memory of one model consists of."""
    model = models()["Llama-3-8B"]
    rows = []
    for ratio in RATIOS:
        found = used(run_of(model), ratio)
        for place, sizes in (("GPU", found.gpu), ("host", found.host)):
            kinds = ", ".join(f"{kind} {gb(count)}" for kind, count in sizes.items() if count)
            rows.append([f"{ratio:g}", place, kinds, gb(sum(sizes.values()))])
    return markdown(["ratio", "place", "GB of each kind", "sum"], rows, 3)


def cards_table() -> str:
    """The least host memory of a machine with one GPU, with the ratio that needs least of it."""
    head = ["model", *(GPUS[card].title for card in CARDS)]
    return markdown(head, [[name, *(least_ram(model, card) for card in CARDS)] for name, model in models().items()])


def least_ram(model: ModelCost, card: str) -> str:
    cells = []
    for states in STATES:
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


TABLES: Final[dict[tuple[str, str], Callable[[], str]]] = {  # by page and name of the marks
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
    ("3d.md", "support"): lambda: f"\n{support_table()}\n\n",
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
