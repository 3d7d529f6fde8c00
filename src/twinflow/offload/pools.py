"""How much memory gradients and weights on their way get: slots on the host, flat buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinflow.device import Device
from twinflow.offload.board import Board
from twinflow.offload.plan import BucketPlan
from twinflow.offload.settings import Settings
from twinflow.offload.shadow import ShadowPool
from twinflow.offload.slots import FlatPool, SlotPool
from twinflow.offload.sync import ARRIVED, WEIGHT_SLOT
from twinflow.offload.updater import Updater


def new_board(
    device: Device, updater: Updater, plans: Sequence[BucketPlan], settings: Settings, tensor_device: torch.device
) -> Board:
    """A board with empty pools, sized for these buckets."""
    slot_bytes = max((p.numel * p.dtype.itemsize for p in plans), default=0)
    all_bytes = sum(p.numel * p.dtype.itemsize for p in plans)
    num_weight_slots = len(plans) if settings.delayed_update else min(settings.num_slots, len(plans))
    holds_on_device = settings.limits.any and not settings.hold_on_host
    return Board(
        device,
        updater,
        SlotPool(device, num_gradient_slots(settings, len(plans)), slot_bytes, ARRIVED),
        SlotPool(device, num_weight_slots, slot_bytes, WEIGHT_SLOT),
        FlatPool(tensor_device, all_bytes if holds_on_device else settings.flat_bytes),
        ShadowPool(updater.new_store),
        settings.hold_on_host,
        settings.sums_on_host,
    )


def num_gradient_slots(settings: Settings, num_buckets: int) -> int:
    """One for each bucket where gradients wait on the host; else a few serve all in turn: nothing waits for a norm, or
    a sum takes gradients in at once."""
    holds_on_host = settings.hold_on_host and settings.limits.any and not settings.sums_on_host
    return num_buckets if settings.delayed_update or holds_on_host else min(settings.num_slots, num_buckets)
