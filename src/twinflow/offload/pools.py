# SPDX-License-Identifier: Apache-2.0
"""Sizes of the pools: page-locked slots on the host, flat buffers on the device, and speculative stores.

A bucket holds slices of parameters (ranges of their elements) that are copied and updated together. A slot is a page-
locked host buffer for the gradients or the new weights of one bucket. A flat buffer is a device buffer with the
gradients of one bucket. Speculative stores are buffers for updates that run before the clipping decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinflow.device import Device
from twinflow.offload.bucket import Bucket
from twinflow.offload.executor import Executor
from twinflow.offload.flats import FlatPool
from twinflow.offload.plan import HOST, BucketPlan
from twinflow.offload.settings import Settings
from twinflow.offload.speculative_stores import SpeculativeStores
from twinflow.offload.state_file import StateFile
from twinflow.planner.costs import FLATS_OUT
from twinflow.rules import Rule


def new_executor(
    device: Device,
    rule: Rule | None,
    plans: Sequence[BucketPlan],
    settings: Settings,
    tensor_device: torch.device,
    file: StateFile | None,
    weights: StateFile | None = None,
) -> Executor:
    """An executor with empty pools whose limits fit the buckets.

    `rule` is the rule of updates on the host, or None for a user's optimizer. `file`: the state on the disk. `weights`:
    the weights of blocks on the disk.
    """
    num_hosted = sum(plan.place == HOST for plan in plans)
    return Executor(
        device,
        rule,
        FlatPool(
            tensor_device, flat_bytes(settings, plans), min(settings.flat_bytes, FLATS_OUT * bytes_of_slot(plans))
        ),
        bytes_of_slot(plans),
        num_gradient_slots(settings, num_hosted),
        num_weight_slots(settings, num_hosted),
        settings.hold_on_host,
        settings.sums_on_host,
        file,
        weights,
    )


def bytes_of_slot(plans: Sequence[BucketPlan]) -> int:
    """Bytes of the largest bucket. Buckets on the device count too, because they may move to the host."""
    return max((p.numel * p.dtype.itemsize for p in plans), default=0)


def bytes_of_gradients(settings: Settings, plans: Sequence[BucketPlan]) -> int:
    """Bytes of all gradient slots."""
    return num_gradient_slots(settings, sum(p.place == HOST for p in plans)) * bytes_of_slot(plans)


def num_weight_slots(settings: Settings, num_buckets: int) -> int:
    """Number of weight slots: one for each bucket if updates are delayed, otherwise `num_slots` at most."""
    return num_buckets if settings.delayed_update else min(settings.num_slots, num_buckets)


def fit_pools(executor: Executor, settings: Settings, buckets: Sequence[Bucket]) -> None:
    """Resizes the pools after buckets have moved or the number of micro-batches of a step has changed."""
    num_hosted = sum(not bucket.is_on_device for bucket in buckets)
    executor.set_sums_on_host(settings.sums_on_host)
    executor.resize(
        num_gradient_slots(settings, num_hosted),
        num_weight_slots(settings, num_hosted),
        keeps_weight_slots=settings.may_run_ahead,  # updates before the clipping decision use surplus slots
    )
    executor.flats.set_limit(flat_bytes(settings, [bucket.plan for bucket in buckets]))


def flat_bytes(settings: Settings, plans: Sequence[BucketPlan]) -> int:
    """Bytes of device memory for flat gradient buffers.

    If gradients wait on the device for the global norm, there must be room for all of them. If they wait on the host,
    or if updates are delayed, there must be room for the gradients of buckets that the device updates. All other
    buckets share `settings.flat_bytes` and use it in turn.
    """
    if settings.limits.any and not settings.hold_on_host:
        return sum(p.numel * p.dtype.itemsize for p in plans)
    waits_there = settings.limits.any or settings.delayed_update
    there = sum(p.numel * p.dtype.itemsize for p in plans if p.place != HOST) if waits_there else 0
    return settings.flat_bytes + there


def num_gradient_slots(settings: Settings, num_buckets: int) -> int:
    """Number of slots: one for each bucket if gradients wait on the host or updates are delayed. Otherwise it is
    `num_slots` at most. Gradients do not wait if no limit needs the norm, or if they are added to a sum on the host.
    """
    holds_on_host = settings.hold_on_host and settings.limits.any and not settings.sums_on_host
    return num_buckets if settings.delayed_update or holds_on_host else min(settings.num_slots, num_buckets)


def runs_ahead(executor: Executor, settings: Settings) -> bool:
    """Whether updates run before the clipping decision, if there is memory for it."""
    return settings.may_run_ahead and settings.limits.any and executor.can_run_ahead


def prepare_speculative_stores(
    stores: SpeculativeStores, executor: Executor, settings: Settings, buckets: Sequence[Bucket]
) -> None:
    """Makes speculative stores within their limits of memory, for updates before the clipping decision and for those
    beside background checkpoints.
    """
    is_ahead, is_saved = runs_ahead(executor, settings), stores.saved_bytes > 0 and executor.can_run_ahead
    if not (is_ahead or is_saved or stores.num_bytes):
        return
    hosted = [bucket for bucket in buckets if not bucket.is_on_device]
    stores.prepare(hosted if is_ahead else [], hosted if is_saved else [])
    if any(bucket.updater.needs_weight_slot(bucket.plan) for bucket in hosted):
        # One more slot for each store. Slots that were added for earlier stores are used again or released.
        num_added = max(0, executor.counters.num_weight_slots - executor.num_weight_slots)
        if num_added > stores.num_stores:
            executor.resize(executor.num_slots, executor.num_weight_slots, keeps_weight_slots=False)
            num_added = 0
        executor.add_weight_slots(stores.num_stores - num_added)
