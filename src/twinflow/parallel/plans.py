"""Plans of tensor parallelism: the style of each module of a model, by patterns of module names.

A plan maps shell patterns (`*` also matches dots) to styles. If several patterns match a module, the first one applies.

  column[:FUSED[:UNIT]]  a linear layer whose output features are split. A layer with FUSED concatenated pieces (3 for
                         q, k and v in one layer) has each piece split. UNIT features, such as a head, stay together
  row                    a linear layer whose input features are split; its outputs are summed before the bias is added
  vocab                  an embedding whose rows are split
  head                   an output projection with a split vocabulary; it returns all logits, or the loss with targets
  heads[:NAME,...]       an attention over this rank's heads; the named attributes (head counts, widths) are divided
  attention[:NAME,...]   like heads, for the attention of twinflow's GPT
  region                 a module around column layers with the same input, which share one collective on the input
  dropout                an nn.Dropout of split features. Between a column layer and the next row layer, dropout without
                         a style gets the same mask
  sequence               with a split sequence: a norm or an nn.Dropout that works on this rank's part
  stream:enter           with a split sequence: the layer that gets the whole sequence and takes this rank's part
  stream:leave           with a split sequence: the layer whose output is joined; stream:enter,leave for a single layer

The collective on the input is `copy_in`, or `gather_sequence` with a split sequence. A column layer outside of any
`region`, `heads` or `attention` runs this collective itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from twinflow.errors import invalid_value

PLAIN: Final = ("row", "vocab", "head", "region", "dropout", "sequence")
NAMING: Final = ("heads", "attention")
STREAM: Final = ("enter", "leave")
STYLES: Final = ("column[:FUSED[:UNIT]]", *PLAIN, *(f"{kind}[:NAME,...]" for kind in NAMING), "stream:enter,leave")
CUTTING: Final = ("column", "row", "vocab", "head")  # styles that split parameters
REGIONS: Final = ("heads", "attention", "region")


@dataclass(frozen=True)
class Style:
    kind: str
    num_fused: int = 1
    unit: int = 1
    names: tuple[str, ...] = ()  # attributes to divide; for a stream: enter, leave or both


def parse_style(text: str) -> Style:
    """Parse a style of a plan. Raises a ValueError for an unknown one."""
    kind, *given = text.split(":")
    if kind == "column" and len(given) <= 2 and all(part.isdecimal() and int(part) > 0 for part in given):
        num_fused, unit = (int(part) for part in (*given, "1", "1")[:2])
        return Style(kind, num_fused, unit)
    if kind in PLAIN and not given:
        return Style(kind)
    names = tuple(name for part in given for name in part.split(","))
    if kind in NAMING and len(given) <= 1 and all(name.isidentifier() for name in names):
        return Style(kind, names=names)
    if kind == "stream" and len(given) == 1 and set(names) <= set(STREAM):
        return Style(kind, names=names)
    expected = f"of the form {', '.join(STYLES)}"
    raise invalid_value("A style in a tensor-parallel plan", text, expected, "An example is column:3.")


def match(names: Iterable[str], plan: Mapping[str, str], is_part: bool = False) -> dict[str, Style]:
    """The style of each module that a pattern matches.

    Raises a ValueError for a pattern without a match, unless `is_part` is True: `names` are then those of a part of the
    model.
    """
    styles = {pattern: parse_style(text) for pattern, text in plan.items()}
    found: dict[str, Style] = {}
    unused = set(styles)
    for name in names:
        matching = [pattern for pattern in styles if fnmatchcase(name, pattern)]
        unused -= set(matching)
        if matching:
            found[name] = styles[matching[0]]
    if unused and not is_part:
        remedy = "Use a pattern that matches a name in model.named_modules()."
        raise invalid_value("A pattern in a tensor-parallel plan", min(unused), "one that matches a module", remedy)
    return found


def plan_for(model: nn.Module) -> dict[str, str]:
    """The plan of twinflow's GPT, or of a transformers model whose type is in READY, with or without a head. Raises a
    ValueError for other models."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", "")
    if getattr(config, "add_cross_attention", False):
        allowed = "False, because with cross attention keys and queries have different inputs"
        remedy = "For this model, write a plan and set it as tensor_parallel.plan in the config."
        raise invalid_value("config.add_cross_attention", True, allowed, remedy)
    if model_type in READY:
        plan = READY[model_type](config)
    elif type(model).__name__ == "GPT" and hasattr(config, "num_heads"):
        plan = _gpt(config)
    else:
        allowed = f"twinflow's GPT, or a transformers model with one of the types {', '.join(READY)}"
        remedy = (
            "For another model, write a plan and set it as tensor_parallel.plan in the config. A plan is a dict from "
            "patterns of module names to styles, for example {'*.q_proj': 'column', '*.o_proj': 'row'}."
        )
        raise invalid_value("The model for tensor parallelism", model_type or type(model).__name__, allowed, remedy)
    names = [name for name, _ in model.named_modules()]
    return {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}


