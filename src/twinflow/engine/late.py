"""Numbers on their way from the device: reading one at once would wait for all work that is queued there."""

from __future__ import annotations

import torch
from torch import Tensor


class LateScalar:
    """A scalar tensor's value, copied when the device gets there."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = value.detach()
        if value.is_cuda:
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value.detach().reshape(()), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(value.device))

    def done(self) -> bool:
        """Whether `get` returns without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def get(self) -> float:
        """The value; waits for it alone."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)
