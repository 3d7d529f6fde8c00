"""How much memory gradients and weights on their way get: slots on the host, flat buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinflow.device import Device
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket, Updater
from twinflow.offload.plan import HOST, BucketPlan
from twinflow.offload.settings import Settings
from twinflow.offload.shadow import ShadowPool
from twinflow.offload.slots import FlatPool, SlotPool
from twinflow.offload.sync import ARRIVED, WEIGHT_SLOT
from twinflow.offload.updater import RuleUpdater


def new_board(
    device: Device, updater: Updater, plans: Sequence[BucketPlan], settings: Settings, tensor_device: torch.device
) -> Board:
    """A board with empty pools, sized for these buckets."""
    hosted, slot_bytes = [p for p in plans if p.place == HOST], bytes_of_slot(plans)
    return Board(
        device,
        updater,
        SlotPool(device, num_gradient_slots(settings, len(hosted)), slot_bytes, ARRIVED),
        SlotPool(device, num_weight_slots(settings, len(hosted)), slot_bytes, WEIGHT_SLOT),
        FlatPool(tensor_device, flat_bytes(settings, plans)),
        ShadowPool(updater.new_store, updater.release if isinstance(updater, RuleUpdater) else lambda store: None),
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


def fit_slots(board: Board, settings: Settings, num_buckets: int) -> None:
    """Another number of buckets is on the host, or of micro-batches in a step."""
    with board.changed:
        board.slots.limit = num_gradient_slots(settings, num_buckets)
        board.weight_slots.limit = num_weight_slots(settings, num_buckets)
        board.slots.trim()
        if not settings.may_run_ahead:  # else those beyond the limit serve shadows
            board.weight_slots.trim()


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


def prepare_shadows(board: Board, settings: Settings, buckets: Sequence[Bucket], max_bytes: int) -> None:
    """Let updates run ahead of the gate within this much host memory, and make the shadows now."""
    board.shadows.max_bytes = max_bytes
    hosted = [bucket for bucket in buckets if not bucket.is_on_device]
    if not (settings.may_run_ahead and settings.limits.any and board.updater.can_shadow):
        return
    num_made = board.shadows.prepare((bucket.plan, board.shadow_bytes(bucket)) for bucket in hosted)
    if any(board.updater.needs_weight_slot(bucket.plan) for bucket in hosted):
        board.weight_slots.prepare(num_made)
