"""The engine's loop, with the calls that DeepSpeed users know: engine(batch), backward(loss), step().

A step that may be skipped (fp16 overflow, a gradient that is not finite) is known to be one only when its backward has
ended on the device. `step` does not wait for that: the scheduler and the counters follow in `settle`, at the next
moment where somebody looks at them or the next backward needs the loss scale. By then the next forward is queued.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from twinflow.activations import Handle
from twinflow.checkpoint import Entry, export_weights
from twinflow.dist.agree import gather_json
from twinflow.engine import restore, state
from twinflow.engine.answers import Answers, instead
from twinflow.engine.background import BackgroundSave
from twinflow.engine.loader import ResumableLoader
from twinflow.engine.parts import Scheduler
from twinflow.engine.reports import Reports
from twinflow.engine.settings import EngineSettings
from twinflow.engine.values import UserValue, cast_floats
from twinflow.errors import invalid_value
from twinflow.launch.watch import Watch
from twinflow.offload.blocks import find_blocks
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.tensor import same_randoms
from twinflow.state_dict import StateDict


class Engine(Answers):
    """One model, its optimizer and what belongs to them. Attributes it does not have are the module's."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: TwinOptimizer | None,
        scheduler: Scheduler | None,
        loader: Iterable[UserValue] | None,
        settings: EngineSettings,
        reports: Reports,
        activations: Handle | None = None,
        watch: Watch | None = None,
        scales_plain_backwards: bool = True,
    ) -> None:
        """`scales_plain_backwards`: gradients of a plain `loss.backward()` get the loss scale."""
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = scheduler
        self.training_dataloader: Iterable[UserValue] | None = loader
        self.settings = settings
        self.reports = reports
        self.activations = activations  # checkpointed layers
        self.watch = watch  # over the other ranks
        self.background: BackgroundSave | None = None  # the checkpoint that is being written
        self.global_steps = 0  # steps at an accumulation boundary, skipped ones included
        self.micro_steps = 0
        self.global_samples = 0
        self._is_pending = False  # the last step's outcome has not been looked at
        self._was_boundary = False
        self.part = 0  # micro-batches of the step under way
        self._is_scaled = False  # the loss of the backward under way has the loss scale in it
        self._is_last: bool | None = None  # whether the caller has said that this one is the last of them
        self._lr_kwargs: StateDict = {}
        self._handles: list[RemovableHandle] = []  # of hooks that scale gradients
        if optimizer is not None:
            me = weakref.ref(self)
            optimizer.runtime.call_before_update(lambda: _settle(me()))
            if optimizer.scales_loss and scales_plain_backwards:
                self._handles = _scale_plain_backwards(optimizer, me)

    def __getattr__(self, name: str) -> UserValue:
        if name.startswith("__") or name == "module":
            raise AttributeError(name)
        try:
            found = getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its module has an attribute {name!r}{instead(name)}"
            ) from None
        return found

    # The loop.

    def __call__(self, *args: object, **kwargs: object) -> UserValue:
        """The module's forward."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> UserValue:
        """The module's forward, under autocast and with inputs cast where the config says so."""
        self._beat("forward")
        self._is_scaled = False
        if self.settings.input_dtype is not None:
            args, kwargs = cast_floats((args, kwargs), self.settings.input_dtype)
        with self.reports.forward(self), self._autocast():
            return self.module(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.settings.autocast)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of a micro-batch's loss, which counts for its share of the step; returns that share."""
        optimizer = self._need_optimizer()
        if not isinstance(loss, Tensor):
            raise invalid_value(
                "loss", loss, "a tensor with a graph behind it, as the model or a loss function returns it"
            )
        self._beat("backward")
        self.settle()
        steps = self.gradient_accumulation_steps()
        if scale_wrt_gas and steps > 1:
            loss = loss / steps
        self.reports.add_loss(loss)
        before, self._is_scaled = self._is_scaled, True
        try:
            with self.reports.backward():
                optimizer.backward(loss, retain_graph)
        finally:
            self._is_scaled = before
        return loss

    def leave_plain_backwards(self) -> None:
        """From now on gradients of a plain `loss.backward()` do not get the loss scale: the caller scales losses."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def release_scheduler(self) -> None:
        """From now on somebody else steps and saves the scheduler."""
        self.lr_scheduler = None

    def count_from(self, global_steps: int) -> None:
        """The number of steps so far, where somebody else counts them."""
        self.global_steps = global_steps

    def scale(self, loss: Tensor) -> Tensor:
        """What to call `.backward()` on, in place of `engine.backward(loss)`."""
        self.settle()
        loss = loss / self.gradient_accumulation_steps()
        self.reports.add_loss(loss)
        optimizer = self._need_optimizer()
        self._is_scaled = True  # until the next forward, or the step
        return loss * optimizer.loss_scale

    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """After every micro-batch: at the last of a step the optimizer steps, else this only counts."""
        lr = self._count_step(lr_kwargs)
        if self._was_boundary:
            self.reports.after_step(self, lr)

    def _count_step(self, lr_kwargs: Mapping[str, object] | None = None) -> float:
        """The same without a word to anybody; the learning rate that it has used."""
        optimizer = self._need_optimizer()
        self._beat("step")
        self._was_boundary = self.is_gradient_accumulation_boundary()
        lr = float(optimizer.param_groups[0]["lr"])  # of this step
        if self._was_boundary:
            with self.reports.step():
                optimizer.step()
                optimizer.zero_grad()
            self._is_scaled = False
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self._is_pending, self._lr_kwargs = True, dict(lr_kwargs or {})
            if not optimizer.can_skip:
                self.settle()
        self.micro_steps += 1
        self.part = 0 if self._was_boundary else self.part + 1
        return lr

    def settle(self) -> None:
        """The last step's outcome is needed now: a step that was applied moves the schedule."""
        if not self._is_pending:
            return
        self._is_pending = False
        is_applied = self.optimizer is not None and (not self.optimizer.can_skip or self.optimizer.was_applied)
        if is_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**self._lr_kwargs)
            self._check_rates()

    def _check_rates(self) -> None:
        """Say whose fault it is, before the update rule refuses a learning rate."""
        optimizer = self.optimizer
        for group in optimizer.param_groups if optimizer is not None and optimizer.rule is not None else ():
            lr = float(group["lr"])
            if not (math.isfinite(lr) and lr >= 0.0):
                raise invalid_value("lr as the scheduler has set it", lr, "a finite number >= 0")

    def _beat(self, doing: str) -> None:
        """Other ranks know that this one goes on."""
        if self.watch is not None:
            self.watch.beat(self.global_steps + 1, doing)

    def _pause(self, doing: str) -> AbstractContextManager[object]:
        """Something that takes longer than a step."""
        return self.watch.pause(doing) if self.watch is not None else nullcontext()

    def _need_optimizer(self) -> TwinOptimizer:
        if self.optimizer is None:
            raise RuntimeError("the engine has no optimizer: name one in the config, or give one to initialize()")
        return self.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used; the next micro-batch is the first of a step."""
        self.part = 0
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> Engine:
        """Put the module into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module into evaluation mode."""
        return self.train(False)

    def no_sync(self) -> AbstractContextManager[object]:
        """Around backwards whose gradients stay on this rank until the step's last: with stages 0 and 1 they do so
        anyway. With stage 2 no rank keeps a sum of its own."""
        if self.dp_world_size > 1 and self.settings.stage >= 2:
            remedy = "Leave no_sync() out, or use stage 1."
            raise invalid_value("no_sync() with zero_optimization.stage", self.settings.stage, (0, 1), remedy)
        return nullcontext()

    # What it knows.

    @property
    def basic_optimizer(self) -> TwinOptimizer | None:
        """The optimizer: there is nothing wrapped around it."""
        return self.optimizer

    @property
    def skipped_steps(self) -> int:
        """Steps that were not applied, because a gradient was not finite."""
        self.settle()
        return self.optimizer.num_skipped if self.optimizer is not None else 0

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return self.part + 1 >= self.gradient_accumulation_steps() if self._is_last is None else self._is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the micro-batch under way is the last of its step, from now on until said otherwise; None: the
        engine counts. A step may have fewer than the config's number of them, and not more."""
        self._is_last = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the model."""
        self.settle()
        return self._was_boundary and self.optimizer is not None and self.optimizer.was_applied

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that make a step."""
        return self.optimizer.accumulation_steps if self.optimizer is not None else 1

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self.settings.micro_batch_size

    def train_batch_size(self) -> int:
        """Samples of a step, on all ranks."""
        return self.settings.micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, of a micro-batch, and micro-batches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Other steps from now on: the micro-batch stays, their number changes."""
        micro = self.settings.micro_batch_size * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % micro:
            raise invalid_value(
                "train_batch_size", train_batch_size, f"a multiple of the micro-batches of all ranks, which is {micro}"
            )
        if self.part:
            raise RuntimeError("set_train_batch_size() in the middle of a step. Call it after a boundary's step()")
        self._need_optimizer().set_accumulation_steps(train_batch_size // micro)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Micro-batches of another size from now on; a step has as many of them as before."""
        if micro_batch_size < 1:
            raise invalid_value("micro_batch_size", micro_batch_size, "a whole number >= 1")
        self.settings = replace(self.settings, micro_batch_size=micro_batch_size)

    def get_lr(self) -> list[float]:
        """Learning rate of each param group, for the next step."""
        self.settle()
        return [float(group["lr"]) for group in self._need_optimizer().param_groups]

    def get_mom(self) -> list[float | tuple[float, float] | None]:
        """Momentum, or betas, of each param group."""
        self.settle()
        return [group.get("betas", group.get("momentum")) for group in self._need_optimizer().param_groups]

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> bool:
        """Write everything needed to go on exactly as if nothing had happened, into `save_dir`/`tag`.

        With `checkpoint.background` in the config it is written beside the steps that follow, after the one before;
        what went wrong then is raised by the next call of this, of `wait_for_checkpoint` or of `destroy`.
        """
        self.wait_for_checkpoint()
        self.settle()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        client = dict(client_state or {})
        with self._pause("saving"):
            self.background = state.save(
                self, Path(save_dir), tag, client, save_latest, exclude_frozen_parameters, on_progress
            )
        return True

    def wait_for_checkpoint(self) -> None:
        """Until the checkpoint that is being written in the background, if there is one, is complete."""
        background, self.background = self.background, None
        if background is not None:
            with self._pause("saving"):
                background.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, dict[str, UserValue]]:
        """Take over a checkpoint: its folder and client state; (None, {}) where `load_dir` has none.

        All of it is checked before anything changes.
        """
        self.wait_for_checkpoint()
        self.settle()
        what = restore.What(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            everything_else=not load_module_only,
            custom_load_fn=custom_load_fn,
        )
        with self._pause("loading"):
            found = restore.load(self, Path(load_dir), tag, what)
        grid = self.settings.grid
        if grid is not None and grid.num_model > 1:
            same_randoms(grid.model, self.device)  # what tensor ranks draw has to be the same
        return found

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights as they are on the device, as safetensors that other libraries read."""
        remedy = "Save a checkpoint, and make files of it with `twinflow export`."
        if self.settings.stage == 3 and self.world_size > 1:
            raise invalid_value("save_16bit_model() with zero_optimization.stage", 3, (0, 1, 2), remedy)
        grid = self.settings.grid
        if grid is not None and grid.num_pipe * grid.num_model > 1:
            raise invalid_value("save_16bit_model() with", "pipeline or tensor ranks", "neither", remedy)
        if self.optimizer is not None:
            self.optimizer.wait()
        if self.global_rank > 0:
            return True  # all ranks have the same weights, and the first one writes them
        folder = Path(save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        entries = [Entry(*leaf) for leaf in state.weights(self.module, exclude_frozen_parameters)[0]]
        export_weights(entries, folder / save_filename)
        return True

    save_fp16_model = save_16bit_model

    # The rest.

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, object] | None = None) -> None:
        """torch.compile each block by itself: the waits for its weights stay outside the graph."""
        compiled: Callable[..., Callable[..., object]] = torch.compile
        for block in find_blocks(self.module):
            module = block.module
            module.forward = compiled(module.forward, backend=backend, **(compile_kwargs or {}))

    def set_training_data(self, dataset: Dataset[object], collate_fn: Callable[..., object] | None) -> None:
        """Make the engine's own loader of a dataset."""
        self.training_dataloader = self.deepspeed_io(dataset, collate_fn=collate_fn)

    def deepspeed_io(
        self,
        dataset: Dataset[object],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        collate_fn: Callable[..., object] | None = None,
        num_local_io_workers: int = 0,
    ) -> ResumableLoader:
        """A data loader in the engine's batch size."""
        batch_size = self.settings.micro_batch_size if batch_size is None else batch_size
        return ResumableLoader(
            dataset,
            batch_size,
            collate_fn,
            self.settings.drop_last,
            num_local_io_workers,
            seed=self._same_seed() if route == "train" else None,  # others have no order to agree on
            pin_memory=pin_memory,
            shuffle=route == "train",
            share=(self.dp_rank, self.dp_world_size),
        )

    def _same_seed(self) -> int:
        """All ranks draw from one order of the samples."""
        seed = torch.initial_seed() % (1 << 63)
        team = self.optimizer.team if self.optimizer is not None else None
        return seed if team is None else int(gather_json(team.everyone, seed)[0])

    def destroy(self) -> None:
        """Finish what has begun and give memory and threads back; the module stays usable."""
        with ExitStack() as last_first:
            if self.watch is not None:
                last_first.callback(self.watch.close)
            if self.optimizer is not None:
                last_first.callback(self.optimizer.close)
            if self.activations is not None:
                last_first.callback(self.activations.remove)
            last_first.callback(self.reports.close)
            last_first.callback(self.wait_for_checkpoint)
            self.settle()
            self.optimizer = self.activations = None
            self.leave_plain_backwards()


def _settle(engine: Engine | None) -> None:
    """An update is about to begin: it uses the learning rate that follows from the last step."""
    if engine is not None:
        engine.settle()


def _scale_plain_backwards(optimizer: TwinOptimizer, engine: weakref.ref[Engine]) -> list[RemovableHandle]:
    """With a loss scale all gradients of a step have to have it, those of a plain `loss.backward()` too."""

    def scale(grad: Tensor) -> Tensor:
        it = engine()
        if it is None or it.optimizer is None or it._is_scaled:
            return grad
        return grad * it.optimizer.loss_scale

    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.register_hook(scale) for param in params]
