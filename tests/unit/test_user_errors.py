# SPDX-License-Identifier: Apache-2.0
"""Mistakes of users at the public interfaces. Each error says what happened, what was expected and what to write."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twin_support import quick_torch
from typer.testing import CliRunner

import twinflow
from twinflow.attention import FixedSparsityConfig, sparse_attention, sparsify
from twinflow.cli.main import app
from twinflow.integrations.accelerate import connect, twin_optimizer
from twinflow.integrations.given import take_over
from twinflow.optim.loss_scale import static
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel import PipelineModule

CONFIG: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
SHAPE = [
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--context",
    "16",
    "--vocab-size",
    "256",
    "--threads",
    "1",
]
NOWHERE = "/dev/null/folder"  # a path under a file, in which no user can create anything


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def inputs() -> Tensor:
    return torch.ones(2, 8)


@pytest.fixture
def engine() -> Iterator[Any]:
    made = twinflow.initialize(model=mlp(), config=CONFIG)[0]
    yield made
    made.destroy()


def step(engine: Any) -> None:
    engine.backward(engine(inputs()).mean())
    engine.step()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out: out, r"The loss has the shape \(2, 1\), but must have one element.*loss.mean\(\)"),
        (lambda out: out.mean().detach(), "loss.requires_grad is False, but must be True.*without detach"),
        (lambda out: 1.0, "loss is 1.0, but must be a tensor that requires a gradient"),
    ],
)
def test_a_loss_that_has_no_backward(loss: Callable[[Tensor], Any], words: str, engine: Any) -> None:
    with pytest.raises(ValueError, match=words):
        engine.backward(loss(engine(inputs())))
    model = mlp()
    with closing(TwinOptimizer(model)) as optimizer, pytest.raises(ValueError, match=words):
        optimizer.backward(loss(model(inputs())))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda model: model.state_dict(), "A parameter to train is '0.weight', but must be an nn.Parameter"),
        (lambda model: [[param] for param in model.parameters()], "A parameter to train is of type list"),
        (lambda model: [next(model.parameters()) * 2], "is the result of an operation.*Pass the nn.Parameter"),
    ],
)
def test_what_is_no_list_of_parameters(given: Callable[[nn.Module], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TwinOptimizer(given(mlp()))


def test_a_parameter_in_two_groups() -> None:
    model = mlp()
    groups = [{"params": list(model.parameters())}, {"params": [model[0].weight]}]
    with pytest.raises(ValueError, match=r"\(16, 8\) is in param_groups\[0\] and in param_groups\[1\].*Remove it"):
        TwinOptimizer(model, param_groups=groups)


def test_no_parameters_in_the_groups() -> None:
    with pytest.raises(ValueError, match=r"model_parameters of initialize\(\)\) are empty. Omit this argument"):
        twinflow.initialize(model=mlp(), model_parameters=[], config=CONFIG)


@pytest.mark.parametrize("build", [TwinOptimizer, lambda model: twinflow.initialize(model=model, config=CONFIG)])
def test_a_class_is_no_model(build: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"without arguments that returns one. Pass Linear\(...\), or lambda: Linear"):
        build(nn.Linear)


def test_a_name_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"model is 'gpt2', but must be an nn.Module.*Build the model"):
        twinflow.initialize(model="gpt2", config=CONFIG)


def test_an_option_that_a_torch_optimizer_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"option of AdamW is 'lrr', but must be one of 'lr'.*Did you mean 'lr'?"):
        TwinOptimizer(mlp(), torch.optim.AdamW, lrr=1.0)


@pytest.mark.parametrize("state", [{}, {"kind": "twinflow.TwinOptimizer", "version": 99}])
def test_a_state_of_another_kind_or_version(state: dict[str, Any]) -> None:
    with (
        closing(TwinOptimizer(mlp())) as optimizer,
        pytest.raises(ValueError, match=r"Pass a dict that state_dict\(\)"),
    ):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda groups: groups[0].pop("lr"), "no key 'lr', but must have all options of 'adamw'.*default, 0.001"),
        (
            lambda groups: groups.append({"params": []}),
            "there are 2 groups, and the optimizer was built with 1. Build a new",
        ),
    ],
)
def test_param_groups_that_were_changed_by_hand(change: Callable[[Any], Any], words: str) -> None:
    model = mlp()
    with closing(TwinOptimizer(model)) as optimizer:
        change(optimizer.param_groups)
        model(inputs()).mean().backward()
        with pytest.raises((ValueError, RuntimeError), match=words):
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"early": True}, {"early": True, "accumulation_steps": 2}])
@pytest.mark.parametrize("num_rows", [8, 32])
def test_a_parameter_whose_shape_is_changed(options: dict[str, Any], num_rows: int) -> None:
    model = mlp()
    with closing(TwinOptimizer(model, **options)) as optimizer:
        for param in (model[0].weight, model[0].bias):
            param.data = param.data[:num_rows] if num_rows < len(param) else torch.cat([param.data, param.data])
        model[2].weight.data = torch.ones(1, num_rows)
        words = r"weight cannot be.* to \(.*\) after .* was built. Build a new optimizer"
        with pytest.raises(RuntimeError, match=words):  # noqa: PT012 (early updates raise in backward)
            optimizer.backward(model(inputs()).mean())
            optimizer.step()


def test_a_misspelt_option_of_a_group() -> None:
    params = list(mlp().parameters())
    with pytest.warns(UserWarning, match=r"param_groups\[0\] has the key 'weigth_decay'.*mean 'weight_decay'?"):
        TwinOptimizer([{"params": params, "weigth_decay": 0.1, "my_label": 1}]).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TwinOptimizer([{"params": params, "my_label": 1, "initial_lr": 0.1}]).close()


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_loss_scale_that_the_loop_does_not_use(is_scaled: bool) -> None:
    model = mlp()
    with (
        closing(TwinOptimizer(model, loss_scale=static(8))) as optimizer,
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(inputs()).mean()
            (loss * optimizer.loss_scale if is_scaled else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    texts = [str(one.message) for one in found if "loss_scale=8" in str(one.message)]
    assert len(texts) == (not is_scaled)
    assert is_scaled or "Call optimizer.backward(loss) instead of loss.backward()." in texts[0]
    assert is_scaled or found[0].filename == __file__


def test_a_start_of_delayed_updates_without_delayed_updates() -> None:
    words = "delayed_update_start=5 cannot be used with delayed_update=False.*leave delayed_update_start out"
    with pytest.raises(ValueError, match=words):
        TwinOptimizer(mlp(), delayed_update_start=5)
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu", "delayed_update_start": 5}}
    with pytest.raises(ValueError, match=words):
        twinflow.initialize(model=mlp(), config={**CONFIG, "zero_optimization": offload})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "AdamW"}, "Write {...} with some of its keys: type, params"),
        ({"zero_optimization": 2}, "Write {...} with some of its keys: stage, offload_optimizer"),
        ({"bf16": True}, 'bf16 is True, but must be an object. Write {"enabled": true}.'),
        (
            {"optimizer": {"type": "AdamW", "params": {"rate": 1}}},
            "lr, betas, eps, weight_decay, bias_correction, maximize. The value of optimizer.type",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"x": 1}}}, "Use one of these keys: warmup_min_lr"),
    ],
)
def test_the_config_says_which_keys_to_write(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        twinflow.config.load_config({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.save_checkpoint(None), 'save_dir is None, but must be the path of a folder. Example: save_dir="'),
        (lambda e: e.load_checkpoint(None), "load_dir is None, but must be the path of a folder"),
        (lambda e: e.save_checkpoint("x", client_state=[1]), "client_state is .1., but must be a dict"),
        (lambda e: e.save_16bit_model(NOWHERE), "save_dir is .*can be created. The system reports: Not a directory"),
        (lambda e: e.deepspeed_io(None), "The dataset is of type NoneType, but must have __getitem__ and __len__."),
        (lambda e: e.deepspeed_io([1], collate_fn="x"), "collate_fn is 'x', but must be a function"),
        (lambda e: e.set_gradient_accumulation_boundary("x"), "is_boundary is 'x', but must be one of True, False"),
        (lambda e: e.sav_checkpoint, "Did you mean 'save_checkpoint'?"),
        (lambda e: e.train_batch, "'train_batch'. Call backward.. and step.., or pass a PipelineModule"),
        (lambda e: e.set_lr, "Set engine.optimizer.param_groups"),
    ],
)
def test_wrong_calls_of_an_engine(call: Callable[[Any], Any], words: str, engine: Any) -> None:
    with pytest.raises((ValueError, AttributeError, OSError), match=words):
        call(engine)


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError])
def test_a_folder_in_which_nothing_can_be_saved(
    kind: type[OSError], engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind(1, "the reason")

    step(engine)
    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(kind, match=r"save_dir is .*can be created. The system reports: the reason. Choose"):
        engine.save_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "is an incomplete twinflow checkpoint: its manifest.json is missing"),
        (lambda path: path.write_text("{"), "manifest.json does not contain valid JSON"),
        (lambda path: path.write_text('{"a": 1}'), "its key 'format' must be 'twinflow checkpoint'"),
    ],
)
def test_a_damaged_manifest(damage: Callable[[Path], Any], words: str, engine: Any, tmp_path: Path) -> None:
    step(engine)
    engine.save_checkpoint(tmp_path, tag="a")
    damage(tmp_path / "a" / "manifest.json")
    with pytest.raises(ValueError, match=rf"{words}.*Restore this file from a copy, or give the tag"):
        engine.load_checkpoint(tmp_path, tag="a")


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.pt", r"torch.load\(\) and model.load_state_dict\(\)"), ("a", r"folder that save_checkpoint\(\) wrote to")],
)
def test_a_file_is_no_folder_of_checkpoints(name: str, words: str, engine: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=words):
        engine.load_checkpoint(tmp_path / name)


def told(*args: object) -> str:
    found = CliRunner().invoke(app, [str(arg) for arg in args])
    assert found.exit_code == 1, found.output
    return " ".join(found.output.split())


@pytest.mark.parametrize("saved", ["{", "[]"])
def test_resuming_a_run_whose_settings_are_damaged(saved: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(saved)
    found = told("train", "--resume", "--out", tmp_path, *SHAPE)
    assert str(tmp_path / "settings.json") in found
    assert "Restore the file from a copy, or start a new run in another --out." in found


def test_files_that_the_commands_cannot_write(tmp_path: Path) -> None:
    assert "--out is '/dev/null/folder', but must be a folder" in told("train", "--out", NOWHERE, *SHAPE)
    found = told("plan", "--preset", "tiny", "--gpu", "h100", "--ram", "64GB", "--write-config", NOWHERE)
    assert "--write-config is '/dev/null/folder', but must be a file that can be written" in found


def test_the_shape_is_refused_by_the_names_of_the_options() -> None:
    found = told("train", "--hidden-size", 128, "--num-attention-heads", 3)
    assert "--hidden-size is 128, but must be a multiple of --num-attention-heads, which is 3. Use" in found
    found = told("train", "--warmup", 9, "--steps", 5)
    assert (
        "--warmup is 9, but must be at most 5, the value of --steps. Use a shorter --warmup, or more --steps." in found
    )
    assert "--num-layers is 0, but must be a whole number >= 1" in told("train", "--num-layers", 0)


def test_importing_and_exporting_the_wrong_folder(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step(engine)
    engine.save_checkpoint(tmp_path / "a")
    assert "It is a twinflow checkpoint. Load it with load_checkpoint()" in told(
        "import", tmp_path / "a", tmp_path / "b"
    )

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(1, "the reason")

    monkeypatch.setattr(os, "mkdir", fail)
    assert "The system reports: the reason. Choose another path" in told("export", tmp_path / "a", tmp_path / "b")


def pipeline(loss_fn: Any = nn.functional.mse_loss) -> Any:
    model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1, loss_fn=loss_fn)
    return twinflow.initialize(model=model, config=CONFIG)[0]


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (None, "must be a tensor with one element. Pass loss_fn to PipelineModule"),
        (lambda out, target: out - target, r"The loss has the shape \(2, 4\).*Return one number from loss_fn"),
        (lambda out, target: 1.0, "The loss is of type float"),
        (lambda out, target: (out - target).mean().detach(), "loss.requires_grad is False, but must be True"),
    ],
)
def test_losses_of_a_pipeline(loss_fn: Any, words: str) -> None:
    engine = pipeline(loss_fn)
    with pytest.raises(ValueError, match=words):
        engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))]))
    engine.destroy()


def test_a_pipeline_is_told_what_is_no_number_loader_or_function() -> None:
    for num_stages in (0, "2"):
        with pytest.raises(ValueError, match=rf"num_stages is {num_stages!r}, but must be a whole number >= 1"):
            PipelineModule([nn.Linear(4, 4)], num_stages=num_stages)  # type: ignore[arg-type]
    engine = pipeline()
    with pytest.raises(ValueError, match=r"loader is 5, but must be a DataLoader"):
        engine.set_dataloader(5)
    with pytest.raises(ValueError, match=r"fn is 5, but must be a function of a batch"):
        engine.set_batch_fn(5)
    engine.destroy()


def test_attention_refuses_text_as_numbers_and_as_a_model() -> None:
    pattern = FixedSparsityConfig(num_heads=2, block=16)
    q = torch.ones(1, 2, 32, 16)
    for name in ("scale", "dropout"):
        with pytest.raises(ValueError, match=rf"{name} is 'x', but must be a"):
            sparse_attention(q, q, q, pattern, **{name: "x"})
    with pytest.raises(ValueError, match=r"model is 'gpt2', but must be an nn.Module"):
        sparsify("gpt2", pattern)  # type: ignore[type-var]


def test_integrations_refuse_what_is_no_accelerator_or_optimizer() -> None:
    pytest.importorskip("accelerate")
    for call in (lambda: twin_optimizer(None, mlp()), lambda: connect(None, None)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"accelerator is None, but must be an accelerate.Accelerator"):
            call()
    with pytest.raises(ValueError, match=r"optimizer is None, but must be a torch.optim.Optimizer"):
        take_over(None, mlp())  # type: ignore[arg-type]


def test_lightning_is_told_what_is_no_checkpoint_and_no_loss(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from twinflow.integrations.lightning import TwinStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.model(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    def fit(**options: Any) -> None:
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 8)), batch_size=2)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(strategy=TwinStrategy(), accelerator="cpu", devices=1, max_steps=1, **quiet)
        trainer.fit(Module(), data, **options)

    (tmp_path / "a.ckpt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"ckpt_path is .*The file is damaged, is no checkpoint"):
        fit(ckpt_path=str(tmp_path / "a.ckpt"))
    with pytest.raises(ValueError, match=r"The loss has the shape \(2, 1\)"):
        fit()
