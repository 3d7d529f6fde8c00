# SPDX-License-Identifier: Apache-2.0
"""Runs every test in parts, and starts again where it stopped: a part that passed is not run twice on the same code.

python tests/run_parts.py            all parts
python tests/run_parts.py --list     what there is and what has passed
python tests/run_parts.py --fresh    forget what has passed
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from twinflow import native
from twinflow.rules import RULES

ROOT = Path(__file__).parents[1]
DONE = ROOT / "build" / "test-all"
ROOT_FILES = ("CMakeLists.txt", "pyproject.toml", "constraints.txt", "README.md", "Makefile")
TWIN_FILES = ("exact", "delayed", "accumulation", "any", "traps", "hf", "trainer")
TWIN = [f"tests/unit/test_twin_{name}.py" for name in TWIN_FILES]
# Matrices that take long enough for parts of their own.
KERNELS, RATIO, BACKGROUND = (f"tests/unit/test_{name}.py" for name in ("kernels", "twin_ratio", "background_save"))
ZOO = "tests/unit/test_zoo.py"
GPU = [f"tests/unit/test_gpu_{name}.py" for name in ("update", "collect", "packing")]
ATTENTION = [f"tests/unit/test_attention_{name}.py" for name in ("triton", "tiles")]
AS_TORCH = "tests/unit/test_as_torch.py"
NAMED = [KERNELS, AS_TORCH, *TWIN, RATIO, BACKGROUND, *GPU, *ATTENTION, ZOO]
PARTS = {
    "quick": ["-m", "not slow and not matrix"],
    "slow": ["-m", "slow and not gpu"],
    **{f"kernels-{rule}": ["-m", "matrix", KERNELS, "-k", f"{rule}-"] for rule in RULES},
    "kernels-others": ["-m", "matrix", KERNELS, "-k", " and ".join(f"not {rule}-" for rule in RULES)],
    **{f"twin-{rule}": ["-m", "matrix", TWIN[0], "-k", f"every_combination and {rule}-"] for rule in RULES},
    "twin-others": ["-m", "matrix", *TWIN, "-k", "not every_combination"],
    "ratio": ["-m", "matrix", RATIO],
    **{f"as-torch-{kind}": ["-m", "matrix", AS_TORCH, "-k", f"{kind}-"] for kind in ("read", "write", "loop")},
    "dist": ["-m", "matrix", "tests/dist"],
    "background": ["-m", "matrix", BACKGROUND],
    "gpu-update": ["-m", "matrix", *GPU],
    "attention": ["-m", "matrix", *ATTENTION],
    "zoo": ["-m", "matrix", ZOO],
    "others": ["-m", "matrix", "tests/unit", *(f"--ignore={file}" for file in NAMED)],
}


def code_hash() -> str:
    """Of all that decides whether a part passes: sources, texts that tests read, build, versions, instruction sets."""
    digest = hashlib.sha256(repr((platform.python_version(), torch.__version__, native.isa_names())).encode())
    folders = ("src", "csrc", "tests", "docs", "examples", "benchmarks")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    sources = [path for path in found if path.is_file() and path.suffix in {".py", ".cpp", ".h", ".md"}]
    for path in sorted([*sources, *(ROOT / name for name in ROOT_FILES)]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    DONE.mkdir(parents=True, exist_ok=True)
    stamp = code_hash()
    if "--fresh" in sys.argv:
        for file in DONE.glob("*.ok"):
            file.unlink()
    marks = {part: DONE / f"{part}-{stamp}.ok" for part in PARTS}
    if "--list" in sys.argv:
        for part, mark in marks.items():
            print(f"{part:20} {'passed' if mark.exists() else 'to do'}")
        return 0
    for number, (part, arguments) in enumerate(PARTS.items(), 1):
        if marks[part].exists():
            print(f"[{number}/{len(PARTS)}] {part}: passed before, on the same code", flush=True)
            continue
        print(f"[{number}/{len(PARTS)}] {part}: pytest {' '.join(arguments)}", flush=True)
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=ROOT, check=False)
        if result.returncode != 0:
            print(f"{part} failed; `make test-all` continues from here")
            return result.returncode
        marks[part].write_text(f"{time.perf_counter() - start:.0f} s\n")
    print(f"all {len(PARTS)} parts passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
