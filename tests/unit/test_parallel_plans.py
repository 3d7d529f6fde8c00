# SPDX-License-Identifier: Apache-2.0
"""Plans of tensor parallelism and what they cut, without any rank; and attention over some of the heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from twinflow.dist.group import alone
from twinflow.models.gpt import GPT, GPTConfig
from twinflow.parallel.plans import READY, Style, match, parse_style, plan_for
from twinflow.parallel.tensor import (
    Split,
    dropout_part,
    own_targets,
    parallelize,
    plan_cuts,
    probabilities,
    splitting_dropout,
    vocab_parallel_cross_entropy,
)

CONFIG = GPTConfig(vocab_size=32, context=8, num_layers=2, hidden=16, num_heads=4)


SMALL = ("norm", "Norm", "ln_", "position", "wpe", "token_type", "predictions.transform", "pooler", "lm_head.dense")


def cuts_of(model: nn.Module, rank: int, world: int) -> dict[str, Any]:
    """By name of the parameter."""
    modules = dict(model.named_modules())
    cuts = plan_cuts(modules, match(modules, plan_for(model)), rank, world)
    return {name: cuts[id(param)].shard for name, param in model.named_parameters() if id(param) in cuts}


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("column", Style("column")),
        ("column:3", Style("column", 3)),
        ("column:3:64", Style("column", 3, 64)),
        ("row", Style("row")),
        ("row:whole", Style("row", takes_whole=True)),
        ("experts:up,down", Style("experts", names=("up", "down"))),
        ("heads", Style("heads")),
        ("heads:num_heads,width", Style("heads", names=("num_heads", "width"))),
        ("stream:enter,leave", Style("stream", names=("enter", "leave"))),
    ],
)
def test_styles(text: str, style: Style) -> None:
    assert parse_style(text) == style


@pytest.mark.parametrize(
    "text",
    [
        "",
        "columns",
        "column:0",
        "column:x",
        "column:1:2:3",
        "row:1",
        "experts",
        "experts:a",
        "heads:",
        "heads:a b",
        "stream",
        "stream:x",
    ],
)
def test_styles_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="A style in a tensor-parallel plan"):
        parse_style(text)


def test_the_first_pattern_counts() -> None:
    plan = {"a.1": "row", "a.*": "column", "b": "vocab"}
    assert {name: style.kind for name, style in match(["a.1", "a.2", "b", "c"], plan).items()} == {
        "a.1": "row",
        "a.2": "column",
        "b": "vocab",
    }
    assert match(["a.1", "b"], plan)  # hidden behind another, but it does match
    with pytest.raises(ValueError, match="'b'"):
        match(["a.1"], plan)
    assert match(["a.1"], plan, is_part=True)


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_cut_of_our_gpt(world: int) -> None:
    model = GPT(CONFIG)
    whole = dict(model.named_parameters())
    parts = [cuts_of(model, rank, world) for rank in range(world)]
    replicated = {name for name in whole if name not in parts[0]}
    assert all("norm" in name or name.endswith(("out.bias", "down.bias")) or "position" in name for name in replicated)
    for name, shard in parts[0].items():
        pieces = [part[name].cut(whole[name].detach()) for part in parts]
        pieces_of = [piece.chunk(len(shard.ranges), shard.dim) for piece in pieces]
        fused = [torch.cat(piece, shard.dim) for piece in zip(*pieces_of, strict=True)]
        assert torch.equal(torch.cat(fused, shard.dim), whole[name])
        assert pieces[0].numel() * world == whole[name].numel()
    qkv = parts[1]["blocks.0.attention.qkv.weight"].ranges
    assert qkv == tuple((start + 16 // world, start + 2 * 16 // world) for start in (0, 16, 32))


def test_no_head_is_on_two_ranks() -> None:
    model = GPT(GPTConfig(vocab_size=32, context=8, num_layers=1, hidden=24, num_heads=6))
    with pytest.raises(
        ValueError, match=r"heads of 4 features in .*blocks.0.attention.qkv.weight is 6, but must be a multiple of 4"
    ):
        cuts_of(model, 0, 4)


def test_alone_nothing_changes() -> None:
    model = GPT(CONFIG)
    before = [(id(param), sorted(vars(module))) for module in model.modules() for param in module.parameters()]
    parallelize(model, plan_for(model), alone(), sequence=True)
    assert before == [(id(param), sorted(vars(module))) for module in model.modules() for param in module.parameters()]


def test_unknown_models_are_asked_for_a_plan() -> None:
    with pytest.raises(ValueError, match=r"'Linear'.*write a plan"):
        plan_for(nn.Linear(2, 2))
    odd = nn.Linear(2, 2)
    odd.config = SimpleNamespace(model_type="mamba")  # type: ignore[assignment]
    with pytest.raises(ValueError, match="'mamba'"):
        plan_for(odd)
    odd.config = SimpleNamespace(model_type="bert", add_cross_attention=True)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="add_cross_attention"):
        plan_for(odd)


def transformers_model(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, **options
    )
    auto = transformers.AutoModelForMaskedLM if "bert" in kind else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


@pytest.mark.parametrize("kind", [*READY, "llama", "mistral", "qwen2"])
def test_plans_of_transformers(kind: str) -> None:
    """Every matrix of every layer is cut, with and without a head; norms and what is added after sums are not."""
    model = transformers_model(kind)
    for one in (model, model.base_model):
        cuts = cuts_of(one, 0, 2)
        for name, _ in one.named_parameters():
            is_small = any(part in name for part in SMALL)
            is_after = name.endswith(("c_proj.bias", "output.dense.bias"))
            assert (name in cuts) != (is_small or is_after), name


def test_heads_of_keys_are_not_cut() -> None:
    model = transformers_model("llama", num_key_value_heads=2)
    assert cuts_of(model, 1, 2)["model.layers.0.self_attn.k_proj.weight"].ranges == ((4, 8),)
    with pytest.raises(ValueError, match=r"of 4 features in .*k_proj.weight is 2, but .*\(also of keys and values\)"):
        cuts_of(model, 1, 4)


@pytest.mark.parametrize("style", ["sequence_parallel", "ep_router", "grouped_gemm", "mla_kv_a_proj", "of the future"])
def test_entries_that_cannot_be_carried_out_are_named(style: str) -> None:
    model = transformers_model("qwen3")
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "layers.*.mlp.up_proj": style}
    with pytest.raises(ValueError, match=f"The style '{style}' of model.layers.0.mlp.up_proj .*tensor ranks"):
        plan_for(model)


def test_modules_between_split_layers_need_an_entry() -> None:
    model = transformers_model("cohere", use_qk_norm=True)  # norms whose weights have the heads of all ranks
    with pytest.raises(ValueError, match=r"The module model.layers.0.self_attn.q_norm .*has no entry for it"):
        plan_for(model)
    model = transformers_model("qwen3", head_dim=4)
    entries = model.config.base_model_tp_plan
    model.config.base_model_tp_plan = {key: style for key, style in entries.items() if "_norm" not in key}
    assert plan_for(model)["model.layers.0.self_attn.q_norm"] == "partial"  # as in versions without these entries
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match=r"The parameter sinks of model.layers.1.self_attn .*no entry"):
        plan_for(model)


def test_names_of_older_versions() -> None:
    model = transformers_model("olmo2")
    older = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
    plan = plan_for(model)
    entries = model.config.base_model_tp_plan
    model.config.base_model_tp_plan = {key: older.get(style, style) for key, style in entries.items()}
    assert plan_for(model) == plan
    assert plan["model.layers.0.self_attn.q_proj"] == "head"
    assert plan["model.layers.0.self_attn.o_proj"] == "row:whole"


@pytest.mark.parametrize("change", [{"is_concatenated": False}, {"is_transposed": True}])
def test_other_layouts_of_experts_are_refused(change: dict[str, Any]) -> None:
    model = transformers_model("mixtral", num_local_experts=2)
    assert plan_for(model)["model.layers.0.mlp.experts"] == "experts:gate_up_proj,down_proj"
    vars(model.model.layers[0].mlp.experts).update(change)
    with pytest.raises(ValueError, match=r"The module model.layers.0.mlp.experts of experts"):
        plan_for(model)


def test_adapters_other_than_lora_are_refused() -> None:
    peft = pytest.importorskip("peft")
    names = ["q_proj", "o_proj"]
    plan = plan_for(peft.get_peft_model(transformers_model("llama"), peft.LoraConfig(target_modules=names)))
    attention = "base_model.model.model.layers.0.self_attn"
    assert plan[f"{attention}.q_proj.base_layer"] == plan[f"{attention}.q_proj.lora_B.default"] == "column:1:4"
    assert plan[f"{attention}.o_proj.base_layer"] == plan[f"{attention}.o_proj.lora_A.default"] == "row"
    assert attention not in plan, "its column layers and the small layers have different collectives"
    for config in (
        peft.LoraConfig(target_modules=names, use_dora=True),
        peft.IA3Config(target_modules=names, feedforward_modules=[]),
    ):
        model = peft.get_peft_model(tiny_llama(), config)
        with pytest.raises(ValueError, match=r"The adapter of base_model.*cannot split"):
            plan_for(model)


def tiny_llama() -> Any:
    """On the CPU, because some adapters read values of weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))


