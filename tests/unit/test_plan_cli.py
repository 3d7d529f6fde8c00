"""`twinflow plan`: the table, JSON, the page, the config it writes, and what it says about mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

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
    assert set(found) == {"model", "machine", "run", "cases", "recommended", "largest", "config"}
    assert found["model"]["params"] == 1_557_686_400
    assert len(found["cases"]) == 9
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
    assert "GPU +" in result.stdout
    assert "Try a larger --gpu or a model of at most 7.67 B parameters." in " ".join(result.stdout.split())


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
        ((*H200, "--dram", "fast"), ["--dram is 'fast'"]),
        ((*H200, "--cores", "0"), ["--cores is 0", ">= 1"]),
        ((*H200, "--gpus", "0"), ["--gpus is 0", ">= 1"]),
        ((*H200, "--states", "fp8"), ["--states is 'fp8'", "'int8'"]),
        ((*H200, "--batch-size", "0"), ["--batch-size is 0", ">= 1"]),
        ((*H200, "--seq-length", "0"), ["--seq-length is 0"]),
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


def test_help_names_the_cards() -> None:
    result = plan("--help")
    assert result.exit_code == 0
    assert "rtx3090" in result.output


def test_numbers_as_people_write_them() -> None:
    assert parse_count("--params", "13b") == 13e9
    assert parse_count("--params", "350M") == 350e6
    assert parse_count("--params", "1.3B") == 1.3e9
    assert bar(0.5) == "█" * 17
    assert bar(0.001) == "▏"
    assert bar(2.0).endswith("▶")
