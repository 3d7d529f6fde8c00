# SPDX-License-Identifier: Apache-2.0
"""Trainer, TRL and Accelerate on several processes: they train as one process does, with any ZeRO stage, and go on with
another number of processes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dist_support import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from huggingface_ranks_cases import KINDS, serve, serve_with_compat

SAVES = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 4}
FOUR = {"num_steps": 4}
STAGES = [kind for kind in KINDS if kind not in ("default", "stage 0") and "experts" not in kind]


def jobs(waves: list[dict[str, Any]], root: Path, work: Callable[..., Any] = serve) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(0, work, waves, str(root), timeout_s=900)[0]
    return found


def in_waves(all_jobs: dict[str, Any], size: int = 3) -> list[dict[str, Any]]:
    items = list(all_jobs.items())
    return [dict(items[i : i + size]) for i in range(0, len(items), size)]


def check_trainer(ranks: list[dict[str, Any]], one: dict[str, Any], num_logs: int | None = None) -> None:
    """The logs of one process, on every rank; those of the last `num_logs` steps."""
    for rank in ranks:
        assert "error" not in rank, rank["trace"]
        ours, theirs = rank["logs"][-(num_logs or 0) :], one["logs"][-(num_logs or 0) :]
        assert len(ours) == len(theirs) > 0
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(wanted, abs=1e-5)
        for key in ("evals", "predicted", "weights"):
            if key in one:
                assert rank[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key


def check_loop(ranks: list[dict[str, Any]], one: dict[str, Any], first: int = 0) -> None:
    for rank in ranks:
        assert "error" not in rank, rank["trace"]
        assert rank["losses"] == pytest.approx(one["losses"][2 * first :], abs=1e-5)
        assert rank["norms"] == pytest.approx(one["norms"][first:], abs=1e-4)
    assert ranks[0]["weights"] == pytest.approx(one["weights"], rel=1e-5)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every stage and both loops, each resumed with another stage and another number of processes."""
    first = {
        "one": (1, "train", {"kind": "default", "name": "one", **SAVES}),
        "default": (2, "train", {"kind": "default", "name": "default", **SAVES}),
        "loop": (1, "loop", {"kind": "default", "name": "loop", **FOUR}),
        "loop 3": (2, "loop", {"kind": "stage 3", "name": "loop-3", "save_at": 2, **FOUR}),
    }
    resumed = {"name": "again", "resume": "default/checkpoint-2", **SAVES}
    then = {
        "host": (3, "train", {"kind": "weights on the host", **resumed}),
        "back": (1, "train", {"kind": "default", **resumed, "name": "back"}),
        "loop 1": (2, "loop", {"kind": "stage 1", "name": "loop-1", "resume": "loop-3", **FOUR}),
        "mistakes": (2, "mistakes", {}),
    }
    last = {
        "plain stream": (1, "stream", {"kind": "default", "name": "plain-stream", "plain": True}),
        "stream": (2, "stream", {"kind": "stage 2", "name": "stream"}),
        "seq2seq": (2, "seq2seq", {"kind": "stage 3", "name": "seq2seq"}),
    }
    return jobs([first, then, last], tmp_path_factory.mktemp("ranks"))


def test_the_trainer_trains_on_two_processes_as_on_one(quick: dict[str, Any]) -> None:
    check_trainer(quick["default"], quick["one"][0])
    assert [rank["stage"] for rank in quick["default"]] == [2, 2]
    assert max(log["grad_norm"] for log in quick["one"][0]["logs"]) > 1.0, "nothing was clipped"


def test_a_run_of_the_trainer_goes_on_with_weights_on_the_hosts_of_three_processes(quick: dict[str, Any]) -> None:
    check_trainer(quick["host"], quick["one"][0], 2)
    assert [rank["stage"] for rank in quick["host"]] == [3, 3, 3]


def test_a_run_of_two_processes_goes_on_with_one(quick: dict[str, Any]) -> None:
    check_trainer(quick["back"], quick["one"][0], 2)


def test_a_loop_of_accelerate_trains_on_two_processes_as_on_one(quick: dict[str, Any]) -> None:
    check_loop(quick["loop 3"], quick["loop"][0])


