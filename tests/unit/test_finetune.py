# SPDX-License-Identifier: Apache-2.0
"""`twinflow finetune`: every method and form of data on a tiny Llama and a tiny Qwen, from the command to a model that
plain transformers loads; and a run that was killed goes on to the same bits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from planner_support import LLAMA_8B
from run_support import TrainProcess
from safetensors.torch import load_file
from twin_support import quick_torch
from typer.testing import CliRunner, Result

from twinflow.bench.disk import DiskRates
from twinflow.cli import finetune as command
from twinflow.cli import finetune_fit, plan_input
from twinflow.cli.finetune_settings import FinetuneOptions, make_settings
from twinflow.cli.main import app
from twinflow.monitor.metrics import StepRecord, ValidRecord, read_metrics
from twinflow.native import get_threads, set_threads
from twinflow.offload.host_params import HostParams
from twinflow.offload.runtime import Runtime
from twinflow.planner.cases import Setting
from twinflow.planner.costs import Memory
from twinflow.planner.fit import Fit, Wish
from twinflow.planner.machines import GB, GPUS, Host, Machine, rates_of

pytest.importorskip("trl")
pytest.importorskip("datasets")

SCRIPT = Path(__file__).parents[2] / "examples" / "tiny_models.py"
KINDS = ("llama", "qwen")
USER, ANSWER = {"role": "user", "content": "After 41?"}, {"role": "assistant", "content": "42"}
OTHER = {"role": "assistant", "content": "17"}
# Rows of every form, with the parts of the shown example that are learned.
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": [USER, ANSWER, USER, OTHER]}, "42"),
    "conversations": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "42"}]}, "42"),
    "prompt": ({"prompt": "After 41?", "completion": "42"}, "42"),
    "prompt messages": ({"prompt": [USER], "completion": [ANSWER]}, "42"),
    "instruction": ({"instruction": "Say what follows.", "input": "41", "output": "42"}, "42"),
    "text": ({"text": "41 42 43"}, "41 42 43"),
    "preference": ({"prompt": "After 41?", "chosen": "42", "rejected": "17"}, "42"),
    "preference messages": ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}, "42"),
    "preference chats": ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, "42"),
}


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models, and the data of the task."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.write_data(path)
    for kind in KINDS:
        tokenizer = tiny.make_tokenizer(kind)
        tiny.make_model(kind, tokenizer, hidden=32).save_pretrained(path / kind)
        tokenizer.save_pretrained(path / kind)
    pair = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for _ in range(24)))
    return path


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = get_threads()
    with quick_torch():
        yield
    set_threads(threads)


def run(*options: Any) -> Result:
    return CliRunner().invoke(app, ["finetune", *map(str, options), "--threads", "1"])


def finished(*options: Any) -> str:
    result = run(*options)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def refused(*options: Any) -> str:
    result = run(*options)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    return result.output


def loaded(path: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits


def check_tuned(out: Path, method: str, base: Path) -> None:
    """The folder has all files, plain transformers loads it, and it answers and differs from the base."""
    names = {path.name for path in (out / "model").iterdir()}
    weights = "adapter_model.safetensors" if method in ("lora", "qlora") else "model.safetensors"
    assert names >= {weights, "README.md", "tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert not any(name.endswith((".bin", ".pt", ".partial")) for name in names)
    assert (out / "report.html").exists()
    model, tokenizer = loaded(out / "model")
    found, before = logits(model, tokenizer), logits(*loaded(base))
    assert torch.isfinite(found).all()
    assert not torch.equal(found, before)
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    written = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4)
    assert tokenizer.decode(written[0]).startswith(text)


def test_a_tuned_model_loads_in_transformers_and_a_run_is_resumed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = (folder / "qwen", folder / "train.jsonl")
    text = finished(*given, "--steps", 3, "--lr", 1e-3, "--save-every", 2, "--samples", 1, "--out", out)
    assert "138 chats (form 'messages'), 7 for validation" in text
    assert "learned  | " in text
    assert "<|im_end|>" in text
    for said in ("Validation loss after 0 steps", "step 3/3", "before ", "after ", "report.html", "tuned model"):
        assert said in text
    check_tuned(out, "sft", folder / "qwen")
    weights = (out / "model" / "model.safetensors").read_bytes()
    # Without its last checkpoint, the run is that of a process that died after the second step.
    (out / "checkpoints" / "checkpoint-3" / "trainer_state.json").unlink()
    again = finished(*given, "--resume", "--out", out)
    assert "checkpoint-2" in again
    begun = finished(*given, "--resume", "--steps", 1, "--samples", 0, "--out", tmp_path / "new")
    assert "There is no checkpoint yet. Training starts from step 0." in begun
    assert (out / "model" / "model.safetensors").read_bytes() == weights
    assert "but must be 0.001, as when the run began" in refused(*given, "--lr", 3, "--resume", "--out", out)
    assert "a folder without an earlier run" in refused(*given, "--out", out)


def test_the_run_is_planned_for_the_ram_that_it_may_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinflow.native.cgroup._withheld_bytes", 0)
    args = (folder / "llama", folder / "train.jsonl", "--dry-run")
    assert "no GPU, 2 GB RAM free" in finished(*args, "--ram", "2GB")
    assert "it is short by" in refused(*args, "--ram", "100MB")
    assert "--ram is '64', but must be a size with a unit" in refused(*args, "--ram", "64")


def test_embeddings_are_on_the_host_where_the_plan_puts_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a GPU decides, for a model of 8 B parameters. The choice reaches the optimizer, and is saved."""
    rates = rates_of(Machine(GPUS["rtx4090"], Host(256 * GB, 16, 150e9)))
    found = []
    for gpu_gb in (9, 7):
        place = plan_input.Place(Setting(rates, Memory(gpu_gb * GB, 256 * GB)), "a machine", 1, "bf16")
        monkeypatch.setattr(finetune_fit, "this_setting", lambda _, place=place: place)
        options = FinetuneOptions("m", "d", precision="bf16", states="bf16", batch_size=1, accumulation=1, grad_clip=0)
        settings = make_settings(options)[0]
        choice = finetune_fit.choose(settings, LLAMA_8B, 512, 100)
        found.append((choice.offload_params, choice.offload_embeddings))
        said = "weights on the host, with the embedding and output layers" in dict(choice.rows)["state"]
        assert said == choice.offload_embeddings
    assert found == [(True, False), (True, True)]
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    built: list[bool] = []
    choose = finetune_fit.choose_fit
    attach = Runtime.attach

    def chosen(wish: Wish, setting: Setting) -> Fit:
        return choose(replace(wish, offload_params=True, offload_embeddings=True), setting)

    def attached(self: Runtime, *given: Any, **named: Any) -> None:
        built.append(self.settings.tuning.offload_embeddings)
        attach(self, *given, **named)

    monkeypatch.setattr(finetune_fit, "choose_fit", chosen)
    monkeypatch.setattr(Runtime, "attach", attached)
    out = tmp_path / "run"
    options = ("--steps", 2, "--batch-size", 1, "--accumulation", 1, "--samples", 0, "--valid-every", 0)
    finished(folder / "qwen", folder / "train.jsonl", *options, "--out", out)
    assert built == [True]
    saved = json.loads((out / "settings.json").read_text())
    assert (saved["offload_params"], saved["offload_embeddings"]) == (True, True)


