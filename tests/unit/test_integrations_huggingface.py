# SPDX-License-Identifier: Apache-2.0
"""Trainer and Accelerate with updates that start in backward: the losses of torch's AdamW, and the same bits after a
resume."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from integrations_support import DECAY, LR, MAX_NORM, assert_same_weights, llama, rows, samples
from torch import nn

from twinflow.compat.__main__ import alone
from twinflow.optim.twin import Tuning, TwinOptimizer

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
import safetensors.torch  # noqa: E402

from twinflow.integrations.accelerate import twin_optimizer  # noqa: E402

LOOP, MIDDLE = 8, 4  # steps of a loop of Accelerate
TWIN = {"tuning": Tuning(bucket_numel=4096)}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def huggingface() -> Any:
    """The integration, which takes seconds to import: only in a process that runs these tests."""
    return importlib.import_module("twinflow.integrations.huggingface")


class Run(NamedTuple):
    logs: list[dict[str, float]]  # of every step
    evals: list[float]
    model: nn.Module
    trainer: Any


def arguments(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": MAX_NORM,
        "learning_rate": LR,
        "weight_decay": DECAY,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return transformers.TrainingArguments(**{**given, **options})


def train(
    kind: Any, folder: Path, resume: Path | None = None, model: Any = None, keys: Any = (), **options: Any
) -> Run:
    model = llama() if model is None else model
    # 37 rows: the last step of an epoch has fewer backwards.
    data = {"train_dataset": samples(37), "eval_dataset": samples(4)}
    trainer = kind(model, arguments(folder, **options), **data, **dict(keys))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    history = trainer.state.log_history
    evals = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return Run([entry for entry in history if "loss" in entry], evals, trainer.model, trainer)


def assert_close(found: Run, wanted: Run) -> None:
    assert len(found.logs) == len(wanted.logs) > 0
    for ours, theirs in zip(found.logs, wanted.logs, strict=True):
        for key in ("step", "loss", "grad_norm", "learning_rate"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-4), key
    assert found.evals == pytest.approx(wanted.evals, abs=1e-4)


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.matrix)])  # an epoch has 10
def test_a_run_has_the_losses_of_adamw_and_goes_on_with_the_same_bits(
    huggingface: Any, tmp_path: Path, steps: int
) -> None:
    saved = steps // 2
    sizes = {"max_steps": steps, "save_steps": saved}
    wanted = train(transformers.Trainer, tmp_path / "plain", **sizes)
    found = train(huggingface.TwinTrainer, tmp_path / "twin", keys={"twin": TWIN}, **sizes)
    assert len(found.logs) == steps
    assert sum(entry["grad_norm"] > MAX_NORM for entry in found.logs) > 5, "hardly anything was clipped"
    assert_close(found, wanted)
    checkpoint = tmp_path / "twin" / f"checkpoint-{saved}"
    assert (checkpoint / "twinflow" / "manifest.json").exists()
    assert (checkpoint / "optimizer.pt").stat().st_size < 10_000
    resumed = train(huggingface.TwinTrainer, tmp_path / "resumed", resume=checkpoint, keys={"twin": TWIN}, **sizes)
    assert resumed.logs[saved:] == found.logs[saved:]
    assert_same_weights(resumed.model, found.model)
    assert found.trainer.twin.runtime.settings.early


def test_a_model_whose_files_have_other_names_goes_on_with_all_weights(huggingface: Any, tmp_path: Path) -> None:
    """transformers stores fused experts one by one. Its own Trainer does not load them again."""

    def olmoe(seed: int = 0) -> Any:
        torch.manual_seed(seed)
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        config = transformers.OlmoeConfig(vocab_size=128, num_experts=4, num_experts_per_tok=2, eos_token_id=1, **shape)
        return transformers.OlmoeForCausalLM(config)

    sizes = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True}
    sizes |= {"greater_is_better": True, "metric_for_best_model": "eval_loss"}  # so that the best is not the last
    found = train(huggingface.TwinTrainer, tmp_path / "twin", model=olmoe(), keys={"twin": TWIN}, **sizes)
    checkpoint = tmp_path / "twin" / "checkpoint-2"
    assert found.trainer.state.best_model_checkpoint == str(checkpoint)
    assert_same_weights(found.model, transformers.OlmoeForCausalLM.from_pretrained(checkpoint))
    again = tmp_path / "again"
    resumed = train(huggingface.TwinTrainer, again, resume=checkpoint, model=olmoe(1), keys={"twin": TWIN}, **sizes)
    assert resumed.logs[2:] == found.logs[2:]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("no clipping", {"max_grad_norm": 0.0}),
        ("gradients stay", {"twin": {"early": False}}),
        ("sgd", {"optim": "sgd", "optim_args": "momentum=0.9"}),
        ("as it is", {"optim": "adafactor", "gradient_accumulation_steps": 1}),
    ],
)
def test_other_arguments_mean_what_they_do_without(
    huggingface: Any, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    options = dict(options)
    twin = options.pop("twin", {})
    short = {"max_steps": 6, "save_strategy": "no", "eval_strategy": "no", **options}
    wanted = train(transformers.Trainer, tmp_path, **short)
    found = train(huggingface.TwinTrainer, tmp_path, keys={"twin": {**TWIN, **twin}}, **short)
    assert_close(found, wanted)
    assert found.trainer.twin.rule_name == {"no clipping": "adamw", "sgd": "sgd"}.get(
        name, found.trainer.twin.rule_name
    )


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"states": "bf16", "ratio": 0.5}, {"offload_params": True}])
def test_a_bf16_model_keeps_fp32_masters_over_a_resume(
    huggingface: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    short = {"max_steps": 8, "save_steps": 4, "eval_steps": 4}
    twin = {"twin": {**TWIN, **options}}
    found = train(huggingface.TwinTrainer, tmp_path / "a", model=llama(torch.bfloat16), keys=twin, **short)
    again = train(
        huggingface.TwinTrainer,
        tmp_path / "b",
        tmp_path / "a" / "checkpoint-4",
        llama(torch.bfloat16),
        keys=twin,
        **short,
    )
    assert next(found.model.parameters()).dtype == torch.bfloat16
    assert again.logs[4:] == found.logs[4:]
    assert_same_weights(again.model, found.model)


@pytest.mark.matrix
def test_training_goes_on_when_train_is_called_again(huggingface: Any, tmp_path: Path) -> None:
    short = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    first = train(huggingface.TwinTrainer, tmp_path, keys={"twin": TWIN}, **short)
    twin = first.trainer.twin
    first.trainer.train()
    assert first.trainer.twin is twin
    assert twin.num_steps == 4


def test_a_run_that_ended_within_a_step_leaves_nothing_to_the_next(huggingface: Any, tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        """Ends a run between two micro-batches, once."""

        is_done = False

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not self.is_done
            self.is_done = True

    found = []
    for kind, keys in ((transformers.Trainer, {}), (huggingface.TwinTrainer, {"twin": TWIN})):
        quick = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
        trainer = kind(llama(), arguments(tmp_path, **quick), train_dataset=samples(8), callbacks=[Stop()], **keys)
        trainer.train()
        assert trainer.state.global_step == 0
        trainer.train()
        found.append([entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert len(found[1]) == 2
    trainer.twin.close()


def test_a_delayed_update_is_in_the_weights_at_the_end(huggingface: Any, tmp_path: Path) -> None:
    """And not in those of the best checkpoint, which are loaded after it."""
    best = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1}
    for options in ({"save_strategy": "no", "eval_strategy": "no"}, best):
        delayed = {"twin": {**TWIN, "delayed_update": True}}
        found = train(huggingface.TwinTrainer, tmp_path, keys=delayed, max_steps=2, **options)
        weights = {name: value.clone() for name, value in found.model.state_dict().items()}
        found.trainer.twin.flush()
        assert all(torch.equal(value, weights[name]) for name, value in found.model.state_dict().items())
        if options is best:
            file = Path(found.trainer.state.best_model_checkpoint) / "model.safetensors"
            saved = safetensors.torch.load_file(file)
            assert all(torch.equal(value, weights[name]) for name, value in saved.items())
        found.trainer.twin.close()


@pytest.mark.matrix
def test_a_model_that_is_made_anew_gets_an_optimizer_of_its_own(huggingface: Any, tmp_path: Path) -> None:
    short = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    trainer = huggingface.TwinTrainer(args=arguments(tmp_path, **short), model_init=llama, train_dataset=samples(8))
    trainer.train()
    first, model = trainer.twin, trainer.model
    trainer.train()
    assert trainer.twin is not first
    assert trainer.model is not model
    assert trainer.twin.num_steps == 2


@pytest.mark.matrix
def test_a_mixin_makes_it_of_other_trainers(huggingface: Any, tmp_path: Path) -> None:
    class Mine(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class MyTwin(huggingface.TwinMixin, Mine):
        pass

    short = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    assert_close(train(MyTwin, tmp_path, **short), train(transformers.Trainer, tmp_path, **short))


def test_a_subclass_may_build_its_own_optimizer(huggingface: Any, tmp_path: Path) -> None:
    def trainer(base: Any) -> Any:
        class Mine(base):  # type: ignore[misc]
            def create_optimizer(self, *args: Any) -> Any:  # it does not call super()
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
                return self.optimizer

        return Mine

    short = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    found = train(trainer(huggingface.TwinTrainer), tmp_path, **short)
    assert isinstance(found.trainer.twin, TwinOptimizer)
    assert_close(found, train(trainer(transformers.Trainer), tmp_path, **short))


def test_a_run_of_trainer_goes_on(huggingface: Any, tmp_path: Path) -> None:
    short = {"max_steps": 4, "save_steps": 2, "eval_strategy": "no"}
    wanted = train(transformers.Trainer, tmp_path, **short)
    found = train(huggingface.TwinTrainer, tmp_path / "twin", resume=tmp_path / "checkpoint-2", **short)
    assert [entry["step"] for entry in found.logs] == [1, 2, 3, 4]  # the first two are those of the checkpoint
    assert_close(found, wanted)


@pytest.mark.matrix
def test_a_twin_optimizer_that_is_given_must_mean_the_same(huggingface: Any, tmp_path: Path) -> None:
    short = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    model = llama()
    given = TwinOptimizer(model, lr=LR, max_grad_norm=2.0, early=True, **TWIN)
    with pytest.raises(ValueError, match=r"max_grad_norm is 1.0, but must be 2.0"):
        train(huggingface.TwinTrainer, tmp_path, model=model, keys={"optimizers": (given, None)}, **short)
    found = train(
        huggingface.TwinTrainer,
        tmp_path,
        model=model,
        keys={"optimizers": (given, None)},
        **{**short, "max_grad_norm": 2.0},
    )
    assert found.trainer.twin is given
    assert given.accumulation_steps == 2
    given.close()


@pytest.mark.parametrize(
    ("options", "keys", "message"),
    [
        ({"torch_compile_mode": "reduce-overhead"}, {}, "torch_compile_mode is 'reduce-overhead'.*CUDA graphs"),
        ({}, {"twin": {"max_grad_norm": 2.0}}, r"twin must not have the key 'max_grad_norm'"),
        ({}, {"twin": {"accumulation_steps": 2}}, "gradient_accumulation_steps in TrainingArguments"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    huggingface: Any, options: Any, keys: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BACKEND", "MODE"):  # TrainingArguments sets these variables
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
    with pytest.raises(ValueError, match=message):
        huggingface.TwinTrainer(
            llama(), arguments(tmp_path, eval_strategy="no", **options), train_dataset=samples(8), **keys
        )


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_torch_compile_compiles_blocks(
    huggingface: Any, tmp_path: Path, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself is not compiled, so updates start during backward."""
    from torch._dynamo.utils import counters

    sizes = {"max_steps": 6, "save_strategy": "no", **options}
    wanted = train(huggingface.TwinTrainer, tmp_path / "plain", keys={"twin": TWIN}, **sizes)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "")  # TrainingArguments sets this variable
    torch._dynamo.reset()
    counters.clear()
    found = train(
        huggingface.TwinTrainer, tmp_path / "twin", keys={"twin": TWIN}, torch_compile_backend="aot_eager", **sizes
    )
    assert_close(found, wanted)
    assert counters["stats"]["unique_graphs"] > 0
    assert type(found.trainer.model_wrapped) is type(wanted.trainer.model_wrapped)
    layers = found.model.model.layers
    assert all(layer._compiled_call_impl is not None for layer in layers)
    torch._dynamo.reset()


