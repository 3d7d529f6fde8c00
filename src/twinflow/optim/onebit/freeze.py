"""Decides when the second moment is stable and may be frozen.

Adam's second moment changes much at the start of training. It is frozen when its sum has changed little over a window
of 1 / (1 - b2) steps. With a frozen second moment Adam is linear in the gradients, so that errors of compressed
communication cancel over time. It is not frozen while the learning rate rises, nor within a window after that, because
later training would need another second moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from twinflow.state_dict import float_of, int_of, value_of

MAX_WINDOW = 1000


def default_window(b2: float) -> int:
    """The number of steps in an average with decay `b2`: 1 / (1 - b2), at most `MAX_WINDOW`."""
    return min(MAX_WINDOW, max(2, round(1.0 / (1.0 - b2))))


@dataclass
class VarianceWatch:
    """Watches the bias-corrected sum of the second moment."""

    window: int
    threshold: float
    sums: deque[float] = field(default_factory=deque)  # the sums of the last `window` + 1 calls
    last_lr: float = -math.inf
    num_level: int = 0  # number of calls since the learning rate last rose

    def see(self, total: float, lr: float) -> bool:
        """Adds a sum and returns whether the second moment is stable. All ranks must pass the same numbers."""
        self.num_level = 0 if lr > self.last_lr else self.num_level + 1
        self.last_lr = lr
        self.sums.append(total)
        while len(self.sums) > self.window + 1:
            self.sums.popleft()
        if len(self.sums) <= self.window or self.num_level < self.window:
            return False
        least, most = sorted((self.sums[0], total))
        return least > 0.0 and least / most >= self.threshold

    def state_dict(self) -> dict[str, object]:
        """The sums and the history of the learning rate."""
        return {"sums": list(self.sums), "last_lr": self.last_lr, "num_level": self.num_level}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Loads a state of `state_dict`."""
        self.sums = deque(float(value) for value in value_of(state, "sums", list))
        self.last_lr, self.num_level = float_of(state, "last_lr"), int_of(state, "num_level")
