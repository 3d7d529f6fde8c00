# SPDX-License-Identifier: Apache-2.0
"""Plans of tensor parallelism: the style of each module of a model, by patterns of module names.

A plan maps shell patterns (`*` also matches dots) to styles. If several patterns match a module, the first one applies.

  column[:FUSED[:UNIT]]  a linear layer whose output features are split. A layer with FUSED concatenated pieces (3 for
                         q, k and v in one layer) has each piece split. UNIT features, such as a head, stay together
  row[:whole]            a linear layer whose input features are split; its outputs are summed before the bias is added.
                         With whole, it gets all features and takes this rank's part
  vocab                  an embedding whose rows are split
  head                   a column layer that returns the features of all ranks, for example all logits of a split
                         vocabulary; with targets it returns the loss
  experts:COLUMN,ROW     a module with two parameters [experts, out, in]: gates and values in one parameter whose output
                         features are split, and one whose input features are split
  partial                a module whose weights all ranks have, but which gets this rank's features or heads; its
                         gradients are summed
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

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from twinflow.errors import incompatible, invalid_value

PLAIN: Final = ("row", "vocab", "head", "region", "dropout", "sequence", "partial")
NAMING: Final = ("heads", "attention")
STREAM: Final = ("enter", "leave")
STYLES: Final = (
    *("column[:FUSED[:UNIT]]", "row[:whole]", *PLAIN[1:], "experts:COLUMN,ROW"),
    *(*(f"{kind}[:NAME,...]" for kind in NAMING), "stream:enter,leave"),
)
CUTTING: Final = ("column", "row", "vocab", "head", "experts")  # styles that split parameters
REGIONS: Final = ("heads", "attention", "region")
_REMEDY: Final = (
    "For this model, write a plan and set it as tensor_parallel.plan in the config. A plan is a dict from patterns of "
    "module names to styles, for example {'*.q_proj': 'column', '*.o_proj': 'row'}."
)


@dataclass(frozen=True)
class Style:
    kind: str
    num_fused: int = 1
    unit: int = 1
    names: tuple[str, ...] = ()  # attributes to divide; for experts: parameters; for a stream: enter, leave or both
    takes_whole: bool = False  # a row layer that gets all features


def parse_style(text: str) -> Style:
    """Parse a style of a plan. Raises a ValueError for an unknown one."""
    kind, *given = text.split(":")
    if kind == "column" and len(given) <= 2 and all(part.isdecimal() and int(part) > 0 for part in given):
        num_fused, unit = (int(part) for part in (*given, "1", "1")[:2])
        return Style(kind, num_fused, unit)
    if kind in PLAIN and not given:
        return Style(kind)
    if text == "row:whole":
        return Style(kind, takes_whole=True)
    names = tuple(name for part in given for name in part.split(","))
    if kind == "experts" and len(names) == 2 and all(name.isidentifier() for name in names):
        return Style(kind, names=names)
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
    wild = [pattern for pattern in styles if not pattern.replace(".", "").replace("_", "").isalnum()]
    found: dict[str, Style] = {}
    unused = set(styles)
    for name in names:
        matching = [pattern for pattern in wild if fnmatchcase(name, pattern)]
        if name in styles and name not in matching:  # a plan of transformers has thousands of names
            matching = [pattern for pattern in styles if pattern == name or pattern in matching]
        unused -= set(matching)
        if matching:
            found[name] = styles[matching[0]]
    if unused and not is_part:
        remedy = "Use a pattern that matches a name in model.named_modules()."
        raise invalid_value("A pattern in a tensor-parallel plan", min(unused), "one that matches a module", remedy)
    return found


def plan_for(model: nn.Module) -> dict[str, str]:
    """The plan of twinflow's GPT, or of a transformers or PEFT model, with or without a head. Raises a ValueError for
    other models.
    """
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", "")
    if getattr(config, "add_cross_attention", False):
        allowed = "False, because with cross attention keys and queries have different inputs"
        raise invalid_value("config.add_cross_attention", True, allowed, _REMEDY)
    if model_type in READY and not hasattr(model, "peft_config"):
        plan = READY[model_type](config)
    elif type(model).__name__ == "GPT" and hasattr(config, "num_heads"):
        plan = _gpt(config)
    elif getattr(config, "base_model_tp_plan", None):
        return _Transformers(model, config.base_model_tp_plan).plan()
    elif model_type in _ADDED:
        return _Transformers(model, *_ADDED[model_type]).plan()
    elif model_type:
        reason = "transformers has no base_model_tp_plan for it"
        raise incompatible(f"A model of type {model_type!r}", "tensor ranks", reason, _REMEDY)
    else:
        allowed = "twinflow's GPT, or a model of transformers or PEFT"
        raise invalid_value("The model for tensor parallelism", type(model).__name__, allowed, _REMEDY)
    names = [name for name, _ in model.named_modules()]
    return {pattern: style for pattern, style in plan.items() if any(fnmatchcase(name, pattern) for name in names)}


def needs_dropout(model: nn.Module) -> bool:
    """Whether the model has dropout for which a plan of `plan_for` has no styles: in a module, or by its config."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type") or config.model_type in READY:
        return False
    has_modules = any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in model.modules())
    return has_modules or bool(_dropouts(config))


