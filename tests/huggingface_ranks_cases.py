# SPDX-License-Identifier: Apache-2.0
"""Trainer and Accelerate on several processes, forked from one that has imported transformers."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from integrations_support import DECAY, LR, MAX_NORM, llama, rows, samples

from twinflow.integrations.ranks import watch_ranks

GLOBAL, PARTS = 12, 2  # samples of a micro-batch over all ranks, and micro-batches of a step
NUM_ROWS = 4 * GLOBAL * PARTS  # an epoch has four steps
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "stage 0": {"zero": 0},
    "stage 1": {"zero": 1},
    "stage 2": {"zero": 2},
    "stage 3": {"zero": 3},
    "weights on the host": {"offload_params": True},
    "experts": {"expert_parallel_size": 2},
    "experts, stage 0": {"expert_parallel_size": 2, "zero": 0},
}


Job = tuple[int, str, dict[str, Any]]  # number of processes, name of a function here, and its arguments


def serve(_rank: int, _world: int, waves: Sequence[Mapping[str, Job]], root: str) -> dict[str, Any]:
    """The results of all jobs by name: one for each rank. The jobs of a wave run at the same time."""
    gc.disable()  # of what is imported, nothing is garbage
    import accelerate  # noqa: F401
    import transformers

    import twinflow.integrations.huggingface  # noqa: F401

    transformers.LlamaForCausalLM  # noqa: B018
    gc.freeze()
    gc.enable()
    found: dict[str, Any] = {}
    for wave in waves:
        started = {
            name: start(world, globals()[work], {**given, "root": root}) for name, (world, work, given) in wave.items()
        }
        found |= {name: finish(*one) for name, one in started.items()}
    return found


def serve_with_compat(rank: int, world: int, waves: Sequence[Mapping[str, Job]], root: str) -> dict[str, Any]:
    """The same if transformers takes twinflow.compat for DeepSpeed, for which it looks when it is imported."""
    from twinflow import compat

    compat.install()
    return serve(rank, world, waves, root)


def start(world: int, work: Callable[..., Any], given: Mapping[str, Any]) -> tuple[list[int], Path]:
    """Forks the ranks. Returns their process ids and the folder of their results."""
    place = Path(tempfile.mkdtemp(dir=given["root"]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _rank(rank, world, port, place, work, given)
        children.append(child)
    return children, place


def finish(children: Sequence[int], place: Path) -> list[Any]:
    """What each rank returns; the text of its error if it fails; its exit code if it ends otherwise."""
    found, end_s = [], time.monotonic() + 150
    for rank, child in enumerate(children):
        status = None
        while status is None:
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(code)
            elif time.monotonic() > end_s:
                os.kill(child, signal.SIGKILL)
            else:
                time.sleep(0.01)
        said = place / f"{rank}.json"
        stderr = (place / f"{rank}.err").read_text()
        found.append({**(json.loads(said.read_text()) if said.exists() else {}), "exit": status, "stderr": stderr})
    return found


def _rank(rank: int, world: int, port: int, place: Path, work: Callable[..., Any], given: Mapping[str, Any]) -> None:
    code = 1
    try:
        handle = os.open(place / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 2)
        os.dup2(handle, 1)
        torch.set_num_threads(1)
        os.environ["TWINFLOW_THREADS"] = "1"
        if world > 1:
            place_vars = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world),
                "RANK": str(rank),
            }
            os.environ.update(place_vars)
            if not given.get("few_variables"):
                os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)})
        result = work(**{key: value for key, value in given.items() if key != "few_variables"})
        (place / f"{rank}.json").write_text(json.dumps(result or {}))
        code = 0
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        (place / f"{rank}.json").write_text(json.dumps({"error": text, "trace": traceback.format_exc()}))
        if watch_ranks.cache_info().currsize:
            watch_ranks().report(error)
    finally:
        if watch_ranks.cache_info().currsize and code == 0:  # functions of the parent's atexit must not run here
            watch_ranks().close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def arguments(folder: Path, **options: Any) -> Any:
    import transformers

    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": GLOBAL // num_ranks(),
        "per_device_eval_batch_size": GLOBAL // num_ranks(),
        "gradient_accumulation_steps": PARTS,
        "max_grad_norm": MAX_NORM,
        "learning_rate": LR,
        "weight_decay": DECAY,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return transformers.TrainingArguments(**{**given, **options})


def ragged(count: int) -> list[dict[str, Any]]:
    """Rows whose number of labels differs, so that ranks and micro-batches have different numbers of tokens."""
    found = samples(count)
    for i, row in enumerate(found):
        row["labels"] = row["labels"].clone()
        row["labels"][: i % 7] = -100
    return found


def train(
    root: str,
    kind: str,
    name: str,
    resume: str | None = None,
    keys: Mapping[str, Any] | None = None,
    num_rows: int = NUM_ROWS,
    plain: bool = False,
    dies_at: int | None = None,
    model: str = "llama",
    **options: Any,
) -> Any:
    """Trains with the Trainer. Returns its logs, evaluations, predictions and a digest of the weights."""
    import transformers

    from twinflow.integrations.huggingface import TwinTrainer

    given = arguments(Path(root) / name, **options)
    data = {"train_dataset": ragged(num_rows), "eval_dataset": samples(2 * GLOBAL)}
    twin = {} if plain else {"twin": {**KINDS[kind], **(keys or {})}}
    trainer = (transformers.Trainer if plain else TwinTrainer)(model_of(model), given, **data, **twin)
    if dies_at is not None:
        trainer.add_callback(dying(dies_at))
    trainer.train(resume_from_checkpoint=str(Path(root) / resume) if resume else None)
    return use(trainer, Path(root) / name)


def model_of(name: str) -> Any:
    if name == "llama":
        return llama()
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.OlmoeConfig(
        vocab_size=128, max_position_embeddings=64, num_experts=4, num_experts_per_tok=2, eos_token_id=1, **sizes
    )
    return transformers.OlmoeForCausalLM(config)


def experts_with_deepspeed(
    root: str, name: str, resume: str | None = None, optimizer: dict[str, Any] | None = None, size: int = 2
) -> Any:
    """Hugging Face's own Trainer, with a DeepSpeed config and expert ranks. Without `optimizer`, the Trainer builds
    torch's AdamW.
    """
    import transformers

    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {**dict.fromkeys(sizes, "auto"), "zero_optimization": zero, "expert_parallel_size": size}
    config |= {"optimizer": optimizer} if optimizer is not None else {}
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 4}
    given = arguments(Path(root) / name, deepspeed=config, **saves)
    data = {"train_dataset": ragged(NUM_ROWS), "eval_dataset": samples(2 * GLOBAL)}
    trainer = transformers.Trainer(model_of("olmoe"), given, **data)
    trainer.train(resume_from_checkpoint=str(Path(root) / resume) if resume else None)
    numel = sum(param.numel() for key, param in trainer.model.named_parameters() if ".experts." in key)
    whole = sum(param.numel() for key, param in model_of("olmoe").named_parameters() if ".experts." in key)
    assert numel * size == whole
    return use(trainer, Path(root) / name)


def use(trainer: Any, folder: Path) -> Any:
    """What a trainer that has trained can do."""

    history = trainer.state.log_history
    predicted = trainer.predict(samples(GLOBAL))
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    again = type(trainer.model).from_pretrained(folder / "saved")
    generated = trainer.model.generate(
        input_ids=rows(1 + trainer.args.process_index)[:, :4],
        max_new_tokens=3 + trainer.args.process_index,
        do_sample=False,
    )
    wanted = again.generate(
        input_ids=rows(1 + trainer.args.process_index)[:, :4],
        max_new_tokens=3 + trainer.args.process_index,
        do_sample=False,
    )
    assert torch.equal(generated, wanted)
    return {
        "logs": [{key: one[key] for key in ("loss", "grad_norm", "learning_rate")} for one in history if "loss" in one],
        "evals": [one["eval_loss"] for one in history if "eval_loss" in one],
        "predicted": float(predicted.metrics["test_loss"]),
        "logits": float(abs(predicted.predictions).sum()),
        "weights": [float(p.detach().double().abs().sum()) for p in again.parameters()],
        "stage": getattr(getattr(getattr(trainer, "twin", None), "zero", None), "stage", None),
    }


def dying(step: int) -> Any:
    import transformers

    class Dying(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    return Dying()


def loop(
    root: str,
    kind: str,
    name: str,
    num_steps: int = 6,
    keys: Mapping[str, Any] | None = None,
    resume: str | None = None,
    save_at: int | None = None,
    model_name: str = "llama",
) -> Any:
    """A loop of Accelerate with accumulation, clipping, a scheduler, metrics and checkpoints."""
    import accelerate

    from twinflow.integrations.accelerate import twin_optimizer

    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=PARTS, step_scheduler_with_optimizer=False
    )
    model = model_of(model_name)
    optimizer = twin_optimizer(accelerator, model, lr=LR, max_grad_norm=MAX_NORM, **{**KINDS[kind], **(keys or {})})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))
    data = torch.utils.data.DataLoader(rows(NUM_ROWS), batch_size=GLOBAL // num_ranks())
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    folder, losses, norms, step = Path(root) / name, [], [], 0
    if resume is not None:
        accelerator.load_state(str(Path(root) / resume))
        step = int(json.loads((Path(root) / resume / "step.json").read_text()))
    while step < num_steps:
        skipped = accelerate.skip_first_batches(data, PARTS * (step % 4))
        for batch in skipped:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean()))
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            norms.append(float(norm))
            step += 1
            if step == save_at:
                accelerator.save_state(str(folder))
                (folder / "step.json").write_text(str(step))
            if step == num_steps:
                break
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(folder / "saved"))
    optimizer.optimizer.close()
    return {
        "losses": losses,
        "norms": norms,
        "weights": [float(value.double().abs().sum()) for value in state.values()],
        "wrapped": type(model).__name__,
    }


def best(root: str, kind: str, name: str, plain: bool = False) -> Any:
    """Keeps the best of several checkpoints, then trains again from one of them in the same process."""
    import transformers

    from twinflow.integrations.huggingface import TwinTrainer

    given = arguments(
        Path(root) / name,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        greater_is_better=True,  # so that the best checkpoint is not the last one
        gradient_checkpointing=True,
        label_smoothing_factor=0.1,
    )
    data = {"train_dataset": ragged(NUM_ROWS), "eval_dataset": samples(2 * GLOBAL)}
    twin = {} if plain else {"twin": KINDS[kind]}
    trainer = (transformers.Trainer if plain else TwinTrainer)(llama(), given, **data, **twin)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    first = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    after = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=str(Path(root) / name / "checkpoint-3"))
    again = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    found = Path(trainer.state.best_model_checkpoint).name
    return {"before": before, "evals": first, "after": after, "again": again, "best": found}


def lora(root: str, kind: str, name: str) -> Any:
    """Adapters of PEFT; the best of two checkpoints is loaded."""
    import peft

    from twinflow.integrations.huggingface import TwinTrainer

    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), adapters)
    options = {"save_strategy": "steps", "save_steps": 3, "load_best_model_at_end": True, "greater_is_better": True}
    data = {"train_dataset": ragged(NUM_ROWS), "eval_dataset": samples(2 * GLOBAL)}
    trainer = TwinTrainer(model, arguments(Path(root) / name, **options), **data, twin=KINDS[kind])
    trainer.train()
    trainer.evaluate()
    history = trainer.state.log_history
    return {
        "logs": [{key: one[key] for key in ("loss", "grad_norm", "learning_rate")} for one in history if "loss" in one],
        "evals": [one["eval_loss"] for one in history if "eval_loss" in one],
    }


class Uneven(torch.utils.data.IterableDataset[Any]):
    """A stream that has one batch more on the first rank."""

    def __iter__(self) -> Any:
        batch = GLOBAL // num_ranks()
        yield from samples(batch * (4 if os.environ["RANK"] == "0" else 3))


def uneven(root: str, kind: str) -> None:
    """Ranks whose streams have different numbers of batches."""
    from twinflow.integrations.huggingface import TwinTrainer

    class Streams(TwinTrainer):  # type: ignore[misc,valid-type]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                Uneven(), batch_size=GLOBAL // num_ranks(), collate_fn=self.data_collator
            )

    Streams(llama(), arguments(Path(root) / "uneven"), eval_dataset=samples(GLOBAL), twin=KINDS[kind]).train()


class Stream(torch.utils.data.IterableDataset[Any]):
    """Three batches of all ranks: with two micro-batches in a step, it ends between two of them."""

    def __iter__(self) -> Any:
        yield from ragged(3 * GLOBAL)


def stream(root: str, kind: str, name: str, plain: bool = False) -> Any:
    """Trains on a stream for several epochs. The Trainer adds the gradients of its last batch to the next step."""
    import transformers

    from twinflow.integrations.huggingface import TwinTrainer

    twin = {} if plain else {"twin": KINDS[kind]}
    given = arguments(Path(root) / name, max_steps=4, eval_strategy="no")
    trainer = (transformers.Trainer if plain else TwinTrainer)(llama(), given, train_dataset=Stream(), **twin)
    trainer.train()
    history = trainer.state.log_history
    return {
        "logs": [{key: one[key] for key in ("loss", "grad_norm", "learning_rate")} for one in history if "loss" in one]
    }


def seq2seq(root: str, kind: str, name: str) -> Any:
    """The tokens that an encoder-decoder model generates after training, and those of its saved weights."""
    import transformers

    from twinflow.integrations.huggingface import TwinTrainer

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=128, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    )
    given = arguments(Path(root) / name, max_steps=2, eval_strategy="no")
    trainer = TwinTrainer(model, given, train_dataset=samples(NUM_ROWS), twin=KINDS[kind])
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    model.save_pretrained(Path(given.output_dir) / "own")
    trainer.accelerator.wait_for_everyone()
    own = transformers.T5ForConditionalGeneration.from_pretrained(Path(given.output_dir) / "own")
    again = transformers.T5ForConditionalGeneration.from_pretrained(given.output_dir)
    assert all(torch.equal(*pair) for pair in zip(own.parameters(), again.parameters(), strict=True))
    tokens = rows(2 + given.process_index)
    wanted = again.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
    found = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
    return {"found": found.tolist(), "wanted": wanted.tolist()}


def alone_on_rank_0(root: str, kind: str) -> None:
    """Saves on rank 0 only, although all ranks have parts of the weights."""
    from twinflow.dist import meeting
    from twinflow.integrations.huggingface import TwinTrainer

    meeting.PATIENCE_S = 1.0
    given = arguments(Path(root) / "alone", max_steps=1, eval_strategy="no")
    trainer = TwinTrainer(llama(), given, train_dataset=samples(NUM_ROWS), twin=KINDS[kind])
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model()
    else:
        time.sleep(3)


def mistakes(root: str) -> dict[str, str]:
    """The errors for arguments that would train wrongly on several processes."""
    import accelerate
    from torch import nn

    from twinflow.integrations.accelerate import twin_optimizer
    from twinflow.integrations.huggingface import TwinTrainer
    from twinflow.optim.twin import TwinOptimizer

    said: dict[str, str] = {}

    def refused(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
            said[name] = ""
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)

    data = {"train_dataset": samples(NUM_ROWS), "eval_dataset": samples(GLOBAL)}
    folder = Path(root) / "mistakes"
    model = llama()
    twin = TwinOptimizer(model, lr=LR, max_grad_norm=MAX_NORM, accumulation_steps=PARTS, early=True)
    given = TwinTrainer(model, arguments(folder), **data, optimizers=(twin, None))
    refused("given", given.train)
    refused("stage", lambda: TwinTrainer(llama(), arguments(folder), **data, twin={"zero": 4}))
    refused("auto", lambda: TwinTrainer(llama(), arguments(folder, auto_find_batch_size=True), **data))
    uneven = arguments(folder, accelerator_config={"even_batches": False})
    refused("even", lambda: TwinTrainer(llama(), uneven, **data))
    nodes = TwinTrainer(llama(), arguments(folder, save_on_each_node=True), **data, twin={"zero": 3})
    refused("nodes", nodes.train)
    rate = LR * (1 + int(os.environ["RANK"]))
    refused("rates", TwinTrainer(llama(), arguments(folder, learning_rate=rate), **data).train)
    accelerator = accelerate.Accelerator(cpu=True)
    one, two = nn.Linear(4, 1), nn.Linear(4, 1)
    wrapped = accelerator.prepare(one)
    refused("wrapped", lambda: twin_optimizer(accelerator, wrapped))
    refused("inner", lambda: twin_optimizer(accelerator, one))
    optimizer = twin_optimizer(accelerator, two, lr=LR, max_grad_norm=MAX_NORM, zero=1)
    two(torch.ones(2, 4)).sum().backward()
    refused("join", lambda: accelerator.join_uneven_inputs([two]))
    refused("value", lambda: accelerator.clip_grad_value_(two.parameters(), 1.0))
    refused("norm", lambda: accelerator.clip_grad_norm_(two.parameters(), 2 * MAX_NORM))
    optimizer.step()
    return said


def expert_mistakes(root: str) -> dict[str, str]:
    """The errors for arguments that do not go with expert ranks."""
    from twinflow.integrations.huggingface import TwinTrainer

    said: dict[str, str] = {}

    def refused(name: str, twin: dict[str, Any], model: str = "olmoe", **options: Any) -> None:
        try:
            given = arguments(Path(root) / "mistakes", eval_strategy="no", max_steps=1, **options)
            TwinTrainer(model_of(model), given, train_dataset=samples(NUM_ROWS), twin=twin).train()
            said[name] = ""
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)

    size = {"expert_parallel_size": 2}
    refused("size", {"expert_parallel_size": 3})
    refused("stage", {**size, "zero": 3})
    refused("host", {**size, "offload_params": True})
    refused("compiled", size, torch_compile=True)
    refused("dense", size, model="llama")
    refused("rule", size, optim="rmsprop")
    refused("nodes", size, save_on_each_node=True)
    return said


def sft(root: str, kind: str, name: str, num_steps: int = 6) -> Any:
    """TRL's SFTTrainer through the mixin."""
    import datasets
    import tokenizers
    import transformers
    import trl

    from twinflow.integrations.huggingface import TwinMixin

    class TwinSFT(TwinMixin, trl.SFTTrainer):  # type: ignore[misc,name-defined]
        pass

    words = {f"w{i}": i for i in range(128)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="w1", eos_token="w2")
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": rows(NUM_ROWS).tolist()})
    data = datasets.Dataset(table, fingerprint="rows")  # some versions of datasets cannot compute it
    options = {
        key: value
        for key, value in arguments(Path(root) / name, max_steps=num_steps).to_dict().items()
        if key in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "max_steps", "seed")
        or key in ("learning_rate", "logging_steps", "save_strategy", "report_to", "use_cpu", "disable_tqdm")
    }
    given = trl.SFTConfig(str(Path(root) / name), bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, **options)
    trainer = TwinSFT(llama(), given, train_dataset=data, processing_class=tokenizer, twin=KINDS[kind])
    trainer.train()
    trainer.save_model(str(Path(root) / name / "saved"))
    history = trainer.state.log_history
    keys = ("loss", "grad_norm", "learning_rate")
    return {"logs": [{key: one[key] for key in keys} for one in history if "loss" in one]}


def uneven_loop(root: str, kind: str, closes: bool) -> None:
    """A loop of Accelerate whose loader was not prepared: the first rank has one batch more. `closes`: the loop ends
    with a call for all ranks, otherwise with the end of the process.
    """
    import accelerate

    from twinflow.integrations.accelerate import twin_optimizer

    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    optimizer = twin_optimizer(accelerator, model, lr=LR, max_grad_norm=MAX_NORM, **KINDS[kind])
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in rows(4 if os.environ["RANK"] == "0" else 3):
        loss = model(input_ids=batch[None], labels=batch[None]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    float(next(iter(model.parameters())).detach().sum())
    if closes:
        accelerator.save_state(str(Path(root) / "uneven"))
    optimizer.optimizer.close()
