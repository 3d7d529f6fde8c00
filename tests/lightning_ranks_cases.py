# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer on ranks that a test has forked, and in one process: losses, checks and checkpoints."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, MAX_NORM = 1e-2, 0.05
WIDTH, BATCH = 8, 12  # samples of a batch over all ranks: divisible by 1, 2, 3 and 4
OFFLOAD = {"device": "cpu", "bucket_numel": 128}


def config(stage: int, is_weights: bool = False, **others: Any) -> dict[str, Any]:
    """The config of a stage. `is_weights`: the weights of blocks are on the host too."""
    section: dict[str, Any] = {"stage": stage, "offload_optimizer": OFFLOAD}
    if is_weights:
        section["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": section, **others}


def data(count: int) -> Any:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(count, WIDTH, generator=made)
    return torch.utils.data.TensorDataset(x, x.square().sum(1, keepdim=True).sin())


def module_class() -> Any:
    """The LightningModule, in a function because importing Lightning takes seconds."""
    import lightning.pytorch as pl

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
            self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
            self.losses, self.checks, self.seen = list[float](), list[float](), list[float]()

        def _loss(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self._loss(batch)
            self.log("train", loss, sync_dist=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("check", self._loss(batch), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.checks.append(float(self.trainer.callback_metrics["check"]))

        def test_step(self, batch: Any, index: int) -> None:
            self.log("tested", self._loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> Tensor:
            found: Tensor = self.model(batch[0])
            return found

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module


def trainer(folder: Path, strategy: Any, world: int, steps: int, **options: Any) -> Any:
    import lightning.pytorch as pl

    given = {
        "accelerator": "cpu",
        "devices": world,
        "max_steps": steps,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": MAX_NORM,
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(strategy=strategy, **{**given, **options})


def as_torchrun(rank: int, world: int) -> None:
    """Sets the variables of torchrun, whose environment Lightning then detects."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in own.items()})


def mean(values: list[float]) -> list[float]:
    """The mean over ranks of each value."""
    if not dist.is_initialized():
        return values
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, values)
    return [sum(column) / len(every) for column in zip(*every, strict=True)]


def loader(world: int, count: int = 10 * BATCH, shuffles: bool = False) -> Any:
    """With `shuffles`, one process gets the order of the sampler that Lightning gives to several."""
    found = data(count)
    sampler = torch.utils.data.DistributedSampler(found, 1, 0) if shuffles and world == 1 else None
    return torch.utils.data.DataLoader(found, batch_size=BATCH // world, sampler=sampler)


def twin(given: dict[str, Any]) -> Any:
    from twinflow.integrations.lightning import TwinStrategy

    return TwinStrategy(config=given)


STEPS = 15  # an epoch has 10 batches, which are 5 steps
SAVED = "step=10.ckpt"


def options_of(folder: str, given: Any, **options: Any) -> dict[str, Any]:
    """Checkpoints as folders (with `given`) and as files of weights."""
    import lightning.pytorch as pl

    made, every = pl.callbacks.ModelCheckpoint, {"save_top_k": -1}
    kept = [*options.pop("more", ()), made(folder, filename="{step}", monitor="check", every_n_train_steps=5, **every)]
    if given is not None:
        kept += [made(folder, filename="weights-{step}", every_n_train_steps=10, save_weights_only=True, **every)]
    return {"callbacks": kept, "enable_checkpointing": True, "val_check_interval": 4, **options}


def fit(
    rank: int, world: int, given: Any, folder: str, options: Any, resume: str | None = None, steps: int = STEPS
) -> Any:
    """Losses and checks of a fit. `given`: the config; None: plain Lightning in one process."""
    if given is not None and world > 1:
        as_torchrun(rank, world)
    module = module_class()()
    strategy = "auto" if given is None else twin(given)
    made = trainer(Path(folder), strategy, world, steps, **options_of(folder, given, **options))
    made.fit(module, loader(world, shuffles=True), loader(world, 2 * BATCH), ckpt_path=resume)
    return {"losses": mean(module.losses), "checks": module.checks}


def live(rank: int, world: int, given: Any, folder: str, plain: str) -> Any:
    """A fit; validation, test and prediction with the last weights and with the best ones; a fit that continues from
    `plain`, a file of plain Lightning.
    """
    if given is not None and world > 1:
        as_torchrun(rank, world)
    kind = module_class()
    module = kind()
    options = options_of(folder, given)
    made = trainer(Path(folder), "auto" if given is None else twin(given), world, STEPS, **options)
    made.fit(module, loader(world, shuffles=True), loader(world, 2 * BATCH))
    found: dict[str, Any] = {"losses": mean(module.losses), "checks": module.checks}
    few = loader(world, 2 * BATCH)
    found["best"] = Path(options["callbacks"][0].best_model_path).name
    found["last"] = made.validate(module, few, verbose=False)[0]["check"]
    made.save_checkpoint(f"{folder}/after.ckpt", weights_only=True)
    found["tested"] = made.test(module, few, ckpt_path="best", verbose=False)[0]["tested"]
    found["predicted"] = mean([float(batch.mean()) for batch in made.predict(module, few, ckpt_path="best")])
    fresh = kind()
    found["fresh"] = made.test(fresh, few, ckpt_path=f"{folder}/{SAVED}", verbose=False)[0]["tested"]
    resumed = kind()
    again = trainer(Path(folder), "auto" if given is None else twin(given), world, STEPS, val_check_interval=4)
    again.fit(resumed, loader(world, shuffles=True), loader(world, 2 * BATCH), ckpt_path=plain)
    found["resumed"] = mean(resumed.losses)
    return found


def sums(rank: int, world: int, paths: list[str]) -> Any:
    """The sums of the weights in files of Lightning."""
    kind = module_class()
    loaded = [kind.load_from_checkpoint(path, weights_only=True) for path in paths]
    return [[float(param.double().sum()) for param in module.parameters()] for module in loaded]


def gan(base: Any, clip: tuple[float, str] | None = None) -> Any:
    """A module with two optimizers that are stepped by hand."""

    class Gan(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.judge = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
            self.more = nn.Linear(1, 1)  # trained by the optimizer of the judge too
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch: Any, index: int) -> None:
            first, second = self.optimizers()
            self.count += 1
            x, y = batch
            self.toggle_optimizer(first)
            loss: Tensor = self._loss(batch) - 0.1 * self.more(self.judge(self.model[0](x))).mean()
            first.zero_grad()
            self.manual_backward(loss)
            if clip is not None:
                self.clip_gradients(first, *clip)
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            other = (self.more(self.judge(self.model[0](x).detach())) - y).square().mean()
            second.zero_grad()
            self.manual_backward(other)
            second.step()
            self.untoggle_optimizer(second)
            self.losses += [loss.item(), other.item()]

        def configure_optimizers(self) -> Any:
            theirs = [*self.judge.parameters(), *self.more.parameters()]
            return [torch.optim.AdamW(self.model.parameters(), lr=1e-2), torch.optim.SGD(theirs, lr=1e-2, momentum=0.9)]

    return Gan


MANUAL = {"accumulate_grad_batches": 1, "gradient_clip_val": None}


def fit_gan(rank: int, world: int, given: Any, folder: str, clip: Any, resume: str | None = None) -> Any:
    """Losses of a module with two optimizers."""
    import lightning.pytorch as pl

    if given is not None and world > 1:
        as_torchrun(rank, world)
    module = gan(module_class(), clip)()
    strategy = "auto" if given is None else twin(given)
    kept = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=20, save_top_k=-1)
    options = {**MANUAL, "callbacks": [kept], "enable_checkpointing": True}
    made = trainer(Path(folder), strategy, world, 40, **options)
    made.fit(module, loader(world, shuffles=True), loader(world, 2 * BATCH), ckpt_path=resume)
    return {"losses": mean(module.losses), "checks": module.checks}


def killed(rank: int, world: int, given: Any, folder: str, step: int) -> Any:
    """A fit in which the last rank is killed at the start of a step. Each rank writes its errors to a file."""
    import lightning.pytorch as pl

    Path(folder).mkdir(exist_ok=True)
    os.dup2(os.open(Path(folder) / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)

    class Dying(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: object) -> None:
            if trainer.global_step == step and trainer.global_rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    return fit(rank, world, given, folder, {"more": [Dying()]})
