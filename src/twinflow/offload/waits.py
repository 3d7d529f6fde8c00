"""Who waits for weights: a forward for those of its block, a reader for all, a writer until nobody copies any more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from twinflow.device import Device
from twinflow.offload.board import Board
from twinflow.offload.bucket import Bucket
from twinflow.offload.sync import FORWARD, READERS, SENT


def hold_forward(device: Device, board: Board, bucket: Bucket) -> float:
    """Wait here until a bucket's weights are on their way, and let the model wait until they are there; how long."""
    start, waited_s = time.perf_counter(), 0.0
    if bucket.shown < bucket.due and SENT not in device.disabled:
        board.wait_for(lambda: bucket.shown >= bucket.due)
        end = time.perf_counter()
        waited_s = end - start
        device.trace.add("wait", "main", start, end, bucket=bucket.plan.index)
    event = bucket.shown_event
    if event is not None:
        board.hold(event, FORWARD)
        if event.done() and bucket.shown_event is event:
            bucket.forget_shown()
    return waited_s


def wait_for_weights(device: Device, board: Board, buckets: Sequence[Bucket]) -> None:
    """Block the calling thread until these buckets' weights are in their parameters: every stream then sees them."""
    if SENT not in device.disabled:
        board.wait_for(lambda: all(bucket.shown >= bucket.due for bucket in buckets))
    for bucket in buckets:
        event = bucket.shown_event
        if event is not None and READERS not in device.disabled:
            event.synchronize()


def hold_readers(device: Device, board: Board, buckets: Sequence[Bucket]) -> None:
    """Let whoever reads weights or state from here on get them as they will be."""
    for bucket in buckets:
        for event in (bucket.sent_event, bucket.published_event):
            if event is not None:
                board.hold(event, READERS)
        if bucket.stored is not None and READERS not in device.disabled:
            bucket.stored.synchronize()
    if any(bucket.is_on_device for bucket in buckets):  # state that the weights do not show yet
        board.hold(device.stream("update").record(), READERS)


def finish_copies(device: Device, buckets: Iterable[Bucket]) -> None:
    """Until no stream reads the state any more."""
    buckets = list(buckets)
    for bucket in buckets:
        for event in (bucket.sent_event, bucket.published_event):
            if event is not None:
                event.synchronize()
    if any(bucket.is_on_device for bucket in buckets):
        device.stream("update").synchronize()