def _stream(layers: str, num_layers: int) -> dict[str, str]:
    """The styles with which the first layer splits the sequence and the last layer joins it."""
    if num_layers == 1:
        return {f"{layers}.0": "stream:enter,leave"}
    return {f"{layers}.0": "stream:enter", f"{layers}.{num_layers - 1}": "stream:leave"}


def _gpt(config: Any) -> dict[str, str]:
    return {
        "token_embedding": "vocab",
        "blocks.*.attention": "attention:num_heads",
        "blocks.*.attention.qkv": f"column:3:{config.hidden // config.num_heads}",
        "blocks.*.attention.out": "row",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "blocks.*_norm": "sequence",
        "blocks.*.dropout": "sequence",
        "head": "head",
        **_stream("blocks", config.num_layers),
    }


def _head_width(config: Any) -> int:
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def _llama(config: Any) -> dict[str, str]:
    whole_heads = f"column:1:{_head_width(config)}"  # also of keys and values, which may have fewer heads
    return {
        "*embed_tokens": "vocab",
        "*layers.*.self_attn": "heads",
        "*layers.*.self_attn.[qkv]_proj": whole_heads,
        "*layers.*.self_attn.o_proj": "row",
        "*layers.*.mlp": "region",
        "*layers.*.mlp.gate_proj": "column",
        "*layers.*.mlp.up_proj": "column",
        "*layers.*.mlp.down_proj": "row",
        "*layers.*layernorm": "sequence",
        "*lm_head": "head",
        **_stream("*layers", config.num_hidden_layers),
    }


def _gpt2(config: Any) -> dict[str, str]:
    return {
        "*wte": "vocab",
        "*h.*.attn": "heads:num_heads,split_size,embed_dim",
        "*h.*.attn.c_attn": f"column:3:{_head_width(config)}",
        "*h.*.attn.c_proj": "row",
        "*h.*.mlp.c_fc": "column",
        "*h.*.mlp.c_proj": "row",
        "*h.*.ln_[12]": "sequence",
        "*h.*.attn.resid_dropout": "sequence",
        "*h.*.mlp.dropout": "sequence",
        "*lm_head": "head",
        **_stream("*h", config.num_hidden_layers),
    }


def _bert(config: Any) -> dict[str, str]:
    return {
        "*embeddings.word_embeddings": "vocab",
        "*layer.*.attention.self": "heads:num_attention_heads,all_head_size",
        "*layer.*.attention.self.[qkv]*": f"column:1:{_head_width(config)}",  # query, key and value
        "*layer.*.intermediate.dense": "column",
        "*layer.*.output.dense": "row",  # output of the attention and of the MLP
        "*layer.*.output.LayerNorm": "sequence",
        "*layer.*.output.dropout": "sequence",
        "*cls.predictions.decoder": "head",
        **_stream("*layer", config.num_hidden_layers),
    }


# Plans by `config.model_type` of transformers 5.
READY: Final = {"llama": _llama, "mistral": _llama, "qwen2": _llama, "gpt2": _gpt2, "bert": _bert}
