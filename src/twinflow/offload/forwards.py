"""What the forward of each block uses, and the order in which blocks run.

The first forward of the model is recorded. Its order is the order of deadlines: of the updates that could be made, the
executor makes the one first whose weights the next forward needs first. Blocks that do not run in it are waited for
together with what lies outside all blocks (ROOT): both have deadline 0, the first.

The order is recorded once. A forward that runs blocks in another order is still correct; only its updates come in a
less useful order.
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
    """By block: buckets to wait for, parameters in use, and runs in this forward of the model."""

    def __init__(self, params: Sequence[Param], buckets: Sequence[Bucket]) -> None:
        self._params = params
        self._buckets = buckets
        self._by_block: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            self._by_block.setdefault(bucket.plan.block, []).append(bucket)
        self._param_offload: ParamOffload | None = None  # of weights that live on the host
        self._held: dict[int, Held] = {}  # what the forward of each block waits for
        self._used: dict[int, list[Param]] = {}  # the parameters that it uses
        self._guarded: dict[int, list[Tensor]] = {}  # those of them that it makes ordinary: they live on the device
        self._runs: dict[int, int] = {}  # of each block, in this forward of the model
        self._order: list[int] | None = None  # of the blocks in the first forward, while it is recorded
        self._is_recorded = False

    def held(self, block: int) -> Held:
        """The buckets whose weights the forward of a block waits for. Those that live on the host are not among them:
        each forward has a copy, and waits for it elsewhere (param_offload.py)."""
        return self._held.get(block, _NOTHING)

    def used(self, block: int) -> Sequence[Param]:
        """The parameters that the forward of a block uses."""
        return self._used.get(block, ())

    def guarded(self, block: int) -> Sequence[Tensor]:
        """Those of them that have memory on the device."""
        return self._guarded.get(block, ())

    def find_users(self, blocks: Sequence[Block], param_offload: ParamOffload | None) -> None:
        """Each block waits for its own buckets, and for those of parameters that it shares."""
        self._param_offload = param_offload
        by_tensor: dict[Tensor, Param] = {param.tensor: param for param in self._params}
        in_blocks: set[Param] = set()
        for block in blocks:
            own = [by_tensor[p] for p in block.module.parameters() if p in by_tensor]
            in_blocks.update(own)
            self._used[block.index] = own
            self._set_held(block.index, list(dict.fromkeys(bucket for param in own for bucket in param.buckets)))
        self._used[ROOT] = [param for param in self._params if param not in in_blocks]
        self._set_held(ROOT, self._by_block.get(ROOT, ()))
        self._set_guarded()

    def _set_held(self, block: int, buckets: Sequence[Bucket]) -> None:
        self._held[block] = Held.of([bucket for bucket in buckets if not bucket.offloads_params])

    def _set_guarded(self) -> None:
        param_offload = self._param_offload
        for block, params in self._used.items():
            self._guarded[block] = [
                p.tensor for p in params if param_offload is None or not param_offload.holds(p.tensor)
            ]

    # Runs of blocks.

    def begin(self) -> None:
        """A new forward of the whole model: count the runs of its blocks from here."""
        self._runs.clear()
        if not self._is_recorded and self._order is None:
            self._order = []

    def enter(self, block: int) -> list[Param]:
        """A block runs; its parameters, where it is not the first time in this forward."""
        if self._order is not None:
            self._order.append(block)
        self._runs[block] = self._runs.get(block, 0) + 1
        if self._runs[block] == 1:
            return []
        return [param for bucket in self._by_block.get(block, ()) for param in bucket.members]

    def forget_runs(self) -> None:
        """A step is over."""
        self._runs.clear()

    # The order of blocks.

    def finish_recording(self) -> list[int] | None:
        """The first forward is over, and this is its order; None where nothing was recorded."""
        order = self._order
        if self._is_recorded or order is None:
            return None
        self.set_order(order)
        return order

    def set_order(self, order: Sequence[int]) -> None:
        """The order in which blocks run is known."""
        self._is_recorded = True
        self._order = None
        unused = set_deadlines(self._buckets, order)
        self._by_block.setdefault(ROOT, []).extend(unused)
        self._set_held(ROOT, [*self.held(ROOT).buckets, *unused])
        params = dict.fromkeys(param for bucket in unused for param in bucket.members)
        self._used.setdefault(ROOT, []).extend(params)
        self._set_guarded()
        for param in params:
            param.is_seen = True
