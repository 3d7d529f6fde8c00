"""The training loop of `twinflow train` for one process. It takes an engine and data and yields records."""

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
from twinflow.monitor.metrics import LoadMeter, Record, StepRecord, ValidRecord

VALID_BATCHES: Final = 16


def is_bad(record: StepRecord, precision: str) -> bool:
    """Whether training must stop after this step. With fp16 a skipped step is normal: the loss scale is lowered."""
    return not math.isfinite(record.loss) or (record.skipped and precision != "fp16")


class Loop:
    """Trains the GPT of an engine from the engine's current step to the last step."""

    def __init__(self, settings: TrainSettings, engine: Engine, data: TokenData) -> None:
        self._settings, self._engine, self._data = settings, engine, data
        self._device = engine.device
        self._meter = LoadMeter(self._device)
        self._clock = Clock(self._device)
        self._tell: Tell | None = None
        self._busy_s = self._waited_s = 0.0  # totals of the optimizer: busy time of the host, waiting time of forwards
        self._flops = flops_per_token(settings.model) * settings.tokens

    def records(
        self, should_stop: Callable[[], bool] = lambda: False, measured: Container[int] = ()
    ) -> Iterator[Record]:
        """Yield a record of each step and each validation as it happens. `should_stop` is called between steps.

        A step whose loss or gradient is not finite does not change the weights. Its record is yielded, and it is the
        last one.

        `measured`: steps after which the resumed run has already validated. A run can end between a checkpoint and the
        validation after the same step.
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
        """Validate if a validation is due. A validation that was interrupted yields no record: a resumed run repeats
        it."""
        engine = self._engine
        if not self._validates_after(engine.global_steps):
            return
        if engine.global_steps == self._settings.steps and engine.optimizer is not None:
            engine.optimizer.flush()  # the last validation measures the model with its last delayed update
        loss = self.valid_loss(should_stop)
        if loss is not None:
            yield ValidRecord(engine.global_steps, loss)

    def step(self) -> StepRecord:
        """Forward, backward and update on the micro-batches of this step.

        The update runs concurrently with backward and the next forward. The recorded update time is only the time that
        the loop waits: for new weights in the forwards, and for the norm after the last backward.
        """
        settings, engine = self._settings, self._engine
        lr = engine.get_lr()[0]
        start = time.perf_counter()
        done = run_step(engine, self.train_batches(), self._clock, self._tell)
        assert engine.optimizer is not None
        counts = engine.optimizer.metrics()  # waits for the gradient norm, so the device has finished backward
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
        """Mean loss over the same batches each time, so that two measurements differ only by the weights.

        Returns None if `should_stop` returned True during the validation.
        """
        module, losses = self._engine.module.eval(), []
        for index in range(VALID_BATCHES):
            if should_stop():
                break
            losses.append(float(module(*self.batch("valid", index)).loss))
        module.train()
        return sum(losses) / len(losses) if len(losses) == VALID_BATCHES else None

    def train_batches(self) -> Iterator[Batch]:
        """The micro-batches of the current step. Each is built when it is requested."""
        first = self._engine.micro_steps
        for part in range(self._settings.accumulation):
            yield self.batch("train", first + part)

    def batch(self, split: Split, index: int) -> Batch:
        """Micro-batch number `index` of a split, on the model's device."""
        tokens, targets = self._data.batch(split, index, self._settings.batch_size, self._settings.context)
        return tokens.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)
