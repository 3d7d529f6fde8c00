"""How the runtime works. Nothing here changes a result but the limits, the number of backwards and the delay."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinflow.config.fields import Buckets, Positive, Share, Side, Whole
from twinflow.offload.clipping import Limits
from twinflow.offload.plan import BUCKET_NUMEL

FLAT_BYTES = 3 << 29


@dataclass(frozen=True)
class Tuning:
    """What changes speed and memory, never a result. The types say which values are taken, as in the config, where most
    of these are keys of `zero_optimization.offload_optimizer`."""

    bucket_numel: Buckets = BUCKET_NUMEL  # elements that travel together
    num_slots: Positive = 4  # page-locked buckets each way
    flat_bytes: Whole | None = None  # device memory for gradients on their way out; None: FLAT_BYTES, or less if short
    hold: Side = "auto"  # where gradients wait for the clipping decision; auto: what fits
    sums: Side = "auto"  # where gradients of several backwards are summed in fp32; auto: what fits
    shadow_bytes: Whole | None = None  # host memory for updates ahead of that decision; None: what is spare
    update_programs: Positive | None = None  # programs of an update on the device; fewer leave it room for the model
    streamed: Share = 0.0  # share of the buckets on the host whose state passes through the device to be updated


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    limits: Limits = field(default_factory=Limits)
    early: bool = False  # updates may start during backward
    watches_first: bool = False  # ... but only after some ordinary steps, where they could not be undone
    is_short: bool = False  # the device has no room for all gradients at once
    accumulation_steps: int = 1  # backwards that make one step, where `early`
    delayed_update: bool = False
    delayed_update_start: int = 0  # ordinary steps first
    hold_on_host: bool = False  # where gradients wait for the clipping decision
    sum_on_host: bool = False  # where the gradients of several backwards are summed
    # Device memory for gradients on their way out, where they need not wait for the decision.
    flat_bytes: int = FLAT_BYTES
    offload_params: bool = False  # weights of blocks live on the host (param_offload.py)
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def num_slots(self) -> int:
        """Page-locked buckets each way."""
        return self.tuning.num_slots

    @property
    def sums_on_host(self) -> bool:
        """Whether there is anything to sum there."""
        return self.early and self.sum_on_host and self.accumulation_steps > 1

    @property
    def num_gathered(self) -> int:
        """Gradients of a parameter that are gathered on the device before it is complete."""
        return 1 if self.sums_on_host else self.accumulation_steps

    @property
    def may_run_ahead(self) -> bool:
        """Whether updates may start before the clipping decision: not where it is made before they could."""
        return self.early and not self.delayed_update and not self.sums_on_host
