# SPDX-License-Identifier: Apache-2.0
"""The parameters that the forward of each block uses, and the order in which blocks run.

A block is a member of the model's outermost ModuleLists and Sequentials, usually a transformer layer. A bucket holds
slices of parameters (ranges of their elements) that are copied and updated together.

The first forward of the model is recorded. The order of its blocks is the order of deadlines: the executor first makes
the update whose weights the next forward needs first. Blocks that do not run in this forward, and parameters outside of
all blocks (ROOT), have deadline 0, which is the earliest. The model waits for their weights when its forward begins.

The order is recorded once. A later forward that runs blocks in another order gives correct results. It may wait longer,
because the updates are made in the recorded order.

Only the thread that calls the runtime uses `Forwards`, so there is no lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from twinflow.offload.blocks import Block
from twinflow.offload.bucket import Bucket, Param, set_deadlines
from twinflow.offload.executor import Held
from twinflow.offload.param_offload import ParamOffload
from twinflow.offload.plan import ROOT

_NOTHING = Held.of([])


class Forwards:
    """For each block: the buckets that it waits for, the parameters that it uses, and its runs in this forward."""

    def __init__(self, params: Sequence[Param], buckets: Sequence[Bucket]) -> None:
        self._params = params
        self._buckets = buckets
        self._by_block: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            self._by_block.setdefault(bucket.plan.block, []).append(bucket)
        self._param_offload: ParamOffload | None = None  # manages weights that live on the host
        self._waits: dict[int, list[Bucket]] = {}  # by block: the buckets with its parameters
        self._held: dict[int, Held] = {}  # by block: those of `_waits` whose weights are on the device
        self._used: dict[int, list[Param]] = {}  # by block: the parameters that its forward uses
        self._guarded: dict[int, list[Tensor]] = {}  # by block: the used parameters whose memory is on the device
        self._runs: dict[int, int] = {}  # by block: its runs in this forward of the model
        self._order: list[int] | None = None  # the blocks of the first forward, while it is recorded
        self._is_recorded = False

    def held(self, block: int) -> Held:
        """Return the buckets whose weights the forward of a block waits for.

        Buckets of offloaded weights are not among them: param_offload.py waits for the copies of these weights.
        """
        return self._held.get(block, _NOTHING)

    def used(self, block: int) -> Sequence[Param]:
        """Return the parameters that the forward of a block uses."""
        return self._used.get(block, ())

    def guarded(self, block: int) -> Sequence[Tensor]:
        """Return the parameters that the forward of a block uses and whose memory is on the device."""
        return self._guarded.get(block, ())

    def find_users(self, blocks: Sequence[Block], param_offload: ParamOffload | None) -> None:
        """Find the parameters of each block. A block waits for all buckets that contain slices of its parameters."""
        self._param_offload = param_offload
        by_tensor: dict[Tensor, Param] = {param.tensor: param for param in self._params}
        in_blocks: set[Param] = set()
        for block in blocks:
            own = [by_tensor[p] for p in block.module.parameters() if p in by_tensor]
            in_blocks.update(own)
            self._used[block.index] = own
            self._waits[block.index] = list(dict.fromkeys(bucket for param in own for bucket in param.buckets))
        self._used[ROOT] = [param for param in self._params if param not in in_blocks]
        self._waits[ROOT] = [*self._by_block.get(ROOT, ())]
        self.note_places()

    def note_places(self) -> None:
        """Find the buckets and parameters whose weights are on the device, after weights were moved."""
        param_offload = self._param_offload
        for block, buckets in self._waits.items():
            self._held[block] = Held.of([bucket for bucket in buckets if not bucket.offloads_params])
        for block, params in self._used.items():
            self._guarded[block] = [
                p.tensor for p in params if param_offload is None or not param_offload.params.holds(p.tensor)
            ]

    # Runs of blocks.

    def begin(self) -> None:
        """Start a forward of the whole model. The runs of its blocks are counted from here."""
        self._runs.clear()
        if not self._is_recorded and self._order is None:
            self._order = []

    def enter(self, block: int) -> list[Param]:
        """Note that a block runs. Returns its parameters if it has already run in this forward, else []."""
        if self._order is not None:
            self._order.append(block)
        self._runs[block] = self._runs.get(block, 0) + 1
        if self._runs[block] == 1:
            return []
        return [param for bucket in self._by_block.get(block, ()) for param in bucket.members]

    def forget_runs(self) -> None:
        self._runs.clear()

    # The order of blocks.

    def finish_recording(self) -> list[int] | None:
        """End the recording of the first forward and return the order of its blocks; None if none is being recorded."""
        order = self._order
        if self._is_recorded or order is None:
            return None
        self.set_order(order)
        return order

    def set_order(self, order: Sequence[int]) -> None:
        """Set the deadlines of all buckets from the order in which blocks run."""
        self._is_recorded = True
        self._order = None
        unused = set_deadlines(self._buckets, order)
        self._by_block.setdefault(ROOT, []).extend(unused)
        self._waits.setdefault(ROOT, []).extend(unused)
        params = dict.fromkeys(param for bucket in unused for param in bucket.members)
        self._used.setdefault(ROOT, []).extend(params)
        self.note_places()
        for param in params:
            param.is_seen = True
