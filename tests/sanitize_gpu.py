# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU tests of the order of streams under NVIDIA's compute-sanitizer: `make sanitize-gpu`.

    python tests/sanitize_gpu.py               # every pass
    python tests/sanitize_gpu.py --only races  # one of them

An access to memory that torch's caching allocator owns looks legal to the sanitizer, whatever its stream. Each pass
therefore replaces this allocator. Under the sanitizer a test takes many times longer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent / "gpu"
FOUND = 99  # exit code if the sanitizer has found something
STREAMS = ("test_twin.py", "test_param_offload.py", "test_activations.py", "test_ratio.py")
KERNELS = ("test_update.py", "test_packing.py")
# Tests of memory use, of speed and of whether the host waits mean nothing with another allocator.
ORDER = "(no_bit or bits or clip_decision) and not memory_falls and not auto_chooses"
VALUES = "not current_stream"


@dataclass(frozen=True)
class Pass:
    """One run of the sanitizer: its options, the environment of the tests, their files, and which tests of them."""

    options: tuple[str, ...]
    environment: dict[str, str]
    files: tuple[str, ...]
    which: str


PASSES = {
    # Accesses out of bounds and to memory that was freed: every tensor is an allocation of its own.
    "memory": Pass(("--tool", "memcheck"), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, STREAMS, ORDER),
    # A stream that uses memory before another one has allocated it, or after another one has freed it.
    "races": Pass(
        ("--tool", "memcheck", "--track-stream-ordered-races", "all"),
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        STREAMS,
        ORDER,
    ),
    # Threads of one kernel that access shared memory without a barrier between them.
    "shared memory": Pass(("--tool", "racecheck"), {}, KERNELS, VALUES),
}


def find_sanitizer() -> str | None:
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("compute-sanitizer") or next(
        (found for place in places if place and (found := shutil.which(f"{place}/bin/compute-sanitizer"))), None
    )


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def command(sanitizer: str, one: Pass) -> list[str]:
    # Libraries try calls that may fail, such as peer access. Tests check errors of the API themselves.
    options = ["--error-exitcode", str(FOUND), "--report-api-errors", "no", "--target-processes", "application-only"]
    files = [str(TESTS / name) for name in one.files]
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", one.which, "--timeout", "0", *files]
    return [sanitizer, *one.options, *options, *pytest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PASSES)
    given = parser.parse_args()
    sanitizer = find_sanitizer()
    if sanitizer is None:
        sys.exit(
            "error: compute-sanitizer was not found. It is part of the CUDA toolkit: install it, or set CUDA_HOME."
        )
    if not has_gpu():
        sys.exit("error: torch finds no CUDA GPU. These tests run on a GPU only.")
    bad = []
    for name in [given.only] if given.only else PASSES:
        print(f"{name}: {' '.join(PASSES[name].options)}", flush=True)
        code = subprocess.run(
            command(sanitizer, PASSES[name]), env={**os.environ, **PASSES[name].environment}, check=False
        ).returncode
        bad += [f"{name}: {'errors of the sanitizer' if code == FOUND else f'exit code {code}'}"] if code else []
    sys.exit("\n".join(["error:", *bad]) if bad else 0)


if __name__ == "__main__":
    main()
