# SPDX-License-Identifier: Apache-2.0
"""`twinflow plan`: the table, JSON, the page, the config it writes, and what it says about mistakes."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from planner_support import LLAMA_8B
from torch import nn
from typer.testing import CliRunner, Result

import twinflow
from twinflow.bench.disk import DiskRates, measure_disk
from twinflow.cli.main import app
from twinflow.cli.plan_input import count_module, parse_count
from twinflow.cli.plan_text import bar
from twinflow.config import load_config
from twinflow.models.gpt import GPT, GPTConfig, count_params

H200 = ("--gpu", "h200", "--preset", "gpt2-1.5b")


def plan(*options: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["plan", *options])


def plan_json(*options: str) -> dict[str, Any]:
    result = plan(*options, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_table_bars_and_recommendation() -> None:
    result = plan(*H200)
    assert result.exit_code == 0, result.output
    for word in ("no offload", "full offload", "best ratio", "fp32", "bf16", "int8", "tokens/s", "bound by"):
        assert word in result.stdout
    assert "█" in result.stdout
    assert re.search(r'Use "ratio": [\d.]+, "states": "fp32"', result.stdout)
    assert "largest model of this shape that fits" in result.stdout
    assert "from a data sheet, not measured" in result.stdout


def test_json_has_everything_and_adds_up() -> None:
    found = plan_json(*H200)
    names = {"model", "machine", "run", "cases", "recommended", "largest", "changes", "helps", "config", "unused_keys"}
    assert set(found) == names
    assert found["model"]["params"] == 1_557_686_400
    assert len(found["cases"]) == 12
    for case in found["cases"]:
        assert case["gpu_bytes"] == sum(case["gpu"].values())
        assert case["host_bytes"] == sum(case["host"].values())
        assert case["fits"] == (case["missing_gpu_bytes"] == case["missing_host_bytes"] == 0)
        assert case["bound_by"] in ("gpu", "host", "copies", "gate")
        assert case["tokens_s"] == pytest.approx(found["run"]["step_tokens"] / case["step_s"])
    assert found["cases"][found["recommended"]]["fits"]
    assert set(found["largest"]) == {"fp32", "bf16", "int8"}


def test_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    result = plan(*H200, "--html", str(path))
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert "best ratio, fp32" in text
    assert not re.search(r"https?://|<script|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(", text)
    assert text.count("<div") == text.count("</div>")


def test_the_config_written_is_one_the_engine_takes(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    result = plan(*H200, "--write-config", str(path), "--batch-size", "2", "--accumulation", "3")
    assert result.exit_code == 0, result.output
    config = load_config(path)
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.gradient_accumulation_steps == 3
    written = json.loads(path.read_text())
    offload = written["zero_optimization"]["offload_optimizer"]
    assert 0.0 <= offload["ratio"] <= 1.0
    assert offload["states"] == "fp32"


def test_a_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    offload = {"device": "cpu", "states": "int8", "ratio": 0.4}
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
    }
    path.write_text(json.dumps(config))
    found = plan_json(*H200, "--config", str(path))
    assert (found["run"]["batch"], found["run"]["micro_batches"]) == (4, 3)
    assert found["run"]["weights"] == "fp16"
    assert found["run"]["clips"]  # a loss scale waits as clipping does
    assert [(c["kind"], c["states"], c["ratio"]) for c in found["cases"]][-1] == ("config's", "int8", 0.4)


def test_one_state_format_and_no_clipping() -> None:
    found = plan_json(*H200, "--states", "bf16", "--grad-clip", "0", "--no-checkpoint-activations")
    assert {case["states"] for case in found["cases"]} == {"bf16"}
    assert not found["run"]["clips"]
    assert found["config"]["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert all(case["host"]["shadows"] == 0 for case in found["cases"])


def test_more_gpus_share_the_state() -> None:
    one, eight = plan_json(*H200), plan_json(*H200, "--gpus", "8")
    assert eight["run"]["step_tokens"] == 8 * one["run"]["step_tokens"]
    assert eight["cases"][0]["gpu"]["state"] < one["cases"][0]["gpu"]["state"] / 7


def test_what_cannot_fit_says_how_much_is_missing() -> None:
    result = plan("--params", "30b", "--gpu", "rtx4090", "--ram", "64GB")
    assert result.exit_code == 1
    assert "Nothing fits." in result.stdout
    words = " ".join(result.stdout.split())
    assert re.search(r"short by GPU [\d.]+ GB \+ host [\d.]+ GB", words)
    assert re.search(r"is short by [\d.]+ GB of host memory\. What would help: method lora, or at least \d+ GB", words)


def test_hugging_face_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 3200,
        "num_hidden_layers": 26,
        "intermediate_size": 8640,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for given in (path, tmp_path):
        found = plan_json("--model", str(given), "--gpu", "h200")
        assert found["model"]["params"] == 3_426_473_600


def test_a_function_that_builds_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shapes_for_plan.py").write_text(
        "from torch import nn\n"
        "def tower():\n"
        "    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))\n"
        "def number():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    found = plan_json("--model", "shapes_for_plan:tower", "--gpu", "h200")
    assert found["model"] == {"name": "tower", "params": 3 * (64 * 64 + 64), "layers": 3, "hidden": 64}
    assert (
        "returns a torch.nn.Module. This function returns an object of type int"
        in plan("--model", "shapes_for_plan:number", "--gpu", "h200").output
    )
    assert "which Python can import from the current folder" in plan("--model", "nowhere:f", "--gpu", "h200").output


def test_a_module_is_counted_by_block() -> None:
    shape = GPTConfig(vocab_size=96, context=32, num_layers=3, hidden=32, num_heads=4)
    with torch.device("meta"):
        cost = count_module(GPT(shape), "gpt")
    assert cost.numel == count_params(shape)
    assert (len(cost.blocks), cost.hidden, cost.vocab_size) == (3, 32, 96)
    assert cost.embedding_numel == (96 + 32) * 32
    with pytest.raises(ValueError, match=r"whose layers are in an nn.ModuleList.*Put the layers"):
        count_module(nn.Linear(4, 4), "flat")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ["No model is named", "one of --preset, --model, --params", "gpt2-13b"]),
        (("--preset", "gpt2-1.5b", "--params", "13b"), ["--preset and --params"]),
        (("--preset", "gpt5", "--gpu", "h200"), ["--preset is 'gpt5'", "'gpt2-10b'"]),
        (("--params", "many", "--gpu", "h200"), ["--params is 'many'", "13b"]),
        (("--model", "nowhere.json", "--gpu", "h200"), ["--model is 'nowhere.json'", "module:function"]),
        (("--preset", "tiny", "--gpu", "h300"), ["--gpu is 'h300'", "'h200'", "'rtx3090'"]),
        ((*H200, "--ram", "much"), ["--ram is 'much'", "32GB"]),
        ((*H200, "--ram", "64"), ["--ram is '64'", "with a unit", "64GB"]),
        ((*H200, "--dram", "fast"), ["--dram is 'fast'"]),
        ((*H200, "--method", "dora"), ["--method is 'dora'", "'qlora'"]),
        ((*H200, "--gpu-tflops", "100"), ["--gpu-tflops 100 cannot be used with --gpu h200"]),
        (("--preset", "tiny", "--gpu-tflops", "100"), ["Give its --gpu-memory too"]),
        (("--preset", "tiny", "--gpu-memory", "8GB", "--gpu-tflops", "9", "--pcie", "7"), ["--pcie is 7"]),
        ((*H200, "--sequences", "6", "--batch-size", "4"), ["--sequences 6", "not a multiple"]),
        ((*H200, "--cores", "0"), ["--cores is 0", ">= 1"]),
        ((*H200, "--gpus", "0"), ["--gpus is 0", ">= 1"]),
        ((*H200, "--states", "fp8"), ["--states is 'fp8'", "'int8'"]),
        ((*H200, "--batch-size", "0"), ["--batch-size is 0", ">= 1"]),
        ((*H200, "--seq-length", "0"), ["--seq-length is '0'", "1m"]),
        ((*H200, "--grad-clip", "-1"), ["--grad-clip is -1"]),
        ((*H200, "--config", "nowhere.json"), ["--config is 'nowhere.json'", "an existing file"]),
    ],
)
def test_mistakes_are_named(options: tuple[str, ...], words: list[str]) -> None:
    result = plan(*options)
    assert result.exit_code == 1
    for word in words:
        assert word in result.output, result.output


def test_without_a_gpu_here_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = plan("--preset", "tiny")
    assert result.exit_code == 1
    assert "--gpu is not given, but must be one of b200" in result.output
    assert "name the GPU to plan for" in result.output


def test_eight_billion_parameters_on_a_desktop_card(tmp_path: Path) -> None:
    """The command of docs/plan.md."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    result = plan("--model", str(tmp_path), "--gpu", "rtx4090", "--ram", "64GB")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert 'Use "ratio": 0.889, "states": "int8", 1 micro-batch of 4 x 2048 tokens, activation checkpointing' in words
    assert "weights on the host. A step takes" in words
    result = plan("--model", str(tmp_path), "--gpu", "rtx4090", "--ram", "60GB")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "weights on the host, no gradient clipping" in words
    assert "Gradients are not clipped: those that wait for their norm would not fit." in words


