"""The kind of an optimizer's state: rule, format, and memory and updater in each place (host, device or streamed)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from twinflow.device import Device
from twinflow.offload.bucket import Updater
from twinflow.offload.device_updater import DeviceUpdater
from twinflow.offload.plan import HOST, RESIDENT, STREAMED, BucketPlan
from twinflow.offload.recipe import Recipe
from twinflow.offload.settings import Tuning
from twinflow.offload.streamed import StreamedUpdater
from twinflow.offload.torch_streamed import StreamedTorchUpdater
from twinflow.offload.torch_updater import TorchUpdater
from twinflow.offload.updater import RuleUpdater
from twinflow.planner import formats
from twinflow.rules import Rule

_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class StateKind:
    """An optimizer's rule and the format of its state."""

    rule: Rule | None  # one of twinflow's rules
    recipe: Recipe | None  # or the user's optimizer
    format: str
    is_stateless: bool = False  # SGD without momentum
    keeps_weights: bool = False  # the state has separate buffers for new weights
    offloads_params: bool = False  # the state has the only copy of the weights, in their dtype
    tuning: Tuning = field(default_factory=Tuning)

    def nbytes(self, plan: BucketPlan) -> int:
        """Bytes of a bucket's state in its place."""
        extra = 2 * plan.numel if self.offloads_params and plan.dtype == torch.float16 else 0
        return state_bytes(self.rule, self.format, plan, not self.is_stateless, self.keeps_weights) + extra

    def new_updaters(self, device: Device, where: torch.device) -> dict[str, Updater]:
        """The updater of each place."""
        if self.recipe is not None:
            return {
                HOST: TorchUpdater(self.recipe, device),
                RESIDENT: TorchUpdater(self.recipe, device, where),
                STREAMED: StreamedTorchUpdater(self.recipe, device, where),
            }
        assert self.rule is not None
        keeps_states = not self.is_stateless
        return {
            HOST: RuleUpdater(self.rule, self.format, device, keeps_states, self.offloads_params),
            RESIDENT: DeviceUpdater(
                self.rule, self.format, where, keeps_states, self.keeps_weights, self.tuning.update_programs
            ),
            STREAMED: StreamedUpdater(self.rule, self.format, device, where, keeps_states),
        }


def state_bytes(
    rule: Rule | None, format: str, plan: BucketPlan, keeps_states: bool = True, keeps_weights: bool = False
) -> int:
    """Bytes of a bucket's master, states and scales in its place, by the planner's formulas.

    A user's optimizer (`rule=None`) counts as fp32 with two states.
    """
    if rule is None:
        return int(formats.state_bytes("fp32").host * plan.numel)
    num_states = sum(name is not None for name in rule.states) if keeps_states else 0
    keeps_weights = keeps_weights or not plan.can_alias
    each = formats.state_bytes(format, _NAMES[plan.dtype], keeps_weights, num_states)
    return int(getattr(each, plan.place) * plan.numel)
