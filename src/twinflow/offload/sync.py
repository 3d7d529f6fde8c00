"""Sync points: each names one wait whose absence gives wrong results. A test switches each off and sees that happen."""

from __future__ import annotations

from typing import Final

FLAT_FREE: Final = "grad.flat_free"  # gradients go into a flat buffer when its last copy out has ended
REDUCE_READY: Final = "reduce.grad_ready"  # ranks sum gradients when they are complete
PUBLISH_READY: Final = "publish.sent"  # ... and gather weights when this rank's part is in its parameters
GRAD_READY: Final = "out.grad_ready"  # the copy out starts when the gradients are complete
RESIDENT_READY: Final = "resident.grad_ready"  # and so does an update on the device
STORED: Final = "streamed.stored"  # state comes to the device when it is on the host again
ARRIVED: Final = "update.arrived"  # the update starts when the gradients are on the host
NORMS: Final = "gate.norms"  # the decision is made when all norms are on the host
WEIGHT_SLOT: Final = "update.weight_slot"  # a weight slot is written again when its weights are sent
WEIGHT_SENT: Final = "update.weight_sent"  # ... and so is state that weights are sent from
OLD_WEIGHTS: Final = "back.old_weights"  # delayed weights go back when nobody needs the old ones any more
FETCH_ROOM: Final = "fetch.room"  # fetched weights come to the device when nobody uses the memory they go to
SENT: Final = "forward.sent"  # a block runs when its weights are on their way
FORWARD: Final = "forward.weights"  # ... and there
READERS: Final = "wait.weights"  # whoever asked for all weights gets them when they are there
