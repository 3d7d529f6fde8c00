"""The training loop of `twinflow train`: an engine and data in, records out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator
from typing import Final

import torch

from twinflow.cli.settings import TrainSettings
from twinflow.cli.steps import Batch, Clock, Tell, run_step
from twinflow.data.tokens import Split, TokenData
from twinflow.engine import Engine
from twinflow.models.gpt import flops_per_token
from twinflow.monitor.load import LoadMeter
from twinflow.monitor.metrics import Record, StepRecord, ValidRecord

VALID_BATCHES: Final = 16


def is_bad(record: StepRecord, precision: str) -> bool:
    """Whether to stop after a step. fp16 skips one now and then, and lowers its scale."""
    return not math.isfinite(record.loss) or (record.skipped and precision != "fp16")


class Loop:
    """Trains an engine's GPT from where it stands to the last step."""

    def __init__(self, settings: TrainSettings, engine: Engine, data: TokenData) -> None:
        self._settings, self._engine, self._data = settings, engine, data
        self._device = engine.device
        self._meter = LoadMeter(self._device)
        self._clock = Clock(self._device)
        self._tell: Tell | None = None
        self._busy_s = self._waited_s = 0.0  # of the optimizer so far: host at work, forwards waiting
        self._flops = flops_per_token(settings.model) * settings.tokens

    def records(
        self, should_stop: Callable[[], bool] = lambda: False, measured: Container[int] = ()
    ) -> Iterator[Record]:
        """Each step and each validation as it happens; `should_stop` is asked between steps.

        A step whose loss or gradient is not finite is yielded without having changed the weights, and is the last one.
        `measured`: steps after which the run that is resumed has validated. It may have died between a checkpoint and
        the validation after the same step.
        """
        settings, engine = self._settings, self._engine
        if engine.global_steps not in measured:
            yield from self._valid_records(should_stop)
        while engine.global_steps < settings.steps and not should_stop():
            record = self.step()
            yield record
            if is_bad(record, self._settings.precision):
                return
            yield from self._valid_records(should_stop)

    def _validates_after(self, step: int) -> bool:
        every = self._settings.valid_every
        return step in (0, self._settings.steps) or (every > 0 and step % every == 0)

    def _valid_records(self, should_stop: Callable[[], bool]) -> Iterator[ValidRecord]:
        """A validation where one is due; none where it was stopped, for a resumed run makes up for it."""
        engine = self._engine
        if not self._validates_after(engine.global_steps):
            return
        if engine.global_steps == self._settings.steps and engine.optimizer is not None:
            engine.optimizer.flush()  # a delayed update still to come belongs to the model that is measured last
        loss = self.valid_loss(should_stop)
        if loss is not None:
            yield ValidRecord(engine.global_steps, loss)

    def step(self) -> StepRecord:
        """Forward, backward and update on the micro-batches of this step.

        The update runs beside backward and the next forward. What is measured of it is what the loop waits for: new
        weights in the forwards, and the norm after the last backward.
        """
        settings, engine = self._settings, self._engine
        lr = engine.get_lr()[0]
        start = time.perf_counter()
        done = run_step(engine, self.train_batches(), self._clock, self._tell)
        assert engine.optimizer is not None
        counts = engine.optimizer.metrics()  # waits for the norm: the device has come this far
        mean = done.loss()
        wall_s = time.perf_counter() - start
        wait_s, self._waited_s = counts["waited_s"] - self._waited_s, counts["waited_s"]
        forward_s, backward_s = done.seconds(self._clock, wait_s)
        load = self._meter.look()
        host_s, self._busy_s = counts["host_busy_s"] - self._busy_s, counts["host_busy_s"]
        return StepRecord(
            step=engine.global_steps,
            loss=mean,
            lr=lr,
            grad_norm=counts["grad_norm"],
            num_tokens=settings.tokens,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=max(0.0, wall_s - forward_s - backward_s),
            host_bytes=load.host_bytes,
            num_ahead=int(counts["gate_speculated"]),
            num_dropped=int(counts["gate_dropped"]),
            num_held=int(counts["gate_held"]),
            tflops=self._flops / wall_s / 1e12,
            gpu_bytes=load.gpu_peak_bytes,
            host_available_bytes=load.host_available_bytes,
            cores_busy=load.cores_busy,
            host_update_s=host_s,
            wait_s=wait_s,
            loss_scale=engine.optimizer.current_loss_scale,
            skipped=not engine.was_step_applied(),
            tokens_total=engine.global_steps * settings.tokens,
            host_share=engine.optimizer.host_share,
        )

    @torch.no_grad()
    def valid_loss(self, should_stop: Callable[[], bool] = lambda: False) -> float | None:
        """Mean loss over the same few batches each time, so that two measurements differ by the weights alone.

        None where `should_stop` said so in between.
        """
        module, losses = self._engine.module.eval(), []
        for index in range(VALID_BATCHES):
            if should_stop():
                break
            losses.append(float(module(*self.batch("valid", index)).loss))
        module.train()
        return sum(losses) / len(losses) if len(losses) == VALID_BATCHES else None

    def train_batches(self) -> Iterator[Batch]:
        """The micro-batches of the step under way, each made when it is asked for."""
        first = self._engine.micro_steps
        for part in range(self._settings.accumulation):
            yield self.batch("train", first + part)

    def batch(self, split: Split, index: int) -> Batch:
        """The data's micro-batch of this number, where the model is."""
        tokens, targets = self._data.batch(split, index, self._settings.batch_size, self._settings.context)
        return tokens.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)