def _dropouts(config: Any) -> set[str]:
    """The names of the values of a config that switch dropout on."""
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return {name for name, value in values.items() if "drop" in name and isinstance(value, float) and value > 0.0}


def _stream(layers: str, num_layers: int) -> dict[str, str]:
    """The styles with which the first layer splits the sequence and the last layer joins it."""
    if num_layers == 1:
        return {f"{layers}.0": "stream:enter,leave"}
    return {f"{layers}.0": "stream:enter", f"{layers}.{num_layers - 1}": "stream:leave"}


def _gpt(config: Any) -> dict[str, str]:
    if getattr(config, "num_experts", 0):
        reason = "there is no plan for them"
        raise incompatible("The experts of twinflow's GPT", "tensor ranks", reason, "Use data-parallel ranks (ZeRO).")
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
        "lm_head.decoder": "head",  # of RoBERTa
        **_stream("*layer", config.num_hidden_layers),
    }


READY: Final = {
    "gpt2": _gpt2,
    "bert": _bert,
    "roberta": _bert,
}  # by `config.model_type`. transformers has no plans for these


def _decoder(layers: str, attention: str, columns: str, rows: str) -> dict[str, str]:
    """A plan in the notation of transformers. `columns`, `rows`: names in a layer, of layers besides q, k and v."""
    inputs = [*(f"{attention}.{name}_proj" for name in "qkv"), *columns.split()]
    return {f"{layers}.*.{name}": "colwise" for name in inputs} | {
        f"{layers}.*.{name}": "rowwise" for name in rows.split()
    }


# Plans of model types for which transformers has none, and the attributes of an attention that count heads.
_ADDED: Final = {
    "gpt_neo": (
        _decoder("h", "attn.attention", "mlp.c_fc", "attn.attention.out_proj mlp.c_proj"),
        "num_heads",
    ),
    "gptj": (_decoder("h", "attn", "mlp.fc_in", "attn.out_proj mlp.fc_out"), "num_attention_heads"),
    "nemotron": (_decoder("layers", "self_attn", "mlp.up_proj", "self_attn.o_proj mlp.down_proj"), ""),
    "opt": (_decoder("decoder.layers", "self_attn", "fc1", "self_attn.out_proj fc2"), "num_heads"),
    "stablelm": (
        _decoder("layers", "self_attn", "mlp.gate_proj mlp.up_proj", "self_attn.o_proj mlp.down_proj"),
        "num_heads,num_key_value_heads",
    ),
}


# Plans of transformers. The names in `base_model_tp_plan` are relative to the base model. The embedding and the output
# projection are always split, because they may share their weight.

_TRANSLATED: Final = {
    **dict.fromkeys(("colwise", "local_colwise"), "column"),
    **dict.fromkeys(("rowwise", "local_rowwise"), "row"),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), "head"),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), "row:whole"),
    "packed_colwise": "column:2",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "partial",
    # Whole on all ranks, or sums of experts that our row layers have already computed.
    **dict.fromkeys(("replicate", "local", "gather"), ""),
}
_EXPERTS: Final = ("packed_colwise", "rowwise")  # styles of the parameters of a module with the style moe_tp_experts
_HEAD_WIDTHS: Final = ("head_dim", "head_size")  # attributes of attention modules
_LORA: Final = ("base_layer", "lora_A", "lora_B", "lora_dropout")  # parts of a LoRA layer that can be split


