# SPDX-License-Identifier: Apache-2.0
"""Names of the sync points. A sync point is one wait whose absence gives wrong results.

Each wait on an event passes the name of its sync point (device.py). For each sync point a test switches the wait off
and checks that the results become wrong.
"""

from __future__ import annotations

from typing import Final

# Each comment names the work that waits and, after the colon, what it waits for.
FLAT_FREE: Final = "grad.flat_free"  # writing gradients to a flat buffer or a total: for the end of the last read of it
REDUCE_READY: Final = "reduce.grad_ready"  # the reduction over ranks: for complete gradients
PUBLISH_READY: Final = "publish.sent"  # gathering weights from ranks: for this rank's part in its parameters
GRAD_READY: Final = "out.grad_ready"  # the copy to the host: for complete gradients
RESIDENT_READY: Final = "resident.grad_ready"  # an update on the device: for complete gradients
STORED: Final = "streamed.stored"  # loading streamed state to the device: for the end of its last store to the host
ARRIVED: Final = "update.arrived"  # an update on the host: for the gradients on the host
NORMS: Final = "gate.norms"  # the clipping decision: for all norms on the host
WEIGHT_SLOT: Final = "update.weight_slot"  # writing to a weight slot: for the end of the last copy from it
WEIGHT_SENT: Final = "update.weight_sent"  # writing to state that weights are copied from: for the end of the last copy
OLD_WEIGHTS: Final = "back.old_weights"  # delayed weights: for the end of the work that uses the old weights
FETCH_STORED: Final = "fetch.stored"  # fetching weights of streamed state: for the end of its last store to the host
FETCH_ROOM: Final = "fetch.room"  # fetching weights to the device: for the end of the last use of the target memory
SENT: Final = "forward.sent"  # the forward of a block, on the host: until the copy of its weights is queued
FORWARD: Final = "forward.weights"  # the forward of a block, on the device: for the end of that copy
STATE_READ: Final = "save.state_read"  # an update of state that a background checkpoint reads: until it is read
PARAMS_READ: Final = "save.params_read"  # writing to parameters that it reads: until they are read
READERS: Final = "wait.weights"  # a reader of weights or state: for the end of their copies
