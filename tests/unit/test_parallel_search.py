# SPDX-License-Identifier: Apache-2.0
"""The search over layouts, and `twinflow plan` for more GPUs than a machine has."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from twinflow.cli.main import app
from twinflow.cli.plan_input import count_module
from twinflow.parallel.costs import estimate, lacking_bytes
from twinflow.parallel.plans import match, plan_for
from twinflow.parallel.search import LayoutAsk, layouts, reasons, search
from twinflow.parallel.shapes import Shape, shape_like, shape_of
from twinflow.parallel.tensor import plan_cuts
from twinflow.planner.machines import GB, GPUS, Host, Machine
from twinflow.planner.models import from_hf
from twinflow.planner.scaling import Cluster, default_network

DGX = Machine(GPUS["a100-40"], Host(1024 * GB, 128, 300e9), 8)
CLUSTER = Cluster(DGX, default_network(DGX))
SMALL = LayoutAsk(Shape(16, 4096, 32, 2048), CLUSTER, num_gpus=32, batch=64, micro_batches=(1, 2))
MANY = ("--params", "13b", "--gpu", "a100-40", "--gpus", "32", "--batch", "64", "--batch-size", "1")


def plan(*options: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["plan", *options])


def test_every_layout_divides_and_is_there_once() -> None:
    found = list(layouts(SMALL))
    assert len(found) == len(set(found))
    for layout in found:
        assert layout.world == 32
        assert layout.batch == 64
        assert layout.num_stages <= 16
        assert 32 % layout.num_tp == 0
    assert {layout.num_tp for layout in found} == {1, 2, 4, 8, 16}
    assert {layout.schedule for layout in found} == {"1f1b", "interleaved", "zbv"}
    assert {layout.zero for layout in found} == {0, 1, 2, 3}
    assert {layout.zero for layout in found if layout.num_tp > 1} == {0, 1, 2}  # the engine refuses stage 3 there
    assert {layout.num_pp for layout in found} == {1, 2, 4, 8, 16}


TOKENS = {"vocab_size": 96, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 48, **TOKENS}
GPT2 = {"n_embd": 96, "n_layer": 2, "n_head": 8, "n_positions": 16, "vocab_size": 96}
MODELS: list[tuple[str, dict[str, Any], set[int]]] = [
    ("llama", SIZES, {1, 2, 4, 8}),
    ("llama", {**SIZES, "num_key_value_heads": 2}, {1, 2}),
    ("llama", {**SIZES, "vocab_size": 50}, {1, 2}),
    ("llama", {**SIZES, "intermediate_size": 36}, {1, 2, 4}),
    ("qwen2", {**SIZES, "num_key_value_heads": 1}, {1}),
    ("gpt2", GPT2, {1, 2, 4, 8}),
    ("gpt2", {**GPT2, "vocab_size": 97}, {1}),
    ("gpt2", {**GPT2, "n_inner": 100}, {1, 2, 4}),
    ("bert", {**SIZES, "vocab_size": 196}, {1, 2, 4}),
    ("gpt_neox", SIZES, {1, 2, 4, 8}),
    ("opt", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 96}, {1, 2, 4, 8}),
]
BUILT: list[tuple[str, dict[str, Any], set[int]]] = [  # models whose configs `from_hf` does not know
    ("qwen3", {**SIZES, "num_key_value_heads": 4, "head_dim": 16}, {1, 2, 4}),
    ("phi3", {**SIZES, "pad_token_id": 0}, {1, 2, 4, 8}),
    ("mixtral", {**SIZES, "num_local_experts": 2}, {1, 2, 4, 8}),
    ("qwen3_moe", {**SIZES, "num_experts": 4, "moe_intermediate_size": 20, "num_key_value_heads": 8}, {1, 2, 4}),
    ("bloom", {"vocab_size": 96, "hidden_size": 96, "n_layer": 2, "n_head": 8}, {1}),
]


@pytest.mark.parametrize(("kind", "sizes", "allowed"), [*MODELS, *BUILT])
def test_tensor_ranks_are_those_that_the_engine_accepts(kind: str, sizes: dict[str, Any], allowed: set[int]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    maker = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, maker).from_config(config)
    modules = dict(model.named_modules())
    accepted = {1}
    for tp in (2, 4, 8):
        with suppress(ValueError):
            plan_cuts(modules, match(modules, plan_for(model)), 0, tp)
            accepted.add(tp)
    assert accepted == allowed
    costs = [count_module(model, "built")]
    if (kind, sizes, allowed) in MODELS:
        costs.append(from_hf(config.to_dict()))
    for cost in costs:
        shape = shape_of(cost, 16)
        assert shape.tied == config.tie_word_embeddings
        ask = LayoutAsk(shape, CLUSTER, num_gpus=8, batch=8, micro_batches=(1,))
        assert {layout.num_tp for layout in layouts(ask)} == allowed


def test_assumed_heads_are_named() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(96, 128), *(torch.nn.Linear(128, 128) for _ in range(2)))
    assert shape_of(count_module(model, "own"), 16).name == "own (assuming heads of width 64)"


def test_the_best_is_the_best_of_all() -> None:
    ask = replace(SMALL, micro_batches=(1,), zeros=(1,), offload=(False,))
    found = search(ask, count=3)
    every = [estimate(ask.shape, layout, CLUSTER) for layout in layouts(ask)]
    fitting = [one for one in every if one.fits]
    assert (found.num_tried, found.num_fitting) == (len(every), len(fitting))
    fastest = min(one.seconds.step_s for one in fitting)
    assert found.best[0].seconds.step_s <= 1.01 * fastest
    steps = [one.seconds.step_s for one in found.best]
    assert steps == sorted(steps)
    axes = [(one.layout.num_pp, one.layout.num_tp, one.layout.num_dp) for one in found.best]
    assert len(set(axes)) == 3
    assert all(one.fits and one.simulated for one in found.best)
    assert found.nearest is None


def test_the_trillion_takes_tensor_ranks_inside_and_stages_across_machines() -> None:
    ask = LayoutAsk(shape_like(1e12), CLUSTER, 4096, 4096, (1,), zeros=(1,), checkpointing=(True,), offload=(False,))
    best = search(ask, count=1).best[0]
    assert best.layout.num_tp == 8
    assert best.layout.num_pp in (16, 32, 64)
    assert best.crosses == ("data", "pipe")
    text = " ".join(reasons(best))
    for word in ("on the fullest GPU", "bubble", "inside a machine", "data groups at once", "x the network rate"):
        assert word in text


def test_where_nothing_fits_the_closest_is_named() -> None:
    ask = replace(SMALL, shape=shape_like(1e12), offload=(False,))
    found = search(ask)
    assert not found.best
    assert found.nearest is not None
    assert not found.nearest.fits
    lacks = lacking_bytes(ask.shape, found.nearest.layout, CLUSTER)
    assert all(lacking_bytes(ask.shape, layout, CLUSTER) >= lacks for layout in layouts(ask))
    hosts = replace(CLUSTER, machine=replace(DGX, host=replace(DGX.host, ram_bytes=GB)))
    poor = search(replace(ask, shape=shape_like(70e9), cluster=hosts, offload=(True,)))
    assert poor.nearest is not None
    assert poor.nearest.host_bytes > poor.nearest.host_limit


def test_a_table_with_reasons() -> None:
    result = plan(*MANY, "--tokens", "300b", "--layouts", "2")
    assert result.exit_code == 0, result.output
    for word in ("pp tp dp ZeRO schedule", "days", "1. pp ", "2. pp ", "on the fullest GPU", "layouts fit."):
        assert word in result.stdout
    assert "3. pp " not in result.stdout
    assert "The times are simulated from data sheets" in result.stdout
    assert "machines of 8 x A100 40 GB" in result.stdout


def test_json_adds_up() -> None:
    result = plan(*MANY, "--json", "--seq", "1024", "--network", "25GB/s", "--checkpoint-activations")
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["model"]["sequence"] == 1024
    assert found["cluster"]["network_rate"] == 25e9
    assert (found["cluster"]["gpus"], found["cluster"]["gpus_per_machine"], found["batch"]) == (32, 8, 64)
    assert len(found["layouts"]) == 5
    for one in found["layouts"]:
        assert one["num_pp"] * one["num_tp"] * one["num_dp"] == 32
        assert one["num_micro_batches"] * one["micro_batch"] * one["num_dp"] == 64
        assert one["checkpointing"]
        assert one["step_s"] == pytest.approx(one["pipeline_s"] + one["tied_s"] + one["data_s"] + one["update_s"])
        assert one["gpu_bytes"] <= one["gpu_limit"]
        assert one["days"] is None
        assert one["reasons"]


@pytest.mark.matrix
def test_one_machine_is_planned_as_before_unless_layouts_are_asked_for() -> None:
    eight = ("--params", "13b", "--gpu", "a100-40", "--gpus", "8", "--json")
    assert "cases" in json.loads(plan(*eight).stdout)
    assert "layouts" in json.loads(plan(*eight, "--layouts", "1", "--batch-size", "1").stdout)
    sixteen = ("--params", "13b", "--gpu", "v100-32", "--gpus", "16", "--json")
    assert "cases" in json.loads(plan(*sixteen).stdout)  # a DGX-2
    assert "layouts" in json.loads(plan(*sixteen, "--per-node", "8", "--batch-size", "1").stdout)


def test_what_does_not_fit_says_so() -> None:
    result = plan("--params", "1t", "--gpu", "a100-40", "--gpus", "16", "--batch-size", "1", "--ram", "64GB")
    assert result.exit_code == 1
    assert "layouts fits. The closest one (pp " in result.stdout.replace("\n", " ")
    assert "Try more --gpus" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*MANY, "--tokens", "many"), "--tokens is 'many'"),
        ((*MANY, "--layouts", "0"), "--layouts is 0"),
        ((*MANY, "--per-node", "0"), "--per-node is 0"),
        ((*MANY, "--per-node", "5"), "a multiple of 5, because a machine has 5 GPUs. Use --gpus 30 for 6 machines"),
        ((*MANY[:6], "--batch", "0"), "--total-batch is 0"),
        ((*MANY[:6], "--batch", "3", "--batch-size", "2"), "a micro-batch (2) times a possible number of data"),
        ((*MANY, "--states", "bf16"), "--states bf16 cannot be used with a plan of parallel layouts"),
        ((*MANY, "--seq", "0"), "--seq-length is '0'"),
        ((*MANY, "--cores", "0"), "--cores is 0"),
        ((*MANY, "--network", "fast"), "--network is 'fast'"),
        ((*MANY, "--preset", "gpt2-10b"), "--preset and --params"),
        (("--params", "13b", "--tokens", "1b"), "so name the GPU"),
        (("--params", "13b", "--gpus", "64"), "so name the GPU"),
        ((*MANY, "--scaling", "64", "--tokens", "1b"), "--scaling 64 cannot be used with --tokens"),
        (("--params", "13b", "--gpu", "a100-99", "--gpus", "64"), "--gpu is 'a100-99'"),
    ],
)
def test_mistakes_are_named(options: tuple[str, ...], words: str) -> None:
    result = plan(*options)
    assert result.exit_code == 1
    assert words in result.output.replace("\n", " "), result.output