class _Transformers:
    """Builds the plan of a model from the plan in its config. The result has the full names of modules."""

    def __init__(self, model: Any, given: Mapping[str, str], counts: str = "") -> None:
        self._model = model
        self._given = given
        self._counts = counts
        self._config = model.config
        self._modules: dict[str, Any] = dict(model.named_modules())
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._inner = inner
        base = getattr(inner, "base_model", inner)
        self._prefix = next(f"{name}." if name else "" for name, module in self._modules.items() if module is base)
        self._styles: dict[str, str] = {}

    def plan(self) -> dict[str, str]:
        if type(self._inner).forward.__module__.startswith("liger_kernel"):
            reason = "it computes the loss from the weight of the output projection, which is split"
            raise self._refused("The fused loss of Liger", reason)
        for name, module in self._modules.items():
            text = self._given.get(self._key(name))
            if text == "moe_tp_experts":
                self._styles[name] = self._experts(name, module)
            elif text is not None:
                self._add(name, module, self._translated(name, text))
        self._check_parameters()
        ends = {"vocab": self._inner.get_input_embeddings(), "head": self._inner.get_output_embeddings()}
        for style, end in ends.items():
            names = [name for name, module in self._modules.items() if module is end]
            if end is not None and (style == "head" or isinstance(end, nn.Embedding)):
                self._add(names[0], end, style)
        for name, module in self._modules.items():
            self._add_region(name, module)
        self._add_sequence()
        return {name: self._styles[name] for name in self._modules if self._styles.get(name)}

    def _key(self, name: str) -> str:
        """The name that a plan has for a module or parameter: relative, with * for numbers."""
        if not name.startswith(self._prefix):
            return ""
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name[len(self._prefix) :])

    def _translated(self, name: str, text: str) -> str:
        if text not in _TRANSLATED:
            reason = (
                f"twinflow cannot split a module in this way. It knows {', '.join([*_TRANSLATED, 'moe_tp_experts'])}"
            )
            raise self._refused(f"The style {text!r} of {name} in base_model_tp_plan", reason)
        return _TRANSLATED[text]

    def _add(self, name: str, module: Any, style: str) -> None:
        parent = self._modules[name.rpartition(".")[0]] if name else None
        if style == "column":
            style = self._by_heads(name, module, parent)
        if not hasattr(module, "base_layer"):
            self._styles[name] = style
            return
        # A LoRA layer: base_layer(x) + lora_B(lora_A(x)). One of the two small layers is split like the base layer, and
        # the other one is whole, with replicated inputs and outputs.
        other = next((one for one, _ in module.named_parameters() if one.partition(".")[0] not in _LORA), None)
        if other is not None or style == "vocab":
            reason = f"tensor ranks cannot split {other or 'an adapter of an embedding'}"
            raise self._refused(f"The adapter of {name}", reason)
        self._styles[f"{name}.base_layer"] = style
        kind = style.partition(":")[0]
        small = {"column": "lora_B", "row": "lora_A"}.get("" if style == "row:whole" else kind)
        for adapter in getattr(module, small) if small is not None else ():
            self._styles[f"{name}.{small}.{adapter}"] = style

    def _by_heads(self, name: str, module: Any, parent: Any) -> str:
        """The style of a column layer. In an attention, heads are not split."""
        width = next((getattr(parent, one) for one in _HEAD_WIDTHS if hasattr(parent, one)), None)
        if not isinstance(width, int):
            return "column"
        layer = getattr(module, "base_layer", module)
        heads = getattr(self._config, "num_attention_heads", 0)
        kv_heads = getattr(self._config, "num_key_value_heads", None) or heads
        num_heads = {heads * width: heads, kv_heads * width: kv_heads, 3 * heads * width: heads}
        features = layer.weight.shape[0]
        if features not in num_heads:
            reason = f"it is not a multiple of the {heads} or {kv_heads} heads of width {width}"
            raise self._refused(f"The number of output features of {name}, {features},", reason)
        return f"column:1:{features // num_heads[features]}"

    def _experts(self, name: str, module: Any) -> str:
        """The style of a module with the weights of all experts."""
        own = {one: self._given.get(self._key(f"{name}.{one}")) for one in module._parameters}
        by_style = {style: one for one, style in own.items()}
        is_plain = getattr(module, "is_concatenated", True) and not getattr(module, "is_transposed", False)
        if set(by_style) != set(_EXPERTS) or len(own) != 2 or not is_plain:
            reason = (
                f"of its parameters {list(own)}, one must have the style {_EXPERTS[0]} and one {_EXPERTS[1]}, with "
                "concatenated gates and values and without a transposition"
            )
            raise self._refused(f"The module {name} of experts", reason)
        return f"experts:{by_style[_EXPERTS[0]]},{by_style[_EXPERTS[1]]}"

    def _check_parameters(self) -> None:
        """Raises ValueError for an entry of a parameter, unless it is one of experts."""
        for name, _ in self._model.named_parameters():
            text = self._given.get(self._key(name))
            owner = name.rpartition(".")[0]
            if text is not None and not self._styles.get(owner, "").startswith("experts"):
                raise self._refused(f"The style {text!r} of the parameter {name}", "only modules can have this style")

    def _add_region(self, name: str, module: Any) -> None:
        """Style of a module whose column layers all get its input: they share one collective. Other modules with
        weights between its column and row layers work on this rank's features.
        """
        own = {child: self._styles.get(f"{name}.{child}", "") for child, _ in module.named_children()}
        kinds = {style.partition(":")[0] for style in own.values()}
        if not {"column", "row"} <= kinds or "row:whole" in own.values() or name in self._layers():
            return
        if module._parameters:
            reason = "base_model_tp_plan has no entry for it, and the module has only this rank's features"
            raise self._refused(f"The parameter {next(iter(module._parameters))} of {name}", reason)
        width = next((getattr(module, one) for one in _HEAD_WIDTHS if hasattr(module, one)), None)
        has_adapters = False
        for child, style in own.items():
            part = self._modules[f"{name}.{child}"]
            if style or next(part.parameters(), None) is None:
                continue
            if hasattr(part, "base_layer"):
                has_adapters = True
            elif width is not None and all(param.shape == (width,) for param in part.parameters()):
                self._styles[f"{name}.{child}"] = "partial"  # a norm of each head
            else:
                reason = "base_model_tp_plan has no entry for it, and it is between layers that are split"
                raise self._refused(f"The module {name}.{child}", reason)
        has_adapters = has_adapters or any(hasattr(part, "base_layer") for part in module.children())
        if has_adapters and self._counts and width is not None:
            raise self._refused(
                f"An adapter in {name}", "the module counts heads, which only a plan of its own can divide"
            )
        if not has_adapters:
            self._styles[name] = "region" if width is None else f"heads:{self._counts}".rstrip(":")

    def _layers(self) -> list[str]:
        """The names of the layers: the members of the outermost lists."""
        lists = [name for name, module in self._modules.items() if isinstance(module, nn.ModuleList)]
        outermost = [name for name in lists if not any(name.startswith(f"{one}.") for one in lists)]
        return [f"{name}.{child}" for name in outermost for child, _ in self._modules[name].named_children()]

    def _add_sequence(self) -> None:
        """Styles for a split sequence, if all modules of the layers can work on a part of it."""
        layers = self._layers()
        if _dropouts(self._config) - {"attention_dropout"} or hasattr(self._model, "peft_config"):
            return
        norms = []
        for name, module in self._modules.items():
            layer = next((one for one in layers if name.startswith(f"{one}.")), None)
            if layer is None:
                continue
            style = self._styles.get(name, "")
            is_inside = any(self._styles.get(one, "").startswith(("heads", "region")) for one in _parents(name))
            if style in ("head", "row:whole") or style.startswith("experts"):
                return
            if is_inside or style.startswith(("heads", "region")) or not module._parameters:
                continue
            if style or any(param.dim() > 1 for param in module.parameters()):
                return  # not a norm, or a layer that may get tensors with other dims
            norms.append(name)
        if layers and all(name.rpartition(".")[0] in layers for name in norms):
            self._styles |= dict.fromkeys(norms, "sequence")
            self._styles[layers[0]] = "stream:enter"
            self._styles[layers[-1]] = "stream:leave" if len(layers) > 1 else "stream:enter,leave"

    def _refused(self, what: str, reason: str) -> ValueError:
        return incompatible(what, "tensor ranks", reason, _REMEDY)


def _parents(name: str) -> list[str]:
    steps = name.split(".")
    return [".".join(steps[:i]) for i in range(1, len(steps))]
