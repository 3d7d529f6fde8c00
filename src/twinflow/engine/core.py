# SPDX-License-Identifier: Apache-2.0
"""The engine: the training loop with DeepSpeed's calls, engine(batch), backward(loss) and step().

A step is skipped if a gradient is not finite (for example an fp16 overflow). This is known only when the backward has
ended on the device, and `step` does not wait for it. `settle` waits and advances the scheduler if the step was applied.
It runs when a caller reads the learning rate or a counter, and when the next backward needs the loss scale. By then the
next forward is queued on the device.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from twinflow.activations import Handle
from twinflow.checkpoint import Entry, export_weights
from twinflow.conflicts import conflict
from twinflow.dist.agree import gather_json
from twinflow.engine import restore, state
from twinflow.engine.base import EngineBase, EngineSettings, Scheduler
from twinflow.engine.deepspeed_api import ANSWERS, Own, Refused, attribute
from twinflow.engine.loader import ResumableLoader
from twinflow.engine.reports import LOGGER, Reports
from twinflow.engine.state import BackgroundSave
from twinflow.engine.values import UserValue, cast_floats
from twinflow.errors import incompatible, invalid_value, unusable_path, wrong_state
from twinflow.files import replace_file
from twinflow.launch.watch import Watch
from twinflow.optim.inference import HostWeights
from twinflow.optim.twin import TwinOptimizer
from twinflow.optim.twin_checks import check_loss
from twinflow.optim.whole import whole_weights
from twinflow.parallel.replica import Replica
from twinflow.parallel.tensor import same_randoms
from twinflow.speedups import compile_blocks

# States that `offload_states` moves, and those that it does not.
MOVABLE = ("optim_states", "hp_params")
UNMOVED = ("lp_params", "lp_grads", "contiguous_grad_buffer")


# Methods of nn.Module that convert its weights, and the dtype of the result.
CONVERSIONS = {"bfloat16": torch.bfloat16, "double": torch.float64, "float": torch.float32, "half": torch.float16}
# Methods of nn.Module that return the module itself.
CHAINED = frozenset(("apply", "bfloat16", "cpu", "cuda", "double", "float", "half", "requires_grad_", "to", "type"))


class Engine(EngineBase):
    """Trains a module: forward, backward, step, checkpoints. `twinflow.initialize()` builds it from a config.

    One step:

        for inputs, targets in loader:
            loss = loss_fn(engine(inputs), targets)
            engine.backward(loss)
            engine.step()

    `step()` is called after every micro-batch. The optimizer steps after `gradient_accumulation_steps()` of them. An
    attribute that the engine does not have is looked up in the module. `repr(engine)` shows batch sizes, ranks, the
    ZeRO stage, and the optimizer with ratio, states, placement and memory.
    """

    scales_plain_backwards = True  # multiply gradients of a plain `loss.backward()` by the loss scale too

    def __init__(
        self,
        module: nn.Module,
        optimizer: TwinOptimizer | None,
        scheduler: Scheduler | None,
        settings: EngineSettings,
        reports: Reports,
        activations: Handle | None = None,
        watch: Watch | None = None,
        host_weights: HostWeights | None = None,
    ) -> None:
        super().__init__(module, optimizer, scheduler, settings, watch)
        self.reports = reports
        self.has_frozen = host_weights is not None
        self.host_weights = host_weights
        self.activations = activations  # activation checkpointing
        self.background: BackgroundSave | None = None  # the checkpoint that is being written
        self._replica = Replica(settings.grid) if settings.grid is not None else None
        self.is_compiled = settings.parsed.compile.blocks
        self._is_scaled = False  # the loss of this backward contains the loss scale
        self._is_last: bool | None = None  # set by set_gradient_accumulation_boundary()
        self._handles: list[RemovableHandle] = []  # hooks that scale gradients
        if optimizer is not None:
            me = weakref.ref(self)
            optimizer.runtime.call_before_update(lambda: _settle(me()))
            if settings.is_background:
                optimizer.reserve_for_saves(settings.background_bytes)
            if optimizer.scales_loss and self.scales_plain_backwards:
                self._handles = _scale_plain_backwards(optimizer, me)

    def __getattr__(self, name: str) -> UserValue:
        if name.startswith("__") or name in ("module", "settings"):
            raise AttributeError(name)
        method = ANSWERS.get(name)
        if method is not None and not isinstance(method, Own | Refused):
            return attribute(method, self.settings.parsed)
        try:
            found = getattr(self.module, name)
            return self._returning_me(name, found) if name in CHAINED else found
        except AttributeError:
            if isinstance(method, Refused):
                remedy = method.remedy
            else:
                near = get_close_matches(name, [one for one in (*dir(self), *ANSWERS) if not one.startswith("_")], n=1)
                remedy = f"Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(
                f"Neither the engine nor its module has an attribute {name!r}. {remedy}".rstrip()
            ) from None

    def _returning_me(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        """A method of the module that returns the engine instead of the module, so that `engine = engine.to(device)`
        keeps the engine.
        """

        def call(*args: object, **kwargs: object) -> object:
            dtypes = {param.dtype for param in self.module.parameters() if param.is_floating_point()}
            is_on_host = state.param_offload_of(self) is not None
            if is_on_host and name in CONVERSIONS and dtypes != {CONVERSIONS[name]}:
                raise wrong_state(
                    f"{name}() cannot convert the weights",
                    "they are on the host, and a conversion of the module does not reach them",
                    f"Call model.{name}() before you build the engine, or set fp16 or bf16 in the config.",
                )
            found = method(*args, **kwargs)
            return self if found is self.module else found

        return call

    def __repr__(self) -> str:
        """Module, ranks, batch sizes, ZeRO stage and steps, then the optimizer with ratio, placement and memory."""
        params = list(self.module.parameters())
        numel, trained = sum(p.numel() for p in params), sum(p.numel() for p in params if p.requires_grad)
        batch = f"{self.settings.micro_batch_size} x {self.gradient_accumulation_steps()} x {self.dp_world_size}"
        lines = [
            f"module: {type(self.module).__name__} on {self.device}, {numel} parameters, {trained} of them trainable",
            f"rank: {self.global_rank} of {self.world_size}",
            f"zero_optimization.stage: {self.settings.stage}",
            f"batch: {self.train_batch_size()} samples (micro-batch size x micro-batches x replicas: {batch})",
            f"steps: {self.global_steps}",
            *f"optimizer: {self.optimizer!r}".splitlines(),
        ]
        return f"{type(self).__name__}(\n" + "".join(f"    {line}\n" for line in lines) + ")"

    # The loop.

    def __call__(self, *args: object, **kwargs: object) -> UserValue:
        return self.forward(*args, **kwargs)

    def forward(self, *args: object, **kwargs: object) -> UserValue:
        """Calls the module, under autocast and with inputs cast to half precision if the config says so."""
        self._beat("forward")
        self._is_scaled = False
        if self.settings.input_dtype is not None:
            args, kwargs = cast_floats((args, kwargs), self.settings.input_dtype)
        if self._replica is not None:
            self._replica.check_inputs(args, kwargs, self.device)
            self._compare_copies()
        with self.reports.forward(self), self._autocast():
            return self.module(*args, **kwargs)

    def _compare_copies(self, is_due: bool = False) -> None:
        if self._replica is not None and self.part == 0:
            self._replica.compare_copies(self.module, self.global_steps, is_due)

    def _check_pending(self) -> None:
        """Raises ValueError if tensor ranks got different batches, which is not yet known in forward on a GPU."""
        if self._replica is not None:
            self._replica.check_pending()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.settings.autocast)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Computes gradients of a micro-batch's loss. Returns the loss divided by the number of micro-batches.

        `scale_wrt_gas=False`: the caller has divided the loss already.
        """
        optimizer = self._need_optimizer()
        check_loss(loss)
        self._beat("backward")
        self._check_pending()
        self.settle()
        if self.sequence is not None and not self.micro_steps:
            self.sequence.check_loss(loss)
        steps = self.gradient_accumulation_steps()
        if scale_wrt_gas and steps > 1:
            loss = loss / steps
        self.reports.add_loss(loss)
        before, self._is_scaled = self._is_scaled, True
        try:
            with self.reports.measure("backward"):
                optimizer.backward(loss, retain_graph)
        finally:
            self._is_scaled = before
        return loss

    def leave_plain_backwards(self) -> None:
        """Stops scaling gradients of a plain `loss.backward()`, because the caller scales losses."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def release_scheduler(self) -> None:
        """Removes the scheduler from the engine, because the caller steps and saves it."""
        self.lr_scheduler = None

    def count_from(self, global_steps: int) -> None:
        """Sets the number of steps, for a caller that counts them itself."""
        self.global_steps = global_steps

    def scale(self, loss: Tensor) -> Tensor:
        """The loss divided by the number of micro-batches, times the loss scale. Callers of this method call
        `.backward()` on the result instead of `engine.backward(loss)`."""
        self._check_pending()
        self.settle()
        loss = loss / self.gradient_accumulation_steps()
        self.reports.add_loss(loss)
        optimizer = self._need_optimizer()
        self._is_scaled = True  # until the next forward, or the step
        return loss * optimizer.loss_scale

    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """Call it after every micro-batch. The optimizer steps after the last one of a step.

        `lr_kwargs` are passed to the scheduler's step(). On one rank, a call without gradients changes nothing, neither
        counters nor the scheduler. With several ranks such a call is counted, because other ranks may have
        gradients.
        """
        lr = self._count_step(lr_kwargs)
        if self._was_boundary:
            self.reports.after_step(self, lr)

    def _count_step(self, lr_kwargs: Mapping[str, object] | None = None) -> float:
        """`step` without reports. Returns the learning rate of this step."""
        optimizer = self._need_optimizer()
        self._beat("step")
        self._check_pending()
        lr = float(optimizer.param_groups[0]["lr"])  # of this step
        self._was_boundary = False
        if optimizer.team is None and not _has_gradients(optimizer):
            optimizer.step()  # runs the hooks of the optimizer and nothing else, as with torch
            return lr
        self._was_boundary = self.is_gradient_accumulation_boundary()
        if self._was_boundary:
            with self.reports.measure("step"):
                optimizer.step()
                optimizer.zero_grad()
            self._is_scaled = False
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self._is_pending, self._lr_kwargs = True, dict(lr_kwargs or {})
            if not optimizer.can_skip or optimizer.is_decided:
                self.settle()
        self.micro_steps += 1
        self.part = 0 if self._was_boundary else self.part + 1
        return lr

    def _beat(self, doing: str) -> None:
        """Reports to the watch for hangs that this rank makes progress."""
        if self.watch is not None:
            self.watch.beat(self.global_steps + 1, doing)

    def _pause(self, doing: str) -> AbstractContextManager[object]:
        """Tells the watch for hangs that the next operation takes longer than a step."""
        return self.watch.pause(doing) if self.watch is not None else nullcontext()

    def train(self, mode: bool = True) -> Engine:
        """Puts the module into training mode, or with `mode=False` into evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Puts the module into evaluation mode."""
        return self.train(False)

    def no_sync(self) -> AbstractContextManager[object]:
        """A context for backwards whose gradients are not yet summed over ranks.

        It has no effect with ZeRO stages 0 and 1: ranks sum gradients only after the last micro-batch of a step. It
        raises ValueError with stages 2 and 3 on several replicas, where no rank keeps its own gradients.
        """
        if self._num_zero > 1 and self.settings.stage >= 2:
            raise conflict("ZeRO stages 2 and 3", "no_sync", stage_2_or_3=self.settings.stage)
        return nullcontext()

    # Properties.

    def steps_per_print(self) -> int | None:
        """Number of steps between two log lines; None: no log lines."""
        return self.reports.every

    @property
    def monitor(self) -> Reports:
        """The monitors of the config. `engine.monitor.write_events(events)` writes the user's own scalars."""
        return self.reports

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last one of its step."""
        return self.part + 1 >= self.gradient_accumulation_steps() if self._is_last is None else self._is_last

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Sets whether the present micro-batch is the last one of its step, until the next call of this method.

        None: the engine counts micro-batches. A step may have fewer micro-batches than the config says, but not more.
        """
        if is_boundary not in (True, False, None):
            raise invalid_value("is_boundary", is_boundary, [True, False, None])
        self._is_last = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of samples in a step by changing the number of micro-batches."""
        micro = self.settings.micro_batch_size * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % micro:
            expected = f"a positive multiple of {micro}, the samples of one micro-batch on all ranks"
            raise invalid_value("train_batch_size", train_batch_size, expected)
        if self.part:
            raise wrong_state(
                "set_train_batch_size() cannot run in the middle of a step",
                f"the step has {self.part} micro-batches already",
                "Call it after the step() of the last micro-batch.",
            )
        self._need_optimizer().set_accumulation_steps(train_batch_size // micro)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the size of micro-batches. The number of micro-batches in a step stays."""
        if micro_batch_size < 1:
            raise invalid_value("micro_batch_size", micro_batch_size, "a whole number >= 1")
        self.settings = replace(self.settings, micro_batch_size=micro_batch_size)

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
        """Writes a checkpoint to `save_dir`/`tag`, from which training continues with the same results.

        `client_state` is returned by `load_checkpoint`. `on_progress(written, total)` is called with numbers of bytes.
        With `checkpoint.background` in the config, a thread writes the checkpoint while training continues. If that
        fails, the next call of this method, of `wait_for_checkpoint` or of `destroy` raises the exception. Raises
        RuntimeError between the micro-batches of a step. Warns if backward() was called after the last step(), because
        gradients are not saved.
        """
        self._check_open("save_checkpoint()")
        self._check_exclusion(exclude_frozen_parameters)
        self.wait_for_checkpoint()
        self.settle()
        self._compare_copies(is_due=True)
        if self.part == 0 and self.optimizer is not None and self.optimizer.runtime.has_gradients:
            warnings.warn(
                "save_checkpoint() was called between backward() and step(). The checkpoint does not contain the "
                "gradients of this unfinished step, so a run that loads it does not make this step. Call "
                "save_checkpoint() after step().",
                stacklevel=2,
            )
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        if client_state is not None and not isinstance(client_state, Mapping):
            remedy = 'Write client_state={"name": value}.'
            raise invalid_value("client_state", client_state, "a dict, or None", remedy)
        client = dict(client_state or {})
        with self._pause("saving"):
            self.background = state.save(
                self, _path("save_dir", save_dir), tag, client, save_latest, exclude_frozen_parameters, on_progress
            )
        return True

    def wait_for_checkpoint(self) -> None:
        """Waits until the checkpoint in the background, if there is one, is complete."""
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
        """Loads a checkpoint. Returns its folder and its client state; (None, {}) if `load_dir` has no checkpoint.

        `tag=None` loads the latest one. The checkpoint is checked completely before the engine changes.
        `custom_load_fn(src=weights, dst=module)` replaces the loading of weights.
        """
        self._check_open("load_checkpoint()")
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
            found = restore.load(self, _path("load_dir", load_dir), tag, what)
        grid = self.settings.grid
        if grid is not None and grid.num_model > 1:
            same_randoms(grid.model, self.device)  # tensor ranks must draw the same random numbers
        self._forget_data_iterator()
        return found

    def _forget_data_iterator(self) -> None:
        """Called after the position of the data loader has changed. PipelineEngine then drops its iterator."""

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str | None = None, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights in the dtype of the model to a file: in the format of safetensors if the name ends so, and
        otherwise of torch.save. The default name is model.safetensors; with DeepSpeed's names it is pytorch_model.bin.
        Rank 0 writes the file. With ZeRO stage 3, tensor or expert ranks all ranks must call this method. Raises
        ValueError with pipeline stages.
        """
        reason, remedy = "each rank has only its layers", "Save a checkpoint and use `twinflow export`."
        grid = self.settings.grid
        if grid is not None and grid.num_pipe > 1:
            raise incompatible("save_16bit_model()", "pipeline parallelism", reason, remedy)
        self._check_exclusion(exclude_frozen_parameters)
        folder = _path("save_dir", save_dir)
        save_filename = self.settings.weights_file if save_filename is None else save_filename
        call = "save_16bit_model()"
        if self._has_parts:
            found = self._gathered_state_dict(call, exclude_frozen=exclude_frozen_parameters)
        elif self._whole is not None:
            found = self._whole.state_dict(call, exclude_frozen=exclude_frozen_parameters)
        elif self.global_rank == 0:
            source = self.optimizer if self.optimizer is not None else self.module
            found = dict(whole_weights(source, exclude_frozen_parameters, call))
        if self.global_rank > 0:
            return True
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable_path("save_dir", folder, "a folder that exists or can be created", error) from error
        if save_filename.endswith(".safetensors"):
            # Each tensor is written once, under its first name, because files of safetensors have no shared tensors.
            once = {id(value): (name, value) for name, value in reversed(found.items()) if isinstance(value, Tensor)}
            named = sorted(once.values(), key=lambda pair: list(found).index(pair[0]))
            entries = [Entry(name, value.dtype, tuple(value.shape), value.detach) for name, value in named]
            export_weights(entries, folder / save_filename)
        else:
            replace_file(folder / save_filename, lambda path: torch.save(found, path))
        return True

    save_fp16_model = save_16bit_model

    # Other methods.

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, object] | None = None,
        schedule: None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles each block (layer) separately with torch.compile, so that no compiled graph waits for weights.

        `schedule` and `compiled_autograd_enabled` belong to DeepCompile and must have their defaults.
        """
        if schedule is not None:
            raise invalid_value("schedule", schedule, [None], "Leave it out: DeepCompile is not supported.")
        if compiled_autograd_enabled:
            raise invalid_value("compiled_autograd_enabled", True, [False], "Leave it out: only forwards are compiled.")
        compile_blocks(self.module, self.device, backend, compile_kwargs)
        self.is_compiled = True

    def save_weights_as(self, save_filename: str) -> None:
        """Sets the default file name of `save_16bit_model`."""
        self.settings = replace(self.settings, weights_file=save_filename)

    def set_client_optimizer(self, optimizer: Optimizer) -> None:
        """Sets the optimizer that the user has passed, for a caller that passes only its rule to initialize()."""
        self.settings = replace(self.settings, client_optimizer=optimizer)

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves the optimizer state and the master weights from the GPU to the host, until `reload_states`.

        `include`: names of states, as in DeepSpeed; None: all. Only "optim_states" and "hp_params" have an effect. They
        move together, because an update needs both. Weights and gradients stay on the GPU. `pin_memory` and
        `non_blocking` have no effect.
        """
        if device not in ("cpu", "none"):
            raise invalid_value("device", getattr(device, "value", device), ["cpu", "none"], "NVMe is not supported.")
        names = MOVABLE if include is None else [getattr(name, "value", name) for name in include]
        for name in names:
            if name not in (*MOVABLE, *UNMOVED):
                raise invalid_value("include", name, [*MOVABLE, *UNMOVED])
        if device == "cpu" and any(name in MOVABLE for name in names):
            self._need_optimizer().offload_state()
        if include is None or any(name in UNMOVED for name in names):
            LOGGER.info("offload_states: weights and gradients stay on the GPU")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves the state of `offload_states` back to the GPU."""
        self._need_optimizer().reload_state()

    def set_training_data(self, dataset: Dataset[object], collate_fn: Callable[..., object] | None) -> ResumableLoader:
        """Builds the engine's data loader from a dataset and returns it."""
        self.training_dataloader = loader = self.deepspeed_io(dataset, collate_fn=collate_fn)
        return loader

    def deepspeed_io(
        self,
        dataset: Dataset[object],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: None = None,
        collate_fn: Callable[..., object] | None = None,
        num_local_io_workers: int | None = None,
    ) -> ResumableLoader:
        """Builds a data loader. Without `batch_size`, batches have the engine's micro-batch size. Only `route="train"`
        shuffles. `data_sampler` must be None."""
        if data_sampler is not None:
            remedy = "Build a torch DataLoader with your sampler."
            raise invalid_value("data_sampler", type(data_sampler).__name__, [None], remedy)
        batch_size = self.settings.micro_batch_size if batch_size is None else batch_size
        return ResumableLoader(
            dataset,
            batch_size,
            collate_fn,
            self.settings.drop_last,
            num_local_io_workers or 0,
            seed=self._same_seed() if route == "train" else None,  # only shuffling needs one seed for all ranks
            pin_memory=pin_memory,
            shuffle=route == "train",
            share=(self.dp_rank, self.dp_world_size),
            split=self.sequence.split if self.sequence is not None else None,
        )

    def _same_seed(self) -> int:
        """The seed of rank 0, so that all ranks shuffle in the same order."""
        seed = torch.initial_seed() % (1 << 63)
        team = self.optimizer.team if self.optimizer is not None else None
        return seed if team is None else int(gather_json(team.everyone, seed)[0])

    def destroy(self, reason: str = "destroy() was called") -> None:
        """Completes running updates and checkpoints, and releases memory and threads. The module stays usable. Training
        later raises RuntimeError with this reason.
        """
        with ExitStack() as last_first:
            if self.watch is not None:
                last_first.callback(self.watch.close)
            if self.optimizer is not None:
                last_first.callback(self.optimizer.close)
            if self.host_weights is not None:
                last_first.callback(self.host_weights.close)
            if self.activations is not None:
                last_first.callback(self.activations.remove)
            if self.settings.sequence is not None:
                last_first.callback(self.settings.sequence.remove)
            last_first.callback(self.reports.close)
            last_first.callback(self.wait_for_checkpoint)
            self.settle()
            self._num_skipped = self.skipped_steps
            self.optimizer = self.activations = self.host_weights = None
            self.has_frozen = False
            self._destroyed_by = reason
            self.leave_plain_backwards()


def _has_gradients(optimizer: TwinOptimizer) -> bool:
    """Whether a backward has run since the last step, or the user has set a gradient."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return optimizer.runtime.has_gradients or any(param.grad is not None for param in params)


def _settle(engine: Engine | None) -> None:
    """Called before an update, which needs the learning rate that the scheduler sets after the last step, and must not
    use a batch that differs between tensor ranks.
    """
    if engine is not None:
        engine._check_pending()
        engine.settle()


def _scale_plain_backwards(optimizer: TwinOptimizer, engine: weakref.ref[Engine]) -> list[RemovableHandle]:
    """Hooks that multiply gradients of a plain `loss.backward()` by the loss scale, which the update expects."""

    def scale(grad: Tensor) -> Tensor:
        it = engine()
        if it is None or it.optimizer is None or it._is_scaled:
            return grad
        return grad * it.optimizer.loss_scale

    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.register_hook(scale) for param in params]


def _path(name: str, value: object) -> Path:
    """A path that the user has passed as `name`."""
    if not isinstance(value, (str, PathLike)):
        raise invalid_value(name, value, "the path of a folder", f'Example: {name}="checkpoints".')
    return Path(value)
