"""Whether a step's gradients are taken during backward.

Taking them early hides most of an update behind backward. It costs work where a loop then looks at what was taken, and
an error where an update that has been written cannot be undone. So a loop that does such things is given its gradients
as torch does for a while, twice as long each time. And where nothing can be undone, early updates start only after some
steps have been watched: one shows which parameters get several gradients in one backward, a few show what the loop
does.
"""

from __future__ import annotations

from twinflow.offload.settings import Settings

WATCHED_STEPS = 3
_LONGEST_PAUSE = 1024


def num_watched(settings: Settings, can_undo: bool, has_ranks: bool) -> int:
    """Steps whose gradients stay in `.grad`, before those of others are taken during backward."""
    if can_undo or settings.is_short or settings.offload_params:
        return 0  # or the device has no room for all gradients: they have to leave it at once
    if settings.accumulation_steps > 1 and (has_ranks or not settings.watches_first):
        return 0  # sums are made in fp32, by ranks in their own order: that must not change after some steps
    return WATCHED_STEPS if settings.watches_first else 1


class EarlyPolicy:
    """Counts steps; the runtime tells it how each of them went."""

    def __init__(self, is_early: bool, num_watched: int) -> None:
        self._is_early = is_early
        self._num_left = num_watched  # steps until gradients are taken early
        self._pause = WATCHED_STEPS  # after the next step that was disturbed

    @property
    def takes(self) -> bool:
        """Whether the next step's gradients are taken during backward."""
        return self._is_early and self._num_left == 0

    @property
    def watches(self) -> bool:
        """Whether it will be so after some ordinary steps."""
        return self._is_early and self._num_left > 0

    def after_step(self, was_disturbed: bool) -> None:
        """`was_disturbed`: between backward and `step` somebody used gradients, weights or options."""
        if was_disturbed:
            self._num_left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._num_left:
            self._num_left -= 1
