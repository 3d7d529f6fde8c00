# SPDX-License-Identifier: Apache-2.0
"""The training loop of `twinflow train`: steps, validations and their records, on one rank or on several.

After each step the ranks exchange one row of numbers: the loss, the load, and whether a signal has arrived. A launcher
signals its processes at slightly different times. All ranks stop after the first step in which any rank has reported a
signal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from twinflow.cli.ranks import Ranks, watched
from twinflow.cli.settings import TrainSettings
from twinflow.data.encode import load_tokenizer
from twinflow.data.tokens import OF_THE_FILE, Split, TokenData
from twinflow.engine import Engine
from twinflow.engine.pipeline import PipelineEngine
from twinflow.engine.reports import LateScalar
from twinflow.models.gpt import flops_per_token
from twinflow.monitor.metrics import LoadMeter, Record, StepMeter, StepRecord, ValidRecord
from twinflow.monitor.timers import Clock

VALID_BATCHES: Final = 16
PROMPT_TOKENS, SAMPLE_TOKENS, SAMPLE_S, TEMPERATURE = 32, 160, 5.0, 0.8  # of the text at the end of a run
Batch = tuple[Tensor, Tensor]  # tokens and targets
Tell = Callable[[float], None]  # sends this rank's loss of a step to the other ranks


@dataclass(frozen=True)
class Done:
    """Results of a step that the device may still be computing."""

    losses: Sequence[Tensor]
    marks: Sequence[tuple[Any, Any, Any]]  # for each micro-batch: start, end of the forward, end of the backward
    is_mixed: bool = False  # forwards and backwards alternate, so only their sum is known

    def loss(self) -> float:
        """Mean loss of the micro-batches."""
        return float(torch.stack(list(self.losses)).mean())

    def seconds(self, clock: Clock, wait_s: float) -> tuple[float, float]:
        """Seconds of forward and backward, without the time that forwards waited for new weights.

        A pipeline step, in which forwards and backwards alternate, reports all its time as backward.
        """
        forward_s = sum(clock.seconds(start, middle) for start, middle, _ in self.marks)
        backward_s = sum(clock.seconds(middle, end) for _, middle, end in self.marks)
        if self.is_mixed:
            return 0.0, max(0.0, backward_s - wait_s)
        return max(0.0, forward_s - wait_s), backward_s


def run_step(
    engine: Engine, batches: Iterator[Batch], clock: Clock, tell: Tell | None = None, weights: Sequence[float] = ()
) -> Done:
    """Forward, backward and update on the micro-batches of a step.

    `weights`: the share of each micro-batch in the step, relative to the mean share; empty if all shares are equal.
    """
    if isinstance(engine, PipelineEngine):
        return _run_pipeline(engine, batches, clock, tell)
    losses: list[Tensor] = []
    late: list[LateScalar] = []
    marks: list[tuple[Any, Any, Any]] = []
    for part, batch in enumerate(batches):
        start = clock.now()
        loss = engine(*batch).loss
        if weights:
            loss = loss * weights[part]
        middle = clock.now()
        if tell is not None:
            # The copy to the host starts here, so that reading the loss waits only for the forward.
            late.append(LateScalar(loss))
        engine.backward(loss)
        marks.append((start, middle, clock.now()))
        losses.append(loss.detach())
        engine.step()
    if tell is not None:  # the ranks exchange losses while the GPU computes the last backward
        tell(sum(one.get() for one in late) / len(late))
    return Done(losses, marks)


def _run_pipeline(engine: PipelineEngine, batches: Iterator[Batch], clock: Clock, tell: Tell | None) -> Done:
    start = clock.now()
    loss = engine.train_batch(batches)
    marks = [(start, start, clock.now())]
    if tell is not None:
        tell(float(loss))
    return Done([loss], marks, is_mixed=True)


def batches_at_once(engine: Engine) -> int:
    """Batches to evaluate in one call. A pipeline keeps all its ranks busy only with several micro-batches."""
    return engine.gradient_accumulation_steps() if isinstance(engine, PipelineEngine) else 1


@torch.no_grad()
def measure(engine: Engine, batches: Sequence[Batch]) -> list[float]:
    """Losses of batches. Empty on ranks without the loss, and on all but the first tensor rank of a replica."""
    if isinstance(engine, PipelineEngine):
        found = engine.eval_batch(iter(batches), reduce_output=None, num_micro_batches=len(batches))
    else:
        module = engine.module.eval()
        found = [module(*batch).loss for batch in batches]
        module.train()
    grid = engine.settings.grid
    if found is None or (grid is not None and grid.model.rank > 0):
        return []
    return [float(loss) for loss in found]


@torch.no_grad()
def sample_text(engine: Engine, data: TokenData, context: int) -> tuple[str, str] | None:
    """The start of the validation text, and how the model continues it. None on several ranks, without a tokenizer, or
    without validation text.

    The text ends after `SAMPLE_S` seconds, because a large model needs a long time for each token.
    """
    is_split = isinstance(engine, PipelineEngine) or engine.dp_world_size > 1 or engine.settings.grid is not None
    if is_split or data.tokenizer == OF_THE_FILE or not data.num_windows("valid", context):
        return None
    tokenizer, generator = load_tokenizer(data.tokenizer), torch.Generator(engine.device).manual_seed(0)
    tokens = data.batch("valid", 0, 1, context)[0][:, :PROMPT_TOKENS].to(engine.device)
    num_given, end = tokens.shape[1], time.perf_counter() + SAMPLE_S
    module = engine.module.eval()
    for _ in range(SAMPLE_TOKENS):
        if time.perf_counter() > end:
            break
        logits = module(tokens[:, -context:]).logits[0, -1, : tokenizer.vocab_size].float()
        chosen = torch.multinomial((logits / TEMPERATURE).softmax(dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    module.train()
    given, written = tokens[0, :num_given].tolist(), tokens[0, num_given:].tolist()
    return tokenizer.decode(given), tokenizer.decode(written)


class Talk:
    """Communication of the ranks during training. `asked`: whether this rank has got a signal to stop."""

    def __init__(self, ranks: Ranks, asked: Callable[[], bool], device: torch.device) -> None:
        self.ranks, self.asked = ranks, asked
        self._device = device if device.type == "cuda" else None
        self._meter = LoadMeter()  # host only: the loop reads and resets the peak of the GPU memory
        self._stops = False
        self._totals: dict[str, Any] = {}

    def should_stop(self) -> bool:
        """Whether a rank has reported a signal in the last exchange."""
        return self.asked() if self.ranks.group is None else self._stops

    def after_step(self, loss: float, num_tokens: int | None = None) -> None:
        """Exchange the loss, the load and the stop flag of a step. `num_tokens`: tokens of this rank, if ranks may have
        different numbers of them.
        """
        load = self._meter.look()
        peak = torch.cuda.max_memory_allocated(self._device) if self._device is not None else 0
        rows = self.ranks.rows([self.asked(), loss, load.host_bytes, load.cores_busy, peak, num_tokens or 0])
        stops, losses, host_bytes, cores_busy, gpu_bytes, tokens = rows.unbind(dim=1)
        self._stops = bool(stops.any())
        self._totals = {
            "loss": float(losses.mean()),  # equal bits on every rank, so that a loss that is not finite stops all ranks
            "host_bytes": int(host_bytes.sum()),
            "cores_busy": float(cores_busy.sum()),
            "gpu_bytes": int(gpu_bytes.max()),
        }
        if num_tokens is not None:
            self._totals["num_tokens"] = int(tokens.sum())

    def of_all(self, record: StepRecord) -> StepRecord:
        """The record of this rank, with loss, memory and load of all ranks."""
        return replace(record, **self._totals) if self.ranks.group is not None else record

    def mean(self, total: float, count: int, wanted: int) -> float | None:
        """Sum of `total` over all ranks, divided by `wanted`. None if the ranks have counted fewer than `wanted`
        sequences.
        """
        totals = self.ranks.rows([total, count, self.asked()])
        self._stops = bool(totals[:, 2].any())
        return float(totals[:, 0].sum()) / wanted if int(totals[:, 1].sum()) == wanted else None


def is_bad(record: StepRecord, precision: str) -> bool:
    """Whether training must stop after this step. With fp16 a skipped step is normal: the loss scale is lowered."""
    return not math.isfinite(record.loss) or (record.skipped and precision != "fp16")


class Loop:
    """Trains the GPT of an engine from the engine's current step to the last step, on this rank's part of every batch.

    The records have the numbers of all ranks. The position in the data is counted in sequences, so that a resumed run
    with another number of ranks continues at the same position. All ranks of a replica get the same tokens.
    `num_valid`: sequences in a validation.
    """

    def __init__(self, settings: TrainSettings, engine: Engine, data: TokenData, talk: Talk, num_valid: int) -> None:
        self._settings = settings
        self._engine = engine
        self._data = data
        self._talk = talk
        self._num_valid = num_valid
        self._meter = StepMeter(engine.device)
        self._clock = Clock(engine.device)
        self._tell = talk.after_step if talk.ranks.group is not None else None
        self._flops = flops_per_token(settings.model) * settings.tokens
        # With --global-batch-size, micro-batches may differ in size. The loss of a step is the mean of its sequences.
        self._sizes = settings.micro_sizes(engine.dp_rank)
        num_all = settings.replicas * settings.accumulation
        equal = settings.batch_size * num_all == settings.sequences
        self._weights = [] if equal else [size * num_all / settings.sequences for size in self._sizes]

    def records(self, measured: Container[int] = ()) -> Iterator[Record]:
        """Yield a record of each step and each validation as it happens, until the last step or a signal to stop.

        If training must stop after a step (`is_bad`), the record of that step is the last one.

        `measured`: steps after which the resumed run has already validated. A run can end between a checkpoint and the
        validation after the same step.
        """
        settings, engine = self._settings, self._engine
        if engine.global_steps not in measured:
            yield from self._valid_records()
        while engine.global_steps < settings.steps and not self._talk.should_stop():
            record = self.step()
            yield record
            if is_bad(record, settings.precision):
                return
            yield from self._valid_records()

    def _valid_records(self) -> Iterator[ValidRecord]:
        """Validate if it is due. An interrupted validation yields no record: a resumed run repeats it."""
        engine, last, every = self._engine, self._settings.steps, self._settings.valid_every
        step = engine.global_steps
        if step not in (0, last) and not (every > 0 and step % every == 0):
            return
        if step == last and engine.optimizer is not None:
            engine.optimizer.flush()  # the last validation measures the model with its last delayed update
        loss = self.valid_loss()
        if loss is not None:
            yield ValidRecord(step, loss)

    def step(self) -> StepRecord:
        """Forward, backward and update on the micro-batches of this step.

        The update runs at the same time as backward and the next forward. The recorded update time is only the time for
        which the loop waits: for new weights in the forwards, and for the norm after the last backward.
        """
        settings, engine = self._settings, self._engine
        lr = engine.get_lr()[0]
        start = time.perf_counter()
        done = run_step(engine, self._train_batches(), self._clock, self._tell, self._weights)
        assert engine.optimizer is not None
        counts = engine.optimizer.metrics()  # waits for the gradient norm, so the device has finished backward
        mean = done.loss()
        wall_s = time.perf_counter() - start
        record = self._meter.record(
            counts,
            wall_s,
            partial(done.seconds, self._clock),
            step=engine.global_steps,
            loss=mean,
            lr=lr,
            num_tokens=settings.tokens,
            tflops=self._flops / wall_s / 1e12,
            loss_scale=engine.optimizer.current_loss_scale,
            skipped=not engine.was_step_applied(),
            tokens_total=engine.global_steps * settings.tokens,
            host_share=engine.optimizer.host_share,
            balance=float(balance) if isinstance(balance := getattr(engine.module, "balance", None), Tensor) else 0.0,
        )
        return self._talk.of_all(record)

    def valid_loss(self) -> float | None:
        """Mean loss over the validation sequences. They are the same each time, so that two losses differ only because
        of the weights. The replicas share the sequences. None if a signal to stop arrived during the validation.
        """
        engine, size, total, count = self._engine, self._settings.batch_size, 0.0, 0
        num_batches, at_once = -(-self._num_valid // size), batches_at_once(engine)
        own = range(engine.dp_rank, num_batches, engine.dp_world_size)
        with watched(engine, "validation"):
            for first in range(0, -(-num_batches // engine.dp_world_size), at_once):
                if self._stops_now():
                    break
                indices = own[first : first + at_once]
                sizes = [min(size, self._num_valid - index * size) for index in indices]
                batches = [self.batch("valid", index) for index in indices]
                cut = [(x[:num], y[:num]) for (x, y), num in zip(batches, sizes, strict=True)]
                losses = measure(engine, cut)
                if losses:
                    total += sum(num * loss for num, loss in zip(sizes, losses, strict=True))
                    count += sum(sizes)
            return self._talk.mean(total, count, self._num_valid)

    def _stops_now(self) -> bool:
        """Whether to stop a validation. The ranks of one replica compute together, so they stop together."""
        asked = self._talk.asked()
        return asked if self._engine.settings.grid is None else bool(self._talk.ranks.rows([asked]).any())

    def _train_batches(self) -> Iterator[Batch]:
        """The next micro-batches of this replica. Each is built when it is requested. Their position does not depend on
        the number of ranks of the earlier run."""
        engine, size = self._engine, self._settings.batch_size
        if self._weights:
            yield from self._uneven_batches()
            return
        num_before = engine.global_steps * self._settings.sequences if self._settings.global_batch else None
        num_before = engine.global_samples if num_before is None else num_before
        assert num_before % size == 0
        first = num_before // size + engine.dp_rank
        for part in range(self._settings.accumulation):
            yield self.batch("train", first + part * engine.dp_world_size)

    def _uneven_batches(self) -> Iterator[Batch]:
        """The next micro-batches of this replica if their sizes differ. They are one range of the step's sequences."""
        settings, device = self._settings, self._engine.device
        before = sum(sum(settings.micro_sizes(replica)) for replica in range(self._engine.dp_rank))
        first = self._engine.global_steps * settings.sequences + before
        for size in self._sizes:
            # An empty micro-batch has weight 0, but ranks wait for its forward and backward.
            rows = [self._data.batch("train", first + i, 1, settings.context) for i in range(max(1, size))]
            tokens, targets = (torch.cat(parts).to(device, non_blocking=True) for parts in zip(*rows, strict=True))
            yield tokens, targets
            first += size

    def batch(self, split: Split, index: int) -> Batch:
        """Micro-batch number `index` of a split, on the model's device."""
        tokens, targets = self._data.batch(split, index, self._settings.batch_size, self._settings.context)
        device = self._engine.device
        return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
