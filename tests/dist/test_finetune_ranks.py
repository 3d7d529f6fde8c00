# SPDX-License-Identifier: Apache-2.0
"""`twinflow finetune` on several ranks: the run of one process with the same sequences in a step, stopped, killed and
resumed too."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_support import run_ranks

pytest.importorskip("trl")
pytest.importorskip("datasets")
from finetune_ranks_cases import Job, losses, serve

SCRIPT = Path(__file__).parents[2] / "examples" / "tiny_models.py"
STEPS = 4
RUN = ("--steps", STEPS, "--save-every", 2, "--valid-every", 2, "--samples", 1)
# Ranks: sequences of a micro-batch, micro-batches. A step has 12 sequences, so that no epoch ends with a step.
PARTS = {1: (6, 2), 2: (3, 2), 3: (2, 2)}
LRS = {"sft": 1e-3, "lora": 1e-2, "qlora": 1e-2, "dpo": 1e-3}
KINDS: dict[str, tuple[str, ...]] = {
    "stage 2": ("--no-offload-params",),
    "weights on the host": ("--offload-params", "--no-offload-embeddings"),
    "embeddings on the host": ("--offload-embeddings",),
}
REFUSED = [("qlora", "weights on the host"), ("qlora", "embeddings on the host")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model, chats, and pairs of answers of different lengths."""
    spec = importlib.util.spec_from_file_location("tiny_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    path: Path = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny.make_tokenizer("qwen")
    tiny.make_model("qwen", tokenizer, hidden=32).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    rows, _ = tiny.all_chats(tiny.random.Random(2))
    write(path / "sft.jsonl", rows[:42])
    pairs = [
        {"prompt": f"After {i}?", "chosen": tiny.counting(i, 1 + i % 5), "rejected": str(i + 7)} for i in range(31)
    ]
    write(path / "dpo.jsonl", pairs)
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def job(folder: Path, out: Path, world: int, method: str = "sft", *options: Any, **more: Any) -> Job:
    size, parts = PARTS.get(world, (3, 1))
    data = folder / f"{'dpo' if method == 'dpo' else 'sft'}.jsonl"
    given = (folder / "model", data, "--method", method, "--lr", LRS[method], *RUN)
    given += ("--batch-size", size, "--accumulation", parts, *options, "--out", out)
    return world, {"arguments": [str(one) for one in given], **more}


def resumed(folder: Path, out: Path, world: int, method: str = "sft") -> Job:
    data = folder / f"{'dpo' if method == 'dpo' else 'sft'}.jsonl"
    return world, {"arguments": [str(folder / "model"), str(data), "--resume", "--out", str(out)]}


def run(waves: list[dict[str, Job]], root: Path) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(0, serve, waves, str(root), timeout_s=900)[0]
    return found


def check_ended(ranks: list[dict[str, Any]], code: int = 0) -> None:
    for rank in ranks:
        assert "error" not in rank, rank["trace"]
        assert rank["code"] == code, rank["stderr"]
    assert all(rank["stderr"] == "" for rank in ranks[1:]), "only the first rank prints"


def check_same(out: Path, expected: Path) -> None:
    """The losses and weights of another run."""
    found, wanted = losses(out), losses(expected)
    assert [one[:2] for one in found] == [one[:2] for one in wanted]
    assert [one[2] for one in found] == pytest.approx([one[2] for one in wanted], abs=1e-5)
    assert len({round(one[2], 4) for one in found}) > STEPS
    ours, theirs = weights(out), weights(expected)
    assert ours.keys() == theirs.keys()
    # Elements whose gradient is only rounding move by up to the learning rate with Adam, so all of them are compared.
    error = sum((ours[name] - value).square().sum() for name, value in theirs.items())
    assert error < 1e-4 * sum(value.square().sum() for value in theirs.values())


def weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next((out / "model").glob("*model.safetensors")))


def bits(out: Path) -> tuple[Any, bytes]:
    return losses(out), next((out / "model").glob("*model.safetensors")).read_bytes()


