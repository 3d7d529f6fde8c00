"""Decides whether the gradients of a step are taken during backward or left in `.grad` until `step`.

Gradients that are taken during backward let most of an update overlap with backward. They have a cost if the training
loop then reads or changes them: the runtime has to put them back, or raises an error if an update has already been
written. After a step in which this happened (a disturbed step), gradients stay in `.grad` for some steps. This pause
doubles each time. If written updates cannot be undone, the first steps also leave gradients in `.grad`: one step shows
which parameters get several gradients in one backward, and a few steps show what the loop does.

Only the thread that calls the runtime uses `EarlyPolicy`.
"""

from __future__ import annotations

from twinflow.offload.settings import Settings

WATCHED_STEPS = 3
_LONGEST_PAUSE = 1024


def num_watched(settings: Settings, can_undo: bool, has_ranks: bool) -> int:
    """Return how many first steps leave their gradients in `.grad`."""
    if can_undo or settings.is_short or settings.offload_params:
        return 0  # updates can be undone, or the device has no room for all gradients, which have to leave it at once
    if settings.accumulation_steps > 1 and (has_ranks or not settings.watches_first):
        return 0  # sums in fp32, in the order of the ranks, have other bits: that must not change after some steps
    return WATCHED_STEPS if settings.watches_first else 1


class EarlyPolicy:
    """Counts the steps until gradients are taken during backward. The runtime reports each step to it."""

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
        """`was_disturbed`: the user read or changed gradients, weights or options between backward and `step`."""
        if was_disturbed:
            self._num_left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._num_left:
            self._num_left -= 1