def test_lora_adapters_train_as_with_adamw(huggingface: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    short = {"max_steps": 4, "save_steps": 2, "eval_strategy": "no"}

    def adapted() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    wanted = train(transformers.Trainer, tmp_path / "plain", model=adapted(), **short)
    found = train(huggingface.TwinTrainer, tmp_path / "twin", model=adapted(), **short)
    assert_close(found, wanted)
    assert all("lora" in param.name for param in found.trainer.twin.runtime.params)
    checkpoint = tmp_path / "twin" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists()
    again = train(huggingface.TwinTrainer, tmp_path / "again", checkpoint, adapted(), **short)
    assert again.logs[2:] == found.logs[2:]
    assert_same_weights(again.model, found.model)


# Accelerate.


def loop(
    make: Any, steps: int, folder: Path | None = None, resume: Path | None = None
) -> tuple[list[float], nn.Module]:
    """A plain loop of Accelerate; losses and norms."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    optimizer = make(accelerator, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LOOP)
    loader = torch.utils.data.DataLoader(rows(4 * LOOP), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        first = MIDDLE
    found = []
    for batch in accelerator.skip_first_batches(loader, 2 * first):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM) if accelerator.sync_gradients else None
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(loss.item())
        if norm is not None:
            found.append(norm.item())
            first += 1
            if folder is not None and first == MIDDLE:
                accelerator.save_state(str(folder), safe_serialization=True)
        if first == steps:
            break
    if hasattr(optimizer.optimizer, "wait"):
        optimizer.optimizer.wait()
    return found, model


def plain(_: Any, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


def twin(accelerator: Any, model: nn.Module) -> Any:
    return twin_optimizer(accelerator, model, "adamw", lr=LR, weight_decay=DECAY, max_grad_norm=MAX_NORM, **TWIN)


def test_a_loop_of_accelerate_has_the_losses_of_adamw_and_resumes(tmp_path: Path) -> None:
    wanted, _ = loop(plain, LOOP)
    found, model = loop(twin, LOOP, folder=tmp_path)
    assert found == pytest.approx(wanted, abs=1e-4)
    assert max(found[2::3]) > MAX_NORM, "nothing was clipped"
    resumed, again = loop(twin, LOOP, resume=tmp_path)
    assert resumed == found[3 * MIDDLE :]
    assert_same_weights(again, model)


@pytest.mark.matrix
def test_an_optimizer_of_torch_is_taken_over_for_accelerate() -> None:
    wanted, _ = loop(plain, 4)
    found, _ = loop(lambda a, m: twin_optimizer(a, m, plain(a, m), max_grad_norm=MAX_NORM, **TWIN), 4)
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.fixture
def reset_accelerate() -> Iterator[None]:
    """Accelerate keeps what it has found about this process."""
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    yield
    state.AcceleratorState._reset_state(True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("reset_accelerate")
def test_one_process_of_torchrun_is_one_process(
    huggingface: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"max_steps": 4, "save_steps": 2, "eval_steps": 2}
    wanted = train(huggingface.TwinTrainer, tmp_path / "python", keys={"twin": TWIN}, **short)
    wanted_loop, wanted_model = loop(twin, 4)
    for name, value in alone().items():
        monkeypatch.setenv(name, value)
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)
    found_loop, model = loop(twin, 4, folder=tmp_path / "loop")
    assert torch.distributed.is_initialized()  # Accelerate has seen torchrun
    assert found_loop == wanted_loop
    assert_same_weights(model, wanted_model)
    resumed, _ = loop(twin, LOOP, resume=tmp_path / "loop")
    assert resumed == loop(twin, LOOP)[0][3 * MIDDLE :]
    found = train(huggingface.TwinTrainer, tmp_path / "torchrun", keys={"twin": TWIN}, **short)
    assert found.logs == wanted.logs
    assert found.evals == wanted.evals
    assert_same_weights(found.model, wanted.model)
    checkpoint = tmp_path / "torchrun" / "checkpoint-2"
    again = train(huggingface.TwinTrainer, tmp_path / "again", resume=checkpoint, keys={"twin": TWIN}, **short)
    assert again.logs[2:] == found.logs[2:]
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)
    data = {"train_dataset": samples(37), "eval_dataset": samples(4)}
    trainer = huggingface.TwinTrainer(llama(), arguments(tmp_path / "first", **short), **data, twin=TWIN)
    trainer.evaluate()  # before training
    trainer.train()
    assert_same_weights(trainer.model, wanted.model)


@pytest.mark.usefixtures("reset_accelerate")
def test_a_model_that_torchrun_made_accelerate_wrap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in alone().items():
        monkeypatch.setenv(name, value)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    accelerator.prepare(model)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel\. Call twin_optimizer\(\) before accelerator"):
        twin_optimizer(accelerator, model)


def test_clipping_that_was_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm is 1.0, but must be None"):
        loop(lambda a, m: twin_optimizer(a, m, lr=LR), 1)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"distributed_type": "DEEPSPEED"}, "distributed_type of Accelerate is .DEEPSPEED."),
        ({"distributed_type": "FSDP"}, "FSDP"),
        ({"mixed_precision": "fp16"}, "mixed_precision is 'fp16'"),
    ],
)
def test_an_accelerator_that_would_train_wrongly_is_refused(facts: dict[str, Any], message: str) -> None:
    usual = {"num_processes": 1, "distributed_type": "NO", "scaler": None}
    with pytest.raises(ValueError, match=message):
        twin_optimizer(SimpleNamespace(**{**usual, **facts}), nn.Linear(2, 2))


def test_two_optimizers_on_one_accelerator_clip_their_own() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    ours = twin_optimizer(accelerator, one, lr=LR, max_grad_norm=MAX_NORM)
    theirs = accelerator.prepare(torch.optim.SGD(two.parameters(), lr=LR))
    x = torch.ones(2, 4)
    (one(x).square().mean() + two(x).square().mean()).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in two.parameters()]).item()
    found = [accelerator.clip_grad_norm_(m.parameters(), MAX_NORM) for m in (one, two)]
    ours.step()
    theirs.step()
    assert found[0].item() == pytest.approx(ours.optimizer.grad_norm)
    assert found[1].item() == pytest.approx(wanted)
    ours.optimizer.close()


@pytest.mark.parametrize("twin", ["bf16", ["states"]])
def test_options_of_the_trainer_are_a_dict(twin: Any) -> None:
    from twinflow.integrations.huggingface import TwinTrainer

    with pytest.raises(ValueError, match=r'twin is .*but must be a dict.*Example: twin={"states": "bf16"}'):
        TwinTrainer(nn.Linear(8, 1), twin=twin)
