"""Scalars that are copied from the device in the background. A direct read would wait for all queued work."""

from __future__ import annotations

import torch
from torch import Tensor


class LateScalar:
    """The value of a scalar tensor, copied to the host on the current stream."""

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
        """The value. Waits only for its copy."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)