def test_a_dry_run_reports_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    text = finished(folder / "llama", folder / "train.jsonl", "--dry-run", "--out", tmp_path / "run")
    for said in ("llama, fp32 weights", "sft, all parameters", "micro-batch", "planned", "learned  | "):
        assert said in text
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--steps", 4, "--lr", 1e30, "--grad-clip", 0, "--samples", 0, "--out", out)
    text = refused(folder / "qwen", folder / "train.jsonl", *options)
    assert "is not a finite number. Use a lower --lr (now 1e+30)" in text
    assert (out / "report.html").exists()
    assert not list((out / "checkpoints").glob("checkpoint-*"))


def test_broken_data_is_refused_before_anything_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(command, "_load_libraries", forbidden)
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [}\n')
    assert "line 1: it is not JSON" in refused("no/model", path)
    path.write_text(json.dumps(FORMS["text"][0]) + "\n")
    assert "There is no file or folder at" in refused("./no/such/model", path)
    assert "'preference' for --method dpo" in refused("no/model", path, "--method", "dpo")
    path.write_text(json.dumps(FORMS["preference"][0]) + "\n")
    assert "Use --method dpo" in refused("no/model", path)


def test_without_a_network_only_the_cache_of_the_hub_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a misspelt folder would be asked of the hub again and again, for half a minute."""

    def fails(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(plan_input, "getproxies", dict)
    monkeypatch.setattr(plan_input.socket, "getaddrinfo", fails)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE")  # restored after the test
    data = folder / "train.jsonl"
    finished(folder / "qwen", data, "--dry-run")
    assert "HF_HUB_OFFLINE" not in os.environ
    text = refused("tiny/qwenn", data)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "There is no such folder, it is not in the local cache of the hub, and the hub cannot be reached." in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--method", "full"), "--method is 'full', but must be one of"),
        (("--merge",), "--merge cannot be used with --method sft"),
        (("--packing", "--method", "dpo"), "--packing cannot be used with --method dpo"),
        (("--compile", "--method", "qlora"), "--compile cannot be used with --method qlora"),
        (("--steps", 0), "--steps is 0"),
        (("--epochs", 0), "--epochs is 0.0"),
        (("--ratio", "auto"), "--ratio is 'auto'"),
        (("--precision", "fp16"), "--precision is 'fp16'"),
        (("--states", "int4"), "--states is 'int4'"),
        (("--master", "some"), "master is 'some'"),
        (("--master", "none", "--precision", "fp32"), "--master none cannot be used with --precision fp32"),
        (("--gpu-memory", "8GB"), "this machine has no GPU"),
        (("--gpu-memory", "8GB", "--dry-run"), "this machine has no GPU"),
        (("--rank", 8), "--rank cannot be used with --method sft"),
        (("--beta", 0.2, "--method", "lora"), "--beta cannot be used with --method lora"),
        (("--chat-template", "none.jinja"), "an existing Jinja file"),
        (("--resume",), "--resume needs the folder of the run"),
        (("--resume", "--out", "."), "the folder of a run with a file settings.json"),
        (("--seq-length", 0), "--seq-length is 0"),
    ],
)
def test_wrong_options_are_refused(options: tuple[Any, ...], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(FORMS["text"][0]) + "\n")
    assert reason in refused("no/model", path, *options)


@pytest.mark.parametrize("offload", [True, False])
def test_dpo_reads_each_weight_once_and_only_for_the_optimizer(
    offload: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL would hash all weights before the optimizer takes them, so that a whole copy of the model is in memory."""
    import pretrained_cases as cases

    from twinflow.integrations import dpo, pretrained

    read, create = pretrained._FileTensor.read, dpo.TwinDPOTrainer.create_optimizer
    numels: dict[str, int] = {}
    closed: list[tuple[int, int]] = []

    def count(self: Any, start: int, into: torch.Tensor) -> None:
        numels[self.info.name] = numels.get(self.info.name, 0) + into.numel()
        read(self, start, into)

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.twin is None:
            closed.append((cases.num_closed(self.model), len(list(self.model.parameters()))))
        return create(self, *args, **kwargs)

    monkeypatch.setattr(pretrained._FileTensor, "read", count)
    monkeypatch.setattr(dpo.TwinDPOTrainer, "create_optimizer", look)
    options = ("--method", "dpo", "--steps", 1, "--batch-size", 4, "--samples", 0, "--out", tmp_path / "run")
    place = "--offload-params" if offload else "--no-offload-params"
    finished(folder / "qwen", folder / "pairs.jsonl", *options, place)
    model = loaded(folder / "qwen")[0]
    assert numels == {name: param.numel() for name, param in model.named_parameters()}
    assert closed == [(len(numels), len(numels))]


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["sft", "lora", "qlora", "dpo"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_method_on_every_model(kind: str, method: str, folder: Path, tmp_path: Path) -> None:
    out, base = tmp_path / "run", folder / kind
    data = folder / ("pairs.jsonl" if method == "dpo" else "train.jsonl")
    options = ("--method", method, "--steps", 3, "--lr", 1e-2, "--batch-size", 2, "--accumulation", 2)
    finished(base, data, *options, "--out", out)
    check_tuned(out, method, base)
    losses = [record.loss for record in read_metrics(out / "metrics.jsonl") if isinstance(record, StepRecord)]
    assert len(losses) == 3
    if method in ("lora", "qlora"):
        merged = tmp_path / "merged"
        finished(base, data, *options, "--merge", "--out", merged)
        found, expected = logits(*loaded(merged / "model")), logits(*loaded(out / "model"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "placed"),
    [
        pytest.param("sft", "--offload-params", marks=pytest.mark.matrix),
        pytest.param("dpo", "--offload-params", marks=pytest.mark.matrix),
        ("sft", "--offload-embeddings"),
        pytest.param("dpo", "--offload-embeddings", marks=pytest.mark.matrix),
        pytest.param("lora", "--offload-embeddings", marks=pytest.mark.matrix),
    ],
)
def test_weights_on_the_host_give_the_same_bits(
    method: str, placed: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []
    copy_of = HostParams.copy_of
    monkeypatch.setattr(HostParams, "copy_of", lambda self, param: copied.append(param.shape) or copy_of(self, param))
    data = folder / ("pairs.jsonl" if method == "dpo" else "train.jsonl")
    options = ("--method", method, "--steps", 2, "--lr", 1e-2, "--batch-size", 2, "--accumulation", 2, "--samples", 1)
    for name in (placed, "--no-offload-params"):
        finished(folder / "qwen", data, *options, name, "--out", tmp_path / name)
    assert copied == []  # nothing has read a weight outside of its layer
    (records, weights), (others, expected) = (ending(tmp_path / name) for name in (placed, "--no-offload-params"))
    assert weights == expected
    assert [record[:2] for record in records] == [record[:2] for record in others]  # the losses
    # Norms of gradients are summed in the order of the buckets, which embeddings on the host change.
    assert [record[2:] for record in records] == [
        record[2:] if placed == "--offload-params" else pytest.approx(record[2:], rel=1e-14) for record in others
    ]


def test_without_a_master_a_run_is_planned_and_resumed_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    out, given = tmp_path / "run", (folder / "qwen", folder / "train.jsonl")
    options = ("--precision", "bf16", "--states", "4bit", "--lr", 1e-2, "--batch-size", 2, "--accumulation", 1)
    options = (*options, "--steps", 3, "--save-every", 2, "--samples", 0, "--valid-every", 0)
    text = finished(*given, *options, "--master", "none", "--out", out)
    assert "AdamW in 4bit, no fp32 master" in text
    weights = (out / "model" / "model.safetensors").read_bytes()
    (out / "checkpoints" / "checkpoint-3" / "trainer_state.json").unlink()  # as if the process had died before
    finished(*given, "--resume", "--out", out)
    assert (out / "model" / "model.safetensors").read_bytes() == weights
    said = "--master is 'fp32', but must be 'none', as when the run began"
    assert said in refused(*given, "--resume", "--master", "fp32", "--out", out)
    finished(*given, *options, "--out", tmp_path / "with")
    assert (tmp_path / "with" / "model" / "model.safetensors").read_bytes() != weights


def test_state_on_a_disk_gives_the_same_bits_and_a_resumed_run_keeps_it(folder: Path, tmp_path: Path) -> None:
    out, disk, given = tmp_path / "run", tmp_path / "disk", (folder / "qwen", folder / "train.jsonl")
    options = ("--precision", "bf16", "--lr", 1e-2, "--batch-size", 2, "--accumulation", 2, "--samples", 0)
    options = (*options, "--steps", 3, "--save-every", 2, "--valid-every", 0, "--offload-params")
    text = finished(*given, *options, "--nvme-path", disk, "--out", out)
    assert f"of state in {disk}" in text
    assert "s a step to read and write it at" in text
    assert not list(disk.iterdir())
    weights = (out / "model" / "model.safetensors").read_bytes()
    finished(*given, *options, "--out", tmp_path / "memory")
    assert (tmp_path / "memory" / "model" / "model.safetensors").read_bytes() == weights
    (out / "checkpoints" / "checkpoint-3" / "trainer_state.json").unlink()  # as if the process had died before
    assert f"of state in {disk}" in finished(*given, "--resume", "--out", out)
    assert (out / "model" / "model.safetensors").read_bytes() == weights


def test_a_disk_without_room_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        finetune_fit, "measure_disk", lambda path, *_, **__: DiskRates(str(path), 1000, True, 1e9, 1e9, 1e9)
    )
    given = (folder / "qwen", folder / "train.jsonl", "--dry-run", "--out", tmp_path / "run")
    assert "Not enough space on the disk" in refused(*given, "--nvme-path", tmp_path / "disk")


def test_a_run_from_before_the_option_has_masters(tmp_path: Path) -> None:
    saved = {"method": "sft", "model": "m", "data": "d", "world": 1}
    (tmp_path / "settings.json").write_text(json.dumps(saved))
    options = FinetuneOptions("m", "d", resume=True, out=tmp_path, master="fp32")
    assert make_settings(options)[0].master == "fp32"
    with pytest.raises(ValueError, match="--master is 'none', but must be 'fp32'"):
        make_settings(replace(options, master="none"))


def test_adapters_have_the_dtype_of_their_base(folder: Path, tmp_path: Path) -> None:
    """In fp32 they would cast all of their inputs. TwinOptimizer has masters in fp32."""
    options = ("--method", "lora", "--precision", "bf16", "--steps", 1, "--batch-size", 2, "--accumulation", 1)
    finished(folder / "llama", folder / "train.jsonl", *options, "--samples", 0, "--out", tmp_path / "run")
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_the_seed_decides_the_adapters(folder: Path, tmp_path: Path) -> None:
    """`--lr 0` leaves them as they begin."""
    options = ("--method", "lora", "--lr", 0, "--steps", 1, "--batch-size", 2, "--accumulation", 1, "--samples", 0)
    found = []
    for number, seed in enumerate((0, 0, 1)):
        torch.rand(number + 1)  # whatever the process has drawn before
        out = tmp_path / str(number)
        finished(folder / "qwen", folder / "train.jsonl", *options, "--valid-every", 0, "--seed", seed, "--out", out)
        found.append((out / "model" / "adapter_model.safetensors").read_bytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data(form: str, kind: str, folder: Path, tmp_path: Path) -> None:
    row, learned = FORMS[form]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(24)))
    method = "dpo" if form.startswith("preference") else "sft"
    text = finished(folder / kind, path, "--method", method, "--steps", 1, "--samples", 1, "--out", tmp_path / "run")
    mark = "chosen   | " if method == "dpo" else "learned  | "
    assert f"{mark}{learned}" in text
    plain = finished(folder / kind, path, "--method", method, "--dry-run", "--no-template")
    if form in ("prompt", "instruction", "preference"):
        assert "assistant" not in plain.partition("Example")[2]