def test_a_loop_of_accelerate_goes_on_with_another_stage(quick: dict[str, Any]) -> None:
    check_loop(quick["loop 1"], quick["loop"][0], first=2)


def test_a_stream_that_ends_between_two_micro_batches(quick: dict[str, Any]) -> None:
    check_trainer(quick["stream"], quick["plain stream"][0])


def test_an_encoder_decoder_model_generates_with_divided_weights(quick: dict[str, Any]) -> None:
    for rank in quick["seq2seq"]:
        assert "error" not in rank, rank["trace"]
        assert rank["found"] == rank["wanted"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("given", "A TwinOptimizer without zero cannot be used with 2 processes"),
        ("stage", "zero is 4, but must be one of 0, 1, 2, 3"),
        ("auto", "auto_find_batch_size cannot be used with several processes"),
        ("even", "even_batches=False cannot be used with several processes"),
        ("nodes", "save_on_each_node cannot be used with ZeRO stage 3"),
        ("rates", "The ranks differ in config"),
        ("wrapped", "has wrapped it in DistributedDataParallel"),
        ("inner", "has wrapped it in DistributedDataParallel"),
        ("join", r"join_uneven_inputs\(\) cannot be used with several processes"),
        ("value", r"clip_grad_value_\(\) cannot be used with several processes"),
        ("norm", "max_norm is 2.0, but must be 1.0"),
    ],
)
def test_what_would_train_wrongly_is_refused(quick: dict[str, Any], name: str, message: str) -> None:
    for rank in quick["mistakes"]:
        assert "error" not in rank, rank["trace"]
        with pytest.raises(ValueError, match=message):
            raise ValueError(rank[name])


@pytest.mark.matrix
def test_processes_divide_the_experts_of_a_model(tmp_path: Path) -> None:
    """The Trainer and a loop, each resumed with and without expert ranks, and from a checkpoint of Trainer."""
    moe = {"model": "olmoe", **SAVES}
    loop = {"model_name": "olmoe", **FOUR}
    first = {
        "plain": (1, "train", {"kind": "default", "name": "plain", "plain": True, **moe}),
        "two": (2, "train", {"kind": "experts", "name": "two", **moe}),
        "two, stage 0": (2, "train", {"kind": "experts, stage 0", "name": "two-0", **moe}),
    }
    second = {
        "one loop": (1, "loop", {"kind": "default", "name": "one-loop", **loop}),
        "loop": (2, "loop", {"kind": "experts", "name": "loop", "save_at": 2, **loop}),
        "again": (2, "train", {"kind": "experts", "name": "again", "resume": "two/checkpoint-2", **moe}),
    }
    resumed = {"kind": "default", "name": "one", "resume": "two-0/checkpoint-2", **moe}
    third = {
        "one": (1, "train", resumed),
        "from plain": (2, "train", {**resumed, "kind": "experts", "name": "torch", "resume": "plain/checkpoint-2"}),
        "loop again": (2, "loop", {"kind": "experts, stage 0", "name": "loop-again", "resume": "loop", **loop}),
    }
    fourth = {"mistakes": (2, "expert_mistakes", {})}
    found = jobs([first, second, third, fourth], tmp_path)
    truth = found["plain"][0]
    for name in ("two", "two, stage 0"):
        check_trainer(found[name], truth)
    for name in ("again", "one", "from plain"):
        check_trainer(found[name], truth, 2)
    check_loop(found["loop"], found["one loop"][0])
    check_loop(found["loop again"], found["one loop"][0], first=2)
    for rank in found["mistakes"]:
        assert "error" not in rank, rank["trace"]
        assert "expert_parallel_size is 3, but must be a divisor of 2" in rank["size"]
        assert "zero_optimization.stage 3 cannot be used with expert ranks" in rank["stage"]
        assert "zero_optimization.stage 3 cannot be used with expert ranks" in rank["host"]
        assert "compile.blocks cannot be used with expert ranks" in rank["compiled"]
        assert "a model without experts (LlamaForCausalLM)" in rank["dense"]
        assert "rmsprop.RMSprop cannot be used with expert ranks" in rank["rule"]
        assert "expert ranks on several processes" in rank["nodes"]


