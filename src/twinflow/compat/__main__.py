"""`python -m twinflow.compat script.py ...`: a script for DeepSpeed, run by twinflow; `-m module ...` likewise."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

from twinflow.compat import install
from twinflow.errors import invalid_value
from twinflow.launch.environment import LOCAL_ADDRESS, rank_environment

USAGE = "usage: python -m twinflow.compat [-m] SCRIPT [ARGUMENTS]"


def main(words: list[str]) -> None:
    """Run the script as `python SCRIPT ARGUMENTS` would, after `install()`."""
    if not words or words[0] in ("-h", "--help"):
        raise SystemExit(USAGE if words else f"{USAGE}\nerror: there is no script")
    is_module, script = words[0] == "-m", Path(words[0])
    if is_module and len(words) < 2:
        raise SystemExit(f"{USAGE}\nerror: there is no module after -m")
    if not is_module and not script.is_file():
        raise SystemExit(f"error: {invalid_value('script', words[0], 'a file that is there', 'For a module give -m.')}")
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
    """What a launcher tells the only process there is: scripts for DeepSpeed, and Accelerate, count on one."""
    with socket.socket() as made:
        made.bind((LOCAL_ADDRESS, 0))
        port = made.getsockname()[1]
    sizes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**sizes, "MASTER_ADDR": LOCAL_ADDRESS, "MASTER_PORT": str(port)}


if __name__ == "__main__":
    main(sys.argv[1:])
