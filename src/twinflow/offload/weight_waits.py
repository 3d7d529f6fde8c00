# SPDX-License-Identifier: Apache-2.0
"""Makes forwards, and other code that reads weights, wait until the updates of these weights are done.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. `Forwards` knows
the parameters of each block (forwards.py). A weight is guarded while an update of it may be pending: code that reads a
guarded weight waits for it (weight_guard.py). The forward of a block waits for all of its weights at once, and then no
longer needs the guards.

Only the thread that calls the runtime uses `WeightWaits` (runtime.py), with one exception: any thread may call `wait`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from twinflow.device import Device
from twinflow.offload import weight_guard
from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Bucket, Param
from twinflow.offload.executor import Executor, Held
from twinflow.offload.forwards import Forwards
from twinflow.offload.hooks import call_after_backward, in_backward
from twinflow.offload.param_offload import ParamOffload


class WeightWaits:
    """The waits of forwards for weights, and what the forwards of this step have used."""

    def __init__(self, device: Device, executor: Executor, params: Sequence[Param], buckets: Sequence[Bucket]) -> None:
        self._device = device
        self._executor = executor
        self._params = params
        self._forwards = Forwards(params, buckets)
        self.param_offload: ParamOffload | None = None  # manages weights that live on the host
        self.waited_s = 0.0  # seconds that forwards have waited for weights
        self.num_forwards = 0  # forwards of the model in this step
        self.is_covered = False  # weights are guarded, and no backward has begun since
        self._is_in_model = False  # a forward of the whole model runs, which guards all weights when it ends
        # Parameters that were frozen in a forward of this step. If one of them gets a gradient from another forward, no
        # hook shows when backward has read the weight for the last time. No update may then run before `step`.
        self._used_frozen: set[Param] = set()

    def offload_params(self, param_offload: ParamOffload) -> None:
        """Some weights live on the host from now on."""
        self.param_offload = param_offload

    def find_users(self, blocks: Sequence[Block]) -> None:
        """Find the parameters of each block."""
        self._forwards.find_users(blocks, self.param_offload)

    def set_order(self, order: Sequence[int]) -> None:
        """Set the order in which blocks run. Without it, the first forward is recorded."""
        self._forwards.set_order(order)

    def note_places(self) -> None:
        """Find the parameters whose weights are on the device, after weights were moved."""
        self._forwards.note_places()

    # Forwards, in execution order.

    def begin_forward(self) -> None:
        """Start a forward of the whole model. The runs of its blocks are counted from here."""
        self._is_in_model = True
        self._forwards.begin()
        self.num_forwards += torch.is_grad_enabled()

    def enter(self, block: int) -> list[Param]:
        """Note that a block runs. Returns its parameters if it has already run in this forward, else []."""
        return self._forwards.enter(block)

    def wait_for_block(self, block: int, can_undo: bool) -> None:
        """Wait for the weights of a block. `can_undo`: see `GradientTaker`."""
        self.hold(self._forwards.held(block))
        self.uncover_block(block)
        is_recorded = torch.is_grad_enabled() and not can_undo
        for param in self._forwards.used(block):
            param.is_seen = True
            if is_recorded and not param.tensor.requires_grad:
                self._used_frozen.add(param)

    def hold(self, held: Held) -> None:
        """Make the model wait for the weights of these buckets.

        The calling thread waits until their copies are queued. The model's streams wait until the copies have ended.
        """
        if held.buckets:
            start = time.perf_counter()
            waited_s = self._executor.hold(held)
            if waited_s:
                self.waited_s += waited_s
                self._device.trace.add("wait", "main", start, start + waited_s, bucket=held.buckets[0].plan.index)

    def uncover_block(self, block: int) -> None:
        """Remove the guards of a block's weights, because its forward has waited for them."""
        weight_guard.uncover(self._forwards.guarded(block))

    def leave_block(self, block: int) -> None:
        """Guard the weights of a block whose forward has ended, unless a forward of the whole model does it later."""
        if not self._is_in_model:
            self.cover(self._forwards.used(block))

    def finish_recording(self) -> None:
        """End the recording of the first forward. The order of its blocks is the order of deadlines."""
        order = self._forwards.finish_recording()
        if order is not None and self.param_offload is not None:
            self.param_offload.set_order(order)

    def cover(self, params: Sequence[Param]) -> None:
        """Guard weights, except weights that compiled graphs use without our hooks. `step` waits for these weights."""
        self.is_covered = True
        self._is_in_model = False
        weight_guard.cover([param.tensor for param in params if not param.is_bypassed])

    # Backward.

    def begin_backward(self) -> None:
        """Remove the guards of weights that the forward has used: blocks that are recomputed use them again.

        A weight is guarded again when its gradient is taken. Weights without a gradient in this backward are guarded
        when it ends, because a write through `.data` before `step` would not be noticed without the guard.
        """
        self._is_in_model = False  # an exception may have ended the forward
        if self.is_covered and in_backward():  # `step` takes gradients too, after the backward
            self.is_covered = False
            # The other weights wait when they are used.
            again = [p for p in self._params if p.is_seen and not p.hits and not self.lives_away(p.tensor)]
            weight_guard.uncover([param.tensor for param in again])
            call_after_backward(partial(weight_guard.cover, [p.tensor for p in again if not p.is_bypassed]))

    @property
    def has_unfrozen(self) -> bool:
        """Whether a parameter that was frozen in a forward of this step requires a gradient now."""
        return any(param.tensor.requires_grad for param in self._used_frozen)

    def end_step(self) -> None:
        """Forget the forwards of this step."""
        self._forwards.forget_runs()
        self._is_in_model = False
        self.num_forwards = 0
        self._used_frozen.clear()

    # Reads outside of forwards.

    def wait(self, param: Param) -> None:
        """Block until the updates of one weight are done."""
        self._executor.check()
        self._executor.wait_for_weights(param.buckets)
        param.is_seen = True

    def lives_away(self, tensor: Tensor) -> bool:
        """Whether the parameter has no memory of its own on the device, because its weights live on the host."""
        return self.param_offload is not None and self.param_offload.params.is_away(tensor)
