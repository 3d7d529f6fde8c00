# SPDX-License-Identifier: Apache-2.0
"""The base class of TwinOptimizer: the attributes that the other modules of this package use, and outcomes of steps.

Outcomes are whether a step was applied, the loss scale, norms and counters. Whether a step was skipped is known only
when its backward has ended on the device. The optimizer waits for this only when a caller reads an outcome, or when the
next loss needs its scale.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.optim.optimizer import Optimizer

from twinflow.offload.job import Job
from twinflow.offload.runtime import Runtime
from twinflow.offload.settings import Settings, Tuning
from twinflow.optim.auto import host_share
from twinflow.optim.loss_scale import LossScale, after_step
from twinflow.rules import Rule
from twinflow.zero import Team, Zero


class Outcomes(Optimizer):
    """The part of TwinOptimizer that reports the outcomes of steps."""

    model: nn.Module | None
    rule: Rule | None  # one of twinflow's rules; None: the user's optimizer
    rule_name: str
    states: str  # format of the states
    master: str  # "none": bf16 weights have no fp32 master
    ratio: float | str
    tuning: Tuning
    zero: Zero | None
    matrix_groups: Sequence[int]  # the indices of the param groups whose parameters Muon updates
    team: Team | None = None  # the ranks that share the work
    is_stateless = False  # the state is only a master copy: SGD without momentum
    scale_rule: LossScale  # the loss scale with its rule of change, before the outcome of the last step is read
    scales_loss: bool  # losses must be multiplied by a loss scale
    _is_scale_used = False  # the training loop has read the loss scale
    _runtime: Runtime | None = None
    _settings: Settings
    _was_applied = False  # the last step was applied
    _was_skipped = False  # the last step was skipped because a gradient was not finite
    _was_clipped = False  # the last step whose outcome has been read was clipped
    _unread: Job | None = None  # the last step, if its outcome has not been read
    num_steps = 0
    num_skipped = 0

    @property
    def runtime(self) -> Runtime:
        """The runtime, which overlaps updates with forward and backward."""
        assert self._runtime is not None
        return self._runtime

    @property
    def max_grad_value(self) -> float | None:
        """The absolute value to which elements of the gradients are clipped; None: no such clipping."""
        return self._settings.limits.max_value

    @property
    def can_compress(self) -> bool:
        """Whether communication will become compressed (switch.py). With one rank there is no communication."""
        compresses = self.zero is not None and self.zero.compression is not None
        return compresses and self.team is not None and self.team.world > 1

    def scale_losses(self, loss_scale: LossScale) -> None:
        """Uses a loss scale from the next backward on, as if the optimizer had been built with it."""
        self._read_decision()
        self.scale_rule = loss_scale
        self.scales_loss = True

    def restore_outcomes(self, num_steps: int, num_skipped: int, loss_scale: LossScale) -> None:
        """Sets counters and loss scale from a checkpoint."""
        self.num_steps = num_steps
        self.num_skipped = num_skipped
        self.scale_rule = loss_scale
        self._unread = None

    def _read_decision(self) -> None:
        """Waits until it is known whether the last step was skipped, and updates loss scale and counters."""
        job, self._unread = self._unread, None
        if job is None:
            return
        decision = self.runtime.executor.wait_for_decision(job)
        self._was_applied, self._was_skipped = not decision.skip, decision.skip
        self._was_clipped = decision.clipped
        self.num_skipped += decision.skip
        self.scale_rule = after_step(self.scale_rule, decision.skip)

    @property
    def can_skip(self) -> bool:
        """Whether steps with gradients that are not finite are skipped."""
        return self._settings.limits.skip_nonfinite

    @property
    def is_decided(self) -> bool:
        """Whether it is known without waiting if the last step was applied."""
        return self._unread is None

    @property
    def was_applied(self) -> bool:
        """Whether the last step was applied. The property waits until that is known."""
        self._read_decision()
        return self._was_applied

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because scaled gradients were not finite; False without a loss scale."""
        self._read_decision()
        return self.scales_loss and self._was_skipped

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss. The property waits for the outcome of the last step."""
        self._is_scale_used = True
        return self.read_scale()

    @property
    def cur_scale(self) -> float:
        """`loss_scale`, as DeepSpeed's optimizers for fp16 name it."""
        return self.loss_scale

    @property
    def current_loss_scale(self) -> float:
        """The loss scale without waiting for the outcome of the last step."""
        self._is_scale_used = True
        return self.scale_rule.scale

    def read_scale(self) -> float:
        """`loss_scale` for the runtime, which does not count as a use by the training loop."""
        self._read_decision()
        return self.scale_rule.scale

    def _check_scaled(self) -> None:
        """Warns once if a step ran although nothing has read the loss scale: the gradients cannot be scaled."""
        if self.scales_loss and not self._is_scale_used and self.scale_rule.scale != 1.0:
            warnings.warn(
                f"Gradients are divided by loss_scale={self.scale_rule.scale:g}, but nothing has read the scale, so "
                "the loss was not multiplied by it. Call optimizer.backward(loss) instead of loss.backward().",
                stacklevel=5,
            )
        self._is_scale_used = True

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; None before the first step."""
        job = self.runtime.steps.last
        if job is None:
            return None
        return self.runtime.executor.wait_for_decision(job).norm

    def metrics(self) -> dict[str, float]:
        """Figures of training by name.

        Figures of the last step: gradient norm, clipping factor, and counts of updates that ran before the clipping
        decision. Figures of all steps so far: seconds, copied bytes and skipped steps. The others are present values.
        """
        norm, runtime = self.grad_norm, self.runtime
        self._read_decision()
        job, counters = runtime.steps.last, runtime.executor.counters
        counts = runtime.executor.counts_of(job) if job is not None else {}
        decision = job.decision if job is not None else None
        return {
            "grad_norm": norm if norm is not None else float("nan"),
            "skipped_steps": self.num_skipped,
            "loss_scale": self.scale_rule.scale,
            "clip_factor": decision.factor * job.scale if decision is not None and job is not None else 1.0,
            **{f"gate_{name}": count for name, count in counts.items()},
            "host_busy_s": counters.busy_s + (runtime.worker.busy_s if runtime.worker is not None else 0.0),
            "waited_s": runtime.waited_s,
            "bytes_out": counters.bytes_out,
            "bytes_back": counters.bytes_back + runtime.fetched_bytes,
            "shadow_bytes": runtime.speculative_stores.num_bytes,
            "host_share": host_share(runtime.buckets),
        }
