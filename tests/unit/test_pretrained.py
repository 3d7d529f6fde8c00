# SPDX-License-Identifier: Apache-2.0
"""twinflow.from_pretrained: the model of transformers, read from its files only when weights are needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrained_cases as cases
import pytest
import torch
from torch import Tensor, nn
from twin_support import matrix_but

import twinflow
from twinflow.zero.unread import Unread, UnreadTensor, read, unread

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("llama")
    cases.save("llama", found)
    return found


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("name", matrix_but(["llama tied", "gpt2", "phi3", "mixtral", "t5"], list(cases.ZOO)))
def test_every_architecture_is_that_of_transformers_to_the_bit(name: str, tmp_path: Path) -> None:
    cls = cases.save(name, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for dtype in ("auto", torch.bfloat16):
        theirs, ours = cls.from_pretrained(tmp_path, dtype=dtype), twinflow.from_pretrained(cls, tmp_path, dtype=dtype)
        assert type(ours) is type(theirs)
        assert cases.num_closed(ours) == len(list(ours.parameters()))
        marks = [[(n, p.dtype, p.shape, p.requires_grad) for n, p in m.named_parameters()] for m in (theirs, ours)]
        assert marks[0] == marks[1]
        assert cases.num_closed(ours) == len(marks[1]), "a look at shapes has read a file"
        for found, wanted in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
            assert found[0] == wanted[0]
            assert torch.equal(found[1], wanted[1]), wanted[0]
        assert ours.config.to_dict() == theirs.config.to_dict()
        assert not ours.training
        assert str(getattr(ours, "generation_config", "")) == str(getattr(theirs, "generation_config", ""))
        assert cases.digest(ours.state_dict()) == cases.digest(theirs.state_dict())
        assert cases.num_closed(ours) == 0


@pytest.mark.parametrize("way", matrix_but(["optimizer", "engine, weights on the host"], list(cases.WAYS)))
def test_training_has_the_bits_of_a_model_that_transformers_has_loaded(way: str, folder: Path) -> None:
    ours, theirs = (cases.train(0, 1, str(folder), way, plain) for plain in (False, True))
    assert ours.pop("closed") == len(ours["last"])
    assert theirs.pop("closed") == 0
    assert ours == theirs
    assert ours["still closed"] == 0


@pytest.mark.parametrize("way", [way for way in cases.WAYS if "engine" in way])
def test_one_process_reads_each_parameter_once(way: str) -> None:
    wanted, found = cases.train_unread(0, 1, way)
    assert found.pop("read") == 1.0
    assert found == wanted


def test_a_model_is_used_before_training(folder: Path) -> None:
    cls = transformers.AutoModelForCausalLM
    theirs, ours = cls.from_pretrained(folder), twinflow.from_pretrained(cls, folder)
    tokens = torch.arange(6)[None]
    assert torch.equal(ours.generate(tokens, max_new_tokens=3), theirs.generate(tokens, max_new_tokens=3))
    some = twinflow.from_pretrained(transformers.LlamaForCausalLM, folder)
    some.cpu().to("cpu:0").train().requires_grad_(True)
    assert cases.num_closed(some) == len(list(some.parameters()))
    with torch.no_grad():
        some.model.norm.weight.mul_(2)  # stays
    assert torch.equal(some.model.norm.weight, 2 * theirs.model.norm.weight)
    assert cases.num_closed(some) == len(list(some.parameters())) - 1


def test_the_trainer_reads_the_model_when_it_builds_its_optimizer(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from integrations_support import samples

    from twinflow.integrations.huggingface import TwinTrainer

    cls, found = transformers.AutoModelForCausalLM, []
    for plain in (True, False):
        model = cls.from_pretrained(folder) if plain else twinflow.from_pretrained(cls, folder)
        given = {"use_cpu": True, "report_to": [], "max_steps": 3, "save_strategy": "no", "disable_tqdm": True}
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **given)
        trainer = TwinTrainer(model, arguments, train_dataset=samples(24), twin={"offload_params": True})
        assert cases.num_closed(model) == (0 if plain else len(list(model.parameters())))
        trainer.train()
        found.append(cases.digest(model.state_dict()))
        trainer.twin.close()
    assert found[0] == found[1]


def test_adapters_over_a_model_that_was_not_read_train_with_the_same_bits(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    cls, found = transformers.AutoModelForCausalLM, []
    for plain in (True, False):
        given = {"attn_implementation": "eager", "torch_dtype": torch.bfloat16}
        model = cls.from_pretrained(folder, **given) if plain else twinflow.from_pretrained(cls, folder, **given)
        assert model.config._attn_implementation == "eager"
        torch.manual_seed(1)
        options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
        adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**options))
        assert plain or cases.num_closed(adapted) == len(list(cls.from_config(model.config).parameters()))
        optimizer = twinflow.TwinOptimizer(adapted, "adamw", lr=1e-2, offload_params=True)
        for _ in range(3):
            tokens = torch.arange(12).view(2, 6)
            optimizer.backward(adapted(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(cases.digest(adapted.state_dict()))
        optimizer.close()
    assert found[0] == found[1]


def test_a_quantised_model_is_loaded_by_transformers(folder: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    given = {"quantization_config": transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())}
    cls = transformers.AutoModelForCausalLM
    theirs, ours = cls.from_pretrained(folder, **given), twinflow.from_pretrained(cls, folder, **given)
    assert type(ours.model.layers[0].mlp.up_proj.weight) is type(theirs.model.layers[0].mlp.up_proj.weight)
    assert type(ours.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
    tokens = torch.arange(6)[None]
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_weights_for_the_host_are_not_moved_to_the_device_by_the_trainer(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from twinflow.integrations.huggingface import TwinTrainer

    model = twinflow.from_pretrained(transformers.AutoModelForCausalLM, folder)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = TwinTrainer(model, arguments, twin={"offload_params": True})
    trainer._move_model_to_device(model, torch.device("meta"))
    assert not any(p.is_meta for p in model.parameters())


# Errors.


def _edit(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Changes the tensors of the file that has the tensor `name`; the index stays as it is."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path: Path = folder / index["weight_map"][name]
    tensors = files.load_file(path)
    change(tensors)
    files.save_file(tensors, path, {"format": "pt"})
    return path


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(NORM), "has no tensor 'NORM'"),
    "extra": (
        lambda tensors: tensors.update(extra=torch.ones(2)),
        "has the tensor 'extra', but model.saf",
    ),
    "shape": (
        lambda tensors: tensors.update({NORM: torch.ones(3)}),
        r"'NORM' in .*FILE has the shape \(3,\).*\(32,\)",
    ),
    "dtype": (
        lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}),
        r"'NORM' in .*FILE has the dtype torch.int8",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tensor_is_named_with_its_file(kind: str, tmp_path: Path) -> None:
    cls = cases.save("llama", tmp_path)
    change, message = BROKEN[kind]
    path = _edit(tmp_path, NORM, change)
    with pytest.raises(ValueError, match=message.replace("NORM", NORM).replace("FILE", path.name)) as found:
        twinflow.from_pretrained(cls, tmp_path)
    assert str(path) in str(found.value)


def test_a_broken_file_is_named(tmp_path: Path, folder: Path) -> None:
    cls = cases.save("llama", tmp_path)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match=f"{path} is cut off or damaged.*Download or copy"):
        twinflow.from_pretrained(cls, tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=f"The file {path.name} of .* is missing"):
        twinflow.from_pretrained(cls, tmp_path)
    path.write_bytes(whole)
    model = twinflow.from_pretrained(cls, tmp_path)
    path.write_bytes(whole + b" ")
    with pytest.raises(RuntimeError, match="was changed or removed after from_pretrained"):
        model.state_dict()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="no valid weight_map"):
        twinflow.from_pretrained(cls, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="must be in files of safetensors"):
        twinflow.from_pretrained(cls, tmp_path)


def test_an_adapter_is_not_left_out(tmp_path: Path) -> None:
    cls = cases.save("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has an adapter .* which from_pretrained does not load"):
        twinflow.from_pretrained(cls, tmp_path)


def test_other_classes_and_configs_need_strict_false(folder: Path) -> None:
    classes = transformers.AutoModelForSequenceClassification
    with pytest.raises(ValueError, match=r"has no tensor 'score.weight', which the model of this config needs"):
        twinflow.from_pretrained(classes, folder)
    made = twinflow.from_pretrained(classes, folder, strict=False)
    assert cases.num_closed(made) == len(list(made.parameters())) - 1
    assert made.score.weight.std() > 0
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"has the tensor 'model.layers.1.*and 4 others, which"):
        twinflow.from_pretrained(transformers.AutoModelForCausalLM, folder, config=config)
    for given in ({"device_map": "auto"}, {"tp_plan": "auto"}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} must not be given"):
            twinflow.from_pretrained(transformers.AutoModelForCausalLM, folder, **given)
    with pytest.raises(ValueError, match=r"cls is .* but must be a class of transformers"):
        twinflow.from_pretrained(nn.Linear, folder)


# Unread tensors.


class _Rows:
    """A tensor of a file, and how many elements were read."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.num_read = 0

    def read(self, start: int, into: Tensor) -> None:
        into.view(-1).copy_(self.values.view(-1)[start : start + into.numel()])
        self.num_read += into.numel()


