# SPDX-License-Identifier: Apache-2.0
"""The engine for pipeline parallelism. `train_batch` runs all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from twinflow.activations import Handle
from twinflow.dist.agree import first_failure
from twinflow.engine.base import EngineSettings, Scheduler
from twinflow.engine.core import Engine
from twinflow.engine.reports import Reports
from twinflow.engine.values import UserValue, cast_floats, to_device
from twinflow.errors import invalid_value, wrong_state
from twinflow.launch.watch import Watch
from twinflow.optim.twin import TwinOptimizer
from twinflow.parallel.deferral import Deferral
from twinflow.parallel.pipeline import PipelineModule
from twinflow.parallel.runner import Runner
from twinflow.parallel.schedules import Schedule, make_schedule
from twinflow.parallel.ties import TiedGradients
from twinflow.parallel.wire import Wire

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Links:
    """The connections of a pipeline rank to other ranks."""

    wire: Wire  # sends activations and their gradients to other stages
    ties: Sequence[TiedGradients] = ()  # sum the gradients of weights that several stages share
    deferral: Deferral | None = None  # defers weight gradients, for zero-bubble schedules


class PipelineEngine(Engine):
    """Trains a `PipelineModule` with `train_batch`. An attribute that it does not have is looked up in the module."""

    module: PipelineModule

    scales_plain_backwards = False  # the runner scales losses

    def __init__(
        self,
        module: PipelineModule,
        optimizer: TwinOptimizer | None,
        scheduler: Scheduler | None,
        settings: EngineSettings,
        reports: Reports,
        links: Links,
        activations: Handle | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(module, optimizer, scheduler, settings, reports, activations, watch)
        self._links = links
        self._runners: dict[int, Runner] = {}  # by number of micro-batches
        self._batches: Iterator[object] | None = None  # iterator over the engine's loader
        self._batch_fn: Callable[[UserValue], object] | None = None  # converts a batch to (inputs, target)

    # The loop.

    def train_batch(self, data_iter: Iterator[object] | None = None) -> Tensor:
        """Runs one step: all its micro-batches and the update.

        `data_iter` yields a pair (inputs, target) for each micro-batch. Only ranks of the first and the last stage read
        from it. Without `data_iter`, all ranks read from the engine's loader. Returns the mean loss over micro-batches
        and replicas, on every rank. A module in evaluation mode is put into training mode.

        Raises RuntimeError on every rank if gradients are disabled, or if the data end before the last micro-batch.
        Nothing has changed then, and the next call may pass a new iterator.
        """
        self._need_optimizer()
        self._beat("train_batch")
        self.settle()
        num = self.gradient_accumulation_steps()
        runner, batches = self._runner(num), self._take("train_batch()", data_iter, num)
        if not self.module.training:  # modules that are in evaluation mode inside a training module stay so
            self.module.train()
        self.module.seed_from(self.micro_steps)
        with self.reports.forward(self), self._autocast():
            losses = runner.train(batches)
        with self.reports.measure("backward"):
            for tie in self._links.ties:
                tie.finish()
        self.part, self.micro_steps = num - 1, self.micro_steps + num - 1
        lr = self._count_step()
        loss = self._mean(losses)
        self.reports.add_loss(loss)
        self.reports.after_step(self, lr)
        return loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[object] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> UserValue:
        """Runs forwards without gradients. Returns the mean loss, on every rank.

        With `compute_loss=False`, ranks of the last stage return the outputs instead. With `reduce_output=None`, they
        return the loss of each micro-batch. In these two cases, other ranks return None. `bcast_loss` has no effect.
        """
        if return_logits:
            raise invalid_value("return_logits", True, [False], "Call eval_batch(compute_loss=False) for the outputs.")
        if reduce_output not in ("avg", None):
            raise invalid_value("reduce_output", reduce_output, ("avg", None))
        self._beat("eval_batch")
        num = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
        batches = self._take("eval_batch()", data_iter, num)
        with _evaluating(self.module), self._autocast():
            # Any runner can evaluate any number of micro-batches.
            runner = next(iter(self._runners.values()), None) or self._runner(self.gradient_accumulation_steps())
            found = runner.evaluate(batches, compute_loss=compute_loss)
            if found is not None and not compute_loss:
                found = [self.module.finish(output) for output in found]
        if not compute_loss or reduce_output is None:
            return found
        return self._mean(found)

    def _runner(self, num_micro_batches: int) -> Runner:
        if num_micro_batches not in self._runners:
            module, links = self.module, self._links
            schedule = schedule_for(module, num_micro_batches)
            self._runners[num_micro_batches] = Runner(
                module, schedule, module.index, links.wire, module.loss_fn, links.deferral, self.loss_scale
            )
        return self._runners[num_micro_batches]

    def _take(self, call: str, data_iter: Iterator[object] | None, num: int) -> list[tuple[object, object]]:
        """The micro-batches on this rank's device; (None, None) each if the rank does not read from `data_iter`.

        An error of one rank is raised on all ranks before they send anything, so that the pipeline can still be used.
        """
        self._links.wire.check()  # ranks that have failed must not wait for each other below
        batches = self._on_all_ranks(call, lambda: self._read(call, data_iter, num))
        replica = self._replica
        if replica is not None:
            self._on_all_ranks(call, lambda: replica.check_batches(batches, self.device))
            self._compare_copies()
        return batches

    def _on_all_ranks(self, call: str, work: Callable[[], _Result]) -> _Result:
        """Calls a function that may fail on some ranks. If it does, all ranks raise."""
        error: BaseException | None = None
        try:
            found = work()
        except BaseException as raised:
            error = raised
        team = self.optimizer.team if self.optimizer is not None else None
        group = team.everyone if team is not None else self._replica.group if self._replica is not None else None
        if group is not None and bool(group.gather_rows(torch.tensor([error is not None])).any()):
            first = first_failure(group, error)
            if error is None:
                error = wrong_state(f"{call} cannot run", f"another rank has failed: {first}", "")
        if error is not None:
            raise error
        return found

    def _read(self, call: str, data_iter: Iterator[object] | None, num: int) -> list[tuple[object, object]]:
        if call == "train_batch()" and not torch.is_grad_enabled():
            reason = "gradients are disabled by torch.no_grad(), inference_mode() or set_grad_enabled(False)"
            raise wrong_state(f"{call} cannot run", reason, "Call it outside of them, or call eval_batch().")
        name = "data_iter"
        if data_iter is None:
            data_iter, name = self._own_batches(), "the iterator of set_dataiterator()"
        elif not (self.module.has_first or self.module.has_last):
            return [(None, None)] * num
        if not hasattr(data_iter, "__next__"):
            kind = type(data_iter).__name__
            raise ValueError(f"{name} is a {kind}, but must be an iterator. Pass iter(data).")
        found = list(islice(data_iter, num))
        if len(found) < num:
            # Not a StopIteration, which would end a loop or a generator of the caller without an error.
            raise wrong_state(
                f"{call} cannot run",
                f"{name} ended after {len(found)} of {num} micro-batches",
                "Pass a new iterator, or repeat the data, for example with itertools.cycle(loader).",
            )
        return [self._placed(batch) for batch in found]

    def _own_batches(self) -> Iterator[object]:
        if self._batches is None:
            if self.training_dataloader is None:
                remedy = "Pass data_iter, or pass training_data to initialize()."
                raise invalid_value("data_iter", None, "an iterator of (inputs, target)", remedy)
            self._batches = _again_and_again(self.training_dataloader)
        return self._batches

    def _placed(self, batch: object) -> tuple[object, object]:
        if self._batch_fn is not None:
            batch = self._batch_fn(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            kind = type(batch).__name__
            raise ValueError(
                f"A micro-batch is of type {kind}, but must be a pair (inputs, target). Convert it with set_batch_fn()."
            )
        inputs, target = (to_device(part, self.device) for part in batch)
        if self.settings.input_dtype is not None:
            inputs = cast_floats(inputs, self.settings.input_dtype)
        return inputs, target

    def _mean(self, losses: Sequence[Tensor] | None) -> Tensor:
        """The mean over micro-batches and replicas. Ranks of the last stage send their losses to all ranks."""
        own = torch.zeros(2, dtype=torch.float64)
        if losses is not None:
            own[0], own[1] = torch.stack([loss.detach().double() for loss in losses]).sum().cpu(), len(losses)
        team = self.optimizer.team if self.optimizer is not None else None
        total = own if team is None else team.everyone.gather_rows(own).sum(0)
        return (total[0] / total[1]).float()

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises RuntimeError. Use `train_batch` or `eval_batch`."""
        _refuse("forward")

    def backward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises RuntimeError, because `train_batch` runs all forwards, backwards and the step of a pipeline."""
        _refuse("backward")

    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> NoReturn:
        """Raises RuntimeError, because `train_batch` runs all forwards, backwards and the step of a pipeline."""
        _refuse("step")

    # Sources of batches.

    def set_dataloader(self, loader: Iterable[object]) -> None:
        """Sets the loader of `train_batch()` without `data_iter`. It is read again in each epoch."""
        if not isinstance(loader, Iterable):
            raise invalid_value("loader", loader, "a DataLoader, or another iterable of (inputs, target)")
        self.training_dataloader, self._batches = loader, None

    def set_dataiterator(self, iterator: Iterator[object]) -> None:
        """Sets an iterator for `train_batch()` without `data_iter`. Its end raises RuntimeError."""
        self._batches = iterator

    def set_batch_fn(self, fn: Callable[[UserValue], object] | None) -> None:
        """Sets the function that converts a batch to (inputs, target); None: batches are such pairs."""
        if fn is not None and not callable(fn):
            raise invalid_value("fn", fn, "a function of a batch that returns (inputs, target), or None")
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Does nothing, because stages send the shapes of activations with them. DeepSpeed has this method."""

    # Properties.

    def get_pipeline_parallel_rank(self) -> int:
        """Index of this process among the ranks of the pipeline."""
        return self.module.index

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage, which needs the inputs."""
        return self.module.has_first

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage, which needs the targets."""
        return self.module.has_last

    def is_pipe_parallel(self) -> bool:
        """Whether the pipeline has more than one rank."""
        return self.module.num_ranks > 1

    @property
    def sent_bytes(self) -> int:
        """Bytes of tensors that this rank has sent to other pipeline ranks."""
        return self._links.wire.sent_bytes

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of samples in a step by changing the number of micro-batches."""
        micro = self.settings.micro_batch_size * self.dp_world_size
        if train_batch_size > 0 and train_batch_size % micro == 0:
            schedule_for(self.module, train_batch_size // micro)
        super().set_train_batch_size(train_batch_size)

    def _forget_data_iterator(self) -> None:
        self._batches = None

    def destroy(self, reason: str = "destroy() was called") -> None:
        """Completes running updates and checkpoints, and releases memory, threads and connections."""
        with ExitStack() as last_first:
            last_first.callback(self._links.wire.close)
            for tie in self._links.ties:
                last_first.callback(tie.close)
            super().destroy(reason)


def schedule_for(module: PipelineModule, num_micro_batches: int) -> Schedule:
    """The schedule of a step. Raises ValueError if it does not support this number of micro-batches."""
    return make_schedule(module.schedule, module.num_ranks, num_micro_batches, module.num_chunks)


@contextmanager
def _evaluating(module: PipelineModule) -> Iterator[None]:
    """Puts all submodules into evaluation mode, and back into their former mode at the end."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _again_and_again(loader: Iterable[object]) -> Iterator[object]:
    """The batches of all epochs. Raises ValueError if an epoch has no batch."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError(
                "training_data gives no batch on this rank, but must give at least one. Use more data or a smaller "
                "micro-batch, or set dataloader_drop_last to false."
            )


def _refuse(name: str) -> NoReturn:
    raise wrong_state(
        f"{name}() cannot be called on a PipelineEngine",
        "a pipeline runs several micro-batches at once",
        "Call train_batch(data_iter).",
    )
