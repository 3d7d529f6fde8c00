# SPDX-License-Identifier: Apache-2.0
"""Settings of the runtime. Only the limits, the number of backwards and the delayed update change results.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A slot is a page-
locked host buffer for the gradients or the new weights of one bucket. A task is the work for one bucket in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twinflow.config.fields import Buckets, DiskIo, Positive, Share, Side, Threads, Whole
from twinflow.offload.clipping import Limits
from twinflow.planner.costs import BUCKET_NUMEL, FLAT_BYTES, NUM_BUFFERS, NUM_SLOTS, NUM_WEIGHT_BUFFERS


@dataclass(frozen=True)
class Tuning:
    """Options that change speed and memory, but no result.

    The types define the valid values. Most of these options are also keys of `zero_optimization.offload_optimizer` in
    the config.
    """

    bucket_numel: Buckets = BUCKET_NUMEL  # elements of a bucket
    num_slots: Positive = NUM_SLOTS  # number of page-locked slots for gradients, and for weights; one bucket per slot
    flat_bytes: Whole | None = None  # device memory for gradients before their copy; None: at most FLAT_BYTES
    hold: Side = "auto"  # where gradients wait for the clipping decision; "auto": where they fit
    sums: Side = "auto"  # where gradients of several backwards are summed in fp32; "auto": where the sum fits
    shadow_bytes: Whole | None = None  # host memory for updates before the clipping decision; None: half of free memory
    update_programs: Positive | None = None  # Triton programs of an update; fewer leave more of the GPU to the model
    streamed: Share = 0.0  # share of the buckets on the host that are updated on the device (`STREAMED`)
    offload_embeddings: bool = False  # with offload_params: the embedding and output layers are blocks too (blocks.py)
    nvme_path: str | None = None  # folder on a disk for the state that is on the host otherwise; None: host memory
    buffer_count: Positive = NUM_BUFFERS  # with nvme_path: number of host buffers, each for the state of one bucket
    # Folder on a disk for weights of blocks (`offload_params`): frozen ones, and those whose state is on a disk too.
    param_nvme_path: str | None = None
    param_buffer_count: Positive = NUM_WEIGHT_BUFFERS  # with param_nvme_path: least number of host buffers
    max_in_cpu: Whole = 0  # with param_nvme_path: elements for which there are buffers, if these are more
    disk_requests: Threads = 8  # with a disk: number of reads and writes at the same time
    disk_block_bytes: Positive = 1 << 20  # with a disk: bytes of one read or write
    disk_io: DiskIo = "auto"  # with a disk: how the files are read and written (`num_rings` in state_file.py)


@dataclass(frozen=True)
class Settings:
    """The user's options, with every "auto" resolved."""

    limits: Limits = field(default_factory=Limits)
    early: bool = False  # updates may start during backward
    watches_first: bool = False  # the first steps leave gradients in `.grad`, to see how the loop uses them (early.py)
    is_short: bool = False  # the device has no room for all gradients at once
    accumulation_steps: int = 1  # backwards of one step, if `early`
    delayed_update: bool = False
    delayed_update_start: int = 0  # number of ordinary steps before the first delayed one
    hold_on_host: bool = False  # gradients wait for the clipping decision on the host, not on the device
    sum_on_host: bool = False  # gradients of several backwards are summed on the host, not on the device
    # Device memory for gradients before their copy to the host, if they do not wait for the clipping decision there.
    flat_bytes: int = FLAT_BYTES
    offload_params: bool = False  # weights of blocks are on the host (param_offload.py)
    tuning: Tuning = field(default_factory=Tuning)

    @property
    def num_slots(self) -> int:
        """Limit of page-locked slots for gradients, and also of those for weights (exceptions: pools.py)."""
        return self.tuning.num_slots

    @property
    def sums_on_host(self) -> bool:
        """Whether the host sums gradients. `sum_on_host` has an effect only if a step has several backwards."""
        return self.early and self.sum_on_host and self.accumulation_steps > 1

    @property
    def num_gathered(self) -> int:
        """Number of gradients of a parameter that are collected on the device before a task is complete."""
        return 1 if self.sums_on_host else self.accumulation_steps

    @property
    def may_run_ahead(self) -> bool:
        """Whether updates may start before the clipping decision. Otherwise the decision always comes first."""
        return self.early and not self.delayed_update and not self.sums_on_host