@pytest.mark.matrix
def test_a_deepspeed_config_divides_the_experts(tmp_path: Path) -> None:
    """`TrainingArguments(deepspeed=...)`: with the Trainer's optimizer and with one of the config."""
    adam = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    first = {
        "plain": (1, "train", {"kind": "default", "name": "plain", "plain": True, "model": "olmoe", **SAVES}),
        "own": (2, "experts_with_deepspeed", {"name": "own"}),
        "config's": (2, "experts_with_deepspeed", {"name": "config", "optimizer": adam}),
    }
    then = {
        # The config's optimizer decays all parameters, and the Trainer's only matrices.
        "config's, one": (1, "experts_with_deepspeed", {"name": "config-one", "optimizer": adam, "size": 1}),
        "again": (2, "experts_with_deepspeed", {"name": "again", "resume": "own/checkpoint-2"}),
    }
    then["odd"] = (2, "experts_with_deepspeed", {"name": "odd", "size": 3})
    found = jobs([first, then], tmp_path, serve_with_compat)
    check_trainer(found["own"], found["plain"][0])
    check_trainer(found["again"], found["plain"][0], 2)
    check_trainer(found["config's"], found["config's, one"][0])
    for rank in found["odd"]:
        assert "expert_parallel_size is 3, but must be a divisor of 2" in rank["error"]


@pytest.mark.matrix
def test_a_rank_that_is_killed_ends_the_others_and_the_run_goes_on(tmp_path: Path) -> None:
    dies = {"kind": "stage 2", "name": "dies", "dies_at": 3, **SAVES}
    first = {"dies": (2, "train", dies), "one": (1, "train", {"kind": "default", "name": "one", **SAVES})}
    then = {"again": (2, "train", {"kind": "stage 2", "name": "again", "resume": "dies/checkpoint-2", **SAVES})}
    found = jobs([first, then], tmp_path)
    assert [rank["exit"] for rank in found["dies"]] == [1, -9]
    assert "rank 1 failed" in found["dies"][0]["stderr"]
    check_trainer(found["again"], found["one"][0], 2)


@cache
def thirty_steps(root: Path) -> dict[str, Any]:
    """Each loop on one process, and on two and four processes with every stage."""
    long = {"max_steps": 30, "eval_steps": 10}
    works: dict[str, dict[str, Any]] = {"train": long, "loop": {"num_steps": 30}}
    if importlib.util.find_spec("trl") is not None:
        works["sft"] = {"num_steps": 30}
    made: dict[str, Any] = {}
    for work, given in works.items():
        made[work] = (1, work, {"kind": "default", "name": work, **given})
        for world in (2, 4):
            for kind in STAGES:
                name = f"{work} {kind} {world}"
                made[name] = (world, work, {"kind": kind, "name": name.replace(" ", "-"), **given})
    return jobs(in_waves(made), root)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("work", ["train", "loop", "sft"])
def test_thirty_steps_are_those_of_one_process(root: Path, work: str, world: int, kind: str) -> None:
    if work == "sft":
        pytest.importorskip("trl")
    found = thirty_steps(root)
    check = check_loop if work == "loop" else check_trainer
    check(found[f"{work} {kind} {world}"], found[work][0])


@cache
def resumed(root: Path) -> dict[str, Any]:
    first: dict[str, Any] = {"one": (1, "train", {"kind": "default", "name": "r-one", **SAVES})}
    then: dict[str, Any] = {}
    for kind in STAGES:
        for before in (2, 3):
            saved = f"r-{kind}-{before}".replace(" ", "-")
            first[saved] = (before, "train", {"kind": kind, "name": saved, **SAVES})
            for world in (1, 2, 3):
                given = {"kind": kind, "name": f"{saved}-{world}", "resume": f"{saved}/checkpoint-2", **SAVES}
                then[f"{kind} {before} {world}"] = (world, "train", given)
    return jobs([*in_waves(first), *in_waves(then)], root)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_goes_on_with_any_number_of_processes(root: Path, kind: str, before: int, world: int) -> None:
    found = resumed(root)
    check_trainer(found[f"{kind} {before} {world}"], found["one"][0], 2)


