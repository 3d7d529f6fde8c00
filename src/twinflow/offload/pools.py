"""Memory for gradients and weights on their way: slots on the host, flat buffers on the device, speculative stores."""

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
from twinflow.rules import Rule


def new_executor(
    device: Device, rule: Rule | None, plans: Sequence[BucketPlan], settings: Settings, tensor_device: torch.device
) -> Executor:
    """An executor with empty pools, sized for these buckets; `rule`: of updates on the host, None for a user's own
    optimizer."""
    num_hosted = sum(plan.place == HOST for plan in plans)
    return Executor(
        device,
        rule,
        FlatPool(tensor_device, flat_bytes(settings, plans)),
        bytes_of_slot(plans),
        num_gradient_slots(settings, num_hosted),
        num_weight_slots(settings, num_hosted),
        settings.hold_on_host,
        settings.sums_on_host,
    )


def bytes_of_slot(plans: Sequence[BucketPlan]) -> int:
    """Of all buckets, the largest: they may move to the host."""
    return max((p.numel * p.dtype.itemsize for p in plans), default=0)


def bytes_of_gradients(settings: Settings, plans: Sequence[BucketPlan]) -> int:
    """Host memory for gradients on their way, or while they wait."""
    return num_gradient_slots(settings, sum(p.place == HOST for p in plans)) * bytes_of_slot(plans)


def num_weight_slots(settings: Settings, num_buckets: int) -> int:
    """One for each bucket where its weights wait for a step; else a few serve all in turn."""
    return num_buckets if settings.delayed_update else min(settings.num_slots, num_buckets)


def fit_pools(executor: Executor, settings: Settings, buckets: Sequence[Bucket]) -> None:
    """Other buckets are on the host, or another number of micro-batches makes a step."""
    num_hosted = sum(not bucket.is_on_device for bucket in buckets)
    executor.set_sums_on_host(settings.sums_on_host)
    executor.resize(
        num_gradient_slots(settings, num_hosted),
        num_weight_slots(settings, num_hosted),
        keeps_weight_slots=settings.may_run_ahead,  # those beyond the limit serve speculative stores
    )
    executor.flats.set_limit(flat_bytes(settings, [bucket.plan for bucket in buckets]))


def flat_bytes(settings: Settings, plans: Sequence[BucketPlan]) -> int:
    """All gradients where they wait for the norm on the device. Where they wait on the host, those whose update is on
    the device still do, as they do for weights of a delayed update. Else a few buffers serve all in turn."""
    if settings.limits.any and not settings.hold_on_host:
        return sum(p.numel * p.dtype.itemsize for p in plans)
    waits_there = settings.limits.any or settings.delayed_update
    there = sum(p.numel * p.dtype.itemsize for p in plans if p.place != HOST) if waits_there else 0
    return settings.flat_bytes + there


def num_gradient_slots(settings: Settings, num_buckets: int) -> int:
    """One for each bucket where gradients wait on the host; else a few serve all in turn: nothing waits for a norm, or
    a sum takes gradients in at once."""
    holds_on_host = settings.hold_on_host and settings.limits.any and not settings.sums_on_host
    return num_buckets if settings.delayed_update or holds_on_host else min(settings.num_slots, num_buckets)


def prepare_speculative_stores(
    stores: SpeculativeStores, executor: Executor, settings: Settings, buckets: Sequence[Bucket], max_bytes: int
) -> None:
    """Let updates run ahead of the clipping decision within this much host memory, and make the stores now."""
    stores.set_limit(max_bytes)
    if not (settings.may_run_ahead and settings.limits.any and executor.can_run_ahead):
        return
    hosted = [bucket for bucket in buckets if not bucket.is_on_device]
    num_made = stores.prepare(hosted)
    if any(bucket.updater.needs_weight_slot(bucket.plan) for bucket in hosted):
        executor.add_weight_slots(num_made)