def test_embedding_and_output_layers_on_the_host(tmp_path: Path) -> None:
    model, written = tmp_path / "config.json", tmp_path / "ds.json"
    model.write_text(json.dumps(LLAMA_8B))
    card = ("--model", str(tmp_path), "--gpu", "rtx4090", "--ram", "256GB", "--sequences", "1")
    options = (*card, "--gpu-memory", "8GB", "--write-config", str(written))
    result = plan(*options, columns=300)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert 'weights on the host with those of the embedding and output layers ("embeddings": true)' in words
    config = json.loads(written.read_text())
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "embeddings": True}
    assert load_config(config).zero_optimization.offload_param.embeddings  # type: ignore[union-attr]
    found = plan_json(*options)
    cases = [case for case in found["cases"] if case["kind"] == "weights on host"]
    assert [(case["states"], case["fits"], case["offload_embeddings"]) for case in cases] == [
        (states, True, True) for states in ("fp32", "bf16", "int8")
    ]
    assert found["run"]["offload_embeddings"]
    # Its own config is planned as it is, and --no-offload-embeddings replaces what the config says.
    again = plan_json(*options[:-2], "--config", str(written))
    assert again["run"]["offload_embeddings"]
    assert "zero_optimization.offload_param.embeddings" not in again["unused_keys"]
    refused = plan(*options[:-2], "--config", str(written), "--no-offload-embeddings")
    assert refused.exit_code == 1
    assert "Nothing fits" in refused.stdout
    config["zero_optimization"]["offload_param"]["embeddings"] = False
    written.write_text(json.dumps(config))
    assert plan(*options[:-2], "--config", str(written)).exit_code == 1
    # With more memory they stay on the GPU.
    larger = (*card, "--gpu-memory", "10GB")
    kept = plan_json(*larger)
    assert kept["cases"][kept["recommended"]]["kind"] == "weights on host"
    assert not kept["run"]["offload_embeddings"]
    assert kept["config"]["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert plan_json(*larger, "--offload-embeddings")["run"]["offload_embeddings"]
    result = plan(*larger, "--offload-embeddings", "--no-offload-params")
    assert result.exit_code != 0
    assert "Use --offload-params" in " ".join(result.output.split())


def test_any_card_by_its_memory_and_speed() -> None:
    found = plan_json("--preset", "gpt2-1.5b", "--gpu-memory", "11GB", "--gpu-tflops", "100", "--ram", "32GiB")
    assert found["machine"]["gpu_bytes"] == 11 * 10**9
    assert found["machine"]["host_bytes"] == 32 << 30
    assert found["machine"]["rates"]["flops"] == pytest.approx(80e12)
    less = plan_json(*H200, "--gpu-memory", "9GB")
    assert less["machine"]["gpu_bytes"] == 9 * 10**9
    best = less["cases"][less["recommended"]]
    assert best["gpu_bytes"] < 9 * 10**9


def test_adapters_and_long_sequences() -> None:
    found = plan_json(*H200, "--method", "lora", "--rank", "8", "--seq", "4k")
    assert (found["run"]["adapter_rank"], found["run"]["tokens"]) == (8, 4096)
    best = found["cases"][found["recommended"]]
    assert best["gpu"]["state"] < 0.1 * 10**9
    assert plan(*H200, "--seq", "1m", "--method", "qlora", "--gpu-memory", "16GB").exit_code == 1


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 2}))
    asked: list[bool] = []

    def download(name: str, file: str, local_files_only: bool = False) -> str:
        asked.append(local_files_only)
        if name != "someone/model-8b":
            raise OSError("no such model")
        return str(path)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert plan_json("--model", "someone/model-8b", "--gpu", "h200")["model"]["name"] == "model-8b"
    assert asked == [True]  # from the cache, without the network
    result = plan("--model", "someone/else", "--gpu", "h200")
    assert result.exit_code == 1
    assert "not in the local cache, and the hub did not return it: no such model" in result.output


