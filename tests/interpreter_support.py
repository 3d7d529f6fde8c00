# SPDX-License-Identifier: Apache-2.0
"""Runs cases of Triton kernels in Triton's interpreter.

The interpreter is chosen when Triton is first imported, so the cases run in a process of their own. It is a script that
calls `run_cases`. Without the variable TRITON_INTERPRET, the same script runs the cases on CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def run_cases(cases: Mapping[str, Callable[[str], None]]) -> None:
    """Runs the cases that the command line names, or all, on a device. Prints the name of each and what went wrong."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
    for name in sys.argv[1:] or cases:
        try:
            cases[name](device)
            problem = ""
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)


def in_the_interpreter(script: str, *names: str) -> dict[str, str]:
    """What went wrong in each of these cases of a script, all of them in one process."""
    return dict(run_python(script, *names, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"))


def run_python(script: str, *names: str, **env: str) -> list[Any]:
    """What a script in a process of its own prints, a line of JSON each."""
    paths = [str(Path(__file__).parent), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"} | env
    done = subprocess.run([sys.executable, script, *names], capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def wanted_cases(request: pytest.FixtureRequest) -> list[str]:
    """The parameter `name` of the tests of this file that use the fixture, and that this session runs."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and request.fixturename in item.fixturenames
    ]