def test_recorded_operations_give_the_values_of_torch() -> None:
    values = torch.arange(24.0).view(6, 4)
    leaf = _Rows(values)
    lazy = unread(leaf, values.shape, values.dtype)

    def change(tensor: Tensor) -> list[Tensor]:
        first, second = tensor[...].to(torch.float64).chunk(2, 0)
        joined = torch.cat([second.transpose(0, 1), torch.ones(4, 1, dtype=torch.float64)], 1)
        return [joined, torch.stack([first, second]).reshape(-1), tensor.view(3, 2, 4).permute(1, 0, 2).contiguous()]

    for found, wanted in zip(change(lazy), change(values), strict=True):
        assert isinstance(found, UnreadTensor)
        assert leaf.num_read == 0
        assert (found.shape, found.dtype, found.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
        assert torch.equal(read(found), wanted)
        leaf.num_read = 0
    assert torch.equal(lazy, values)
    assert leaf.num_read == 24  # needs the values
    written = lazy * 2
    written += 1
    assert torch.equal(read(written), values * 2 + 1)
    target = torch.zeros(6, 4)
    target.copy_(lazy)
    assert torch.equal(target, values)


def test_a_rank_reads_its_rows_only() -> None:
    values = torch.randn(6, 4)
    leaf = _Rows(values)
    cast = unread(leaf, values.shape, values.dtype).to(torch.bfloat16).detach()
    rows = Unread(cast, 2, 5, torch.bfloat16, torch.device("cpu"))  # type: ignore[arg-type]
    assert torch.equal(rows.read(), values[2:5].bfloat16())
    assert leaf.num_read == 12
    assert rows.to(dtype=torch.float32).read().dtype == torch.float32
    assert Unread(cast, 6, 6, torch.bfloat16, torch.device("cpu")).read().shape == (0, 4)  # type: ignore[arg-type]