@pytest.mark.matrix
def test_every_answer_of_a_chat_is_learned(folder: Path, tmp_path: Path) -> None:
    """By the marks of the template (Qwen), or as one example for each answer (Llama): the same tokens."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(FORMS["messages"][0]) + "\n")
    texts = [finished(folder / kind, path, "--dry-run") for kind in KINDS]
    assert ["1 chats" in text for text in texts] == [True, True]
    assert all("4 of them learned" in text for text in texts), texts
    packed = finished(folder / "qwen", folder / "train.jsonl", "--packing", "--seq-length", 128, "--dry-run")
    assert "packed into" in packed


@pytest.mark.matrix
def test_packed_examples_do_not_see_each_other(folder: Path, tmp_path: Path) -> None:
    """The loss of a packed batch is that of its examples alone."""
    given = (folder / "qwen", folder / "train.jsonl", "--steps", 1, "--lr", 0, "--samples", 0)
    for name, options in {"plain": ("--batch-size", 131), "packed": ("--batch-size", 1, "--packing")}.items():
        size = ("--seq-length", 256, "--accumulation", 1 if name == "plain" else 13)
        finished(*given, *options, *size, "--out", tmp_path / name)
    losses = [next(iter(read_metrics(tmp_path / name / "metrics.jsonl")[1:])).loss for name in ("plain", "packed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.matrix
def test_long_examples_are_cut_and_counted(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    long = {"prompt": "41 " * 30, "completion": "42"}
    rows = [FORMS["prompt"][0]] * 20 + [long] * 2 + [{"prompt": "Go on.", "completion": "42 " * 100}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = finished(folder / "llama", path, "--seq-length", 40, "--valid-data", path, "--dry-run")
    assert "3 examples are longer than 40 tokens and are cut; 2 of them have nothing left to learn" in text


@pytest.mark.matrix
def test_a_chat_that_the_template_refuses_is_named(folder: Path, tmp_path: Path) -> None:
    path, template = tmp_path / "data.jsonl", tmp_path / "template.jinja"
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, USER, ANSWER]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template.write_text(
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    text = refused(folder / "llama", path, "--chat-template", template, "--dry-run")
    assert "line 2: the chat template of the model refuses this chat: roles must alternate" in text


def ending(out: Path) -> tuple[list[tuple[Any, ...]], bytes]:
    """All that was recorded, and the bytes of the tuned weights."""
    records = [
        (record.step, record.loss) if isinstance(record, ValidRecord) else (record.step, record.loss, record.grad_norm)
        for record in read_metrics(out / "metrics.jsonl")
    ]
    weights = next((out / "model").glob("*model.safetensors"))
    return records, weights.read_bytes()


@pytest.mark.matrix
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("method", ["sft", "lora"])
def test_ten_kills_end_with_the_same_bits(method: str, folder: Path, tmp_path: Path) -> None:
    """Killed between two things that the run does to its folder, wherever that is, and resumed each time."""
    given = (folder / "qwen", folder / "train.jsonl", "--method", method)
    options = ("--steps", 12, "--lr", 1e-2, "--batch-size", 2, "--accumulation", 2, "--save-every", 1, "--samples", 1)
    straight, out = tmp_path / "straight", tmp_path / "run"

    def start(*more: Any, die_at: tuple[Path, int] | None = None) -> TrainProcess:
        process = TrainProcess((*given, *more, "--threads", 1), tmp_path / "log", die_at=die_at, command="finetune")
        process.code = process.wait(600.0)  # type: ignore[attr-defined]
        return process

    assert start(*options, "--out", straight).code == 0  # type: ignore[attr-defined]
    dice, num_kills, first = random.Random(0), 0, True
    for _ in range(10):
        more = (*options, "--out", out) if first else ("--resume", "--out", out)
        process = start(*more, die_at=(out, dice.randint(12, 60)))
        num_kills += process.code == -signal.SIGKILL  # type: ignore[attr-defined]
        assert process.code in (0, -signal.SIGKILL), process.text()  # type: ignore[attr-defined]
        first = False
    process = start("--resume", "--out", out)
    assert process.code == 0, process.text()  # type: ignore[attr-defined]
    assert num_kills >= 5
    assert ending(out) == ending(straight)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_ctrl_c_saves_and_prints_the_command_to_resume(folder: Path, tmp_path: Path) -> None:
    given, out = (folder / "qwen", folder / "train.jsonl"), tmp_path / "run"
    options = ("--steps", 6, "--lr", 1e-2, "--samples", 1, "--threads", 1)
    assert run(*given, *options, "--out", tmp_path / "straight").exit_code == 0
    process = TrainProcess((*given, *options, "--out", out), tmp_path / "log", command="finetune")
    while process.is_alive() and "step 1/6" not in process.text():
        pass
    process.send(signal.SIGINT)
    code, text = process.wait(300.0), process.text()
    assert code in (0, 130), text  # 0: it was faster
    if code == 130:
        assert "Interrupted after" in text
        assert f"twinflow finetune {given[0]} {given[1]} --resume --out {out}" in text
        assert (out / "report.html").exists()
        finished(*given, "--resume", "--out", out)
    assert ending(out) == ending(tmp_path / "straight")


@pytest.fixture(scope="module")
def pretrained(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script of the docs writes."""
    path = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch, quick_torch():
        patch.setattr(sys, "argv", ["tiny_models.py", str(path)])
        tiny.main()
    return path


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "lr", "least"), [("sft", 1e-3, 0.9), ("lora", 5e-3, 0.7)])
def test_tuning_teaches_the_task(
    kind: str, method: str, lr: float, least: float, tiny: ModuleType, pretrained: Path, tmp_path: Path
) -> None:
    """A model that was pretrained here answers nothing before, and nearly everything after, about unseen numbers."""
    test, out = tiny.read_rows(pretrained / "test.jsonl"), tmp_path / "run"
    before = tiny.exact_share(*loaded(pretrained / kind), test)
    options = ("--method", method, "--steps", 150, "--lr", lr, "--out", out)
    finished(pretrained / kind, pretrained / "train.jsonl", *options)
    after = tiny.exact_share(*loaded(out / "model"), test)
    print(f"{kind} {method}: {before:.0%} before, {after:.0%} after")
    assert before < 0.05
    assert after > least


@pytest.mark.matrix
def test_grpo_of_trl_with_the_mixin(folder: Path, tmp_path: Path) -> None:
    """The recipe of docs/finetune.md."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import twinflow
    from twinflow.integrations.huggingface import TwinMixin

    class TwinGRPO(TwinMixin, trl.GRPOTrainer):  # type: ignore[misc,name-defined]
        pass

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    model = twinflow.from_pretrained(AutoModelForCausalLM, folder / "qwen")
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    config = trl.GRPOConfig(
        str(tmp_path / "run"),
        bf16=False,
        beta=0.0,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    trainer = TwinGRPO(
        model,
        reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "After 41 comes"}] * 16),
        processing_class=AutoTokenizer.from_pretrained(folder / "qwen"),
        twin={"states": "bf16"},
    )
    trainer.train()
    assert trainer.twin is not None
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    trainer.twin.close()
