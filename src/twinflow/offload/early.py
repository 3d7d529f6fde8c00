# SPDX-License-Identifier: Apache-2.0
"""Decides whether the gradients of a step are taken during backward or left in `.grad` until `step`.

If gradients are taken during backward, most of an update overlaps with backward. This has a cost if the training loop
then reads or changes the gradients: the runtime has to put them back into `.grad`, or raises an error if an update has
already changed weights. After a step in which this happened (a disturbed step), gradients stay in `.grad` for some
steps. This pause doubles each time, up to 1024 steps. If updates cannot be undone, the first steps also leave gradients
in `.grad`: one step shows which parameters get several gradients in one backward, and a few steps show whether the loop
reads or changes gradients.

Only the thread that calls the runtime uses `EarlyPolicy`.
"""

from __future__ import annotations

from twinflow.offload.settings import Settings

WATCHED_STEPS = 3
_LONGEST_PAUSE = 1024


def num_watched(settings: Settings, can_undo: bool, has_ranks: bool) -> int:
    """Return the number of steps at the start that leave their gradients in `.grad`."""
    if can_undo or settings.is_short or settings.offload_params:
        return 0  # updates can be undone, or gradients must leave the device at once, because not all of them fit there
    if settings.accumulation_steps > 1 and (has_ranks or not settings.watches_first):
        # Early sums (in fp32, in the order of the ranks) have other bits than sums in `.grad`. All steps use one kind.
        return 0
    return WATCHED_STEPS if settings.watches_first else 1


class EarlyPolicy:
    """Counts the steps until gradients are taken during backward. The runtime calls `after_step` after each step."""

    def __init__(self, is_early: bool, num_watched: int) -> None:
        self._is_early = is_early
        self._num_left = num_watched  # steps until gradients are taken early
        self._pause = WATCHED_STEPS  # steps of the next pause, which a disturbed step starts

    @property
    def takes(self) -> bool:
        """Whether the next step's gradients are taken during backward."""
        return self._is_early and self._num_left == 0

    @property
    def watches(self) -> bool:
        """Whether gradients will be taken during backward after some more undisturbed steps."""
        return self._is_early and self._num_left > 0

    def after_step(self, was_disturbed: bool) -> None:
        """Count a step. `was_disturbed`: the user used gradients, weights or options between backward and `step`."""
        if was_disturbed:
            self._num_left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._num_left:
            self._num_left -= 1
