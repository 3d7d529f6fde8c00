# SPDX-License-Identifier: Apache-2.0
"""`python -m twinflow.compat SCRIPT ...` runs a DeepSpeed script with twinflow. `-m MODULE ...` runs a module."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from twinflow.compat import install
from twinflow.errors import invalid_value
from twinflow.launch.environment import LOCAL_ADDRESS, free_port, rank_environment

USAGE = "usage: python -m twinflow.compat [-m] SCRIPT [ARGUMENTS]"


def main(words: list[str]) -> None:
    """Calls `install()` and runs the script as `python SCRIPT ARGUMENTS` does."""
    if not words:
        raise SystemExit(f"{USAGE}\nerror: No script is given.")
    if words[0] in ("-h", "--help"):
        print(USAGE)
        return
    is_module, script = words[0] == "-m", Path(words[0])
    if is_module and len(words) < 2:
        raise SystemExit(f"{USAGE}\nerror: No module is given after -m.")
    if not is_module and not script.is_file():
        error = invalid_value("SCRIPT", words[0], "the path of a file", "Use -m to run a module.")
        raise SystemExit(f"error: {error}")
    install()
    if rank_environment(os.environ) is None:
        os.environ.update(alone())
    sys.argv = words[is_module:]
    sys.path[0] = "" if is_module else str(script.resolve().parent)
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def alone() -> dict[str, str]:
    """The environment variables of a launcher for a single process. DeepSpeed scripts and Accelerate read them."""
    sizes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**sizes, "MASTER_ADDR": LOCAL_ADDRESS, "MASTER_PORT": str(free_port())}


if __name__ == "__main__":
    main(sys.argv[1:])
