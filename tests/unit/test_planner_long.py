# SPDX-License-Identifier: Apache-2.0
"""Plans of long sequences: tiles, kept inputs, and sequence ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from twinflow.cli.main import app
from twinflow.cli.plan import config_of
from twinflow.planner import long
from twinflow.planner.cases import Disk, Setting
from twinflow.planner.costs import KEPT, Memory, Placed, Run, bytes_of, input_file_bytes
from twinflow.planner.fit import Wish, choose_fit
from twinflow.planner.long import Kept
from twinflow.planner.machines import GB, GPUS, Host, Machine, rates_of
from twinflow.planner.models import from_hf, gpt_cost

MODEL = gpt_cost("GPT", 50_304, 1 << 20, 32, 4096, 32)
RUN = Run(MODEL, 1, 1 << 18, is_tiled=True)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}


def test_tiles_need_less_memory_than_whole_sequences() -> None:
    assert RUN.activation_bytes < replace(RUN, is_tiled=False).activation_bytes
    assert replace(RUN, num_sequence=4).activation_bytes < RUN.activation_bytes / 2
    assert replace(RUN, num_sequence=4).step_tokens == RUN.step_tokens / 4  # of one GPU of four


def test_each_way_to_keep_inputs_needs_the_bytes_of_its_inputs() -> None:
    one = 2 * 4096 << 18

    def gpu(kept: Kept) -> int:
        return kept.gpu_bytes(MODEL, 2, 1 << 18)

    assert gpu(Kept()) == 32 * one
    assert gpu(Kept(every=4)) == (8 + 3) * one  # three more while a group is in backward
    assert gpu(Kept(on_host=32)) == 2 * one
    assert Kept(on_host=10).host_bytes(MODEL, 2, 1 << 18) == 10 * one
    assert gpu(Kept(is_float8=True)) == 32 * (4096 + 4) << 18
    assert (Kept(every=4).again, Kept().again) == (0.75, 0.0)
    assert Kept(every=2, on_host=5).layers_on_device(32) == 22
    memory = Memory(10**12, 10**12)
    used = bytes_of(replace(RUN, kept=Kept(on_host=32)), Placed(MODEL.numel), memory)
    assert used.host["activations"] == 32 * one
    assert bytes_of(RUN, Placed(MODEL.numel), memory).host["activations"] == 0


def test_groups_of_blocks_need_their_weights_on_the_gpu() -> None:
    grouped = replace(RUN, kept=Kept(every=4, on_host=4), offload_params=True)
    assert grouped.inputs == Kept(every=1, on_host=16)
    assert all(kept.every == 1 for kept in long.choices(32, False, can_group=False))
    assert {kept.every for kept in long.choices(3, False, can_group=True)} == {1, 2}


def test_the_time_of_attention_grows_with_the_square() -> None:
    def seconds(tokens: int, kept: Kept = KEPT) -> float:
        return sum(long.times(MODEL, tokens, tokens, kept, 7e14, 4e12, 1.83))

    assert 3.5 < seconds(1 << 20) / seconds(1 << 19) < 4.0
    assert seconds(1 << 19) < seconds(1 << 19, Kept(every=4)) < 1.4 * seconds(1 << 19)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def plan(llama: Path, *options: str) -> Any:
    given = ["plan", "--model", str(llama), "--gpu", "h200", "--sequences", "1", "--states", "int8", "--json", *options]
    result = CliRunner().invoke(app, given)
    return json.loads(result.stdout)


def test_the_plan_chooses_tiles_and_checkpoints(llama: Path, tmp_path: Path) -> None:
    short = plan(llama, "--seq", "4k", "--ram", "125GB")
    assert not short["run"]["is_tiled"]
    made = plan(llama, "--seq", "512k", "--ram", "125GB")
    assert made["run"]["is_tiled"]
    assert made["run"]["kept"]["on_host"] > 0
    options = made["config"]["activation_checkpointing"]
    assert options["cpu_checkpointing"] is True
    assert "float8" not in options
    million = plan(llama, "--seq", "1m", "--ram", "512GB")
    assert million["recommended"] is not None
    assert million["cases"][million["recommended"]]["host_bytes"] < 512e9
    tight = plan(llama, "--seq", "1m", "--ram", "200GB", "--offload-params")
    assert tight["config"]["activation_checkpointing"]["float8"] is True
    assert any("float8" in change for change in tight["changes"])
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"sequence_parallel_size": 8}))
    eight = plan(llama, "--seq", "1m", "--ram", "1500GB", "--gpus", "8", "--config", str(config))
    assert eight["run"]["num_sequence"] == 8
    assert eight["run"]["step_tokens"] == 1 << 20
    assert eight["config"]["sequence_parallel_size"] == 8


def test_inputs_go_to_a_disk_before_they_lose_digits(tmp_path: Path) -> None:
    """Float8 changes gradients. A disk only takes time, so it comes first."""
    model = from_hf(LLAMA, "llama")
    wish = Wish(model, 1 << 20, sequences=1, states="int8", offload_params=True)
    machine = Machine(GPUS["h200"], Host(140 * GB, 16, 150e9))
    memory = Memory(machine.gpu.memory_bytes, machine.host.ram_bytes)
    plain = choose_fit(wish, Setting(rates_of(machine), memory))
    assert plain.case.run.kept.is_float8
    fast, slow = (
        choose_fit(wish, Setting(rates_of(machine), memory, disk=Disk(str(tmp_path), rate, 10**13)))
        for rate in (50e9, 1e8)
    )
    run = fast.case.run
    assert fast.fits
    assert run.kept.on_disk
    assert not run.kept.is_float8
    num_bytes = input_file_bytes(run)
    assert num_bytes == (run.kept.on_host - 2) * 2 * model.hidden << 20
    assert fast.host_bytes < plain.host_bytes
    assert any(f"{num_bytes / 1e9:,.1f} GB, which each forward writes" in change for change in fast.changes)
    assert fast.step_s < 2 * num_bytes / 1e8 <= slow.step_s
    section = config_of(fast.case, {}, tmp_path)["activation_checkpointing"]
    assert section["nvme_path"] == str(tmp_path)
    assert section["cpu_checkpointing"] is True
    never = choose_fit(replace(wish, can_tile=False), Setting(rates_of(machine), memory, disk=Disk("d", 50e9, 10**13)))
    assert not never.case.run.is_tiled
    assert not never.fits
    full = choose_fit(wish, Setting(rates_of(machine), memory, disk=Disk(str(tmp_path), 2e9, 10**9)))
    assert full.case.run.kept.is_float8
