"""When the second moment has settled, and may be frozen.

Adam's second moment grows and falls a lot at the start of a training. Once its sum has changed little over as many
steps as it remembers, it is taken for good: from then on Adam is linear in the gradients, and errors that compressed
communication makes cancel over time. Not while the learning rate still rises, nor before it has been level for as
long: the second moment would be that of another stage of the training.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from twinflow.state_dict import float_of, int_of, value_of

MAX_WINDOW = 1000


def default_window(b2: float) -> int:
    """As many steps as an average with this decay remembers."""
    return min(MAX_WINDOW, max(2, round(1.0 / (1.0 - b2))))


@dataclass
class VarianceWatch:
    """Sees the sum of the second moment, without its bias, after each step."""

    window: int
    threshold: float
    sums: deque[float] = field(default_factory=deque)  # of the last steps, one more than the window
    last_lr: float = -math.inf
    num_level: int = 0  # steps since the learning rate last rose

    def see(self, total: float, lr: float) -> bool:
        """Whether it has settled. All ranks must see the same numbers."""
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
        """All that it remembers."""
        return {"sums": list(self.sums), "last_lr": self.last_lr, "num_level": self.num_level}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take it over."""
        self.sums = deque(float(value) for value in value_of(state, "sums", list))
        self.last_lr, self.num_level = float_of(state, "last_lr"), int_of(state, "num_level")