@pytest.mark.matrix  # imports transformers
def test_other_models_are_built_without_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "phi", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 128, "intermediate_size": 128}))
    found = plan_json("--model", str(tmp_path), "--gpu", "h200")
    assert found["model"]["layers"] == 3
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    assert "cannot build this model" in plan("--model", str(tmp_path), "--gpu", "h200").output


def test_keys_of_a_config_are_used_or_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    config = {
        "train_batch_size": 8,
        "wall_clock_breakdown": True,
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": False},
    }
    path.write_text(
        json.dumps(
            {**config, "zero_optimization": {**config["zero_optimization"], "offload_optimizer": {"device": "cpu"}}}
        )
    )  # type: ignore[dict-item]
    found = plan_json(*H200, "--config", str(path))
    assert found["unused_keys"] == ["wall_clock_breakdown", "optimizer.params.lr", "zero_optimization.overlap_comm"]
    assert {case["kind"] for case in found["cases"]} == {"weights on host"}
    assert found["run"]["num_moments"] == 1
    assert found["run"]["step_tokens"] == 8 * 1024
    assert not found["run"]["checkpointing"]
    assert "do not influence the plan: wall_clock_breakdown, " in plan(*H200, "--config", str(path)).stdout


@pytest.mark.parametrize(
    "options", [("--offload-params",), ("--checkpoint-activations", "--grad-clip", "0"), ("--gpu-memory", "9GB")]
)
def test_a_model_trains_with_the_config_written(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "ds.json"
    assert plan(*H200, "--batch-size", "2", "--write-config", str(path), *options).exit_code == 0
    shape = GPTConfig(vocab_size=32, context=8, num_layers=2, hidden=16, num_heads=2)
    engine, *_ = twinflow.initialize(model=GPT(shape), config=path)
    tokens = torch.randint(0, 32, (2, 9), device=engine.device)
    losses = []
    for _ in range(3):
        loss = engine(tokens[:, :-1], tokens[:, 1:]).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    assert losses[2] != losses[0]


OLMOE = {
    **{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16},
    **{"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304},
}


def test_expert_ranks_are_planned(tmp_path: Path) -> None:
    model, config, written = tmp_path / "olmoe.json", tmp_path / "ds.json", tmp_path / "made.json"
    model.write_text(json.dumps(OLMOE))
    config.write_text(json.dumps({"expert_parallel_size": 4}))
    command = ("--model", str(model), "--gpu", "h200", "--gpus", "8")
    one, two = (plan_json(*command, "--expert-parallel", size) for size in ("1", "2"))
    four = plan_json(*command, "--config", str(config), "--write-config", str(written))
    assert [found["run"]["expert_parallel"] for found in (one, two, four)] == [1, 2, 4]
    assert four["unused_keys"] == []
    weights = [found["cases"][0]["gpu"]["weights"] for found in (one, two, four)]
    assert weights[0] - weights[1] == 2 * (weights[1] - weights[2]) > 0
    assert load_config(written).expert_parallel_size == 4
    assert load_config(written).zero_optimization.stage == 2
    text = " ".join(plan(*command, "--expert-parallel", "2").stdout.split())
    assert "experts divided over 2 GPUs" in text
    assert '"expert_parallel_size": 2' in text
    assert "expert_parallel_size" not in one["config"]
    assert plan_json(*command)["run"]["expert_parallel"] == 1  # everything fits


@pytest.mark.parametrize(
    ("options", "section", "message"),
    [
        (("--expert-parallel", "3"), {}, "expert_parallel_size is 3, but must be a divisor of 8, the number of proc"),
        (("--expert-parallel", "0"), {}, "--expert-parallel is 0, but must be a whole number >= 1"),
        (("--expert-parallel", "2", "--offload-params"), {}, "zero_optimization.stage 3 cannot be used with expert"),
        (("--expert-parallel", "2", "--method", "lora"), {}, "adapters of PEFT cannot be used with expert ranks"),
        (("--expert-parallel", "2", "--scaling", "8"), {}, "--scaling 8 cannot be used with --expert-parallel,"),
        (("--expert-parallel", "2", "--layouts", "3"), {}, "--expert-parallel 2 cannot be used with a plan of paralle"),
        ((), {"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3 cannot be used with expert ranks"),
        ((), {"sequence_parallel_size": 2}, "cannot be used with expert ranks"),
        ((), {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, "Muon cannot be used with expert ranks"),
        (("--scaling", "8"), {}, "expert_parallel_size: 2 cannot be used with --scaling"),
    ],
)
def test_what_expert_ranks_refuse_is_refused_by_the_plan(
    tmp_path: Path, options: tuple[str, ...], section: dict[str, Any], message: str
) -> None:
    model, config = tmp_path / "olmoe.json", tmp_path / "ds.json"
    model.write_text(json.dumps(OLMOE))
    config.write_text(json.dumps({**section, "expert_parallel_size": 2}))
    from_file = () if "--expert-parallel" in options else ("--config", str(config))
    result = plan("--model", str(model), "--gpu", "h200", "--gpus", "8", *options, *from_file)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (("--params", "1.3b"), "a model without experts"),
        (("--preset", "tiny-moe"), "The class of experts is 'tiny-moe', but must be those of transformers"),
        (("--model",), "expert_parallel_size is 8, but must be a divisor of 12, the number of experts in odd"),
    ],
)
def test_models_whose_experts_cannot_be_divided(tmp_path: Path, model: tuple[str, ...], message: str) -> None:
    (tmp_path / "odd.json").write_text(json.dumps({**OLMOE, "num_experts": 12}))
    named = (*model, str(tmp_path / "odd.json")) if model == ("--model",) else model
    result = plan(*named, "--gpu", "h200", "--gpus", "8", "--expert-parallel", "8")
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())


def test_help_names_the_cards() -> None:
    result = plan("--help")
    assert result.exit_code == 0
    assert "rtx3090" in result.output


def test_numbers_as_people_write_them() -> None:
    assert parse_count("--params", "13b") == 13e9
    assert parse_count("--params", "350M") == 350e6
    assert parse_count("--params", "1.3B") == 1.3e9
    assert parse_count("--params", "8e9") == 8e9
    assert bar(0.5) == "█" * 17
    assert bar(0.001) == "▏"
    assert bar(2.0).endswith("▶")


def test_state_on_a_disk_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(measure_disk, num_bytes=1 << 20, num_requests=2, block_bytes=1 << 16)
    monkeypatch.setattr("twinflow.cli.plan.measure_disk", small)
    found = plan_json(*H200, "--disk", str(tmp_path))
    numel, disk = found["model"]["params"], found["disk"]
    sizes = {row["states"]: row["file_bytes"] for row in disk["formats"]}
    assert sizes["fp32"] == pytest.approx(12 * numel, rel=0.01)
    assert sizes["bf16"] == pytest.approx(8 * numel, rel=0.01)
    for row in disk["formats"]:
        assert row["step_s"] == pytest.approx(2 * row["file_bytes"] / disk["update"])
        assert row["fits"] == (row["file_bytes"] <= disk["free_bytes"])
        assert row["buffer_bytes"] > 0
    text = plan(*H200, "--disk", str(tmp_path)).stdout
    assert "all state on the disk" in text
    assert "GB in the file" in text


SMALL = ("--gpu", "h200", "--params", "7b", "--gpu-memory", "24GB", "--ram", "20GB")


def measured(rate: float, free_bytes: float) -> Callable[[Path], DiskRates]:
    return lambda path: DiskRates(str(path), int(free_bytes), True, rate, rate, rate)


def test_a_disk_is_recommended_if_nothing_fits_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinflow.cli.plan.measure_disk", measured(2e9, 1e12))
    config = tmp_path / "config.json"
    options = ("--disk", str(tmp_path), "--write-config", str(config))
    found = plan_json(*SMALL, *options)
    case, run = found["cases"][found["recommended"]], found["run"]
    assert (case["kind"], case["fits"], case["bound_by"]) == ("state on disk", True, "disk")
    each = {"fp32": 12.0, "bf16": 8.0, "int8": 6.05}[case["states"]]
    assert case["file_bytes"] == pytest.approx(each * case["ratio"] * found["model"]["params"], rel=0.01)
    # With clipping, updates begin after backward, and the next forward waits for its weights.
    assert case["step_s"] >= 2 * case["file_bytes"] / 2e9
    assert case["step_s"] < 1.1 * 2 * case["file_bytes"] / 2e9
    assert case["host_bytes"] < 20e9
    assert not run["on_disk"]  # the other cases are those in memory
    offload = found["config"]["zero_optimization"]["offload_optimizer"]
    assert (offload["device"], offload["nvme_path"]) == ("nvme", str(tmp_path))
    assert json.loads(config.read_text()) == found["config"]
    load_config(found["config"])
    assert any(f"The optimizer state is on the disk of {tmp_path}:" in change for change in found["changes"])


def test_weights_on_the_disk_are_recommended_if_they_fit_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinflow.cli.plan.measure_disk", measured(2e9, 1e12))
    large = ("--gpu", "h200", "--params", "30b", "--gpu-memory", "24GB", "--ram", "20GB")
    found = plan_json(*large, "--disk", str(tmp_path))
    case, numel = found["cases"][found["recommended"]], found["model"]["params"]
    assert (case["kind"], case["fits"], case["bound_by"]) == ("state on disk", True, "disk")
    zero = found["config"]["zero_optimization"]
    assert (zero["offload_param"]["device"], zero["offload_param"]["nvme_path"]) == ("nvme", str(tmp_path))
    load_config(found["config"])
    state = {"fp32": 12.0, "bf16": 8.0, "int8": 6.05}[case["states"]] * case["ratio"] * numel
    weights = case["file_bytes"] - state
    assert 1.5 * numel < weights < 2.0 * numel  # those of blocks that are not on the GPU
    # A step reads and writes the state, writes the weights, and reads them in each forward and backward.
    traffic = 2 * state + (1 + 2 * found["run"]["micro_batches"]) * weights
    assert case["step_s"] >= 0.99 * traffic / 2e9
    assert case["host_bytes"] < 20e9
    assert any("state and the weights of blocks are on the disk" in change for change in found["changes"])


@pytest.mark.parametrize(("options", "free_bytes"), [(SMALL, 1e9), pytest.param(H200, 1e12, marks=pytest.mark.matrix)])
def test_a_disk_is_not_recommended_without_space_or_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], free_bytes: float
) -> None:
    monkeypatch.setattr("twinflow.cli.plan.measure_disk", measured(2e9, free_bytes))
    found = plan_json(*options, "--disk", str(tmp_path))
    assert "state on disk" not in [case["kind"] for case in found["cases"]]
    assert found["recommended"] == plan_json(*options)["recommended"]


@pytest.mark.parametrize(("kind", "reason"), [("Muon", "Muon updates matrices"), ("Adamax", "A user's optimizer")])
def test_an_optimizer_whose_state_cannot_be_on_a_disk_is_named(tmp_path: Path, kind: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"optimizer": {"type": kind, "params": {"lr": 1e-3}}}))
    result = plan(*H200, "--config", str(tmp_path / "config.json"), "--disk", str(tmp_path))
    assert result.exit_code == 1
    assert reason in " ".join(result.output.split())


def test_the_device_of_a_disk_is_named_as_unused(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps({"zero_optimization": {"offload_optimizer": offload}}))
    found = plan_json(*H200, "--config", str(tmp_path / "config.json"))
    at = "zero_optimization.offload_optimizer"
    assert found["unused_keys"] == [f"{at}.device", f"{at}.nvme_path"]
    assert found["config"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
