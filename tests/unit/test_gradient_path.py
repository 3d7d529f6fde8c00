# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md names the files that a gradient passes on its way to the native executor: this test follows one."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

import twinflow
from twinflow.offload import hooks
from twinflow.offload.executor import Executor
from twinflow.offload.weight_guard import plain
from twinflow.optim.twin import TwinOptimizer

SOURCES = Path(twinflow.__file__).parent
TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"
MOST_FILES = 6


class Follower:
    """A profile function. A gradient passes a file if a function there is given it, or leads from its hook to `submit`.

    It looks at gradients by identity only: reading a value would wait for updates.
    """

    def __init__(self, model: nn.Module) -> None:
        self.files: list[str] = []  # in the order in which gradients come to them
        self.num_submitted = 0
        self._params = list(model.parameters())
        self._grads: dict[int, Tensor] = {}  # those on their way
        self._hook: FrameType | None = None  # the hook that runs now

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if SOURCES not in file.parents:
            return
        if event == "return" and frame is self._hook:
            self._hook = None
        if event != "call":
            return
        if self._hook is None and _is_gradient_hook(frame):
            self._hook = frame
            with plain():
                self._grads = {id(p.grad): p.grad for p in self._params if type(p.grad) is Tensor}
            self._pass(file)
        if self._hook is None:
            return
        is_submit = frame.f_code is Executor.submit.__code__
        self.num_submitted += is_submit
        if is_submit or any(self._has_gradient(value) for value in frame.f_locals.values()):
            for caller in self._callers(frame):
                self._pass(Path(caller.f_code.co_filename))

    def _callers(self, frame: FrameType) -> list[FrameType]:
        """From the hook to this frame."""
        found = [frame]
        while found[-1] is not self._hook:
            caller = found[-1].f_back
            assert caller is not None
            found.append(caller)
        return found[::-1]

    def _pass(self, file: Path) -> None:
        if SOURCES in file.parents and (name := file.relative_to(SOURCES).as_posix()) not in self.files:
            self.files.append(name)

    def _has_gradient(self, value: object) -> bool:
        if type(value) is Tensor:
            return id(value) in self._grads
        if type(value) is dict:
            return any(map(self._has_gradient, value.values()))
        return type(value) in (list, tuple) and any(map(self._has_gradient, value))  # type: ignore[call-overload]


def _is_gradient_hook(frame: FrameType) -> bool:
    """Whether this is the function that `GradientQueue.attach` registers on a parameter."""
    code = frame.f_code
    return code.co_filename == hooks.__file__ and code.co_name == "hook" and "take" in code.co_freevars


def follow_one_step() -> Follower:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    follower = Follower(model)
    optimizer = TwinOptimizer(model, "adamw", lr=1e-3, early=True, max_grad_norm=1.0, ratio=1.0)
    try:
        loss = model(torch.randn(4, 16)).square().mean()
        threading.setprofile(follower)
        sys.setprofile(follower)
        try:
            loss.backward()
            optimizer.step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert optimizer.was_applied
    finally:
        optimizer.close()
    return follower


def files_in_text() -> list[str]:
    paragraph = next(part for part in TEXT.read_text().split("\n\n") if part.startswith("**The path of a gradient.**"))
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", paragraph)))


def test_a_gradient_passes_the_files_that_the_text_names() -> None:
    follower = follow_one_step()
    assert follower.num_submitted >= 3
    assert follower.files == files_in_text()
    assert len(follower.files) <= MOST_FILES