# Attention over some of the heads.


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_written_out_attention_is_torchs(kind: str) -> None:
    torch.manual_seed(0)
    is_causal = kind == "causal"
    q, k, v = torch.randn(3, 2, 4, 6, 8).double()
    mask = None if kind in ("none", "causal") else torch.rand(2, 1, 6, 6) > 0.3
    if mask is not None:
        mask[..., 0] = True
        mask = mask if kind == "bool" else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -1e9)
    truth = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(probabilities(q, k, mask, is_causal, 0.3) @ v, truth)


def of_rank(rank: int, world: int) -> Any:
    return SimpleNamespace(rank=rank, world=world)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_dropout_is_a_part_of_the_wholes(dim: int) -> None:
    x = torch.randn(4, 6, 8)
    torch.manual_seed(1)
    whole = F.dropout(x, 0.4)
    parts = []
    for rank in range(2):
        torch.manual_seed(1)
        parts.append(dropout_part(x.chunk(2, dim)[rank], 0.4, of_rank(rank, 2), dim))
    assert torch.equal(torch.cat(parts, dim), whole)


@pytest.mark.parametrize("kind", ["sdpa", "gqa", "eager"])
def test_heads_drop_what_one_process_drops(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4) for heads in ((4, 2, 2) if kind == "gqa" else (4, 4, 4)))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        if kind == "eager":
            return F.dropout(probabilities(q, k, None), 0.3) @ v
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=kind == "gqa")

    parts = []
    for rank in range(2):
        with splitting_dropout(Split(of_rank(rank, 2), False, None), is_training=True, has_heads=True):
            parts.append(attend(*(part.chunk(2, 1)[rank] for part in (q, k, v))))
    torch.testing.assert_close(torch.cat(parts, 1), attend(q, k, v))


# The loss.


def test_targets_of_a_rank() -> None:
    own = own_targets(torch.tensor([0, 4, 7, -100, 8]), num_rows=4, rank=1)
    assert own.is_here.tolist() == [False, True, True, False, False]
    assert own.rows[:, 0].tolist() == [0, 0, 3, 0, 0]
    assert own.is_counted.tolist() == [True, True, True, False, True]


def test_the_loss_alone() -> None:
    hidden, weight = torch.randn(9, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    targets = torch.tensor([0, 5, -100, 2, 2, 1, 0, 3, 4])
    truth = F.cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(vocab_parallel_cross_entropy(hidden, weight, targets, alone(), chunk=2), truth)
    with pytest.raises(ValueError, match="chunk"):
        vocab_parallel_cross_entropy(hidden, weight, targets, alone(), chunk=0)