@pytest.mark.matrix
def test_two_ranks_tune_what_one_process_does(folder: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    found = run([{"one": job(folder, one, 1), "two": job(folder, two, 2)}], tmp_path)
    check_ended(found["one"])
    check_ended(found["two"])
    check_same(two, one)
    text = found["two"][0]["stderr"]
    for said in ("2, ZeRO stage 2", "2 micro-batches of 3 sequences on each rank", "4 of 12 sequences"):
        assert said in text
    assert text.count("Finished 4 steps") == 1
    tokens = [
        [json.loads(line).get("tokens_total") for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (one, two)
    ]
    assert tokens[0] == tokens[1]


@cache
def every_method(folder: Path, root: Path) -> None:
    waves: list[dict[str, Job]] = []
    for method in LRS:
        name = f"{method} 1"
        waves.append({name: job(folder, root / name, 1, method)})
        for kind, options in KINDS.items():
            for world in (2, 3) if (method, kind) not in REFUSED else ():
                name = f"{method} {kind} {world}"
                waves[-1][name] = job(folder, root / name, world, method, *options)
    for name, ranks in run(waves, root).items():
        print(name)
        check_ended(ranks)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("methods")


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("method", "kind"), [(m, kind) for m in LRS for kind in KINDS if (m, kind) not in REFUSED])
def test_every_method_is_that_of_one_process(method: str, kind: str, world: int, folder: Path, root: Path) -> None:
    every_method(folder, root)
    check_same(root / f"{method} {kind} {world}", root / f"{method} 1")


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_packed_and_merged_runs(folder: Path, tmp_path: Path) -> None:
    packed, merged = ("--packing", "--seq-length", 64), ("--merge",)
    waves = []
    for method, options in (("sft", packed), ("lora", merged), ("qlora", merged)):
        names = {world: tmp_path / f"{method}-{world}" for world in (1, 2)}
        waves.append({out.name: job(folder, out, world, method, *options) for world, out in names.items()})
    for ranks in run(waves, tmp_path).values():
        check_ended(ranks)
    for method in ("sft", "lora", "qlora"):
        check_same(tmp_path / f"{method}-2", tmp_path / f"{method}-1")


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("method", "kind"), [("sft", "stage 2"), ("lora", "weights on the host"), ("dpo", "stage 2")])
def test_a_killed_and_a_stopped_run_go_on_to_the_same_bits(
    method: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    straight, killed, stopped = (tmp_path / name for name in ("straight", "killed", "stopped"))
    options = KINDS[kind]
    first = {
        "straight": job(folder, straight, 2, method, *options),
        "killed": job(folder, killed, 2, method, *options, dies_at=3),
        "stopped": job(folder, stopped, 2, method, *options, signal_at=1),
    }
    again = {name: resumed(folder, tmp_path / name, 2, method) for name in ("killed", "stopped")}
    found = run([{name: given} for name, given in first.items()] + [again], tmp_path)
    check_ended(found["straight"])
    for name in ("killed", "stopped"):
        check_ended(found[name])
        assert bits(tmp_path / name) == bits(straight)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_what_a_killed_and_a_stopped_run_say(folder: Path, tmp_path: Path) -> None:
    killed, stopped = tmp_path / "killed", tmp_path / "stopped"
    found = run(
        [{"killed": job(folder, killed, 2, dies_at=3)}, {"stopped": job(folder, stopped, 2, signal_at=1)}], tmp_path
    )
    assert [rank["exit"] for rank in found["killed"]] == [1, -9]
    assert "rank 1 failed" in found["killed"][0]["stderr"]
    check_ended(found["stopped"][:1], 130)
    assert [rank["code"] for rank in found["stopped"]] == [130, 130]
    text = found["stopped"][0]["stderr"]
    again = f"twinflow finetune {folder}/model {folder}/sft.jsonl --resume --out {stopped}"
    assert f"To continue, start 2 processes as before with: {again}" in text


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(before: int, after: int, folder: Path, tmp_path: Path) -> None:
    straight, out = tmp_path / "straight", tmp_path / "run"
    first = {"straight": job(folder, straight, 1), "run": job(folder, out, before, signal_at=1)}
    found = run([first, {"again": resumed(folder, out, after)}], tmp_path)
    assert [rank["code"] for rank in found["run"]] == [130] * before
    check_ended(found["again"])
    check_same(out, straight)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_what_cannot_work_is_refused(folder: Path, tmp_path: Path) -> None:
    """By one sentence of the first rank, and exit codes of all."""
    out = tmp_path / "begun"
    write(tmp_path / "broken.jsonl", [{"prompt": "Hi"}])
    write(tmp_path / "data0.jsonl", [{"prompt": "Hi", "completion": "Ho"}] * 3)
    write(tmp_path / "data1.jsonl", [{"prompt": "Hi", "completion": "He"}] * 3)
    model = str(folder / "model")
    waves = [
        {"begun": job(folder, out, 2)},
        {
            "five": resumed(folder, out, 5),
            "used": job(folder, out, 2),
            "four bits": job(folder, tmp_path / "four", 2, "qlora", "--offload-params"),
            "broken": (2, {"arguments": [model, str(tmp_path / "broken.jsonl")]}),
            "other": (2, {"arguments": [model, str(tmp_path / "data{rank}.jsonl"), "--out", str(tmp_path / "other")]}),
        },
        {"nan": job(folder, tmp_path / "nan", 2, "sft", "--lr", 1e30, "--grad-clip", 0)},
    ]
    found = run(waves, tmp_path)
    reasons = {
        "five": "The number of processes is 5, but must be a divisor of 12, the sequences in a step of this run",
        "used": "a folder without an earlier run",
        "four bits": "--offload-params cannot be used with --method qlora on several ranks",
        "broken": "line 1: the field 'completion' is missing",
        "other": "DATA of rank 1 differs from that of rank 0",
        "nan": "is not a finite number",
    }
    for name, reason in reasons.items():
        check_ended(found[name], 1)
        assert reason in found[name][0]["stderr"], found[name][0]["stderr"]


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_twinflow_launch_starts_two_ranks(folder: Path, tmp_path: Path) -> None:
    arguments = job(folder, tmp_path / "run", 2)[1]["arguments"]
    command = [sys.executable, "-m", "twinflow", "launch", "--num_procs", "2", "--module", "twinflow", "finetune"]
    ended = subprocess.run(
        [*command, *arguments, "--threads", "1"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert ended.stderr == ""