@pytest.mark.matrix
def test_the_best_model_is_loaded_and_training_can_begin_again(tmp_path: Path) -> None:
    made = {"plain": (1, "best", {"kind": "default", "name": "plain", "plain": True})}
    made |= {kind: (2, "best", {"kind": kind, "name": kind.replace(" ", "-")}) for kind in STAGES}
    found = jobs(in_waves(made), tmp_path)
    for kind in STAGES:
        for rank in found[kind]:
            assert "error" not in rank, rank["trace"]
            for key in ("before", "evals", "after", "again"):
                assert rank[key] == pytest.approx(found["plain"][0][key], abs=1e-4), key
            assert rank["best"] == found["plain"][0]["best"] == "checkpoint-3"
            assert rank["after"] == pytest.approx(rank["evals"][0], abs=1e-5)


@pytest.mark.matrix
def test_adapters_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    made = {kind: (2, "lora", {"kind": kind, "name": kind.replace(" ", "-")}) for kind in STAGES}
    found = jobs(in_waves({"one": (1, "lora", {"kind": "default", "name": "one"}), **made}), tmp_path)
    assert found["one"][0]["evals"][2] == found["one"][0]["evals"][0]
    for kind in STAGES:
        check_trainer(found[kind], found["one"][0])


@pytest.mark.matrix
def test_an_epoch_that_ends_between_two_steps_is_that_of_torch(tmp_path: Path) -> None:
    """37 rows: Accelerate repeats rows so that all ranks have equally many. DistributedDataParallel is the truth."""
    uneven = {"num_rows": 37, "train_sampling_strategy": "group_by_length"}
    made = {"ddp": (2, "train", {"kind": "default", "name": "ddp", "plain": True, **uneven})}
    made |= {kind: (2, "train", {"kind": kind, "name": kind.replace(" ", "-"), **uneven}) for kind in STAGES}
    found = jobs(in_waves(made), tmp_path)
    for kind in STAGES:
        check_trainer(found[kind], found["ddp"][0])


@pytest.mark.matrix
def test_what_only_some_ranks_do_raises_an_error(tmp_path: Path) -> None:
    made = {"uneven": (2, "uneven", {"kind": "stage 3"}), "alone": (2, "alone_on_rank_0", {"kind": "stage 3"})}
    made["few"] = (2, "train", {"kind": "stage 2", "name": "few", "few_variables": True, **SAVES})
    found = jobs([made], tmp_path)
    for rank in found["uneven"]:
        assert "The number of batches of a step differs between ranks, because it is [2, 1]" in rank["error"]
    assert "save_model() cannot run, because each rank has a part" in found["alone"][0]["error"]
    assert [rank.get("stage") for rank in found["few"]] == [2, 2]  # RANK, WORLD_SIZE and MASTER_* alone


@pytest.mark.matrix
@pytest.mark.parametrize(("work", "kind"), [("train", "stage 3"), ("loop", "stage 2")])
def test_accelerate_launch_starts_two_processes(tmp_path: Path, work: str, kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Accelerate starts one process with --cpu. The script itself chooses the CPU.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(port), str(Path(__file__).parent.parent / "accelerate_launch_script.py")]
    options = {"max_steps": 2, "eval_steps": 2} if work == "train" else {"num_steps": 2}
    command += [work, str(tmp_path), json.dumps({"kind": kind, "name": "two", **options})]
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TWINFLOW_THREADS": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"{work}-{rank}.json").read_text()) for rank in range(2)]
    one = jobs([{"one": (1, work, {"kind": "default", "name": "one", **options})}], tmp_path)["one"][0]
    (check_trainer if work == "train" else check_loop)(found, one)


@pytest.mark.matrix
@pytest.mark.parametrize(("closes", "where"), [(False, "has ended"), (True, r"waits in accelerator\.save_state\(\)")])
def test_a_loop_whose_ranks_have_different_numbers_of_batches_ends_with_an_error(
    tmp_path: Path, closes: bool, where: str
) -> None:
    given = {"kind": "stage 2", "closes": closes}
    first, second = jobs([{"uneven": (2, "uneven_loop", given)}], tmp_path)["uneven"]
    assert first["exit"] == 1
    assert re.search(f"rank 1 {where} after step 3, and this rank has begun step 4. Give all ranks", first["stderr"])
    assert second["exit"] == (1 if closes else 0)
